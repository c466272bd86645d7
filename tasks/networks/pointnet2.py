"""PointNet++ with multi-scale grouping (Qi et al. 2017) as 3DOS sizes it (3DOS rule 9).

Clouds (B, P, 3) to (B, last width): two set abstractions (farthest points as centres, balls of
three radii, an MLP and the largest value of each) and one over all that is left. Coordinates only.
The order of the points matters: farthest points start at index 0, balls take members by index.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.networks.base import Network
from tasks.networks.geometry import farthest_points, gather_rows, in_ball

if TYPE_CHECKING:
    import torch
    from torch import nn


# 3DOS trains other networks than DGCNN so (3DOS rule 11).
ADAM = {"optimizer": "adam", "learning_rate": 1e-3, "final_rate": 1e-5}


class Scale(Settings):
    """One radius of a set abstraction."""

    radius: float = Field(gt=0)
    """Radius of the ball."""
    members: int = Field(ge=1)
    """Points taken of a ball."""
    widths: tuple[int, ...] = Field(min_length=1)
    """Channels of the MLP."""


class Abstraction(Settings):
    """Centres and the balls around them."""

    centers: int = Field(ge=1)
    """Farthest points chosen; all, if there are fewer."""
    scales: tuple[Scale, ...] = Field(min_length=1)
    """The radii."""


def _scales(*scales: tuple[float, int, tuple[int, ...]]) -> tuple[Scale, ...]:
    return tuple(Scale(radius=r, members=n, widths=w) for r, n, w in scales)


class Configuration(Settings):
    """Sizes of the network."""

    abstractions: tuple[Abstraction, ...] = (
        Abstraction(
            centers=512,
            scales=_scales(
                (0.1, 16, (32, 32, 64)), (0.2, 32, (64, 64, 128)), (0.4, 128, (64, 96, 128))
            ),
        ),
        Abstraction(
            centers=128,
            scales=_scales(
                (0.2, 32, (64, 64, 128)), (0.4, 64, (128, 128, 256)), (0.8, 128, (128, 128, 256))
            ),
        ),
    )
    """Set abstractions, finest first."""
    last: tuple[int, ...] = Field((256, 512, 1024), min_length=1)
    """Channels of the MLP over all centres."""


class PointNet2(Network):
    name: ClassVar[str] = "pointnet2"
    configuration: ClassVar[type[Settings]] = Configuration
    modality: ClassVar[str] = "cloud"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {
            "abstractions": (
                Abstraction(centers=64, scales=_scales((0.2, 8, (16, 32)), (0.4, 16, (16, 32)))),
                Abstraction(centers=16, scales=_scales((0.4, 8, (32, 64)), (0.8, 16, (32, 64)))),
            ),
            "last": (64, 128),
        },
    }

    @classmethod
    def training(cls, preset: str) -> Mapping[str, Any]:
        return ADAM

    @property
    def width(self) -> int:
        return self.settings.last[-1]

    def build(self) -> nn.ModuleDict:
        from torch import nn

        inside, abstractions = 0, []
        for abstraction in self.settings.abstractions:
            scales = [mlp((inside + 3, *scale.widths)) for scale in abstraction.scales]
            abstractions.append(nn.ModuleList(scales))
            inside = sum(scale.widths[-1] for scale in abstraction.scales)
        last = mlp((inside + 3, *self.settings.last))
        return nn.ModuleDict({"abstractions": nn.ModuleList(abstractions), "last": last})

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        import torch

        layers, abstractions = self.layers, self.settings.abstractions
        points, values = samples, samples[..., :0]
        for scales, sizes in zip(layers["abstractions"], abstractions, strict=True):
            center_places = farthest_points(points, min(sizes.centers, points.shape[1]))
            centers = gather_rows(points, center_places)
            parts = []
            for layer, scale in zip(scales, sizes.scales, strict=True):
                members = in_ball(points, centers, scale.radius, scale.members)
                parts.append(ball_features(layer, points, values, centers, members))
            points, values = centers, torch.cat(parts, 2)
        return through(layers["last"], torch.cat([points, values], 2)).amax(1)


def ball_features(
    layers: nn.Sequential,
    points: torch.Tensor,
    values: torch.Tensor,
    centers: torch.Tensor,
    members: torch.Tensor,
) -> torch.Tensor:
    """Largest outputs of the MLP over [x_j - c, f_j] of the members j of each ball: (B, S, C).

    The first layer is linear, so it is applied once to each point and each centre, not to each
    member.
    """
    import torch
    from torch.nn import functional

    first: Any = layers[0]
    placed = functional.linear(torch.cat([points, values], 2), first.weight, first.bias)
    moved = functional.linear(centers, first.weight[:, :3])
    edges = gather_rows(placed, members) - moved[:, :, None]
    return through(layers[1:], edges).amax(2)


def through(layers: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Layers of rows (N, C) on (..., C)."""
    out = layers(values.reshape(-1, values.shape[-1]))
    return out.view(*values.shape[:-1], -1)


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear without bias (a 1x1 convolution), norm and ReLU for each width after the first."""
    from torch import nn

    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside, bias=False), nn.BatchNorm1d(outside), nn.ReLU()]
    return nn.Sequential(*layers)
