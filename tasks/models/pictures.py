"""Classifiers of pictures on a network, perhaps with an auxiliary task that is learnt beside.

Rules 6 to 12 of docs/semantic.md. Pictures are cut, flipped and normalised by the mean and the
deviation of the training pixels. Every iteration has first one step of the auxiliary task (lambda
* loss + L2 on the task's own layers and what it shares), then one of the classes (cross entropy +
L2 on the classifier), each with an optimiser, so a momentum, of its own.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.learning.devices import to_device
from tasks.learning.samples import Rows, Samples
from tasks.learning.trainer import (
    Batch,
    Losses,
    Optimizers,
    Stream,
    TrainingSettings,
    make_optimizer,
)
from tasks.models.base import CLASSIFIER, NetworkModel
from tasks.networks.wide_resnet import AUXILIARY, glorot
from tasks.scores.base import Head

if TYPE_CHECKING:
    import torch
    from torch import nn

# Pictures that are read at a time where all are read once.
SURVEYED = 128


class PictureTraining(TrainingSettings):
    """Settings of every picture classifier; defaults are the paper's for CIFAR-10."""

    epochs: int = Field(200, ge=1)
    """Epochs of training."""
    batch_size: int = Field(512, ge=4)
    """Pictures per class step; the rotation tasks take a quarter of it, four times each."""
    order: Literal["shuffled", "balanced", "endless"] = "endless"
    """Pictures of a step: out of an endless series of shuffled passes, or passes of equal steps."""
    epoch_samples: int | None = Field(50_000, ge=1)
    """Pictures that count as an epoch, whatever the training set's size; none: that size."""
    optimizer: Literal["adam", "sgd"] = "sgd"
    """Rule of the steps."""
    learning_rate: float = Field(0.1, gt=0)
    """Size of the first steps."""
    momentum: float = Field(0.9, gt=0, lt=1)
    """Momentum of each of the two optimisers."""
    nesterov: bool = True
    """Nesterov's momentum."""
    milestones: tuple[int, ...] = (60, 120, 160)
    """Epochs after which the rate drops."""
    decay: float = Field(0.2, gt=0, le=1)
    """Factor of the rate at each milestone."""
    weight_decay: float = Field(5e-4, ge=0)
    """L2 = this times half the sum of squares of all variables, norms and biases included."""
    padding: float = Field(1 / 8, ge=0, lt=1)
    """Share of the side that is added by reflection before the random crop."""
    crop: int | None = Field(None, ge=1)
    """Side of the crop, in the middle outside training; none: the picture's."""
    flip: bool = True
    """Mirror half of the pictures."""
    shrink: int = Field(1, ge=1)
    """Squares of this many pixels become their mean before the network (small presets)."""
    evaluations: int = Field(10, ge=1)
    """Epochs that are kept, the last one among them; a trial's number is the mean over them."""
    evaluate_every: int = Field(1, ge=1)
    """Epochs between two that are kept."""
    scoring_batch: int = Field(128, ge=1)
    """Pictures per batch outside training."""


class AuxiliaryTraining(PictureTraining):
    """With a second loss, learnt beside the classes."""

    auxiliary_weight: float | None = Field(None, ge=0)
    """Weight lambda of the auxiliary loss; none: what the paper has for the task and network."""
    auxiliary_statistics: bool = True
    """Auxiliary batches move the running statistics of norms that both tasks share (code: yes)."""


