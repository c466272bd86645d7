"""A threshold on any score of features, calibrated on validation samples.

Features are scaled first, because a feature that hardly varies must not count as much as others.
`auto` takes the scaling that tells known labels from each other best: each label in turn is left
out of the examples and looked for among validation samples by its distance to the nearest example.
The novelty is that of a score of tasks/scores fitted on the scaled examples. A sample's p-value is
(1 + validation samples that are as novel) / (1 + validation samples); it is `unknown` if that is at
most `accepted_error`, which is so for at most that share of known samples. Shares of the known
labels fall off as a Gaussian with the distance to their nearest examples.

Without validation samples a share of the examples is held out in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.predictors.base import UNKNOWN, Examples, Prediction, Predictor, held_out
from tasks.scores import find
from tasks.scores.base import Outputs, Reference, Score

if TYPE_CHECKING:
    import torch

# Distances held at a time: 128 MB of float64.
BLOCK_ELEMENTS = 2**24
HELD_OUT = 0.3
# Least deviation of a feature in units of the median one, share of the mean variance in whitening,
# and the widest features that `auto` tries to whiten.
LEAST_DEVIATION, SHRINKAGE, WHITENED_WIDTH = 0.25, 0.1, 512
GIVEN = frozenset({"features", "train"})


class Configuration(Settings):
    scaling: Literal["auto", "none", "robust", "whiten"] = Field(
        "auto",
        description="Features as they are, each by its quartiles, or all by their covariance.",
    )
    score: str = Field("nearest", description="Score of features that is the novelty.")
    score_settings: dict[str, Any] = Field({}, description="Its settings that are not the default.")
    neighbours: int = Field(1, ge=1, description="A label is as far as its example of this rank.")
    accepted_error: float = Field(
        0.05, gt=0, lt=1, description="Share of validation samples that may be called unknown."
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
    configuration: ClassVar[type[Settings]] = Configuration
    space: Space
    rows: np.ndarray
    """Scaled examples, sorted by label."""
    owner: np.ndarray
    """The label of each, as a place in `known`."""
    held_out: np.ndarray
    """Novelty of the validation samples, ascending."""
    reach: float
    """How far a known sample may be from its nearest example."""
    middle: float
    """Median distance of a known sample from its nearest example."""
    error: float
    """Share of known samples that are called unknown."""
    scaling: str
    """The scaling that was taken, once it is fitted."""
    scorer: Score

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
        if valid is None:
            held = held_out(train, HELD_OUT, seed)
            train, valid = train.take(~held), train.take(held)
        least = int(np.ceil(1 / self.settings.accepted_error - 1e-9)) - 1
        if len(valid) < least:
            raise ConfigError(
                f"predictor {self.name}: {len(valid)} samples are held out, accepted_error "
                f"{self.settings.accepted_error} needs {least}; raise it, or give more examples"
            )
        order = np.argsort(train.codes(self.known), kind="stable")
        self.owner = train.codes(self.known)[order]
        features = np.asarray(train.features)[order]
        self.space = self._best_space(features, valid)
        self.rows = self.space.scaled(features)
        self._fit_score()
        self.held_out = np.sort(self._novelty(valid.features))
        far = self._label_distances(self.space.scaled(valid.features))
        self.error = self._accepted(far, valid.codes(self.known))
        away = far.min(1)
        self.reach = float(np.quantile(away, 1 - self.error)) or 1.0
        self.middle = float(np.median(away)) or 1.0

    def _accepted(self, far: np.ndarray, codes: np.ndarray) -> float:
        """Share of known samples that are called unknown, by distances (N, known labels) of
        validation samples and their labels."""
        return float(self.settings.accepted_error)

    def _fit_score(self) -> None:
        kind = find(self.settings.score)
        self.scorer = kind(kind.resolve(None, self.settings.score_settings))
        self.scorer.fit(Reference(Outputs(features=self.rows), self.owner))

    def _best_space(self, features: np.ndarray, valid: Examples) -> Space:
        """The scaling of the settings, or the one by which left out labels stand out most."""
        kinds: tuple[str, ...] = (self.settings.scaling,)
        if kinds == ("auto",):
            wide = features.shape[1] > WHITENED_WIDTH
            kinds = ("none", "robust") if wide else ("none", "robust", "whiten")
        spaces = [Space.of(kind, features, self.owner) for kind in kinds]
        self.scaling = kinds[-1]
        if len(spaces) == 1 or len(np.unique(self.owner)) == 1:
            return spaces[-1]
        codes = valid.codes(self.known)
        areas = [self._separation(space, features, valid.features, codes) for space in spaces]
        best = int(np.argmax(np.round(areas, 3)))
        self.scaling = kinds[best]
        return spaces[best]

    def unfitted(self) -> Threshold:
        """Novelty can be compared only where features are scaled alike."""
        settings = self.settings.model_copy(update={"scaling": self.scaling})
        return type(self)(settings, device=self.device)

    def _separation(
        self, space: Space, features: np.ndarray, valid: np.ndarray, codes: np.ndarray
    ) -> float:
        """Mean area under the curve of each label, left out, against the others."""
        self.rows = space.scaled(features)
        far = self._label_distances(space.scaled(valid))
        areas = []
        for label in np.unique(self.owner):
            away = np.delete(far, label, 1).min(1)
            own, others = away[codes == label], np.sort(away[codes != label])
            if len(own) and len(others):
                below = sum(np.searchsorted(others, own, side) for side in ("left", "right"))
                areas.append(below.mean() / 2 / len(others))
        return float(np.mean(areas)) if areas else 0.0

    def _label_distances(self, rows: np.ndarray) -> np.ndarray:
        """(N, known labels): distance to the nearest examples; infinite without any."""
        far = np.full((len(rows), len(self.known)), np.inf)
        labels, starts = np.unique(self.owner, return_index=True)
        for place, block in blocks_of_distances(rows, self.rows):
            for label, part in zip(labels, np.split(block, starts[1:], axis=1), strict=True):
                rank = min(self.settings.neighbours, part.shape[1]) - 1
                far[place, label] = np.partition(part, rank, axis=1)[:, rank]
        return far

    def _novelty(self, features: np.ndarray) -> np.ndarray:
        if not len(features):
            return np.empty(0)
        return self.scorer.score(Outputs(features=self.space.scaled(features)))

    def _p_values(self, features: np.ndarray) -> np.ndarray:
        above = len(self.held_out) - np.searchsorted(self.held_out, self._novelty(features))
        return (1 + above) / (1 + len(self.held_out))

    @property
    def _limit(self) -> float:
        """A p-value that no sample has: those below are unknown."""
        steps = len(self.held_out) + 1
        return (np.floor(self.error * steps + 1e-9) + 0.5) / steps

    def _predict(self, features: np.ndarray) -> Prediction:
        far = self._label_distances(self.space.scaled(features))
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
        """Samples next to the threshold first; equals in given order."""
        self._check_fitted(features)
        doubt = np.abs(np.log(self._p_values(features) / self._limit))
        return np.argsort(doubt, kind="stable")

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        arrays = ("rows", "owner", "held_out")
        space = {"center": self.space.center, "matrix": self.space.matrix}
        return {**space, **{name: getattr(self, name) for name in arrays}}

    def record(self) -> dict[str, Any]:
        return {"reach": self.reach, "middle": self.middle, "error": self.error}

    def restore(self, state: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        arrays = {name: value.cpu().numpy() for name, value in state.items()}
        self.space = Space(arrays["center"], arrays["matrix"])
        self.rows, self.owner, self.held_out = (
            arrays[name] for name in ("rows", "owner", "held_out")
        )
        self.reach, self.middle, self.error = (record[n] for n in ("reach", "middle", "error"))
        self._fit_score()


class Space:
    """Where distances are measured: features less `center`, times `matrix` (D,) or (D, D)."""

    def __init__(self, center: np.ndarray, matrix: np.ndarray) -> None:
        self.center, self.matrix = center, matrix

    @classmethod
    def of(cls, kind: str, features: np.ndarray, labels: np.ndarray) -> Space:
        """The space of labelled examples."""
        center = features.mean(0, dtype=np.float64)
        if kind == "none":
            return cls(center, np.ones(features.shape[1]))
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
        return rows * self.matrix if self.matrix.ndim == 1 else rows @ self.matrix


def distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    squared = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.sqrt(np.maximum(squared, 0))


def blocks_of_distances(left: np.ndarray, right: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Some rows of `left` and their distances to all of `right` at a time."""
    size = max(1, BLOCK_ELEMENTS // max(len(right), 1))
    for start in range(0, len(left), size):
        place = slice(start, start + size)
        yield place, distances(left[place], right)
