"""GradNorm in closed form: novelty = -||z||_1 * sum_c |C p_c - 1| / T, T = 1.

It is the L1 norm of the gradient of sum_c -log softmax(f / T)_c at the last Linear's weight, whose
input is z. 3DOS takes targets of 1, others 1 / C: C times their value, the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.scores.base import Head, Reference, RowWise

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits."""


class GradNorm(RowWise):
    name: ClassVar[str] = "gradnorm"
    needs: ClassVar[frozenset[str]] = frozenset({"logits", "features", "head"})
    configuration: ClassVar[type[Settings]] = Configuration
    head: Head

    def _fit(self, reference: Reference) -> None:
        assert reference.head is not None
        self.head = reference.head

    def _novelty(self, logits: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        temperature = self.settings.temperature
        pull = logits.shape[1] * (logits / temperature).softmax(1) - 1
        return -self.head.activated(features).abs().sum(1) * pull.abs().sum(1) / temperature
