"""A frozen picture network and a linear head: features for every use, classes learnt on them.

Without a file the network is EfficientNet-Lite0 with the ImageNet weights of its package; a file
tells its network by the names in it (tasks/features/backbones.py), and its own last layer is left
out. Features are computed once for all protocols and seeds; only the head is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.learning.devices import to_device
from tasks.learning.samples import Rows, Samples
from tasks.learning.trainer import Batch, Losses, TrainingSettings, compute_in_batches
from tasks.models.base import CLASSIFIER, Fitting, Model, NetworkModel
from tasks.scores.base import Head, Outputs

if TYPE_CHECKING:
    import torch
    from torch import nn

Channels = tuple[float, float, float]
SMALL_SIDE = 128
ROWS_AT_ONCE = 512


class PictureSettings(Settings):
    """Which network sees pictures, and how they are shown to it."""

    weights: Path | None = Field(
        None, exclude=True, description="File of the network; none: EfficientNet-Lite0."
    )
    side: int | None = Field(
        None, ge=8, description="Side of the pictures it is shown; none: the network's own."
    )
    shown: float | None = Field(
        None, gt=0, le=1, description="Share of the shorter side shown; none: the network's own."
    )
    mean: Channels | None = Field(
        None, description="Of pixels 0-1 by channel, subtracted; none: the network's own."
    )
    deviation: Channels | None = Field(
        None, description="What divides them then; none: the network's own."
    )


class Configuration(PictureSettings, TrainingSettings):
    item_bar_rows: int = Field(0, ge=0, description="Rows cut off at the bottom.")
    embedding_batch: int = Field(16, ge=1, description="Pictures per pass of the network.")
    epochs: int = Field(20, ge=1, description="Passes over the training samples.")
    batch_size: int = Field(128, ge=1, description="Samples per step.")
    learning_rate: float = Field(1e-3, gt=0, description="Size of the first steps.")
    weight_decay: float = Field(1e-2, ge=0, description="L2 penalty of the optimiser.")


class OnPictureNetwork(Model):
    """A model whose settings are also `PictureSettings`."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "small": {}}

    @classmethod
    def resolve(
        cls,
        preset: str | None = None,
        changes: Mapping[str, Any] | None = None,
        network: str | None = None,
    ) -> Any:
        """In `small` the network of the package sees smaller pictures: three times as fast."""
        settings = super().resolve(preset, changes, network)
        if preset != "small" or settings.weights is not None or settings.side is not None:
            return settings
        return settings.model_copy(update={"side": SMALL_SIDE})

    @classmethod
    def weights_files(cls, settings: Any) -> dict[str, Path]:
        """The file of the network by what it is called: the one named, or that of the package."""
        from tasks.features.efficientnet_weights import weights_file

        return super().weights_files(settings) or {"efficientnet_lite0": weights_file()}


def load_frozen(settings: PictureSettings) -> Any:
    """The network, for use only."""
    from tasks.features.backbones import EfficientNetLite0, read_network
    from tasks.features.efficientnet_weights import weights_file

    if settings.weights is None:
        return EfficientNetLite0(weights_file())
    return read_network(settings.weights)[0]


def embed_pictures(
    network: Any, images: torch.Tensor, settings: PictureSettings, rows_cut: int = 0
) -> torch.Tensor:
    """uint8 (N, H, W, 3), less some rows at the bottom, to features (N, D) as the network is shown
    pictures."""
    from tasks.features.backbones import middle_square

    shown = {
        name: getattr(settings, name) or getattr(network, name)
        for name in ("side", "shown", "mean", "deviation")
    }
    pictures = middle_square(images, shown["side"], shown["shown"], rows_cut)
    mean, deviation = (
        to_device(np.array(shown[name], np.float32), pictures.device)[:, None, None]
        for name in ("mean", "deviation")
    )
    features: torch.Tensor = network.embed((pictures - mean) / deviation)
    return features


class Backbone(OnPictureNetwork, NetworkModel):
    name: ClassVar[str] = "backbone"
    modality: ClassVar[str] = "image"
    gives: ClassVar[frozenset[str]] = CLASSIFIER
    configuration: ClassVar[type[Settings]] = Configuration
    embeds: ClassVar[tuple[str, ...]] = (
        *("side", "shown", "mean", "deviation", "item_bar_rows"),
        *("embedding_batch", "cpu_threads"),
    )

    # ------------------------------------------------------------ features

    @cached_property
    def frozen(self) -> Any:
        """The frozen network, on the device."""
        return load_frozen(self.settings).to(self.device)

    def embed(self, samples: Samples) -> np.ndarray:
        samples.images()
        network, rows_cut = self.frozen, self.settings.item_bar_rows

        def compute(batch: Batch) -> dict[str, torch.Tensor]:
            images = batch.array("images")
            return {"features": embed_pictures(network, images, self.settings, rows_cut)}

        batch = self.settings.embedding_batch
        return compute_in_batches(compute, samples, self.device, batch)["features"]

    def embedded(self, samples: Samples) -> Samples:
        """With the array `features`; made here of pictures that come without."""
        if "features" in samples.arrays:
            return samples
        return replace(samples, arrays={"features": self.embed(samples)})

    # ------------------------------------------------------------ the head

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        if train.labels is None:
            raise ConfigError(f"model {self.name} needs labels; give them with the samples")
        self.trained_on = self.embedded(train)
        return super()._fit(self.trained_on, None, fitting)

    def survey(self, train: Samples) -> dict[str, Any]:
        return {"width": train.array("features").shape[1]}

    def build(self) -> dict[str, nn.Module]:
        from torch import nn

        width = self.record["width"]
        norm = nn.BatchNorm1d(width, affine=False)
        return {"norm": norm, "classes": nn.Linear(width, self.classes)}

    def initialise(self) -> None:
        """Features are normalised by the mean and variance of all training samples."""
        import torch

        features = self.trained_on.array("features")
        mean = _mean(features, lambda rows: rows)
        norm = self.layers["norm"]
        norm.running_mean.copy_(torch.from_numpy(mean))
        norm.running_var.copy_(
            torch.from_numpy(_mean(features, lambda rows: np.square(rows - mean)))
        )

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        self.layers["norm"].eval()

    def losses(self, batch: Batch) -> Losses:
        from torch.nn import functional

        logits = self.compute(batch)["logits"]
        right = (logits.argmax(1) == batch.labels).float().mean()
        return {"loss": functional.cross_entropy(logits, batch.labels), "accuracy": right}

    def compute(self, batch: Batch) -> dict[str, torch.Tensor]:
        features = batch.array("features")
        logits = self.layers["classes"](self.layers["norm"](features))
        return {"logits": logits, "features": features}

    def _outputs(self, samples: Samples) -> Outputs:
        return super()._outputs(self.embedded(samples))

    def head(self) -> Head:
        return Head.of(self.layers["classes"], self.layers["norm"])


def _mean(features: Rows, measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Of what is measured of each row, in float64; to the bit that of all rows at once."""
    total = np.zeros((1, features.shape[1]))
    for start in range(0, len(features), ROWS_AT_ONCE):
        rows = measure(features[start : start + ROWS_AT_ONCE].astype(np.float64))
        total = np.add.reduce(np.concatenate([total, rows]), 0, keepdims=True)
    mean: np.ndarray = total[0] / len(features)
    return mean
