"""ARPL+CS: reciprocal points with confusing samples (Chen et al. 2021; 3DOS rule 11).

Logits_c = ||g - P_c||^2 / D - g.P_c: far from a class's reciprocal point P_c is like the class.
Loss = CE + weight * max(0, mean (g - P_y)^2 - R + margin). Each epoch goes over the shapes twice:
with a generator of clouds that fool a discriminator and lie between the classes, whose features
the network learns to leave undecided; and plainly. Generated clouds pass through batch norms of
their own. Generator and discriminator start with torch's weights. 3DOS's score is MLS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.learning.trainer import Batch, Losses, Optimizers, make_optimizer
from tasks.models.clouds import CloudModel, CloudSettings
from tasks.networks.heads import SLOPE, SMALL, HeadSettings, embedding
from tasks.networks.pointnet2 import through

if TYPE_CHECKING:
    import torch
    from torch import nn

ADVERSARIES = ("generator", "discriminator")


class Configuration(HeadSettings, CloudSettings):
    """Sizes of the layers, and the loss."""

    weight: float = Field(0.1, ge=0)
    """Weight of the margin term."""
    margin: float = Field(1.0, ge=0)
    """Its margin."""
    beta: float = Field(0.1, ge=0)
    """Weight of the confusing samples."""
    noise: int = Field(96, ge=1)
    """Length of the generator's input."""
    generator: tuple[int, ...] = (256, 512, 1024)
    """Units of its hidden layers."""
    discriminator: tuple[int, ...] = Field((64, 128, 256, 512, 1024), min_length=1)
    """Channels of the discriminator's layers on points."""
    discriminator_head: tuple[int, ...] = (1024, 512, 512)
    """Units of its linear layers before the last, on the largest values over the points."""
    adversary_rate: float = Field(2e-4, gt=0)
    """Size of the steps of both."""
    generated_points: int | None = Field(None, ge=1)
    """Points of a generated cloud; none: `points`."""


class Arpl(CloudModel):
    name: ClassVar[str] = "arpl"
    version: ClassVar[int] = 2
    phases: ClassVar[tuple[str, ...]] = ("confusing", "plain")
    torch_weights: ClassVar[frozenset[str]] = frozenset(ADVERSARIES)
    configuration: ClassVar[type[Configuration]] = Configuration
    gives: ClassVar[frozenset[str]] = frozenset({"logits", "features"})
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {
            **SMALL,
            "noise": 16,
            "generator": (64, 128),
            "discriminator": (32, 64, 128),
            "discriminator_head": (),
        },
    }

    def build(self) -> dict[str, nn.Module]:
        import torch
        from torch import nn

        settings, network = self.settings, self.network
        g = embedding(network.width, settings, SLOPE, bias=True)
        points = torch.randn(self.classes, settings.features) * 0.1
        self.normed = (network.layers, g)
        return {
            "embedding": g,
            "reciprocal": nn.ParameterDict({"points": points, "radius": torch.zeros(1)}),
            "fake_norms": nn.ModuleList(
                deepcopy(getattr(parent, name)) for parent, name in norm_places(self.normed)
            ),
            "generator": _generator(settings),
            "discriminator": _discriminator(settings),
        }

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        import torch

        main_layers = [layers for name, layers in self.layers.items() if name not in ADVERSARIES]
        main = [parameter for layers in main_layers for parameter in layers.parameters()]
        adversaries = {
            name: torch.optim.Adam(
                self.layers[name].parameters(), self.settings.adversary_rate, betas=(0.5, 0.999)
            )
            for name in ADVERSARIES
        }
        return {"main": make_optimizer(main, self.settings), **adversaries}

    def step(self, batches: Sequence[Batch], optimizers: Optimizers, phase: str) -> Losses:
        if phase == "plain":
            return super().step(batches, optimizers, phase)
        clouds, labels = self.augmented(batches[0])
        losses = self._adversaries(clouds, optimizers)
        loss = self.cloud_losses(clouds, labels)["loss"]
        losses["confusion"] = self.confusion(self.fakes(clouds).detach())
        losses["loss"] = loss + self.settings.beta * losses["confusion"]
        optimizers.descend("main", losses["loss"])
        return {f"{phase}_{name}": value for name, value in losses.items()}

    def _adversaries(self, clouds: torch.Tensor, optimizers: Optimizers) -> dict[str, torch.Tensor]:
        from torch.nn import functional

        fakes = self.fakes(clouds)
        # -log D(real) and -log(1 - D(fake)), from D's logits.
        judged = functional.softplus(-self.realness(clouds)).mean()
        judged = judged + functional.softplus(self.realness(fakes.detach())).mean()
        optimizers.descend("discriminator", judged)
        fooled = functional.softplus(-self.realness(fakes)).mean()
        fooled = fooled + self.settings.beta * self.confusion(fakes)
        optimizers.descend("generator", fooled)
        return {"discriminator": judged, "generator": fooled}

    def fakes(self, clouds: torch.Tensor) -> torch.Tensor:
        """As many generated clouds."""
        noise = clouds.new_empty(len(clouds), self.settings.noise).normal_()
        return self.layers["generator"](noise).view(len(clouds), -1, 3)

    def realness(self, clouds: torch.Tensor) -> torch.Tensor:
        points, last = self.layers["discriminator"]
        return last(through(points, clouds).amax(1)).flatten()

    def confusion(self, fakes: torch.Tensor) -> torch.Tensor:
        """exp(mean of sum p log p) with p from the distances alone: least where undecided."""
        with norms_swapped(self.normed, self.layers["fake_norms"]):
            g = self.cloud_outputs(fakes)["features"]
        return confusion(squared_distances(g, self.layers["reciprocal"]["points"]))

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        from torch.nn import functional

        g = self.cloud_outputs(clouds)["features"].float()
        points, radius = (self.layers["reciprocal"][name] for name in ("points", "radius"))
        logits = self.logits(g)
        entropy = functional.cross_entropy(logits, labels)
        distances = (g - points[labels]).square().mean(1)
        bound = functional.relu(distances - radius + self.settings.margin).mean()
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": entropy + self.settings.weight * bound, "accuracy": accuracy}

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return reciprocal_logits(g.float(), self.layers["reciprocal"]["points"])


