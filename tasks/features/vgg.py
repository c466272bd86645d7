"""VGG networks in plain torch with torchvision's parameter names.

Normalised images (N, 3, h, w) enter; class scores or the features before the last layer leave.
The defaults are VGG-16 (NovelCraft 5.1: features = 4096 values after `classifier[:6]`). An official
torchvision file such as vgg16-397923af.pth loads as it is; fewer layers and a width factor give
networks that a CPU can train.
"""

import hashlib
import pickle
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from schemas.errors import ConfigError, SourceError
from tasks.features import VGG16

LARGEST_FILE = 4 << 30


class Vgg(nn.Module):
    def __init__(
        self,
        classes: int,
        *,
        layers: Sequence[int | str] = VGG16,
        width: float = 1.0,
        hidden: int = 4096,
        pool: int = 7,
        batch_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 3
        for layer in layers:
            if layer == "M":
                blocks.append(nn.MaxPool2d(2))
                continue
            wide = max(1, round(int(layer) * width))
            blocks.append(nn.Conv2d(channels, wide, 3, padding=1))
            if batch_norm:
                blocks.append(nn.BatchNorm2d(wide))
            blocks.append(nn.ReLU(inplace=True))
            channels = wide
        self.features = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(pool)
        self.classifier = nn.Sequential(
            nn.Linear(channels * pool * pool, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """The features before the last layer."""
        return self.classifier[:6](torch.flatten(self.avgpool(self.features(images)), 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier[6](self.embed(images))


def load_weights(network: Vgg, path: Path) -> str:
    """Fill `network` from a torchvision state file; the last layer stays as it is if the classes
    differ. Returns what was loaded, for the record."""
    if not path.is_file():
        raise SourceError(f"weights file {path} not found; name a torchvision VGG file (.pth)")
    if path.stat().st_size > LARGEST_FILE:
        raise SourceError(f"weights file {path} is larger than {LARGEST_FILE >> 30} GB; refused")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # torchvision writes the start of the hash into the name.
    promised = re.search(r"-([0-9a-f]{8})\.pth$", path.name)
    if promised and not digest.startswith(promised[1]):
        raise SourceError(
            f"weights file {path} has sha256 {digest[:8]}..., its name promises {promised[1]}; "
            "download it again"
        )
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise SourceError(
            f"weights file {path} is not a plain torch state file: {str(error)[:200]}"
        ) from error
    state = network.state_dict()
    file_state = (
        {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
        if isinstance(loaded, dict)
        else {}
    )
    head = ("classifier.6.weight", "classifier.6.bias")
    if any(name in file_state and file_state[name].shape != state[name].shape for name in head):
        file_state = {name: value for name, value in file_state.items() if name not in head}
    # Files older than batch counting lack these.
    optional = {*head, *(name for name in state if name.endswith("num_batches_tracked"))}
    wrong = sorted(
        name
        for name in state.keys() | file_state.keys()
        if (name not in file_state and name not in optional)
        or name not in state
        or (name in file_state and file_state[name].shape != state[name].shape)
    )
    if wrong:
        name = wrong[0]
        shape = tuple(file_state[name].shape) if name in file_state else "nothing"
        expected = tuple(state[name].shape) if name in state else "nothing"
        raise ConfigError(
            f"weights file {path} does not fit the network: {len(wrong)} parameters differ, first "
            f"{name}: found {shape}, expected {expected}; use layers, width, hidden and batch_norm "
            "of the network that the file was made for"
        )
    network.load_state_dict({**state, **file_state})
    return f"{path.name} sha256 {digest}"
