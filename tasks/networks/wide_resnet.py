"""Wide residual networks of the semantic anomalies paper: pictures (B, 3, H, W) in, features out.

Rules 5 and 11 of docs/semantic.md. A first convolution to `width`, then groups of pre-activation
blocks; the LAST block of groups 1 and 2 already doubles the width, and every group but the first
halves the picture. After the last group: norm, ReLU, mean over the picture. A block's shortcut is
the identity, or a 1 x 1 convolution of its raw input where the shape changes.

Channels lie last in memory, in the pictures and in the weights: a CPU computes a step in 0.6 to 0.8
of the time then (benchmarks/channels_last.py), and a GPU's tensor cores want them so.

`task` picks one of several batch norms (conditional batch norm): 0 classes, 1 auxiliary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from schemas.config import Settings
from tasks.networks.base import Network

if TYPE_CHECKING:
    import torch
    from torch import nn

# Groups whose last block doubles the width.
DOUBLING = (1, 2)
CLASSES, AUXILIARY = 0, 1
# What the small networks have in common; patches of their pictures stand 6 x 6.
SMALL = {"width": 16, "blocks": 1, "dropout": 0.0, "pooling": "max", "norm_batch": None}
SMALL_CPC = {"margin": 1, "context": 64, "layers": 1, "batch_size": 8}
# What CPC's network and the classifier that it is compared with have in common: lighter, and with
# norms over the whole batch whose running statistics keep a tenth of the old.
LIGHT = {
    "stem_stride": 2,
    "padding": "symmetric",
    "tasks": 2,
    "norm_batch": None,
    "norm_momentum": 0.9,
}


class NetworkSettings(Settings):
    """Shape of a network; defaults are the paper's for CIFAR-10."""

    width: int = Field(160, ge=1)
    """Channels of the first convolution and of the first blocks (the code's DIM)."""
    groups: int = Field(3, ge=1)
    """Groups of blocks; each but the first halves the picture."""
    blocks: int = Field(4, ge=1)
    """Blocks in each group."""
    dropout: float = Field(0.3, ge=0, lt=1)
    """Share dropped between the two convolutions of a block."""
    stem: Literal[1, 3, 5, 7] = 3
    """Side of the first convolution's kernel."""
    stem_stride: int = Field(1, ge=1)
    """Stride of the first convolution; 2 with CPC."""
    stem_bias: bool = True
    """The first convolution has a bias; not on ImageNet."""
    pooling: Literal["none", "average", "max"] = "none"
    """3 x 3 pooling of stride 2 after the first convolution: average (paper) or max (code)."""
    padding: Literal["zeros", "symmetric"] = "zeros"
    """Beyond the edge: zeros, or the picture mirrored with its edge (CPC)."""
    tasks: int = Field(1, ge=1, le=2)
    """Batch norms at each place of the shared groups; 2 keeps the auxiliary task apart (CPC)."""
    shared_groups: int = Field(3, ge=1)
    """Groups that have a batch norm for each task, where tasks is 2."""
    norm_batch: int | None = Field(128, ge=1)
    """Pictures that a norm takes together in training, as each GPU did; none: the whole batch."""
    norm_momentum: float = Field(0.1, gt=0, le=1)
    """Share of a batch in the running statistics; 0.9 in CPC's code."""


