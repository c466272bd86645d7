"""Rarity of pixel colours: novelty = mean surprise of the rarest pixels of a frame.

Not a method of the papers but a plain baseline, trained in one pass without a network: a histogram
of the quantised colours of all training pixels; the surprise of a pixel is -log of the share of its
colour. Game textures have small palettes, so an unseen object shows as unseen colours. Only the
rarest `share` of the pixels counts, by default the 1 % from which NovelCraft calls a frame novel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from tasks.learning.samples import Samples
from tasks.models.base import Fitting, Model
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch

IMAGES_AT_ONCE = 32


class Configuration(Settings):
    bits: int = Field(5, ge=1, le=8, description="Bits kept of each colour channel.")
    share: float = Field(0.01, gt=0, le=1, description="Share of the pixels that counts.")
    item_bar_rows: int = Field(0, ge=0, description="Rows cut off at the bottom.")


class ColourRarity(Model):
    name: ClassVar[str] = "colour_rarity"
    modality: ClassVar[str] = "image"
    seeded: ClassVar[bool] = False
    configuration: ClassVar[type[Settings]] = Configuration
    counts: np.ndarray

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        images = train.images()
        self.counts = np.zeros(1 << 3 * self.settings.bits, np.int64)
        for start in range(0, len(images), IMAGES_AT_ONCE):
            colours = self._colours(images[start : start + IMAGES_AT_ONCE])
            self.counts += np.bincount(colours.ravel(), minlength=len(self.counts))
        seen = int((self.counts > 0).sum())
        return pl.DataFrame({"pixels": [int(self.counts.sum())], "colours_seen": [seen]})

    def _colours(self, images: np.ndarray) -> np.ndarray:
        """(N, H, W, 3) to colour numbers (N, pixels)."""
        bits = self.settings.bits
        kept = images[:, : images.shape[1] - self.settings.item_bar_rows] >> (8 - bits)
        red, green, blue = np.moveaxis(kept.astype(np.int64), 3, 0)
        return ((red << 2 * bits) | (green << bits) | blue).reshape(len(images), -1)

    def _outputs(self, samples: Samples) -> Outputs:
        images = samples.images()
        # One imagined pixel of each colour, so that an unseen one is surprising but not infinite.
        surprise = np.log(self.counts.sum() + len(self.counts)) - np.log(self.counts + 1)
        scores = np.empty(len(images))
        for start in range(0, len(images), IMAGES_AT_ONCE):
            surprises = surprise[self._colours(images[start : start + IMAGES_AT_ONCE])]
            count = max(1, round(surprises.shape[1] * self.settings.share))
            rarest = np.partition(surprises, -count, axis=1)[:, -count:]
            scores[start : start + IMAGES_AT_ONCE] = rarest.mean(1)
        return Outputs(novelty=scores)

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {"counts": self.counts}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.counts = state["counts"].numpy()
