"""Gaussian mixture on g: novelty = -log sum_c w_c N(g; m_c, S_c).

By class (Mukhoti et al. 2023): a mixture of each class, weighted by its share of the training
samples; with one component a Gaussian. Over all: one mixture, no labels. Variances have a ridge in
units of their mean about the class means, or about the mean of all.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.scores.base import Outputs, Reference, Score

# Samples for a feature from which on a full covariance is taken to be known.
_ENOUGH = 10


class Configuration(Settings):
    over: Literal["class", "all"] = "class"
    """A mixture for each class, or one over all training samples."""
    components: int = Field(1, ge=1)
    """Gaussians of a mixture; as many as it has samples if these are fewer."""
    covariance: Literal["auto", "full", "diag", "spherical"] = "auto"
    """auto: full where each component has ten samples for a feature, else diag."""
    ridge: float = Field(1e-6, gt=0)
    """Added to the variances, in units of the mean variance."""
    seed: int = Field(0, ge=0)
    """Of the starting points where there are several components."""


class Gmm(Score):
    name: ClassVar[str] = "gmm"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    origin: np.ndarray
    unit: float
    mixtures: list[tuple[float, Any]]
    """Log weight and mixture."""

    def _fit(self, reference: Reference) -> None:
        assert reference.train is not None
        features = self.array(reference.train, "features").astype(np.float64)
        member = np.zeros(len(features), np.int64)
        if self.settings.over == "class":
            _, member = np.unique(self.train_labels(reference), return_inverse=True)
        parts = [features[member == place] for place in range(member.max() + 1)]
        spread = np.concatenate([part - part.mean(0) for part in parts])
        self.origin, self.unit = features.mean(0), float(np.sqrt(np.square(spread).mean()))
        if not self.unit > 1e-12 * np.abs(features).max():
            raise ConfigError("score gmm: every training sample equals the mean of its mixture")
        kind = self.settings.covariance
        if kind == "auto":
            fewest = min(len(part) for part in parts) / self.settings.components
            kind = "full" if fewest >= _ENOUGH * features.shape[1] else "diag"
        self.mixtures = [
            (float(np.log(len(part) / len(features))), self._mixture(self._placed(part), kind))
            for part in parts
        ]

    def _placed(self, features: np.ndarray) -> np.ndarray:
        return (features.astype(np.float64) - self.origin) / self.unit

    def _mixture(self, rows: np.ndarray, kind: str) -> Any:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture

        # One sample alone has a mean and no variance, as the same sample twice has.
        rows = np.repeat(rows, 2, 0) if len(rows) == 1 else rows
        mixture = GaussianMixture(
            min(self.settings.components, len(rows)),
            covariance_type=kind,
            reg_covar=self.settings.ridge,
            random_state=self.settings.seed,
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                return mixture.fit(rows)
        except ValueError as error:
            raise ConfigError(f"score gmm: {error}; raise ridge") from error

    def _score(self, outputs: Outputs) -> np.ndarray:
        rows = self._placed(self.array(outputs, "features"))
        if not len(rows):
            return np.zeros(0)
        logs = [weight + mixture.score_samples(rows) for weight, mixture in self.mixtures]
        # The density of g, not of what is scaled.
        return rows.shape[1] * np.log(self.unit) - np.logaddexp.reduce(logs)
