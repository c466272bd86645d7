"""Mean colours of a grid of cells; logits are minus the distances to the classes' means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from tasks.learning.samples import Samples
from tasks.models.base import Fitting, Model
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    cells: int = Field(2, ge=1)
    """Cells along each side of a picture."""


class MeanColours(Model):
    name: ClassVar[str] = "mean_colours"
    modality: ClassVar[str] = "image"
    gives: ClassVar[frozenset[str]] = frozenset({"logits", "features"})
    seeded: ClassVar[bool] = False
    configuration: ClassVar[type[Settings]] = Configuration

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        rows = self._colours(train)
        self.means = np.stack([rows[train.labels == k].mean(0) for k in range(self.classes)])
        return pl.DataFrame({"samples": [len(train)]})

    def _outputs(self, samples: Samples) -> Outputs:
        rows = self._colours(samples)
        logits = -np.linalg.norm(rows[:, None] - self.means, axis=2)
        return Outputs(logits.astype(np.float32), rows.astype(np.float32))

    def _colours(self, samples: Samples) -> np.ndarray:
        images, cells = samples.images(), self.settings.cells
        rows = []
        for row in range(len(samples)):
            bands = np.array_split(images[np.array([row])][0].astype(np.float64), cells)
            parts = [part for band in bands for part in np.array_split(band, cells, axis=1)]
            rows.append(np.concatenate([part.mean((0, 1)) for part in parts]) / 255)
        return np.array(rows).reshape(len(rows), 3 * cells * cells)

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {"means": self.means}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.means = state["means"].numpy()
