"""TimeSformer with divided space-time attention: the second of KOWL-718's two clip networks.

uint8 clips (N, frames, 224, 224, 3), RGB, enter (`pass_views` of tasks/models/clips.py); the class
token after the last norm leaves, 768 values (KOWL-718 section 5.1; Bertasius 2021, section 3).
Plain torch around the attention of vit.py, so that transformers is no dependency. Two kinds of
files fit:

- FAIR's TimeSformer_divST_8x32_224_K400.pyth (`model_state`, names with `model.` before them),
- Hugging Face's timesformer-base-finetuned-k400 (model.safetensors or pytorch_model.bin).

For another number of frames than the file's, each frame takes the time embedding of the nearest one
as in FAIR's code: the release puts 300 frames through the network of 8 in this way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from schemas.errors import ConfigError, SourceError
from tasks.features.checkpoints import fill, read_state
from tasks.features.clips import ClipNetwork, require_random
from tasks.features.vit import Attention, Mlp, PatchEmbed
from tasks.learning.devices import seeded

WANTED = (
    "TimeSformer of FAIR (TimeSformer_divST_8x32_224_K400.pyth) or of Hugging Face "
    "(timesformer-base-finetuned-k400, model.safetensors)"
)
FRAMES = 8

# Our names are FAIR's without its prefix; this is what Hugging Face calls the same.
HUGGING_FACE = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "time_embed": "embeddings.time_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
    "norm1": "layernorm_before",
    "attn.qkv": "attention.attention.qkv",
    "attn.proj": "attention.output.dense",
    "temporal_norm1": "temporal_layernorm",
    "temporal_attn.qkv": "temporal_attention.attention.qkv",
    "temporal_attn.proj": "temporal_attention.output.dense",
    "temporal_fc": "temporal_dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


class Layout(NamedTuple):
    """How a kind of file names its tensors; `block` tells it from the others."""

    block: str
    prefix: str
    head: str
    hugging_face: bool


LAYOUTS = (
    Layout("model.blocks.", "model.", "model.head", False),
    Layout("blocks.", "", "head", False),
    Layout("timesformer.encoder.", "timesformer.", "classifier", True),
    # Hugging Face's network alone, without a classifier.
    Layout("encoder.layer.", "", "", True),
)


@dataclass(frozen=True)
class TimesformerSize:
    """The defaults are those of the base network."""

    side: int = 224
    """Height and width of a frame."""
    patch: int = 16
    """Height and width of a patch."""
    width: int = 768
    """Values of a token."""
    depth: int = 12
    """Blocks."""
    heads: int = 12
    """Attention heads."""


class Block(nn.Module):
    """Attention over time at each place, then over the places of each frame, then the perceptron.

    The class token takes part in each frame; what the frames say to it is averaged.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.temporal_norm1 = nn.LayerNorm(width, eps=1e-6)
        self.temporal_attn = Attention(width, heads)
        self.temporal_fc = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, 4 * width)

    def forward(
        self, token: torch.Tensor, patches: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, 1, width) and (N, frames, places, width)."""
        count, frames, places, width = patches.shape
        over_time = patches.transpose(1, 2).reshape(count * places, frames, width)
        moved = self.temporal_fc(self.temporal_attn(self.temporal_norm1(over_time)))
        patches = patches + moved.view(count, places, frames, width).transpose(1, 2)

        in_frame = torch.cat([token[:, None].expand(-1, frames, -1, -1), patches], 2)
        seen = self.attn(self.norm1(in_frame.view(count * frames, 1 + places, width)))
        seen = seen.view(count, frames, 1 + places, width)
        token = token + seen[:, :, 0].mean(1, keepdim=True)
        patches = patches + seen[:, :, 1:]
        return token + self.mlp(self.norm2(token)), patches + self.mlp(self.norm2(patches))


class TimeSformer(ClipNetwork):
    """`classes` 0: without the classifier."""

    def __init__(
        self, classes: int = 400, frames: int = FRAMES, size: TimesformerSize | None = None
    ) -> None:
        super().__init__()
        size = size or TimesformerSize()
        width = size.width
        if frames < 1 or size.side % size.patch or width % size.heads:
            raise ConfigError(
                f"TimeSformer of {frames} frames, side {size.side}, patch {size.patch}, width "
                f"{width}, {size.heads} heads: expected at least one frame, a side that is a "
                "multiple of the patch, and a width that is a multiple of the heads"
            )
        self.dim, self.frames, self.side = width, frames, size.side
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size.side // size.patch) ** 2, width))
        self.time_embed = nn.Parameter(torch.zeros(1, frames, width))
        self.patch_embed = PatchEmbed(size.patch, width)
        self.blocks = nn.ModuleList(Block(width, size.heads) for _ in range(size.depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes) if classes else None

    def features(self, clips: torch.Tensor) -> torch.Tensor:
        """(N, 3, frames, side, side) to (N, dim)."""
        pictures = self.checked(clips).transpose(1, 2).flatten(0, 1).contiguous()
        patches = self.patch_embed(pictures).flatten(2).transpose(1, 2)
        patches = patches.reshape(len(clips), self.frames, *patches.shape[1:])
        patches = patches + self.pos_embed[:, None, 1:] + self.time_embed[:, :, None]
        token = (self.cls_token + self.pos_embed[:, :1]).expand(len(clips), -1, -1)
        for block in self.blocks:
            token, patches = block(token, patches)
        return self.norm(token)[:, 0]

    @property
    def classifier(self) -> nn.Linear | None:
        return self.head

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, before the softmax."""
        if self.head is None:
            raise ConfigError("this TimeSformer was read from a file without a classifier")
        return self.head(self.features(clips))


