"""fDBD (Liu and Qin 2024): novelty = -mean_c(|f_m - f_c| / ||w_m - w_c||) / ||z - mean of z||.

It is the distance to decision boundaries. z is the input of the last Linear, of which f are the
logits and w_c the weights; m is the largest logit, c runs over the other classes, the mean is that
of the training samples. Classes of equal weights have no boundary and count as 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from schemas.errors import ConfigError
from tasks.scores._activations import OfActivations
from tasks.scores.base import Reference

if TYPE_CHECKING:
    import torch

# As pytorch-ood: a sample at the mean is this far from it.
_NEAR = 1e-8


class Fdbd(OfActivations):
    name: ClassVar[str] = "fdbd"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head", "train"})
    centre: torch.Tensor
    between: torch.Tensor
    """1 / distance of the weights of two classes, (classes, classes)."""

    def _fit(self, reference: Reference) -> None:
        import torch

        super()._fit(reference)
        if self.head.classes < 2:
            raise ConfigError("score fdbd needs two classes; one has no boundary")
        z = self.trained(reference)
        self.centre = z.mean(0)
        weight = self.head.weight.to(z)
        exact = "donot_use_mm_for_euclid_dist"
        self.between = torch.cdist(weight, weight, compute_mode=exact).reciprocal()
        self.between[self.between.isinf()] = 0

    def _of(self, z: torch.Tensor) -> torch.Tensor:
        logits = self.head.linear(z)
        largest, column = logits.max(1, keepdim=True)
        boundary = ((largest - logits) * self.between[column[:, 0]]).sum(1)
        away = (z - self.centre).norm(dim=1).clamp(min=_NEAR)
        return -boundary / (away * (self.head.classes - 1))
