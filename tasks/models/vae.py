"""A variational autoencoder of clouds of FoldingNet's kind (3DOS rule 11, "VAE").

Encoder: coordinates and local covariances, an MLP, two graph layers (largest values over the k
nearest points), global maximum, mean and log variance of a latent code. Decoder: a grid on the
sphere, folded twice. Loss = chamfer distance (sum of squares, both ways) + KL; novelty = chamfer
distance of the reconstruction from the mean code, features = mean code. The reference code's EMD
and feature-difference terms are left out: 3DOS uses the reconstruction alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.learning.trainer import Losses
from tasks.models.clouds import CloudModel, CloudSettings
from tasks.networks.geometry import gather_rows, nearest, nearest_other

if TYPE_CHECKING:
    import torch
    from torch import nn


class Configuration(CloudSettings):
    """Sizes of the layers, and the loss."""

    k: int = Field(16, ge=2)
    """Neighbours of a point, itself among them."""
    local: tuple[int, ...] = Field((64, 64, 64), min_length=1)
    """Channels of the MLP on points."""
    graph: tuple[int, int] = (128, 1024)
    """Channels of the graph layers."""
    latent: int = Field(512, ge=1)
    """Length of the code."""
    folding: int = Field(512, ge=1)
    """Units of the folding layers."""
    reconstruction_points: int = Field(2048, ge=1)
    """Points of a reconstruction."""
    divergence: float = Field(1.0, ge=0)
    """Weight of KL."""


_PLAIN = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "weight_decay": 1e-6,
    "augmentation": "none",
}


class Vae(CloudModel):
    name: ClassVar[str] = "vae"
    uses_network: ClassVar[bool] = False
    configuration: ClassVar[type[Configuration]] = Configuration
    gives: ClassVar[frozenset[str]] = frozenset({"features", "novelty"})
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            **_PLAIN,
            "final_rate": 1e-3,
            "epochs": 300,
            "batch_size": 100,
            "order": "shuffled",
            "points": 2048,
        },
        "small": {
            **_PLAIN,
            "k": 8,
            "local": (32, 32),
            "graph": (64, 128),
            "latent": 32,
            "folding": 64,
            "reconstruction_points": 256,
        },
    }

    def build(self) -> dict[str, nn.Module]:
        from torch import nn

        settings = self.settings
        first, second = settings.graph
        folds = [_fold(settings.latent + 3, settings.folding) for _ in range(2)]
        return {
            "local": _mlp((12, *settings.local)),
            "graph": nn.ModuleList(
                [nn.Linear(settings.local[-1], first), nn.Linear(first, second)]
            ),
            "code": nn.Sequential(
                nn.Linear(second, settings.latent),
                nn.ReLU(),
                nn.Linear(settings.latent, 2 * settings.latent),
            ),
            "folds": nn.ModuleList(folds),
        }

    def code(self, clouds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log variance (N, latent)."""
        import torch

        neighbours = nearest(clouds, self.settings.k)
        values = self.layers["local"](torch.cat([clouds, covariances(clouds, neighbours)], 2))
        for layer in self.layers["graph"]:
            values = layer(gather_rows(values, neighbours).amax(2)).relu()
        mean, log_variance = self.layers["code"](values.amax(1)).float().chunk(2, 1)
        return mean, log_variance.clamp(-20, 20)

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        """Clouds (N, points, 3)."""
        import torch

        points = sphere(self.settings.reconstruction_points).to(code).expand(len(code), -1, -1)
        for fold in self.layers["folds"]:
            repeated = code[:, None].expand(-1, points.shape[1], -1)
            points = fold(torch.cat([points, repeated], 2)).float()
        return points

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        import torch

        mean, log_variance = self.code(clouds)
        noise = torch.empty_like(mean).normal_()
        made = self.decode(mean + noise * (log_variance / 2).exp())
        distance = chamfer(clouds, made).mean()
        spread = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return {
            "loss": distance + self.settings.divergence * spread,
            "chamfer": distance,
            "divergence": spread,
        }

    def cloud_outputs(self, clouds: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, _ = self.code(clouds)
        return {"features": mean, "novelty": chamfer(clouds, self.decode(mean))}


def chamfer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums of squared distances to the nearest point of the other cloud, both ways: (B,)."""
    there = left - gather_rows(right, nearest_other(left, right))
    back = right - gather_rows(left, nearest_other(right, left))
    return there.square().sum((1, 2)) + back.square().sum((1, 2))


def covariances(clouds: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
    """Of each point's neighbours, (B, P, 9)."""
    near = gather_rows(clouds, neighbours)
    near = near - near.mean(2, keepdim=True)
    return (near.mT @ near / neighbours.shape[2]).flatten(2)


def sphere(count: int) -> torch.Tensor:
    """Points (count, 3) spread evenly on the unit sphere, along a spiral."""
    import torch

    number = torch.arange(count, dtype=torch.float64)
    height = 1 - (2 * number + 1) / count
    angle = number * math.pi * (3 - math.sqrt(5))
    ring = (1 - height.square()).sqrt()
    return torch.stack([ring * angle.cos(), ring * angle.sin(), height], 1).float()


def _mlp(widths: tuple[int, ...]) -> nn.Sequential:
    from torch import nn

    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers)


def _fold(inside: int, inner: int) -> nn.Sequential:
    from torch import nn

    return nn.Sequential(*_mlp((inside, inner, inner)), nn.Linear(inner, 3))
