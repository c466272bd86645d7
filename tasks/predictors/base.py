"""What an open-world predictor is: learn from labelled features, then name any sample.

Features float (N, D) and labels as text enter; probabilities over `unknown`, the known labels and
the labels that the predictor discovered by itself leave, each column with its text. A predictor is
saved as one safetensors file whose metadata holds its name, settings and record; no pickle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.errors import ConfigError, NoveltyError
from storage.tensors import write_tensors
from tasks.engine.plugins import Plugin
from tasks.learning.devices import choose_device
from tasks.learning.finch import all_finite
from tasks.learning.samples import some_rows

if TYPE_CHECKING:
    import torch

# Names that no label may have: of what is known, and of what is not.
KNOWN, UNKNOWN = "known", "unknown"
_RESERVED = rf"^({KNOWN}|{UNKNOWN}(_\d+)?)$"

FeatureRows = Any
"""Features (N, D): an array or, where a predictor `reads_blocks`, `tasks.learning.samples.Rows`."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Features with the labels that were given for them; null where none was.

    A predictor that `reads_blocks` may get features that lie in a file.
    """

    features: FeatureRows
    labels: pl.Series
    groups: np.ndarray | None = None
    """The number of each row's group (an episode, a video), -1 where it is of none. Rows of a group
    are alike in more than their label, so they are held out together."""

    def __post_init__(self) -> None:
        if len(self.features.shape) != 2 or len(self.features) != len(self.labels):
            raise ConfigError(
                f"examples: features are {self.features.shape}, labels {len(self.labels)}; "
                "expected (N, D) and N"
            )
        if self.groups is not None and len(self.groups) != len(self.labels):
            raise ConfigError(
                f"examples: {len(self.labels)} labels and {len(self.groups)} groups; give one each"
            )
        reserved = self.labels.filter(self.labels.str.contains(_RESERVED))
        if len(reserved):
            raise ConfigError(f"examples: a label is called {reserved[0]!r}; rename it")

    def __len__(self) -> int:
        return len(self.labels)

    def labelled(self, among: Sequence[str] | None = None) -> Examples:
        """Those with a label; with `among`, with one of these."""
        keep = self.labels.is_not_null()
        if among is not None:
            keep &= self.labels.is_in(pl.Series(list(among), dtype=pl.String).implode())
        return self if keep.all() else self.take(keep.to_numpy())

    def take(self, rows: np.ndarray) -> Examples:
        """Those that a mask marks."""
        features = some_rows(self.features, np.flatnonzero(rows))
        groups = None if self.groups is None else self.groups[rows]
        return Examples(features, self.labels.filter(pl.Series(rows)), groups)

    def unlabelled(self) -> FeatureRows:
        return some_rows(self.features, self.labels.is_null().arg_true().to_numpy())

    def codes(self, names: Sequence[str]) -> np.ndarray:
        """The place of each label among `names`; all must be labelled."""
        order = pl.Enum(list(names))
        return self.labels.cast(order).to_physical().to_numpy().astype(np.int64)


class Prediction(NamedTuple):
    """One column of `probabilities` per label; the first label is `unknown`."""

    labels: tuple[str, ...]
    probabilities: np.ndarray


class Predictor(Plugin, ABC):
    """Subclasses set the class variables and implement the methods that begin with `_`,
    `state` and `restore`.

    The nearest class mean, with a distance as its novelty::

        class NearestMean(Predictor):
            name: ClassVar[str] = "nearest_mean"

            def _fit(self, train, valid, *, before, seed):
                codes = train.codes(self.known)
                means = [train.features[codes == k].mean(0) for k in range(len(self.known))]
                self.means = np.stack(means)

            def _novelty(self, features):
                return np.linalg.norm(features[:, None] - self.means, axis=2).min(1)

    and `_predict`, `state` and `restore` in the same way.
    """

    discovers: ClassVar[bool] = False
    needs_validation: ClassVar[bool] = True
    """Whether its thresholds need samples that it does not learn; if not, it holds examples out by
    itself, and `held_out` is what it says of them."""
    held_out: np.ndarray
    """Novelty of samples that it was not fitted on, ascending."""
    reads_blocks: ClassVar[bool] = False
    """Whether it reads features in blocks and never as one array; then they may lie in a file."""

    @classmethod
    def versions(cls, settings: Any) -> dict[str, int]:
        """Versions of all code that decides its numbers, for the key of a run."""
        return {"predictor": cls.version}

    def __init__(self, settings: Settings | str = "paper", *, device: str = "auto") -> None:
        if isinstance(settings, str):
            settings = self.resolve(settings)
        if type(settings) is not self.configuration:
            raise ConfigError(
                f"predictor {self.name} takes {self.configuration.__name__}, "
                f"not {type(settings).__name__}"
            )
        self.settings: Any = settings
        self.device = choose_device(device)
        self.known: tuple[str, ...] = ()
        self.width = 0

    def unfitted(self) -> Predictor:
        """Another of the same settings."""
        return type(self)(self.settings, device=self.device)

    def fit(
        self,
        train: Examples,
        valid: Examples | None = None,
        *,
        seed: Sequence[int] = (0,),
        most: int | None = None,
    ) -> None:
        """Learn from all experience: labelled rows, and what unlabelled ones can tell.

        Known labels are never forgotten by name: new ones come after them, sorted. `valid` sets
        thresholds; its rows with a label that is not known are left out. All randomness is drawn
        from `seed`; `most` is that of `discover`.
        """
        labelled = train.labelled()
        if not len(labelled):
            raise ConfigError(f"predictor {self.name}: no labelled sample to learn from")
        if self.known and train.features.shape[1] != self.width:
            raise ConfigError(
                f"predictor {self.name}: features have {train.features.shape[1]} numbers, it was "
                f"fitted on {self.width}; use features of the same model"
            )
        if not all_finite(train.features):
            raise NoveltyError(
                f"predictor {self.name}: features are not all finite; rebuild the feature table"
            )
        self.width = train.features.shape[1]
        new = set(labelled.labels.unique()) - set(self.known)
        before, self.known = self.known, (*self.known, *sorted(new))
        checked = valid.labelled(self.known) if valid is not None else None
        self._fit(labelled, checked if checked else None, before=before, seed=seed)
        if self.discovers:
            self.discover(train.unlabelled(), most=most)

    def discover(self, features: FeatureRows, *, most: int | None = None) -> None:
        """Look for new classes among all samples seen so far that have no label.

        A predictor that does so sets `discovers`; `most` is how many there may be, where it is
        known.
        """

    def predict(self, features: FeatureRows) -> Prediction:
        """A row does not depend on the other rows."""
        self._check_fitted(features)
        return self._predict(features)

    def novelty(self, features: FeatureRows) -> np.ndarray:
        """How novel each row is before any threshold: float64 (N,), higher = more novel."""
        self._check_fitted(features)
        return self._novelty(features).astype(np.float64)

    def feedback_order(self, features: FeatureRows, *, seed: Sequence[int]) -> np.ndarray:
        """Row numbers in the order in which labels are wanted; here drawn from `seed`."""
        self._check_fitted(features)
        return np.random.default_rng(list(seed)).permutation(len(features))

    def _check_fitted(self, features: FeatureRows) -> None:
        if not self.known:
            raise ConfigError(f"predictor {self.name} is not fitted; call fit first")
        if len(features.shape) != 2 or features.shape[1] != self.width:
            raise ConfigError(
                f"predictor {self.name}: features are {features.shape}, expected (N, {self.width})"
            )

    @abstractmethod
    def _fit(
        self,
        train: Examples,
        valid: Examples | None,
        *,
        before: tuple[str, ...],
        seed: Sequence[int],
    ) -> None:
        """`train` is labelled throughout, `before` were the known labels, `valid` may be None."""

    @abstractmethod
    def _predict(self, features: FeatureRows) -> Prediction: ...

    @abstractmethod
    def _novelty(self, features: FeatureRows) -> np.ndarray:
        """What the predictor's rule for the unknown compares with its threshold."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        """The arrays that `fit` learned."""

    def record(self) -> dict[str, Any]:
        """What else was learned, as JSON."""
        return {}

    @abstractmethod
    def restore(self, state: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None: ...

    def header(self) -> dict[str, Any]:
        return {
            "predictor": self.name,
            "settings": self.settings.model_dump_json(),
            "known": list(self.known),
            "width": self.width,
            "record": self.record() if self.known else {},
        }

    def save(self, path: Path) -> None:
        write_tensors(path, self.state() if self.known else {}, self.header())


def revive(
    kind: type[Predictor],
    header: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    *,
    device: str,
) -> Predictor:
    """The predictor that `header` and `state` describe."""
    settings = kind.configuration.model_validate_json(header["settings"])
    predictor = kind(settings, device=device)
    predictor.known, predictor.width = tuple(header["known"]), header["width"]
    if predictor.known:
        predictor.restore(state, header["record"])
    return predictor


def held_out(examples: Examples, share: float, seed: Sequence[int]) -> np.ndarray:
    """Marks a share of each label's examples, drawn; at least one of a label stays.

    Groups are drawn as a whole, as long as that brings the numbers nearer to the share.
    """
    held = np.zeros(len(examples), dtype=bool)
    names = sorted(examples.labels.unique())
    codes = examples.codes(names)
    if examples.groups is not None:
        blocks, counts = blocks_of(examples.groups, codes)
        whole, taken = counts.sum(0), np.zeros(len(names), np.int64)
        for block in np.random.default_rng(list(seed)).permutation(len(counts)):
            more = taken + counts[block]
            nearer = np.abs(more - share * whole) < np.abs(taken - share * whole)
            if (nearer & (more < whole))[counts[block] > 0].all():
                taken, held[blocks == block] = more, True
        return held
    for label in range(len(names)):
        rows = np.flatnonzero(codes == label)
        drawn = np.random.default_rng([*seed, label]).permutation(rows)
        held[drawn[: min(round(len(rows) * share), len(rows) - 1)]] = True
    return held


def blocks_of(groups: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is held out together: the block of each row, and the rows (blocks, labels) of each.

    A block is a group; rows of none, and those of a label that has one group only, are single.
    """
    single = groups < 0
    for label in np.unique(codes):
        single |= (codes == label) & (len(np.unique(groups[codes == label])) == 1)
    alone = np.max(groups, initial=-1) + 1 + np.arange(len(groups))
    _, blocks = np.unique(np.where(single, alone, groups), return_inverse=True)
    counts = np.zeros((blocks.max(initial=-1) + 1, codes.max(initial=-1) + 1), np.int64)
    np.add.at(counts, (blocks, codes), 1)
    return blocks, counts


def with_unknown(probabilities: np.ndarray, detected: np.ndarray) -> np.ndarray:
    """Where `detected`, `unknown` (column 0) gets the maximum, the rest the remainder.

    As released: p_unknown = max, the others times 1 - max; rows keep their sum of 1, and `unknown`
    comes out on top.
    """
    highest = probabilities[detected].max(1, keepdims=True)
    changed = np.array(probabilities)
    changed[detected] *= 1 - highest
    changed[detected, :1] += highest
    return changed
