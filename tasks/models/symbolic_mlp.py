"""Autoregressive network of symbolic frames: predicts one from the K before it (NovelCraft 5.2).

A sample is a frame after the K before it: "counts" (N, K + 1, C), and each other array (N, K + 1)
is a category of words. The novelty of a frame is the largest loss of its variables: squared error
of a count, cross-entropy of a category. The first K frames of an episode, whose missing counts are
NaN, have 0.0 as in the released results. No code of the paper's is public; it names no patience and
no batch size. Early stopping here keeps the weights of the epoch with the least validation loss;
with `choose = validation` a network of each shape of the grid is trained, and that of the least
validation loss is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError, TrainingError
from tasks.learning.devices import Precision, to_host
from tasks.learning.encoding import ColumnGroups, column_groups, encoded, learn_vocabulary
from tasks.learning.samples import NOVEL, Rows, Samples
from tasks.learning.trainer import Batch, Losses, TrainingSettings, compute_in_batches
from tasks.models.base import Fitting, NetworkModel
from tasks.models.frames import ThreadSettings
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch
    from torch import nn

SCORING_BATCH = 4096
COUNTS = "counts"


class Configuration(ThreadSettings, TrainingSettings):
    context: int = Field(5, ge=1, description="K: frames that the next one is predicted from.")
    contexts: tuple[int, ...] = Field(
        (), exclude=True, description="Several K: one run for each; a single `context` wins."
    )
    layers: int = Field(2, ge=1, description="Hidden layers.")
    hidden: int = Field(64, ge=1, description="Units of a hidden layer.")
    choose: Literal["fixed", "validation"] = Field(
        "fixed",
        description="Take layers and hidden as given, or the best of the grid by loss on known "
        "validation samples.",
    )
    layers_grid: tuple[int, ...] = Field((1, 2, 3), description="Grid for choose = validation.")
    hidden_grid: tuple[int, ...] = Field(
        (16, 32, 48, 64), description="Grid for choose = validation."
    )
    dropout: float = Field(0.2, ge=0, lt=1, description="Share of units dropped in training.")
    scaling: Literal["none", "deviation"] = Field(
        "none", description="Counts as they are, or divided by their deviation in training."
    )
    epochs: int = Field(50, ge=1, description="Passes over the training samples.")
    batch_size: int = Field(64, ge=1, description="Samples per step.")
    learning_rate: float = Field(1e-4, gt=0, description="Size of the steps.")
    precision: Precision = Field("float32", description="Arithmetic of the training.")


@dataclass(frozen=True, eq=False)
class Sequences:
    """Some rows of samples as an array (M, K + 1, D), encoded a batch at a time."""

    samples: Samples
    rows: np.ndarray
    encode: Callable[[Samples, np.ndarray], np.ndarray]
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self.encode(self.samples, self.rows[:0]).shape[1:]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.encode(self.samples, self.rows[rows])


class SymbolicMlp(NetworkModel):
    name: ClassVar[str] = "symbolic_mlp"
    version: ClassVar[int] = 2
    modality: ClassVar[str] = "states"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"contexts": (2, 5, 10), "choose": "validation"},
        "small": {
            "contexts": (2, 5, 10),
            "scaling": "deviation",
            "epochs": 20,
            "learning_rate": 3e-3,
        },
    }
    validates: ClassVar[bool] = True
    shape: dict[str, int]
    """Layers and units of the network that is being fitted."""

    @classmethod
    def variants(
        cls, preset: str, changes: Mapping[str, Any], network: str | None, names: Sequence[str]
    ) -> list[Mapping[str, Any]]:
        """One run for each of `contexts`; where only `context` is changed, that one alone. Where
        layers or hidden is given, nothing is chosen."""
        if {"layers", "hidden"} & changes.keys():
            changes = {"choose": "fixed", **changes}
        settings = cls.resolve(preset, changes, network)
        several = settings.contexts
        if "contexts" not in changes and "context" in changes:
            several = ()
        return [
            {**changes, "context": context, "contexts": ()}
            for context in several or (settings.context,)
        ]

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        sequences = self.sequences(train)
        if not len(sequences):
            raise ConfigError(
                f"model {self.name}: no training episode has more than context = "
                f"{self.settings.context} frames; use a smaller context"
            )
        known = None if valid is None else self.sequences(valid)
        self.shape = self.given_shape()
        if self.settings.choose == "validation":
            return self._fit_grid(sequences, known, fitting)
        return self._fit_shape(sequences, known, fitting)

    def given_shape(self) -> dict[str, int]:
        return {"layers": self.settings.layers, "hidden": self.settings.hidden}

    def _fit_shape(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        history = super()._fit(train, valid, fitting)
        epoch = self.kept_epoch()
        self.record["weights_of_epoch"] = (
            f"{epoch}, least validation loss" if epoch else f"{len(history)}, the last"
        )
        return history

    def _fit_grid(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        """Fit every shape of the grid and keep the first of the least loss; a row for each."""
        if valid is None or not len(valid):
            raise ConfigError(
                f"model {self.name}: choose = validation needs known validation samples; set "
                "choose to fixed"
            )
        rows, least, best = [], np.inf, None
        for layers, hidden in product(self.settings.layers_grid, self.settings.hidden_grid):
            self.shape = {"layers": layers, "hidden": hidden}
            work = None if fitting.work is None else fitting.work / f"{layers}_x_{hidden}"
            self._fit_shape(train, valid, replace(fitting, work=work, keep=None))
            loss = float(to_host(self.layers["stopping"].least))
            rows.append({**self.shape, "valid_loss": loss})
            if loss < least:
                least, best = loss, (len(rows) - 1, self.record, self.layers)
        if best is None:
            raise TrainingError(f"model {self.name}: no shape of the grid has a finite loss")
        number, self.record, self.layers = best
        is_best = pl.int_range(pl.len()) == number
        return pl.DataFrame(rows).with_columns(is_best.cast(pl.Float64).alias("chosen"))

    def survey(self, train: Samples) -> dict[str, Any]:
        frames = train.array("sequences").samples  # type: ignore[attr-defined]
        names = [name for name in frames.arrays if name != COUNTS]
        words = {name: frames_of(frames.array(name), -1) for name in names}
        deviation = frames_of(frames.array(COUNTS), -1).std(0, dtype=np.float64)
        constant = (deviation == 0) | (self.settings.scaling == "none")
        return {
            # Pairs: the categories keep their order.
            "vocabulary": [[name, list(known)] for name, known in learn_vocabulary(words).items()],
            "scale": np.where(constant, 1, deviation).astype(np.float32).tolist(),
            "chosen": self.shape,
        }

    @property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(known) for name, known in self.record["vocabulary"]}

    @property
    def groups(self) -> ColumnGroups:
        return column_groups(len(self.record["scale"]), self.vocabulary)

    def encode(self, samples: Samples, rows: np.ndarray) -> np.ndarray:
        """(N, K + 1, D) of these rows."""
        counts = samples.array(COUNTS)[rows]
        expected = (self.settings.context + 1, len(self.record["scale"]))
        if counts.shape[1:] != expected:
            raise ConfigError(
                f"model {self.name}: counts are {samples.array(COUNTS).shape}, expected (N, "
                f"{expected[0]}, {expected[1]}) for context {self.settings.context}; use the "
                "context, the item list and the rule for unknown items that it was trained with"
            )
        vocabulary = self.vocabulary
        words = {name: samples.array(name)[rows] for name in vocabulary}
        return encoded(counts / np.array(self.record["scale"], np.float32), words, vocabulary)

    def sequences(self, samples: Samples) -> Samples:
        """The known frames that have a full context."""
        rows = complete_rows(samples)
        labels = samples.labels
        if labels is not None:
            rows = rows[labels[rows] != NOVEL]
            labels = labels[rows]
        array = Sequences(samples, rows, self.encode)
        return Samples([samples.ids[row] for row in rows], labels, {"sequences": array})

    def build(self) -> dict[str, nn.Module]:
        import torch
        from torch import nn

        # Everything that early stopping remembers is in the layers, so that checkpoints hold it.
        latest, best, stopping = self._perceptron(), self._perceptron(), nn.Module()
        stopping.register_buffer("least", torch.tensor(np.inf, dtype=torch.float64))
        stopping.register_buffer("epoch", torch.tensor(0))
        return {"latest": latest, "best": best.requires_grad_(False), "stopping": stopping}

    def _perceptron(self) -> nn.Sequential:
        from torch import nn

        settings, width = self.settings, self.groups.width
        # A file of an older version names no shape.
        shape = self.record.get("chosen") or self.given_shape()
        sizes = [settings.context * width, *[shape["hidden"]] * shape["layers"]]
        layers: list[nn.Module] = [nn.Flatten()]
        for inside, outside in pairwise(sizes):
            layers += [nn.Linear(inside, outside), nn.ReLU(), nn.Dropout(settings.dropout)]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], width))

    def losses(self, batch: Batch) -> Losses:
        stack = batch.array("sequences")
        return {"loss": self._losses_of_variables(self.layers["latest"], stack).mean()}

    def close_epoch(self, epoch: int, measures: Mapping[str, float]) -> None:
        """Keep the latest weights if their validation loss is the least."""
        loss, stopping = measures.get("valid_loss"), self.layers["stopping"]
        if loss is not None and loss < to_host(stopping.least):
            self.layers["best"].load_state_dict(self.layers["latest"].state_dict())
            stopping.least.fill_(loss)
            stopping.epoch.fill_(epoch)

    def _losses_of_variables(self, network: nn.Module, stack: torch.Tensor) -> torch.Tensor:
        """(B, K + 1, D) to the loss of each variable of the last frame: counts, then categories."""
        import torch

        groups, target = self.groups, stack[:, -1]
        predicted = network(stack[:, :-1])
        numeric = (predicted[:, groups.numeric] - target[:, groups.numeric]) ** 2
        categorical = [
            -(predicted[:, part].log_softmax(1) * target[:, part]).sum(1, keepdim=True)
            for part in groups.categorical
        ]
        return torch.cat([numeric, *categorical], 1)

    def compute(self, batch: Batch) -> dict[str, torch.Tensor]:
        return self._computed(self.kept_epoch(), batch)

    def _computed(self, epoch: int, batch: Batch) -> dict[str, torch.Tensor]:
        network = self.layers["best" if epoch else "latest"]
        return {"losses": self._losses_of_variables(network, batch.array("sequences")).double()}

    def kept_epoch(self) -> int:
        """The epoch of the least validation loss; 0: none was measured, the last one counts."""
        return int(to_host(self.layers["stopping"].epoch))

    def variable_losses(self, samples: Samples) -> np.ndarray:
        """(N, variables): what novelty is the largest of; zeros where the context is short."""
        rows = complete_rows(samples)
        whole = Samples.unnamed(sequences=Sequences(samples, rows, self.encode))
        compute = partial(self._computed, self.kept_epoch())
        measured = compute_in_batches(compute, whole, self.device, SCORING_BATCH)["losses"]
        losses = np.zeros((len(samples), measured.shape[1]))
        losses[rows] = measured
        return losses

    def _outputs(self, samples: Samples) -> Outputs:
        return Outputs(novelty=self.variable_losses(samples).max(1))


def complete_rows(samples: Samples) -> np.ndarray:
    """Samples with all K frames before them; the earliest is the first to be missing."""
    return np.flatnonzero(~np.isnan(frames_of(samples.array(COUNTS), 0)).any(1))


def frames_of(stacks: Rows, number: int) -> np.ndarray:
    """One frame of each stack, without all the stacks in memory."""
    starts = range(0, max(len(stacks), 1), SCORING_BATCH)
    return np.concatenate([stacks[start : start + SCORING_BATCH][:, number] for start in starts])
