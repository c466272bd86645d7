"""Renderer `raycast`: the masks that Blender published, without casting a ray at every box.

Enters: a `Scene`. Leaves: which pixels show a novel box (spec 2.3), per label and per object; on request
the label and the depth of every pixel. A pixel counts when enough of its 4x4 sample rays end on a novel
box: 2 of 16 (coverage >= 0.1, `published`) or 8 (`half`). Keep 4x4: Blender's filter and Filmic let an edge
count once it covers 1/8 of a pixel, which is where the first of four samples lies; with 8x8 the same rule
is off by up to a whole side of pixels (cube at (1, 7): Blender and the published labels 915, 8x8 938).

A box is convex, so the rays of one row of samples that meet it are one interval, found from the silhouette
edges; boxes are painted back to front into a grid of samples. That is exact at every sample, so nothing
thinner than a pixel is lost. Only the rectangle around the novel boxes in view is painted, with only the
boxes that can stand in front of them: frames without a novel box in view cost next to nothing.

Where things coincide, decided on purpose: a box that holds the camera shows its inner side and so hides
all that is outside; of boxes that overlap, the nearer surface is seen; where the surfaces of two
overlapping boxes coincide, the novel one is seen.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from schemas.errors import ConfigError
from tasks.novelcraft.scene import Scene, hit_depth, pixel_rays

SAMPLES = 4
COVERAGES = {"published": 0.1, "half": 0.5}


class NovelObject(NamedTuple):
    """One visible novel box; pixels x0 <= x < x1, y0 <= y < y1 bound what is seen of it."""

    label: str
    x0: int
    y0: int
    x1: int
    y1: int
    pixels: int


@dataclass(frozen=True, eq=False)
class Rendering:
    """`mask` (n, n) bool, row 0 on top. A pixel may count for several labels and objects."""

    mask: np.ndarray
    pixels: int
    label_pixels: dict[str, int]
    objects: tuple[NovelObject, ...]

    @property
    def fraction(self) -> float:
        return self.pixels / self.mask.size


def render(scene: Scene, coverage: str = "published", samples: int = SAMPLES) -> Rendering:
    """The novel pixels of one frame, from samples x samples rays a pixel."""
    least = samples_needed(coverage, samples)
    n = scene.view.resolution
    mask = np.zeros((n, n), bool)
    if not scene.novel.any():
        return Rendering(mask, 0, {}, ())
    counts = {scene.labels[i]: 0 for i in np.unique(scene.label_index[scene.novel])}
    novel = _outline(scene, scene.novel.nonzero()[0], samples)
    if not len(novel.boxes):
        return Rendering(mask, 0, counts, ())
    left, top, right, bottom = _window(novel, n, samples)
    grid = _paint_novel(scene, novel, (left, top, right, bottom), samples)
    window = mask[top:bottom, left:right]
    window[:] = samples_per_pixel(grid != _OTHER, samples) >= least
    objects = []
    seen: dict[str, np.ndarray] = {}
    for value, box in enumerate(novel.boxes):
        shown = grid == value
        if not shown.any():
            continue
        label = scene.labels[scene.label_index[box]]
        seen[label] = shown if label not in seen else seen[label] | shown
        covered = samples_per_pixel(shown, samples) >= least
        rows, columns = covered.any(1).nonzero()[0], covered.any(0).nonzero()[0]
        if len(rows):
            objects.append(
                NovelObject(
                    label,
                    left + int(columns[0]),
                    top + int(rows[0]),
                    left + int(columns[-1]) + 1,
                    top + int(rows[-1]) + 1,
                    int(np.count_nonzero(covered)),
                )
            )
    for label, shown in seen.items():
        counts[label] = int(np.count_nonzero(samples_per_pixel(shown, samples) >= least))
    return Rendering(mask, int(np.count_nonzero(window)), counts, tuple(objects))


def segment(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Label index (int32, -1 = nothing) and depth along the view axis (float32, inf = nothing) per pixel,
    at the pixel's centre."""
    n = scene.view.resolution
    owner = np.full((n, n), -1, np.int32)
    outlines = _outline(scene, np.arange(len(scene.lower)), 1)
    _paint(owner, (0, 0), outlines, outlines.boxes, scene, 1)
    labels = np.full((n, n), -1, np.int32)
    depth = np.full((n, n), np.inf, np.float32)
    hit = owner >= 0
    box = owner[hit]
    labels[hit] = scene.label_index[box]
    depth[hit] = hit_depth(
        scene.lower[box],
        scene.upper[box],
        scene.eye,
        pixel_rays(scene)[hit],
        scene.view.near,
        scene.view.far,
    )
    return labels, depth