def squared_distances(g: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Mean squared differences (N, C) of g (N, D) and points (C, D)."""
    return (g[:, None].float() - points[None]).square().mean(2)


def reciprocal_logits(g: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    return squared_distances(g, points) - g @ points.T


def confusion(distances: torch.Tensor) -> torch.Tensor:
    logs = distances.log_softmax(1)
    return (logs.exp() * logs).sum(1).mean().exp()


def norm_places(layers: tuple[nn.Module, ...]) -> list[tuple[nn.Module, str]]:
    """Where batch norms stand: their parents and names."""
    from torch import nn

    return [
        (parent, name)
        for layer in layers
        for parent in layer.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.BatchNorm1d)
    ]


@contextmanager
def norms_swapped(layers: tuple[nn.Module, ...], norms: nn.ModuleList) -> Iterator[None]:
    """`norms` in the places of the batch norms of `layers`."""
    places = norm_places(layers)
    kept = [getattr(parent, name) for parent, name in places]
    try:
        for (parent, name), norm in zip(places, norms, strict=True):
            setattr(parent, name, norm)
        yield
    finally:
        for (parent, name), norm in zip(places, kept, strict=True):
            setattr(parent, name, norm)


def _generator(settings: Configuration) -> nn.Sequential:
    from torch import nn

    layers: list[nn.Module] = []
    for inside, outside in pairwise((settings.noise, *settings.generator)):
        layers += [nn.Linear(inside, outside), nn.LeakyReLU(SLOPE)]
    inside = (settings.noise, *settings.generator)[-1]
    points = settings.generated_points or settings.points
    return nn.Sequential(*layers, nn.Linear(inside, 3 * points), nn.Tanh())


def _discriminator(settings: Configuration) -> nn.ModuleList:
    """Layers on points, and the head, which has no activations between its layers."""
    from torch import nn

    layers: list[nn.Module] = []
    for inside, outside in pairwise((3, *settings.discriminator)):
        layers += [nn.Linear(inside, outside), nn.LeakyReLU(SLOPE)]
    widths = (settings.discriminator[-1], *settings.discriminator_head, 1)
    head = [nn.Linear(inside, outside) for inside, outside in pairwise(widths)]
    return nn.ModuleList([nn.Sequential(*layers), nn.Sequential(*head)])
