"""Maximum logit score: novelty = -max_c f_c."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tasks.scores.base import RowWise

if TYPE_CHECKING:
    import torch


class Mls(RowWise):
    name: ClassVar[str] = "mls"
    needs: ClassVar[frozenset[str]] = frozenset({"logits"})

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        return -logits.amax(1)
