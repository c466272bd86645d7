"""Threshold agent: a calibrated threshold on a novelty score, and a running test on its alarms.

Score: distance to the nearest known class, or that of a predictor (tasks/predictors). Part of the
examples is held out of the fit; a row's p-value is (1 + held-out samples that score as high) /
(1 + held-out samples), and a row is unknown if it is at most `row_false_alarms`, which is so for at
most that share of known rows.

P(world changed): a bet at fair odds that a row is among the top `row_false_alarms` of all scores
before it and held out. If known rows and held-out samples come from one source, the bettor's
capital M is a non-negative supermartingale of mean 1, whatever the scores, so it ever exceeds
1 / `test_false_alarms` with at most that probability (Ville). Capital is set aside for every row at
which the world may change (chance `change_rate` a row), and split over several shares of novel
samples after it. P is the posterior odds M * `test_false_alarms` as a probability, never falling:
over 0.5 exactly if M exceeded the bound. With the red light, P is 0 before it and 1 from it on.

OND: labels told of earlier instances win over the score for rows that are nearer to them than to
any example; labels are wanted of the rows nearest to the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.condda.agents.base import Agent, TestInfo, Training

# Distances held at a time: 128 MB of float64.
BLOCK_ELEMENTS = 2**24
# P(world changed) above which the agent acts as if it has.
DECLARED = 0.5
NOT_TOLD = -(2**31)

Share = Annotated[float, Field(gt=0, lt=1)]


class ThresholdSettings(Settings):
    """How the agent scores and when it raises an alarm."""

    scorer: str = "nearest"
    """`nearest` (distance to known samples) or a predictor: ann, evm, gmm_finch."""
    preset: str = "small"
    """Settings of the predictor, by name."""
    neighbours: int = Field(3, ge=1)
    """`nearest`: a class is as far as its sample of this rank."""
    held_out: float = Field(0.3, gt=0, lt=1)
    """Share of each class's examples that calibrate the threshold."""
    row_false_alarms: float = Field(0.05, gt=0, lt=1)
    """Share of known rows that may be called unknown."""
    test_false_alarms: float = Field(0.05, gt=0, lt=1)
    """Chance that a test without novelty gets a P(world changed) above 0.5."""
    change_rate: float = Field(0.01, gt=0, lt=1)
    """Chance that the world changes at a row, where it has not yet."""
    novel_shares: tuple[Share, ...] = Field((0.1, 0.3, 0.6, 0.9), min_length=1)
    """Shares of novel rows after the change that the running test bets on."""
    seed: int = Field(0, ge=0)
    """Decides which examples are held out, and what a predictor draws."""


class Space:
    """Features standardised by those of the fit, where distances are measured."""

    def __init__(self, features: np.ndarray) -> None:
        self.center = features.mean(0, dtype=np.float64)
        spread = features.std(0, dtype=np.float64)
        self.scale = np.where(spread > 0, spread, 1.0)
        self.rows = self.to(features)

    def to(self, features: np.ndarray) -> np.ndarray:
        return (features - self.center) / self.scale

    def nearest(self, rows: np.ndarray) -> np.ndarray:
        """Distance of each row to the nearest one of the fit."""
        return np.concatenate(
            [np.empty(0), *(block.min(1) for block in blocks_of_distances(rows, self.rows))]
        )


def distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    squared = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.sqrt(np.maximum(squared, 0))


