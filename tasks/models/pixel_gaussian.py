"""The trivial baseline (Appendix D): one full-covariance Gaussian over the pixels of each channel.

x = (pixel + U(0, 1)) / 256; the novelty is minus the sum of the three log densities. It is no
mixture, whatever the paper calls it. The noise of an image goes by the seed and its id. A
covariance needs more images than pixels: `shrunk_side` tells which side has enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from schemas.config import Settings
from schemas.errors import TrainingError
from tasks.learning.samples import Rows, Samples
from tasks.models.base import Fitting, Model
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch

CHUNK = 2048
# Whole pictures, before they are shrunk.
PICTURES_AT_ONCE = 64
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


class Configuration(Settings):
    """One Gaussian over the pixels of each channel."""

    side: int = Field(32, ge=1)
    """Pictures are shrunk to it; where it is not set, it is halved until images are enough."""


class PixelGaussian(Model):
    name: ClassVar[str] = "pixel_gaussian"
    modality: ClassVar[str] = "image"
    configuration: ClassVar[type[Settings]] = Configuration
    means: Floats
    """(3, d), by channel."""
    roots: Sequence[Floats]
    """Lower roots (d, d) of the covariances, as LAPACK has them: column by column."""

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        from scipy.linalg import cholesky

        self.record = {"seed": fitting.seed}
        count, width = len(train), self.settings.side**2
        total, products = np.zeros((3, width)), np.zeros((3, width, width))
        for start in range(0, count, CHUNK):
            points = self._points(train, range(start, min(start + CHUNK, count)))
            total += points.sum(axis=1)
            products += points.transpose(0, 2, 1) @ points
        self.means = total / count
        try:
            self.roots = [
                cholesky(product / count - np.outer(mean, mean), lower=True)
                for product, mean in zip(products, self.means, strict=True)
            ]
        except np.linalg.LinAlgError as error:
            raise TrainingError(
                f"pixel_gaussian: the pixels of {count} pictures at side {self.settings.side} have "
                f"no full covariance ({error}); lower side"
            ) from error
        return pl.DataFrame()

    def _outputs(self, samples: Samples) -> Outputs:
        novelty = np.empty(len(samples))
        for start in range(0, len(samples), CHUNK):
            points = self._points(samples, range(start, min(start + CHUNK, len(samples))))
            chunk = negative_log_density(points, self.means, self.roots)
            novelty[start : start + CHUNK] = chunk
        return Outputs(novelty=novelty)

    def _points(self, samples: Samples, rows: range) -> Floats:
        pictures = small_pictures(samples.images(), rows, self.settings.side)
        return noisy(pictures, samples.ids[rows.start : rows.stop], self.record["seed"])

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        """Of the roots what is not zero."""
        lower = np.tril_indices(self.means.shape[1])
        return {"means": self.means, "roots": np.stack([root[lower] for root in self.roots])}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.means = state["means"].numpy()
        width = self.means.shape[1]
        self.roots = [np.zeros((width, width), order="F") for _ in range(3)]
        for root, values in zip(self.roots, state["roots"].numpy(), strict=True):
            root[np.tril_indices(width)] = values


# ---------------------------------------------------------------- pixels


def shrunk_side(side: int, images: int) -> int:
    """The side, halved until there are twice as many images as pixels."""
    while side > 1 and 2 * side * side > images:
        side //= 2
    return side


def small_pictures(images: Rows, rows: range, side: int) -> Bytes:
    """(N, side, side, 3) of these rows, larger pictures shrunk by the mean of areas."""
    import cv2

    out = np.empty((len(rows), side, side, 3), np.uint8)
    for start in range(0, len(rows), PICTURES_AT_ONCE):
        pictures = images[np.asarray(rows[start : start + PICTURES_AT_ONCE])]
        if pictures.shape[1:3] != (side, side):
            resized = (cv2.resize(p, (side, side), interpolation=cv2.INTER_AREA) for p in pictures)
            pictures = np.stack(list(resized))
        out[start : start + PICTURES_AT_ONCE] = pictures
    return out


def noisy(pixels: Bytes, sample_ids: Sequence[str], seed: int) -> Floats:
    """(3, N, side * side): (pixel + U(0, 1)) / 256; an image's noise depends on its id alone."""
    out = np.empty((3, len(pixels), pixels.shape[1] * pixels.shape[2]))
    for row, (picture, sample_id) in enumerate(zip(pixels, sample_ids, strict=True)):
        image_seed = int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8])
        noise = np.random.default_rng([seed, image_seed]).random(picture.shape)
        out[:, row] = (picture + noise).transpose(2, 0, 1).reshape(3, -1)
    return out / 256


def negative_log_density(points: Floats, means: Floats, roots: Sequence[Floats]) -> Floats:
    """Of each point, summed over the channels; the constant d/2 log 2 pi is kept."""
    from scipy.linalg import solve_triangular

    width = points.shape[2]
    total = np.full(points.shape[1], 1.5 * width * np.log(2 * np.pi))
    for part, mean, root in zip(points, means, roots, strict=True):
        white = solve_triangular(root, (part - mean).T, lower=True)
        total += 0.5 * np.einsum("dn,dn->n", white, white) + np.log(np.diag(root)).sum()
    return total
