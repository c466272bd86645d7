"""Simplified Hopfield energy (Zhang et al. 2023): novelty = -z . m_c, c the largest logit.

z is the input of the last Linear, m_c the mean z of the training samples of class c that the
network gets right; of all of them where it gets none right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tasks.scores._activations import OfActivations
from tasks.scores._patterns import typical_rows
from tasks.scores.base import Reference

if TYPE_CHECKING:
    import torch


class She(OfActivations):
    name: ClassVar[str] = "she"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head", "train"})
    patterns: torch.Tensor

    def _fit(self, reference: Reference) -> None:
        import torch

        super()._fit(reference)
        labels = self.train_labels(reference, self.head.classes)
        z = self.trained(reference)
        rows = typical_rows(self.head.linear(z), labels, self.name)
        self.patterns = torch.stack([z[class_rows].mean(0) for class_rows in rows])

    def _of(self, z: torch.Tensor) -> torch.Tensor:
        return -(z * self.patterns[self.head.linear(z).argmax(1)]).sum(1)
