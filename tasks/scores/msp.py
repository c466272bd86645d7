"""Maximum softmax probability: novelty = -max_c p_c."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tasks.scores.base import RowWise

if TYPE_CHECKING:
    import torch


class Msp(RowWise):
    name: ClassVar[str] = "msp"
    needs: ClassVar[frozenset[str]] = frozenset({"logits"})

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        return -logits.softmax(1).amax(1)
