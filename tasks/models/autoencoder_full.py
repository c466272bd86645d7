"""Autoencoder of whole frames; novelty = mean squared error of the reconstruction (NovelCraft 5.1).

Frames lose the item bar and get the rows back by repetition; in training the input carries noise
and the clean frame is the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.features import images as preprocessing
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, Losses
from tasks.models.base import NetworkModel
from tasks.models.frames import FrameTraining

if TYPE_CHECKING:
    import torch
    from torch import nn


class Configuration(FrameTraining):
    epochs: int = Field(8000, ge=1, description="Passes over the training samples.")
    batch_size: int = Field(128, ge=1, description="Samples per step.")
    learning_rate: float = Field(1e-3, gt=0, description="Size of the steps.")
    code: int = Field(100, ge=1, description="Values in the code between encoder and decoder.")
    hidden: int = Field(256, ge=1, description="Size of the layer before and after the code.")
    width: float = Field(1.0, gt=0, description="Factor on the channels 32, 64, 128, 256.")
    noise: float = Field(1 / 40, ge=0, description="Deviation of the noise on training inputs.")


SMALL_AUTOENCODER = {
    "width": 0.25,
    "code": 32,
    "hidden": 128,
    "learning_rate": 2e-3,
    "order": "shuffled",
}


class AutoencoderFull(NetworkModel):
    name: ClassVar[str] = "autoencoder_full"
    version: ClassVar[int] = 2
    modality: ClassVar[str] = "image"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"precision": "float32"},
        "small": dict(**SMALL_AUTOENCODER, scale=0.25, epochs=12, batch_size=32, milestones=(10,)),
    }
    validates: ClassVar[bool] = True

    def survey(self, train: Samples) -> dict[str, Any]:
        return {"input_size": self.input_size(train.images()[:1])}

    def input_size(self, images: np.ndarray) -> list[int]:
        """Height and width of what enters the network."""
        import torch

        return list(self.prepared(torch.from_numpy(images)).shape[2:])

    def build(self) -> dict[str, nn.Module]:
        from tasks.features.autoencoder import Autoencoder

        settings, (height, width) = self.settings, self.record["input_size"]
        network = Autoencoder(
            height, width, code=settings.code, hidden=settings.hidden, factor=settings.width
        )
        return {"autoencoder": network}

    def prepared(self, images: torch.Tensor) -> torch.Tensor:
        """Pictures in [0, 1] of the size that enters the network."""
        return preprocessing.for_whole_autoencoder(
            images, item_bar_rows=self.settings.item_bar_rows, scale=self.settings.scale
        )

    def training_inputs(self, images: torch.Tensor) -> torch.Tensor:
        return self.prepared(images)

    def losses(self, batch: Batch) -> Losses:
        import torch
        from torch.nn import functional

        clean = self.training_inputs(batch.array("images"))
        noisy = (clean + self.settings.noise * torch.randn_like(clean)).clamp(0, 1)
        return {"loss": functional.mse_loss(self.layers["autoencoder"](noisy), clean)}

    def errors(self, inputs: torch.Tensor) -> torch.Tensor:
        """Mean squared error of each image of a batch."""
        return ((self.layers["autoencoder"](inputs) - inputs) ** 2).double().mean((1, 2, 3))

    def compute(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"novelty": self.errors(self.prepared(batch.array("images")))}
