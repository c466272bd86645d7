"""ReAct: energy of the logits of clipped features, novelty = -logsumexp.

The threshold is one number, a percentile of all values of all penultimate features g of the
validation samples; g is clipped from above, then goes through the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.scores.base import Head, Reference, RowWise

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    percentile: float = Field(90.0, ge=0, le=100)
    """Share of the validation features' values, in percent, that clipping leaves as they are."""


class React(RowWise):
    name: ClassVar[str] = "react"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head", "valid"})
    configuration: ClassVar[type[Settings]] = Configuration
    head: Head
    threshold: float

    def _fit(self, reference: Reference) -> None:
        assert reference.head is not None and reference.valid is not None
        self.head = reference.head
        values = self.array(reference.valid, "features")
        self.threshold = float(np.percentile(values, self.settings.percentile))

    def _novelty(self, features: torch.Tensor) -> torch.Tensor:
        return -self.head(features.clamp(max=self.threshold)).logsumexp(1)
