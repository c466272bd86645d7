"""What a point network is: clouds (B, P, 3) in, one global feature row per cloud out.

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


ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3, "final_rate": 1e-5}


class Network(Plugin, ABC):
    """Subclasses set the class variables and implement `width`, `build` and `encode`.

    Made with torch's initial weights::

        class Largest(Network):
            name: ClassVar[str] = "largest"
            slope: ClassVar[float] = 0.0

            @property
            def width(self) -> int:
                return 64

            def build(self) -> nn.ModuleDict:
                return nn.ModuleDict({"point": nn.Linear(3, 64)})

            def encode(self, clouds: torch.Tensor) -> torch.Tensor:
                return self.layers["point"](clouds).amax(1)
    """

    slope: ClassVar[float]
    """The activation's below zero."""
    paper_training: ClassVar[Mapping[str, Any]] = ADAM
    """Settings of training with it in the preset `paper`, where they differ from the defaults."""

    def __init__(self, settings: Settings) -> None:
        if type(settings) is not self.configuration:
            raise ConfigError(
                f"network {self.name} takes {self.configuration.__module__}.Configuration, "
                f"not {type(settings).__module__}.{type(settings).__name__}"
            )
        self.settings: Any = settings
        self.layers = self.build()

    @property
    @abstractmethod
    def width(self) -> int:
        """How many features leave `encode`."""

    @abstractmethod
    def build(self) -> nn.ModuleDict:
        """The layers."""

    @abstractmethod
    def encode(self, clouds: torch.Tensor) -> torch.Tensor:
        """The global features."""
