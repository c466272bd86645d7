"""ViM (Wang et al. 2022): novelty = a ||(I - P P^T)(z - o)|| - logsumexp(W z + b).

The virtual logit less the energy, all of it on z, the input of the last Linear (W, b): the origin
o = -pinv(W) b is where logits vanish, P are the first principal directions of the training z about
it, a is the mean largest logit of the training samples over their mean residual. The paper's
dimensions are 1000 for features 2048 wide and 512 for 768; for narrower ones half the width, as
OpenOOD has 256 of 512.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from schemas.config import Settings
from tasks.scores._activations import OfActivations
from tasks.scores.base import Reference
from tasks.scores.residual import Configuration, Subspace

if TYPE_CHECKING:
    import torch


class Vim(OfActivations):
    name: ClassVar[str] = "vim"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head", "train"})
    configuration: ClassVar[type[Settings]] = Configuration
    subspace: Subspace
    factor: float

    def _fit(self, reference: Reference) -> None:
        import torch

        super()._fit(reference)
        z = self.trained(reference)
        origin = -torch.linalg.pinv(self.head.weight.to(z)) @ self.head.bias.to(z)
        self.subspace = Subspace(z, origin, self.settings.dimension, self.name)
        largest = self.head.linear(z).amax(1).mean()
        self.factor = float(largest / self.subspace.residual(z).mean())

    def _of(self, z: torch.Tensor) -> torch.Tensor:
        return self.factor * self.subspace.residual(z) - self.head.linear(z).logsumexp(1)
