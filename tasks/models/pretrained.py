"""A picture classifier by file, frozen: logits of its own last layer, features before it.

Nothing is trained. The file tells the network and its depth (tasks/features/backbones.py). Its
classes must be those of the protocol, in the order of `splits.label`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from schemas.runs import Origin
from tasks.features.images import IMAGENET_DEVIATION, IMAGENET_MEAN
from tasks.learning.devices import to_device
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, compute_in_batches
from tasks.models.base import CLASSIFIER, Fitting, Model
from tasks.models.pictures import normalised
from tasks.scores.base import Head, Outputs

if TYPE_CHECKING:
    import torch

Channels = tuple[float, float, float]


class Configuration(Settings):
    weights: Path | None = Field(
        None, exclude=True, description="File of the classifier: .th, .pth, .pt or .safetensors."
    )
    mean: Channels = Field(IMAGENET_MEAN, description="Of pixels 0-1 by channel, subtracted.")
    deviation: Channels = Field(IMAGENET_DEVIATION, description="What divides them then.")
    scoring_batch: int = Field(128, ge=1, description="Pictures per batch.")
    cpu_threads: int = Field(
        1, ge=1, description="Threads on a CPU; they order the sums, so the result depends on them."
    )


class Pretrained(Model):
    name: ClassVar[str] = "pretrained"
    modality: ClassVar[str] = "image"
    gives: ClassVar[frozenset[str]] = CLASSIFIER
    configuration: ClassVar[type[Settings]] = Configuration
    seeded: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = True
    origin: ClassVar[Origin] = "frozen"
    network: Any
    """A PictureNetwork with its last layer."""

    @classmethod
    def check_classes(cls, settings: Any, classes: int, protocol: str) -> None:
        cls._read(settings, classes, protocol)

    @classmethod
    def _read(cls, settings: Any, classes: int, protocol: str) -> tuple[Any, dict[str, Any]]:
        """The network of the file and its record; one of other classes is refused."""
        from tasks.features.backbones import read_network

        path = settings.weights
        if path is None:
            raise ConfigError(f"model {cls.name} needs its weights: name their file")
        network, record = read_network(path)
        in_file = 0 if network.last is None else network.last.out_features
        if in_file != classes:
            raise ConfigError(
                f"model {cls.name}: weights file {path} is for {in_file} classes, {protocol} "
                f"has {classes} known ones; name a file or protocols with the same classes"
            )
        return network, record

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        network, self.record = self._read(self.settings, self.classes, "the protocol")
        self.network = network.to(self.device)
        return pl.DataFrame()

    def inputs(self, batch: Batch, *, whole: bool = False) -> torch.Tensor:
        """Normalised pictures; they are always whole."""
        mean = to_device(np.array(self.settings.mean, np.float32), self.device) * 255
        return normalised(batch.array("images"), mean, self.input_deviation()).contiguous()

    def input_deviation(self) -> torch.Tensor:
        """(3,), of pixels 0-255: what divided them in the input."""
        return to_device(np.array(self.settings.deviation, np.float32), self.device) * 255

    def classify(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features of normalised pictures."""
        features = self.network.embed(inputs)
        return self.network.last(features), features

    def _outputs(self, samples: Samples) -> Outputs:
        samples.images()

        def compute(batch: Batch) -> dict[str, torch.Tensor]:
            logits, features = self.classify(self.inputs(batch))
            return {"logits": logits, "features": features}

        arrays = compute_in_batches(compute, samples, self.device, self.settings.scoring_batch)
        return Outputs(arrays["logits"], arrays["features"])

    def head(self) -> Head:
        return Head.of(self.network.last)

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return dict(self.network.state_dict())

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        from tasks.features.backbones import made

        self.network = made(self.record, state).to(self.device)
