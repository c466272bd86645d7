"""Renderer `raycast`: the masks that Blender published, without trying every ray on every box.

Enters: a `Scene`. Leaves: which pixels show a novel box (rule 6), per label and per object; on
request the label and the depth of every pixel. A pixel counts when enough of its 15x15 sample rays
end on a novel box: 23 of 225 (coverage >= 0.1, `published`) or 113 (`half`).

Of the numbers of samples tried, 15x15 agrees with most published labels and with Blender
(docs/novelcraft.md, Rendering). The number decides where an edge covers about a tenth of a whole
side of pixels, as that of a cube at (1, 7): it begins to count when it covers 0.1 of them with 5x5
and 15x15 samples, 0.06 with 8x8 and 0.125 with 4x4.

A box is convex, so the rays of one row of samples that meet it are one interval, found from its
silhouette; boxes are painted back to front into a grid of samples. That is exact at every sample,
so nothing thinner than a pixel is lost. Only the rectangle around the novel boxes in view is
painted, with only the boxes that can stand before them: a frame without a novel box in view costs
next to nothing.

What coincides is decided on purpose: a box that holds the camera shows its inner side and hides
all that is outside; of boxes that overlap the nearer surface is seen; where their surfaces
coincide, the novel one.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from schemas.errors import ConfigError
from tasks.novelcraft.masks import bounding_box
from tasks.novelcraft.scene import Scene, hit_depth, pixel_rays

SAMPLES = 15
COVERAGES = {"published": 0.1, "half": 0.5}

_NOTHING = -1
_SAME_DEPTH = 1e-9
_RUNS_AT_ONCE = 256  # bounds the memory of a crowded frame
_CONTESTED_ROWS = 128  # and that of boxes that overlap


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
    label_pixels = {scene.labels[i]: 0 for i in np.unique(scene.label_index[scene.novel])}
    novel = _outline(scene, scene.novel.nonzero()[0], samples)
    if not len(novel.boxes):
        return Rendering(mask, 0, label_pixels, ())
    left, top, right, bottom = pixels = _window(novel.bounds, n, samples)
    runs = _visible_runs(scene, novel, pixels, samples)
    window = mask[top:bottom, left:right]
    window[:] = runs.samples_in(pixels, samples) >= least
    labels = [scene.labels[i] for i in scene.label_index[novel.boxes]]
    objects = []
    for i, label in enumerate(labels):
        x0, y0, *_ = part = _window(novel.bounds[i : i + 1], n, samples)
        covered = runs.take(runs.owner == i).samples_in(part, samples) >= least
        if bounds := bounding_box(covered):
            at = (x0 + bounds[0], y0 + bounds[1], x0 + bounds[2], y0 + bounds[3])
            objects.append(NovelObject(label, *at, int(np.count_nonzero(covered))))
    for label in set(labels):
        covered = window
        if len(set(labels)) > 1:
            members = [i for i, other in enumerate(labels) if other == label]
            of_label = runs.take(np.isin(runs.owner, members))
            covered = of_label.samples_in(pixels, samples) >= least
        label_pixels[label] = int(np.count_nonzero(covered))
    return Rendering(mask, int(np.count_nonzero(window)), label_pixels, tuple(objects))


def novel_mask(scene: Scene, samples: int = SAMPLES) -> np.ndarray:
    """Only the mask, by the published coverage."""
    n = scene.view.resolution
    mask = np.zeros((n, n), bool)
    novel = _outline(scene, scene.novel.nonzero()[0], samples)
    if len(novel.boxes):
        left, top, right, bottom = pixels = _window(novel.bounds, n, samples)
        shown = _visible_runs(scene, novel, pixels, samples).samples_in(pixels, samples)
        mask[top:bottom, left:right] = shown >= samples_needed("published", samples)
    return mask


def segment(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Per pixel, at its centre: label index (int32, -1 = nothing), and depth along the view axis
    (float32, inf = nothing)."""
    n = scene.view.resolution
    owner = np.full((n, n), _NOTHING, np.int32)
    outlines = _outline(scene, np.arange(len(scene.lower)), 1)
    _paint(owner, (0, 0), outlines, outlines.boxes, scene, 1)
    labels = np.full((n, n), _NOTHING, np.int32)
    depth = np.full((n, n), np.inf, np.float32)
    hit = owner != _NOTHING
    box = owner[hit]
    labels[hit] = scene.label_index[box]
    depth[hit] = hit_depth(scene, box, pixel_rays(scene)[hit])
    return labels, depth


