"""An agent of the CONDDA/OND protocol, and what it is given: features, examples, a test.

An agent is a predictor (tasks/predictors) and a change rule (tasks/condda/changes). It is fitted
once on examples of the known classes, some of which are held out to calibrate both. For each test
the run loop (`run.py`) calls `start`, then for each round, in order, `detect` and then
`characterize` (CONDDA) or `classify`, `wanted` and `learn` (OND); after the last OND round
`characterize_test`. Vectors are [unknown, K known, D discovered] whatever the domain; the run loop
puts unknown where the domain has it (CONDDA rule 3). From the row on at which the world is declared
changed, all rows without a label are what the predictor discovers classes in. What an agent answers
in a test depends on its settings, its examples and that test only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
from pydantic import Field, ValidationInfo, field_validator

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from storage.tensors import as_tensors, read_header, read_tensors, write_tensors
from tasks.condda.changes import find_change
from tasks.condda.make_tests import known_class_names
from tasks.predictors.base import UNKNOWN, Examples, Predictor, held_out, revive

AGENT_VERSION = 3
"""Raise it when the same predictor and change rule give other answers to the same test."""
# P(world changed) above which the agent acts as if it has.
DECLARED = 0.5


@dataclass(frozen=True, eq=False)
class FeatureLookup:
    """Vectors (N, D) by sample id."""

    sample_ids: Sequence[str]
    values: np.ndarray

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.sample_ids):
            raise ConfigError(
                f"features: {len(self.sample_ids)} ids, values {self.values.shape}; expected (N, D)"
            )
        if len(self._row_of) != len(self.sample_ids):
            raise SourceError(
                "features: a sample has two vectors; choose one transform of the feature table"
            )

    @classmethod
    def of_table(
        cls, table: pl.DataFrame, *, sample_id: str = "sample_id", embedding: str = "embedding"
    ) -> FeatureLookup:
        """Of a feature table with one row a sample."""
        vectors = table[embedding]
        if vectors.dtype == pl.List:
            vectors = vectors.list.to_array(int(cast(int, vectors.list.len().max() or 0)))
        width = vectors.dtype.shape[0] if isinstance(vectors.dtype, pl.Array) else 0
        return cls(table[sample_id].to_list(), vectors.to_numpy().reshape(len(table), width))

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.sample_ids)}

    def of(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), D); every id must have a vector."""
        rows = [self._row_of.get(name, -1) for name in ids]
        if -1 in rows:
            raise SourceError(
                f"sample {ids[rows.index(-1)]!r} has no feature vector ({rows.count(-1)} of "
                f"{len(ids)} have none); make tests of samples that have one"
            )
        return self.values[rows]


@dataclass(frozen=True, eq=False)
class Training:
    """Examples of known classes: `labels` are places in `known`, the names in column order.

    A known class may have no example; its column then stays 0.
    """

    sample_ids: Sequence[str]
    features: np.ndarray
    labels: np.ndarray
    known: tuple[str, ...]
    groups: np.ndarray | None = None
    """The number of each example's episode, video or the like; -1 where there is none."""

    def __post_init__(self) -> None:
        size = len(self.sample_ids)
        if self.features.ndim != 2 or len(self.features) != size or len(self.labels) != size:
            raise ConfigError(
                f"training: {size} ids, features {self.features.shape}, {len(self.labels)} labels; "
                "expected N, (N, D), N"
            )
        if self.groups is not None and len(self.groups) != size:
            raise ConfigError(f"training: {size} ids and {len(self.groups)} groups; give one each")
        if not size:
            raise ConfigError("training: there is no example to learn from")
        if not ((self.labels >= 0) & (self.labels < len(self.known))).all():
            raise ConfigError(f"training: a label is not among the {len(self.known)} known classes")
        if not np.isfinite(self.features).all():
            raise SourceError("training: features are not all finite; rebuild the feature table")

    def by_id(self) -> Training:
        """The same in the order of the ids, so that the given order does not matter."""
        order = np.argsort(np.asarray(self.sample_ids, dtype=np.str_), kind="stable")
        ids = [self.sample_ids[row] for row in order]
        groups = None if self.groups is None else self.groups[order]
        return Training(ids, self.features[order], self.labels[order], self.known, groups)

    @property
    def shared_groups(self) -> np.ndarray | None:
        """`groups` if two examples are of one."""
        if self.groups is None:
            return None
        _, sizes = np.unique(self.groups[self.groups >= 0], return_counts=True)
        return self.groups if sizes.max(initial=0) > 1 else None


