"""Scores of z, the input of the last Linear, which the head makes of the features g.

Papers that prune, shape or project "the penultimate activations" mean z: what the last Linear
takes. Features of outputs are g, before the last BatchNorm and activation.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from tasks.scores.base import Head, Reference, RowWise

if TYPE_CHECKING:
    import torch


class OfActivations(RowWise):
    """Subclasses need `features` and `head` and implement `_of`, perhaps `_fit`."""

    head: Head

    def _fit(self, reference: Reference) -> None:
        assert reference.head is not None
        self.head = reference.head

    def trained(self, reference: Reference) -> torch.Tensor:
        """z of the training rows, float64."""
        import torch

        assert reference.train is not None
        features = self.array(reference.train, "features").astype(np.float64)
        return self.head.activated(torch.from_numpy(features))

    def _novelty(self, features: torch.Tensor) -> torch.Tensor:
        return self._of(self.head.activated(features))

    @abstractmethod
    def _of(self, z: torch.Tensor) -> torch.Tensor:
        """Novelty (rows,) of float64 inputs of the last Linear."""
