"""DICE (Sun and Li 2022): energy of the logits by the weights that contribute most.

The contribution of a weight is w_cd * (mean of z_d over the training samples), z the input of the
last Linear. Weights whose contribution is at most a percentile of all contributions become 0:
novelty = -logsumexp((M * W) z + b). The paper prunes 90 % for CIFAR, 70 % for ImageNet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.scores._activations import OfActivations
from tasks.scores.base import Reference

if TYPE_CHECKING:
    import torch


class Configuration(Settings):
    percentile: float = Field(90.0, ge=0, le=100)
    """Share of the weights, in percent, that become 0."""


class Dice(OfActivations):
    name: ClassVar[str] = "dice"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    weight: torch.Tensor

    def _fit(self, reference: Reference) -> None:
        super()._fit(reference)
        z = self.trained(reference)
        weight = self.head.weight.to(z)
        contribution = weight * z.mean(0)
        threshold = float(np.percentile(contribution.numpy(), self.settings.percentile))
        self.weight = weight * (contribution > threshold)

    def _of(self, z: torch.Tensor) -> torch.Tensor:
        return -(z @ self.weight.T + self.head.bias.to(z)).logsumexp(1)