def blocks_of_distances(left: np.ndarray, right: np.ndarray) -> list[np.ndarray]:
    size = max(1, BLOCK_ELEMENTS // max(len(right), 1))
    starts = range(0, len(left), size)
    return [distances(left[start : start + size], right) for start in starts]


class NearestScorer:
    """Novelty = distance to the nearest class; shares of classes fall off as a Gaussian."""

    def __init__(self, space: Space, labels: np.ndarray, known: int, neighbours: int) -> None:
        self.known = known
        order = np.argsort(labels, kind="stable")
        self.space, self.rows = space, space.rows[order]
        self.classes, self.starts = np.unique(labels[order], return_index=True)
        self.neighbours = neighbours
        self.width = 1.0

    def __call__(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        far = np.full((len(features), self.known), np.inf)
        start = 0
        for block in blocks_of_distances(self.space.to(features), self.rows):
            parts = np.split(block, self.starts[1:], axis=1)
            for place, part in zip(self.classes, parts, strict=True):
                rank = min(self.neighbours, part.shape[1]) - 1
                far[start : start + len(block), place] = np.partition(part, rank, axis=1)[:, rank]
            start += len(block)
        novelty = far.min(1)
        shares = np.exp((novelty[:, None] ** 2 - far**2) / (2 * self.width**2))
        return novelty, shares / shares.sum(1, keepdims=True)


class PredictorScorer:
    """Novelty = 1 - the largest share of a known class; of a density, minus its logarithm."""

    def __init__(
        self, settings: ThresholdSettings, features: np.ndarray, labels: np.ndarray, known: int
    ) -> None:
        import polars as pl

        from tasks.predictors import find_predictor
        from tasks.predictors.base import Examples

        self.known = known
        self.predictor = find_predictor(settings.scorer)(settings.preset)
        # Numbers as text: no class can then be called like one of the predictor's own labels.
        names = pl.Series([f"{label:09d}" for label in labels.tolist()], dtype=pl.String)
        self.predictor.fit(Examples(features, names), seed=[settings.seed])

    def __call__(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        labels, probabilities = self.predictor.predict(features)
        places = [int(label) for label in labels[1:]]
        shares = np.zeros((len(features), self.known))
        shares[:, places] = probabilities[:, 1:]
        novelty = self._novelty(features, shares)
        total = shares.sum(1, keepdims=True)
        return novelty, np.where(total > 0, shares / np.where(total > 0, total, 1), 1 / self.known)

    def _novelty(self, features: np.ndarray, shares: np.ndarray) -> np.ndarray:
        mixture = getattr(self.predictor, "mixture", None)
        if mixture is None:
            return 1 - shares.max(1)
        # Shares of a mixture are 0 or 1 almost everywhere; its density tells more.
        density = mixture.log_density(features, len(self.predictor.known)).max(1).values
        return -density.cpu().numpy().astype(np.float64)


class ChangeTest:
    """The running test: novelty scores in, P(world changed) out; independent of round sizes."""

    def __init__(self, held_out: np.ndarray, settings: ThresholdSettings) -> None:
        self.seen = np.sort(held_out)
        self.tail = settings.row_false_alarms
        self.prior = settings.test_false_alarms
        self.rate = settings.change_rate
        self.shares = np.array(settings.novel_shares)
        self.capital = np.full(len(self.shares), -np.inf)
        self.count = 0
        self.highest = 0.0

    def update(self, scores: np.ndarray) -> np.ndarray:
        """P after each of these rows."""
        if not len(scores):
            return np.empty(0)
        won = self._p_values(scores) <= self.tail
        winning = np.log(1 - self.shares + self.shares / self.tail)
        gain = np.where(won[:, None], winning, np.log1p(-self.shares))
        rows = self.count + np.arange(len(scores))
        stake = np.log(self.rate) + rows * np.log1p(-self.rate)
        total = np.cumsum(gain, 0)
        # capital_t = (capital_{t-1} + stake_t) * gain_t, in logarithms relative to `total`.
        relative = np.vstack([self.capital, stake[:, None] - (total - gain)])
        capital = total + np.logaddexp.accumulate(relative, 0)[1:]
        self.capital = capital[-1]
        self.count += len(scores)
        betting = np.logaddexp.reduce(capital, 1) - np.log(len(self.shares))
        odds = np.log(self.prior) + np.logaddexp(betting, (rows + 1) * np.log1p(-self.rate))
        chances = np.maximum.accumulate(np.maximum(1 / (1 + np.exp(-odds)), self.highest))
        self.highest = float(chances[-1])
        return chances

    def _p_values(self, scores: np.ndarray) -> np.ndarray:
        """Rank of each score among those before it; the scores join them."""
        values = np.empty(len(scores))
        for start in range(0, len(scores), 1024):
            block = scores[start : start + 1024]
            above = len(self.seen) - np.searchsorted(self.seen, block, side="left")
            above += np.tril(block[None, :] >= block[:, None], -1).sum(1)
            values[start : start + len(block)] = (1 + above) / (
                1 + len(self.seen) + np.arange(len(block))
            )
            self.seen = np.sort(np.concatenate([self.seen, block]))
        return values


@dataclass(eq=False)
class Look:
    """What was found on the rows of one round."""

    ids: tuple[str, ...]
    rows: np.ndarray
    """Standardised features."""
    novelty: np.ndarray
    known: np.ndarray
    """Shares of the known classes, (N, K)."""
    p_value: np.ndarray
    after_red_light: np.ndarray
    """Whether a row may be novel: True throughout where there is no red light."""
    declared: np.ndarray
    """Whether the world had changed by the row, as far as the agent knows."""


class ThresholdAgent(Agent):
    name: ClassVar[str] = "threshold"
    configuration: ClassVar[type[Settings]] = ThresholdSettings
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {"preset": name} for name in ("small", "paper")
    }

    space: Space | None = None

    def parts(self) -> tuple[dict[str, Any], dict[str, int]]:
        if self.settings.scorer == "nearest":
            return {}, {}
        from tasks.predictors import find_predictor

        kind = find_predictor(self.settings.scorer)
        if self.settings.preset not in kind.presets:
            raise ConfigError(
                f"agent {self.name}: scorer {kind.name} has no preset {self.settings.preset!r}; "
                f"there are: {', '.join(kind.presets)}"
            )
        settings = {"scorer_settings": dict(kind.presets[self.settings.preset])}
        return settings, {"scorer": getattr(kind, "version", 1)}

    def fit(self, training: Training) -> None:
        examples = training.by_id()
        held = _held_out(examples.labels, self.settings.held_out, self.settings.seed)
        kept, labels = examples.features[~held], examples.labels[~held]
        least = int(np.ceil(1 / self.settings.row_false_alarms - 1e-9)) - 1
        if held.sum() < least:
            raise ConfigError(
                f"agent {self.name}: {int(held.sum())} examples are held out, row_false_alarms "
                f"{self.settings.row_false_alarms} needs {least}; raise it or held_out, or give "
                "more examples"
            )
        self.known = len(training.known)
        self.space, self.labels = Space(kept), labels
        self.scorer = self._scorer(kept, labels)
        scores, _ = self.scorer(examples.features[held])
        self.held_out = np.sort(scores)
        if isinstance(self.scorer, NearestScorer):
            self.scorer.width = float(np.median(scores)) or 1.0

    def _scorer(self, features: np.ndarray, labels: np.ndarray) -> NearestScorer | PredictorScorer:
        if self.settings.scorer == "nearest":
            assert self.space is not None
            return NearestScorer(self.space, labels, self.known, self.settings.neighbours)
        return PredictorScorer(self.settings, features, labels, self.known)

    def start(self, test: TestInfo) -> None:
        if self.space is None:
            raise ConfigError(f"agent {self.name} is not fitted; call fit before the first test")
        if test.known_classes not in (None, self.known):
            raise ConfigError(
                f"test {test.test_id} has {test.known_classes} known classes, agent {self.name} "
                f"was fitted for {self.known}; fit it on the classes of the test"
            )
        self.test = test
        self.change = ChangeTest(self.held_out, self.settings)
        self.passed = test.red_light is None
        self.declared_row: int | None = None
        self.count = 0
        self.last: Look | None = None
        self.told_rows = np.empty((0, self.space.rows.shape[1]))
        self.told_labels = np.empty(0, np.int64)

    def detect(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        look = self._look(features, ids)
        if self.test.red_light is None:
            chances = self.change.update(look.novelty)
        else:
            chances = look.after_red_light.astype(np.float64)
        look.declared = chances > DECLARED
        if self.declared_row is None and look.declared.any():
            self.declared_row = self.count + int(look.declared.argmax())
        self.passed |= bool(look.after_red_light.any())
        self.count += len(ids)
        return chances

    def classify(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        look = self._look(features, ids)
        return self._vectors(look, np.ones((len(look.ids), 1)))

    def characterize(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """No class is discovered: D = 0."""
        return self.classify(features, ids)

    def wanted(self, ids: Sequence[str]) -> list[str]:
        look = self.last
        if look is None or look.ids != tuple(ids) or self.declared_row is None:
            return []
        doubt = np.abs(np.log(look.p_value / self._middle))
        best = np.argsort(doubt, kind="stable")[: self.test.feedback_max_ids]
        return [look.ids[row] for row in best]

    def learn(self, told: Mapping[str, int]) -> None:
        look = self.last
        if look is None or not set(told) <= set(look.ids):
            raise ConfigError(f"agent {self.name} learns labels of the round just classified")
        rows = [row for row, name in enumerate(look.ids) if name in told]
        self.told_rows = np.vstack([self.told_rows, look.rows[rows]])
        labels = np.array([told[look.ids[row]] for row in rows], dtype=np.int64)
        self.told_labels = np.concatenate([self.told_labels, labels])

    @property
    def _middle(self) -> float:
        """A p-value that no row has: those below are unknown, those above known."""
        steps = len(self.held_out) + 1
        return (np.floor(self.settings.row_false_alarms * steps + 1e-9) + 0.5) / steps

    @property
    def _least_p_value(self) -> float:
        return 1 / (1 + len(self.held_out))

    def _look(self, features: np.ndarray, ids: Sequence[str]) -> Look:
        """The round's rows, scored once for all calls of a round."""
        names = tuple(ids)
        if self.last is not None and self.last.ids == names:
            return self.last
        assert self.space is not None
        if not np.isfinite(features).all():
            raise ConfigError(f"features of test {self.test.test_id} are not all finite")
        novelty, known = self.scorer(features)
        above = len(self.held_out) - np.searchsorted(self.held_out, novelty, side="left")
        after = np.full(len(names), self.passed)
        if self.test.red_light in names:
            after = np.arange(len(names)) >= names.index(self.test.red_light)
        look = Look(
            ids=names,
            rows=self.space.to(features),
            novelty=novelty,
            known=known,
            p_value=(1 + above) / (1 + len(self.held_out)),
            after_red_light=after,
            declared=np.zeros(len(names), dtype=bool),
        )
        self._remember_told(look)
        look.p_value[~after] = 1.0
        self.last = look
        return look

    def _remember_told(self, look: Look) -> None:
        """What was told of an instance holds for rows that are nearer to it than to an example."""
        if not len(self.told_rows) or not len(look.rows):
            return
        assert self.space is not None
        away = distances(look.rows, self.told_rows)
        told = np.where(
            away.min(1) < self.space.nearest(look.rows),
            self.told_labels[away.argmin(1)],
            NOT_TOLD,
        )
        look.p_value[(told < 0) & (told != NOT_TOLD)] = self._least_p_value
        known = np.flatnonzero(told >= 0)
        look.p_value[known] = 1.0
        look.known[known] /= 3
        look.known[known, told[known]] += 2 / 3

    def _unknown(self, look: Look) -> np.ndarray:
        return look.p_value < self._middle

    def _vectors(self, look: Look, novel: np.ndarray) -> np.ndarray:
        """[unknown, K known, D discovered] out of the known shares and `novel` (N, 1 + D).

        Rows sum to 1; a row's largest value is on the novel side exactly if the row is unknown.
        """
        weight = (self._middle / (self._middle + look.p_value))[:, None]
        novel = weight * look.known.max(1, keepdims=True) * novel / novel.max(1, keepdims=True)
        vectors = np.hstack([novel[:, :1], (1 - weight) * look.known, novel[:, 1:]])
        return vectors / vectors.sum(1, keepdims=True)


def _held_out(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Marks a share of each class, drawn; at least one sample of a class stays."""
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        drawn = np.random.default_rng([seed, int(label)]).permutation(rows)
        held[drawn[: min(round(len(rows) * share), len(rows) - 1)]] = True
    return held
