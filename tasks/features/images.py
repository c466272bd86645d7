"""Preprocessing of game frames: uint8 tensors (N, H, W, 3) in, float tensors (N, 3, h, w) out.

The rules are those of the NovelCraft releases: the item bar (bottom 22 rows) is cut off, values go
to [0, 1], an optional scale gives int(side * scale), networks trained on ImageNet get its mean and
deviation, patches of 32 overlap by half (13 x 15 of them at full size), and the autoencoder for
whole images gets the lost rows back by repeating the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schemas.errors import ConfigError
from tasks.learning.devices import to_device

if TYPE_CHECKING:
    import torch

ITEM_BAR_ROWS = 22
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
PATCH_SIDE = 32
PATCH_STRIDE = 16


def crop_item_bar(images: torch.Tensor, rows: int = ITEM_BAR_ROWS) -> torch.Tensor:
    """(N, H, W, 3) to a view (N, 3, H - rows, W) of the same type."""
    height = images.shape[1]
    if height <= rows:
        raise ConfigError(
            f"images are {height} rows high, not more than the {rows} rows of the item bar; "
            "set item_bar_rows to 0 for images without one"
        )
    return images[:, : height - rows].permute(0, 3, 1, 2)


def to_unit(images: torch.Tensor) -> torch.Tensor:
    """Bytes to floats in [0, 1].

    Contiguous: torch 2.13 on a CPU corrupts memory in the backward pass of strided convolutions
    when their input is a permuted view (channels last).
    """
    return images.contiguous().float() / 255


def scaled(images: torch.Tensor, scale: float) -> torch.Tensor:
    """Both sides times `scale`, rounded down; smoothed against aliasing."""
    if scale == 1:
        return images
    from torch.nn import functional

    size = (int(images.shape[2] * scale), int(images.shape[3] * scale))
    if min(size) < 1:
        raise ConfigError(
            f"scale {scale} leaves an image of {size[0]} x {size[1]}; use a larger one"
        )
    return functional.interpolate(
        images, size=size, mode="bilinear", align_corners=False, antialias=True
    )


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Minus the ImageNet mean, by its deviation, per channel."""
    mean, deviation = (
        to_device(np.array(values, np.float32), images.device).view(1, 3, 1, 1)
        for values in (IMAGENET_MEAN, IMAGENET_DEVIATION)
    )
    return (images - mean) / deviation


def for_classifier(
    images: torch.Tensor, *, item_bar_rows: int = ITEM_BAR_ROWS, scale: float = 1
) -> torch.Tensor:
    return normalised(scaled(to_unit(crop_item_bar(images, item_bar_rows)), scale))


def for_whole_autoencoder(
    images: torch.Tensor, *, item_bar_rows: int = ITEM_BAR_ROWS, scale: float = 1
) -> torch.Tensor:
    """Cropped, scaled, and padded back to the height of the uncropped (scaled) image."""
    from torch.nn import functional

    small = scaled(to_unit(crop_item_bar(images, item_bar_rows)), scale)
    missing = int(images.shape[1] * scale) - small.shape[2]
    return functional.pad(small, (0, 0, 0, missing), mode="replicate")


def patch_grid(
    images: torch.Tensor, side: int = PATCH_SIDE, stride: int = PATCH_STRIDE
) -> torch.Tensor:
    """(N, 3, h, w) to a view (N, rows, columns, 3, side, side)."""
    if min(images.shape[2:]) < side:
        raise ConfigError(
            f"images of {images.shape[2]} x {images.shape[3]} (cropped and scaled) are smaller "
            f"than a patch of {side}; use a larger scale"
        )
    return images.unfold(2, side, stride).unfold(3, side, stride).permute(0, 2, 3, 1, 4, 5)
