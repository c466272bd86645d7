"""Deep neighbours (Sun et al. 2022): novelty = distance of g to the k-th nearest training g.

Features are scaled to length 1 unless told otherwise: the distance is sqrt(2 - 2 cos). The paper's
k is 50 for CIFAR-10, 200 for CIFAR-100, 1000 for ImageNet. `nearest` is k = 1 without scaling,
`cosine` k = 1 with it. The predicted class is the nearest neighbour's.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.learning.neighbours import Metric
from tasks.scores.base import Outputs
from tasks.scores.nearest import Nearest

_K = 50


class Configuration(Settings):
    k: int | None = Field(None, ge=1)
    """The distance to the k-th nearest training sample is taken. none: 50, but not more than a
    class has training samples in the mean, as the next would be of another class."""
    normalise: bool = True
    """Features are scaled to length 1."""


class Knn(Nearest):
    name: ClassVar[str] = "knn"
    configuration: ClassVar[type[Settings]] = Configuration

    def search(self) -> tuple[int, Metric]:
        k = self.settings.k
        if k is None:
            classes = 1 if self.labels is None else len(np.unique(self.labels))
            k = min(_K, len(self.train) // classes)
        return k, "cosine" if self.settings.normalise else "euclidean"

    def _score(self, outputs: Outputs) -> np.ndarray:
        distance = super()._score(outputs)
        return np.sqrt(2 * distance) if self.settings.normalise else distance
