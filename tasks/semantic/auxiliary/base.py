"""What an auxiliary task is: layers of its own, a loss of a batch, and which pictures it takes.

Normalised pictures (B, 3, H, W) and the classifier's layers enter `loss`; an unweighted scalar
leaves. The training loop multiplies it by lambda and takes a step on `parameters` with an optimiser
of its own, before each class step. A task without a loss (`pictures` gives 0) may still change what
the class step sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from schemas.errors import ConfigError
from tasks.semantic.networks import AUXILIARY, NetworkSettings, encode, features
from tasks.semantic.presets import Setup

if TYPE_CHECKING:
    import torch
    from torch import nn


class Auxiliary(ABC):
    """Subclasses set `name` and implement `pictures`; those that learn also `build` and `loss`."""

    name: ClassVar[str]
    # Whether its pictures are cropped and flipped at random, as the class step's are.
    augmented: ClassVar[bool] = False
    # Whether its step has the L2 term.
    decays: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

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
        raise AssertionError(f"auxiliary task {self.name} takes pictures but has no loss")

    def class_view(self, pictures: torch.Tensor) -> torch.Tensor:
        """What the class step sees of augmented, normalised pictures."""
        return pictures


class Turned(Auxiliary):
    """Which of four transforms was done to a picture; `turn` is the transforms' rule."""

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
                f"auxiliary task {self.name}: pictures of {tuple(pictures.shape[2:])} cannot be "
                "turned in one batch; set crop, so that they are square"
            )
        every = torch.cat([self.turn(pictures, number) for number in range(self.TURNS)])
        numbers = torch.arange(self.TURNS, device=every.device).repeat_interleave(len(pictures))
        rows = encode(layers, self.setup.network, every, AUXILIARY)
        return functional.cross_entropy(own["turns"](rows).float(), numbers)

    @abstractmethod
    def turn(self, pictures: torch.Tensor, number: int) -> torch.Tensor:
        """Transform `number` of pictures (B, 3, H, W) with H = W."""
