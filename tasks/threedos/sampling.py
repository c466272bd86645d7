"""Surfaces and scans to point clouds of one size (docs/threedos.md, rule 5).

Enters: triangles or points in float64. Leaves: points drawn uniformly by area, of them the farthest
ones in the order of their choice (the first k are the choice of k), and the normalised cloud in
float32. Nothing here depends on anything but its arguments.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from schemas.errors import RecordError
from schemas.extras import require_library
from schemas.threedos import Farthest, Normalisation

# A point at this much more than the largest distance cannot come nearer, whatever was rounded.
MARGIN = 1.00001
# Of fpsample's tree: 2^6 buckets were the fastest for 4,096 of 16,384 points.
TREE_HEIGHT = 6
# Raw meshes of ModelNet40 stand on the xy plane; everything else has y up.
Z_UP = ("modelnet40",)


class Cloud(NamedTuple):
    """`points` (n, 3) float32; its raw coordinates are `points * scale + center`."""

    points: np.ndarray
    center: np.ndarray
    scale: float


def shape_rng(seed: int, sample_id: str) -> np.random.Generator:
    """The random numbers of one shape, whichever shard or process works on it."""
    words = np.frombuffer(hashlib.sha256(sample_id.encode()).digest(), "<u4")
    return np.random.default_rng([seed, *words.tolist()])


def triangle_areas(corners: np.ndarray) -> np.ndarray:
    """Areas of triangles (F, 3 corners, 3)."""
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    return np.sqrt(np.einsum("ij,ij->i", normals, normals)) / 2


def sample_surface(
    corners: np.ndarray, areas: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """`count` points uniform on triangles (F, 3, 3) with these areas, in float64."""
    edges = np.cumsum(areas)
    place = rng.random(count) * edges[-1]
    face = np.searchsorted(edges, place, side="right").clip(max=len(areas) - 1)
    root, share = np.sqrt(rng.random(count)), rng.random(count)
    weights = np.stack([1 - root, root * (1 - share), root * share], axis=1)
    return np.einsum("nk,nkd->nd", weights, corners[face])


def farthest_points(points: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` points: first 0, then each time the one farthest from those before.

    Distances are those of float32 coordinates and of equal ones the lowest index wins, as in the
    plain loop. The work is cut down without a change of the result: along the longest axis only
    points within the largest remaining distance can have come nearer, and they lie in one slice.
    """
    points = np.asarray(points, np.float32)
    if not 1 <= count <= len(points):
        raise ValueError(f"{count} of {len(points)} points cannot be chosen")
    axis = int(np.ptp(points, axis=0).argmax())
    order = np.argsort(points[:, axis], kind="stable")
    placed = np.ascontiguousarray(points[order].T)
    line = placed[axis].tolist()
    nearest = np.full(len(points), np.inf, np.float32)
    work, equal = np.empty_like(placed), np.empty(len(points), bool)
    picks = np.empty(count, np.int64)
    here, reach = int(np.flatnonzero(order == 0)[0]), np.inf
    for number in range(count):
        picks[number] = order[here]
        low = bisect_left(line, line[here] - reach)
        high = bisect_right(line, line[here] + reach)
        squares = work[:, : high - low]
        np.subtract(placed[:, low:high], placed[:, here, None], out=squares)
        np.multiply(squares, squares, out=squares)
        distance = squares[0]
        np.add(distance, squares[1], out=distance)
        np.add(distance, squares[2], out=distance)
        slab = nearest[low:high]
        np.minimum(slab, distance, out=slab)
        here = int(nearest.argmax())
        farthest = nearest[here]
        np.equal(nearest, farthest, out=equal)
        if np.count_nonzero(equal) > 1:
            here = int(np.flatnonzero(equal)[order[equal].argmin()])
        reach = float(farthest) ** 0.5 * MARGIN
    return picks


def bucketed_farthest_points(points: np.ndarray, count: int) -> np.ndarray:
    """Indices as of `farthest_points`, but from another first point, by fpsample.

    It keeps the points in the buckets of a k-d tree and begins at the first point of the first
    bucket, not at index 0. Of points at one place it may name one several times. A cloud of fewer
    points than buckets is left to `farthest_points`.
    """
    if len(points) < 2**TREE_HEIGHT:
        return farthest_points(points, count)
    sample = require_library("fpsample").bucket_fps_kdline_sampling
    return np.asarray(sample(points, count, h=TREE_HEIGHT, start_idx=0)).astype(np.int64)


FARTHEST: dict[Farthest, Callable[[np.ndarray, int], np.ndarray]] = {
    "plain": farthest_points,
    "bucket": bucketed_farthest_points,
}


def extent(points: np.ndarray, kind: Normalisation) -> tuple[np.ndarray, np.ndarray]:
    """Center (..., 1, 3) and scale (..., 1, 1) of clouds (..., n, 3)."""
    center = points.mean(axis=-2, keepdims=True)
    moved = points - center
    if kind == "unit_sphere":
        sizes = np.sqrt((moved * moved).sum(axis=-1, keepdims=True))
    else:
        sizes = np.abs(moved)
    return center, sizes.max(axis=(-2, -1), keepdims=True)


def normalise(points: np.ndarray, kind: Normalisation = "unit_sphere") -> np.ndarray:
    """Clouds (..., n, 3) around their mean with largest norm (sphere) or coordinate (cube) 1.

    A beginning of a stored cloud is to be normalised again, as the released evaluation does.
    """
    center, scale = extent(points, kind)
    if not (scale > 0).all():
        raise RecordError("no_extent", "all points lie at one place, expected a shape with extent")
    return (points - center) / scale


def make_cloud(
    candidates: np.ndarray, count: int, kind: Normalisation, farthest: Farthest = "plain"
) -> Cloud:
    """The farthest `count` of the candidates (all, if there are fewer), then normalised."""
    rough = normalise(np.asarray(candidates, np.float64)).astype(np.float32)
    points = candidates[FARTHEST[farthest](rough, min(count, len(candidates)))]
    center, scale = extent(points, kind)
    return Cloud(normalise(points, kind).astype(np.float32), center[0], float(scale[0, 0]))


def filled(points: np.ndarray, count: int) -> np.ndarray:
    """A cloud of exactly `count` points: a shorter one starts again from its beginning."""
    return points[np.arange(count) % len(points)]


def thinned(points: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """At most `count` of the points, drawn without replacement, in their order."""
    if len(points) <= count:
        return points
    return points[np.sort(rng.choice(len(points), count, replace=False))]


def upright(points: np.ndarray, source: str) -> np.ndarray:
    """Points (..., 3) with y up."""
    if source not in Z_UP:
        return points
    x, y, z = np.moveaxis(points, -1, 0)
    return np.stack([x, z, -y], -1)
