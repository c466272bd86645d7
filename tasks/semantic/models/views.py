"""Pictures for a network: read once for their mean, cut, flipped, normalised in whole batches.

uint8 (B, H, W, 3) enters, float32 (B, 3, h, w), contiguous, leaves. CIFAR and STL add an eighth of
the side by reflection and cut at random (docs/semantic.md, 8); ImageNet cuts 224 of 256 at random
in training, in the middle elsewhere. Rows and columns are looked up, so nothing is padded in
memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from tasks.semantic.presets import Setup

# Pictures that are decoded at a time where all are read once.
SURVEYED = 128


class Pictures(Protocol):
    """Such as tasks.semantic.cache.PictureCache; hold small sets, each epoch decodes them."""

    def __len__(self) -> int: ...

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """uint8 RGB (N, H, W, 3)."""
        ...


def decoded(pictures: Pictures, rows: np.ndarray) -> np.ndarray:
    pixels = np.ascontiguousarray(pictures.decode(rows))
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
        raise ConfigError(
            f"pictures are {pixels.dtype} {pixels.shape}, expected uint8 (N, H, W, 3)"
        )
    return pixels


@dataclass(frozen=True)
class Survey:
    mean: np.ndarray
    std: np.ndarray
    digest: str


def survey(pictures: Pictures) -> Survey:
    """Mean and deviation of the pixels by channel, and what identifies them; read once."""
    digest, pixels = hashlib.sha256(), 0
    sums = np.zeros((2, 3))
    for first in range(0, len(pictures), SURVEYED):
        part = decoded(pictures, np.arange(first, min(first + SURVEYED, len(pictures))))
        digest.update(f"{part.shape}".encode())
        digest.update(part)
        counts = np.stack(
            [np.bincount(part[..., channel].ravel(), minlength=256) for channel in range(3)]
        )
        levels = np.arange(256.0)
        sums += np.stack([counts @ levels, counts @ levels**2])
        pixels += part[..., 0].size
    mean = sums[0] / pixels
    std = np.sqrt(np.maximum(sums[1] / pixels - mean**2, 0))
    if (std == 0).any():
        raise ConfigError("all pictures have one colour; give pictures that differ")
    return Survey(mean, std, digest.hexdigest())


def augmented(pictures: torch.Tensor, setup: Setup) -> torch.Tensor:
    """A random crop of the reflected picture, mirrored half of the time; still uint8."""
    import torch

    count, height, width = pictures.shape[:3]

    def along(side: int) -> torch.Tensor:
        margin, kept = int(side * setup.padding), crop_side(side, setup)
        starts = torch.randint(side + 2 * margin - kept + 1, (count, 1), device=pictures.device)
        return reflected(torch.arange(kept, device=pictures.device) + starts - margin, side)

    rows, columns = along(height), along(width)
    if setup.flip:
        mirror = torch.randint(2, (count, 1), device=pictures.device) == 1
        columns = torch.where(mirror, columns.flip(1), columns)
    every = torch.arange(count, device=pictures.device)[:, None, None]
    return pictures[every, rows[:, :, None], columns[:, None, :]]


def plain(pictures: torch.Tensor, setup: Setup) -> torch.Tensor:
    """The middle of the picture, or all of it."""
    height, width = pictures.shape[1:3]
    kept = crop_side(height, setup), crop_side(width, setup)
    top, left = (height - kept[0]) // 2, (width - kept[1]) // 2
    return pictures[:, top : top + kept[0], left : left + kept[1]]


def normalised(
    pictures: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, shrink: int = 1
) -> torch.Tensor:
    """(pixel - mean) / std of pixels 0-255 by channel, channels first."""
    from torch.nn import functional

    first = pictures.permute(0, 3, 1, 2).float().contiguous()
    scaled = (first - mean[None, :, None, None]) / std[None, :, None, None]
    return functional.avg_pool2d(scaled, shrink) if shrink > 1 else scaled


def reflected(places: torch.Tensor, side: int) -> torch.Tensor:
    """Places beyond 0..side-1 mirrored at the edge pixel, which is not repeated."""
    places = places.abs()
    return places.minimum(2 * (side - 1) - places)


def crop_side(side: int, setup: Setup) -> int:
    kept = setup.crop or side
    if kept > side:
        raise ConfigError(
            f"a picture side of {side} is less than the crop of {kept}; take larger pictures or "
            "set crop"
        )
    return kept
