"""A conformal martingale: of unchanged tests, however long, at most `false_alarms` get an alarm.

A gambler's capital M of mean 1 is set aside for every row at which the world may change (chance
`change_rate` a row) and split over the bets. Without a change M is a non-negative supermartingale,
so it ever exceeds 1 / a with at most chance a (Ville). In tests that end this is far too careful.
So M is compared with a boundary: without a change ranks are independent draws, and of streams of
such draws, simulated with a fixed seed, at most `false_alarms` * t / (t + `half_rows`) exceed it
within t rows, t being 16, 32, ... 1,024; what is then left is the a of Ville for all later rows.
With `horizon`, all of it is spent within so many rows, and nothing is said after them. Ties make
M smaller than the streams' and alarms rarer. P is the posterior odds M / boundary as a probability.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.condda.changes.base import Bets, BetSettings, ChangeRule

# Streams that a boundary is simulated with, rows of its first step, and rows until the last ends.
STREAMS, FIRST, LAST = 4000, 16, 1024


class Configuration(BetSettings):
    false_alarms: float = Field(0.05, gt=0, lt=1)
    """Chance that a test without a change gets an alarm."""
    change_rate: float = Field(0.01, gt=0, lt=1)
    """Chance that the world changes at a row, where it has not yet."""
    half_rows: int = Field(64, ge=1)
    """Rows within which half of the false alarms may come: about as long as short tests are."""
    horizon: int | None = Field(None, ge=1, le=100_000)
    """Rows that no test is longer than, if that is known: false alarms may all come within them."""


class Martingale(ChangeRule):
    name: ClassVar[str] = "martingale"
    version: ClassVar[int] = 2
    configuration: ClassVar[type[Settings]] = Configuration

    def __init__(self, settings: Any, held_out: np.ndarray) -> None:
        super().__init__(settings, held_out)
        self.boundary = _boundary(settings, len(held_out))

    def _evidence(self, gain: np.ndarray) -> np.ndarray:
        rows = self.count + np.arange(len(gain))
        waiting = np.log1p(-self.settings.change_rate)
        stake = np.log(self.settings.change_rate) + rows * waiting
        total = np.cumsum(gain, 0)
        # capital_t = (capital_{t-1} + stake_t) * gain_t, in logarithms relative to `total`.
        relative = np.vstack([self.capital, stake[:, None] - (total - gain)])
        capital = total + np.logaddexp.accumulate(relative, 0)[1:]
        self.capital = capital[-1]
        betting = np.logaddexp.reduce(capital, 1) - np.log(len(self.capital))
        not_yet = (rows + 1) * waiting
        return np.logaddexp(betting, not_yet) - self.boundary.at(rows)


class _Boundary:
    """Logarithm of what M may be after each row, simulated as far as it was asked for."""

    def __init__(self, settings: Configuration, examples: int) -> None:
        self.ends, self.heights = np.zeros(1), np.empty(0)
        self.steps = self._steps(settings, examples)
        self.growing = threading.Lock()  # agents of several threads share a boundary

    def at(self, rows: np.ndarray) -> np.ndarray:
        with self.growing:
            while self.ends[-1] <= rows[-1] and (step := next(self.steps, None)) is not None:
                self.ends = np.append(self.ends, step[0])
                self.heights = np.append(self.heights, step[1])
            return self.heights[np.searchsorted(self.ends, rows, side="right") - 1]

    @staticmethod
    def _steps(settings: Configuration, examples: int) -> Iterator[tuple[float, float]]:
        """The row before which each step ends, and its height."""
        alarms, half, horizon = settings.false_alarms, settings.half_rows, settings.horizon
        draws = np.random.default_rng([examples, STREAMS])
        bets = Bets(settings)
        capital, waiting = np.zeros((STREAMS, len(bets.share))), 1.0
        quiet, spent, start, end = np.ones(STREAMS, bool), 0.0, 0, horizon or FIRST
        while end <= (horizon or LAST):
            highest = np.zeros(STREAMS)
            for row in range(start, end):
                size = examples + row + 1
                ranks = np.ceil(size * (1 - draws.random(STREAMS)))
                capital += settings.change_rate * waiting
                capital *= bets.factors(ranks, np.array(size))
                waiting *= 1 - settings.change_rate
                highest = np.maximum(highest, capital.mean(1) + waiting)
            share = 1.0 if horizon else end / (end + half)
            # The stream that is watched is one more, alike: as likely as any the highest of all.
            more = int(alarms * share * (STREAMS + 1)) - int(spent * (STREAMS + 1))
            height = 1 / (alarms * share - spent)
            if more:
                height = min(height, np.sort(highest[quiet])[-more])
            quiet &= highest <= height
            yield end, float(np.log(height))
            spent, start, end = alarms * share, end, 2 * end
        yield np.inf, np.inf if horizon else float(-np.log(alarms - spent))


_boundary = lru_cache(maxsize=64)(_Boundary)
