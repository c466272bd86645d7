"""Residual of the principal subspace (Ndiour et al. 2020): novelty = ||(I - P P^T)(g - mean)||.

P are the first principal directions of the training features about their mean: the length of what
they leave of g. It needs no head; `vim` has the same length of z about the head's origin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.scores.base import Reference, RowWise

if TYPE_CHECKING:
    import torch

# Directions with less of the largest variance are rounding of float32 features; and with less of
# the mean square, that of float64 sums.
_FLAT, _CONSTANT = 1e-12, 1e-24


class Configuration(Settings):
    dimension: int | None = Field(None, ge=0)
    """Principal directions. none: 1000 of features 2048 wide or more, 512 of 768 or more, else half
    of the width; but fewer than the training features span, so that these keep a residual."""


class Subspace:
    """The directions that the principal ones leave, about an origin."""

    def __init__(
        self, rows: torch.Tensor, origin: torch.Tensor, dimension: int | None, name: str
    ) -> None:
        import torch

        self.origin = origin
        placed = rows - origin
        square = placed.T @ placed / len(placed)
        if not square.isfinite().all():
            raise ConfigError(f"score {name}: the training features are too large")
        values, vectors = torch.linalg.eigh(square)
        if not values[-1] > _CONSTANT * rows.square().sum(1).mean():
            raise ConfigError(f"score {name}: the training features do not vary")
        width, rank = len(values), int((values > _FLAT * values[-1]).sum())
        if dimension is None:
            wide = 1000 if width >= 2048 else 512 if width >= 768 else width // 2
            dimension = min(wide, rank - 1)
        if dimension >= rank:
            raise ConfigError(
                f"score {name}: {dimension} directions leave nothing of training features that "
                f"span {rank} of {width}; lower dimension"
            )
        self.left = vectors[:, : width - dimension]

    def residual(self, rows: torch.Tensor) -> torch.Tensor:
        return ((rows - self.origin) @ self.left).norm(dim=1)


class Residual(RowWise):
    name: ClassVar[str] = "residual"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    subspace: Subspace

    def _fit(self, reference: Reference) -> None:
        import torch

        assert reference.train is not None
        rows = torch.from_numpy(self.array(reference.train, "features").astype(np.float64))
        self.subspace = Subspace(rows, rows.mean(0), self.settings.dimension, self.name)

    def _novelty(self, features: torch.Tensor) -> torch.Tensor:
        return self.subspace.residual(features)
