"""Picture networks by file: which network a file of weights is, its names tell.

A path enters; a network for use only leaves, with `embed` (normalised pictures to rows of
features), `width` and `last`, the linear layer from features to classes, where the file has one.
`made` gives the same network of a recorded kind and shape, for weights that a model saved.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from schemas.errors import SourceError
from tasks.features.checkpoints import COUNTER, NAMED_AT_MOST, fill, read_state, without_prefix
from tasks.features.clip_file import ClipTransformer, clip_state
from tasks.features.efficientnet import load_efficientnet
from tasks.features.images import crop_item_bar, to_unit
from tasks.features.resnet import ResNet
from tasks.features.vgg_file import TorchvisionVgg
from tasks.features.vit_file import DinoTransformer


class PictureNetwork(Protocol):
    """What a kind of network has beside nn.Module."""

    width: int
    side: int
    """Side of the pictures that it was made for."""
    shown: float
    """Share of the shorter side of a picture that it sees, in the middle."""
    mean: tuple[float, float, float]
    """Of pixels 0-1 by channel, subtracted."""
    deviation: tuple[float, float, float]
    """What divides them then."""

    @property
    def last(self) -> nn.Linear | None: ...

    def embed(self, pictures: torch.Tensor) -> torch.Tensor: ...

    @staticmethod
    def is_of(state: Mapping[str, torch.Tensor]) -> bool:
        """Whether these names are those of this kind."""

    @staticmethod
    def shape_of(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the constructor takes, as JSON."""

    @staticmethod
    def name_in(ours: str, state: Mapping[str, torch.Tensor]) -> str:
        """What the file calls our tensor `ours`."""


class EfficientNetLite0(nn.Module):
    """That of the package (tasks/features/efficientnet.py), with its ImageNet weights."""

    width, side, shown = 1280, 224, 224 / 256
    mean, deviation = (127 / 255,) * 3, (128 / 255,) * 3
    last = None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.layers = load_efficientnet("cpu", path)

    def embed(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.layers.extract_features(pictures).mean((2, 3))


KINDS: dict[str, type[Any]] = {
    "resnet": ResNet,
    "clip": ClipTransformer,
    "vit": DinoTransformer,
    "vgg": TorchvisionVgg,
}
WANTED = (
    "a checkpoint of a ResNet (CIFAR's resnet20 to resnet110, torchvision's resnet18 and on), "
    "of torchvision's VGG, or of DINO's, DINOv2's or CLIP's transformer"
)
# What files have beside the network: for training only.
UNUSED = ("mask_token",)


def read_network(path: Path) -> tuple[Any, dict[str, Any]]:
    """The network of a file, and its record: kind, shape, origin of the weights."""
    loaded, origin = read_state(path, WANTED)
    state = {n: v for n, v in without_prefix(loaded).items() if n not in UNUSED}
    state = clip_state(state) or state
    kind = next((name for name, network in KINDS.items() if network.is_of(state)), None)
    if kind is None:
        first = ", ".join(sorted(state)[:NAMED_AT_MOST])
        raise SourceError(
            f"weights file {path} holds {first}, ..., which is no known layout; name {WANTED}"
        )
    try:
        shape = KINDS[kind].shape_of(state)
    except SourceError as error:
        raise SourceError(f"weights file {path} is no whole {kind}: {error}") from None
    with torch.device("meta"):  # nothing is drawn
        network = KINDS[kind](**shape)
    names = {
        name: KINDS[kind].name_in(name, state)
        for name in network.state_dict()
        if not name.endswith(COUNTER)
    }
    fill(network, state, names, path)
    return network.requires_grad_(False).eval(), {"kind": kind, "shape": shape, "weights": origin}


def made(record: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> nn.Module:
    """The network of a record, with weights that were saved."""
    with torch.device("meta"):
        network = cast(nn.Module, KINDS[record["kind"]](**record["shape"]))
    network.load_state_dict(dict(state), assign=True)
    return network.requires_grad_(False).eval()


def middle_square(
    images: torch.Tensor, side: int, shown: float, item_bar_rows: int = 0
) -> torch.Tensor:
    """uint8 (N, H, W, 3) to (N, 3, side, side) in [0, 1]: the middle, bicubic and smoothed."""
    pictures = to_unit(crop_item_bar(images, item_bar_rows))
    factor = round(side / shown) / min(pictures.shape[2:])
    size = [round(length * factor) for length in pictures.shape[2:]]
    if size != list(pictures.shape[2:]):
        pictures = functional.interpolate(
            pictures, size=size, mode="bicubic", align_corners=False, antialias=True
        ).clamp(0, 1)
    top, left = ((length - side) // 2 for length in size)
    return pictures[:, :, top : top + side, left : left + side].contiguous()
