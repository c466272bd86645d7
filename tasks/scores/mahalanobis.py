"""Mahalanobis distance (Lee et al. 2018): squared distance of g to the nearest class mean.

The covariance is the mean over training samples of the outer products of (g - mean of its class),
one for all classes, plus a ridge where there are fewer samples than dimensions. Not a score of
3DOS; the field's toolkits have it. The predicted class is that of the nearest mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.scores.base import Outputs, Reference, RowWise

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    ridge: float = Field(1e-6, gt=0)
    """Added to the diagonal of the covariance, in units of its mean variance."""


class Mahalanobis(RowWise):
    name: ClassVar[str] = "mahalanobis"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    classes: np.ndarray
    centres: torch.Tensor
    factor: torch.Tensor

    def _fit(self, reference: Reference) -> None:
        import torch

        assert reference.train is not None
        labels = reference.train_labels
        if labels is None:
            raise ConfigError("score mahalanobis needs train_labels, which the reference lacks")
        features = torch.from_numpy(self.array(reference.train, "features").astype(np.float64))
        self.classes, place = np.unique(labels, return_inverse=True)
        member = torch.from_numpy(place)
        sums = features.new_zeros(len(self.classes), features.shape[1])
        sums.index_add_(0, member, features)
        means = sums / torch.bincount(member)[:, None]
        spread = features - means[member]
        covariance = spread.T @ spread / len(spread)
        variance = covariance.diagonal().mean()
        if not variance > 0:
            raise ConfigError("score mahalanobis: every training sample equals its class mean")
        covariance.diagonal().add_(self.settings.ridge * variance)
        self.factor = torch.linalg.cholesky(covariance)
        self.centres = self._whitened(means)

    def _whitened(self, features: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.linalg.solve_triangular(self.factor, features.T, upper=False).T.contiguous()

    def _squared(self, features: torch.Tensor) -> torch.Tensor:
        """Squared distance (rows, classes)."""
        import torch

        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(self._whitened(features), self.centres, compute_mode=exact).square()

    def _novelty(self, features: torch.Tensor) -> torch.Tensor:
        return self._squared(features).amin(1)

    def predicted(self, outputs: Outputs) -> np.ndarray:
        import torch

        self._check(outputs)
        features = torch.from_numpy(self.array(outputs, "features").astype(np.float64))
        return self.classes[self._squared(features).argmin(1).numpy()]
