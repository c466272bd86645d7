"""Relative Mahalanobis distance (Ren et al. 2021): novelty = min_c d_c(g) - d_0(g).

d_c is the squared distance of `mahalanobis` to the mean of class c, d_0 that to the mean of all
training samples by the covariance of all of them. The predicted class is that of the nearest mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.scores.base import Reference
from tasks.scores.mahalanobis import Gaussians, Mahalanobis

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    ridge: float = Field(1e-6, gt=0)
    """Added to the diagonal of both covariances, in units of their mean variance."""
    covariance: Literal["mean", "sum"] = "mean"
    """`sum`: as pytorch-ood 0.4: not divided by the samples, ridge as it is."""


class Rmd(Mahalanobis):
    name: ClassVar[str] = "rmd"
    configuration: ClassVar[type[Settings]] = Configuration
    all: Gaussians

    def _fit(self, reference: Reference) -> None:
        import torch

        super()._fit(reference)
        if len(self.classes) < 2:
            raise ConfigError("score rmd needs training rows of two classes; with one it is 0")
        assert reference.train is not None
        features = torch.from_numpy(self.array(reference.train, "features").astype(np.float64))
        self.all = Gaussians(features, np.zeros(len(features), np.int64), self.settings, self.name)

    def _novelty(self, features: torch.Tensor) -> torch.Tensor:
        return self.known.squared(features).amin(1) - self.all.squared(features)[:, 0]
