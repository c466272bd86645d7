"""EfficientNet-Lite0, frozen: the mean of its ImageNet features over single frames of a clip.

KOWL-718's own networks need a checkpoint; the weights of this one come with a package.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, compute_in_batches
from tasks.models.clips import Backbone, ClipSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

FRAMES_AT_ONCE = 16


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

    def pass_batch(self, clips: np.ndarray) -> dict[str, np.ndarray]:
        frames = clips.reshape(-1, *clips.shape[-3:])
        rows = embed(frames, network=self.network)
        by_clip = rows.reshape(len(clips), clips.shape[1] * clips.shape[2], rows.shape[1])
        return {"features": by_clip.mean(1)}


def embed(images: np.ndarray, *, network: Any, batch_size: int = FRAMES_AT_ONCE) -> np.ndarray:
    """uint8 (N, H, W, 3) to float32 (N, 1280): the average before the last layer."""
    from tasks.features.efficientnet import centre, for_network

    samples = Samples.unnamed(images=images)
    samples.images()

    def compute(some: Batch) -> dict[str, torch.Tensor]:
        maps = network.extract_features(for_network(centre(some.array("images"))))
        return {"features": maps.mean((2, 3))}

    device = str(next(network.parameters()).device)
    return compute_in_batches(compute, samples, device, batch_size)["features"]
