"""CE(L2): novelty = Euclidean distance of g to the nearest training g.

Features are not normalised. 3DOS's normality is 1 / d; the order is the same, and d = 0 is finite.
The predicted class is the neighbour's.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.learning.neighbours import Metric, Neighbours, nearest
from tasks.scores.base import Outputs, Reference, Score


class Configuration(Settings):
    k: int = Field(1, ge=1)
    """The distance to the k-th nearest training sample is taken; the class is the first's."""


class Nearest(Score):
    name: ClassVar[str] = "nearest"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    train: np.ndarray
    labels: np.ndarray | None

    def _fit(self, reference: Reference) -> None:
        assert reference.train is not None
        self.train = self.array(reference.train, "features")
        self.labels = reference.train_labels

    def search(self) -> tuple[int, Metric]:
        """How many neighbours are looked for, and by which distance."""
        return self.settings.k, "euclidean"

    def neighbours(self, outputs: Outputs) -> Neighbours:
        """The k nearest training samples; who wants scores and classes saves a search with it."""
        self._check(outputs)
        k, metric = self.search()
        return nearest(self.array(outputs, "features"), self.train, k=k, metric=metric)

    def _score(self, outputs: Outputs) -> np.ndarray:
        return self.neighbours(outputs).distance[:, -1]

    def predicted(self, outputs: Outputs) -> np.ndarray:
        if self._fitted and self.labels is None:
            raise ConfigError(f"score {self.name}: the reference has no train_labels to predict by")
        neighbours = self.neighbours(outputs)
        assert self.labels is not None
        return self.labels[neighbours.index[:, 0]]
