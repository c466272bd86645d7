"""Neighbourhoods of batched point sets in plain torch, on any device.

Points (B, P, C) enter, indices of points leave. Conventions (3DOS rule 8):
neighbours of a point include the point itself; farthest points start at index 0; a ball is open
(distance strictly less than the radius), its members come by index and a short list repeats its
first member.
Square tables are made for some clouds of the batch at a time, so memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Distances in one table: 256 MB of float32.
LARGEST_TABLE = 2**26
# The released CUDA kernel never chooses points with a squared norm up to this, but for the first.
NEAR_ORIGIN = 1e-3


def gather_rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of `values` (B, P, C) at `index` (B, ...): (B, ..., C)."""
    import torch

    clouds, points, width = values.shape
    first = torch.arange(clouds, device=index.device) * points
    flat = (index + first.view(-1, *[1] * (index.ndim - 1))).reshape(-1)
    return values.reshape(-1, width).index_select(0, flat).view(*index.shape, width)


def nearest(points: torch.Tensor, k: int, *, ordered: bool = False) -> torch.Tensor:
    """Indices (B, P, k) of the k nearest points of each point, itself among them.

    With `ordered` the nearest comes first.
    """
    import torch

    k = min(k, points.shape[1])

    def table(part: torch.Tensor) -> torch.Tensor:
        # Squared distance without the query's own norm: the same order in each row.
        norms = part.square().sum(2)[:, None]
        distances = torch.baddbmm(norms, part, part.transpose(1, 2), alpha=-2)
        return distances.topk(k, largest=False, sorted=ordered).indices

    with torch.no_grad():
        return _by_parts(table, points.shape[1] ** 2, points.detach().float())


def nearest_other(points: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Indices (B, P) of the nearest of `others` (B, Q, C) to each point."""
    import torch

    def table(points: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        norms = others.square().sum(2)[:, None]
        return torch.baddbmm(norms, points, others.transpose(1, 2), alpha=-2).argmin(2)

    with torch.no_grad():
        size = points.shape[1] * others.shape[1]
        return _by_parts(table, size, points.detach().float(), others.detach().float())


def farthest_points(points: torch.Tensor, count: int, *, skip_origin: bool = True) -> torch.Tensor:
    """Indices (B, count): 0, then each time the point farthest from those before, lowest first.

    `skip_origin`: points next to the origin are never chosen, as in the released kernel.
    """
    import torch

    if not 1 <= count <= points.shape[1]:
        raise ValueError(f"{count} of {points.shape[1]} points cannot be chosen")
    with torch.no_grad():
        clouds = torch.arange(len(points), device=points.device)
        indices = torch.zeros(len(points), count, dtype=torch.int64, device=points.device)
        distances = points.new_full(points.shape[:2], torch.inf)
        if skip_origin:
            distances[points.square().sum(2) <= NEAR_ORIGIN] = -1
        for number in range(1, count):
            last = points[clouds, indices[:, number - 1]]
            squares = (points - last[:, None]).square_().sum(2)
            distances = torch.minimum(distances, squares)
            indices[:, number] = distances.argmax(1)
    return indices


def in_ball(points: torch.Tensor, centers: torch.Tensor, radius: float, count: int) -> torch.Tensor:
    """Indices (B, S, count) of the first points nearer than `radius` to each of the centres.

    A centre with no point in its ball gets index 0, as the released kernel leaves it.
    """
    import torch

    total = points.shape[1]
    order = torch.arange(total, dtype=torch.int32, device=points.device)

    def members(points: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
        # Not by matmul: its rounding would move points across the border.
        mode = "donot_use_mm_for_euclid_dist"
        inside = torch.cdist(centers, points, compute_mode=mode) < radius
        ranked = torch.where(inside, order, total)
        indices = ranked.topk(min(count, total), largest=False, sorted=True).values.long()
        first = indices[..., :1] % total
        indices = torch.where(indices == total, first, indices)
        return torch.cat([indices, first.expand(-1, -1, count - indices.shape[2])], 2)

    with torch.no_grad():
        return _by_parts(members, total * centers.shape[1], points.float(), centers.float())


def _by_parts(
    work: Callable[..., torch.Tensor], table: int, *batched: torch.Tensor
) -> torch.Tensor:
    """`work` on as many clouds at a time as keep their tables small."""
    import torch

    size = max(1, LARGEST_TABLE // table)
    return torch.cat([work(*part) for part in zip(*(b.split(size) for b in batched), strict=True)])