def novel_window(scene: Scene) -> tuple[int, int, int, int] | None:
    """x0, y0, x1, y1: the pixels that novel boxes could touch if nothing hid them; None if there are none."""
    novel = _outline(scene, scene.novel.nonzero()[0], 1)
    return _window(novel, scene.view.resolution, 1) if len(novel.boxes) else None


def samples_needed(coverage: str, samples: int = SAMPLES) -> int:
    """How many of a pixel's samples x samples rays must end on a novel box."""
    if coverage not in COVERAGES:
        raise ConfigError(f"coverage is {coverage!r}, expected one of {', '.join(COVERAGES)}")
    if not 1 <= samples <= 15:
        raise ConfigError(f"samples is {samples}, expected 1 to 15 a side")
    return int(np.ceil(COVERAGES[coverage] * samples**2))


def samples_per_pixel(shown: np.ndarray, samples: int = SAMPLES) -> np.ndarray:
    """How many of each pixel's samples are set, uint8."""
    rows = shown.view(np.uint8)
    down = sum((rows[i::samples] for i in range(1, samples)), start=rows[0::samples])
    return sum((down[:, i::samples] for i in range(1, samples)), start=down[:, 0::samples])


_OTHER = np.uint16(0xFFFF)


class _Outlines(NamedTuple):
    """Boxes in view, in samples: `bounds` are x0, x1, y0, y1; `edges` (B, 6, 4) the directed silhouette
    x, y, x, y; `points` the clipped corners of boxes that reach beyond a clip plane, which have no edges."""

    boxes: np.ndarray
    bounds: np.ndarray
    edges: np.ndarray
    points: dict[int, np.ndarray]

    def take(self, keep: np.ndarray) -> "_Outlines":
        boxes = self.boxes[keep]
        points = {box: p for box, p in self.points.items() if box in boxes}
        return _Outlines(boxes, self.bounds[keep], self.edges[keep], points)


def _window(novel: _Outlines, resolution: int, samples: int) -> tuple[int, int, int, int]:
    """x0, y0, x1, y1: the pixels that these boxes can touch."""
    first = np.floor(novel.bounds[:, [0, 2]].min(0) / samples).clip(0, resolution)
    last = np.ceil(novel.bounds[:, [1, 3]].max(0) / samples).clip(0, resolution)
    return int(first[0]), int(first[1]), int(last[0]), int(last[1])


def _paint_novel(
    scene: Scene, novel: _Outlines, window: tuple[int, int, int, int], samples: int
) -> np.ndarray:
    """The samples of the window, each the position of its box in `novel` or _OTHER."""
    x0, y0, x1, y1 = (side * samples for side in window)
    away = _columns_away(scene)
    others = (~scene.novel & (away <= away[novel.boxes].max())).nonzero()[0]
    other = _outline(scene, others, samples)
    a, b = other.bounds[:, None], novel.bounds[None]
    hides = (
        (a[..., 0] < b[..., 1])
        & (a[..., 1] > b[..., 0])
        & (a[..., 2] < b[..., 3])
        & (a[..., 3] > b[..., 2])
        & (away[other.boxes][:, None] <= away[novel.boxes])
    )
    other = other.take(hides.any(1))
    both = _Outlines(
        np.concatenate([novel.boxes, other.boxes]),
        np.concatenate([novel.bounds, other.bounds]),
        np.concatenate([novel.edges, other.edges]),
        novel.points | other.points,
    )
    values = np.full(len(both.boxes), _OTHER)
    values[: len(novel.boxes)] = np.arange(len(novel.boxes))
    grid = np.full((y1 - y0, x1 - x0), _OTHER)
    _paint(grid, (y0, x0), both, values, scene, samples)
    return grid


def _columns_away(scene: Scene) -> np.ndarray:
    """Columns of the map between the camera's and the box's, in steps along x and z. A ray only ever
    steps away, so of two boxes in different columns the one fewer steps away is in front."""
    away = np.abs(np.rint(scene.lower[:, [0, 2]] + 0.5 - scene.eye[[0, 2]]))
    return away.sum(1)


