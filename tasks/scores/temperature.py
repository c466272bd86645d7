"""MSP at a fitted T (Guo et al. 2017): novelty = log((1 - p) / p), p = max softmax(f / T).

T is that of the greatest likelihood of the labels of validation samples, between 0.01 and 100. The
log odds rise as 1 - p does, and do not tie where p rounds to 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.scores.base import Reference, RowWise

if TYPE_CHECKING:
    import torch

_LOWEST, _HIGHEST = 0.01, 100.0


class Configuration(Settings):
    rows: Literal["auto", "valid", "train"] = "auto"
    """Samples that T is fitted on. auto: those of validation if their labels are given, else those
    of training, of which networks are surer."""


def fitted_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """T of the greatest likelihood: the mean logit by softmax(f / T) is that of the labels."""
    from scipy.optimize import brentq

    label_mean = logits.gather(1, labels[:, None]).mean()

    def slope(temperature: float) -> float:
        """Falls with T."""
        return float(((logits / temperature).softmax(1) * logits).sum(1).mean() - label_mean)

    if slope(_LOWEST) <= 0:
        return _LOWEST
    if slope(_HIGHEST) >= 0:
        return _HIGHEST
    return float(brentq(slope, _LOWEST, _HIGHEST, xtol=1e-14, rtol=1e-14))


class Temperature(RowWise):
    name: ClassVar[str] = "temperature"
    needs: ClassVar[frozenset[str]] = frozenset({"logits", "train", "valid"})
    configuration: ClassVar[type[Settings]] = Configuration
    temperature: float

    def _fit(self, reference: Reference) -> None:
        import torch

        rows, labels = self.settings.rows, reference.valid_labels
        if rows == "auto":
            rows = "train" if labels is None else "valid"
        outputs = getattr(reference, rows)
        logits = torch.from_numpy(self.array(outputs, "logits").astype(np.float64))
        if logits.shape[1] < 2:
            raise ConfigError("score temperature needs logits of two classes")
        if rows == "train":
            labels = self.train_labels(reference, logits.shape[1])
        elif labels is None:
            raise ConfigError("score temperature needs valid_labels, which the reference lacks")
        labels = self.columns(labels, logits.shape[1])
        self.temperature = fitted_temperature(logits, torch.from_numpy(labels))

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        ordered = (logits / self.temperature).sort(1, descending=True).values
        return (ordered[:, 1:] - ordered[:, :1]).logsumexp(1)
