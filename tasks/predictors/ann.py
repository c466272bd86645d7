"""A small network on features with a threshold for the unknown (KOWL-718 section 5, "ANN").

Linear - Dropout - LeakyReLU - Linear with one output per known label and one for `unknown`, trained
on all labelled experience at each fit; unlabelled samples are never trained as `unknown`. A sample
whose largest softmax is below the threshold is `unknown`; the threshold is the quantile of the
largest softmax on validation that the accepted error names. The released code never applies it.

The hidden layer is as wide as the features, 2048 at most: TimeSformer 768, X3D-M 8192 to 2048.
Presets: `paper` and `paper_100` have the paper's dropout 0.5, and 1 and 100 epochs (Table 3 has
both); `released` the configurations' dropout 0.75 and the last layer made anew whenever there are
new labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.learning.compiling import compile_layers
from tasks.learning.devices import Precision, seeded
from tasks.learning.samples import Rows, Samples, SomeRows
from tasks.learning.trainer import (
    TRAINER_VERSION,
    Batch,
    Losses,
    Trainable,
    TrainingSettings,
    train,
)
from tasks.predictors.base import UNKNOWN, Examples, Prediction, Predictor, with_unknown

if TYPE_CHECKING:
    import torch
    from torch import nn

SCORING_BATCH = 8192
WIDEST = 2048
"""Units of the hidden layer on features that are wider."""


class Configuration(TrainingSettings):
    hidden: int | None = Field(
        None, ge=1, description=f"Units of the hidden layer; none: the features', {WIDEST} at most."
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="Share of units dropped in training.")
    head: Literal["grow", "remake"] = Field(
        "grow", description="New labels: add rows to the last layer, or make all of it anew."
    )
    accepted_error: float = Field(
        0.1, ge=0, lt=1, description="Share of validation samples that the threshold may refuse."
    )
    calibrate: Literal["first_fit", "every_fit"] = Field(
        "first_fit", description="When validation sets the threshold; first: K400 only."
    )
    epochs: int = Field(1, ge=1, description="Passes over the experience at each fit.")
    batch_size: int = Field(1000, ge=1, description="Samples per step.")
    learning_rate: float = Field(1e-3, gt=0, description="Size of the steps.")
    precision: Precision = Field("float32", description="Arithmetic of the training.")
    checkpoint_every: int = Field(
        10, ge=1, exclude=True, description="Without effect: a run is saved after each increment."
    )
    checkpoint_seconds: float = Field(
        600.0, ge=0, exclude=True, description="Without effect, as checkpoint_every."
    )


class _Singles(SomeRows):
    """All rows in single precision."""

    def __init__(self, every: Rows) -> None:
        super().__init__(every, np.arange(len(every)))

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return super().__getitem__(rows).astype(np.float32, copy=False)


class Ann(Predictor, Trainable):
    name: ClassVar[str] = "ann"
    reads_blocks: ClassVar[bool] = True
    version: ClassVar[int] = 2
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "paper_100": {"epochs": 100},
        "released": {"dropout": 0.75, "head": "remake"},
        "small": {
            "hidden": 64,
            "dropout": 0.2,
            "epochs": 30,
            "batch_size": 64,
            "calibrate": "every_fit",
        },
    }
    layers: nn.Sequential
    threshold: float | None = None

    @classmethod
    def versions(cls, settings: Any) -> dict[str, int]:
        return {**super().versions(settings), "trainer": TRAINER_VERSION}

    def _fit(
        self,
        examples: Examples,
        valid: Examples | None,
        *,
        before: tuple[str, ...],
        seed: Sequence[int],
    ) -> None:
        if before != self.known:
            with seeded([*seed, 0], self.device):
                layers = self._build()
            if before:
                self._take_over(layers, len(before) + 1)
            self.layers = layers
        # Column 0 is `unknown`, which no sample is labelled with.
        codes = examples.codes(self.known) + 1
        samples = Samples([""] * len(codes), codes, {"features": _Singles(examples.features)})
        drawn = int(np.random.default_rng([*seed, 1]).integers(2**31))
        train(self, samples, seed=drawn, device=self.device)
        if valid is not None and (self.threshold is None or self.settings.calibrate == "every_fit"):
            highest = self._softmax(valid.features).max(1)
            self.threshold = float(np.quantile(highest, self.settings.accepted_error))

    def losses(self, batch: Batch) -> Losses:
        from torch.nn import functional

        return {
            "loss": functional.cross_entropy(self.layers(batch.array("features")), batch.labels)
        }

    def _build(self) -> nn.Sequential:
        from torch import nn

        hidden = self.settings.hidden or min(self.width, WIDEST)
        return nn.Sequential(
            nn.Linear(self.width, hidden),
            nn.Dropout(self.settings.dropout),
            nn.LeakyReLU(),
            nn.Linear(hidden, len(self.known) + 1),
        )

    def _take_over(self, layers: nn.Sequential, outputs: int) -> None:
        import torch

        with torch.no_grad():
            layers[0].load_state_dict(self.layers[0].state_dict())
            if self.settings.head == "grow":
                last, before = cast("nn.Linear", layers[3]), cast("nn.Linear", self.layers[3])
                last.weight[:outputs] = before.weight
                last.bias[:outputs] = before.bias

    def _softmax(self, features: Rows) -> np.ndarray:
        import torch

        parts = [np.empty((0, len(self.known) + 1), np.float32)]
        with torch.no_grad():
            for start in range(0, len(features), SCORING_BATCH):
                block = np.ascontiguousarray(features[start : start + SCORING_BATCH], np.float32)
                logits = self.layers(torch.from_numpy(block).to(self.device))
                parts.append(logits.softmax(1).cpu().numpy())
        return np.concatenate(parts)

    def _predict(self, features: Rows) -> Prediction:
        probabilities = self._softmax(features)
        if self.threshold is not None:
            detected = probabilities.max(1) < self.threshold
            probabilities = with_unknown(probabilities, detected)
        return Prediction((UNKNOWN, *self.known), probabilities)

    def _novelty(self, features: Rows) -> np.ndarray:
        """Minus the largest softmax among the known labels."""
        return -self._softmax(features)[:, 1:].max(1)

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return dict(self.layers.state_dict())

    def record(self) -> dict[str, Any]:
        return {"threshold": self.threshold}

    def restore(self, state: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        self.threshold = record["threshold"]
        self.layers = self._build()
        self.layers.load_state_dict(dict(state))
        self.layers.to(self.device).eval()
        compile_layers(self)
