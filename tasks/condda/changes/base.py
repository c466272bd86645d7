"""What a change rule is: novelty of one row after the other in, P(the world has changed) out.

A rule bets at fair odds that a row is among the most novel `tail` of all rows before it and of the
held-out examples of known classes. If all of them come from one source, a row is there with at most
that chance, whatever the novelty is, so no bet gains in the mean; what a rule makes of the bets and
how rarely it is wrong is in its own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.engine.plugins import Plugin

Share = Annotated[float, Field(gt=0, lt=1)]
# Rows that are ranked at a time.
BLOCK = 1024


class BetSettings(Settings):
    """What is bet on."""

    tails: tuple[Share, ...] = Field((0.01, 0.03, 0.08, 0.2, 0.4), min_length=1)
    """Shares of the most novel rows that a bet is on."""
    novel_shares: tuple[Share, ...] = Field((0.2, 0.5), min_length=1)
    """Shares of novel rows after the change that are bet on."""


class Bets:
    """Each tail with each share of novel rows."""

    def __init__(self, settings: BetSettings) -> None:
        bets = [(s, t) for t in settings.tails for s in settings.novel_shares]
        self.share, self.tail = np.array(bets).T

    def factors(self, ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """What each bet is multiplied by (rows, bets) at these ranks, 1 the most novel, of so many;
        the odds are those of whole ranks."""
        sizes = sizes[..., None]
        places = np.maximum(np.floor(self.tail * sizes + 1e-9), 1)
        won = ranks[:, None] < places + 0.5
        return np.where(won, 1 - self.share + self.share * sizes / places, 1 - self.share)

    def gains(self, p_values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Logarithms of these; p-values are whole parts of `sizes`."""
        return np.log(self.factors(p_values * sizes, sizes))


class ChangeRule(Plugin, ABC):
    """Subclasses set `name` and `configuration` (of `BetSettings`) and implement `_evidence`.

    P never falls and does not depend on how rows are cut into rounds; above 0.5 the rule says that
    the world has changed. Raise `version` when the same novelty gives another P.
    """

    configuration: ClassVar[type[Settings]] = BetSettings

    def __init__(self, settings: Any, held_out: np.ndarray) -> None:
        """`held_out`: novelty of known examples that the predictor was not fitted on."""
        self.settings = settings
        self.seen = np.sort(held_out)
        self.bets = Bets(cast(BetSettings, settings))
        self.capital = np.full(len(self.bets.share), -np.inf)
        """Logarithm of what each bet has grown to."""
        self.count = 0
        self.highest = 0.0

    def update(self, novelty: np.ndarray) -> np.ndarray:
        """P(the world has changed) after each of these rows."""
        if not len(novelty):
            return np.empty(0)
        sizes = len(self.seen) + 1 + np.arange(len(novelty))
        odds = self._evidence(self.bets.gains(self._p_values(novelty), sizes))
        self.count += len(novelty)
        chances = 1 / (1 + np.exp(-np.clip(odds, -700, 700)))
        chances = np.maximum.accumulate(np.maximum(chances, self.highest))
        self.highest = float(chances[-1])
        return chances

    @abstractmethod
    def _evidence(self, gain: np.ndarray) -> np.ndarray:
        """Logarithms of the odds of a change after each row, out of the bets' (rows, bets)."""

    def _p_values(self, novelty: np.ndarray) -> np.ndarray:
        """Rank of each row among those before it, which the row then joins."""
        values = np.empty(len(novelty))
        for start in range(0, len(novelty), BLOCK):
            block = novelty[start : start + BLOCK]
            above = len(self.seen) - np.searchsorted(self.seen, block, side="left")
            above += np.tril(block[None, :] >= block[:, None], -1).sum(1)
            size = 1 + len(self.seen) + np.arange(len(block))
            values[start : start + len(block)] = (1 + above) / size
            self.seen = np.sort(np.concatenate([self.seen, block]))
        return values

    def state(self) -> dict[str, np.ndarray]:
        """What `update` changed."""
        counts = np.array([self.count, self.highest])
        return {"seen": self.seen, "capital": self.capital, "counts": counts}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.seen, self.capital = np.array(state["seen"]), np.array(state["capital"])
        self.count, self.highest = int(state["counts"][0]), float(state["counts"][1])
