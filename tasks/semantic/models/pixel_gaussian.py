"""The trivial baseline (Appendix D): one full-covariance Gaussian over the pixels of each channel.

x = (pixel + U(0, 1)) / 256; the novelty is minus the sum of the three log densities. It is no
mixture, whatever the paper calls it. The noise of an image goes by the seed and its id. A
covariance needs more images than pixels: pictures are shrunk by halves until there are twice as
many training images in every trial of the subset; the side stands in the settings of the run.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from schemas.config import Settings
from schemas.errors import TrainingError
from tasks.semantic.cache import PictureCache
from tasks.semantic.models.base import Model

CHUNK = 2048
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


class GaussianSettings(Settings):
    """One Gaussian over the pixels of each channel."""

    side: int = Field(32, ge=1)
    """Larger pictures are shrunk to it, and halved further until there are images enough."""


class PixelGaussian(Model):
    name: ClassVar[str] = "pixel_gaussian"
    gives: ClassVar[frozenset[str]] = frozenset({"novelty"})
    configuration: ClassVar[type[Settings]] = GaussianSettings


def novelty_of(train: PictureCache, tested: PictureCache, side: int, seed: int) -> Floats:
    """Novelty of each tested picture by the Gaussians of the training pictures."""
    fitted = Sums.of(small_pictures(train, side), train.sample_ids, seed)
    points = noisy(small_pictures(tested, side), tested.sample_ids, seed)
    try:
        return negative_log_density(points, fitted)
    except np.linalg.LinAlgError as error:
        raise TrainingError(
            f"pixel_gaussian: the pixels of {fitted.count} pictures at side {side} have no full "
            f"covariance ({error}); lower side"
        ) from error


# ---------------------------------------------------------------- pixels


def shrunk_side(side: int, images: int) -> int:
    """The side, halved until there are twice as many images as pixels."""
    while side > 1 and 2 * side * side > images:
        side //= 2
    return side


def small_pictures(cache: PictureCache, side: int) -> Bytes:
    """(N, side, side, 3), larger pictures shrunk by the mean of areas."""
    import cv2

    out = np.empty((len(cache), side, side, 3), np.uint8)
    for start in range(0, len(cache), CHUNK):
        rows = range(start, min(start + CHUNK, len(cache)))
        pixels = cache.decode(rows)
        if pixels.shape[1:3] == (side, side):
            out[start : rows.stop] = pixels
        else:
            for row, picture in zip(rows, pixels, strict=True):
                out[row] = cv2.resize(picture, (side, side), interpolation=cv2.INTER_AREA)
    return out


def noisy(pixels: Bytes, sample_ids: pl.Series, seed: int) -> Floats:
    """(3, N, side * side): (pixel + U(0, 1)) / 256; an image's noise depends on its id alone."""
    out = np.empty((3, len(pixels), pixels.shape[1] * pixels.shape[2]))
    for row, (picture, sample_id) in enumerate(zip(pixels, sample_ids, strict=True)):
        own = int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8])
        noise = np.random.default_rng([seed, own]).random(picture.shape)
        out[:, row] = (picture + noise).transpose(2, 0, 1).reshape(3, -1)
    return out / 256


# ---------------------------------------------------------------- Gaussians


@dataclass(frozen=True)
class Sums:
    """Number of images, their sum (3, d) and their products (3, d, d)."""

    count: int
    sum: Floats
    products: Floats

    @classmethod
    def of(cls, pixels: Bytes, sample_ids: pl.Series, seed: int) -> Sums:
        width = pixels.shape[1] * pixels.shape[2]
        total, products = np.zeros((3, width)), np.zeros((3, width, width))
        for start in range(0, len(pixels), CHUNK):
            rows = slice(start, start + CHUNK)
            points = noisy(pixels[rows], sample_ids[rows], seed)
            total += points.sum(axis=1)
            products += points.transpose(0, 2, 1) @ points
        return cls(len(pixels), total, products)


def negative_log_density(points: Floats, fitted: Sums) -> Floats:
    """Of each point, summed over the channels; the constant d/2 log 2 pi is kept."""
    from scipy.linalg import cholesky, solve_triangular

    width = points.shape[2]
    total = np.full(points.shape[1], 1.5 * width * np.log(2 * np.pi))
    for channel, part in enumerate(points):
        mean = fitted.sum[channel] / fitted.count
        covariance = fitted.products[channel] / fitted.count - np.outer(mean, mean)
        root = cholesky(covariance, lower=True)
        white = solve_triangular(root, (part - mean).T, lower=True)
        total += 0.5 * np.einsum("dn,dn->n", white, white) + np.log(np.diag(root)).sum()
    return total
