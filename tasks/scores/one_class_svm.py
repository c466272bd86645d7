"""One-class SVM (Schölkopf et al. 2001) on g: novelty = rho - sum_i a_i exp(-gamma ||x - x_i||^2).

x is g scaled to [0, 1] by the range of the training features; a feature that never varies is only
shifted. gamma `none` is 1 / (width * variance of all scaled values), as scikit-learn's `scale`.
The order of the training samples does not matter, but which of them are drawn if there are many.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.scores.base import Outputs, Reference, Score

# Of the solver; at scikit-learn's own, 1e-3, values follow the way that it took.
_TOLERANCE = 1e-6


class Configuration(Settings):
    nu: float = Field(0.1, gt=0, lt=1)
    """Bound on the share of training samples outside, and on that of support vectors from below."""
    gamma: float | None = Field(None, gt=0)
    """Factor of the squared distance in the kernel; none: by width and variance."""
    most: int = Field(10_000, ge=1)
    """Training samples that are fitted; of more, this many are drawn, as the work grows squared."""
    seed: int = Field(0, ge=0)
    """Of the draw."""


class OneClassSvm(Score):
    name: ClassVar[str] = "one_class_svm"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    low: np.ndarray
    span: np.ndarray
    machine: Any

    def _fit(self, reference: Reference) -> None:
        from sklearn.svm import OneClassSVM

        assert reference.train is not None
        features = self.array(reference.train, "features").astype(np.float64)
        self.low = features.min(0)
        span = features.max(0) - self.low
        if not span.any():
            raise ConfigError("score one_class_svm: the training features do not vary")
        self.span = np.where(span > 0, span, 1.0)
        if len(features) > self.settings.most:
            random = np.random.default_rng(self.settings.seed)
            features = features[random.permutation(len(features))[: self.settings.most]]
        # Where the solver stops follows the order of its rows.
        unit = self._unit(features)
        unit = unit[np.lexsort(unit.T)]
        gamma = "scale" if self.settings.gamma is None else self.settings.gamma
        try:
            machine = OneClassSVM(kernel="rbf", nu=self.settings.nu, gamma=gamma, tol=_TOLERANCE)
            self.machine = machine.fit(unit)
        except ValueError as error:
            raise ConfigError(f"score one_class_svm: no solution; lower nu ({error})") from error

    def _unit(self, features: np.ndarray) -> np.ndarray:
        return (features.astype(np.float64) - self.low) / self.span

    def _score(self, outputs: Outputs) -> np.ndarray:
        features = self.array(outputs, "features")
        if not len(features):
            return np.zeros(0)
        return -self.machine.decision_function(self._unit(features))
