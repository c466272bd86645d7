"""NNGuide (Park et al. 2023): novelty = -E(z) * mean of the k largest E(t) cos(z, t).

z is the input of the last Linear, t that of a training sample, E(z) = logsumexp(W z + b) the
energy. With fewer than k training samples all count. The paper takes a share of the training
samples, we all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.scores._activations import OfActivations
from tasks.scores.base import Reference

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    k: int = Field(10, ge=1)
    """Training samples that guide; all if there are fewer."""


class NnGuide(OfActivations):
    name: ClassVar[str] = "nnguide"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    bank: torch.Tensor

    def _fit(self, reference: Reference) -> None:
        super()._fit(reference)
        z = self.trained(reference)
        self.bank = self._unit(z) * self.head.linear(z).logsumexp(1, keepdim=True)
        self.held = len(self.bank)

    def _unit(self, z: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional

        return functional.normalize(z, dim=1)

    def _of(self, z: torch.Tensor) -> torch.Tensor:
        k = min(self.settings.k, len(self.bank))
        guidance = (self._unit(z) @ self.bank.T).topk(k, 1).values.mean(1)
        return -guidance * self.head.linear(z).logsumexp(1)
