"""Autoencoder of whole frames; score = mean squared error of the reconstruction (NovelCraft 5.1).

Frames lose the item bar and get the rows back by repetition; in training the input carries noise
and the clean frame is the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from tasks.detectors.base import Detector
from tasks.detectors.vgg_classifier import ImageSettings
from tasks.features import images as preprocessing
from tasks.learning.devices import seeded
from tasks.learning.loop import TrainingSettings, in_batches, train
from tasks.learning.samples import Samples
from tasks.learning.training import Progress

if TYPE_CHECKING:
    import torch

    from tasks.features.autoencoder import Autoencoder


class Configuration(ImageSettings, TrainingSettings):
    epochs: int = Field(8000, ge=1, description="Passes over the training samples.")
    batch_size: int = Field(128, ge=1, description="Samples per step.")
    learning_rate: float = Field(1e-3, gt=0, description="Size of the steps.")
    balanced: bool = Field(
        False, description="Draw samples with replacement, weight 1 / size of their class."
    )
    code: int = Field(100, ge=1, description="Values in the code between encoder and decoder.")
    hidden: int = Field(256, ge=1, description="Size of the layer before and after the code.")
    width: float = Field(1.0, gt=0, description="Factor on the channels 32, 64, 128, 256.")
    noise: float = Field(1 / 40, ge=0, description="Deviation of the noise on training inputs.")


SMALL_AUTOENCODER = {"width": 0.25, "code": 32, "hidden": 128, "learning_rate": 2e-3}


class AutoencoderFull(Detector):
    name: ClassVar[str] = "autoencoder_full"
    needs: ClassVar[tuple[str, ...]] = ("images",)
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": dict(**SMALL_AUTOENCODER, scale=0.25, epochs=12, batch_size=32, milestones=(10,)),
    }
    network: Autoencoder
    size: tuple[int, int]

    def _fit(
        self,
        train_samples: Samples,
        valid: Samples | None,
        *,
        seed: int,
        checkpoints: Path | None,
        progress: Progress | None,
    ) -> pl.DataFrame:
        import torch
        from torch.nn import functional

        settings = self.settings
        self.size = self._input_size(train_samples.images())
        with seeded([seed, 0], self.device):
            network = self._build()

        def batch_loss(images: torch.Tensor, labels: torch.Tensor | None) -> dict:
            clean = self._training_inputs(images)
            noisy = (clean + settings.noise * torch.randn_like(clean)).clamp(0, 1)
            return {"loss": functional.mse_loss(network(noisy), clean)}

        history = train(
            network,
            batch_loss,
            train_samples,
            settings,
            seed=seed,
            device=self.device,
            valid=valid,
            checkpoint=checkpoints / "network.safetensors" if checkpoints else None,
            progress=progress,
        )
        self.network = network
        self.record = {"initial_weights": f"random, seed {seed}"}
        return history

    def _prepare(self, images: torch.Tensor) -> torch.Tensor:
        return preprocessing.for_whole_autoencoder(
            images, item_bar_rows=self.settings.item_bar_rows, scale=self.settings.scale
        )

    def _training_inputs(self, images: torch.Tensor) -> torch.Tensor:
        return self._prepare(images)

    def _input_size(self, images: np.ndarray) -> tuple[int, int]:
        import torch

        height, width = self._prepare(torch.from_numpy(images[:1])).shape[2:]
        return height, width

    def _build(self) -> Autoencoder:
        from tasks.features.autoencoder import Autoencoder

        settings = self.settings
        return Autoencoder(
            *self.size, code=settings.code, hidden=settings.hidden, factor=settings.width
        )

    def _errors(self, inputs: torch.Tensor) -> torch.Tensor:
        """Mean squared error of each image of a batch."""
        return ((self.network(inputs) - inputs) ** 2).double().mean((1, 2, 3))

    def _score(self, samples: Samples) -> np.ndarray:
        def compute(images: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"error": self._errors(self._prepare(images))}

        return in_batches(compute, samples.images(), self.device)["error"]

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {**self.network.state_dict(), "input_size": np.array(self.size, np.int64)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        weights = dict(state)
        height, width = weights.pop("input_size").tolist()
        self.size = (height, width)
        self.network = self._build()
        self.network.load_state_dict(weights)
        self.network.to(self.device).eval()
