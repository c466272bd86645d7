"""The one training loop: samples and something trainable in, fitted layers and a history out.

Everything random in an epoch (order, augmentation, dropout) is drawn from (seed, epoch), so that a
training that was killed and started again ends with the same bits as an undisturbed one on the same
kind of processor. A checkpoint is the layers, the optimisers' tensors and the history; one from the
middle of an epoch holds the step, torch's random states and the running sums too.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError, TrainingError
from storage.tensors import read_header, read_tensors, write_tensors
from tasks.engine.ahead import ahead
from tasks.learning.compiling import compile_layers
from tasks.learning.devices import (
    Precision,
    arithmetic,
    choose_device,
    seeded,
    to_device,
    to_host,
    with_arithmetic,
)
from tasks.learning.samples import Samples, is_there
from tasks.learning.training import Progress

if TYPE_CHECKING:
    import torch
    from lightning_fabric import Fabric

Losses = Mapping[str, "torch.Tensor"]
"""Scalars of a batch by name; `loss` is what is minimised."""

TRAINER_VERSION = 1
"""Raised when the same settings and samples train to other weights."""
CHECKPOINT = "checkpoint.safetensors"
SCORING_BATCH = 32
LAYERS, OPTIMIZER = "layers.", "optimizer."
SUMS, RANDOM, RANDOM_GPU = "running_sums", "random_state", "random_state_gpu"
LOSS_SCALE = "loss_scale"


class TrainingSettings(Settings):
    """How layers are trained; a model's own settings stand beside these."""

    epochs: int = Field(ge=1, description="Passes over the training samples.")
    batch_size: int = Field(ge=1, description="Samples per step.")
    order: Literal["shuffled", "full", "balanced", "endless"] = Field(
        "shuffled",
        description="Each sample once an epoch in equal batches; in full batches, what is left "
        "over not at all (one batch where there are too few); drawn with replacement, weight 1 / "
        "size of the class; or full batches out of an endless series of shuffled passes.",
    )
    epoch_samples: int | None = Field(
        None, ge=1, description="Samples that count as an epoch of `endless`; none: all."
    )
    optimizer: Literal["adam", "sgd"] = Field("adam", description="Rule of the steps.")
    learning_rate: float = Field(gt=0, description="Size of the first steps.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of sgd.")
    nesterov: bool = Field(False, description="Nesterov's momentum.")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty of the optimiser.")
    schedule: Literal["steps", "cosine", "one_cycle"] = Field(
        "steps",
        description="Rate: lower after each milestone; a cosine after a linear rise; or one rise "
        "and fall over all steps.",
    )
    milestones: tuple[int, ...] = Field((), description="Epochs after which the rate drops.")
    decay: float = Field(0.1, gt=0, le=1, description="Factor of the rate at each milestone.")
    final_rate: float = Field(0.0, ge=0, description="Rate at the end of the cosine.")
    schedule_epochs: int | None = Field(
        None, ge=1, description="Length of the cosine; none: that of the training."
    )
    warmup_epochs: int = Field(0, ge=0, description="Epochs of linear rise before the cosine.")
    warmup_rate: float = Field(1e-5, ge=0, description="Rate where that rise begins.")
    rise: float = Field(0.2, gt=0, lt=1, description="Share of one_cycle in which the rate rises.")
    precision: Precision = Field(
        "auto",
        description="Arithmetic: float32; tf32, float32 whose products a GPU rounds; bfloat16 or "
        "float16, mixed with float32; auto, one of these two where a GPU is made for it. What a "
        "device lacks is refused.",
    )
    compile: bool = Field(
        False, description="Compile the layers by torch.compile, for trainings and passes."
    )
    processes: int = Field(
        1,
        ge=1,
        description="Processes that share each batch: one for each GPU, or several on a CPU. Sums "
        "and batch statistics are per process, so the result depends on their number.",
    )
    cpu_threads: int = Field(
        1, ge=1, description="Threads on a CPU; they order the sums, so the result depends on them."
    )
    checkpoint_every: int = Field(10, ge=1, exclude=True, description="Epochs between checkpoints.")
    checkpoint_seconds: float = Field(
        600.0, ge=0, exclude=True, description="Longest time between checkpoints."
    )


