"""Activation shaping (Djurisic et al. 2023): energy of the logits of pruned activations.

The lowest values of each z, the input of the last Linear, become 0; k are kept. Then `p` leaves
them, `b` puts s / k in the place of each, `s` multiplies them by exp(s / sum of the kept); s is the
sum of z. novelty = -logsumexp(W shaped + b). The paper's activations come from a ReLU; under a
leaky one sums are of positive values, so that the exponent lies between 1 and D / k. Of equal
values the first columns are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from schemas.config import Settings
from tasks.scores._activations import OfActivations

if TYPE_CHECKING:
    import torch

_PERCENTILES = {"p": 60.0, "b": 65.0, "s": 90.0}


class Configuration(Settings):
    variant: Literal["p", "b", "s"] = "s"
    """What becomes of the kept values: they stay, are made equal (binarised), or are scaled."""
    percentile: float | None = Field(None, ge=0, lt=100)
    """Share of the values, in percent, that become 0. none: 60 for p, 65 for b, 90 for s."""


def kept(z: torch.Tensor, percentile: float) -> torch.Tensor:
    """Columns (rows, k) of the largest values; at least one."""
    k = max(1, z.shape[1] - round(z.shape[1] * percentile / 100))
    return z.sort(dim=1, descending=True, stable=True).indices[:, :k]


def positive_sum(z: torch.Tensor) -> torch.Tensor:
    return z.clamp(min=0).sum(1, keepdim=True)


def growth(z: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """exp(sum / sum of these columns) (rows, 1); e where nothing is positive."""
    whole, part = positive_sum(z), positive_sum(z.gather(1, columns))
    return (whole / part).nan_to_num(1.0).exp()


class Ash(OfActivations):
    name: ClassVar[str] = "ash"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head"})
    configuration: ClassVar[type[Settings]] = Configuration

    def _of(self, z: torch.Tensor) -> torch.Tensor:
        import torch

        variant, percentile = self.settings.variant, self.settings.percentile
        columns = kept(z, _PERCENTILES[variant] if percentile is None else percentile)
        values = z.gather(1, columns)
        if variant == "b":
            values = (positive_sum(z) / columns.shape[1]).expand_as(values)
        elif variant == "s":
            values = values * growth(z, columns)
        shaped = torch.zeros_like(z).scatter(1, columns, values)
        return -self.head.linear(shaped).logsumexp(1)