def _paint(
    grid: np.ndarray,
    corner: tuple[int, int],
    outlines: _Outlines,
    values: np.ndarray,
    scene: Scene,
    samples: int,
) -> None:
    """Write values[i] where box i is seen, back to front. `corner` is the sample row and column of
    grid[0, 0]."""
    boxes = outlines.boxes
    rows = corner[0] + np.arange(grid.shape[0])
    low, high = _spans(outlines, rows + 0.5)
    low = np.clip(np.ceil(low - 0.5) - corner[1], 0, grid.shape[1]).astype(np.int16)
    high = np.clip(np.floor(high + 0.5) - corner[1], 0, grid.shape[1]).astype(np.int16)
    filled = high > low
    left = np.where(filled, low, np.int16(0x7FFF)).min(1, initial=0x7FFF)
    right = np.where(filled, high, np.int16(0)).max(1, initial=0)
    top = filled.argmax(1)
    bottom = grid.shape[0] - filled[:, ::-1].argmax(1)
    columns = np.arange(grid.shape[1], dtype=np.int16)
    for run in _back_to_front(scene, boxes):
        run = [i for i in run if right[i]]
        if not run:
            continue
        y0, y1 = min(top[run]), max(bottom[run])
        x0, x1 = min(left[run]), max(right[run])
        window = grid[y0:y1, x0:x1]
        across = columns[x0:x1]
        directions = nearest = None
        for i in run:
            seen = (across >= low[i, y0:y1, None]) & (across < high[i, y0:y1, None])
            if len(run) > 1:
                if directions is None:
                    directions = pixel_rays(scene, samples)[
                        corner[0] + y0 : corner[0] + y1, corner[1] + x0 : corner[1] + x1
                    ]
                    nearest = np.full(window.shape, np.inf)
                depth = hit_depth(
                    scene.lower[boxes[i]],
                    scene.upper[boxes[i]],
                    scene.eye,
                    directions,
                    scene.view.near,
                    scene.view.far,
                )
                seen &= depth <= nearest + _SAME_DEPTH
                np.copyto(nearest, depth, where=seen)
            np.copyto(window, values[i], where=seen)


def _back_to_front(scene: Scene, boxes: np.ndarray) -> list[list[int]]:
    """Positions in `boxes`, farthest first. Boxes of one column whose heights overlap come as one run,
    novel ones last, for which of them is in front differs from ray to ray."""
    away = _columns_away(scene)[boxes]
    place = scene.lower[boxes][:, [0, 2]]
    columns: dict[tuple[float, float], list[int]] = {}
    for i, column in enumerate(map(tuple, place.tolist())):
        columns.setdefault(column, []).append(i)
    if len(columns) == len(boxes):
        return [[i] for i in np.argsort(-away, kind="stable").tolist()]
    below, above = scene.lower[boxes, 1], scene.upper[boxes, 1]
    gap = np.maximum(np.maximum(below - scene.eye[1], scene.eye[1] - above), 0.0)
    runs = []
    for members in columns.values():
        members.sort(key=lambda i: below[i])
        merged = [[members[0]]]
        reach = above[members[0]]
        for i in members[1:]:
            if below[i] < reach:
                merged[-1].append(i)
            else:
                merged.append([i])
            reach = max(reach, above[i])
        runs += merged
    runs.sort(key=lambda run: (-away[run[0]], -gap[run].min()))
    return [sorted(run, key=lambda i: (scene.novel[boxes[i]], i)) for run in runs]


