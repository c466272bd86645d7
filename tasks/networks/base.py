"""What a network is: samples of one modality in, one row of features each out.

Layers are plain containers of torch's own modules, so that naming a network costs no import of
torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.engine.plugins import Plugin

if TYPE_CHECKING:
    import torch
    from torch import nn


class Network(Plugin, ABC):
    """Subclasses set the class variables and implement `width`, `build` and `encode`.

    Made with torch's initial weights::

        class Largest(Network):
            name: ClassVar[str] = "largest"
            modality: ClassVar[str] = "cloud"

            @property
            def width(self) -> int:
                return 64

            def build(self) -> nn.ModuleDict:
                return nn.ModuleDict({"point": nn.Linear(3, 64)})

            def encode(self, samples: torch.Tensor) -> torch.Tensor:
                return self.layers["point"](samples).amax(1)
    """

    modality: ClassVar[str]
    """What it takes: `image` (B, 3, H, W) or `cloud` (B, P, 3)."""
    slope: ClassVar[float] = 0.0
    """The activation's below zero."""

    def __init__(self, settings: Settings) -> None:
        if type(settings) is not self.configuration:
            raise ConfigError(
                f"network {self.name} takes {self.configuration.__module__}.Configuration, "
                f"not {type(settings).__module__}.{type(settings).__name__}"
            )
        self.settings: Any = settings
        self.layers: Any = self.build()
        """The nn.ModuleDict that `build` gives."""

    @classmethod
    def training(cls, preset: str) -> Mapping[str, Any]:
        """Settings of models trained on it, in that preset, where they differ from the model's."""
        return {}

    @property
    @abstractmethod
    def width(self) -> int:
        """How many features leave `encode`."""

    @abstractmethod
    def build(self) -> nn.ModuleDict:
        """The layers."""

    @abstractmethod
    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        """The features of each sample of a batch."""
