"""A frozen picture network on single frames of a clip: the mean of their features.

The networks are those of the model `backbone`: EfficientNet-Lite0, whose ImageNet weights come with
a package, or one by file. The frames of a clip pass together and alone, so that a vector does not
depend on the clips beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, compute_in_batches
from tasks.models.backbone import OnPictureNetwork, PictureSettings, embed_pictures, load_frozen
from tasks.models.clips import Backbone, ClipSettings

if TYPE_CHECKING:
    import torch
    from torch import nn


class Configuration(ClipSettings, PictureSettings):
    step: int = Field(1, ge=1, description="Every so many frames one is taken.")
    count: int = Field(1, ge=1, description="Frames in a temporal crop.")
    crops: int = Field(8, ge=1, description="Temporal crops, spread evenly over the clip.")
    crop: int = Field(256, ge=1, description="Side of the square cut out of the centre, in pixels.")


class FrameBackbone(OnPictureNetwork, Backbone):
    name: ClassVar[str] = "frame_backbone"
    configuration: ClassVar[type[Settings]] = Configuration
    alike_in_any_batch: ClassVar[bool] = True

    def load(self, weights: Path | None) -> nn.Module:
        return load_frozen(self.settings)

    def pass_batch(self, clips: np.ndarray) -> dict[str, np.ndarray]:
        network = self.network

        def compute(batch: Batch) -> dict[str, torch.Tensor]:
            return {"features": embed_pictures(network, batch.array("images"), self.settings)}

        frames = clips.shape[1] * clips.shape[2]
        images = Samples.unnamed(images=clips.reshape(-1, *clips.shape[-3:]))
        rows = compute_in_batches(compute, images, self.device, frames)["features"]
        return {"features": rows.reshape(len(clips), frames, rows.shape[1]).mean(1)}
