"""CUSUM of bets: without a change an alarm comes after `alarm_rows` rows or more, in the mean.

Each bet's capital is multiplied by its gain and begins anew at 1 where it fell below. The mean of
them exceeds `alarm_rows` within n unchanged rows with a chance of at most n / `alarm_rows`. So it
is for long tests, where `martingale` has little capital left for late changes.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.condda.changes.base import BetSettings, ChangeRule


class Configuration(BetSettings):
    alarm_rows: float = Field(10_000, gt=1)
    """Least mean number of unchanged rows until an alarm."""


class Cusum(ChangeRule):
    name: ClassVar[str] = "cusum"
    version: ClassVar[int] = 2
    configuration: ClassVar[type[Settings]] = Configuration

    def _evidence(self, gain: np.ndarray) -> np.ndarray:
        capital = np.empty_like(gain)
        for row, gains in enumerate(gain):
            self.capital = np.maximum(self.capital, 0) + gains
            capital[row] = self.capital
        mean = np.logaddexp.reduce(capital, 1) - np.log(len(self.capital))
        return mean - np.log(self.settings.alarm_rows)
