"""Autoregressive network of symbolic frames: predicts one from the K before it (NovelCraft 5.2).

A sample is a frame after the K before it: "counts" (N, K + 1, C) and one array (N, K + 1) of words
per category, as `tasks.novelcraft.symbols` makes them. The score of a frame is the largest loss of
its variables: squared error of a count, cross-entropy of a category. The first K frames of an
episode, whose missing counts are NaN, score 0.0 as in the released results. No code of the paper's
is public; it names no patience and no batch size. Early stopping here keeps the weights of the
epoch with the least validation loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.detectors.base import Detector, TorchSettings
from tasks.learning.devices import seeded
from tasks.learning.loop import TrainingSettings, in_batches, train
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.training import Progress
from tasks.novelcraft.symbols import (
    CATEGORIES,
    ColumnGroups,
    column_groups,
    encoded,
    learn_vocabulary,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

SCORING_BATCH = 4096


class Configuration(TorchSettings, TrainingSettings):
    order: int = Field(5, ge=1, description="K: frames that the next one is predicted from.")
    orders: tuple[int, ...] = Field(
        (), exclude=True, description="Several K: one run for each; a single `order` wins."
    )
    layers: int = Field(2, ge=1, description="Hidden layers.")
    hidden: int = Field(64, ge=1, description="Units of a hidden layer.")
    dropout: float = Field(0.2, ge=0, lt=1, description="Share of units dropped in training.")
    scaling: Literal["none", "deviation"] = Field(
        "none", description="Counts as they are, or divided by their deviation in training."
    )
    epochs: int = Field(50, ge=1, description="Passes over the training samples.")
    batch_size: int = Field(64, ge=1, description="Samples per step.")
    learning_rate: float = Field(1e-4, gt=0, description="Size of the steps.")
    balanced: bool = Field(
        False, description="Draw samples with replacement, weight 1 / size of their class."
    )
    mixed_precision: bool = Field(False, description="bfloat16 where a GPU has it.")


@dataclass(frozen=True, eq=False)
class _Encoded:
    """Some samples as an array (M, K + 1, D) that is gathered and encoded a batch at a time."""

    samples: Samples
    rows: np.ndarray
    encode: Callable[[Samples, np.ndarray], np.ndarray]
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self.encode(self.samples, self.rows[:0]).shape[1:]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        return self.encode(self.samples, self.rows[chosen])


class _Sequences(Samples):
    """The training loop takes its batches from `images`; here they are stacks of frames."""

    def images(self) -> _Encoded:
        return self.arrays["sequences"]


class SymbolicMlp(Detector):
    name: ClassVar[str] = "symbolic_mlp"
    modality: ClassVar[str] = "states"
    needs: ClassVar[tuple[str, ...]] = ("counts", *CATEGORIES)
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"orders": (2, 5, 10)},
        "small": {
            "orders": (2, 5, 10),
            "scaling": "deviation",
            "epochs": 20,
            "learning_rate": 3e-3,
        },
    }
    network: nn.Sequential
    vocabulary: dict[str, tuple[str, ...]]
    scale: np.ndarray

    @classmethod
    def variants(cls, preset: str, changes: Mapping[str, Any]) -> list[Settings]:
        """One run for each of `orders`; where only `order` is changed, that one alone."""
        settings: Any = cls.resolve(preset, changes)
        several = settings.orders
        if "orders" not in changes and "order" in changes:
            several = ()
        return [
            cls.resolve(preset, {**changes, "order": order, "orders": ()})
            for order in several or (settings.order,)
        ]

    def _fit(
        self,
        train_samples: Samples,
        valid: Samples | None,
        *,
        seed: int,
        checkpoints: Path | None,
        progress: Progress | None,
    ) -> pl.DataFrame:
        import torch
        from torch import nn

        words = {name: _frames(train_samples.array(name), -1) for name in CATEGORIES}
        self.vocabulary = learn_vocabulary(words)
        deviation = _frames(train_samples.array("counts"), -1).std(0, dtype=np.float64)
        constant = (deviation == 0) | (self.settings.scaling == "none")
        self.scale = np.where(constant, 1, deviation).astype(np.float32)
        data = self._sequences(train_samples)
        if not len(data):
            raise ConfigError(
                f"detector {self.name}: no training episode has more than order = "
                f"{self.settings.order} frames; use a smaller order"
            )
        known = self._sequences(valid) if valid is not None else None
        with seeded([seed, 0], self.device):
            latest, best = self._build(), self._build()
        # Everything that early stopping remembers is in the network, so that checkpoints hold it.
        network = nn.ModuleDict({"latest": latest, "best": best.requires_grad_(False)})
        for name, value in (("least", np.inf), ("total", 0.0), ("rows", 0.0)):
            network.register_buffer(name, torch.tensor(value, dtype=torch.float64))

        def close_epoch() -> None:
            """Keep the latest weights if their validation loss, now complete, is the least."""
            if network.rows > 0:
                loss = network.total / network.rows
                if loss < network.least:
                    best.load_state_dict(latest.state_dict())
                    network.least.copy_(loss)
                network.total.zero_()
                network.rows.zero_()

        def batch_loss(batch: torch.Tensor, labels: torch.Tensor | None) -> dict[str, torch.Tensor]:
            if network.training:
                close_epoch()
            loss = self._losses(latest, batch).mean()
            if not network.training:
                network.total += loss.detach().double() * len(batch)
                network.rows += len(batch)
            return {"loss": loss}

        history = train(
            network,
            batch_loss,
            data,
            self.settings,
            seed=seed,
            device=self.device,
            groups=[{"params": list(latest.parameters())}],
            valid=known if known else None,
            checkpoint=checkpoints / "network.safetensors" if checkpoints else None,
            progress=progress,
        )
        close_epoch()
        stopped = bool(torch.isfinite(network.least))
        self.network = best if stopped else latest
        epoch = history["valid_loss"].arg_min() + 1 if stopped else len(history)
        self.record = {
            "initial_weights": f"random, seed {seed}",
            "weights_of_epoch": f"{epoch}, {'least validation loss' if stopped else 'the last'}",
            "vocabulary": json.dumps(self.vocabulary),
        }
        return history

    def _encode(self, samples: Samples, rows: np.ndarray) -> np.ndarray:
        counts = samples.array("counts")[rows]
        expected = (self.settings.order + 1, len(self.scale))
        if counts.shape[1:] != expected:
            raise ConfigError(
                f"detector {self.name}: counts are {samples.array('counts').shape}, expected (N, "
                f"{expected[0]}, {expected[1]}) for order {self.settings.order}; use the order, "
                "the item list and the rule for unknown items that it was trained with"
            )
        words = {name: samples.array(name)[rows] for name in CATEGORIES}
        return encoded(counts / self.scale, words, self.vocabulary)

    def _sequences(self, samples: Samples) -> _Sequences:
        """The known frames that have a full context."""
        rows = complete_rows(samples)
        labels = samples.labels
        if labels is not None:
            rows = rows[labels[rows] != NOVEL]
            labels = labels[rows]
        sequences = _Encoded(samples, rows, self._encode)
        return _Sequences([samples.ids[row] for row in rows], labels, {"sequences": sequences})

    def _groups(self) -> ColumnGroups:
        return column_groups(len(self.scale), self.vocabulary)

    def _build(self) -> nn.Sequential:
        from torch import nn

        settings, width = self.settings, self._groups().width
        sizes = [settings.order * width, *[settings.hidden] * settings.layers]
        layers: list[nn.Module] = [nn.Flatten()]
        for inside, outside in pairwise(sizes):
            layers += [nn.Linear(inside, outside), nn.ReLU(), nn.Dropout(settings.dropout)]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], width))

    def _losses(self, network: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """(B, K + 1, D) to the loss of each variable of the last frame: counts, then categories."""
        import torch

        groups, target = self._groups(), batch[:, -1]
        predicted = network(batch[:, :-1])
        numeric = (predicted[:, groups.numeric] - target[:, groups.numeric]) ** 2
        categorical = [
            -(predicted[:, part].log_softmax(1) * target[:, part]).sum(1, keepdim=True)
            for part in groups.categorical
        ]
        return torch.cat([numeric, *categorical], 1)

    def variable_losses(self, samples: Samples) -> np.ndarray:
        """(N, variables): what the score is the largest of; zeros where the context is short."""
        rows = complete_rows(samples)

        def compute(batch: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"losses": self._losses(self.network, batch).double()}

        sequences = _Encoded(samples, rows, self._encode)
        found = in_batches(compute, sequences, self.device, batch_size=SCORING_BATCH)["losses"]
        losses = np.zeros((len(samples), found.shape[1]))
        losses[rows] = found
        return losses

    def _score(self, samples: Samples) -> np.ndarray:
        return self.variable_losses(samples).max(1)

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {**self.network.state_dict(), "scale": self.scale}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        weights = dict(state)
        self.scale = weights.pop("scale").cpu().numpy()
        recorded = json.loads(self.record["vocabulary"])
        self.vocabulary = {name: tuple(known) for name, known in recorded.items()}
        self.network = self._build()
        self.network.load_state_dict(weights)
        self.network.to(self.device).eval()


def _frames(stacks: np.ndarray, number: int) -> np.ndarray:
    """One frame of each stack, without all the stacks in memory."""
    starts = range(0, max(len(stacks), 1), SCORING_BATCH)
    return np.concatenate([stacks[start : start + SCORING_BATCH][:, number] for start in starts])


def complete_rows(samples: Samples) -> np.ndarray:
    """Samples with all K frames before them; the earliest is the first to be missing."""
    return np.flatnonzero(~np.isnan(_frames(samples.array("counts"), 0)).any(1))


def window_scores(frames: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """`windows` (episode_id, start, stop, ...) with a column score: the largest of its frames.

    `frames` has episode_id, position (0, 1, ... in each episode) and score.
    """
    ordered = frames.select("episode_id", "position", "score").sort("episode_id", "position")
    episodes = ordered.group_by("episode_id", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("frames"),
        pl.col("position").max().alias("last"),
        pl.col("position").n_unique().alias("distinct"),
    )
    whole = (pl.col("last") + 1 == pl.col("frames")) & (pl.col("distinct") == pl.col("frames"))
    broken = episodes.filter(~whole)
    if broken.height:
        raise ConfigError(
            f"episode {broken['episode_id'][0]} has {broken['frames'][0]} scores up to position "
            f"{broken['last'][0]}; window scores need every frame of an episode once"
        )
    placed = windows.select("episode_id", "start", "stop").join(
        episodes.with_columns((pl.col("frames").cum_sum() - pl.col("frames")).alias("first")),
        on="episode_id",
        how="left",
        maintain_order="left",
    )
    fits = pl.col("start").is_between(0, pl.col("stop") - 1) & (pl.col("stop") <= pl.col("frames"))
    missing = placed.filter(~fits.fill_null(False))
    if missing.height:
        episode, start, stop, *_ = missing.row(0)
        raise ConfigError(
            f"{missing.height} windows have frames without a score, first {start} to {stop} of "
            f"episode {episode}; score whole episodes with the tables the windows were cut from"
        )
    begin, end = (
        placed.select(pl.col("first") + pl.col(side)).to_series().to_numpy()
        for side in ("start", "stop")
    )
    # The extra value lets a window end at the last frame; every second result is between windows.
    scores = np.append(ordered["score"].to_numpy(), -np.inf)
    found = np.maximum.reduceat(scores, np.column_stack([begin, end]).ravel())[::2]
    return windows.with_columns(pl.Series("score", found, pl.Float64))
