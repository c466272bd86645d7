"""EfficientNet-Lite0, frozen: the mean of its ImageNet features over single frames of a clip.

KOWL-718's own networks need a checkpoint; the weights of this one come with a package.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.models.clips import Backbone, ClipSettings

if TYPE_CHECKING:
    from torch import nn


class Configuration(ClipSettings):
    step: int = Field(1, ge=1, description="Every so many frames one is taken.")
    count: int = Field(1, ge=1, description="Frames in a temporal crop.")
    crops: int = Field(8, ge=1, description="Temporal crops, spread evenly over the clip.")
    crop: int = Field(256, ge=1, description="Side of the square cut out of the centre, in pixels.")


class EfficientNet(Backbone):
    name: ClassVar[str] = "efficientnet"
    configuration: ClassVar[type[Settings]] = Configuration
    alike_in_any_batch: ClassVar[bool] = True

    @classmethod
    def weights_files(cls, settings: Any) -> dict[str, Path]:
        from tasks.features.efficientnet_weights import weights_file

        return {"efficientnet_lite0": weights_file()}

    def load(self, weights: Path) -> nn.Module:
        from tasks.features.efficientnet import load_efficientnet

        return load_efficientnet(self.device, weights)

    def vectors(self, clips: np.ndarray) -> np.ndarray:
        from tasks.features.efficientnet import embed

        frames = clips.reshape(-1, *clips.shape[-3:])
        rows = embed(frames, network=self.network)
        return rows.reshape(len(clips), clips.shape[1] * clips.shape[2], rows.shape[1]).mean(1)
