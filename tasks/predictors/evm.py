"""The extreme value machine (Rudd et al. 2017) on features, as KOWL-718 uses it (section 5).

For each labelled sample a Weibull distribution is fitted to its distances (cosine) to the nearest
samples of other labels; it says how surely another point at a distance still belongs to the label.
A greedy set cover keeps the samples that represent the others of their label. Out: the largest
probability per label, p_unknown = 1 - the largest of all, divided by the sum.

Weibull convention of the released code (libmr): fitted by maximum likelihood to
x = 1 + largest tail distance - distance, so the probability is the distribution function at x.
`tail_rule` `released` repeats its defect: the tail is tail_size times the number of labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.errors import ConfigError
from tasks.detectors.base import Settings
from tasks.kowl.confusion import UNKNOWN
from tasks.predictors.base import Examples, Prediction, Predictor

if TYPE_CHECKING:
    import torch

# Distances held at a time: 128 MB of float32.
BLOCK_ELEMENTS = 2**25
# A tail of equal distances has no finite shape; at this one the distribution is a step.
LARGEST_SHAPE = 1e4


class Configuration(Settings):
    tail_size: int = Field(100, ge=1, description="Nearest samples of other labels in the fit.")
    tail_rule: Literal["absolute", "released"] = Field(
        "absolute", description="tail_size as it is, or times the number of labels as released."
    )
    cover_threshold: float = Field(
        0.7, gt=0, le=1, description="Probability from which a sample represents another."
    )
    distance_multiplier: float = Field(
        1.0, gt=0, description="Factor of the tail distances before the fit."
    )
    tolerance: float = Field(
        1e-5, gt=0, description="Largest distance of a sample to itself; more is refused."
    )


class Evm(Predictor):
    name: ClassVar[str] = "evm"
    presets: ClassVar[Mapping[str, Settings]] = {
        "paper": Configuration(),
        "released": Configuration(tail_rule="released"),
        "small": Configuration(tail_size=20),
    }
    # Vectors that represent their label, sorted by label: row, shape, scale, largest distance.
    vectors: torch.Tensor
    weibull: torch.Tensor
    owner: torch.Tensor

    def _fit(
        self,
        train: Examples,
        valid: Examples | None,
        *,
        before: tuple[str, ...],
        seed: Sequence[int],
    ) -> None:
        import torch

        settings = self.settings
        codes = train.codes(self.known)
        sizes = np.bincount(codes, minlength=len(self.known))
        if np.count_nonzero(sizes) < 2:
            raise ConfigError(
                f"predictor {self.name}: all samples have one label; it needs at least two"
            )
        order = np.argsort(codes, kind="stable")
        rows = self._normalised(train.features[order])
        tail = settings.tail_size * (1 if settings.tail_rule == "absolute" else len(self.known))
        ends = np.cumsum(sizes)
        nearest = torch.empty(len(rows), min(tail, len(rows) - int(sizes.min(where=sizes > 0, initial=len(rows)))))
        weibull = torch.empty(len(rows), 3, dtype=torch.float64)
        chosen = []
        del nearest
        for label in np.flatnonzero(sizes):
            start, end = int(ends[label] - sizes[label]), int(ends[label])
            weibull[start:end] = self._tails(rows, start, end, tail)
            chosen.append(start + self._cover(rows[start:end], weibull[start:end]))
        kept = torch.cat(chosen)
        self.vectors, self.weibull = rows[kept], weibull[kept.cpu()].to(self.device)
        self.owner = torch.from_numpy(codes[order])[kept.cpu()].to(self.device)
