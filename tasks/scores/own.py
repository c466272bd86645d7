"""The model's own novelty, as its pass left it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tasks.scores.base import Outputs, Score


class Own(Score):
    name: ClassVar[str] = "own"
    needs: ClassVar[frozenset[str]] = frozenset({"novelty"})

    def _score(self, outputs: Outputs) -> np.ndarray:
        return self.array(outputs, "novelty").astype(np.float64)
