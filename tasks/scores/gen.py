"""Generalised entropy (Liu et al. 2023): novelty = sum of p^y (1 - p)^y over the M largest p.

p is the softmax of the logits, y = 0.1, M = 100 as the paper has for ImageNet, or all classes if
there are fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.scores.base import RowWise

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    gamma: float = Field(0.1, gt=0)
    """The exponent."""
    largest: int = Field(100, ge=1)
    """How many of the largest probabilities count; all if there are fewer."""


class Gen(RowWise):
    name: ClassVar[str] = "gen"
    needs: ClassVar[frozenset[str]] = frozenset({"logits"})
    configuration: ClassVar[type[Settings]] = Configuration

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        p = logits.softmax(1).sort(1, descending=True).values
        others = 1 - p
        # 1 - p of a sure sample would round to 0.
        others[:, 0] = p[:, 1:].sum(1)
        return (p * others).pow(self.settings.gamma)[:, : self.settings.largest].sum(1)