@dataclass(frozen=True)
class Stream:
    """Where a step's batches come from. A step gets one batch of each stream."""

    batch_size: int
    order: Literal["shuffled", "full", "balanced", "endless"]
    epoch_samples: int | None = None

    def batches(
        self, samples: Samples, seed: int, epoch: int, number: int, steps: int | None
    ) -> list[np.ndarray]:
        """Rows of each batch of an epoch; `steps` is how many the first stream has."""
        count = len(samples)
        if self.order == "endless":
            steps = steps or max(1, (self.epoch_samples or count) // self.batch_size)
            length = steps * self.batch_size
            rows = endless_rows(seed, number, count, (epoch - 1) * length, length)
            return np.split(rows, steps)
        draws = np.random.default_rng([seed, epoch])
        if self.order == "balanced":
            rows = draws.choice(count, count, p=balanced_shares(samples))
        else:
            rows = draws.permutation(count)
        if self.order == "full":
            full = max(1, count // self.batch_size)
            rows, steps = rows[: full * self.batch_size], steps or full
        # Equal parts, so that no batch of one sample is left over: batch statistics need two.
        return np.array_split(rows, steps or math.ceil(count / self.batch_size))


@dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of samples; arrays and labels come to the device when they are asked for."""

    samples: Samples
    rows: np.ndarray
    device: torch.device
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays that were read before they were asked for."""
    names: set[str] = field(default_factory=set)
    """Arrays that were asked for."""

    def __len__(self) -> int:
        return len(self.rows)

    def array(self, name: str) -> torch.Tensor:
        self.names.add(name)
        values = self.values.get(name)
        return to_device(self.read(name) if values is None else values, self.device)

    def read(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self.samples.array(name)[self.rows])

    @property
    def labels(self) -> torch.Tensor:
        if self.samples.labels is None:
            raise ConfigError("this training needs labels; give them with the samples")
        return to_device(self.samples.labels[self.rows], self.device)


@contextmanager
def read_ahead(
    samples: Samples, device: torch.device, parts: Iterable[Sequence[np.ndarray]]
) -> Iterator[Iterator[list[Batch]]]:
    """Batches of rows, as many at a time as a part has.

    What must be decoded is, by a thread while the batches before are computed: those arrays that
    the batch three before was asked for, which is the last one that is done with.
    """
    are_there = all(is_there(array) for array in samples.arrays.values())

    def batches() -> Iterator[list[Batch]]:
        asked: deque[list[set[str]]] = deque(maxlen=3)
        for part in parts:
            together = [Batch(samples, rows, device) for rows in part]
            if len(asked) == 3 and not are_there:
                for batch, names in zip(together, asked[0], strict=True):
                    batch.values.update({name: batch.read(name) for name in names})
            asked.append([batch.names for batch in together])
            yield together

    if are_there:
        yield batches()
    else:
        with ahead(batches(), 1) as coming:
            yield coming


class Optimizers(dict[str, "torch.optim.Optimizer"]):
    """Optimisers by name, and the one way to take a step with one of them."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], fabric: Fabric):
        super().__init__(optimizers)
        self.fabric = fabric

    def descend(self, name: str, loss: torch.Tensor, *, fill: bool = False) -> None:
        """A step down the loss.

        With `fill`, parameters that the loss does not reach have a gradient of zero, so that their
        weight decays and their momentum goes on.
        """
        import torch

        optimizer = self[name]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.fabric.device.type, enabled=False):
            self.fabric.backward(loss)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            if fill and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.fabric.world_size > 1 and parameter.grad is not None:
                parameter.grad = self.fabric.all_reduce(parameter.grad, reduce_op="mean")
        # Losses of float16 are scaled, and a step whose gradients overflow is left out.
        self.fabric.strategy.precision.optimizer_step(optimizer)


class Trainable(ABC):
    """Layers with a loss. Subclasses have `name`, `settings` and `layers`, and give `losses`.

    What learns from classes of samples in one stream and one optimiser needs no more::

        class Line(Trainable):
            name = "line"

            def __init__(self, settings: TrainingSettings) -> None:
                self.settings, self.layers = settings, nn.ModuleDict({"line": nn.Linear(4, 3)})

            def losses(self, batch: Batch) -> Losses:
                logits = self.layers["line"](batch.array("features"))
                return {"loss": functional.cross_entropy(logits, batch.labels)}
    """

    name: ClassVar[str]
    settings: Any
    layers: Any
    """An nn.ModuleDict, or another nn.Module whose parts `losses` knows."""
    phases: ClassVar[tuple[str, ...]] = ("plain",)
    """Each epoch goes over its batches once for each phase."""
    scheduled: ClassVar[tuple[str, ...]] = ("main",)
    """Optimisers whose rate follows the schedule; others keep theirs."""
    validates: ClassVar[bool] = False
    """Whether losses of known validation samples are measured after each epoch."""

    @abstractmethod
    def losses(self, batch: Batch) -> Losses:
        """Scalars of one batch."""

    def streams(self) -> tuple[Stream, ...]:
        """What batches a step gets."""
        settings = self.settings
        return (Stream(settings.batch_size, settings.order, settings.epoch_samples),)

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By name."""
        parameters = [p for p in self.layers.parameters() if p.requires_grad]
        return {"main": make_optimizer(parameters, self.settings)}

    def step(self, batches: Sequence[Batch], optimizers: Optimizers, phase: str) -> Losses:
        """Learn from one batch of each stream."""
        losses = self.losses(batches[0])
        optimizers.descend("main", losses["loss"])
        return losses

    def set_training(self, training: bool) -> None:
        """Before the steps of an epoch, and with False after them."""
        self.layers.train(training)

    def close_epoch(self, epoch: int, measures: Mapping[str, float]) -> None:
        """After each epoch, before its checkpoint; what it remembers must be in `layers`."""
        return


def make_optimizer(
    parameters: Iterable[Any], settings: TrainingSettings, **changes: Any
) -> torch.optim.Optimizer:
    """Of parameters or torch's parameter groups; `changes` are put over the settings."""
    import torch

    options = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay} | changes
    if settings.precision == "float16":
        # The others ask the device after each step whether a gradient overflowed.
        options["fused"] = True
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, **options)
    options |= {"momentum": settings.momentum, "nesterov": settings.nesterov}
    return torch.optim.SGD(parameters, **options)


