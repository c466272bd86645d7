"""Outlier exposure on mixed clouds: fine-tunes a fitted `cross_entropy` (3DOS rule 11).

Loss = CE + .5 mean(logsumexp f - mean f) on RSMix clouds (Lee et al. 2021): the points of a ball of
one cloud are replaced by as many from a ball of the same radius of another. 3DOS's score is MSP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from schemas.errors import ConfigError
from tasks.learning.trainer import Losses
from tasks.models import cross_entropy
from tasks.models.base import BaseRun
from tasks.networks.heads import SMALL

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
    configuration: ClassVar[type[Configuration]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"epochs": 100, "learning_rate": 1e-3, "final_rate": 1e-6},
        "small": {**SMALL, "epochs": 20, "learning_rate": 1e-4, "final_rate": 1e-6},
    }

    @classmethod
    def preset_values(cls, preset: str, network: str | None) -> dict[str, Any]:
        values = super().preset_values(preset, network)
        if preset == "paper" and values.get("optimizer") == "adam":
            values["learning_rate"] = 1e-5
        return values

    @classmethod
    def bases_of(cls, settings: Configuration) -> tuple[BaseRun, ...]:
        sizes = {"hidden": settings.hidden, "features": settings.features}
        return (BaseRun("cross_entropy", settings=sizes),)

    def start(self, seed: int) -> None:
        try:
            self.layers.load_state_dict(self.bases[0].state())
        except RuntimeError as error:
            raise ConfigError(
                f"model {self.name}: the base has other layers; use its network, preset and classes"
            ) from error
        self.record["initial_weights"] = f"fitted {self.bases[0].name}"

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        import torch

        settings = self.settings
        concentration = torch.tensor(settings.beta)
        radius = float(torch.distributions.Beta(concentration, concentration).sample())
        mixed = mix(clouds, radius, settings.most)
        g = self.cloud_outputs(torch.cat([clouds, mixed]))["features"]
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
