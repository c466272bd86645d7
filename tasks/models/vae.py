"""A variational autoencoder of clouds of FoldingNet's kind (3DOS rule 11, "VAE").

Masuda et al. 2021. Encoder: each point with the products of its coordinates and its neighbour's,
an MLP, two graph layers (largest values over the k nearest points), the largest values of MLP and
graph over all points, of them a mean and a spread s of the latent code. Decoder: a grid on the
sphere, folded twice. The code is drawn with log variance s, while the divergence takes s for a
deviation: KL = sum(mean^2 + s^2 - log s^2 - 1) / 2, as in the reference's code.
Loss = chamfer distances (sums of squares, both ways, over the batch) of both foldings + KL + KL of
the reconstruction's own code. Novelty = chamfer distance of the reconstruction from the mean code,
features = mean code. The reference's other scores (EMD, KL, difference of features) are left out:
3DOS uses the reconstruction alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.learning.devices import to_device
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
    first_folding: float = Field(1.0, ge=0)
    """Weight of the first folding's distance."""
    divergence: float = Field(1.0, ge=0)
    """Weight of KL."""
    second_divergence: float = Field(1.0, ge=0)
    """Weight of KL of the code that the reconstruction has."""


_PLAIN = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "weight_decay": 1e-6,
    "augmentation": "none",
}


class Vae(CloudModel):
    name: ClassVar[str] = "vae"
    version: ClassVar[int] = 2
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
            "initial_weights": "torch",
        },
        "small": {
            **_PLAIN,
            "k": 8,
            "local": (32, 32),
            "graph": (64, 128),
            "latent": 32,
            "folding": 64,
            "reconstruction_points": 256,
            "first_folding": 0.0,
            "second_divergence": 0.0,
        },
    }

    def build(self) -> dict[str, nn.Module]:
        from torch import nn

        settings = self.settings
        widths = (settings.local[-1], *settings.graph)
        folds = [_fold(settings.latent + 3, settings.folding) for _ in range(2)]
        return {
            "local": _mlp((12, *settings.local)),
            "graph": nn.ModuleList(
                nn.Sequential(nn.Linear(inside, inside), nn.Linear(inside, outside))
                for inside, outside in pairwise(widths)
            ),
            "code": nn.Linear(widths[0] + widths[-1], 2 * settings.latent),
            "folds": nn.ModuleList(folds),
        }

    def code(self, clouds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and spread (N, latent)."""
        import torch

        neighbours = nearest(clouds, self.settings.k, ordered=True)
        local = self.layers["local"](torch.cat([clouds, products(clouds, neighbours)], 2))
        first, second = self.layers["graph"]
        values = first(gather_rows(local, neighbours).amax(2)).relu()
        values = second(gather_rows(values, neighbours).amax(2))
        largest = torch.cat([local, values], 2).amax(1)
        mean, spread = self.layers["code"](largest).float().chunk(2, 1)
        return mean, spread

    def decode(self, code: torch.Tensor) -> list[torch.Tensor]:
        """Clouds (N, points, 3) of the first folding, and of the second: the reconstruction."""
        import torch

        points = to_device(sphere(self.settings.reconstruction_points).numpy(), code.device)
        points = points.expand(len(code), -1, -1)
        repeated = code[:, None].expand(-1, points.shape[1], -1)
        foldings = []
        for fold in self.layers["folds"]:
            points = fold(torch.cat([repeated, points], 2)).float()
            foldings.append(points)
        return foldings

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        import torch

        settings = self.settings
        mean, spread = self.code(clouds)
        noise = torch.empty_like(mean).normal_()
        folded, made = self.decode(mean + noise * (spread / 2).exp())
        distance, kl = chamfer(clouds, made), divergence(mean, spread)
        loss = distance.sum() + settings.divergence * kl
        if settings.first_folding:
            loss = loss + settings.first_folding * chamfer(clouds, folded).sum()
        if settings.second_divergence:
            loss = loss + settings.second_divergence * divergence(*self.code(made))
        return {"loss": loss, "chamfer": distance.mean(), "divergence": kl}

    def cloud_outputs(self, clouds: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, _ = self.code(clouds)
        return {"features": mean, "novelty": chamfer(clouds, self.decode(mean)[-1])}


def divergence(mean: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """From N(mean, spread^2) to N(0, 1), the mean over rows."""
    squares = spread.square()
    return (mean.square() + squares - (squares + 1e-12).log() - 1).sum(1).mean() / 2


def chamfer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums of squared distances to the nearest point of the other cloud, both ways: (B,)."""
    offsets = left - gather_rows(right, nearest_other(left, right))
    back_offsets = right - gather_rows(left, nearest_other(right, left))
    return offsets.square().sum((1, 2)) + back_offsets.square().sum((1, 2))


def products(clouds: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
    """Of the coordinates of each point's nearest point (itself) and the next one, (B, P, 9)."""
    first, second = (gather_rows(clouds, neighbours[..., place]) for place in (0, 1))
    return (first[..., None] * second[..., None, :]).flatten(2)


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
