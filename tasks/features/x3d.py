"""X3D-M in plain torch, from a public checkpoint: the first of KOWL-718's two clip networks.

uint8 clips (N, 16, 224, 224, 3), RGB, enter; 2048 features a clip leave (KOWL-718 section 5.1;
Feichtenhofer 2020, table 1: four stages of 3, 5, 11 and 7 blocks, widths 24 to 192). The feature is
the activation after the head's first linear layer and its ReLU: the release returns that layer's
output, on which its ReLU has worked in place. Three kinds of files fit, each by its own names:

- PySlowFast's x3d_m.pyth and pytorchvideo's X3D_M.pyth (`model_state`),
- X3D-Multigrid's x3d_multigrid_kinetics_fb_pretrained.pt (`model_state_dict`), the file that the
  release names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from schemas.errors import SourceError
from tasks.features.checkpoints import COUNTER, NAMED_AT_MOST, fill, read_state
from tasks.features.clips import ClipNetwork, require_random
from tasks.learning.devices import seeded

WANTED = (
    "X3D-M of PySlowFast (x3d_m.pyth), of pytorchvideo (X3D_M.pyth) or of X3D-Multigrid "
    "(x3d_multigrid_kinetics_fb_pretrained.pt)"
)


@dataclass(frozen=True)
class X3DSize:
    """The defaults are X3D-M."""

    widths: tuple[int, ...] = (24, 24, 48, 96, 192)
    """Channels of the stem and of each stage."""
    depths: tuple[int, ...] = (3, 5, 11, 7)
    """Blocks of each stage."""
    dim: int = 2048
    """Features."""
    frames: int = 16
    """Frames of a clip."""
    side: int = 224
    """Height and width of a frame."""


EXPANSION = 2.25
POOLED = 7
"""Side of the last maps of pictures of 224 pixels, which the weights were trained on."""
SQUEEZE = 0.0625

# Our layers and what the three kinds of files call them.
LAYERS = {
    "stem.space": ("s1.pathway0_stem.conv_xy", "blocks.0.conv.conv_t", "conv1_s"),
    "stem.time": ("s1.pathway0_stem.conv", "blocks.0.conv.conv_xy", "conv1_t"),
    "stem.norm": ("s1.pathway0_stem.bn", "blocks.0.norm", "bn1"),
    "shortcut": ("branch1", "branch1_conv", "downsample.0"),
    "shortcut_norm": ("branch1_bn", "branch1_norm", "downsample.1"),
    "a": ("branch2.a", "branch2.conv_a", "conv1"),
    "a_norm": ("branch2.a_bn", "branch2.norm_a", "bn1"),
    "b": ("branch2.b", "branch2.conv_b", "conv2"),
    "b_norm": ("branch2.b_bn", "branch2.norm_b.0", "bn2"),
    "squeeze.reduce": ("branch2.se.fc1", "branch2.norm_b.1.block.0", "fc1"),
    "squeeze.expand": ("branch2.se.fc2", "branch2.norm_b.1.block.2", "fc2"),
    "c": ("branch2.c", "branch2.conv_c", "conv3"),
    "c_norm": ("branch2.c_bn", "branch2.norm_c", "bn3"),
    "head.conv": ("head.conv_5", "blocks.5.pool.pre_conv", "conv5"),
    "head.norm": ("head.conv_5_bn", "blocks.5.pool.pre_norm", "bn5"),
    "head.linear": ("head.lin_5", "blocks.5.pool.post_conv", "fc1"),
    "head.classes": ("head.projection", "blocks.5.proj", "fc2"),
}
BLOCKS = ("s{two}.pathway0_res{block}", "blocks.{one}.res_blocks.{block}", "layer{one}.{block}")
PYSLOWFAST, PYTORCHVIDEO, MULTIGRID = range(3)


# ---------------------------------------------------------------- the network


class SqueezeExcitation(nn.Module):
    """Scale each channel by what all channels are on average."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = squeezed(channels)
        self.reduce = nn.Conv3d(channels, narrow, 1)
        self.expand = nn.Conv3d(narrow, channels, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mean = values.mean((2, 3, 4), keepdim=True)
        return values * torch.sigmoid(self.expand(functional.relu(self.reduce(mean))))


def squeezed(channels: int) -> int:
    """A sixteenth of the channels to the nearest multiple of 8, never a tenth less."""
    exact = channels * SQUEEZE
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


class Stem(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(3, width, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)
        self.time = nn.Conv3d(width, width, (5, 1, 1), 1, (2, 0, 0), groups=width, bias=False)
        self.norm = nn.BatchNorm3d(width)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.norm(self.time(self.space(clips))))


class Block(nn.Module):
    """1x1x1 up, 3x3x3 for each channel alone, 1x1x1 down, beside a shortcut. The first of a stage
    (`number` 0) halves height and width; every other one has squeeze and excitation."""

    def __init__(self, inside: int, outside: int, number: int, shortcut_norm: bool = True) -> None:
        super().__init__()
        inner = int(EXPANSION * outside)
        strides = (1, 2, 2) if number == 0 else (1, 1, 1)
        self.a = nn.Conv3d(inside, inner, 1, bias=False)
        self.a_norm = nn.BatchNorm3d(inner)
        self.b = nn.Conv3d(inner, inner, 3, strides, padding=1, groups=inner, bias=False)
        self.b_norm = nn.BatchNorm3d(inner)
        self.squeeze = SqueezeExcitation(inner) if number % 2 == 0 else nn.Identity()
        self.c = nn.Conv3d(inner, outside, 1, bias=False)
        self.c_norm = nn.BatchNorm3d(outside)
        self.shortcut: nn.Module = nn.Identity()
        self.shortcut_norm: nn.Module = nn.Identity()
        if number == 0:
            self.shortcut = nn.Conv3d(inside, outside, 1, strides, bias=False)
            if shortcut_norm:
                self.shortcut_norm = nn.BatchNorm3d(outside)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        wide = functional.relu(self.a_norm(self.a(values)))
        wide = functional.silu(self.squeeze(self.b_norm(self.b(wide))))
        beside = self.shortcut_norm(self.shortcut(values))
        return functional.relu(beside + self.c_norm(self.c(wide)))


class Head(nn.Module):
    def __init__(self, width: int, dim: int, classes: int) -> None:
        super().__init__()
        inner = int(EXPANSION * width)
        self.conv = nn.Conv3d(width, inner, 1, bias=False)
        self.norm = nn.BatchNorm3d(inner)
        self.linear = nn.Conv3d(inner, dim, 1, bias=False)
        self.classes = nn.Linear(dim, classes)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Larger pictures than those of training are pooled at every place of that size, and the
        features of the places averaged."""
        wide = functional.relu(self.norm(self.conv(values)))
        if max(wide.shape[3:]) <= POOLED:
            pooled = wide.mean((2, 3, 4), keepdim=True)
        else:
            pooled = functional.avg_pool3d(wide, (wide.shape[2], POOLED, POOLED), stride=1)
        return functional.relu(self.linear(pooled)).mean((2, 3, 4))


class X3D(ClipNetwork):
    """`even_shortcut_norm`: a shortcut that halves the picture but keeps the width (the first) is
    normalised. So in PySlowFast and X3D-Multigrid, not so in pytorchvideo."""

    def __init__(
        self, classes: int = 400, size: X3DSize | None = None, *, even_shortcut_norm: bool = True
    ) -> None:
        super().__init__()
        size = size or X3DSize()
        self.dim, self.frames, self.side = size.dim, size.frames, size.side
        self.stem = Stem(size.widths[0])
        stages = []
        for inside, outside, depth in zip(
            size.widths[:-1], size.widths[1:], size.depths, strict=True
        ):
            first = Block(inside, outside, 0, even_shortcut_norm or inside != outside)
            rest = (Block(outside, outside, block) for block in range(1, depth))
            stages.append(nn.Sequential(first, *rest))
        self.stages = nn.Sequential(*stages)
        self.head = Head(size.widths[-1], size.dim, classes)

    def features(self, clips: torch.Tensor) -> torch.Tensor:
        """(N, 3, frames, side, side) to (N, dim)."""
        return self.head(self.stages(self.stem(self.checked(clips))))

    @property
    def classifier(self) -> nn.Linear:
        return self.head.classes

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, before the softmax."""
        return self.head.classes(self.features(clips))


def load_x3d(
    checkpoint: Path | None,
    seed: int = 0,
    *,
    allow_random: bool = False,
    size: X3DSize | None = None,
) -> X3D:
    """The network for use only, with the weights of `checkpoint` or random ones from `seed`."""
    if checkpoint is None:
        require_random("X3D-M", WANTED, allow_random)
        with seeded([seed], "cpu"):
            network = X3D(size=size)
            _randomise(network)
        network.record = f"random weights, seed {seed}"
        return network.requires_grad_(False).eval()
    state, record = read_state(checkpoint, WANTED)
    kind = _kind(state, checkpoint)
    file_state = _joined_norms(state) if kind == MULTIGRID else state
    file_state = {n: value for n, value in file_state.items() if not n.endswith(COUNTER)}
    scores = file_state.get(f"{LAYERS['head.classes'][kind]}.bias")
    # On `meta` nothing is drawn.
    with torch.device("meta"):
        network = X3D(
            400 if scores is None else scores.numel(),
            size,
            even_shortcut_norm=kind != PYTORCHVIDEO,
        )
    names = {n: theirs(n, kind) for n in network.state_dict() if not n.endswith(COUNTER)}
    fill(network, file_state, names, checkpoint)
    network.record = record
    return network.requires_grad_(False).eval()


def theirs(name: str, kind: int) -> str:
    """What a kind of file calls our tensor `name`."""
    layer, _, tensor = name.rpartition(".")
    if kind == MULTIGRID and tensor.startswith("running_"):
        tensor = f"split_bn.{tensor}"
    if not layer.startswith("stages."):
        return f"{LAYERS[layer][kind]}.{tensor}"
    _, stage, block, layer = layer.split(".", 3)
    place = BLOCKS[kind].format(one=int(stage) + 1, two=int(stage) + 2, block=block)
    return f"{place}.{LAYERS[layer][kind]}.{tensor}"


def _kind(state: Mapping[str, torch.Tensor], path: Path) -> int:
    for kind, block in enumerate(BLOCKS):
        start = block.format(one=1, two=2, block=0) + "."
        if any(name.startswith(start) for name in state):
            return kind
    raise SourceError(
        f"weights file {path} holds {', '.join(sorted(state)[:NAMED_AT_MOST])}, ..., which is not "
        f"a known layout; name {WANTED}"
    )


def _joined_norms(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """X3D-Multigrid keeps statistics of n parts of a batch, and the release joins them before use:
    those called `split_bn` count, those called `bn` are replaced by them."""
    joined = {name: value for name, value in state.items() if ".bn." not in name}
    for name, means in state.items():
        norm, suffix, _ = name.rpartition(".running_mean")
        variances = state.get(f"{norm}.running_var")
        weight = state.get(f"{norm.removesuffix('.split_bn')}.weight")
        if not suffix or weight is None or variances is None or means.shape != variances.shape:
            continue
        if means.numel() % weight.numel() == 0:
            parts = means.view(-1, weight.numel())
            mean = parts.mean(0)
            within = variances.view_as(parts).mean(0)
            joined[name] = mean
            joined[f"{norm}.running_var"] = within + (parts - mean).square().mean(0)
    return joined


def _randomise(network: X3D) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    for name, parameter in network.named_parameters():
        if name.endswith(".c_norm.weight"):
            # Norms that have seen no data do nothing; 26 sums of equals would grow without end.
            nn.init.constant_(parameter, 0.25)
