"""A conformal martingale: of unchanged tests, however long, at most `false_alarms` get an alarm.

A gambler's capital M of mean 1 is set aside for every row at which the world may change (chance
`change_rate` a row) and split over the bets. Without a change M is a non-negative supermartingale,
so it ever exceeds 1 / `false_alarms` with at most that probability (Ville). P is the posterior odds
M * `false_alarms` as a probability.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.condda.changes.base import BetSettings, ChangeRule


class Configuration(BetSettings):
    false_alarms: float = Field(0.05, gt=0, lt=1)
    """Chance that a test without a change gets an alarm."""
    change_rate: float = Field(0.01, gt=0, lt=1)
    """Chance that the world changes at a row, where it has not yet."""


class Martingale(ChangeRule):
    name: ClassVar[str] = "martingale"
    configuration: ClassVar[type[Settings]] = Configuration

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
        return np.log(self.settings.false_alarms) + np.logaddexp(betting, not_yet)