class PictureClassifier(NetworkModel):
    """The classes alone; a subclass may change what the class step sees (`class_view`)."""

    modality: ClassVar[str] = "image"
    gives: ClassVar[frozenset[str]] = CLASSIFIER
    uses_network: ClassVar[bool] = True
    configuration: ClassVar[type[Settings]] = PictureTraining
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {"epochs": 7, "batch_size": 64, "schedule": "one_cycle", "evaluations": 2},
    }
    scheduled: ClassVar[tuple[str, ...]] = ("classes",)
    channels_last: ClassVar[bool] = True

    @classmethod
    def unfit(cls, settings: Any, shortest: int, longest: int) -> str | None:
        """Why it cannot learn from pictures with sides of so many pixels, if it cannot."""
        if settings.crop is None or settings.crop <= shortest:
            return None
        return (
            f"a picture side of {shortest} is less than the crop of {settings.crop}; take larger "
            "pictures or set crop"
        )

    def keeps(self, epoch: int) -> bool:
        left, every = self.settings.epochs - epoch, self.settings.evaluate_every
        return left % every == 0 and left // every < self.settings.evaluations

    def survey(self, train: Samples) -> dict[str, Any]:
        """Mean and deviation of the pixels 0-255 by channel."""
        mean, deviation = pixel_statistics(train.images())
        return {"mean": mean.tolist(), "deviation": deviation.tolist()}

    def build(self) -> dict[str, nn.Module]:
        from torch import nn

        classes = nn.Linear(self.network.width, self.classes)
        self.network.initialise()
        glorot(classes)
        return {"classes": classes, **self.task_layers()}

    def task_layers(self) -> dict[str, nn.Module]:
        """Layers beside the classifier's, with their initial weights."""
        return {}

    # ------------------------------------------------------------ learning

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        parameters = [p for name in ("network", "classes") for p in self.layers[name].parameters()]
        return {"classes": make_optimizer(parameters, self.settings)}

    def step(self, batches: Sequence[Batch], optimizers: Optimizers, phase: str) -> Losses:
        losses = self.losses(batches[0])
        # L2 is on all variables, also those that the loss does not reach.
        optimizers.descend("classes", losses["loss"], fill=True)
        return losses

    def losses(self, batch: Batch) -> Losses:
        from torch.nn import functional

        labels = batch.labels
        pictures = self.class_view(self.augmented(batch))
        logits = self.classify(pictures)[0].float()
        loss = functional.cross_entropy(logits, labels)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}

    def class_view(self, pictures: torch.Tensor) -> torch.Tensor:
        """What the class step sees of augmented, normalised pictures."""
        return pictures

    # ------------------------------------------------------------ pictures in, outputs out

    def augmented(self, batch: Batch) -> torch.Tensor:
        """Cut and flipped at random, normalised."""
        return self._normalised(random_crops(batch.array("images"), self.settings))

    def inputs(self, batch: Batch, *, whole: bool = False) -> torch.Tensor:
        """What the network takes outside of training: the middle of the pictures, or all of it."""
        pictures = batch.array("images")
        return self._normalised(pictures if whole else middle(pictures, self.settings))

    def input_deviation(self) -> torch.Tensor:
        """(3,), of pixels 0-255: what divided them in the input."""
        return to_device(np.array(self.record["deviation"], np.float32), self.device)

    def _normalised(self, pictures: torch.Tensor) -> torch.Tensor:
        mean = to_device(np.array(self.record["mean"], np.float32), self.device)
        return normalised(pictures, mean, self.input_deviation(), self.settings.shrink)

    def classify(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features of normalised pictures."""
        features = self.network.encode(inputs)
        return self.layers["classes"](features), features

    def compute(self, batch: Batch) -> dict[str, torch.Tensor]:
        logits, features = self.classify(self.inputs(batch))
        return {"logits": logits.float(), "features": features.float()}

    def head(self) -> Head:
        """The linear layer on the features, which stand after the last norm and ReLU."""
        return Head.of(self.layers["classes"])


class AuxiliaryClassifier(PictureClassifier):
    """With an auxiliary task: `task_layers` of its own, and a loss on what it shares."""

    configuration: ClassVar[type[Settings]] = AuxiliaryTraining
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **PictureClassifier.presets,
        "small": {**PictureClassifier.presets["small"], "auxiliary_statistics": False},
    }
    scheduled: ClassVar[tuple[str, ...]] = ("classes", "auxiliary")
    auxiliary_decays: ClassVar[bool] = True
    """Whether the auxiliary step has the L2 term."""

    @classmethod
    def resolve(
        cls,
        preset: str | None = None,
        changes: Mapping[str, Any] | None = None,
        network: str | None = None,
    ) -> Any:
        settings = super().resolve(preset, changes, network)
        if settings.auxiliary_weight is not None:
            return settings
        return settings.model_copy(update={"auxiliary_weight": cls.paper_weight(network)})

    @classmethod
    @abstractmethod
    def paper_weight(cls, network: str | None) -> float:
        """The paper's lambda."""

    @abstractmethod
    def auxiliary_pictures(self) -> int:
        """Pictures of an auxiliary step."""

    @abstractmethod
    def auxiliary_loss(self, batch: Batch) -> torch.Tensor:
        """Scalar of one batch, without lambda."""

    def shared_parameters(self) -> list[nn.Parameter]:
        """The network's parameters that an auxiliary step changes."""
        return list(self.layers["network"].parameters())

    def streams(self) -> tuple[Stream, ...]:
        return (*super().streams(), Stream(self.auxiliary_pictures(), self.settings.order))

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        extra_parameters = [
            parameter
            for name, layer in self.layers.items()
            if name not in ("network", "classes")
            for parameter in layer.parameters()
        ]
        decay = self.settings.weight_decay if self.auxiliary_decays else 0.0
        parameters = [*self.shared_parameters(), *extra_parameters]
        auxiliary = make_optimizer(parameters, self.settings, weight_decay=decay)
        return {**super().optimizers(), "auxiliary": auxiliary}

    def step(self, batches: Sequence[Batch], optimizers: Optimizers, phase: str) -> Losses:
        auxiliary_loss = self.auxiliary_step(batches[1], optimizers)
        return {**super().step(batches, optimizers, phase), "auxiliary_loss": auxiliary_loss}

    def auxiliary_step(self, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
        """One step of the auxiliary task; its loss without lambda."""
        with _kept_statistics(self.layers["network"], not self.settings.auxiliary_statistics):
            loss = self.auxiliary_loss(batch)
        optimizers.descend("auxiliary", self.settings.auxiliary_weight * loss)
        return loss.detach()


class Turned(AuxiliaryClassifier):
    """Which of four transforms was done to a picture; `turn` is the transforms' rule."""

    TURNS: ClassVar[int] = 4

    @classmethod
    def paper_weight(cls, network: str | None) -> float:
        return 1.0 if network == "stl" else 0.5

    @classmethod
    def unfit(cls, settings: Any, shortest: int, longest: int) -> str | None:
        reason = super().unfit(settings, shortest, longest)
        if reason or crop_side(shortest, settings) == crop_side(longest, settings):
            return reason
        return (
            f"pictures of {shortest} x {longest} pixels cannot be turned in one batch; set "
            f"models.{cls.name}.crop, so that they are square"
        )

    def auxiliary_pictures(self) -> int:
        return self.settings.batch_size // self.TURNS

    def task_layers(self) -> dict[str, nn.Module]:
        from torch import nn

        turns = nn.Linear(self.network.width, self.TURNS)
        glorot(turns)
        return {"turns": turns}

    def auxiliary_loss(self, batch: Batch) -> torch.Tensor:
        import torch
        from torch.nn import functional

        pictures = self.inputs(batch)
        if reason := self.unfit(self.settings, *sorted(batch.array("images").shape[1:3])):
            raise ConfigError(f"model {self.name}: {reason}")
        every = torch.cat([self.turn(pictures, number) for number in range(self.TURNS)])
        numbers = torch.arange(self.TURNS, device=every.device).repeat_interleave(len(pictures))
        # Parts of the batch that a norm takes together have all four of them.
        order = torch.randperm(len(every), device=every.device)
        every, numbers = every[order], numbers[order]
        rows = self.network.encode(every, AUXILIARY)
        return functional.cross_entropy(self.layers["turns"](rows).float(), numbers)

    @abstractmethod
    def turn(self, pictures: torch.Tensor, number: int) -> torch.Tensor:
        """Transform `number` of pictures (B, 3, H, W) with H = W."""


@contextlib.contextmanager
def _kept_statistics(layers: nn.Module, kept: bool) -> Iterator[None]:
    """Leave the running means and variances of all norms as they are."""
    from torch import nn

    norms = [m for m in layers.modules() if kept and isinstance(m, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


# ---------------------------------------------------------------- pixels


def pixel_statistics(images: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation by channel of pictures (N, H, W, 3), which are read once."""
    sums, pixels, levels = np.zeros((2, 3)), 0, np.arange(256.0)
    for first in range(0, len(images), SURVEYED):
        part = images[first : first + SURVEYED]
        counts = np.stack(
            [np.bincount(part[..., channel].ravel(), minlength=256) for channel in range(3)]
        )
        sums += np.stack([counts @ levels, counts @ levels**2])
        pixels += part[..., 0].size
    mean = sums[0] / pixels
    deviation = np.sqrt(np.maximum(sums[1] / pixels - mean**2, 0))
    if (deviation == 0).any():
        raise ConfigError("all pictures have one colour; give pictures that differ")
    return mean, deviation


def random_crops(pictures: torch.Tensor, settings: PictureTraining) -> torch.Tensor:
    """A random crop of each reflected uint8 picture (H, W, 3), mirrored half of the time.

    Rows and columns are looked up, so nothing is padded in memory.
    """
    import torch

    count, height, width = pictures.shape[:3]

    def along(side: int) -> torch.Tensor:
        margin, kept = int(side * settings.padding), crop_side(side, settings)
        starts = torch.randint(side + 2 * margin - kept + 1, (count, 1), device=pictures.device)
        return reflected(torch.arange(kept, device=pictures.device) + starts - margin, side)

    rows, columns = along(height), along(width)
    if settings.flip:
        mirror = torch.randint(2, (count, 1), device=pictures.device) == 1
        columns = torch.where(mirror, columns.flip(1), columns)
    every = torch.arange(count, device=pictures.device)[:, None, None]
    return pictures[every, rows[:, :, None], columns[:, None, :]]


def middle(pictures: torch.Tensor, settings: PictureTraining) -> torch.Tensor:
    """The middle of the picture, or all of it."""
    height, width = pictures.shape[1:3]
    kept = crop_side(height, settings), crop_side(width, settings)
    top, left = (height - kept[0]) // 2, (width - kept[1]) // 2
    return pictures[:, top : top + kept[0], left : left + kept[1]]


def normalised(
    pictures: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, shrink: int = 1
) -> torch.Tensor:
    """(pixel - mean) / deviation of pixels 0-255 by channel: (B, 3, H, W), channels last in memory.

    Squares of `shrink` pixels become their mean first.
    """
    from torch.nn import functional

    values = pictures.permute(0, 3, 1, 2).float()
    values = functional.avg_pool2d(values, shrink) if shrink > 1 else values
    return (values - mean[None, :, None, None]) / deviation[None, :, None, None]


def reflected(places: torch.Tensor, side: int) -> torch.Tensor:
    """Places beyond 0..side-1 mirrored at the edge pixel, which is not repeated."""
    places = places.abs()
    return places.minimum(2 * (side - 1) - places)


def crop_side(side: int, settings: PictureTraining) -> int:
    if reason := PictureClassifier.unfit(settings, side, side):
        raise ConfigError(reason)
    return settings.crop or side
