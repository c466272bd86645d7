"""Autoencoder of 32 x 32 patches; novelty = mean squared error over all patches (NovelCraft 5.1).

Training takes random patches of the half-overlapping grid (13 x 15 at full size), scoring all of
them. `pooling = max` scores by the worst patch instead, which suits small objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.features import images as preprocessing
from tasks.learning.trainer import Batch
from tasks.models import autoencoder_full

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
        "paper": {"precision": "float32"},
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

    def grid(self, images: torch.Tensor) -> torch.Tensor:
        """All patches of a batch; still bytes at full size, so that only chosen ones convert."""
        cropped = preprocessing.crop_item_bar(images, self.settings.item_bar_rows)
        if self.settings.scale != 1:
            cropped = preprocessing.scaled(preprocessing.to_unit(cropped), self.settings.scale)
        return preprocessing.patch_grid(cropped)

    def training_inputs(self, images: torch.Tensor) -> torch.Tensor:
        import torch

        grid = self.grid(images)
        image = torch.arange(len(grid), device=grid.device)[:, None]
        size = (len(grid), self.settings.patches_per_image)
        row, column = (torch.randint(n, size, device=grid.device) for n in grid.shape[1:3])
        return _unit(grid[image, row, column].flatten(0, 1))

    def input_size(self, images: np.ndarray) -> list[int]:
        return [preprocessing.PATCH_SIDE, preprocessing.PATCH_SIDE]

    def scoring_batch(self) -> int:
        return 8  # pictures; each is many patches

    def compute(self, batch: Batch) -> dict[str, torch.Tensor]:
        grid = self.grid(batch.array("images"))
        count = grid.shape[1] * grid.shape[2]
        errors = self.errors(_unit(grid.flatten(0, 2))).view(len(grid), count)
        return {"novelty": errors.amax(1) if self.settings.pooling == "max" else errors.mean(1)}


def _unit(patches: torch.Tensor) -> torch.Tensor:
    return patches if patches.is_floating_point() else preprocessing.to_unit(patches)