class WideResNet(Network):
    """Subclasses name themselves, their presets, and how models are trained on them."""

    version: ClassVar[int] = 3
    modality: ClassVar[str] = "image"
    configuration: ClassVar[type[Settings]] = NetworkSettings
    trained: ClassVar[Mapping[str, Mapping[str, Any]]]
    """By preset, what `training` gives."""

    @classmethod
    def training(cls, preset: str) -> Mapping[str, Any]:
        return cls.trained.get(preset, {})

    def widths(self) -> list[list[int]]:
        """Channels that leave each block, by group."""
        width, out = self.settings.width, []
        for group in range(1, self.settings.groups + 1):
            last = width * 2 if group in DOUBLING else width
            out.append([width] * (self.settings.blocks - 1) + [last])
            width = last
        return out

    @property
    def width(self) -> int:
        return self.widths()[-1][-1]

    @property
    def shared_width(self) -> int:
        """Channels that leave the shared groups."""
        return self.widths()[: self.settings.shared_groups][-1][-1]

    def build(self) -> nn.ModuleDict:
        """`stem`, `groups` and `norm`."""
        from torch import nn

        settings = self.settings
        stem = nn.Conv2d(
            3,
            settings.width,
            settings.stem,
            settings.stem_stride,
            padding=0 if settings.padding == "symmetric" else settings.stem // 2,
            bias=settings.stem_bias,
        )
        groups, inside = nn.ModuleList(), settings.width
        for number, outside in enumerate(self.widths(), 1):
            tasks = settings.tasks if number <= settings.shared_groups else 1
            group = nn.ModuleList()
            for place, width in enumerate(outside):
                stride = 2 if number > 1 and place == 0 else 1
                group.append(self._block(inside, width, stride, tasks))
                inside = width
            groups.append(group)
        tasks = settings.tasks if settings.groups <= settings.shared_groups else 1
        return nn.ModuleDict({"stem": stem, "groups": groups, "norm": self.norms(inside, tasks)})

    def norms(self, channels: int, tasks: int) -> nn.ModuleList:
        """A batch norm for each task: separate gains, offsets and running statistics."""
        from torch import nn

        momentum = self.settings.norm_momentum
        return nn.ModuleList(nn.BatchNorm2d(channels, momentum=momentum) for _ in range(tasks))

    def initialise(self) -> None:
        """The code's initial weights, uniform: He in the blocks, Glorot elsewhere."""
        from torch import nn

        for name, layer in self.layers.named_modules():
            if isinstance(layer, nn.Conv2d) and name.endswith(("conv1", "conv2")):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            elif isinstance(layer, nn.Conv2d):
                glorot(layer)

    def encode(self, samples: torch.Tensor, task: int = CLASSES) -> torch.Tensor:
        """Features (B, D): the mean over the picture after the last norm and ReLU."""
        hidden = self.trunk(samples, task, self.settings.groups)
        return self.pooled(self.layers["norm"], hidden, task)

    def pooled(self, norm: nn.ModuleList, hidden: torch.Tensor, task: int) -> torch.Tensor:
        """Norm, ReLU, mean over the picture."""
        return self.normed(norm, hidden, task).relu().mean((2, 3))

    def normed(self, norm: nn.ModuleList, hidden: torch.Tensor, task: int) -> torch.Tensor:
        """By the norm of the task; in training, parts of `norm_batch` or more pictures each alone.

        Each part moves the running statistics in turn, as GPUs do that share a batch.
        """
        import torch

        layer, size = norm[task if len(norm) > 1 else CLASSES], self.settings.norm_batch
        parts = len(hidden) // size if layer.training and size else 1
        if parts < 2:
            return layer(hidden)
        return torch.cat([layer(part) for part in hidden.tensor_split(parts)])

    def trunk(self, pictures: torch.Tensor, task: int, groups: int) -> torch.Tensor:
        """What leaves the first `groups` groups."""
        import torch

        pictures = pictures.contiguous(memory_format=torch.channels_last)
        hidden = self._pooled_stem(self._convolved(self.layers["stem"], pictures))
        for group in self.layers["groups"][:groups]:
            for block in group:
                hidden = self._through(block, hidden, task)
        return hidden

    def _block(self, inside: int, outside: int, stride: int, tasks: int) -> nn.ModuleDict:
        from torch import nn

        padding = 0 if self.settings.padding == "symmetric" else 1
        layers = {
            "norm1": self.norms(inside, tasks),
            "conv1": nn.Conv2d(inside, outside, 3, stride, padding, bias=False),
            "norm2": self.norms(outside, tasks),
            "dropout": nn.Dropout(self.settings.dropout),
            "conv2": nn.Conv2d(outside, outside, 3, 1, padding, bias=False),
        }
        if inside != outside or stride != 1:
            layers["shortcut"] = nn.Conv2d(inside, outside, 1, stride, bias=False)
        return nn.ModuleDict(layers)

    def _through(self, block: Any, hidden: torch.Tensor, task: int) -> torch.Tensor:
        """A block as `_block` makes it."""
        passed = block["shortcut"](hidden) if "shortcut" in block else hidden
        inner = self.normed(block["norm1"], hidden, task).relu()
        inner = self._convolved(block["conv1"], inner)
        inner = block["dropout"](self.normed(block["norm2"], inner, task).relu())
        return passed + self._convolved(block["conv2"], inner)

    def _convolved(self, layer: nn.Conv2d, pictures: torch.Tensor) -> torch.Tensor:
        if self.settings.padding == "symmetric":
            pictures = mirrored(pictures, layer.kernel_size[0] // 2)
        return layer(pictures)

    def _pooled_stem(self, hidden: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional

        if self.settings.pooling == "none":
            return hidden
        margin = 1
        if self.settings.padding == "symmetric":
            hidden, margin = mirrored(hidden, 1), 0
        if self.settings.pooling == "max":
            return functional.max_pool2d(hidden, 3, 2, margin)
        return functional.avg_pool2d(hidden, 3, 2, margin, count_include_pad=False)


def glorot(layer: nn.Conv2d | nn.Linear) -> None:
    """Uniform weights by Glorot, offsets of zero."""
    from torch import nn

    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def mirrored(pictures: torch.Tensor, margin: int) -> torch.Tensor:
    """Pad by `margin` on all sides, the edge repeated first (torch's reflect leaves it out)."""
    import torch

    if not margin:
        return pictures
    for axis in (2, 3):
        side = pictures.shape[axis]
        first, last = pictures.narrow(axis, 0, margin), pictures.narrow(axis, side - margin, margin)
        pictures = torch.cat([first.flip(axis), pictures, last.flip(axis)], axis)
    return pictures
