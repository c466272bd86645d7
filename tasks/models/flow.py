"""A normalising flow beside the classifier (3DOS rule 11, "NF").

The classifier is trained as `cross_entropy`; the flow learns the density of the first head layer's
output (512), to which no dropout is applied, and passes no gradient to the network. It is trained
at every step: in the release a condition is never true and the flow stays as it was drawn.
Novelty = ||z||^2 / 2 - log |det J|. The flow: blocks of a fixed permutation and a GLOW coupling
(each half changes in turn, by scale and shift made from the other); of s that a network puts out,
the log scale is .636 clamp atan(s / clamp).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from tasks.learning.devices import to_device
from tasks.learning.trainer import Batch, Losses, Optimizers, make_optimizer
from tasks.models import cross_entropy
from tasks.models.base import CLASSIFIER
from tasks.networks.heads import SMALL, classifier, embedding

if TYPE_CHECKING:
    import torch
    from torch import nn

# As released: 2 / pi, cut after three digits; and values beyond a million are cut.
SCALE_FACTOR = 0.636
LARGEST = 1e6


class Configuration(cross_entropy.Configuration):
    """Sizes of the head and of the flow."""

    blocks: int = Field(8, ge=1)
    """Permutations with couplings."""
    inner: int = Field(2048, ge=1)
    """Hidden units of a coupling's networks."""
    depth: int = Field(4, ge=2)
    """Linear layers of each of them."""
    clamp: float = Field(3.0, gt=0)
    """Bound of the log scales."""
    flow_rate: float = Field(2e-4, gt=0)
    """Size of the flow's steps."""
    flow_decay: float = Field(1e-5, ge=0)
    """L2 penalty of the flow."""


class Flow(cross_entropy.CrossEntropy):
    name: ClassVar[str] = "flow"
    version: ClassVar[int] = 2
    configuration: ClassVar[type[Configuration]] = Configuration
    gives: ClassVar[frozenset[str]] = CLASSIFIER | {"novelty"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {**SMALL, "blocks": 4, "inner": 256, "depth": 2, "flow_rate": 1e-3},
    }

    def build(self) -> dict[str, nn.Module]:
        from torch import nn

        settings, network = self.settings, self.network
        undropped = settings.model_copy(update={"dropout": 0.0})
        return {
            "embedding": embedding(network.width, undropped, network.slope),
            "classifier": classifier(self.classes, settings, network.slope),
            "flow": nn.ModuleList(_coupling(settings) for _ in range(settings.blocks)),
        }

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        import torch

        main_layers = [layers for name, layers in self.layers.items() if name != "flow"]
        flow = torch.optim.Adam(
            self.layers["flow"].parameters(),
            self.settings.flow_rate,
            betas=(0.8, 0.8),
            eps=1e-4,
            weight_decay=self.settings.flow_decay,
        )
        parameters = [parameter for layers in main_layers for parameter in layers.parameters()]
        return {"main": make_optimizer(parameters, self.settings), "flow": flow}

    def step(self, batches: Sequence[Batch], optimizers: Optimizers, phase: str) -> Losses:
        losses = super().step(batches, optimizers, phase)
        optimizers.descend("flow", losses["likelihood_loss"])
        return losses

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        shared, g = self._shared_and_features(clouds)
        logits = self.logits(g).float()
        entropy = cross_entropy.smoothed_cross_entropy(logits, labels, self.settings.smoothing)
        return {
            "loss": entropy,
            "likelihood_loss": self.novelty(shared.detach()).mean() / shared.shape[1],
            "accuracy": (logits.argmax(1) == labels).float().mean(),
        }

    def _shared_and_features(self, clouds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layers = self.layers["embedding"]
        shared = layers[:3](self.network.encode(clouds))
        return shared, layers[3:](shared)

    def novelty(self, shared: torch.Tensor) -> torch.Tensor:
        """Minus the log-likelihood (N,), but for a constant."""
        z, logdet = transform(self.layers["flow"], shared.float(), self.settings.clamp)
        return z.square().sum(1) / 2 - logdet

    def cloud_outputs(self, clouds: torch.Tensor) -> dict[str, torch.Tensor]:
        shared, g = self._shared_and_features(clouds)
        return {"features": g, "novelty": self.novelty(shared)}


def transform(
    blocks: Iterable[nn.ModuleList], values: torch.Tensor, clamp: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """z (N, D) and log |det dz / dvalues| (N,)."""
    import torch

    logdet = values.new_zeros(len(values))
    for number, networks in enumerate(blocks):
        first, second = values[:, _order(values, number)].tensor_split(2, 1)
        for network in networks:
            # The half that stays makes the scale and shift of the other; then they change places.
            scale, shift = network(second).chunk(2, 1)
            scale = SCALE_FACTOR * clamp * (scale / clamp).atan()
            logdet = logdet + scale.sum(1)
            first, second = second, first * scale.exp() + shift
        values = torch.cat([first, second], 1).clamp(-LARGEST, LARGEST)
    return values, logdet


def _order(values: torch.Tensor, block: int) -> torch.Tensor:
    """The block's permutation, the same in every training and as released."""
    return to_device(np.random.RandomState(block).permutation(values.shape[1]), values.device)


def _coupling(settings: Configuration) -> nn.ModuleList:
    """Two networks, as the halves need them: (D - D // 2, D // 2) wide."""
    from torch import nn

    small = settings.hidden // 2
    large = settings.hidden - small
    return nn.ModuleList(
        _network((inside, *[settings.inner] * (settings.depth - 1), 2 * outside))
        for inside, outside in ((small, large), (large, small))
    )


def _network(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    from torch import nn

    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
