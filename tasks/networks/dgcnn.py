"""DGCNN (Wang et al. 2019) in 3DOS's sizes (3DOS rule 9): clouds (B, P, 3) to (B, 2 fused).

An edge convolution is max over j of act(norm(W [x_j - x_i, x_i])) over the k nearest j in feature
space. It is computed here without a tensor of edges, with equal result:
- W [x_j - x_i, x_i] = u_j + v_i with u = A x, v = (B - A) x, where W = [A, B]: k times less work;
- norm and activation are monotone, rising where the norm's weight is not negative, so the largest
  (else the smallest) u_j is all that is needed of the neighbours;
- mean and variance over all edges follow from u, v and the neighbours' adjacency.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from schemas.config import Settings
from tasks.networks.base import Network
from tasks.networks.geometry import gather_rows, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

SLOPE = 0.2


class Configuration(Settings):
    """Sizes of the network."""

    k: int = Field(20, ge=1)
    """Neighbours of a point, itself among them."""
    widths: tuple[int, ...] = Field((64, 64, 128, 256), min_length=1)
    """Channels of the edge convolutions."""
    fused: int = Field(1024, ge=1)
    """Channels of the layer over all of them together."""


class Dgcnn(Network):
    name: ClassVar[str] = "dgcnn"
    configuration: ClassVar[type[Settings]] = Configuration
    modality: ClassVar[str] = "cloud"
    slope: ClassVar[float] = SLOPE
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {"k": 16, "widths": (32, 64, 128), "fused": 256},
    }

    @property
    def width(self) -> int:
        return 2 * self.settings.fused

    def build(self) -> nn.ModuleDict:
        from torch import nn

        settings = self.settings
        inputs = (3, *settings.widths[:-1])
        edges = [
            nn.ModuleDict(
                {
                    "linear": nn.Linear(2 * inside, outside, bias=False),
                    "norm": nn.BatchNorm1d(outside),
                }
            )
            for inside, outside in zip(inputs, settings.widths, strict=True)
        ]
        fuse = {
            "linear": nn.Linear(sum(settings.widths), settings.fused, bias=False),
            "norm": nn.BatchNorm1d(settings.fused),
        }
        return nn.ModuleDict({"edges": nn.ModuleList(edges), "fuse": nn.ModuleDict(fuse)})

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        """The global features, largest and mean over the points."""
        import torch
        from torch.nn import functional

        layers = self.layers
        values, parts = samples, []
        for layer in layers["edges"]:
            neighbours = nearest(values, self.settings.k)
            values = edge_convolution(layer["linear"].weight, layer["norm"], values, neighbours)
            parts.append(values)
        fused = layers["fuse"]["linear"](torch.cat(parts, 2))
        fused = layers["fuse"]["norm"](fused.flatten(0, 1)).view_as(fused)
        fused = functional.leaky_relu(fused, SLOPE)
        return torch.cat([fused.amax(1), fused.mean(1)], 1)


def edge_convolution(
    weight: torch.Tensor, norm: nn.BatchNorm1d, values: torch.Tensor, neighbours: torch.Tensor
) -> torch.Tensor:
    """(B, P, C) to (B, P, D) with `weight` (D, 2C) and `neighbours` (B, P, k)."""
    from torch.nn import functional

    near, center = weight.chunk(2, 1)
    u = functional.linear(values, near).float()
    v = functional.linear(values, center - near).float()
    if norm.training:
        mean, variance = _edge_moments(u, v, neighbours)
        _remember(norm, mean, variance, neighbours.numel())
    else:
        mean = cast("torch.Tensor", norm.running_mean)
        variance = cast("torch.Tensor", norm.running_var)
    scale = norm.weight * (variance + norm.eps).rsqrt()
    best = _best_neighbour(u.detach() * norm.weight.detach().sign(), neighbours)
    edges = u.gather(1, best) + v
    return functional.leaky_relu((edges - mean) * scale + norm.bias, SLOPE)


def _best_neighbour(u: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
    """For each point and channel the first neighbour with the largest value: (B, P, C)."""
    import torch

    at_once = 1 if u.device.type == "cpu" else len(u)  # the values of one cloud fit a cache
    parts = zip(u.split(at_once), neighbours.int().split(at_once), strict=True)
    with torch.no_grad():
        return torch.cat([_best_of(*part) for part in parts]).long()


def _best_of(u: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
    import torch

    first, *others = neighbours.unbind(2)
    best, largest = first[..., None].expand_as(u), gather_rows(u, first)
    for other in others:
        values = gather_rows(u, other)
        best = torch.where(values > largest, other[..., None], best)
        largest = torch.maximum(largest, values)
    return best


def _edge_moments(
    u: torch.Tensor, v: torch.Tensor, neighbours: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of u_j + v_i over all edges, per channel."""
    clouds, points, k = neighbours.shape
    edges = clouds * points * k
    adjacency = u.new_zeros(clouds, points, points).scatter_(2, neighbours, 1.0)
    counts = adjacency.sum(1)[..., None]
    # Around their means: squares of large sums would lose the digits of a small variance.
    mean_u = (counts * u).sum((0, 1)) / edges
    mean_v = v.mean((0, 1))
    u, v = u - mean_u, v - mean_v
    squares = (counts * u.square()).sum((0, 1)) + k * v.square().sum((0, 1))
    products = (v * adjacency.bmm(u)).sum((0, 1))
    return mean_u + mean_v, (squares + 2 * products).clamp(min=0) / edges


def _remember(norm: Any, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
    """The running statistics of an nn.BatchNorm1d, as it keeps them."""
    import torch

    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