def boxes_seen(scene: Scene) -> np.ndarray:
    """Per pixel, at its centre: the box that is seen there, int32, -1 = none. Boxes may be of any
    size, anywhere; where surfaces coincide, the last one is seen."""
    n = scene.view.resolution
    owner = np.full((n, n), _NOTHING, np.int32)
    outlines = _outline(scene, np.arange(len(scene.lower)), 1)
    every = [range(len(outlines.boxes))]
    _paint_runs(owner, (0, 0), outlines, outlines.boxes, every, scene, 1)
    return owner


def novel_window(scene: Scene) -> tuple[int, int, int, int] | None:
    """x0, y0, x1, y1: the pixels that novel boxes touch if nothing hides them; None if none do."""
    novel = _outline(scene, scene.novel.nonzero()[0], 1)
    return _window(novel.bounds, scene.view.resolution, 1) if len(novel.boxes) else None


def samples_needed(coverage: str, samples: int = SAMPLES) -> int:
    """How many of a pixel's samples x samples rays must end on a novel box."""
    if coverage not in COVERAGES:
        raise ConfigError(f"coverage is {coverage!r}, expected one of {', '.join(COVERAGES)}")
    if not 1 <= samples <= 15:
        raise ConfigError(f"samples is {samples}, expected 1 to 15 a side")
    return int(np.ceil(COVERAGES[coverage] * samples**2))


