"""Free energy: novelty = -T logsumexp(f / T), T = 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.scores.base import RowWise

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits."""


class Energy(RowWise):
    name: ClassVar[str] = "energy"
    needs: ClassVar[frozenset[str]] = frozenset({"logits"})
    configuration: ClassVar[type[Settings]] = Configuration

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        temperature = self.settings.temperature
        return -temperature * (logits / temperature).logsumexp(1)
