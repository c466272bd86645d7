"""What a model of semantic anomalies is, and one that trains a network with an auxiliary task.

An auxiliary task has layers of its own, a loss of a batch, and says which pictures it takes.

Normalised pictures (B, 3, H, W) and the classifier's layers enter `loss`; an unweighted scalar
leaves. The training loop multiplies it by lambda and takes a step on `parameters` with an optimiser
of its own, before each class step. A task without a loss (`pictures` gives 0) may still change what
the class step sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.engine.plugins import Plugin, put_over
from tasks.semantic.networks import AUXILIARY, NetworkSettings, encode, features
from tasks.semantic.presets import AuxiliarySetup, Setup, preset_values

if TYPE_CHECKING:
    import torch
    from torch import nn


class Model(Plugin):
    """A model by the name of its file; `gives` is what a score may ask of its outputs."""

    gives: ClassVar[frozenset[str]]


class NetworkModel(Model, ABC):
    """Subclasses set `name` and implement `pictures`; those that learn also `build` and `loss`.

    A subclass with settings of its own declares them in a subclass of `Setup` (or of
    `AuxiliarySetup`, with lambda) as its `configuration`.
    """

    gives: ClassVar[frozenset[str]] = frozenset({"logits", "features", "head", "train", "valid"})
    configuration: ClassVar[type[Setup]] = Setup
    # Whether its pictures are cropped and flipped at random, as the class step's are.
    augmented: ClassVar[bool] = False
    # Whether its step has the L2 term.
    decays: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        self.setup: Any = setup

    @classmethod
    def resolve(
        cls,
        preset: str | None = None,
        changes: Mapping[str, Any] | None = None,
        network: str = "cifar",
    ) -> Settings:
        """The preset of that network variant with what was asked to differ."""
        values = preset_values(network, preset, cls.configuration) if preset else {}
        return super().resolve(None, put_over(values, changes or {}))

    @classmethod
    def weight(cls, network_name: str) -> float:
        """The paper's lambda."""
        return 0.0

    @classmethod
    def network(cls, settings: NetworkSettings) -> NetworkSettings:
        """The network that the task asks for, made of the one that was chosen."""
        return settings

    @abstractmethod
    def pictures(self) -> int:
        """Pictures of an auxiliary step; 0: there is none."""

    def build(self) -> dict[str, nn.Module]:
        """Layers beside the classifier's."""
        return {}

    def shared(self, layers: nn.ModuleDict) -> list[nn.Parameter]:
        """The classifier's parameters that an auxiliary step changes: all but the classes' own."""
        return [p for name, p in layers.named_parameters() if not name.startswith("classes.")]

    def loss(
        self, own: nn.ModuleDict, layers: nn.ModuleDict, pictures: torch.Tensor
    ) -> torch.Tensor:
        """Scalar of one batch, without lambda."""
        raise AssertionError(f"model {self.name} takes pictures but has no loss")

    def class_view(self, pictures: torch.Tensor) -> torch.Tensor:
        """What the class step sees of augmented, normalised pictures."""
        return pictures


class Turned(NetworkModel):
    """Which of four transforms was done to a picture; `turn` is the transforms' rule."""

    configuration: ClassVar[type[Setup]] = AuxiliarySetup
    TURNS: ClassVar[int] = 4

    @classmethod
    def weight(cls, network_name: str) -> float:
        return 1.0 if network_name == "stl" else 0.5

    def pictures(self) -> int:
        return self.setup.batch_size // self.TURNS

    def build(self) -> dict[str, nn.Module]:
        from torch import nn

        linear = nn.Linear(features(self.setup.network), self.TURNS)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        return {"turns": linear}

    def loss(
        self, own: nn.ModuleDict, layers: nn.ModuleDict, pictures: torch.Tensor
    ) -> torch.Tensor:
        import torch
        from torch.nn import functional

        if pictures.shape[2] != pictures.shape[3]:
            raise ConfigError(
                f"model {self.name}: pictures of {tuple(pictures.shape[2:])} cannot be "
                "turned in one batch; set crop, so that they are square"
            )
        every = torch.cat([self.turn(pictures, number) for number in range(self.TURNS)])
        numbers = torch.arange(self.TURNS, device=every.device).repeat_interleave(len(pictures))
        rows = encode(layers, self.setup.network, every, AUXILIARY)
        return functional.cross_entropy(own["turns"](rows).float(), numbers)

    @abstractmethod
    def turn(self, pictures: torch.Tensor, number: int) -> torch.Tensor:
        """Transform `number` of pictures (B, 3, H, W) with H = W."""
