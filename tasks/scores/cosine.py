"""Cosine to the training samples (3DOS: SubArcFace, SupCon).

novelty = -(0.5 + 0.5 * the largest cosine of g to a training g); the predicted class is that
sample's.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tasks.learning.neighbours import Metric
from tasks.scores.base import Outputs
from tasks.scores.nearest import Nearest


class Cosine(Nearest):
    name: ClassVar[str] = "cosine"

    def search(self) -> tuple[int, Metric]:
        return self.settings.k, "cosine"

    def _score(self, outputs: Outputs) -> np.ndarray:
        return 0.5 * super()._score(outputs) - 1
