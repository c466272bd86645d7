"""A threshold on any score of features, calibrated on samples that it was not fitted on.

Features are scaled first: a feature that hardly varies must not count as much as others, and the
direction of a network's features may tell more than their length. `auto` takes the scaling that
tells known labels from each other best: each label in turn is left out of the examples and looked
for among held-out samples by its distance to the nearest example. The novelty is that of a score
of tasks/scores fitted on the scaled examples. A sample's p-value is (1 + held-out samples that are
as novel) / (1 + held-out samples); it is `unknown` if that is at most `accepted_error`, which is
so for at most that share of known samples. Shares of the known labels fall off as a Gaussian with
the distance to their nearest examples.

Held out are the validation samples. Without any, the examples are, in `folds` shares: the score is
fitted once without each share, and a sample's novelty is the mean of these scores. So every example
calibrates, and all are there when a label is looked for. The only example of a label stays in.
Examples of a group (an episode, a video) are of one share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.predictors.base import UNKNOWN, Examples, Prediction, Predictor, blocks_of
from tasks.scores import find
from tasks.scores.base import Outputs, Reference, Score

if TYPE_CHECKING:
    import torch

# Distances held at a time: 128 MB of float64.
BLOCK_ELEMENTS = 2**24
# Least deviation of a feature in units of the median one, share of the mean variance in whitening,
# and the widest features that `auto` tries to whiten.
LEAST_DEVIATION, SHRINKAGE, WHITENED_WIDTH = 0.25, 0.1, 512
GIVEN = frozenset({"features", "train"})


class Configuration(Settings):
    scaling: Literal["auto", "none", "unit", "robust", "whiten"] = Field(
        "auto",
        description="Features as they are, each sample to length 1, each feature by its quartiles, "
        "or all by their covariance.",
    )
    score: str = Field("nearest", description="Score of features that is the novelty.")
    score_settings: dict[str, Any] = Field({}, description="Its settings that are not the default.")
    neighbours: int = Field(1, ge=1, description="A label is as far as its example of this rank.")
    accepted_error: float = Field(
        0.05, gt=0, lt=1, description="Share of held-out samples that may be called unknown."
    )
    folds: int = Field(
        5, ge=2, description="Shares in which examples are held out if there is no validation."
    )

    @model_validator(mode="after")
    def _score_fits(self) -> Configuration:
        try:
            kind = find(self.score)
            kind.resolve(None, self.score_settings)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if lacking := kind.needs - GIVEN:
            raise ValueError(f"score {self.score} needs {', '.join(sorted(lacking))}, not features")
        return self


class Threshold(Predictor):
    name: ClassVar[str] = "threshold"
    version: ClassVar[int] = 3
    needs_validation: ClassVar[bool] = False
    configuration: ClassVar[type[Settings]] = Configuration
    examples: np.ndarray
    """Features that it was fitted on, sorted by label."""
    owner: np.ndarray
    """The label of each, as a place in `known`."""
    share: np.ndarray
    """The fold that each is held out of, or -1."""
    whole: Neighbourhood
    """All examples."""
    folds: list[Neighbourhood]
    """Novelty is their mean: examples without each share, or all of them if there is validation."""
    middle: float
    """Median distance of a known sample from its nearest example."""
    reach: float
    """How far a known sample may be from its nearest example."""
    error: float
    """Share of known samples that are called unknown."""

    @classmethod
    def versions(cls, settings: Any) -> dict[str, int]:
        return {**super().versions(settings), "score": find(settings.score).version}

    def _fit(
        self,
        train: Examples,
        valid: Examples | None,
        *,
        before: tuple[str, ...],
        seed: Sequence[int],
    ) -> None:
        codes = train.codes(self.known)
        order = np.argsort(codes, kind="stable")
        self.examples, self.owner = np.asarray(train.features)[order], codes[order]
        if valid is not None:
            self.share = np.full(len(order), -1)
            held, labels = [np.asarray(valid.features)], valid.codes(self.known)
        else:
            groups = None if train.groups is None else train.groups[order]
            self.share = _shares(self.owner, self.settings.folds, seed, groups)
            shares = [self.share == fold for fold in range(self.share.max() + 1)]
            held = [self.examples[rows] for rows in shares]
            labels = np.concatenate([self.owner[:0], *(self.owner[rows] for rows in shares)])
        least = int(np.ceil(1 / self.settings.accepted_error - 1e-9)) - 1
        if len(labels) < least:
            raise ConfigError(
                f"predictor {self.name}: {len(labels)} samples are held out, accepted_error "
                f"{self.settings.accepted_error} needs {least}; raise it, or give more examples"
            )
        far = self._choose_space(held, labels)
        pairs = zip(self.folds, held, strict=True)
        self.held_out = np.sort(np.concatenate([fold.novelty(rows) for fold, rows in pairs]))
        self.error = float(self.settings.accepted_error)
        away = far.min(1)
        self.reach = float(np.quantile(away, 1 - self.error)) or 1.0
        self.middle = float(np.median(away)) or 1.0

    def _choose_space(self, held: Sequence[np.ndarray], labels: np.ndarray) -> np.ndarray:
        """Take the scaling of the settings, or the one by which left out labels stand out most.

        Gives distances (N, known labels) of held-out samples, each in the fold without it.
        """
        kinds: tuple[str, ...] = (self.settings.scaling,)
        if kinds == ("auto",):
            wide = self.examples.shape[1] > WHITENED_WIDTH
            kinds = ("none", "unit", "robust") if wide else ("none", "unit", "robust", "whiten")
        if len(np.unique(self.owner)) == 1:
            kinds = kinds[-1:]
        best = -1.0
        for kind in kinds:
            folds = [self._neighbourhood(kind, rows) for rows in self._rows_of_folds()]
            pairs = zip(folds, held, strict=True)
            distances = [fold.label_distances(rows, len(self.known)) for fold, rows in pairs]
            area = self._separation(np.concatenate(distances), labels) if len(kinds) > 1 else 0.0
            if (area := round(area, 3)) > best:
                best, chosen, far, self.folds = area, kind, np.concatenate(distances), folds
        every = slice(None)
        self.whole = self._neighbourhood(chosen, every) if self._cross_fitted else self.folds[0]
        return far

    @property
    def _cross_fitted(self) -> bool:
        return bool((self.share >= 0).any())

    def _rows_of_folds(self) -> list[np.ndarray]:
        """Which examples each of `folds` is fitted on."""
        if not self._cross_fitted:
            return [np.ones(len(self.share), bool)]
        return [self.share != fold for fold in range(self.share.max() + 1)]

    def _neighbourhood(self, space: Space | str, rows: np.ndarray | slice) -> Neighbourhood:
        examples, owner = self.examples[rows], self.owner[rows]
        space = Space.of(space, examples, owner) if isinstance(space, str) else space
        return Neighbourhood(space, examples, owner, self.settings)

    def _separation(self, far: np.ndarray, codes: np.ndarray) -> float:
        """Mean area under the curve of each label, left out, against the others, by distances
        (N, known labels) of held-out samples and their labels."""
        areas = []
        for label in np.unique(self.owner):
            away = np.delete(far, label, 1).min(1)
            own, others = away[codes == label], np.sort(away[codes != label])
            if len(own) and len(others):
                below = sum(np.searchsorted(others, own, side) for side in ("left", "right"))
                areas.append(below.mean() / 2 / len(others))
        return float(np.mean(areas)) if areas else 0.0

    def _novelty(self, features: np.ndarray) -> np.ndarray:
        return np.mean([fold.novelty(features) for fold in self.folds], axis=0)

    def _p_values(self, features: np.ndarray) -> np.ndarray:
        above = len(self.held_out) - np.searchsorted(self.held_out, self._novelty(features))
        return (1 + above) / (1 + len(self.held_out))

    @property
    def _limit(self) -> float:
        """A p-value that no sample has: those below are unknown."""
        steps = len(self.held_out) + 1
        return (np.floor(self.error * steps + 1e-9) + 0.5) / steps

    def _predict(self, features: np.ndarray) -> Prediction:
        far = self.whole.label_distances(features, len(self.known))
        chances = self._p_values(features)
        return self._shared(far, chances, np.ones((len(features), 1)))

    def _shared(
        self, far: np.ndarray, p_values: np.ndarray, novel: np.ndarray, names: Sequence[str] = ()
    ) -> Prediction:
        """Probabilities out of distances and weights of `unknown` and `names` (N, 1 + names).

        A row's largest value is on the novel side exactly if its p-value is below the limit.
        """
        nearest = far.min(1, keepdims=True, initial=np.inf)
        shares = np.exp((nearest**2 - far**2) / (2 * self.middle**2))
        shares /= shares.sum(1, keepdims=True)
        weight = (self._limit / (self._limit + p_values))[:, None]
        top = weight * shares.max(1, keepdims=True, initial=0)
        novel = top * novel / novel.max(1, keepdims=True, initial=0)
        every = np.hstack([novel[:, :1], (1 - weight) * shares, novel[:, 1:]])
        every /= every.sum(1, keepdims=True)
        return Prediction((UNKNOWN, *self.known, *names), every.astype(np.float32))

    def feedback_order(self, features: np.ndarray, *, seed: Sequence[int]) -> np.ndarray:
        """Unknown samples first, then known ones, both from the threshold on."""
        self._check_fitted(features)
        p_values = self._p_values(features)
        return np.lexsort((np.abs(np.log(p_values / self._limit)), p_values > self._limit))

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        spaces = [one.space for one in (self.whole, *(self.folds if self._cross_fitted else ()))]
        arrays = ("examples", "owner", "share", "held_out")
        return {
            "centers": np.stack([space.center for space in spaces]),
            "matrices": np.stack([space.matrix for space in spaces]),
            **{name: getattr(self, name) for name in arrays},
        }

    def record(self) -> dict[str, Any]:
        numbers = {"reach": self.reach, "middle": self.middle, "error": self.error}
        return {**numbers, "unit": self.whole.space.unit}

    def restore(self, state: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        arrays = {name: value.cpu().numpy() for name, value in state.items()}
        self.examples, self.owner, self.share, self.held_out = (
            arrays[name] for name in ("examples", "owner", "share", "held_out")
        )
        self.reach, self.middle, self.error = (record[n] for n in ("reach", "middle", "error"))
        spaces = zip(arrays["centers"], arrays["matrices"], strict=True)
        first, *others = (Space(*space, record["unit"]) for space in spaces)
        self.whole = self._neighbourhood(first, slice(None))
        pairs = zip(others, self._rows_of_folds(), strict=True)
        self.folds = [self._neighbourhood(*pair) for pair in pairs] if others else [self.whole]


class Neighbourhood:
    """Labelled examples in a space."""

    def __init__(
        self, space: Space, examples: np.ndarray, owner: np.ndarray, settings: Configuration
    ) -> None:
        self.space, self.owner, self.settings = space, owner, settings
        self.rows = space.scaled(examples)

    @cached_property
    def _scorer(self) -> Score:
        kind = find(self.settings.score)
        scorer = kind(kind.resolve(None, self.settings.score_settings))
        scorer.fit(Reference(Outputs(features=self.rows), self.owner))
        return scorer

    def novelty(self, features: np.ndarray) -> np.ndarray:
        if not len(features):
            return np.empty(0)
        return self._scorer.score(Outputs(features=self.space.scaled(features)))

    def label_distances(self, features: np.ndarray, labels: int) -> np.ndarray:
        """(N, labels): distance to the nearest examples; infinite without any."""
        far = np.full((len(features), labels), np.inf)
        codes, starts = np.unique(self.owner, return_index=True)
        for place, block in blocks_of_distances(self.space.scaled(features), self.rows):
            for code, part in zip(codes, np.split(block, starts[1:], axis=1), strict=True):
                rank = min(self.settings.neighbours, part.shape[1]) - 1
                far[place, code] = np.partition(part, rank, axis=1)[:, rank]
        return far


class Space:
    """Where distances are measured: features less `center`, times `matrix` (D,) or (D, D), and,
    if `unit`, by their length."""

    def __init__(self, center: np.ndarray, matrix: np.ndarray, unit: bool = False) -> None:
        self.center, self.matrix, self.unit = center, matrix, unit

    @classmethod
    def of(cls, kind: str, features: np.ndarray, labels: np.ndarray) -> Space:
        """The space of labelled examples."""
        center = features.mean(0, dtype=np.float64)
        if kind == "none":
            return cls(center, np.ones(features.shape[1]))
        if kind == "unit":
            return cls(np.zeros_like(center), np.ones(features.shape[1]), unit=True)
        if kind == "robust":
            low, high = np.quantile(features.astype(np.float64), [0.25, 0.75], axis=0)
            width = np.where(high > low, (high - low) / 1.349, features.std(0, dtype=np.float64))
            least = LEAST_DEVIATION * np.median(width[width > 0]) if width.any() else 1.0
            return cls(center, 1 / np.maximum(width, least))
        _, place = np.unique(labels, return_inverse=True)
        sums = np.zeros((place.max() + 1, features.shape[1]))
        np.add.at(sums, place, features)
        inside = features - (sums / np.bincount(place)[:, None])[place]
        covariance = inside.T @ inside / len(inside)
        mean = np.trace(covariance) / len(covariance) or 1.0
        shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * mean * np.eye(len(covariance))
        values, vectors = np.linalg.eigh(shrunk)
        # One layout in memory: what was saved and read again gives the same bits.
        return cls(center, np.ascontiguousarray(vectors / np.sqrt(values)))

    def scaled(self, features: np.ndarray) -> np.ndarray:
        rows = features - self.center
        rows = rows * self.matrix if self.matrix.ndim == 1 else rows @ self.matrix
        if not self.unit:
            return rows
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(length > 0, length, 1)


def _shares(
    owner: np.ndarray, folds: int, seed: Sequence[int], groups: np.ndarray | None
) -> np.ndarray:
    """The fold of each example, drawn: each label is spread over all; -1 if it is the only one.

    Groups go as a whole, the largest first, to the fold that has fewest rows of their labels.
    """
    draws = np.random.default_rng([*seed, folds])
    share = np.full(len(owner), -1)
    if groups is not None:
        blocks, counts = blocks_of(groups, owner)
        load, whole = np.zeros((folds, counts.shape[1]), np.int64), counts.sum(0)
        order = draws.permutation(len(counts))
        for block in order[np.argsort(-counts[order].sum(1), kind="stable")]:
            rows = counts[block]
            if not (rows < whole)[rows > 0].any():
                continue
            emptied = (load + rows >= whole)[:, rows > 0].any(1)
            fold = np.lexsort((load.sum(1), load @ rows, emptied))[0]
            load[fold] += rows
            share[blocks == block] = fold
        return share
    for label in np.unique(owner):
        rows = draws.permutation(np.flatnonzero(owner == label))
        if len(rows) > 1:
            share[rows] = (draws.integers(folds) + np.arange(len(rows))) % folds
    return share


def distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    squared = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.sqrt(np.maximum(squared, 0))


def blocks_of_distances(left: np.ndarray, right: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Some rows of `left` and their distances to all of `right` at a time."""
    size = max(1, BLOCK_ELEMENTS // max(len(right), 1))
    for start in range(0, len(left), size):
        place = slice(start, start + size)
        yield place, distances(left[place], right)
