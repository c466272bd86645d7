"""Outlier exposure on mixed clouds: fine-tunes a fitted `cross_entropy` (rule 11).

Loss = CE + .5 mean(logsumexp f - mean f) on RSMix clouds (Lee et al. 2021): the points of a ball of
one cloud are replaced by as many from a ball of the same radius of another. 3DOS's score is MSP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.threedos.methods import cross_entropy
from tasks.threedos.methods.base import Losses, TrainingSettings

if TYPE_CHECKING:
    import torch


class Configuration(cross_entropy.Configuration):
    """Sizes of the head, as the base has them, and the loss."""

    weight: float = Field(0.5, ge=0)
    """Weight of the mixed clouds."""
    beta: float = Field(1.0, gt=0)
    """Radii are drawn from Beta(beta, beta), one a batch."""
    most: int = Field(512, ge=1)
    """Points replaced at most."""


class OutlierExposure(cross_entropy.CrossEntropy):
    name: ClassVar[str] = "outlier_exposure"
    requires: ClassVar[str | None] = "cross_entropy"
    configuration: ClassVar[type[TrainingSettings]] = Configuration

    @classmethod
    def training(cls, preset: str, optimizer: str) -> dict[str, Any]:
        if preset != "paper":
            return {"epochs": 20, "learning_rate": 1e-4, "final_rate": 1e-6}
        rate = 1e-3 if optimizer == "sgd" else 1e-5
        return {"epochs": 100, "learning_rate": rate, "final_rate": 1e-6}

    def losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        import torch

        settings = self.settings
        concentration = torch.tensor(settings.beta)
        radius = float(torch.distributions.Beta(concentration, concentration).sample())
        mixed = mix(clouds, radius, settings.most)
        g = self.outputs(torch.cat([clouds, mixed]))["features"]
        known, outliers = self.logits(g).float().split(len(clouds))
        entropy = cross_entropy.smoothed_cross_entropy(known, labels, settings.smoothing)
        exposure = undecided(outliers)
        return {
            "loss": entropy + settings.weight * exposure,
            "cross_entropy": entropy,
            "exposure": exposure,
            "accuracy": (known.argmax(1) == labels).float().mean(),
        }


def undecided(logits: torch.Tensor) -> torch.Tensor:
    """Mean of logsumexp f - mean f, the cross entropy to equal shares: least where undecided."""
    return (logits.logsumexp(1) - logits.mean(1)).mean()


def mix(clouds: torch.Tensor, radius: float, most: int) -> torch.Tensor:
    """RSMix of clouds (B, P, 3): each with another of the batch, around points drawn in both.

    The first `most` points within the radius are replaced. Of the other cloud's ball as many are
    taken, at random; where it has too few, all of them and then some of them again.
    """
    import torch

    batch, points, _ = clouds.shape
    rows = torch.arange(batch, device=clouds.device)
    others = clouds[torch.randperm(batch, device=clouds.device)]
    place, other_place = torch.randint(points, (2, batch), device=clouds.device)
    center, other_center = clouds[rows, place][:, None], others[rows, other_place][:, None]

    removed = _ball(clouds, center, radius, most)
    offered = _ball(others, other_center, radius, most)
    # Offered points first, in random order.
    keys = torch.rand(batch, points, device=clouds.device).masked_fill(~offered, 2.0)
    order, count = keys.argsort(1), offered.sum(1, keepdim=True)
    rank = removed.cumsum(1) - 1
    again = (torch.rand(batch, points, device=clouds.device) * count).long()
    taken = order.gather(1, torch.where(rank < count, rank, again).clamp(min=0))
    added = others.gather(1, taken[..., None].expand(-1, -1, 3)) - other_center + center
    return torch.where(removed[..., None], added, clouds)


def _ball(clouds: torch.Tensor, center: torch.Tensor, radius: float, most: int) -> torch.Tensor:
    """Which points are within the radius, the first `most` of them; the centre always is."""
    inside = (clouds - center).square().sum(2) <= radius**2
    return inside & (inside.cumsum(1) <= most)
