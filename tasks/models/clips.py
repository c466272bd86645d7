"""What frozen networks of clips share: temporal crops of frames in, one vector a clip out.

A sample is the array `clips`, uint8 (N, views, count, side, side, 3), RGB, as the model's settings
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

from schemas.clips import FrameSampling, Preprocessing
from schemas.errors import ConfigError
from storage.filehash import sha256_file
from tasks.learning.devices import Precision, mixed
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, compute_in_batches
from tasks.models.base import Fitting, Model
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tasks.features.clips import ClipNetwork, Normalisation

DIGEST = "weights"


class ClipSettings(FrameSampling):
    """Which frames are shown, and how many clips at a time."""

    batch: int = Field(8, ge=1, description="Clips per forward pass.")
    cpu_threads: int = Field(
        2, ge=1, description="Threads on a CPU; they order the sums, so the result depends on them."
    )


class Backbone(Model):
    """Subclasses set `configuration` and implement `load` and `pass_batch`."""

    modality: ClassVar[str] = "clip"
    gives: ClassVar[frozenset[str]] = frozenset({"features"})
    seeded: ClassVar[bool] = False
    alike_in_any_batch: ClassVar[bool] = False
    """Whether a vector is the same to the bit whatever the other clips of its batch are."""
    digest: bytes | None = None
    """SHA-256 of the weights, where the model was fitted or loaded."""

    @classmethod
    def resolve(
        cls,
        preset: str | None = None,
        changes: Mapping[str, Any] | None = None,
        network: str | None = None,
    ) -> Any:
        """Under a preset that only predictors have, nothing of it is other than by default."""
        return super().resolve(preset if preset in cls.presets else None, changes, network)

    @abstractmethod
    def load(self, weights: Path | None) -> nn.Module:
        """The network, with the weights of that file; none: random, or those of its package."""

    @abstractmethod
    def pass_batch(self, clips: np.ndarray) -> dict[str, np.ndarray]:
        """Float32 rows by what the model gives, of clips (N, views, count, side, side, 3)."""

    @cached_property
    def network(self) -> Any:
        path = self._weights()
        if self.digest is not None and self.digest != _digest(path):
            raise ConfigError(
                f"model {self.name} was saved with other weights than {path}; name the same file"
            )
        return self.load(path).to(self.device)

    def _weights(self) -> Path:
        (path,) = self.weights_files(self.settings).values()
        return path

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        self.digest = _digest(self._weights())
        return pl.DataFrame()

    def _outputs(self, samples: Samples) -> Outputs:
        clips = samples.array("clips")
        shown = self.settings
        expected = (shown.views, shown.count, shown.crop, shown.crop, 3)
        if clips.dtype != np.uint8 or clips.shape[1:] != expected:
            raise ConfigError(
                f"model {self.name}: clips are {clips.dtype} {clips.shape}, expected uint8 (N, "
                f"{', '.join(map(str, expected))})"
            )
        starts = range(0, max(len(samples), 1), shown.batch)
        parts = [self.pass_batch(clips[start : start + shown.batch]) for start in starts]
        return Outputs(
            **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        )

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        digest = self.digest or _digest(self._weights())
        return {DIGEST: np.frombuffer(digest, np.uint8).copy()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.digest = state[DIGEST].numpy().tobytes()


class CropSettings(ClipSettings):
    """Of networks that take a temporal crop at a time, from a checkpoint."""

    preprocessing: Preprocessing = Field(
        "release",
        description="As KOWL-718's release shows clips, as FAIR tests its weights (fair), or "
        "temporal crops from first to last frame and the centre (spread).",
    )

    weights: Path | None = Field(None, exclude=True, description="Checkpoint file of the network.")
    precision: Precision = Field(
        "float32",
        description="float32, tf32, bfloat16 or float16 (mixed); auto: what a GPU is for.",
    )


class CropBackbone(Backbone):
    """The vectors of a clip's temporal crops stand side by side, as in KOWL-718's release; those of
    FAIR's views are averaged. Logits are averaged over the views, and are of the classes that the
    weights were trained on: a protocol numbers its own in another order."""

    gives: ClassVar[frozenset[str]] = frozenset({"features", "logits"})
    needs_weights: ClassVar[bool] = True
    version: ClassVar[int] = 2

    def puts_out(self) -> frozenset[str]:
        """A file may hold the network without its classifier."""
        without = self.network.classifier is None
        return frozenset({"features"}) if without else super().puts_out()

    def pass_batch(self, clips: np.ndarray) -> dict[str, np.ndarray]:
        settings = self.settings
        averaged = settings.preprocessing == "fair"
        rows = pass_views(
            self.network,
            clips.reshape(-1, *clips.shape[2:]),
            self.device,
            settings.batch,
            settings.precision,
            normalisation="fair" if averaged else "release",
        )
        by_view = {name: each.reshape(*clips.shape[:2], -1) for name, each in rows.items()}
        averages = {name: each.mean(1) for name, each in by_view.items()}
        if not averaged:
            averages["features"] = by_view["features"].reshape(len(clips), -1)
        return averages


def pass_views(
    network: ClipNetwork,
    clips: np.ndarray,
    device: str = "cpu",
    batch: int = 4,
    precision: str = "float32",
    *,
    normalisation: Normalisation = "release",
) -> dict[str, np.ndarray]:
    """uint8 (N, T, H, W, 3) to float32 `features` (N, dim) and, where the network has a classifier,
    `logits`; the network is on the device."""
    from tasks.features.clips import prepare

    if clips.dtype != np.uint8 or clips.shape[1:] != (
        network.frames,
        network.side,
        network.side,
        3,
    ):
        raise ConfigError(
            f"clips are {clips.dtype} {clips.shape}, expected uint8 (N, {network.frames}, "
            f"{network.side}, {network.side}, 3)"
        )

    def compute(some: Batch) -> dict[str, torch.Tensor]:
        with mixed(precision, device):
            features = network.features(prepare(some.array("clips"), normalisation)).float()
            if network.classifier is None:
                return {"features": features}
            return {"features": features, "logits": network.classifier(features).float()}

    shown = Samples.unnamed(clips=clips)
    return compute_in_batches(compute, shown, device, batch, tf32=precision == "tf32")


def _digest(path: Path) -> bytes:
    return bytes.fromhex(sha256_file(path))
