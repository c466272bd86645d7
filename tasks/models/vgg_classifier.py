"""VGG-16 classifier of the known classes; novelty = -max softmax (NovelCraft 5.1).

Images and labels enter. Other models build on a fitted one: on its logits and on the 4096 features
before the last layer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.features import VGG16
from tasks.features import images as preprocessing
from tasks.learning.devices import to_device
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, Losses
from tasks.models.base import CLASSIFIER, NOVELTY_ONLY, NetworkModel
from tasks.models.frames import FrameTraining
from tasks.scores.base import Head, Outputs

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger(__name__)

Layer = int | Literal["M"]


class VggSettings(FrameTraining):
    layers: tuple[Layer, ...] = Field(
        VGG16, description="Channels of each convolution; M halves the sides."
    )
    width: float = Field(1.0, gt=0, description="Factor on all channels.")
    hidden: int = Field(4096, ge=1, description="Size of the features and of the layer before.")
    pool: int = Field(7, ge=1, description="Side of the grid that the convolutions end in.")
    batch_norm: bool = Field(False, description="Batch normalisation after each convolution.")
    dropout: float = Field(0.5, ge=0, lt=1, description="Share of features dropped in training.")
    weights: Path | None = Field(
        None,
        exclude=True,
        description="torchvision VGG file to start from; none = random weights.",
    )


class Configuration(VggSettings):
    epochs: int = Field(1000, ge=1, description="Passes over the training samples.")
    batch_size: int = Field(16, ge=1, description="Samples per step.")
    learning_rate: float = Field(1e-5, gt=0, description="Size of the steps.")


# A network that two CPU cores train from random weights in a minute.
SMALL_NETWORK = {
    "scale": 0.5,
    "layers": (64, "M", 128, "M", 256, "M", 256, "M"),
    "width": 0.25,
    "hidden": 128,
    "pool": 4,
    "batch_norm": True,
    "dropout": 0.2,
}


def softmax(logits: np.ndarray, precision: str = "float64") -> np.ndarray:
    """In float32 a lead of some 17 already gives a probability of exactly 1."""
    numbers = logits.astype(precision)
    powers = np.exp(numbers - numbers.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


class VggClassifier(NetworkModel):
    name: ClassVar[str] = "vgg_classifier"
    modality: ClassVar[str] = "image"
    gives: ClassVar[frozenset[str]] = CLASSIFIER | NOVELTY_ONLY
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"precision": "float32"},
        "small": dict(
            **SMALL_NETWORK, epochs=10, batch_size=32, learning_rate=1e-3, milestones=(8,)
        ),
    }
    validates: ClassVar[bool] = True

    def build(self) -> dict[str, nn.Module]:
        from tasks.features.vgg import Vgg

        if not self.classes:
            raise ConfigError(f"model {self.name} needs labels; give them with the samples")
        shape = ("layers", "width", "hidden", "pool", "batch_norm", "dropout")
        return {"vgg": Vgg(self.classes, **{name: getattr(self.settings, name) for name in shape})}

    def start(self, seed: int) -> None:
        from tasks.features.vgg import load_weights

        super().start(seed)
        if self.settings.weights is None:
            log.warning("VGG starts from random weights; set `weights` to start from ImageNet")
        else:
            origin = load_weights(self.layers["vgg"], self.settings.weights)
            self.record["initial_weights"] = origin
            log.info("VGG starts from %s", origin)

    def inputs(self, batch: Batch) -> torch.Tensor:
        """Normalised pictures (B, 3, h, w)."""
        return preprocessing.for_classifier(
            batch.array("images"),
            item_bar_rows=self.settings.item_bar_rows,
            scale=self.settings.scale,
        )

    def classify(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features of normalised pictures."""
        features = self.layers["vgg"].embed(inputs)
        return self.last_layer(features), features

    def input_deviation(self) -> torch.Tensor:
        """Deviation of pixels 0-255 by channel, as `inputs` divides by it."""
        return to_device(np.array(preprocessing.IMAGENET_DEVIATION, np.float32), self.device) * 255

    @property
    def last_layer(self) -> nn.Linear:
        return self.layers["vgg"].classifier[6]

    def losses(self, batch: Batch) -> Losses:
        from torch.nn import functional

        logits, _ = self.classify(self.inputs(batch))
        right = (logits.argmax(1) == batch.labels).float().mean()
        return {"loss": functional.cross_entropy(logits, batch.labels), "accuracy": right}

    def compute(self, batch: Batch) -> dict[str, torch.Tensor]:
        logits, features = self.classify(self.inputs(batch))
        return {"logits": logits, "features": features}

    def _outputs(self, samples: Samples) -> Outputs:
        outputs = super()._outputs(samples)
        assert outputs.logits is not None
        return replace(outputs, novelty=-softmax(outputs.logits).max(1))

    def head(self) -> Head | None:
        return Head.of(self.last_layer)
