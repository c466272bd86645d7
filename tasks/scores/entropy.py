"""Entropy of the softmax: novelty = mean_c(-p_c log p_c).

3DOS's normality is the reciprocal of this, infinite for a sure sample; the order is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tasks.scores.base import RowWise

if TYPE_CHECKING:
    import torch


class Entropy(RowWise):
    name: ClassVar[str] = "entropy"
    needs: ClassVar[frozenset[str]] = frozenset({"logits"})

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.special.entr(logits.softmax(1)).mean(1)
