"""PointNeXt-S (Qian et al. 2022) for classification: clouds (B, P, 3) to (B, last width).

A linear stem, then stages that halve the points (farthest points), double the channels and take one
ball a centre: an MLP of two layers over [(x_j - c) / radius, f_j], the largest value, plus a
shortcut from the centre's own features; at last an MLP over all that is left. It was taken as the
modern network because one ball of 32 members a stage is far less work on a CPU than PointMLP's
residual blocks on every member of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.networks.base import Network
from tasks.networks.geometry import farthest_points, gather_rows, in_ball
from tasks.networks.pointnet2 import ADAM, ball_features, mlp, through

if TYPE_CHECKING:
    import torch
    from torch import nn


class Configuration(Settings):
    """Sizes of the network."""

    stem: int = Field(32, ge=1)
    """Channels of the stem; each stage doubles them."""
    stages: int = Field(4, ge=1)
    """Stages that halve the points."""
    radius: float = Field(0.15, gt=0)
    """Radius of the first stage's balls."""
    growth: float = Field(1.5, gt=0)
    """Factor of the radius from stage to stage."""
    members: int = Field(32, ge=1)
    """Points taken of a ball."""


class PointNext(Network):
    name: ClassVar[str] = "pointnext"
    configuration: ClassVar[type[Settings]] = Configuration
    modality: ClassVar[str] = "cloud"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {"stem": 16, "stages": 3, "radius": 0.25, "growth": 1.6, "members": 12},
    }

    @classmethod
    def training(cls, preset: str) -> Mapping[str, Any]:
        return ADAM

    @property
    def width(self) -> int:
        return self.settings.stem * 2**self.settings.stages

    def build(self) -> nn.ModuleDict:
        from torch import nn

        stem, stages = self.settings.stem, []
        for stage in range(self.settings.stages):
            inside = stem * 2**stage
            inner = mlp((inside + 3, inside, 2 * inside))
            # The shortcut is added before the last ReLU.
            layers = {"inner": inner[:-1], "shortcut": nn.Linear(inside, 2 * inside)}
            stages.append(nn.ModuleDict(layers))
        return nn.ModuleDict(
            {
                "stem": nn.Linear(3, stem),
                "stages": nn.ModuleList(stages),
                "last": mlp((self.width + 3, self.width, self.width)),
            }
        )

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        import torch
        from torch.nn import functional

        layers, settings = self.layers, self.settings
        points, values = samples, layers["stem"](samples)
        for number, layer in enumerate(layers["stages"]):
            radius = settings.radius * settings.growth**number
            center_places = farthest_points(points, max(1, points.shape[1] // 2), skip_origin=False)
            centers = gather_rows(points, center_places)
            members = in_ball(points, centers, radius, settings.members)
            inner = ball_features(
                layer["inner"], points / radius, values, centers / radius, members
            )
            shortcut = layer["shortcut"](gather_rows(values, center_places))
            points, values = centers, functional.relu(inner + shortcut)
        return through(layers["last"], torch.cat([points, values], 2)).amax(1)
