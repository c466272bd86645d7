"""ODIN without an input step: novelty = -max softmax(f / T), T = 1000.

3DOS calls this ODIN: it never sets epsilon above 0, so no gradient is needed. ODIN with its step
needs the network and is the model `odin`. At T = 1000 the scores of all samples lie within a few
thousandths of each other: float32 would tie many of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.scores.base import RowWise

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    temperature: float = Field(1000.0, gt=0)
    """Divisor of the logits."""


class OdinWithoutStep(RowWise):
    name: ClassVar[str] = "odin_without_step"
    needs: ClassVar[frozenset[str]] = frozenset({"logits"})
    configuration: ClassVar[type[Settings]] = Configuration

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        return -(logits / self.settings.temperature).softmax(1).amax(1)
