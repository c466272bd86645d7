"""What frozen networks of clips share: temporal crops of frames in, one vector a clip out.

A sample is the array `clips`, uint8 (N, crops, count, side, side, 3), RGB, as the model's settings
say. Nothing is fitted, so that a model can be used as soon as it is prepared; its state is the
digest of its weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
from pydantic import Field

from schemas.clips import FrameSampling
from schemas.errors import ConfigError
from storage.filehash import sha256_file
from tasks.learning.samples import Samples
from tasks.models.base import Fitting, Model
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch
    from torch import nn

DIGEST = "weights"


class ClipSettings(FrameSampling):
    """Which frames are shown, and how many clips at a time."""

    batch: int = Field(8, ge=1, description="Clips per forward pass.")
    cpu_threads: int = Field(
        2, ge=1, description="Threads on a CPU; they order the sums, so the result depends on them."
    )


class Backbone(Model):
    """Subclasses set `configuration` and implement `load` and `vectors`."""

    modality: ClassVar[str] = "clip"
    gives: ClassVar[frozenset[str]] = frozenset({"features"})
    seeded: ClassVar[bool] = False
    alike_in_any_batch: ClassVar[bool] = False
    """Whether a vector is the same to the bit whatever the other clips of its batch are."""
    digest: bytes | None = None
    """SHA-256 of the weights, where the model was fitted or loaded."""

    @abstractmethod
    def load(self, weights: Path) -> nn.Module:
        """The network, with the weights of that file."""

    @abstractmethod
    def vectors(self, clips: np.ndarray) -> np.ndarray:
        """float32 (N, D) of clips (N, crops, count, side, side, 3), which are one batch."""

    @cached_property
    def network(self) -> Any:
        path = self._weights()
        if self.digest is not None and self.digest != _digest(path):
            raise ConfigError(
                f"model {self.name} was saved with other weights than {path}; name the same file"
            )
        return self.load(path).to(self.device)

    def _weights(self) -> Path:
        files = self.weights_files(self.settings)
        if not files:
            raise ConfigError(f"model {self.name} needs its weights: name their file in `weights`")
        (path,) = files.values()
        return path

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        self.digest = _digest(self._weights())
        return pl.DataFrame()

    def _outputs(self, samples: Samples) -> Outputs:
        clips = samples.array("clips")
        shown = self.settings
        expected = (shown.crops, shown.count, shown.crop, shown.crop, 3)
        if clips.dtype != np.uint8 or clips.shape[1:] != expected:
            raise ConfigError(
                f"model {self.name}: clips are {clips.dtype} {clips.shape}, expected uint8 (N, "
                f"{', '.join(map(str, expected))})"
            )
        starts = range(0, max(len(samples), 1), shown.batch)
        return Outputs(
            features=np.concatenate(
                [self.vectors(clips[start : start + shown.batch]) for start in starts]
            )
        )

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        digest = self.digest or _digest(self._weights())
        return {DIGEST: np.frombuffer(digest, np.uint8).copy()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.digest = state[DIGEST].numpy().tobytes()


class CropSettings(ClipSettings):
    """Of networks that take a temporal crop at a time, from a checkpoint."""

    weights: Path | None = Field(None, exclude=True, description="Checkpoint file of the network.")
    mixed_precision: bool = Field(False, description="bfloat16 where a GPU has it; never on a CPU.")


class CropBackbone(Backbone):
    """The vectors of a clip's temporal crops stand side by side."""

    needs_weights: ClassVar[bool] = True

    def vectors(self, clips: np.ndarray) -> np.ndarray:
        from tasks.features.clips import embed

        crops = clips.reshape(-1, *clips.shape[2:])
        settings = self.settings
        rows = embed(self.network, crops, self.device, settings.batch, settings.mixed_precision)
        return rows.reshape(len(clips), clips.shape[1] * rows.shape[1])


def _digest(path: Path) -> bytes:
    return bytes.fromhex(sha256_file(path))
