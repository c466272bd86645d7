"""KL matching (Hendrycks et al. 2022): novelty = min_k KL(p || d_k).

p is the softmax of the logits, d_k the mean softmax of the validation samples whose largest logit
is k; classes that none of them has are left out. Labels are not used.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tasks.scores.base import Reference, RowWise

if TYPE_CHECKING:
    import torch


class KlMatching(RowWise):
    name: ClassVar[str] = "kl_matching"
    needs: ClassVar[frozenset[str]] = frozenset({"logits", "valid"})
    logs: torch.Tensor
    """log d_k, (classes that are predicted, classes)."""

    def _fit(self, reference: Reference) -> None:
        import torch

        assert reference.valid is not None
        logits = torch.from_numpy(self.array(reference.valid, "logits").astype(np.float64))
        logs, predicted = logits.log_softmax(1), logits.argmax(1)
        parts = [logs[predicted == k] for k in predicted.unique()]
        self.logs = torch.stack([part.logsumexp(0) - log(len(part)) for part in parts])

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        logs = logits.log_softmax(1)
        p = logs.exp()
        return ((p * logs).sum(1, keepdim=True) - p @ self.logs.T).amin(1).clamp(min=0)
