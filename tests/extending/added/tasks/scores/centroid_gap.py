"""Distance to the mean of all training features, in units of the mean distance there."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.scores.base import Outputs, Reference, Score


class Configuration(Settings):
    power: float = Field(1.0, gt=0)
    """Exponent of the distance."""


class CentroidGap(Score):
    name: ClassVar[str] = "centroid_gap"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "train"})
    configuration: ClassVar[type[Settings]] = Configuration

    def _fit(self, reference: Reference) -> None:
        assert reference.train is not None
        rows = self.array(reference.train, "features").astype(np.float64)
        self.centre = rows.mean(0)
        self.unit = np.linalg.norm(rows - self.centre, axis=1).mean() or 1.0

    def _score(self, outputs: Outputs) -> np.ndarray:
        rows = self.array(outputs, "features").astype(np.float64)
        return (np.linalg.norm(rows - self.centre, axis=1) / self.unit) ** self.settings.power