def _outline(scene: Scene, boxes: np.ndarray, samples: int) -> _Outlines:
    view = scene.view
    n = view.resolution * samples
    scale = n / (2 * view.half_width)
    corners = scene.corners(boxes)
    depth = corners[..., 2]
    nearest, farthest = depth.min(1), depth.max(1)
    keep = (farthest >= view.near) & (nearest <= view.far)
    boxes, corners, nearest, farthest = boxes[keep], corners[keep], nearest[keep], farthest[keep]
    partial = (nearest < view.near) | (farthest > view.far)

    def project(points: np.ndarray) -> np.ndarray:
        return n / 2 + points[..., :2] * (scale, -scale) / points[..., 2:]

    points = {int(boxes[i]): project(_clip(corners[i], view.near, view.far)) for i in partial.nonzero()[0]}
    corners[partial] = (0.0, 0.0, 1.0)
    screen = project(corners)
    bounds = np.stack([screen.min(1), screen.max(1)], axis=2).reshape(-1, 4)
    for i in partial.nonzero()[0]:
        at = points[int(boxes[i])]
        bounds[i] = at[:, 0].min(), at[:, 0].max(), at[:, 1].min(), at[:, 1].max()
    side = (scene.eye > scene.upper[boxes]).astype(int) - (scene.eye < scene.lower[boxes])
    directed = _silhouettes()[(side + 1) @ (9, 3, 1)]
    edges = screen[np.arange(len(boxes))[:, None, None], directed].reshape(-1, 6, 4)
    shown = (bounds[:, 0] < n) & (bounds[:, 1] > 0) & (bounds[:, 2] < n) & (bounds[:, 3] > 0)
    return _Outlines(boxes, bounds, edges, points).take(shown)


def _clip(corners: np.ndarray, near: float, far: float) -> np.ndarray:
    """Corners of what is left of a box between the clip planes."""
    kept = [corners[(corners[:, 2] >= near) & (corners[:, 2] <= far)]]
    first, second = corners[_EDGES[:, 0]], corners[_EDGES[:, 1]]
    for plane in (near, far):
        crossing = (first[:, 2] < plane) != (second[:, 2] < plane)
        a, b = first[crossing], second[crossing]
        cut = a + (b - a) * ((plane - a[:, 2]) / (b[:, 2] - a[:, 2]))[:, None]
        cut[:, 2] = plane
        kept.append(cut)
    return np.concatenate(kept)


def _spans(outlines: _Outlines, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Left and right end of every box on every line y: (B, len(y)) each, left > right where it has none."""
    xa, ya, xb, yb = np.moveaxis(outlines.edges, 2, 0)
    fall = yb - ya
    slope = np.divide(xb - xa, fall, out=np.zeros_like(fall), where=fall != 0)
    start = xa - slope * ya
    low, high = (
        ends(np.where(side, start, outside)[..., None] + np.where(side, slope, 0.0)[..., None] * y, 1)
        for side, outside, ends in ((fall > 0, -np.inf, np.max), (fall < 0, np.inf, np.min))
    )
    for i, box in enumerate(outlines.boxes):
        if int(box) in outlines.points:
            low[i], high[i] = _hull_spans(outlines.points[int(box)], y)
    off = (y < outlines.bounds[:, 2:3]) | (y > outlines.bounds[:, 3:4])
    low[off], high[off] = np.inf, -np.inf
    return low, high


def _hull_spans(points: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for the convex hull of a few points, through every pair of them."""
    pairs = np.array(list(combinations(range(len(points)), 2)))
    (xa, ya), (xb, yb) = points[pairs[:, 0]].T[..., None], points[pairs[:, 1]].T[..., None]
    crosses = ((ya <= y) != (yb <= y)) & (ya != yb)
    at = xa + (y - ya) * (xb - xa) / np.where(ya == yb, 1.0, yb - ya)
    return np.where(crosses, at, np.inf).min(0), np.where(crosses, at, -np.inf).max(0)


_SAME_DEPTH = 1e-9
_EDGES = np.array([(a, a | bit) for a in range(8) for bit in (1, 2, 4) if not a & bit])


@cache
def _silhouettes() -> np.ndarray:
    """(27, 6, 2) corners of the directed edges between a seen and an unseen face, by the camera's side of
    the box (below, within, above) per axis. Edges that go down the image bound it on the left."""
    table = np.zeros((27, 6, 2), int)
    for code in range(27):
        sides = (code // 9 - 1, code // 3 % 3 - 1, code % 3 - 1)
        loops = set()
        for axis, side in enumerate(sides):
            if not side:
                continue
            bit, second, third = (4 >> axis, 4 >> (axis + 1) % 3, 4 >> (axis + 2) % 3)
            base = bit if side > 0 else 0
            loop = [base, base | second, base | second | third, base | third]
            loop = loop if side > 0 else loop[::-1]
            loops |= set(zip(loop, loop[1:] + loop[:1], strict=True))
        outline = sorted((a, b) for a, b in loops if (b, a) not in loops)
        table[code, : len(outline)] = np.reshape(outline, (-1, 2))
    return table
