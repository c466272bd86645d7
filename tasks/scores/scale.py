"""SCALE (Xu et al. 2024): energy of the logits of z * exp(sum of z / sum of its largest values).

z is the input of the last Linear; unlike `ash`, nothing is pruned. novelty = -logsumexp(W scaled +
b). The largest are those above a percentile of each z, 85 in the paper. Under a leaky ReLU sums are
of positive values, as in `ash`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.scores._activations import OfActivations
from tasks.scores.ash import growth, kept

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    percentile: float = Field(85.0, ge=0, lt=100)
    """Share of the values, in percent, that are not among the largest."""


class Scale(OfActivations):
    name: ClassVar[str] = "scale"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head"})
    configuration: ClassVar[type[Settings]] = Configuration

    def _of(self, z: torch.Tensor) -> torch.Tensor:
        scaled = z * growth(z, kept(z, self.settings.percentile))
        return -self.head.linear(scaled).logsumexp(1)
