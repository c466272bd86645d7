"""What a training method is: layers on a network, a loss of a batch, outputs of a trained model.

Clouds (B, P, 3), drawn and augmented, and labels (B,) enter; `losses` names the parts of the loss,
of which "loss" is minimised. `outputs` gives "features" (the penultimate g, rule 10), and
"novelty" where the method has a score of its own (higher = more novel); `logits` follow from the
features where there are classes. All other scores are made of both by `tasks.scores`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.engine.plugins import Plugin
from tasks.threedos import networks
from tasks.threedos.networks.augment import Augmentation, UpAxis
from tasks.threedos.networks.base import ADAM, Network

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tasks.scores.base import Head

Losses = Mapping[str, "torch.Tensor"]


class TrainingSettings(Settings):
    """How a method is trained; defaults are 3DOS's for DGCNN."""

    epochs: int = Field(250, ge=1)
    """Passes over the training shapes."""
    batch_size: int = Field(64, ge=2)
    """Shapes per step."""
    points: int = Field(1024, ge=2)
    """Points drawn of each cloud."""
    scan_points: int | None = Field(2048, ge=2)
    """Points taken of scans: instead of `points` in training on them and in tests of them."""
    votes: int = Field(1, ge=1)
    """Draws of points over which the outputs of a trained model are averaged."""
    augmentation: Augmentation = "st"
    """Random changes: none, st (synthetic), rw (scans); tracks with scans have rw for st."""
    up: UpAxis = "y"
    """Axis of the rw turns; the raw OFF files of ModelNet40 have z up."""
    optimizer: Literal["adam", "sgd"] = "sgd"
    """Rule of the steps."""
    learning_rate: float = Field(0.1, gt=0)
    """Size of the first steps."""
    final_rate: float = Field(1e-4, ge=0)
    """Size at the end of the cosine."""
    schedule_epochs: int | None = Field(None, ge=1)
    """Length of the cosine where it is not the training's."""
    warmup_epochs: int = Field(0, ge=0)
    """Epochs of linear rise before the cosine."""
    warmup_rate: float = Field(1e-5, ge=0)
    """Size of the steps where the rise begins."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    weight_decay: float = Field(1e-4, ge=0)
    """L2 penalty of the optimiser."""
    initial_weights: Literal["normal", "torch"] = "normal"
    """N(0, .02) as released, or what torch gives its layers."""
    mixed_precision: bool = True
    """bfloat16 where a GPU has it; never on a CPU."""
    cpu_threads: int = Field(1, ge=1)
    """Threads on a CPU; they order the sums, so the result depends on them."""
    checkpoint_every: int = Field(10, ge=1, exclude=True)
    """Epochs between checkpoints."""


SMALL: dict[str, Any] = {
    **ADAM,
    "epochs": 60,
    "batch_size": 32,
    "points": 256,
    "scan_points": None,
    "votes": 4,
    "learning_rate": 3e-3,
    "initial_weights": "torch",
}


class Method(Plugin, ABC):
    """Subclasses set the class variables and implement `build`, `losses` and `outputs`.

    `configuration` has the settings of training and those of the method; `presets` say what of
    them differs from the settings that the network is trained with.
    """

    configuration: ClassVar[type[Settings]] = TrainingSettings
    # What a pass leaves for scores: of logits, features, novelty and head.
    gives: ClassVar[frozenset[str]]
    # Its fitted layers are where this method starts from.
    requires: ClassVar[str | None] = None
    uses_network: ClassVar[bool] = True
    # Augmented copies of each shape in a batch, one after the other.
    views: ClassVar[int] = 1
    # Each epoch goes over the shapes once for each name.
    passes: ClassVar[tuple[str, ...]] = ("plain",)

    def __init__(self, settings: Settings, network: Network | None, classes: int) -> None:
        from torch import nn

        self.settings: Any = settings
        self.network: Any = network
        self.classes = classes
        layers = {"network": network.layers} if network else {}
        self.layers = nn.ModuleDict({**layers, **self.build()})

    @classmethod
    def resolve(
        cls,
        preset: str | None = None,
        changes: Mapping[str, Any] | None = None,
        network: str | None = "dgcnn",
    ) -> Any:
        """The settings of a preset for that network, with what was asked to differ."""
        if preset is None:
            return super().resolve(None, changes)
        if preset not in cls.presets:
            raise ConfigError(
                f"{cls.name} has no preset {preset!r}; there are: {', '.join(cls.presets)}"
            )
        values = dict(SMALL)
        if preset == "paper":
            values = dict(networks.find(network).paper_training if network else ADAM)
        values |= cls.presets[preset]
        values |= cls.training(preset, values.get("optimizer", "sgd"))
        return super().resolve(None, {**values, **(changes or {})})

    @classmethod
    def training(cls, preset: str, optimizer: str) -> dict[str, Any]:
        """What differs from the network's own training settings, by its optimiser."""
        return {}

    @abstractmethod
    def build(self) -> dict[str, nn.Module]:
        """The layers beside the network's."""

    @abstractmethod
    def losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        """Scalars of one batch."""

    @abstractmethod
    def outputs(self, clouds: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows of one batch."""

    def logits(self, g: torch.Tensor) -> torch.Tensor | None:
        """Of features (N, D), one per class; none for a method without classes."""
        return None

    def head(self) -> Head | None:
        """How logits follow from features, where that is norm, activation and a linear layer."""
        return None

    def optimizers(self, training: TrainingSettings) -> dict[str, torch.optim.Optimizer]:
        """By name; the schedule is that of `main`, others keep their rates."""
        return {"main": make_optimizer(self.layers.parameters(), training)}

    def step(
        self,
        clouds: torch.Tensor,
        labels: torch.Tensor,
        optimizers: Mapping[str, torch.optim.Optimizer],
        name: str,
    ) -> Losses:
        """Learn from one batch in the pass called `name`."""
        losses = self.losses(clouds, labels)
        descend(optimizers["main"], losses["loss"])
        return losses


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def make_optimizer(
    parameters: Iterable[nn.Parameter], training: TrainingSettings
) -> torch.optim.Optimizer:
    import torch

    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, rate, weight_decay=decay)
    return torch.optim.SGD(parameters, rate, momentum=training.momentum, weight_decay=decay)
