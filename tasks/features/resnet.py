"""Residual networks of pictures, in the shape that a file of weights tells.

Normalised pictures (N, 3, h, w) enter; the mean over the picture after the last group leaves. Two
kinds, each by the names of its files: those of CIFAR (He et al. 2016, 4.2: 3 x 3 stem, short cuts
without parameters, such as resnet20 to resnet110; or with a convolution) and those of ImageNet
(torchvision's resnet18 to resnet152, wide and with groups: 7 x 7 stem and a maximum). `fc` is the
last layer, where the file has one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from schemas.errors import SourceError
from tasks.features.images import IMAGENET_DEVIATION, IMAGENET_MEAN

LAST = ("fc", "linear")
SHORT_CUTS = ("downsample", "shortcut")


class Block(nn.Module):
    """Two 3 x 3 convolutions, or with `outer` 1 x 1, 3 x 3, 1 x 1, beside a short cut."""

    def __init__(
        self, inside: int, width: int, outer: int | None, stride: int, groups: int, learnt: bool
    ) -> None:
        super().__init__()
        self.stride, outside = stride, outer or width
        first, second = (3, stride), (3, 1)
        if outer is not None:
            first, second = (1, 1), (3, stride)
        self.conv1 = _convolution(inside, width, *first)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, *second, groups=groups)
        self.bn2 = nn.BatchNorm2d(width)
        if outer is not None:
            self.conv3 = _convolution(width, outer, 1, 1)
            self.bn3 = nn.BatchNorm2d(outer)
        self.padding = (outside - inside) // 2
        self.downsample: nn.Module | None = None
        if learnt:
            self.downsample = nn.Sequential(
                _convolution(inside, outside, 1, stride), nn.BatchNorm2d(outside)
            )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(values)))))
        if hasattr(self, "conv3"):
            inner = self.bn3(self.conv3(functional.relu(inner)))
        return functional.relu(inner + self.beside(values))

    def beside(self, values: torch.Tensor) -> torch.Tensor:
        """Without parameters every so many pixels, new channels are zero at both ends."""
        if self.downsample is not None:
            return self.downsample(values)
        if self.stride == 1 and not self.padding:
            return values
        thinned = values[:, :, :: self.stride, :: self.stride]
        return functional.pad(thinned, (0, 0, 0, 0, self.padding, self.padding))


def _convolution(inside: int, outside: int, side: int, stride: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, side, stride, side // 2, groups=groups, bias=False)


class ResNet(nn.Module):
    """`stem` is the width and the side of the first convolution; of each group there are the number
    of blocks, width, outer width (None: basic blocks), groups of channels, and whether the first
    short cut is learnt."""

    mean, deviation = IMAGENET_MEAN, IMAGENET_DEVIATION

    def __init__(
        self,
        stem: tuple[int, int],
        groups: Sequence[tuple[int, int, int | None, int, bool]],
        last: int,
    ) -> None:
        super().__init__()
        inside, side = stem
        self.large = side > 3
        self.side, self.shown = (224, 224 / 256) if self.large else (32, 1.0)
        self.conv1 = _convolution(3, inside, side, 2 if self.large else 1)
        self.bn1 = nn.BatchNorm2d(inside)
        self.names = [f"layer{number}" for number in range(1, len(groups) + 1)]
        for name, (depth, width, outer, parts, learnt) in zip(self.names, groups, strict=True):
            blocks = []
            for number in range(depth):
                stride = 2 if number == 0 and name != self.names[0] else 1
                blocks.append(Block(inside, width, outer, stride, parts, learnt and number == 0))
                inside = outer or width
            self.add_module(name, nn.Sequential(*blocks))
        self.width = inside
        self.fc = nn.Linear(inside, last) if last else None

    def embed(self, pictures: torch.Tensor) -> torch.Tensor:
        values = functional.relu(self.bn1(self.conv1(pictures)))
        if self.large:
            values = functional.max_pool2d(values, 3, 2, 1)
        for name in self.names:
            values = self.get_submodule(name)(values)
        return values.mean((2, 3))

    @property
    def last(self) -> nn.Linear | None:
        return self.fc

    @staticmethod
    def is_of(state: Mapping[str, torch.Tensor]) -> bool:
        return "conv1.weight" in state and "layer1.0.conv1.weight" in state

    @staticmethod
    def shape_of(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the constructor takes, as JSON, by the names and sizes of the tensors."""

        def size(name: str) -> torch.Size:
            if name not in state or state[name].ndim != 4:
                raise SourceError(f"{name} is missing or no convolution")
            return state[name].shape

        groups: list[list[Any]] = []
        while any(name.startswith(f"layer{len(groups) + 1}.") for name in state):
            layer = f"layer{len(groups) + 1}"
            numbers = {name.split(".")[1] for name in state if name.startswith(f"{layer}.")}
            wide = f"{layer}.0.conv3.weight" in state
            width = size(f"{layer}.0.conv2.weight")[0]
            parts = max(1, width // size(f"{layer}.0.conv2.weight")[1])
            outer = size(f"{layer}.0.conv3.weight")[0] if wide else None
            learnt = any(f"{layer}.0.{name}.0.weight" in state for name in SHORT_CUTS)
            groups.append([len(numbers), width, outer, parts, learnt])
        stem = size("conv1.weight")
        last = [state[f"{name}.bias"].numel() for name in LAST if f"{name}.bias" in state]
        return {"stem": [stem[0], stem[2]], "groups": groups, "last": last[0] if last else 0}

    @staticmethod
    def name_in(ours: str, state: Mapping[str, torch.Tensor]) -> str:
        """What the file calls our tensor `ours`."""
        if ours.startswith(f"{LAST[0]}.") and ours not in state:
            return ours.replace(LAST[0], LAST[1])
        if f".{SHORT_CUTS[0]}." in ours and ours not in state:
            return ours.replace(SHORT_CUTS[0], SHORT_CUTS[1])
        return ours
