"""Random changes of training clouds, a batch at a time (3DOS rule 7).

`st` (synthetic): one scale in U(2/3, 3/2), then one scalar in U(-.2, .2) added to all coordinates.
`rw` (real world): scale U(.8, 1.25); turn U(0, 2 pi) about the up axis; small turns about x, y, z
by N(0, .06) clipped at .18, R = Rz Ry Rx; scalar shift U(-.1, .1); jitter N(0, .01) clipped at .05.
Every cloud has its own draws, all from torch's random state or the generator that is given.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from schemas.threedos import Normalisation

Augmentation = Literal["none", "st", "rw"]
UpAxis = Literal["x", "y", "z"]
AXES = ("x", "y", "z")


def augment(
    clouds: torch.Tensor,
    kind: Augmentation,
    *,
    up: UpAxis = "y",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Changed copies of clouds (B, P, 3)."""
    if kind == "none":
        return clouds
    if kind == "st":
        scaled = clouds * _uniform(clouds, 2 / 3, 3 / 2, generator)
        return scaled + _uniform(clouds, -0.2, 0.2, generator)
    scaled = clouds * _uniform(clouds, 0.8, 1.25, generator)
    turned = scaled @ rotations(_uniform(clouds, 0, 2 * math.pi, generator).flatten(), up).mT
    small = _normal(clouds, (len(clouds), 3), 0.06, 0.18, generator)
    x, y, z = (rotations(small[:, number], axis) for number, axis in enumerate(AXES))
    turned = turned @ (z @ y @ x).mT
    shifted = turned + _uniform(clouds, -0.1, 0.1, generator)
    return shifted + _normal(clouds, clouds.shape, 0.01, 0.05, generator)


def draw_points(
    clouds: torch.Tensor, count: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """`count` points of each cloud without replacement; with it, if there are not as many."""
    import torch

    batch, points, _ = clouds.shape
    if count > points:
        index = torch.randint(points, (batch, count), generator=generator, device=clouds.device)
    else:
        keys = torch.rand(batch, points, generator=generator, device=clouds.device)
        index = keys.argsort(1)[:, :count]
    return clouds.gather(1, index[..., None].expand(-1, -1, 3))


def normalised(clouds: torch.Tensor, kind: Normalisation = "unit_sphere") -> torch.Tensor:
    """Around their means, largest norm or coordinate 1, as `sampling.normalise` does."""
    centred = clouds - clouds.mean(1, keepdim=True)
    if kind == "unit_sphere":
        size = centred.square().sum(2).amax(1).sqrt()
    else:
        size = centred.abs().amax((1, 2))
    return centred / size[:, None, None].clamp(min=1e-12)


def rotations(angles: torch.Tensor, axis: str) -> torch.Tensor:
    """Matrices (B, 3, 3) that turn column vectors about an axis, right-handed."""
    import torch

    first, second = [(1, 2), (2, 0), (0, 1)][AXES.index(axis)]
    matrices = torch.eye(3, dtype=angles.dtype, device=angles.device).repeat(len(angles), 1, 1)
    cos, sin = angles.cos(), angles.sin()
    matrices[:, first, first] = cos
    matrices[:, second, second] = cos
    matrices[:, first, second] = -sin
    matrices[:, second, first] = sin
    return matrices


def _uniform(
    clouds: torch.Tensor, low: float, high: float, generator: torch.Generator | None
) -> torch.Tensor:
    """One number a cloud, (B, 1, 1)."""
    return clouds.new_empty(len(clouds), 1, 1).uniform_(low, high, generator=generator)


def _normal(
    clouds: torch.Tensor,
    shape: tuple[int, ...],
    deviation: float,
    limit: float,
    generator: torch.Generator | None,
) -> torch.Tensor:
    drawn = clouds.new_empty(shape).normal_(0, deviation, generator=generator)
    return drawn.clamp(-limit, limit)