def load_timesformer(
    checkpoint: Path | None,
    frames: int = FRAMES,
    seed: int = 0,
    *,
    allow_random: bool = False,
    size: TimesformerSize | None = None,
) -> TimeSformer:
    """The network for use only, with the weights of `checkpoint` or random ones from `seed`."""
    if checkpoint is None:
        require_random("TimeSformer", WANTED, allow_random)
        with seeded([seed], "cpu"):
            network = TimeSformer(frames=frames, size=size)
            _randomise(network)
        network.record = f"random weights, seed {seed}"
        return network.requires_grad_(False).eval()
    file_state, record = read_state(checkpoint, WANTED)
    layout = _layout(file_state, checkpoint)
    classes = 0
    if layout.head:
        scores = file_state.get(f"{layout.head}.bias")
        classes = 400 if scores is None else scores.numel()
    # On `meta` nothing is drawn.
    with torch.device("meta"):
        network = TimeSformer(classes, frames, size)
    names = {name: theirs(name, layout) for name in network.state_dict()}
    time = names["time_embed"]
    if time in file_state:
        file_state = {**file_state, time: stretched(file_state[time], frames)}
    fill(network, file_state, names, checkpoint)
    network.record = record
    return network.requires_grad_(False).eval()


def stretched(embedding: torch.Tensor, frames: int) -> torch.Tensor:
    """Time embeddings (1, n, width) for other frames: frame i takes that of floor(i n / frames),
    with torch's rounding, as FAIR's code."""
    if embedding.ndim != 3 or embedding.shape[1] == frames:
        return embedding
    nearest = functional.interpolate(embedding.transpose(1, 2), frames, mode="nearest")
    return nearest.transpose(1, 2).contiguous()


def theirs(name: str, layout: Layout) -> str:
    """What a file of this layout calls our tensor `name`."""
    if name.startswith("head."):
        return f"{layout.head}.{name.removeprefix('head.')}"
    if not layout.hugging_face:
        return layout.prefix + name
    if name in HUGGING_FACE:
        return layout.prefix + HUGGING_FACE[name]
    layer, _, tensor = name.rpartition(".")
    place = layout.prefix
    if layer.startswith("blocks."):
        _, block, layer = layer.split(".", 2)
        place += f"encoder.layer.{block}."
    return f"{place}{HUGGING_FACE[layer]}.{tensor}"


def _layout(state: Mapping[str, torch.Tensor], path: Path) -> Layout:
    for layout in LAYOUTS:
        if any(name.startswith(layout.block) for name in state):
            return layout
    raise SourceError(
        f"weights file {path} holds {', '.join(sorted(state)[:3])}, ..., which is not a known "
        f"layout; name {WANTED}"
    )


def _randomise(network: TimeSformer) -> None:
    """The deviation 0.02 that FAIR starts from, at its width; narrower networks need more. Nothing
    is left at zero: FAIR's start would take no notice of the order of the frames."""
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, std=0.02 * (768 / network.dim) ** 0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
