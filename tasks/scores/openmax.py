"""OpenMax (Bendale and Boult 2016): log odds of the unknown class, v_0 - logsumexp(v).

For each class a Weibull distribution is fitted to the largest distances of training logits from
their mean, of the samples that the network gets right. The r-th largest of a sample's logits,
r <= alpha, gives the share w = (alpha + 1 - r) / alpha * (Weibull CDF of its distance) to the
unknown: v_c = f_c (1 - w_c), v_0 = sum of f_c w_c. The paper's probability of the unknown is
1 / (1 + exp(-novelty)); it rounds to 0 and to 1 where this does not. As in libMR, distances are
moved by 10000 less the smallest of the tail. A tail of equal distances is a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.scores._patterns import typical_rows
from tasks.scores.base import Reference, RowWise

if TYPE_CHECKING:
    import torch

_MOVED = 10000.0
# Shapes of a step and of the widest tail.
_STEEP, _FLAT = 1e15, 1e-6
# A distance that is smaller by more than was added.
_LEAST = -1 + 1e-12


class Configuration(Settings):
    tail: int = Field(20, ge=1)
    """How many of the largest distances of a class are fitted; all if there are fewer."""
    alpha: int = Field(10, ge=1)
    """How many of the largest logits are revised; all if there are fewer."""
    only_right: bool = True
    """Training samples that the network gets wrong do not count, unless a class has no other."""


def weibull(logs: np.ndarray) -> tuple[float, float]:
    """Shape and log of the scale of greatest likelihood, from logs of values whose largest is 1."""
    from scipy.optimize import brentq

    def slope(shape: float) -> float:
        weight = np.exp(shape * logs)
        return float(weight @ logs / weight.sum() - logs.mean() - 1 / shape)

    shape = brentq(slope, _FLAT, _STEEP, xtol=1e-12) if slope(_STEEP) > 0 else _STEEP
    return shape, float(np.log(np.exp(shape * logs).mean()) / shape)


class OpenMax(RowWise):
    name: ClassVar[str] = "openmax"
    needs: ClassVar[frozenset[str]] = frozenset({"logits", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    centres: torch.Tensor
    fitted: torch.Tensor
    """By class: the largest distance, how far it was moved, shape and log of the scale."""

    def _fit(self, reference: Reference) -> None:
        import torch

        assert reference.train is not None
        logits = torch.from_numpy(self.array(reference.train, "logits").astype(np.float64))
        labels = self.train_labels(reference, logits.shape[1])
        rows = typical_rows(logits, labels, self.name, self.settings.only_right)
        self.centres = torch.stack([logits[class_rows].mean(0) for class_rows in rows])
        fitted = []
        for class_rows, centre in zip(rows, self.centres, strict=True):
            distances = (logits[class_rows] - centre).norm(dim=1).sort().values.numpy()
            tail = distances[-self.settings.tail :]
            largest, moved = tail[-1], _MOVED + (tail[-1] - tail[0])
            fitted.append(
                (largest, moved, *weibull(np.log1p(np.maximum((tail - largest) / moved, _LEAST))))
            )
        self.fitted = torch.tensor(fitted, dtype=torch.float64)

    def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        exact = "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(logits, self.centres, compute_mode=exact)
        largest, moved, shape, scale = self.fitted.T
        logs = ((distance - largest) / moved).clamp(min=_LEAST).log1p()
        outside = -torch.expm1(-(shape * (logs - scale)).exp())
        alpha = min(self.settings.alpha, logits.shape[1])
        rank = logits.sort(dim=1, descending=True, stable=True).indices.argsort(1)
        share = outside * ((alpha - rank) / alpha).clamp(min=0)
        return (logits * share).sum(1) - (logits * (1 - share)).logsumexp(1)