def training_examples(
    labelled: pl.DataFrame, features: FeatureLookup, splits: Sequence[str] = ("train",)
) -> Training:
    """Examples out of the frame that `make_tests` takes, classes in the same order."""
    known = known_class_names(labelled)
    rows = labelled.filter((pl.col("role") == "known") & pl.col("split").is_in(list(splits)))
    places = pl.col("class").replace_strict(
        {name: place for place, name in enumerate(known)}, return_dtype=pl.Int64
    )
    ids = rows["sample_id"].to_list()
    return Training(ids, features.of(ids), rows.select(places)["class"].to_numpy(), known)


@dataclass(frozen=True)
class TestInfo:
    """What an agent may know of a test; None where its metadata does not tell."""

    __test__ = False

    test_id: str
    protocol: str
    known_classes: int | None = None
    max_novel_classes: int | None = None
    round_size: int | None = None
    feedback_max_ids: int = 0
    red_light: str | None = None
    """Instance with which the world changes; None where the agent has to find out."""


class AgentSettings(Settings):
    """What makes an agent of a predictor."""

    held_out: float = Field(0.3, gt=0, lt=1)
    """Share of each class's examples that calibrate the predictor and the change rule; a predictor
    that holds examples out by itself has no use for it, nor for `folds`."""
    folds: int = Field(3, ge=1)
    """Times that a share is held out for the change rule, each for a predictor of its own: the more
    examples it is calibrated on, the sooner it is sure. 1: those of the predictor only."""
    by_group: bool = True
    """Whether examples of one group (episode, video) are held out together, where the test says
    which are: test rows are of groups that no example is of."""
    change: str = "martingale"
    """Rule by which the agent says that the world has changed."""
    change_settings: dict[str, Any] = Field({}, validate_default=True)
    """Its settings that are not the default."""

    @field_validator("change_settings", mode="after")
    @classmethod
    def _resolved(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        try:
            rule = find_change(info.data.get("change", "martingale"))
            return rule.resolve(None, value).model_dump(mode="json")
        except ConfigError as error:
            raise ValueError(str(error)) from None


class Agent:
    """A predictor and a change rule, led through tests; see the module's text for the calls."""

    def __init__(
        self, predictor: Predictor, settings: AgentSettings | None = None, seed: int = 0
    ) -> None:
        self.fitted, self.settings, self.seed = predictor, settings or AgentSettings(), seed

    @property
    def name(self) -> str:
        return self.fitted.name

    @property
    def detector(self) -> str:
        """Name under which a session is opened."""
        return f"{self.name}-{self.fitted.version}"

    def fit(self, training: Training) -> None:
        """Learn the known classes; before the first test."""
        given = training.by_id()
        self.known = len(training.known)
        self.valid: Examples | None
        names = pl.Series([f"class {label:06d}" for label in given.labels], dtype=pl.String)
        groups = given.shared_groups if self.settings.by_group else None
        examples = Examples(given.features, names, groups)
        if not self.fitted.needs_validation:
            self.examples, self.valid = examples, None
            self.fitted.fit(examples, seed=[self.seed])
            self.calibration = self.fitted.held_out
            return
        held = held_out(examples, self.settings.held_out, [self.seed])
        self.examples, self.valid = examples.take(~held), examples.take(held)
        if not held.any():
            raise ConfigError(f"agent {self.name}: no example is held out; give more of a class")
        self.fitted.fit(self.examples, self.valid, seed=[self.seed])
        self.calibration = self._calibrated(examples, held)

    def _calibrated(self, examples: Examples, held: np.ndarray) -> np.ndarray:
        """Novelty of examples, each of a predictor that was not fitted on it."""
        found, left = [self.fitted.novelty(examples.features[held])], ~held
        for fold in range(1, self.settings.folds):
            rest = examples.take(left)
            share = min(1.0, self.settings.held_out * len(examples) / max(len(rest), 1))
            drawn = np.zeros(len(examples), bool)
            drawn[np.flatnonzero(left)[held_out(rest, share, [self.seed, fold])]] = True
            if not drawn.any():
                break
            other = self.fitted.unfitted()
            other.fit(examples.take(~drawn), examples.take(drawn), seed=[self.seed, fold])
            found.append(other.novelty(examples.take(drawn).features))
            left &= ~drawn
        return np.concatenate(found)

    def start(self, test: TestInfo) -> None:
        """Forget all tests before this one."""
        if not self.fitted.known:
            raise ConfigError(f"agent {self.name} is not fitted; call fit before the first test")
        if test.known_classes not in (None, self.known):
            raise ConfigError(
                f"test {test.test_id} has {test.known_classes} known classes, agent {self.name} "
                f"was fitted for {self.known}; fit it on the classes of the test"
            )
        self.test = test
        self.predictor = self._revived(self.fitted.header(), as_tensors(self.fitted.state()))
        rule = find_change(self.settings.change)
        self.change = rule(
            rule.resolve(None, self.settings.change_settings),
            self.calibration,
        )
        self.rows = np.empty((0, self.fitted.width))
        self.chances = np.empty(0)
        self.ids: list[str] = []
        self.first_changed: int | None = None
        self.told: dict[str, int] = {}
        self.learned = 0
        self.columns: list[str] = []

    def _revived(self, header: Mapping[str, Any], state: Mapping[str, Any]) -> Predictor:
        return revive(type(self.fitted), header, state, device=self.fitted.device)

    def detect(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """P(the world has changed by this row), (N,); the first call of a round."""
        if not np.isfinite(features).all():
            raise ConfigError(f"features of test {self.test.test_id} are not all finite")
        self._learn()
        if self.test.red_light is None:
            chances = self.change.update(self.predictor.novelty(features))
        else:
            lit = np.array([name == self.test.red_light for name in ids], bool)
            chances = np.maximum.accumulate(lit | (self.first_changed is not None)).astype(float)
        if self.first_changed is None and (chances > DECLARED).any():
            self.first_changed = len(self.ids) + int((chances > DECLARED).argmax())
        self.rows = np.vstack([self.rows, features])
        self.chances = np.concatenate([self.chances, chances])
        self.ids += ids
        return chances

    def _learn(self) -> None:
        """Fit on the examples and all labels told, if there are new ones."""
        if self.learned == len(self.told):
            return
        place = {name: row for row, name in enumerate(self.ids)}
        rows = self.rows[[place[name] for name in self.told]]
        names = [self._name(label) for label in self.told.values()]
        rest = self._since_change()
        labels = pl.Series([*names, *[None] * len(rest)], dtype=pl.String)
        groups = self.examples.groups
        experience = Examples(
            np.vstack([self.examples.features, rows, rest]),
            pl.concat([self.examples.labels, labels]),
            None if groups is None else np.append(groups, np.full(len(labels), -1)),
        )
        seed = [self.seed, len(self.told)]
        self.predictor.fit(experience, self.valid, seed=seed, most=self._most)
        self.learned = len(self.told)

    @property
    def _most(self) -> int | None:
        """Classes that may be discovered beside those told."""
        told = {label for label in self.told.values() if label < 0}
        most = self.test.max_novel_classes
        return None if most is None else max(most - len(told), 0)

    @staticmethod
    def _name(label: int) -> str:
        return f"class {label:06d}" if label >= 0 else f"novel {-label:06d}"

    def _since_change(self) -> np.ndarray:
        """Rows of the changed world that have no label."""
        first = len(self.ids) if self.first_changed is None else self.first_changed
        rows = [row for row in range(first, len(self.ids)) if self.ids[row] not in self.told]
        return self.rows[rows]

    def classify(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """(N, 1 + K) of the round just detected."""
        unknown, known, novel = self._predicted(features, ids)
        return _normed(_highest(np.hstack([unknown, novel])), known)

    def characterize(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """(N, 1 + K + D) of the round just detected; D may grow from round to round, columns
        never change their meaning."""
        if self.predictor.discovers and self.first_changed is not None:
            self.predictor.discover(self._since_change(), most=self._most)
        return np.hstack(self._predicted(features, ids))

    def characterize_test(self) -> np.ndarray | None:
        """OND, all rows of the test: (N, 1 + D), the first column for all known; None: nothing."""
        self._learn()
        if self.predictor.discovers:
            self.predictor.discover(self._since_change(), most=self._most)
        # Rounds named no columns to anyone: classes told have the first.
        self.columns = []
        _, known, novel = self._predicted(self.rows, self.ids)
        if not novel.shape[1] and not self.predictor.discovers:
            return None
        first = len(self.ids) if self.first_changed is None else self.first_changed
        novel[:first] = 0
        return _normed(_highest(known), novel)

    def _predicted(
        self, features: np.ndarray, ids: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Probabilities of `unknown` (N, 1), of the known classes (N, K) and of new ones (N, D).

        New classes are those told and those discovered; each has a column from when it first
        comes, as long as the test allows as many. Before the red light nothing is new.
        """
        labels, found = self.predictor.predict(features)
        found = found.astype(np.float64)
        places = {self._name(number): number for number in range(self.known)}
        most = self.test.max_novel_classes
        unknown, known = np.zeros((len(found), 1)), np.zeros((len(found), self.known))
        for label in labels:
            new = label not in places and label not in (UNKNOWN, *self.columns)
            if new and (most is None or len(self.columns) < most):
                self.columns.append(label)
        novel = np.zeros((len(found), len(self.columns)))
        for label, values in zip(labels, found.T, strict=True):
            if label in places:
                known[:, places[label]] = values
            elif label in self.columns:
                novel[:, self.columns.index(label)] = values
            else:
                unknown[:, 0] += values
        if self.test.red_light is not None:
            first = len(self.ids) if self.first_changed is None else self.first_changed
            before = np.arange(len(self.ids) - len(ids), len(self.ids)) < first
            unknown[before], novel[before] = 0, 0
            known[before] = _normed(known[before])
        return unknown, known, novel

    def wanted(self, features: np.ndarray, ids: Sequence[str]) -> list[str]:
        """OND: instances of the round whose labels are wanted, best first."""
        if self.first_changed is None:
            return []
        order = self.predictor.feedback_order(features, seed=[self.seed, len(self.ids)])
        return [ids[row] for row in order[: self.test.feedback_max_ids]]

    def learn(self, told: Mapping[str, int]) -> None:
        """OND: labels of instances: the place of a known class, or -1, -2, ...; they count from
        the next round on."""
        if not set(told) <= set(self.ids):
            raise ConfigError(f"agent {self.name} learns labels of instances that it has seen")
        self.told.update(told)

    def save(self, path: Path, rounds: int) -> None:
        """One file that holds the agent as it stands after so many rounds of a test."""
        parts: dict[str, Mapping[str, Any]] = {
            "predictor": self.predictor.state(),
            "change": self.change.state(),
        }
        tensors = {f"{part}.{name}": v for part, s in parts.items() for name, v in s.items()}
        tensors["chances"] = self.chances
        kept = ("ids", "first_changed", "learned", "columns")
        header = {name: getattr(self, name) for name in kept}
        # In the order of telling, which decides what is learned; a header's keys are sorted.
        header |= {"rounds": rounds, "told": list(self.told.items())}
        write_tensors(path, tensors, {"agent": header, "predictor": self.predictor.header()})

    def load(self, path: Path, features: FeatureLookup) -> int:
        """After `start`: go on as the agent that was saved; gives the rounds it had done."""
        header, tensors = read_header(path), read_tensors(path)
        parts: dict[str, dict[str, Any]] = {"predictor": {}, "change": {}}
        self.chances = tensors.pop("chances").numpy()
        for name, value in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        self.predictor = self._revived(header["predictor"], parts["predictor"])
        self.change.restore({name: value.numpy() for name, value in parts["change"].items()})
        saved = header["agent"]
        rounds, saved["told"] = int(saved.pop("rounds")), dict(saved["told"])
        for name, value in saved.items():
            setattr(self, name, value)
        self.rows = features.of(self.ids).astype(self.rows.dtype)
        return rounds


def _highest(values: np.ndarray) -> np.ndarray:
    """Columns as one: the side that has the largest value keeps it, however many it is of."""
    return values.max(1, keepdims=True)


def _normed(*sides: np.ndarray) -> np.ndarray:
    """All columns, rows with a sum of 1; equal shares where there is nothing."""
    values = np.hstack(sides)
    total = values.sum(1, keepdims=True)
    return np.where(total > 0, values / np.where(total > 0, total, 1), 1 / values.shape[1])
