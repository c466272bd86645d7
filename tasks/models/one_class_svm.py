"""One-class SVM on the features of a fitted `vgg_classifier` (NovelCraft 5.1; RBF kernel).

Nu and gamma are chosen from a grid by AUROC on validation samples, or given; the release ended at
nu 0.8 and gamma 1e-5.
`corrected` (default): features are scaled to [0, 1] by the range of the training set, everywhere,
and novelty = -decision, so that higher is more novel as for every other model. `released` repeats
the public code: scaled in training only, and the decision itself, which is higher for INLIERS; its
published AUROC of 57.67 is 42.3 with the right sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from tasks.learning.samples import Samples
from tasks.learning.trainer import balanced_shares
from tasks.models.base import BaseRun, Fitting, Model
from tasks.models.frames import ThreadSettings
from tasks.models.odin import best_candidate
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch

ROWS_AT_ONCE = 512


class Configuration(ThreadSettings):
    variant: Literal["corrected", "released"] = Field(
        "corrected", description="Scaling and sign: as they should be, or as the public code."
    )
    nu: float = Field(0.8, gt=0, le=1, description="Bound on the share of training outliers.")
    gamma: float = Field(1e-5, gt=0, description="Factor of the squared distance in the kernel.")
    choose: Literal["fixed", "validation"] = Field(
        "fixed",
        description="Take nu and gamma as given, or the best of the grid by AUROC on validation "
        "samples.",
    )
    nus: tuple[float, ...] = Field(
        tuple(i / 10 for i in range(1, 10)), description="Grid for choose = validation."
    )
    gammas: tuple[float, ...] = Field(
        tuple(float(f"{gamma:.6g}") for gamma in np.logspace(-5, 1, 9)),
        description="Grid for choose = validation (the paper's text ends at 1, its code at 10).",
    )
    order: Literal["once", "balanced"] = Field(
        "once",
        description="Learn from each training sample once, or from as many draws with replacement "
        "in which classes come equally often.",
    )


class OneClassSvm(Model):
    name: ClassVar[str] = "one_class_svm"
    version: ClassVar[int] = 2
    modality: ClassVar[str] = "image"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"choose": "validation", "order": "balanced"},
        "small": {"nu": 0.1, "gamma": 0.1},
    }
    learned: dict[str, np.ndarray]

    @classmethod
    def variants(
        cls, preset: str, changes: Mapping[str, Any], network: str | None, names: Sequence[str]
    ) -> list[Mapping[str, Any]]:
        """Where nu or gamma is given, nothing is chosen."""
        fixed_names = {"nu", "gamma"} & changes.keys()
        return [{"choose": "fixed", **changes}] if fixed_names else [changes]

    @classmethod
    def bases_of(cls, settings: Any) -> tuple[BaseRun, ...]:
        return (BaseRun("vgg_classifier"),)

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        features = self._features(train)
        if self.settings.order == "balanced":
            draws = np.random.default_rng(fitting.seed)
            features = features[draws.choice(len(train), len(train), p=balanced_shares(train))]
        low = features.min(0)
        span = features.max(0) - low
        # A feature that never changes is only shifted.
        scaling = {"low": low, "span": np.where(span == 0, 1, span)}
        unit = (features - scaling["low"]) / scaling["span"]
        best = {"nu": self.settings.nu, "gamma": self.settings.gamma}
        history = pl.DataFrame()
        if self.settings.choose == "validation":
            seen = None if valid is None else self._features(valid)

            def novelty(_: Samples, nu: float, gamma: float) -> np.ndarray:
                assert seen is not None
                return self._scores(scaling | self._machine(unit, nu, gamma), seen)

            grid = [(nu, gamma) for nu in self.settings.nus for gamma in self.settings.gammas]
            best, history = best_candidate(self, list(best), grid, novelty, valid, fitting)
        self.learned = scaling | self._machine(unit, **best)
        self.record["chosen"] = best
        return history

    def _features(self, samples: Samples) -> np.ndarray:
        features = self.bases[0].outputs(samples).features
        assert features is not None
        return features.astype(np.float64)

    def _machine(self, unit: np.ndarray, nu: float, gamma: float) -> dict[str, np.ndarray]:
        from sklearn.svm import OneClassSVM

        machine = OneClassSVM(kernel="rbf", nu=nu, gamma=gamma).fit(unit)
        return {
            "vectors": machine.support_vectors_,
            "weights": machine.dual_coef_[0],
            "intercept": machine.intercept_,
            "gamma": np.array([gamma]),
        }

    def _scores(self, learned: Mapping[str, np.ndarray], features: np.ndarray) -> np.ndarray:
        corrected = self.settings.variant == "corrected"
        if corrected:
            features = (features - learned["low"]) / learned["span"]
        vectors = learned["vectors"]
        norms = (vectors**2).sum(1)
        decision = np.empty(len(features))
        for start in range(0, len(features), ROWS_AT_ONCE):
            part = features[start : start + ROWS_AT_ONCE]
            squared = (part**2).sum(1)[:, None] + norms - 2 * part @ vectors.T
            kernel = np.exp(-learned["gamma"] * np.maximum(squared, 0))
            decision[start : start + ROWS_AT_ONCE] = kernel @ learned["weights"]
        decision += learned["intercept"]
        return -decision if corrected else decision

    def _outputs(self, samples: Samples) -> Outputs:
        return Outputs(novelty=self._scores(self.learned, self._features(samples)))

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return dict(self.learned)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.learned = {name: value.numpy() for name, value in state.items()}
