"""ODIN on a fitted `vgg_classifier`: softmax at a temperature after a small step of the input.

score = -max softmax(logits(x') / T), x' = x - epsilon * step, step = the sign of the gradient of
the cross entropy of (logits / T, predicted class), divided by ImageNet's deviation because x is
normalised. NovelCraft chose T = 1000, epsilon = 0 of its grid; then no gradient is needed and
logits given with the samples are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.detectors.base import Detector, TorchSettings
from tasks.detectors.vgg_classifier import preprocessor, softmax
from tasks.features.images import IMAGENET_DEVIATION, IMAGENET_MEAN
from tasks.learning.loop import in_batches
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.training import Progress

if TYPE_CHECKING:
    import torch


class Configuration(TorchSettings):
    choose: Literal["fixed", "validation"] = Field(
        "fixed", description="Take temperature and epsilon as given, or the best of the grid."
    )
    temperature: float = Field(1000.0, gt=0, description="Divisor of the logits.")
    epsilon: float = Field(0.0, ge=0, description="Size of the input step.")
    step: Literal["corrected", "released"] = Field(
        "corrected",
        description="released also subtracts ImageNet's mean from the sign, as the public code.",
    )
    temperatures: tuple[float, ...] = Field(
        (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000), description="Grid for choose = validation."
    )
    epsilons: tuple[float, ...] = Field(
        tuple(round(i * 0.0002, 4) for i in range(21)), description="Grid for choose = validation."
    )


class Odin(Detector):
    name: ClassVar[str] = "odin"
    needs: ClassVar[tuple[str, ...]] = ("images",)
    requires: ClassVar[str | None] = "vgg_classifier"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {},
    }
    temperature: float
    epsilon: float

    def _fit(
        self,
        train: Samples,
        valid: Samples | None,
        *,
        seed: int,
        checkpoints: Path | None,
        progress: Progress | None,
    ) -> pl.DataFrame:
        self.temperature, self.epsilon = self.settings.temperature, self.settings.epsilon
        rows = []
        if self.settings.choose == "validation":
            novel = novel_rows(valid, self.name)
            grid = [(t, e) for e in self.settings.epsilons for t in self.settings.temperatures]
            for number, (temperature, epsilon) in enumerate(grid, 1):
                auroc = area(novel, self.scores_at(valid, temperature, epsilon))
                row = {"temperature": temperature, "epsilon": epsilon, "valid_auroc": auroc}
                rows.append(row)
                if progress is not None:
                    progress(number, len(grid), row)
            best = max(rows, key=lambda row: row["valid_auroc"])
            self.temperature, self.epsilon = best["temperature"], best["epsilon"]
        columns = ("temperature", "epsilon", "valid_auroc")
        return pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.Float64))

    def scores_at(self, samples: Samples, temperature: float, epsilon: float) -> np.ndarray:
        if epsilon == 0:
            logits = self.base.outputs(samples).logits
        else:
            logits = self._stepped_logits(samples.images(), temperature, epsilon)
        return -softmax(logits, temperature).max(1)

    def _stepped_logits(self, images: np.ndarray, temperature: float, epsilon: float) -> np.ndarray:
        import torch
        from torch.nn import functional

        network = self.base.network
        prepare = preprocessor(self.base.settings)

        def compute(batch: torch.Tensor) -> dict[str, torch.Tensor]:
            x = prepare(batch)
            mean, deviation = (
                x.new_tensor(values).view(1, 3, 1, 1)
                for values in (IMAGENET_MEAN, IMAGENET_DEVIATION)
            )
            with torch.enable_grad():
                x.requires_grad_()
                logits = network(x)
                loss = functional.cross_entropy(
                    logits / temperature, logits.argmax(1), reduction="sum"
                )
                (gradient,) = torch.autograd.grad(loss, x)
            sign = torch.where(gradient >= 0, 1.0, -1.0)
            if self.settings.step == "released":
                sign = sign - mean
            return {"logits": network(x.detach() - epsilon * sign / deviation)}

        return in_batches(compute, images, self.base.device)["logits"]

    def _score(self, samples: Samples) -> np.ndarray:
        return self.scores_at(samples, self.temperature, self.epsilon)

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {"temperature": np.array([self.temperature]), "epsilon": np.array([self.epsilon])}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.temperature, self.epsilon = float(state["temperature"]), float(state["epsilon"])


def novel_rows(valid: Samples | None, detector: str) -> np.ndarray:
    """Which validation samples are novel; choosing by validation needs some of each."""
    novel = np.zeros(0, bool) if valid is None or valid.labels is None else valid.labels == NOVEL
    if novel.all() or not novel.any():
        raise ConfigError(
            f"detector {detector}: choose = validation needs known and novel validation samples, "
            f"found {int((~novel).sum())} and {int(novel.sum())}; set choose to fixed"
        )
    return novel


def area(novel: np.ndarray, scores: np.ndarray) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(novel, scores))
