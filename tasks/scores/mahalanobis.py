"""Mahalanobis distance (Lee et al. 2018): squared distance of g to the nearest class mean.

The covariance is the mean over training samples of the outer products of (g - mean of its class),
one for all classes, plus a ridge where there are fewer samples than dimensions. Not a score of
3DOS; the field's toolkits have it. The predicted class is that of the nearest mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.scores.base import Outputs, Reference, RowWise

if TYPE_CHECKING:
    import torch


ROWS = 8192
"""Rows that are centred at a time."""


class Configuration(Settings):
    ridge: float = Field(1e-6, gt=0)
    """Added to the diagonal of the covariance, in units of its mean variance."""
    # Left out of keys at its default: scores that were made before it was there stay as they are.
    covariance: Literal["mean", "sum"] = Field("mean", exclude_if=lambda value: value == "mean")
    """`sum`: as pytorch-ood 0.4: not divided by the samples, ridge as it is, half the distance."""


class Gaussians:
    """Classes of one covariance; distances to their means. The features are overwritten."""

    def __init__(
        self, features: torch.Tensor, member: np.ndarray, settings: Configuration, name: str
    ) -> None:
        import torch

        places = torch.from_numpy(member)
        sums = features.new_zeros(int(member.max()) + 1, features.shape[1])
        sums.index_add_(0, places, features)
        means = sums / torch.bincount(places)[:, None]
        for rows, owners in zip(features.split(ROWS), places.split(ROWS), strict=True):
            rows -= means[owners]
        covariance = features.T @ features
        ridge = settings.ridge
        if settings.covariance == "mean":
            covariance /= len(features)
            ridge *= float(covariance.diagonal().mean())
        if not covariance.diagonal().mean() > 0:
            raise ConfigError(f"score {name}: every training sample equals its class mean")
        covariance.diagonal().add_(ridge)
        self.factor, failed = torch.linalg.cholesky_ex(covariance)
        if failed:
            raise ConfigError(f"score {name}: the covariance has no inverse; raise ridge")
        self.centres = self._whitened(means)

    def _whitened(self, features: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.linalg.solve_triangular(self.factor, features.T, upper=False).T.contiguous()

    def squared(self, features: torch.Tensor) -> torch.Tensor:
        """Squared distance (rows, classes)."""
        import torch

        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(self._whitened(features), self.centres, compute_mode=exact).square()


class Mahalanobis(RowWise):
    name: ClassVar[str] = "mahalanobis"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    classes: np.ndarray
    known: Gaussians

    def _fit(self, reference: Reference) -> None:
        import torch

        assert reference.train is not None
        labels = self.train_labels(reference)
        features = torch.from_numpy(self.array(reference.train, "features").astype(np.float64))
        self.classes, place = np.unique(labels, return_inverse=True)
        self.known = Gaussians(features, place, self.settings, self.name)

    def _novelty(self, features: torch.Tensor) -> torch.Tensor:
        nearest = self.known.squared(features).amin(1)
        return nearest / 2 if self.settings.covariance == "sum" else nearest

    def predicted(self, outputs: Outputs) -> np.ndarray:
        import torch

        self._check(outputs)
        features = torch.from_numpy(self.array(outputs, "features").astype(np.float64))
        return self.classes[self.known.squared(features).argmin(1).numpy()]
