"""Sample shapes for 3DOS: out of a seed, into the three raw layouts of docs/threedos.md, rule 1.

- `modelnet40/<class>/<train|test>/<class>_NNNN.off`: z up, any scale and place, some headers glued
  to the counts (`OFF110 78 0`), some faces without area, as in the published tree.
- `scanobjectnn/main_split/{training,test}_objectdataset.h5`: `data` (N,2048,3) float32, `label` in
  the order of the 15 classes, `mask` (-1 = background); noisy partial scans, y up, any heading.
- `shapenet/<synset>/<model>/models/model_normalized.obj`, y up, bounding-box diagonal 1, and
  `shapenet/all.csv`. Every cellphone directory also stands under telephone and one sofa under
  chair, as in ShapeNetCore.v2; only all.csv says which synset a model belongs to.

Shapes are built from parts of random proportions and styles: classes differ, members vary.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from schemas.extras import require_library
from tasks.learning.draws import item_rng
from tasks.sample.files import put

Mesh = tuple[np.ndarray, np.ndarray]
Point = tuple[float, float, float]

SCAN_POINTS = 2048
TELEPHONE, CELLPHONE, SOFA, CHAIR = "04401088", "02992529", "04256520", "03001627"


# ---------------------------------------------------------------- parts


def _join(*parts: Mesh) -> Mesh:
    starts = np.cumsum([0] + [len(vertices) for vertices, _ in parts[:-1]])
    return (
        np.concatenate([vertices for vertices, _ in parts]),
        np.concatenate([faces + start for (_, faces), start in zip(parts, starts, strict=True)]),
    )


def _loft(rings: np.ndarray, caps: bool = True) -> Mesh:
    """A skin over closed rings (k, n, 3); the ends are closed by fans around their centres."""
    k, n, _ = rings.shape
    vertices = rings.reshape(-1, 3)
    here = np.arange(n)
    beside = np.roll(here, -1)
    rows = np.arange(k - 1)[:, None] * n
    a, b, c, d = (
        x.ravel() for x in (rows + here, rows + beside, rows + n + beside, rows + n + here)
    )
    faces = [np.column_stack([a, b, c]), np.column_stack([a, c, d])]
    if caps:
        vertices = np.concatenate([vertices, rings[[0, -1]].mean(axis=1)])
        top = (k - 1) * n
        faces.append(np.column_stack([beside, here, np.full(n, k * n)]))
        faces.append(np.column_stack([top + here, top + beside, np.full(n, k * n + 1)]))
    return vertices, np.concatenate(faces)


def _box(center: Point, size: Point, taper: float = 1.0) -> Mesh:
    """Eight corners, twelve triangles; the top is `taper` times as wide as the bottom."""
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) / 2
    half = size[2] / 2
    rings = np.stack(
        [
            np.column_stack([corners * size[:2] * share, np.full(4, height)])
            for share, height in ((1.0, -half), (taper, half))
        ]
    )
    vertices, faces = _loft(rings + np.asarray(center), caps=False)
    return vertices, np.concatenate([faces, [[0, 2, 1], [0, 3, 2], [4, 5, 6], [4, 6, 7]]])


def _circle(sides: int) -> np.ndarray:
    angle = np.linspace(0, 2 * np.pi, sides, endpoint=False)
    return np.column_stack([np.cos(angle), np.sin(angle)])


def _lathe(
    profile: list[tuple[float, float]], center: Point = (0, 0, 0), sides: int = 20,
    stretch: tuple[float, float] = (1.0, 1.0), caps: bool = True,
) -> Mesh:  # fmt: skip
    """A profile of (radius, height) turned about the z axis."""
    outline = _circle(sides) * stretch
    rings = [np.column_stack([outline * r, np.full(sides, z)]) for r, z in profile]
    return _loft(np.stack(rings) + np.asarray(center), caps)


def _ball(center: Point, radii: Point, sides: int = 12) -> Mesh:
    angle = np.linspace(0.05, np.pi - 0.05, sides // 2 + 2)
    profile = list(zip(np.sin(angle), -radii[2] * np.cos(angle), strict=True))
    return _lathe(profile, center, sides, radii[:2])


def _tube(path: list[Point], radius: float | list[float], sides: int = 10) -> Mesh:
    """A round bar along a path, of one radius or of one radius for each point."""
    points = np.asarray(path, dtype=float)
    tangent = np.gradient(points, axis=0)
    tangent /= np.linalg.norm(tangent, axis=1, keepdims=True)
    aside = np.eye(3)[np.abs(tangent).max(axis=0).argmin()]
    u = np.cross(tangent, aside)
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    v = np.cross(tangent, u)
    circle = _circle(sides)
    radii = np.broadcast_to(radius, len(points))[:, None, None]
    around = circle[:, 0, None] * u[:, None] + circle[:, 1, None] * v[:, None]
    return _loft(points[:, None] + radii * around)


def _plate(outline: list[tuple[float, float]] | np.ndarray, low: float, high: float) -> Mesh:
    """A flat piece with a star-shaped outline in x, y between two heights."""
    flat = np.asarray(outline, dtype=float)
    return _loft(np.stack([np.column_stack([flat, np.full(len(flat), z)]) for z in (low, high)]))


def _turned(mesh: Mesh, axes: tuple[int, int, int]) -> Mesh:
    return mesh[0][:, axes], mesh[1]


def _legs(x: float, y: float, height: float, thick: float, splay: float = 0.0) -> list[Mesh]:
    """Four legs under the corners (±x, ±y) of a top at `height`."""
    return [
        _tube([(sx * (x + splay), sy * (y + splay), 0), (sx * x, sy * y, height)], thick, 8)
        for sx in (-1, 1)
        for sy in (-1, 1)
    ]


# ---------------------------------------------------------------- classes (z up, front -y, metres)


def _chair(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h, t = u(0.4, 0.6), u(0.4, 0.55), u(0.38, 0.5), u(0.03, 0.08)
    back, lean = u(0.35, 0.65), u(0, 0.1)
    parts = [_box((0, 0, h + t / 2), (w, d, t))]
    if rng.random() < 0.75:
        parts += _legs(w / 2 - 0.03, d / 2 - 0.03, h, u(0.012, 0.03), u(0, 0.05))
    else:
        parts.append(_tube([(0, 0, 0.05), (0, 0, h)], u(0.02, 0.04)))
        for angle in np.linspace(0, 2 * np.pi, 5, endpoint=False):
            foot = (0.3 * np.cos(angle), 0.3 * np.sin(angle), 0.03)
            parts.append(_tube([(0, 0, 0.08), foot], 0.02, 6))
    top, y = h + t, d / 2 - 0.02
    if rng.random() < 0.5:
        rest = _box((0, y, top + back / 2), (w, 0.04, back))
        rest[0][:, 1] += lean * (rest[0][:, 2] - top) / back
        parts.append(rest)
    else:
        for x in np.linspace(-w / 2 + 0.02, w / 2 - 0.02, int(rng.integers(3, 7))):
            parts.append(_tube([(x, y, top), (x, y + lean, top + back)], 0.014, 6))
        parts.append(_box((0, y + lean, top + back), (w, 0.035, 0.08)))
    if rng.random() < 0.4:
        for x in (-w / 2, w / 2):
            parts.append(_box((x, 0, top + 0.2), (0.04, d * 0.9, 0.03)))
            parts.append(_box((x, -d / 2 + 0.06, top + 0.1), (0.03, 0.03, 0.2)))
    return _join(*parts)


def _table(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h, t = u(0.8, 1.8), u(0.6, 1.0), u(0.4, 0.8), u(0.02, 0.06)
    if rng.random() < 0.35:
        stretch = (1.0, u(0.7, 1.0))
        parts = [_lathe([(w / 2, h), (w / 2, h + t)], stretch=stretch, sides=24)]
        parts.append(_lathe([(0.3, 0), (0.25, 0.04), (0.05, 0.1), (0.04, h)], sides=14))
        return _join(*parts)
    parts = [_box((0, 0, h + t / 2), (w, d, t))]
    parts += _legs(w / 2 - 0.06, d / 2 - 0.06, h, u(0.02, 0.045), u(0, 0.04))
    if rng.random() < 0.5:
        for y in (-d / 2 + 0.06, d / 2 - 0.06):
            parts.append(_box((0, y, h - 0.05), (w - 0.15, 0.02, 0.09)))
    return _join(*parts)


def _desk(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h, t = u(1.1, 1.8), u(0.55, 0.8), u(0.7, 0.8), u(0.025, 0.05)
    block = u(0.32, 0.45)
    parts = [
        _box((0, 0, h + t / 2), (w, d, t)),
        _box((0, d / 2 - 0.03, h * 0.6), (w, 0.02, h * 0.7)),
    ]
    sides = [(-1, True), (1, rng.random() < 0.5)]
    for side, drawers in sides:
        if drawers:
            x = side * (w / 2 - block / 2 - 0.02)
            parts.append(_box((x, 0, h / 2), (block, d * 0.9, h)))
            count = int(rng.integers(2, 5))
            for k in range(count):
                z = (k + 0.5) * h / count
                front = -d * 0.45 - 0.01
                parts.append(_box((x, front, z), (block * 0.9, 0.02, h / count * 0.85)))
                parts.append(_box((x, front - 0.02, z), (0.1, 0.02, 0.02)))
        else:
            parts.append(_box((side * (w / 2 - 0.02), 0, h / 2), (0.04, d * 0.95, h)))
    if rng.random() < 0.3:
        parts.append(_box((0, d / 2 - 0.12, h + t + 0.2), (w * 0.9, 0.22, 0.03)))
        for x in (-w * 0.45, w * 0.45):
            parts.append(_box((x, d / 2 - 0.12, h + t + 0.1), (0.03, 0.22, 0.2)))
    return _join(*parts)


def _bookshelf(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h, t = u(0.7, 1.5), u(0.22, 0.4), u(1.2, 2.2), u(0.015, 0.035)
    parts = [_box((x, 0, h / 2), (t, d, h)) for x in (-w / 2, w / 2)]
    if rng.random() < 0.7:
        parts.append(_box((0, d / 2, h / 2), (w, 0.01, h)))
    levels = np.linspace(t, h - t, int(rng.integers(4, 8)))
    parts += [_box((0, 0, z), (w, d, t)) for z in levels]
    if rng.random() < 0.3:
        parts.append(_box((0, 0, h / 2), (t, d, h)))
    gap = levels[1] - levels[0]
    for z in levels[:-1]:
        if rng.random() < 0.5:
            x = -w / 2 + 0.04
            while x < u(-0.2, 0.5) * w:
                thick, tall = u(0.02, 0.06), u(0.5, 0.85) * gap
                parts.append(_box((x, 0, z + tall / 2), (thick * 0.9, d * 0.7, tall)))
                x += thick
    return _join(*parts)


def _door(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, h, t = u(0.7, 1.1), u(1.9, 2.3), u(0.03, 0.06)
    double = rng.random() < 0.25
    parts = []
    for x in (-w / 2, w / 2) if double else (0,):
        parts.append(_box((x, 0, h / 2), (w * 0.98, t, h)))
        rows, columns = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        for i in range(rows):
            for j in range(columns):
                place = (x + ((j + 0.5) / columns - 0.5) * w * 0.85, -t / 2, (i + 0.5) * h / rows)
                parts.append(_box(place, (w * 0.7 / columns, 0.02, h * 0.8 / rows)))
        knob = x + 0.4 * w * (-1 if x > 0 else 1)
        parts.append(_ball((knob, -t / 2 - 0.04, h * 0.47), (0.03, 0.04, 0.03)))
    half = w * (1 if double else 0.5) + 0.05
    if rng.random() < 0.7:
        parts += [_box((x, 0, h / 2), (0.1, t * 2, h)) for x in (-half, half)]
        parts.append(_box((0, 0, h + 0.05), (2 * half + 0.1, t * 2, 0.1)))
    return _join(*parts)


def _sink(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, depth, t = u(0.45, 0.9), u(0.4, 0.55), u(0.14, 0.24), 0.02
    if rng.random() < 0.6:
        parts = [_box((0, 0, -depth), (w * 0.9, d * 0.9, t))]
        for x in (-w / 2, w / 2):
            parts.append(_box((x, 0, -depth / 2), (t, d, depth)))
        for y in (-d / 2, d / 2):
            parts.append(_box((0, y, -depth / 2), (w, t, depth)))
        if rng.random() < 0.4:
            parts.append(_box((0, 0, -depth / 2), (t, d, depth)))
        rim = u(0.04, 0.15)
        parts.append(_box((0, d / 2 + rim / 2, 0), (w + 0.06, rim, t)))
        parts.append(_box((0, -d / 2 - 0.02, 0), (w + 0.06, 0.05, t)))
    else:
        profile = [(0.04, -depth), (0.6, -depth * 0.8), (0.95, -0.03), (1, 0), (1.12, 0.01)]
        parts = [_lathe([(r * w / 2, z) for r, z in profile], stretch=(1, d / w), caps=False)]
        parts.append(_box((0, d / 2 + 0.05, 0), (w * 0.8, 0.12, t)))
        if rng.random() < 0.5:
            parts.append(_lathe([(0.14, -0.8), (0.07, -0.7), (0.08, -depth)], sides=12))
    tall, reach = u(0.12, 0.32), u(0.1, 0.22)
    arc: list[Point] = [(0, d / 2 + 0.05, z * tall) for z in (0, 0.5, 0.9)]
    arc += [(0, d / 2 + 0.05 - reach * s, tall * (1 + 0.1 * s)) for s in (0.3, 0.7)]
    arc += [(0, d / 2 + 0.05 - reach, tall * 0.85)]
    parts.append(_tube(arc, u(0.012, 0.02), 8))
    parts += [_ball((x, d / 2 + 0.05, 0.04), (0.025, 0.025, 0.03)) for x in (-0.1, 0.1)]
    return _join(*parts)


def _sofa(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, seat, t = u(1.3, 2.4), u(0.75, 1.0), u(0.36, 0.46), u(0.15, 0.25)
    back, arm, wide = u(0.35, 0.55), u(0.15, 0.3), u(0.12, 0.24)
    parts = [_box((0, 0, seat * 0.55), (w, d, seat * 0.7))]
    parts.append(_box((0, d / 2 - t / 2, seat + back / 2), (w, t, back + 0.1), u(0.9, 1)))
    for x in (-w / 2 + wide / 2, w / 2 - wide / 2):
        parts.append(_box((x, 0, (seat + arm) / 2 + 0.05), (wide, d, seat + arm - 0.1)))
    count, inner = int(rng.integers(1, 4)), w - 2 * wide
    for k in range(count):
        x = ((k + 0.5) / count - 0.5) * inner
        parts.append(_box((x, -t / 2, seat + 0.04), (inner / count * 0.96, d - t, 0.14), 0.97))
        parts.append(
            _box((x, d / 2 - t - 0.05, seat + back * 0.5), (inner / count * 0.9, 0.13, back * 0.7))
        )
    if rng.random() < 0.25:
        parts.append(_box((-w / 2 + 0.4, -d / 2 - 0.35, seat * 0.55), (0.8, 0.75, seat)))
    parts += _legs(w / 2 - 0.08, d / 2 - 0.08, seat * 0.3, 0.025)
    return _join(*parts)


def _bed(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h = u(0.9, 2.0), u(1.9, 2.2), u(0.25, 0.5)
    head, foot = u(0.6, 1.3), u(0.3, 0.7)
    parts = [_box((0, 0, h), (w, d, 0.12)), _box((0, 0, h + 0.15), (w * 0.97, d * 0.97, 0.2), 0.98)]
    if rng.random() < 0.6:
        parts.append(_box((0, d / 2, head / 2), (w, 0.06, head)))
    else:
        for x in np.linspace(-w / 2, w / 2, int(rng.integers(5, 10))):
            parts.append(_tube([(x, d / 2, 0), (x, d / 2, head)], 0.018, 6))
        parts.append(_box((0, d / 2, head), (w + 0.04, 0.05, 0.05)))
    if rng.random() < 0.5:
        parts.append(_box((0, -d / 2, foot / 2), (w, 0.05, foot)))
    parts += _legs(w / 2 - 0.05, d / 2 - 0.05, h, 0.035)
    for x in (-w / 4, w / 4) if w > 1.2 else (0,):
        parts.append(_ball((x, d / 2 - 0.3, h + 0.3), (min(w, 1.6) * 0.2, 0.2, 0.08)))
    return _join(*parts)


def _toilet(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h = u(0.34, 0.42), u(0.45, 0.55), u(0.36, 0.44)
    profile = [
        (0.55, 0),
        (0.5, h * 0.3),
        (0.75, h * 0.7),
        (1, h),
        (0.8, h),
        (0.6, h * 0.8),
        (0.1, h * 0.55),
    ]
    parts = [_lathe([(r * w / 2, z) for r, z in profile], stretch=(1, d / w), caps=False)]
    parts.append(_lathe([(w * 0.5, h), (w * 0.5, h + 0.03)], stretch=(1, d / w), caps=False))
    tall, thick = u(0.28, 0.42), u(0.14, 0.22)
    y = d / 2 + thick / 2 - 0.03
    parts.append(_box((0, y, h + tall / 2), (u(0.36, 0.5), thick, tall), u(1, 1.1)))
    parts.append(_box((0, y, h + tall + 0.015), (u(0.4, 0.52), thick * 1.1, 0.03)))
    parts.append(_box((0, d * 0.3, h * 0.4), (w * 0.6, d * 0.5, h * 0.8)))
    if rng.random() < 0.5:
        lid = _lathe([(w * 0.5, 0), (w * 0.5, 0.025)], stretch=(1, d / w))
        lid = _turned(lid, (0, 2, 1))
        lid[0][:] += (0, d / 2 - 0.06, h + d / 2)
        parts.append(lid)
    else:
        parts.append(_lathe([(w * 0.5, h + 0.03), (w * 0.5, h + 0.05)], stretch=(1, d / w)))
    return _join(*parts)


def _monitor(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w = u(0.4, 0.75)
    h, t, lift = w * u(0.55, 0.8), u(0.02, 0.06), u(0.08, 0.2)
    parts = [
        _box((0, 0, lift + h / 2), (w, t, h)),
        _box((0, -t / 2, lift + h / 2), (w * 0.92, 0.01, h * 0.9)),
    ]
    if rng.random() < 0.35:
        tube = _box((0, 0, 0), (w * 0.9, h * 0.9, u(0.2, 0.4)), u(0.5, 0.7))
        tube = _turned(tube, (0, 2, 1))
        tube[0][:] += (0, t / 2 + np.ptp(tube[0][:, 1]) / 2, lift + h / 2)
        parts.append(tube)
    parts.append(_box((0, t, lift * 0.6), (u(0.04, 0.12), 0.04, lift * 1.4)))
    if rng.random() < 0.5:
        parts.append(_lathe([(w * 0.3, 0), (w * 0.28, 0.02)], stretch=(1, 0.7)))
    else:
        parts.append(_box((0, 0.02, 0.01), (w * u(0.4, 0.6), u(0.15, 0.22), 0.02)))
    return _join(*parts)


def _airplane(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    length, radius, span = u(8, 14), u(0.45, 0.9), u(8, 14)
    chord, sweep = u(1.2, 2.2), u(0.2, 3.0)
    stations = np.array([0, 0.04, 0.12, 0.3, 0.7, 0.88, 1.0])
    girth = np.array([0.05, 0.5, 0.9, 1, 1, 0.6, 0.12]) * radius
    parts = [_tube([(0, y, 0) for y in (stations - 0.5) * length], list(girth), 14)]
    low, y = u(-0.5, 0.5) * radius, -length * u(0.02, 0.12)
    for side in (-1, 1):
        tip = side * span / 2
        outline = [(0, y), (tip, y + sweep), (tip, y + sweep + chord * 0.4), (0, y + chord)]
        parts.append(_plate(outline, low - 0.06, low + 0.06))
        tail = length * 0.42
        outline = [
            (0, tail),
            (tip * 0.35, tail + sweep * 0.3),
            (tip * 0.35, tail + 0.7),
            (0, tail + 0.9),
        ]
        parts.append(_plate(outline, 0.1, 0.18))
        for share in np.linspace(0.3, 0.6, int(rng.integers(1, 3))):
            x, front = tip * share, y + sweep * share - 0.4
            parts.append(_tube([(x, front, low - 0.35), (x, front + 1.2, low - 0.35)], 0.26))
    fin = _plate(
        [(0, length * 0.4), (u(1.3, 2.2), length * 0.48), (1.5, length * 0.52), (0, length * 0.5)],
        -0.05,
        0.05,
    )
    parts.append(_turned(fin, (2, 1, 0)))
    return _join(*parts)


def _bottle(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    r, h, neck, shoulder = u(0.03, 0.05), u(0.2, 0.32), u(0.25, 0.5), u(0.5, 0.75)
    profile = [
        (r * 0.9, 0),
        (r, 0.02 * h),
        (r, shoulder * h),
        (r * (0.5 + neck / 2), shoulder * h + r * 0.7),
    ]
    profile += [(r * neck, min(shoulder + 0.2, 0.9) * h), (r * neck, h), (r * neck * 1.15, h)]
    profile += [(r * neck * 1.15, h * 1.04), (r * neck * 0.8, h * 1.04)]
    return _lathe(profile, sides=24)


def _cup(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    r, h, flare = u(0.035, 0.05), u(0.07, 0.12), u(0.7, 1.05)
    outer = [(r * flare, 0), (r * (0.4 * flare + 0.6), h * 0.6), (r, h)]
    inner = [(radius * 0.9, max(z, 0.006)) for radius, z in outer[::-1]]
    parts = [_lathe(outer + inner, sides=24)]
    if rng.random() < 0.85:
        angle = np.linspace(-1.35, 1.35, 9)
        reach, tall = u(0.02, 0.035), h * u(0.28, 0.38)
        arc = [(r * 0.95 + reach * np.cos(a), 0.0, h * 0.5 + tall * np.sin(a)) for a in angle]
        parts.append(_tube(arc, u(0.004, 0.007), 8))
    return _join(*parts)


def _guitar(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    length, waist, thick = u(0.45, 0.55), u(0.12, 0.3), u(0.04, 0.11)
    angle = np.linspace(0, 2 * np.pi, 36, endpoint=False)
    radius = length / 2 * (1 - waist + waist * np.cos(2 * angle) - u(0.05, 0.12) * np.cos(angle))
    outline = np.column_stack([u(0.75, 0.9) * radius * np.sin(angle), radius * np.cos(angle)])
    neck = u(0.4, 0.55)
    top = length / 2 * 0.85
    parts = [_plate(outline, 0, thick), _box((0, top + neck / 2, thick), (0.055, neck, 0.025))]
    parts.append(_box((0, top + neck + 0.08, thick - 0.01), (0.075, 0.17, 0.02)))
    parts.append(_box((0, -length * 0.25, thick + 0.01), (0.16, 0.03, 0.02)))
    for x in (-0.05, 0.05):
        for y in (0.03, 0.08, 0.13):
            parts.append(_ball((x, top + neck + y, thick - 0.01), (0.015, 0.01, 0.01), 8))
    return _turned(_join(*parts), (0, 2, 1))


def _lamp(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    h, base, shade = u(0.35, 1.6), u(0.09, 0.16), u(0.12, 0.24)
    tall = shade * u(0.9, 1.6)
    parts = [_lathe([(base, 0), (base * 0.9, 0.02), (base * 0.2, 0.04)], sides=18)]
    x = 0.0
    if rng.random() < 0.6:
        body = u(0.008, 0.05) if h < 0.7 else 0.012
        parts.append(_lathe([(0.01, 0.03), (body, h * 0.3), (0.01, h)], sides=12))
    else:
        x = u(0.15, 0.35)
        parts.append(_tube([(0, 0, 0.03), (-x * 0.4, 0, h * 0.6), (x, 0, h)], 0.01, 8))
    profile = [(shade, h - tall * 0.3), (shade * u(0.4, 0.85), h + tall * 0.7)]
    parts.append(_lathe(profile, (x, 0, 0), 20, caps=False))
    parts.append(_ball((x, 0, h), (0.03, 0.03, 0.045)))
    return _join(*parts)


def _stairs(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    count, w, run, rise = int(rng.integers(6, 14)), u(0.8, 1.3), u(0.22, 0.32), u(0.15, 0.2)
    solid = rng.random() < 0.5
    parts = []
    for k in range(count):
        height = (k + 1) * rise if solid else 0.05
        parts.append(_box((0, k * run, (k + 1) * rise - height / 2), (w, run * 1.05, height)))
    ends = [(0.0, rise), ((count - 1) * run, count * rise)]
    for x in (-w / 2, w / 2):
        if not solid:
            parts.append(_tube([(x, y, z - 0.1) for y, z in ends], 0.05, 6))
        parts.append(_tube([(x, y, z + 0.9) for y, z in ends], 0.025, 6))
        for y, z in ends:
            parts.append(_tube([(x, y, z), (x, y, z + 0.9)], 0.02, 6))
    return _join(*parts)


def _bag(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h = u(0.3, 0.5), u(0.1, 0.2), u(0.25, 0.45)
    corner = np.sign(_circle(24)) * np.abs(_circle(24)) ** 0.5
    sizes = [(0.8, 0), (1, 0.06), (1, 0.5), (0.9, 0.85), (0.75, 1)]
    rings = [
        np.column_stack([corner * (w / 2 * s, d / 2 * s * (1.2 - z)), np.full(24, z * h)])
        for s, z in sizes
    ]
    parts = [_loft(np.stack(rings))]
    angle, rise = np.linspace(0.1, np.pi - 0.1, 9), u(0.08, 0.16)
    for y in (-d * 0.12, d * 0.12) if rng.random() < 0.6 else (0,):
        arc = [(w * 0.25 * np.cos(a), y, h * 0.97 + rise * np.sin(a)) for a in angle]
        parts.append(_tube(arc, 0.01, 6))
    if rng.random() < 0.5:
        parts.append(_box((0, -d * 0.42, h * 0.35), (w * 0.6, 0.04, h * 0.35)))
    return _join(*parts)


def _bin(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    r, h, taper, sides = u(0.12, 0.22), u(0.3, 0.6), u(0.65, 0.95), int(rng.choice([4, 24]))
    outer = [(r * taper, 0), (r, h), (r * 1.06, h), (r * 1.06, h * 1.03)]
    inner = [(r * 0.96, h * 1.03), (r * taper * 0.94, 0.01)]
    parts = [_lathe(outer + inner, sides=sides)]
    if rng.random() < 0.3:
        parts.append(
            _lathe([(r * 1.08, h * 1.03), (r * 0.8, h * 1.15), (0.02, h * 1.2)], sides=sides)
        )
    return _join(*parts)


def _box_shape(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h, t = u(0.25, 0.6), u(0.2, 0.5), u(0.15, 0.45), 0.01
    parts = [_box((0, 0, t / 2), (w, d, t))]
    for side in (-1, 1):
        parts.append(_box((side * w / 2, 0, h / 2), (t, d, h)))
        parts.append(_box((0, side * d / 2, h / 2), (w, t, h)))
    if rng.random() < 0.5:
        parts.append(_box((0, 0, h), (w, d, t)))
    else:
        for side in (-1, 1):
            flap = u(0.3, 1.2)
            edge = side * (w / 2 + 0.25 * w * np.cos(flap))
            panel = _box((edge, 0, h + 0.25 * w * np.sin(flap)), (w * 0.5, d, t))
            slope = np.tan(flap) * side
            panel[0][:, 2] += (panel[0][:, 0] - edge) * np.clip(slope, -1, 1)
            parts.append(panel)
    return _join(*parts)


def _cabinet(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h = u(0.5, 1.4), u(0.35, 0.6), u(0.6, 1.5)
    parts = [
        _box((0, 0, h / 2 + 0.08), (w, d, h)),
        _box((0, 0, h + 0.09), (w * 1.04, d * 1.05, 0.03)),
    ]
    columns, rows = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    for i in range(rows):
        for j in range(columns):
            x, z = ((j + 0.5) / columns - 0.5) * w, (i + 0.5) * h / rows + 0.08
            parts.append(_box((x, -d / 2, z), (w / columns * 0.92, 0.03, h / rows * 0.92)))
            parts.append(_ball((x + w / columns * 0.3, -d / 2 - 0.03, z), (0.015, 0.025, 0.015), 8))
    parts += _legs(w / 2 - 0.05, d / 2 - 0.05, 0.08, 0.025)
    return _join(*parts)


def _pillow(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, thick, square = u(0.4, 0.7), u(0.35, 0.5), u(0.1, 0.18), u(0.3, 0.6)
    circle = _circle(28)
    corner = np.sign(circle) * np.abs(circle) ** square
    levels = np.linspace(-1, 1, 9)
    rings = [
        np.column_stack(
            [
                corner * (w / 2, d / 2) * (1 - abs(z) ** 2.5) + corner * 0.001,
                np.full(28, z * thick / 2),
            ]
        )
        for z in levels
    ]
    return _loft(np.stack(rings))


def _telephone(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, d, h = u(0.16, 0.22), u(0.18, 0.24), u(0.05, 0.09)
    parts = [_box((0, 0, h / 2), (w, d, h), u(0.75, 0.95))]
    x = -w * 0.28
    parts.append(_box((x, 0, h + 0.035), (0.045, d * 0.95, 0.025)))
    parts += [_box((x, y, h + 0.015), (0.055, 0.05, 0.03)) for y in (-d * 0.38, d * 0.38)]
    for i in range(4):
        for j in range(3):
            parts.append(
                _box((0.005 + j * w * 0.12, d * (i * 0.13 - 0.3), h), (0.014, 0.014, 0.012))
            )
    return _join(*parts)


def _cellphone(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    w, h, t = u(0.045, 0.075), u(0.1, 0.15), u(0.007, 0.02)
    split = u(0.45, 0.75)
    parts = [
        _box((0, 0, h / 2), (w, t, h)),
        _box((0, -t / 2, h * (1 - split / 2) - 0.01), (w * 0.86, 0.002, h * split * 0.85)),
    ]
    for i in range(4):
        for j in range(3):
            z = 0.01 + i * h * (1 - split) * 0.2
            parts.append(_box(((j - 1) * w * 0.27, -t / 2, z), (w * 0.2, 0.004, h * 0.03)))
    if rng.random() < 0.4:
        parts.append(_tube([(w * 0.35, 0, h), (w * 0.35, 0, h + 0.03)], 0.004, 6))
    return _join(*parts)


def _car(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    length, w, h = u(3.6, 5.0), u(1.6, 1.9), u(0.5, 0.7)
    clear, r, cabin = u(0.2, 0.3), u(0.28, 0.36), u(0.45, 0.6)
    roof = _box(
        (0, length * u(0, 0.12), clear + h + cabin / 2),
        (w * 0.95, length * cabin, cabin),
        u(0.65, 0.9),
    )
    parts = [_box((0, 0, clear + h / 2), (w, length, h), 0.97), roof]
    for x in (-w / 2, w / 2):
        for y in (-length * 0.32, length * 0.32):
            parts.append(_tube([(x - 0.1, y, r), (x + 0.1, y, r)], r, 16))
    return _join(*parts)


def _can(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    r = u(0.03, 0.05)
    h = r * u(1.6, 4)
    profile = [
        (r * 0.85, 0),
        (r, 0.08 * r),
        (r, h - 0.15 * r),
        (r * u(0.8, 0.95), h),
        (r * 0.75, h - 0.03 * r),
    ]
    return _lathe(profile, sides=26)


def _rocket(rng: np.random.Generator) -> Mesh:
    u = rng.uniform
    r, h = u(0.25, 0.5), u(3.5, 6)
    profile = [(r * u(0.5, 1), 0), (r, 0.3), (r, h * 0.75), (r * 0.7, h * 0.88), (0.02, h)]
    parts = [_lathe(profile, sides=18)]
    reach, tall = u(0.4, 0.9), u(0.5, 1.2)
    for turn in np.linspace(0, 2 * np.pi, int(rng.integers(3, 5)), endpoint=False):
        fin, faces = _plate(
            [(r, 0.1), (r + reach, -0.2), (r + reach, tall * 0.3), (r, tall)], -0.03, 0.03
        )
        x, z, y = fin.T
        turned = (x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn), z)
        parts.append((np.column_stack(turned), faces))
    return _join(*parts)


BUILDERS: dict[str, Callable[[np.random.Generator], Mesh]] = {
    "airplane": _airplane, "bag": _bag, "bed": _bed, "bin": _bin, "bookshelf": _bookshelf,
    "bottle": _bottle, "box": _box_shape, "cabinet": _cabinet, "can": _can, "car": _car,
    "cellphone": _cellphone, "chair": _chair, "cup": _cup, "desk": _desk, "door": _door,
    "guitar": _guitar, "lamp": _lamp, "monitor": _monitor, "pillow": _pillow, "rocket": _rocket,
    "sink": _sink, "sofa": _sofa, "stairs": _stairs, "table": _table, "telephone": _telephone,
    "toilet": _toilet,
}  # fmt: skip
MODELNET_CLASSES = (
    "airplane", "bed", "bookshelf", "bottle", "car", "chair", "cup", "desk", "door", "guitar",
    "lamp", "monitor", "sink", "sofa", "stairs", "table", "toilet",
)  # fmt: skip
# ScanObjectNN's own order and names; display is the monitor, shelf the bookshelf.
SCAN_CLASSES = (
    "bag", "bin", "box", "cabinet", "chair", "desk", "monitor", "door", "bookshelf", "table", "bed",
    "pillow", "sink", "sofa", "toilet",
)  # fmt: skip
SYNSETS = {
    "02818832": "bed", "02871439": "bookshelf", "03211117": "monitor", "03636649": "lamp",
    "03797390": "cup", TELEPHONE: "telephone", CELLPHONE: "cellphone",
    "02747177": "bin", "02773838": "bag", "02933112": "cabinet", CHAIR: "chair",
    "03938244": "pillow", SOFA: "sofa", "04379243": "table",
    "02691156": "airplane", "02876657": "bottle", "02946921": "can", "02958343": "car",
    "03467517": "guitar", "04099429": "rocket",
}  # fmt: skip
BAD_OFF = {
    "modelnet40/chair/train/chair_9001.off": "empty file",
    "modelnet40/desk/train/desk_9001.off": "a vertex is nan",
    "modelnet40/sofa/test/sofa_9001.off": "a face names a vertex that does not exist",
    "modelnet40/table/train/table_9001.off": "cut off in the middle of the vertices",
    "modelnet40/door/test/door_9001.off": "no faces",
    "modelnet40/bed/train/bed_9001.off": "binary bytes, not text",
}
BAD_OBJ = {
    (CHAIR, "empty"): "empty file",
    ("02691156", "index"): "a face names a vertex that does not exist",
    ("02958343", "missing"): "listed in all.csv, no file",
    ("04379243", "missing"): "listed in all.csv, no file",
}


def bad_threedos_records(seed: int = 0, *, scans_test: int = 6) -> list[tuple[str, str]]:
    """(path below the root, what is wrong); a scan is named by `file#row`."""
    scan = f"scanobjectnn/main_split/test_objectdataset.h5#{scans_test * len(SCAN_CLASSES)}"
    models = [
        (_model_path(synset, _model_id(seed, synset, name)), wrong)
        for (synset, name), wrong in BAD_OBJ.items()
    ]
    return [*BAD_OFF.items(), (scan, "every coordinate is nan"), *models]


def write_threedos(
    root: Path,
    seed: int = 0,
    *,
    train: int = 24,
    test: int = 10,
    scans_train: int = 12,
    scans_test: int = 6,
    models: int = 10,
    bad_records: bool = True,
) -> None:
    """`train` and `test` meshes, `scans_*` scans and `models` ShapeNet models for each class."""
    _write_modelnet(root, seed, train, test, bad_records)
    folder = root / "scanobjectnn" / "main_split"
    put(folder / "training_objectdataset.h5", _scans(seed, "training", scans_train, False))
    put(folder / "test_objectdataset.h5", _scans(seed, "test", scans_test, bad_records))
    _write_shapenet(root, seed, models, bad_records)


# ---------------------------------------------------------------- ModelNet40


def _write_modelnet(root: Path, seed: int, train: int, test: int, bad_records: bool) -> None:
    for name in MODELNET_CLASSES:
        for number in range(1, train + test + 1):
            part = "train" if number <= train else "test"
            path = f"modelnet40/{name}/{part}/{name}_{number:04d}.off"
            put(root / path, _off(*_modelnet_mesh(seed, path, name)))
    for path in BAD_OFF if bad_records else ():
        put(root / path, _bad_off(seed, path))


def _modelnet_mesh(seed: int, path: str, name: str) -> tuple[np.ndarray, np.ndarray, bool]:
    rng = item_rng(seed, path)
    vertices, faces = BUILDERS[name](rng)
    vertices = vertices / np.ptp(vertices, axis=0).max()
    vertices = (vertices + rng.uniform(-1, 1, 3)) * 10.0 ** rng.uniform(-3, 4)
    if rng.random() < 0.3:
        flat = faces[rng.integers(0, len(faces), 3)].copy()
        flat[:, 2] = flat[:, 1]
        faces = np.concatenate([faces, flat])
    return vertices, faces, rng.random() < 0.2


def _off(vertices: np.ndarray, faces: np.ndarray, glued: bool) -> bytes:
    lines = [f"OFF{'' if glued else chr(10)}{len(vertices)} {len(faces)} 0"]
    lines += [f"{x:.6g} {y:.6g} {z:.6g}" for x, y, z in vertices.tolist()]
    lines += [f"3 {a} {b} {c}" for a, b, c in faces.tolist()]
    return ("\n".join(lines) + "\n").encode()


def _bad_off(seed: int, path: str) -> bytes:
    wrong = BAD_OFF[path]
    vertices, faces, _ = _modelnet_mesh(seed, path, path.split("/")[1])
    if wrong == "empty file":
        return b""
    if wrong == "a vertex is nan":
        vertices[3, 1] = np.nan
    elif wrong == "a face names a vertex that does not exist":
        faces[5, 2] = len(vertices)
    elif wrong == "no faces":
        faces = faces[:0]
    elif wrong == "binary bytes, not text":
        return item_rng(seed, path, "bytes").bytes(4096)
    data = _off(vertices, faces, False)
    return data[: data.index(b"\n3 ") // 2] if wrong.startswith("cut off") else data


# ---------------------------------------------------------------- ScanObjectNN


def _scans(seed: int, part: str, count: int, bad_records: bool) -> bytes:
    require_library("h5py")
    import h5py

    scans = [
        _scan(item_rng(seed, "scanobjectnn", part, name, number), name)
        for name in SCAN_CLASSES
        for number in range(count)
    ]
    data = np.array([points for points, _ in scans], np.float32).reshape(-1, SCAN_POINTS, 3)
    label = np.repeat(np.arange(len(SCAN_CLASSES), dtype=np.int32), count)
    background = np.array([mask for _, mask in scans], bool).reshape(-1, SCAN_POINTS)
    mask = np.where(background, -1, label[:, None]).astype(np.int32)
    if bad_records:
        data = np.concatenate([data, np.full((1, SCAN_POINTS, 3), np.nan, np.float32)])
        label = np.append(label, label[-1:])
        mask = np.concatenate([mask, mask[-1:]])
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", track_order=False) as file:
        for name, array in (("data", data), ("label", label), ("mask", mask)):
            file.create_dataset(name, data=array, track_times=False)
    return buffer.getvalue()


def _scan(rng: np.random.Generator, name: str) -> tuple[np.ndarray, np.ndarray]:
    """What three neighbouring viewpoints see, with noise, floor and wall; y is up."""
    points = _surface(rng, *BUILDERS[name](rng), 12_000)
    points -= points.mean(axis=0)
    size = np.abs(points).max()
    seen = np.zeros(len(points), bool)
    heading = -np.pi / 2 + rng.uniform(-0.9, 0.9)
    for turn in rng.uniform(-0.9, 0.9, 3):
        tilt = rng.uniform(0.15, 0.6)
        flat = np.array([np.cos(heading + turn), np.sin(heading + turn)]) * np.cos(tilt)
        seen |= _visible(points, np.array([*flat, np.sin(tilt)]), size / 18)
    points = points[seen]
    background = int(SCAN_POINTS * rng.choice([0, 0.05, 0.12]))
    low, high = points.min(axis=0) - 0.08 * size, points.max(axis=0) + 0.08 * size
    clutter = rng.uniform(low, high, (background, 3))
    wall = rng.random(background) < 0.3
    clutter[~wall, 2], clutter[wall, 1] = low[2], high[1]
    rows = rng.choice(len(points), SCAN_POINTS - background, replace=len(points) < SCAN_POINTS)
    cloud = np.concatenate([points[rows], clutter])
    cloud += rng.normal(0, 0.008 * size, cloud.shape)
    order = rng.permutation(SCAN_POINTS)
    turn = rng.uniform(0, 2 * np.pi)
    x, y, z = cloud[order].T
    cloud = np.column_stack(
        [x * np.cos(turn) - y * np.sin(turn), z, -x * np.sin(turn) - y * np.cos(turn)]
    )
    return cloud + rng.uniform(-3, 3, 3), (np.arange(SCAN_POINTS) >= len(rows))[order]


def _surface(
    rng: np.random.Generator, vertices: np.ndarray, faces: np.ndarray, count: int
) -> np.ndarray:
    corners = vertices[faces]
    sides = corners[:, 1:] - corners[:, :1]
    area = np.linalg.norm(np.cross(sides[:, 0], sides[:, 1]), axis=1)
    face = np.searchsorted(np.cumsum(area) / area.sum(), rng.random(count)).clip(max=len(faces) - 1)
    share = rng.random((count, 2, 1))
    share = np.where(share.sum(axis=1, keepdims=True) > 1, 1 - share, share)
    return corners[face, 0] + (share * sides[face]).sum(axis=1)


def _visible(points: np.ndarray, toward: np.ndarray, cell: float) -> np.ndarray:
    """Points at most 1.5 cells behind the front-most one of their cell, seen from `toward`."""
    aside = np.cross(toward, (0, 0, 1))
    aside /= np.linalg.norm(aside)
    plane = np.floor(points @ np.column_stack([aside, np.cross(aside, toward)]) / cell).astype(int)
    plane -= plane.min(axis=0)
    index = plane[:, 0] * (plane[:, 1].max() + 1) + plane[:, 1]
    depth = points @ toward
    front = np.full(index.max() + 1, -np.inf)
    np.maximum.at(front, index, depth)
    return depth > front[index] - 1.5 * cell


# ---------------------------------------------------------------- ShapeNetCore.v2


def _model_id(seed: int, synset: str, name: object) -> str:
    return item_rng(seed, "shapenet", synset, name, "id").bytes(16).hex()


def _model_path(synset: str, model: str) -> str:
    return f"shapenet/{synset}/{model}/models/model_normalized.obj"


def _write_shapenet(root: Path, seed: int, models: int, bad_records: bool) -> None:
    rows = []
    for synset, kind in SYNSETS.items():
        names: list[object] = list(range(models))
        names += [name for of, name in BAD_OBJ if bad_records and of == synset]
        for place, name in enumerate(names):
            model = _model_id(seed, synset, name)
            split = ("train", "test", "train", "val", "train")[place % 5]
            rows.append((synset, split, model))
            data = _obj(item_rng(seed, "shapenet", synset, name), kind, broken=name == "index")
            under = [synset]
            if synset == CELLPHONE:
                under.append(TELEPHONE)
            elif synset == SOFA and name == 0:
                under.append(CHAIR)
            for folder in under if name != "missing" else ():
                put(root / _model_path(folder, model), b"" if name == "empty" else data)
    lines = [
        f"{number:06d},{synset},{synset},{model},{split}"
        for number, (synset, split, model) in enumerate(sorted(rows))
    ]
    text = "\n".join(["id,synsetId,subSynsetId,modelId,split", *lines]) + "\n"
    put(root / "shapenet" / "all.csv", text.encode())


def _obj(rng: np.random.Generator, kind: str, broken: bool) -> bytes:
    vertices, faces = BUILDERS[kind](rng)
    vertices = vertices[:, [0, 2, 1]] * (1, 1, -1)
    low, high = vertices.min(axis=0), vertices.max(axis=0)
    vertices = (vertices - (low + high) / 2) / np.linalg.norm(high - low)
    corners = vertices[faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    if broken:
        faces = faces.copy()
        faces[7, 1] = len(vertices) + 40
    lines = [
        "# File produced by a generator of sample shapes",
        "",
        "mtllib model_normalized.mtl",
        "",
    ]
    lines.append(f"# {len(vertices)} vertex positions")
    lines += [f"v {x:.6f} {y:.6f} {z:.6f}" for x, y, z in vertices.tolist()]
    lines += ["", "# 0 UV coordinates", "", f"# {len(normals)} vertex normals"]
    lines += [f"vn {x:.6g} {y:.6g} {z:.6g}" for x, y, z in normals.tolist()]
    lines += ["", f"# Mesh '{kind}' with {len(faces)} faces", f"g {kind}", "usemtl material_0_24"]
    lines += [
        f"f  {a}//{n} {b}//{n} {c}//{n}"
        for n, (a, b, c) in enumerate((faces + 1).tolist(), start=1)
    ]
    return ("\n".join(lines) + "\n\n").encode()
