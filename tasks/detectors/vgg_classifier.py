"""VGG-16 classifier of the known classes; score = -max softmax (NovelCraft 5.1).

Images and labels enter. Other detectors build on a fitted one: `outputs` gives its logits and the
4096 features before the last layer, and takes them from the samples where they stand there already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.detectors.base import Detector, TorchSettings
from tasks.features import VGG16
from tasks.features import images as preprocessing
from tasks.learning.devices import seeded
from tasks.learning.loop import TrainingSettings, in_batches, train
from tasks.learning.samples import Samples
from tasks.learning.training import Progress
from tasks.scores.base import Head, Outputs

if TYPE_CHECKING:
    import torch

    from tasks.features.vgg import Vgg

log = logging.getLogger(__name__)

Layer = int | Literal["M"]

CLASSIFIER_GIVES = frozenset({"novelty", "logits", "features", "head"})


class ImageSettings(TorchSettings):
    item_bar_rows: int = Field(
        preprocessing.ITEM_BAR_ROWS, ge=0, description="Rows cut off at the bottom."
    )
    scale: float = Field(1.0, gt=0, le=1, description="Factor on both sides after the cut.")


class VggSettings(ImageSettings):
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


class Configuration(VggSettings, TrainingSettings):
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


def new_network(
    settings: VggSettings, labels: np.ndarray | None, *, seed: int, device: str
) -> tuple[Vgg, str]:
    """A network for the classes in `labels`, and where its weights come from."""
    from tasks.features.vgg import load_weights

    if labels is None:
        raise ConfigError("a classifier needs labels; give them with the training samples")
    with seeded([seed, 0], device):
        network = build(settings, int(labels.max()) + 1)
    if settings.weights is None:
        origin = f"random, seed {seed}"
        log.warning("VGG starts from random weights; set `weights` to start from ImageNet")
    else:
        origin = load_weights(network, settings.weights)
        log.info("VGG starts from %s", origin)
    return network.to(device), origin


def build(settings: VggSettings, classes: int) -> Vgg:
    from tasks.features.vgg import Vgg

    return Vgg(
        classes,
        layers=settings.layers,
        width=settings.width,
        hidden=settings.hidden,
        pool=settings.pool,
        batch_norm=settings.batch_norm,
        dropout=settings.dropout,
    )


def preprocessor(settings: ImageSettings) -> Callable[[torch.Tensor], torch.Tensor]:
    def prepare(images: torch.Tensor) -> torch.Tensor:
        return preprocessing.for_classifier(
            images, item_bar_rows=settings.item_bar_rows, scale=settings.scale
        )

    return prepare


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """In float64: in float32 two thirds of the published ensemble scores are exactly -1."""
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


class VggClassifier(Detector):
    name: ClassVar[str] = "vgg_classifier"
    needs: ClassVar[tuple[str, ...]] = ("images",)
    gives: ClassVar[frozenset[str]] = CLASSIFIER_GIVES
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": dict(
            **SMALL_NETWORK, epochs=10, batch_size=32, learning_rate=1e-3, milestones=(8,)
        ),
    }
    network: Vgg

    def _fit(
        self,
        train: Samples,
        valid: Samples | None,
        *,
        seed: int,
        checkpoints: Path | None,
        progress: Progress | None,
    ) -> pl.DataFrame:
        checkpoint = checkpoints / "network.safetensors" if checkpoints else None
        return self.train_network(train, valid, seed=seed, checkpoint=checkpoint, progress=progress)

    def train_network(
        self,
        data: Samples,
        valid: Samples | None,
        *,
        seed: int,
        checkpoint: Path | None,
        progress: Progress | None,
    ) -> pl.DataFrame:
        from torch.nn import functional

        network, origin = new_network(self.settings, data.labels, seed=seed, device=self.device)
        prepare = preprocessor(self.settings)

        def batch_loss(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = network(prepare(images))
            right = (logits.argmax(1) == labels).float().mean()
            return {"loss": functional.cross_entropy(logits, labels), "accuracy": right}

        history = train(
            network,
            batch_loss,
            data,
            self.settings,
            seed=seed,
            device=self.device,
            valid=valid,
            checkpoint=checkpoint,
            progress=progress,
        )
        self.network = network
        self.record = {"initial_weights": origin}
        return history

    def _outputs(self, samples: Samples) -> Outputs:
        """Logits and features are taken from the samples if they stand there."""
        if {"logits", "features"} <= samples.arrays.keys():
            logits, features = samples.array("logits"), samples.array("features")
        else:
            prepare = preprocessor(self.settings)

            def compute(images: torch.Tensor) -> dict[str, torch.Tensor]:
                features = self.network.embed(prepare(images))
                return {"features": features, "logits": self.network.classifier[6](features)}

            found = in_batches(compute, samples.images(), self.device)
            logits, features = found["logits"], found["features"]
        return Outputs(logits, features, -softmax(logits).max(1))

    def head(self) -> Head | None:
        return Head.of(self.network.classifier[6])

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return dict(self.network.state_dict())

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.network = build(self.settings, len(state["classifier.6.bias"]))
        self.network.load_state_dict(state)
        self.network.to(self.device).eval()