def rate_at(
    settings: TrainingSettings, rate: float, epoch: int, step: int = 0, steps: int = 1
) -> float:
    """Rate of a step (counted from 0) of an epoch (counted from 1) with `steps`; first `rate`."""
    if settings.schedule == "steps":
        return rate * settings.decay ** sum(epoch > mile for mile in settings.milestones)
    if settings.schedule == "cosine":
        done, length = epoch - 1, settings.schedule_epochs or settings.epochs
        if done < settings.warmup_epochs:
            share = done / settings.warmup_epochs
            return settings.warmup_rate + share * (rate - settings.warmup_rate)
        wave = (1 + math.cos(math.pi * min(1.0, done / length))) / 2
        return settings.final_rate + (rate - settings.final_rate) * wave
    share = ((epoch - 1) * steps + step + 1) / (steps * settings.epochs)
    height = share / settings.rise if share < settings.rise else (1 - share) / (1 - settings.rise)
    return rate * max(height, 1e-3)


def endless_rows(seed: int, stream: int, count: int, first: int, length: int) -> np.ndarray:
    """Rows `first` to `first + length` of an endless series of shuffled passes over `count`."""
    passes = range(first // count, (first + length - 1) // count + 1)
    series = [np.random.default_rng([seed, stream, number]).permutation(count) for number in passes]
    start = first - passes[0] * count
    return np.concatenate(series)[start : start + length]


def balanced_shares(samples: Samples) -> np.ndarray:
    """Probability of each sample to be drawn: every class is as likely as the others."""
    if samples.labels is None:
        raise ConfigError("balanced training needs labels; give them or change order")
    weights = 1 / np.bincount(samples.labels)[samples.labels]
    return weights / weights.sum()


def train(
    trainable: Trainable,
    samples: Samples,
    *,
    seed: int,
    device: str = "auto",
    valid: Samples | None = None,
    work: Path | None = None,
    name: str = CHECKPOINT,
    identity: Any = None,
    progress: Progress | None = None,
    keep: Callable[[int], None] | None = None,
) -> pl.DataFrame:
    """Train the layers in place; a row per epoch: epoch, rate, means of the losses.

    `work` is a folder of this training; a checkpoint called `name` in it is taken up if settings,
    seed, samples and `identity` are the same, and refused if not. `keep` is called after each epoch
    with its number, when the layers are as that epoch left them. With several processes all of
    these must be picklable.
    """
    device = choose_device(device)
    trainable.settings = with_arithmetic(trainable.settings, device)
    what = _Task(trainable, samples, seed, device, valid, work, name, identity)
    processes = trainable.settings.processes
    if processes == 1:
        return _Training(what, make_fabric(what.device, trainable.settings)).run(progress, keep)
    with ExitStack() as stack:
        if work is None:
            what = replace(what, work=Path(stack.enter_context(TemporaryDirectory())))
        fabric = make_fabric(what.device, trainable.settings, processes)
        fabric.launch(partial(_train_as_rank, what=what, progress=progress, keep=keep))
        # The first process left the finished training as a checkpoint.
        return _Training(what, make_fabric(what.device, trainable.settings)).run(None, None)


@dataclass(frozen=True, eq=False)
class _Task:
    """What is trained, on what, where."""

    trainable: Trainable
    samples: Samples
    seed: int
    device: str
    valid: Samples | None
    work: Path | None
    name: str
    identity: Any


def _train_as_rank(
    fabric: Fabric, what: _Task, progress: Progress | None, keep: Callable[[int], None] | None
) -> None:
    """One of several processes; the first one reports and saves."""
    layers = what.trainable.layers
    for tensor in (*layers.parameters(), *layers.buffers()):
        tensor.data = tensor.data.clone()  # torch hands the same memory to all processes
    first = fabric.global_rank == 0
    _Training(what, fabric).run(progress if first else None, keep if first else None)


class _Training:
    """One training under way, or the share that one process has in it."""

    def __init__(self, what: _Task, fabric: Fabric) -> None:
        trainable = what.trainable
        self.trainable, self.samples, self.seed = trainable, what.samples, what.seed
        self.settings: TrainingSettings = trainable.settings
        self.device, self.fabric = str(fabric.device), fabric
        trainable.layers.to(fabric.device)
        compile_layers(trainable)
        self.optimizers = Optimizers(trainable.optimizers(), fabric)
        self.rates = {
            key: [float(group["lr"]) for group in self.optimizers[key].param_groups]
            for key in trainable.scheduled
        }
        known = what.valid.known() if what.valid is not None and trainable.validates else None
        self.valid = known if known is not None and len(known) else None
        self.history: list[dict[str, float]] = []
        self.under_way: dict[str, Any] = {}
        self.random: dict[str, torch.Tensor] = {}
        self.sums: torch.Tensor | None = None
        self.checkpoint = None if what.work is None else what.work / what.name
        self.identity = ""
        self.saved = time.monotonic()
        if self.checkpoint is not None:
            self.identity = self._identity(what.identity)
            if self.checkpoint.is_file():
                self._resume(self.checkpoint)

    def run(self, progress: Progress | None, keep: Callable[[int], None] | None) -> pl.DataFrame:
        for epoch in range(len(self.history) + 1, self.settings.epochs + 1):
            # The first process draws from (seed, epoch): a 0 behind them changes nothing.
            draws = [self.seed, epoch, self.fabric.global_rank]
            tf32 = self.settings.precision == "tf32"
            with seeded(draws, self.device, self.settings.cpu_threads, tf32=tf32):
                row = self._epoch(epoch)
                self._check(epoch, row)
                if self.valid is not None:
                    measured = self._measured(self.valid)
                    row |= {f"valid_{key}": value for key, value in measured.items()}
            self.trainable.close_epoch(epoch, row)
            self.history.append(row)
            # First: a training that goes on from the checkpoint does not come by here again.
            if keep is not None:
                keep(epoch)
            last = epoch == self.settings.epochs
            if epoch % self.settings.checkpoint_every == 0 or last or self._is_late():
                self._save()
            if progress is not None:
                progress(epoch, self.settings.epochs, row)
        self.trainable.layers.eval()
        return history_frame(self.history)

    def _epoch(self, epoch: int) -> dict[str, float]:
        """The steps of an epoch; means over its samples."""
        streams = self.trainable.streams()
        first = streams[0].batches(self.samples, self.seed, epoch, 0, None)
        steps = len(first)
        rows = [first] + [
            stream.batches(self.samples, self.seed, epoch, number, steps)
            for number, stream in enumerate(streams[1:], 1)
        ]
        passed, names = self._taken_up()
        rate = 0.0
        self.trainable.set_training(True)
        numbers = range(passed, steps * len(self.trainable.phases))
        parts = ([self._share(stream[number % steps]) for stream in rows] for number in numbers)
        with read_ahead(self.samples, self.fabric.device, parts) as coming:
            for number, batches in zip(numbers, coming, strict=True):
                phase, step = divmod(number, steps)
                rate = self._set_rates(epoch, step, steps)
                with self.fabric.autocast():
                    losses = self.trainable.step(
                        batches, self.optimizers, self.trainable.phases[phase]
                    )
                self._add(names, losses, len(batches[0]))
                if self._is_late() and self.fabric.world_size == 1:
                    self._save({"step": number + 1, "names": names, "rate": rate})
        self.trainable.set_training(False)
        assert self.sums is not None
        self._agree()
        count = sum(len(batch) for batch in first)
        means = [total / count for total in to_host(self.sums).tolist()]
        self.sums = None
        return {
            "rate": rate or self.under_way.pop("rate", 0.0),
            **dict(zip(names, means, strict=True)),
        }

    def _agree(self) -> None:
        """Several processes: sums over all of them, running statistics of the first."""
        if self.fabric.world_size == 1:
            return
        sums: Any = self.sums
        self.sums = cast("torch.Tensor", self.fabric.all_reduce(sums, reduce_op="sum"))
        for buffer in self.trainable.layers.buffers():
            buffer.copy_(self.fabric.broadcast(buffer))

    def _share(self, rows: np.ndarray) -> np.ndarray:
        """This process's part of a batch."""
        if self.fabric.world_size > 1:
            rows = np.array_split(rows, self.fabric.world_size)[self.fabric.global_rank]
        return rows

    def _set_rates(self, epoch: int, step: int, steps: int) -> float:
        """The rate of the first optimiser's first group."""
        shown = None
        for name, rates in self.rates.items():
            for group, rate in zip(self.optimizers[name].param_groups, rates, strict=True):
                group["lr"] = rate_at(self.settings, rate, epoch, step, steps)
                shown = group["lr"] if shown is None else shown
        return self.settings.learning_rate if shown is None else shown

    def _add(self, names: list[str], losses: Losses, count: int) -> None:
        """Add what a step measured; another phase may measure other things."""
        import torch

        new = [name for name in losses if name not in names]
        names += new
        if self.sums is None:
            self.sums = torch.zeros(0, dtype=torch.float64, device=self.fabric.device)
        if new:
            self.sums = torch.cat([self.sums, self.sums.new_zeros(len(new))])
        none = self.sums.new_zeros(())
        values = [losses[name].detach().double() if name in losses else none for name in names]
        self.sums += torch.stack(values) * count

    def _measured(self, samples: Samples) -> dict[str, float]:
        """Means of the losses over samples, without learning."""
        import torch

        names: list[str] = []
        every = np.arange(len(samples))
        parts = np.array_split(every, math.ceil(len(every) / self.settings.batch_size))
        alone = ([rows] for rows in parts)
        with torch.no_grad(), read_ahead(samples, self.fabric.device, alone) as coming:
            for (batch,) in coming:
                with self.fabric.autocast():
                    losses = self.trainable.losses(batch)
                self._add(names, losses, len(batch))
        assert self.sums is not None
        means = [total / len(samples) for total in to_host(self.sums).tolist()]
        self.sums = None
        return dict(zip(names, means, strict=True))

    def _check(self, epoch: int, row: Mapping[str, float]) -> None:
        if all(math.isfinite(value) for value in row.values()):
            return
        measures = ", ".join(f"{name} {value:g}" for name, value in row.items())
        raise TrainingError(
            f"training of {self.trainable.name} diverged in epoch {epoch} ({measures}); lower "
            f"learning_rate (now {self.settings.learning_rate})"
        )

    # ------------------------------------------------------------ checkpoints

    def _is_late(self) -> bool:
        return time.monotonic() - self.saved >= self.settings.checkpoint_seconds

    def _identity(self, more: Any) -> str:
        """What must agree for a checkpoint to be taken up."""
        shapes = {
            name: list(value.shape) for name, value in self.trainable.layers.state_dict().items()
        }
        settings = self.settings.model_dump(mode="json")
        parts = [self.trainable.name, settings, self.seed, shapes, self.samples.fingerprint(), more]
        return json.dumps(parts, sort_keys=True, default=str)

    def _save(self, under_way: Mapping[str, Any] | None = None) -> None:
        import torch

        self.saved = time.monotonic()
        if self.checkpoint is None or self.fabric.global_rank:
            return
        layers = self.trainable.layers.state_dict()
        state = {f"{LAYERS}{name}": value for name, value in layers.items()}
        for name, optimizer in self.optimizers.items():
            for index, values in optimizer.state_dict()["state"].items():
                for key, value in values.items():
                    if value is not None:
                        state[f"{OPTIMIZER}{name}.{index}.{key}"] = value
        if (scaler := self._scaler()) is not None:
            state[LOSS_SCALE] = torch.stack(
                [scaler._scale.double(), scaler._growth_tracker.double()]
            )
        if under_way is not None and self.sums is not None:
            state |= {SUMS: self.sums, RANDOM: torch.get_rng_state()}
            if self.fabric.device.type == "cuda":
                state[RANDOM_GPU] = torch.cuda.get_rng_state(self.fabric.device)
        header = {
            "identity": self.identity,
            "history": self.history,
            "under_way": dict(under_way or {}),
        }
        write_tensors(self.checkpoint, state, header)

    def _scaler(self) -> Any:
        """What scales the losses of float16; none in other arithmetic."""
        return getattr(self.fabric.strategy.precision, "scaler", None)

    def _resume(self, path: Path) -> None:
        header = read_header(path)
        if header.get("identity") != self.identity:
            raise ConfigError(
                f"checkpoint {path} belongs to another training (other settings, seed or samples); "
                "delete it or choose another folder"
            )
        tensors = read_tensors(path)
        self.trainable.layers.load_state_dict(under(LAYERS, tensors))
        for name, optimizer in self.optimizers.items():
            state: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in under(f"{OPTIMIZER}{name}.", tensors).items():
                index, _, field = key.partition(".")
                state.setdefault(int(index), {})[field] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        if (scaler := self._scaler()) is not None:
            scale, steps = tensors[LOSS_SCALE].tolist()
            values = {"scale": scale, "_growth_tracker": int(steps)}
            scaler.load_state_dict({**scaler.state_dict(), **values})
        self.history, self.under_way = header["history"], header["under_way"]
        if SUMS in tensors:
            self.sums = tensors[SUMS].to(self.fabric.device)
            self.random = {key: tensors[key] for key in (RANDOM, RANDOM_GPU) if key in tensors}

    def _taken_up(self) -> tuple[int, list[str]]:
        """Steps of this epoch that a checkpoint has behind it, and what they measured."""
        if not self.random:
            return 0, []
        import torch

        torch.set_rng_state(self.random[RANDOM])
        if RANDOM_GPU in self.random:
            torch.cuda.set_rng_state(self.random[RANDOM_GPU], self.fabric.device)
        self.random = {}
        return int(self.under_way["step"]), list(self.under_way["names"])


def make_fabric(device: str, settings: TrainingSettings, processes: int = 1) -> Fabric:
    """Lightning Fabric on one device, or on as many devices as there are processes."""
    import torch
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import MixedPrecision
    from lightning_fabric.plugins import Precision as PlainPrecision
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy

    place = torch.device(device)
    devices: int | list[int] = processes
    if place.type != "cpu" and processes == 1:
        place = torch.device(place.type, place.index or 0)
        devices = [place.index]
    elif place.type == "cuda" and processes > torch.cuda.device_count():
        raise ConfigError(
            f"processes is {processes}, but there are {torch.cuda.device_count()} GPUs; lower it"
        )
    kinds: Mapping[str, Any] = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
    kind = kinds.get(arithmetic(settings.precision, device))
    return Fabric(
        accelerator=place.type,
        devices=devices,
        strategy=SingleDeviceStrategy(place) if processes == 1 else "ddp_spawn",
        plugins=[MixedPrecision(kind, place.type) if kind else PlainPrecision()],
    )


def compute_in_batches(
    compute: Callable[[Batch], Mapping[str, torch.Tensor]],
    samples: Samples,
    device: str,
    batch_size: int = SCORING_BATCH,
    *,
    tf32: bool = False,
) -> dict[str, np.ndarray]:
    """`compute` of every batch, without gradients; its tensors joined as arrays.

    Of no samples it is computed once, so that the arrays have their widths.
    """
    import torch

    parts: list[dict[str, np.ndarray]] = []
    starts = range(0, max(len(samples), 1), batch_size)
    alone = ([np.arange(start, min(start + batch_size, len(samples)))] for start in starts)
    with (
        torch.no_grad(),
        seeded([0], device, tf32=tf32),
        read_ahead(samples, torch.device(device), alone) as coming,
    ):
        for (batch,) in coming:
            values = compute(batch)
            parts.append({name: to_host(value) for name, value in values.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def history_frame(rows: Sequence[Mapping[str, float]]) -> pl.DataFrame:
    """epoch, rate, loss, then the others by name."""
    names = sorted(
        {name for row in rows for name in row},
        key=lambda name: (name != "rate", name != "loss", name),
    )
    frame = pl.DataFrame(list(rows), schema=dict.fromkeys(names, pl.Float64))
    return frame.select(pl.int_range(1, pl.len() + 1, dtype=pl.Int64).alias("epoch"), *names)


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors whose name begins so, by the rest of their name."""
    return {
        name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)
    }