def samples_per_pixel(shown: np.ndarray, samples: int = SAMPLES) -> np.ndarray:
    """How many of each pixel's samples are set, uint8."""
    rows = np.ascontiguousarray(shown).view(np.uint8)
    down = np.add.reduce(
        rows.reshape(len(rows) // samples, samples, rows.shape[1]), axis=1, dtype=np.uint8
    )
    counts = down[:, 0::samples].copy()
    for i in range(1, samples):
        counts += down[:, i::samples]
    return counts


class _Outlines(NamedTuple):
    """Boxes in view, in samples: `bounds` are x0, x1, y0, y1; `edges` (B, 6, 4) the directed
    silhouette as x, y, x, y; `points` the clipped corners of boxes cut by a clip plane, whose edges
    mean nothing."""

    boxes: np.ndarray
    bounds: np.ndarray
    edges: np.ndarray
    points: dict[int, np.ndarray]

    def take(self, keep: np.ndarray) -> "_Outlines":
        return _Outlines(self.boxes[keep], self.bounds[keep], self.edges[keep], self.points)


def _window(bounds: np.ndarray, resolution: int, samples: int) -> tuple[int, int, int, int]:
    """x0, y0, x1, y1: the pixels within these bounds."""
    first = np.floor(bounds[:, [0, 2]].min(0) / samples).clip(0, resolution)
    last = np.ceil(bounds[:, [1, 3]].max(0) / samples).clip(0, resolution)
    return int(first[0]), int(first[1]), int(last[0]), int(last[1])


class _Runs(NamedTuple):
    """Runs of samples of one row that show the same novel box: columns start <= column < stop."""

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    owner: np.ndarray

    def take(self, keep: np.ndarray) -> "_Runs":
        return _Runs(*(values[keep] for values in self))

    def samples_in(self, pixels: tuple[int, int, int, int], samples: int) -> np.ndarray:
        """How many samples of each pixel x0 <= x < x1, y0 <= y < y1 they cover."""
        x0, y0, x1, y1 = pixels
        width = x1 - x0 + 2
        first = (self.row // samples - y0) * width - x0
        begin, skipped = np.divmod(self.start, samples)
        end, reached = np.divmod(self.stop, samples)
        begin, end = begin + first, end + first
        # From pixel to pixel a run adds what it covers of its first and then the rest of a side.
        steps = np.bincount(
            np.concatenate([begin, begin + 1, end, end + 1]),
            np.concatenate([samples - skipped, skipped, reached - samples, -reached]),
            (y1 - y0) * width,
        )
        return np.cumsum(steps.reshape(-1, width), axis=1)[:, :-2]


def _visible_runs(
    scene: Scene, novel: _Outlines, pixels: tuple[int, int, int, int], samples: int
) -> _Runs:
    """What is seen of novel boxes in these pixels; an owner is a position in `novel`."""
    x0, y0, x1, y1 = (side * samples for side in pixels)
    away = _columns_away(scene)
    others = (~scene.novel & (away <= away[novel.boxes].max())).nonzero()[0]
    other = _outline(scene, others, samples)
    left, right, top, bottom = other.bounds.T
    other = other.take((left < x1) & (right > x0) & (top < y1) & (bottom > y0))
    both = _Outlines(
        np.concatenate([novel.boxes, other.boxes]),
        np.concatenate([novel.bounds, other.bounds]),
        np.concatenate([novel.edges, other.edges]),
        novel.points | other.points,
    )
    values = np.full(len(both.boxes), _NOTHING)
    values[: len(novel.boxes)] = np.arange(len(novel.boxes))
    order = _back_to_front(scene, both.boxes)
    if len(values) > _RUNS_AT_ONCE or any(_is_contested(values[run]) for run in order):
        kind = np.int16 if len(novel.boxes) < 1 << 15 else np.int32
        grid = np.full((y1 - y0, x1 - x0 + 2), _NOTHING, kind)  # with a rim, where each run ends
        _paint(grid[:, 1:-1], (y0, x0), both, values, scene, samples)
        row, start = (grid[:, 1:] != grid[:, :-1]).nonzero()
        owner = grid[row, start + 1]
        runs = _Runs(row + y0, start + x0, np.roll(start, -1) + x0, owner)
        return runs.take(owner != _NOTHING)
    backmost = np.array([i for run in order for i in run])
    low, high = _columns(both.take(backmost), y0 + np.arange(y1 - y0), x0, x1)
    ends = np.sort(np.concatenate([low, high]), axis=0)
    owner = np.full((len(ends) - 1, y1 - y0), _NOTHING, np.int16)
    for i, value in enumerate(values[backmost].tolist()):
        (filled,) = (high[i] > low[i]).nonzero()
        if len(filled):
            rows = slice(filled[0], filled[-1] + 1)
            covered = (ends[:-1, rows] >= low[i, rows]) & (ends[1:, rows] <= high[i, rows])
            np.copyto(owner[:, rows], value, where=covered)
    number, row = ((owner != _NOTHING) & (ends[1:] > ends[:-1])).nonzero()
    return _Runs(row + y0, ends[number, row], ends[number + 1, row], owner[number, row])


def _columns_away(scene: Scene) -> np.ndarray:
    """Steps along x and z from the camera's column of the map to the box's. A ray only ever steps
    away, so of two boxes in different columns the one fewer steps away is in front."""
    return np.abs(np.rint(scene.lower[:, [0, 2]] + 0.5 - scene.eye[[0, 2]])).sum(1)


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
    runs = _back_to_front(scene, outlines.boxes)
    for start in range(0, len(runs), _RUNS_AT_ONCE):
        some = runs[start : start + _RUNS_AT_ONCE]
        members = np.array([i for run in some for i in run])
        ends = np.cumsum([len(run) for run in some]).tolist()
        local = [range(end - len(run), end) for run, end in zip(some, ends, strict=True)]
        _paint_runs(grid, corner, outlines.take(members), values[members], local, scene, samples)


def _paint_runs(
    grid: np.ndarray,
    corner: tuple[int, int],
    outlines: _Outlines,
    values: np.ndarray,
    runs: list[range],
    scene: Scene,
    samples: int,
) -> None:
    y, x = corner[0] + np.arange(grid.shape[0]), corner[1]
    low, high = _columns(outlines, y, x, x + grid.shape[1]) - x
    filled = high > low
    left = np.where(filled, low, grid.shape[1]).min(1)
    right = np.where(filled, high, 0).max(1)
    top = filled.argmax(1)
    bottom = grid.shape[0] - filled[:, ::-1].argmax(1)
    columns = np.arange(grid.shape[1], dtype=low.dtype)
    for members in runs:
        run = [i for i in members if right[i]]
        if not run:
            continue
        first, last = min(top[run]), max(bottom[run])
        x0, x1 = min(left[run]), max(right[run])
        contested = _is_contested(values[run])
        step = _CONTESTED_ROWS if contested else last - first
        for y0 in range(first, last, step):
            y1 = min(y0 + step, last)
            if contested:
                rows = slice(corner[0] + y0, corner[0] + y1)
                directions = pixel_rays(scene, samples, rows, slice(corner[1] + x0, corner[1] + x1))
                nearest = np.full((y1 - y0, x1 - x0), np.inf)
            for i in run:
                above, below = max(top[i], y0), min(bottom[i], y1)
                if above >= below:
                    continue
                lines, across = slice(above, below), columns[left[i] : right[i]]
                seen = (across >= low[i, lines, None]) & (across < high[i, lines, None])
                if contested:
                    part = slice(above - y0, below - y0), slice(left[i] - x0, right[i] - x0)
                    depth = hit_depth(scene, outlines.boxes[i], directions[part])
                    seen &= depth <= nearest[part] + _SAME_DEPTH
                    np.copyto(nearest[part], depth, where=seen)
                np.copyto(grid[lines, left[i] : right[i]], values[i], where=seen)


def _is_contested(values: np.ndarray) -> bool:
    """Whether it matters which box of a run is seen."""
    return len(values) > 1 and bool((values != values[0]).any())


def _back_to_front(scene: Scene, boxes: np.ndarray) -> list[list[int]]:
    """Positions in `boxes`, farthest first. Boxes of one column whose heights overlap come as one
    run, novel ones last: which of them is in front differs from ray to ray."""
    away = _columns_away(scene)[boxes]
    columns: dict[tuple[float, float], list[int]] = {}
    for i, (x, _, z) in enumerate(scene.lower[boxes].tolist()):
        columns.setdefault((x, z), []).append(i)
    if len(columns) == len(boxes):
        return [[i] for i in np.argsort(-away, kind="stable").tolist()]
    below, above = scene.lower[boxes, 1], scene.upper[boxes, 1]
    gap = np.maximum(np.maximum(below - scene.eye[1], scene.eye[1] - above), 0.0)
    runs = []
    for members in columns.values():
        members.sort(key=lambda i: below[i])
        stack = [members[:1]]
        reach = above[members[0]]
        for i in members[1:]:
            if below[i] < reach:
                stack[-1].append(i)
            else:
                stack.append([i])
            reach = max(reach, above[i])
        runs += stack
    runs.sort(key=lambda run: (-away[run[0]], -gap[run].min()))
    return [sorted(run, key=lambda i: (scene.novel[boxes[i]], i)) for run in runs]


def _outline(scene: Scene, boxes: np.ndarray, samples: int) -> _Outlines:
    view = scene.view
    n = view.resolution * samples
    scale = n / (2 * view.half_width)

    def project(points: np.ndarray) -> np.ndarray:
        return n / 2 + points[..., :2] * (scale, -scale) / points[..., 2:]

    corners = scene.corners(boxes)
    nearest, farthest = corners[..., 2].min(1), corners[..., 2].max(1)
    keep = (farthest >= view.near) & (nearest <= view.far)
    cut = ((nearest < view.near) | (farthest > view.far))[keep].nonzero()[0]
    boxes, corners = boxes[keep], corners[keep]
    points = {int(boxes[i]): project(_clip(corners[i], view.near, view.far)) for i in cut}
    corners[cut] = (0.0, 0.0, 1.0)
    screen = project(corners)
    bounds = np.stack([screen.min(1), screen.max(1)], axis=2).reshape(-1, 4)
    for i in cut:
        x, y = points[int(boxes[i])].T
        bounds[i] = x.min(), x.max(), y.min(), y.max()
    side = (scene.eye > scene.upper[boxes]).astype(int) - (scene.eye < scene.lower[boxes])
    directed = _silhouettes()[(side + 1) @ (9, 3, 1)]
    edges = screen[np.arange(len(boxes))[:, None, None], directed].reshape(-1, 6, 4)
    left, right, top, bottom = bounds.T
    shown = (left < n) & (right > 0) & (top < n) & (bottom > 0)
    return _Outlines(boxes, bounds, edges, points).take(shown)


def _clip(corners: np.ndarray, near: float, far: float) -> np.ndarray:
    """Corners of what is left of a box between the clip planes."""
    kept = [corners[(corners[:, 2] >= near) & (corners[:, 2] <= far)]]
    first, second = corners[_EDGES[:, 0]], corners[_EDGES[:, 1]]
    for plane in (near, far):
        crossing = (first[:, 2] < plane) != (second[:, 2] < plane)
        a, b = first[crossing], second[crossing]
        met = a + (b - a) * ((plane - a[:, 2]) / (b[:, 2] - a[:, 2]))[:, None]
        met[:, 2] = plane
        kept.append(met)
    return np.concatenate(kept)


def _columns(outlines: _Outlines, lines: np.ndarray, x0: int, x1: int) -> np.ndarray:
    """First column and the one after the last of every box on every line of samples, of those from
    x0 to x1; (2, B, lines)."""
    low, high = _spans(outlines, lines + 0.5)
    return np.stack([np.ceil(low - 0.5), np.floor(high + 0.5)]).clip(x0, x1).astype(np.int32)


def _spans(outlines: _Outlines, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Left and right end of every box on every line y, (B, len(y)) each; left > right where it has
    none."""
    xa, ya, xb, yb = np.moveaxis(outlines.edges, 2, 0)
    fall = yb - ya
    slope = np.divide(xb - xa, fall, out=np.zeros_like(fall), where=fall != 0)
    start = xa - slope * ya

    def crossings(edges: np.ndarray, elsewhere: float) -> np.ndarray:
        return (
            np.where(edges, start, elsewhere)[..., None] + np.where(edges, slope, 0)[..., None] * y
        )

    low = crossings(fall > 0, -np.inf).max(1)
    high = crossings(fall < 0, np.inf).min(1)
    for i, box in enumerate(outlines.boxes.tolist()):
        if box in outlines.points:
            low[i], high[i] = _hull_spans(outlines.points[box], y)
    off = (y < outlines.bounds[:, 2:3]) | (y > outlines.bounds[:, 3:4])
    low[off], high[off] = np.inf, -np.inf
    return low, high


def _hull_spans(points: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for the convex hull of a few points, through every pair of them."""
    first, second = np.array(list(combinations(range(len(points)), 2))).T
    (xa, ya), (xb, yb) = points[first].T[..., None], points[second].T[..., None]
    crosses = (ya <= y) != (yb <= y)
    at = xa + (y - ya) * (xb - xa) / np.where(ya == yb, 1.0, yb - ya)
    return np.where(crosses, at, np.inf).min(0), np.where(crosses, at, -np.inf).max(0)


_EDGES = np.array([(a, a | bit) for a in range(8) for bit in (1, 2, 4) if not a & bit])


@cache
def _silhouettes() -> np.ndarray:
    """(27, 6, 2) corners of the directed edges between a seen and an unseen face, by the camera's
    side of the box (below, within, above) on each axis. Edges that go down the image bound the box
    on the left, edges that go up on the right."""
    table = np.zeros((27, 6, 2), int)
    for code in range(27):
        seen = set()
        for axis, side in enumerate((code // 9 - 1, code // 3 % 3 - 1, code % 3 - 1)):
            bit, second, third = (4 >> (axis + turn) % 3 for turn in range(3))
            base = bit if side > 0 else 0
            loop = [base, base | second, base | second | third, base | third][:: side or 1]
            seen |= set(zip(loop, loop[1:] + loop[:1], strict=True)) if side else set()
        outline = sorted((a, b) for a, b in seen if (b, a) not in seen)
        table[code, : len(outline)] = np.reshape(outline, (-1, 2))
    return table
