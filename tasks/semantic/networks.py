"""Wide residual networks of the semantic anomalies paper: pictures (B, 3, H, W) in, features out.

Rules 5 and 11 of docs/semantic.md. A first convolution to `width`, then groups of pre-activation
blocks; the LAST block of groups 1 and 2 already doubles the width, and every group but the first
halves the picture. After the last group: norm, ReLU, mean over the picture, a linear layer. A
block's shortcut is the identity, or a 1 x 1 convolution of its raw input where the shape changes.

Layers are plain containers of torch's own modules, so that naming a network costs no import of
torch. `task` picks one of several batch norms (conditional batch norm): 0 classes, 1 auxiliary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from schemas.config import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

VERSION = 1
"""Raise it when the same settings and seed give another network."""
NAMES = ("cifar", "stl", "imagenet")
# Groups whose last block doubles the width.
DOUBLING = (1, 2)
CLASSES, AUXILIARY = 0, 1


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


def widths(settings: NetworkSettings) -> list[list[int]]:
    """Channels that leave each block, by group."""
    width, out = settings.width, []
    for group in range(1, settings.groups + 1):
        last = width * 2 if group in DOUBLING else width
        out.append([width] * (settings.blocks - 1) + [last])
        width = last
    return out


def features(settings: NetworkSettings) -> int:
    """Length of a feature row."""
    return widths(settings)[-1][-1]


def shared_width(settings: NetworkSettings) -> int:
    """Channels that leave the shared groups."""
    return widths(settings)[: settings.shared_groups][-1][-1]


def build(settings: NetworkSettings, classes: int) -> nn.ModuleDict:
    """`stem`, `groups`, `norm` and the linear layer `classes`, with the code's initial weights."""
    from torch import nn

    stem = nn.Conv2d(
        3,
        settings.width,
        settings.stem,
        settings.stem_stride,
        padding=0 if settings.padding == "symmetric" else settings.stem // 2,
        bias=settings.stem_bias,
    )
    groups, inside = nn.ModuleList(), settings.width
    for number, outside in enumerate(widths(settings), 1):
        tasks = settings.tasks if number <= settings.shared_groups else 1
        group = nn.ModuleList()
        for place, width in enumerate(outside):
            stride = 2 if number > 1 and place == 0 else 1
            group.append(_block(inside, width, stride, settings, tasks))
            inside = width
        groups.append(group)
    tasks = settings.tasks if settings.groups <= settings.shared_groups else 1
    layers = nn.ModuleDict(
        {
            "stem": stem,
            "groups": groups,
            "norm": norms(inside, tasks),
            "classes": nn.Linear(inside, classes),
        }
    )
    _initialise(layers)
    return layers


def norms(channels: int, tasks: int) -> nn.ModuleList:
    """A batch norm for each task: separate gains, offsets and running statistics."""
    from torch import nn

    return nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(tasks))


def encode(
    layers: nn.ModuleDict, settings: NetworkSettings, pictures: torch.Tensor, task: int = CLASSES
) -> torch.Tensor:
    """Features (B, D): the mean over the picture after the last norm and ReLU."""
    hidden = trunk(layers, settings, pictures, task, settings.groups)
    return pooled(layers["norm"], hidden, task)


def trunk(
    layers: nn.ModuleDict, settings: NetworkSettings, pictures: torch.Tensor, task: int, groups: int
) -> torch.Tensor:
    """What leaves the first `groups` groups."""
    # torch 2.13 corrupts memory in a strided convolution's backward pass on a permuted input.
    hidden = _pooling(_convolved(layers["stem"], settings, pictures.contiguous()), settings)
    for group in layers["groups"][:groups]:
        for block in group:
            hidden = _through(block, settings, hidden, task)
    return hidden


def pooled(norm: nn.ModuleList, hidden: torch.Tensor, task: int) -> torch.Tensor:
    """Norm, ReLU, mean over the picture."""
    return _of_task(norm, task)(hidden).relu().mean((2, 3))


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


def _block(
    inside: int, outside: int, stride: int, settings: NetworkSettings, tasks: int
) -> nn.ModuleDict:
    from torch import nn

    padding = 0 if settings.padding == "symmetric" else 1
    layers = {
        "norm1": norms(inside, tasks),
        "conv1": nn.Conv2d(inside, outside, 3, stride, padding, bias=False),
        "norm2": norms(outside, tasks),
        "dropout": nn.Dropout(settings.dropout),
        "conv2": nn.Conv2d(outside, outside, 3, 1, padding, bias=False),
    }
    if inside != outside or stride != 1:
        layers["shortcut"] = nn.Conv2d(inside, outside, 1, stride, bias=False)
    return nn.ModuleDict(layers)


def _through(
    block: nn.ModuleDict, settings: NetworkSettings, hidden: torch.Tensor, task: int
) -> torch.Tensor:
    passed = block["shortcut"](hidden) if "shortcut" in block else hidden
    inner = _of_task(block["norm1"], task)(hidden).relu()
    inner = _convolved(block["conv1"], settings, inner)
    inner = block["dropout"](_of_task(block["norm2"], task)(inner).relu())
    return passed + _convolved(block["conv2"], settings, inner)


def _of_task(norm: nn.ModuleList, task: int) -> nn.Module:
    return norm[task if len(norm) > 1 else CLASSES]


def _convolved(layer: nn.Conv2d, settings: NetworkSettings, pictures: torch.Tensor) -> torch.Tensor:
    if settings.padding == "symmetric":
        pictures = mirrored(pictures, layer.kernel_size[0] // 2)
    return layer(pictures)


def _pooling(hidden: torch.Tensor, settings: NetworkSettings) -> torch.Tensor:
    from torch.nn import functional

    if settings.pooling == "none":
        return hidden
    if settings.padding == "symmetric":
        hidden, margin = mirrored(hidden, 1), 0
    else:
        margin = 1
    if settings.pooling == "max":
        return functional.max_pool2d(hidden, 3, 2, margin)
    return functional.avg_pool2d(hidden, 3, 2, margin, count_include_pad=False)


def _initialise(layers: nn.ModuleDict) -> None:
    """Uniform: He in the blocks, Glorot in the stem, the shortcuts and the linear layer."""
    from torch import nn

    for name, layer in layers.named_modules():
        if isinstance(layer, nn.Conv2d) and name.endswith(("conv1", "conv2")):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
