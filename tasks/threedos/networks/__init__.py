"""Point-cloud networks: clouds (B, P, 3) in, one global feature row per cloud out.

A network is a file here with `Configuration`, `PRESETS`, `SLOPE` of its activation below zero,
`width`, `build` (its layers) and `encode` (clouds through the layers). Layers are plain containers
of torch's own modules, so that naming a network costs no import of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from schemas.config import Settings
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

NAMES = ("dgcnn", "pointnet2", "pointnext")


@dataclass(frozen=True, eq=False)
class Network:
    """`width` features leave `encode`; `slope` is the activation's below zero."""

    name: str
    settings: Settings
    layers: nn.ModuleDict
    width: int
    slope: float

    def encode(self, clouds: torch.Tensor) -> torch.Tensor:
        return find(self.name).encode(self.layers, self.settings, clouds)


def find(name: str) -> ModuleType:
    if name not in NAMES:
        raise ConfigError(f"there is no point network {name!r}, only {', '.join(NAMES)}")
    return import_module(f"{__name__}.{name}")


def build(name: str, settings: Settings) -> Network:
    """A network with torch's initial weights."""
    module = find(name)
    if type(settings) is not module.Configuration:
        raise ConfigError(
            f"network {name} takes {module.Configuration.__module__}.Configuration, "
            f"not {type(settings).__module__}.{type(settings).__name__}"
        )
    return Network(name, settings, module.build(settings), module.width(settings), module.SLOPE)
