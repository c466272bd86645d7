"""What an agent of the CONDDA/OND protocol is, and what it is given: features, examples, a test.

An agent is fitted once on examples of the known classes. For each test the run loop (`run.py`)
calls `start`, then for each round, in order, `detect` and then `characterize` (CONDDA) or
`classify`, `wanted` and `learn` (OND); after the last OND round `characterize_test`. Vectors are
[unknown, K known, D discovered] whatever the domain; the run loop puts unknown where the domain has
it (CONDDA rule 3). What an agent answers in a test must depend on its settings, its examples and
that test only: a run is resumed by leading the agent through the earlier rounds again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from tasks.condda.make_tests import anonymous_id, known_class_names
from tasks.engine.plugins import Plugin


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
            vectors = vectors.list.to_array(int(vectors.list.len().max() or 0))
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

    def anonymous(self, seed: int) -> FeatureLookup:
        """The same vectors under the names that anonymous tests of this seed serve."""
        return FeatureLookup([anonymous_id(name, seed) for name in self.sample_ids], self.values)


@dataclass(frozen=True, eq=False)
class Training:
    """Examples of known classes: `labels` are places in `known`, the names in column order.

    A known class may have no example; its column then stays 0.
    """

    sample_ids: Sequence[str]
    features: np.ndarray
    labels: np.ndarray
    known: tuple[str, ...]

    def __post_init__(self) -> None:
        size = len(self.sample_ids)
        if self.features.ndim != 2 or len(self.features) != size or len(self.labels) != size:
            raise ConfigError(
                f"training: {size} ids, features {self.features.shape}, {len(self.labels)} labels; "
                "expected N, (N, D), N"
            )
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
        return Training(ids, self.features[order], self.labels[order], self.known)


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


class Agent(Plugin, ABC):
    """Subclasses set `name` and `configuration` and implement the abstract methods.

    Raise `version` when the same test gives other answers.
    """

    known: int = 0
    """Number of known classes; `fit` sets it."""

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or self.configuration()
        if type(settings) is not self.configuration:
            raise ConfigError(
                f"agent {self.name} takes {self.configuration.__name__}, "
                f"not {type(settings).__name__}"
            )
        self.settings: Any = settings

    def parts(self) -> tuple[dict[str, Any], dict[str, int]]:
        """(settings, versions) of the plug-ins that it leads, by what they are to it."""
        return {}, {}

    @property
    def detector(self) -> str:
        """Name under which a session is opened."""
        return f"{self.name}-{self.version}"

    @abstractmethod
    def fit(self, training: Training) -> None:
        """Learn the known classes; before the first test."""

    @abstractmethod
    def start(self, test: TestInfo) -> None:
        """Forget all tests before this one."""

    @abstractmethod
    def detect(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """P(the world has changed by this row), (N,); the first call of a round."""

    @abstractmethod
    def classify(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """(N, 1 + K)."""

    @abstractmethod
    def characterize(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """(N, 1 + K + D); D may grow from round to round, columns never change their meaning."""

    def characterize_test(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray | None:
        """OND, all rows of the test: (N, 1 + D), the first column for all known; None: nothing."""
        return None

    def wanted(self, ids: Sequence[str]) -> list[str]:
        """OND: instances of the round just classified whose labels are wanted, best first."""
        return []

    def learn(self, told: Mapping[str, int]) -> None:
        """OND: labels of instances of the round: the place of a known class, or -1, -2, ..."""
        raise ConfigError(f"agent {self.name} asks for labels and does not learn from them")
