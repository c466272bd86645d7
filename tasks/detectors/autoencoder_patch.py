"""Autoencoder of 32 x 32 patches; score = mean squared error over all patches (NovelCraft 5.1).

Training takes random patches of the half-overlapping grid (13 x 15 at full size), scoring all of
them. `pooling = max` scores by the worst patch instead, which suits small objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.detectors import autoencoder_full
from tasks.features import images as preprocessing
from tasks.learning.loop import in_batches
from tasks.learning.samples import Samples

if TYPE_CHECKING:
    import torch


class Configuration(autoencoder_full.Configuration):
    patches_per_image: int = Field(1, ge=1, description="Random patches of each image an epoch.")
    pooling: Literal["mean", "max"] = Field(
        "mean", description="Score of an image from the errors of its patches."
    )


class AutoencoderPatch(autoencoder_full.AutoencoderFull):
    name: ClassVar[str] = "autoencoder_patch"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": dict(
            **autoencoder_full.SMALL_AUTOENCODER,
            scale=0.5,
            epochs=6,
            batch_size=16,
            milestones=(5,),
            patches_per_image=8,
            pooling="max",
        ),
    }

    def _grid(self, images: torch.Tensor) -> torch.Tensor:
        """All patches of a batch; still bytes at full size, so that only chosen ones convert."""
        cropped = preprocessing.crop_item_bar(images, self.settings.item_bar_rows)
        if self.settings.scale != 1:
            cropped = preprocessing.scaled(preprocessing.to_unit(cropped), self.settings.scale)
        return preprocessing.patch_grid(cropped)

    def _training_inputs(self, images: torch.Tensor) -> torch.Tensor:
        import torch

        grid = self._grid(images)
        image = torch.arange(len(grid), device=grid.device)[:, None]
        wanted = (len(grid), self.settings.patches_per_image)
        row, column = (torch.randint(n, wanted, device=grid.device) for n in grid.shape[1:3])
        chosen = grid[image, row, column].flatten(0, 1)
        return chosen if chosen.is_floating_point() else preprocessing.to_unit(chosen)

    def _input_size(self, images: np.ndarray) -> tuple[int, int]:
        return preprocessing.PATCH_SIDE, preprocessing.PATCH_SIDE

    def _score(self, samples: Samples) -> np.ndarray:
        def compute(images: torch.Tensor) -> dict[str, torch.Tensor]:
            grid = self._grid(images)
            count = grid.shape[1] * grid.shape[2]
            patches = grid.flatten(0, 2)
            if not patches.is_floating_point():
                patches = preprocessing.to_unit(patches)
            errors = self._errors(patches).view(len(images), count)
            return {"error": errors.amax(1) if self.settings.pooling == "max" else errors.mean(1)}

        return in_batches(compute, samples.images(), self.device, batch_size=8)["error"]
