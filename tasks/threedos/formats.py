"""One raw shape to its facts and its point cloud; runs inside child processes of the native pool.

Enters: an item of `tasks.threedos.ingest`: path, reader, row, shape id and settings. Leaves: the
columns of SHAPES that the content decides, and the cloud. Readers: text meshes (`text_meshes`),
scans and grids (`scans`), PLY, STL and GLB through Open3D. Coordinates stay float64 until the cloud
is normalised: raw areas span 0.06 to 2.9e13 in ModelNet40.

Repaired: faces without area and vertices that no face uses do not count; polygons become fans.
Refused: everything that cannot be sampled without a guess at what its author meant.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schemas.errors import RecordError
from schemas.extras import require_library
from tasks.threedos.sampling import (
    filled,
    make_cloud,
    sample_surface,
    shape_rng,
    thinned,
    triangle_areas,
)
from tasks.threedos.scans import Scan, read_bin, read_grid_row, read_h5_row, read_points_text
from tasks.threedos.text_meshes import Mesh, read_obj, read_off
from tasks.threedos.whole_files import check_whole

LARGEST_COORDINATE = 1e100
"""Beyond it areas overflow."""
OPEN3D_READERS = ("ply", "stl", "glb")
BYTES_READERS: dict[str, Callable[[bytes], Mesh | Scan]] = {
    "off": read_off,
    "obj": read_obj,
    "bin": read_bin,
    "points": read_points_text,
}
ROW_READERS = ("h5", "npz")
READERS = (*BYTES_READERS, *OPEN3D_READERS, *ROW_READERS)


class Surface(NamedTuple):
    """Triangles with area. `used` are the vertices that faces name."""

    corners: np.ndarray
    areas: np.ndarray
    used: np.ndarray
    watertight: bool
    repairs: tuple[str, ...]


def sample_file(item: dict[str, Any], work: Path) -> dict[str, Any]:
    """The facts and the cloud of one raw shape."""
    path = Path(item["path"])
    shape, digest = read_shape(path, item["reader"], item["part"], item["row"], work)
    rng = shape_rng(item["seed"], item["sample_id"])
    if isinstance(shape, Mesh):
        surface = surface_of(shape)
        facts = _surface_facts(shape, surface) | {
            "kind": "voxels" if item["reader"] == "npz" else "mesh"
        }
        candidates = sample_surface(surface.corners, surface.areas, item["candidates"], rng)
    else:
        points, facts = _scan_facts(shape, item["background"])
        candidates = thinned(points, item["candidates"], rng)
    cloud = make_cloud(candidates, item["points"], item["normalisation"], item["farthest"])
    return facts | {
        "digest": digest,
        "center": cloud.center.tolist(),
        "scale": cloud.scale,
        "count": len(cloud.points),
        "points": filled(cloud.points, item["points"]).reshape(-1),
    }


def read_shape(
    path: Path, reader: str, part: str, row: int | None, work: Path
) -> tuple[Mesh | Scan, str]:
    """The raw shape and the SHA-256 of its file, or of its row in a file of many shapes.

    `work` is a folder for a copy that Open3D reads.
    """
    if reader == "npz":
        return read_grid_row(path, part, row or 0)
    if reader == "h5":
        scan = read_h5_row(path, part, row or 0)
        return scan, hashlib.sha256(scan.points.tobytes()).hexdigest()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError("unreadable", f"cannot be read: {error.strerror}") from None
    if not data:
        raise RecordError("empty_file", "the file is empty")
    if reader in OPEN3D_READERS:
        shape = read_with_open3d(data, reader, work)
    else:
        shape = BYTES_READERS[reader](data)
    return shape, hashlib.sha256(data).hexdigest()


def read_with_open3d(data: bytes, reader: str, work: Path) -> Mesh | Scan:
    """A PLY, STL or GLB file; a PLY without faces is a scan."""
    require_library("open3d")
    announced = check_whole(data, reader)
    import open3d

    open3d.utility.set_verbosity_level(open3d.utility.VerbosityLevel.Error)
    # Open3D goes by the suffix, which raw files may spell in any way.
    path = work / f"shape.{reader}"
    path.write_bytes(data)
    if reader == "ply" and _ply_faces(data) == 0:
        points = np.asarray(open3d.io.read_point_cloud(path).points, np.float64)
        _compare(len(points), announced.vertices, "vertices")
        return Scan(points)
    mesh = open3d.io.read_triangle_mesh(path)
    vertices = np.array(mesh.vertices, np.float64).reshape(-1, 3)
    if not len(vertices):
        raise RecordError("no_vertices", f"Open3D reads no vertex from this {reader.upper()} file")
    triangles = np.array(mesh.triangles, np.int64).reshape(-1, 3)
    _compare(len(vertices), announced.vertices, "vertices")
    _compare(len(triangles), announced.triangles, "triangles")
    return Mesh(vertices, triangles)


def _compare(count: int, announced: int | None, what: str) -> None:
    if announced is not None and count != announced:
        raise RecordError("truncated", f"{announced} {what} are announced, Open3D reads {count}")


def _ply_faces(data: bytes) -> int:
    """Faces that the header announces."""
    header = data[: data.find(b"end_header")].split(b"\n")
    for words in (line.split() for line in header):
        if words[:2] == [b"element", b"face"] and len(words) == 3 and words[2].isdigit():
            return int(words[2])
    return 0


# ---------------------------------------------------------------- surfaces


def surface_of(mesh: Mesh) -> Surface:
    """The triangles that can be sampled; a face that names no vertex, or a bad one, is refused."""
    vertices, faces, repairs = mesh.vertices, mesh.faces, list(mesh.repairs)
    if not len(faces):
        raise RecordError("no_faces", f"{len(vertices)} vertices and no face of three corners")
    low, high = int(faces.min()), int(faces.max())
    if low < 0 or high >= len(vertices):
        wrong = low if low < 0 else high
        raise RecordError(
            "index_out_of_range", f"a face names vertex {wrong}, there are {len(vertices)}"
        )
    is_used = np.zeros(len(vertices), bool)
    is_used[faces.reshape(-1)] = True
    used = vertices[is_used]
    if not np.isfinite(used).all():
        raise RecordError("non_finite_vertex", "a face has a vertex that is nan or infinite")
    if np.abs(used).max() > LARGEST_COORDINATE:
        raise RecordError(
            "huge_coordinates", f"a coordinate is above {LARGEST_COORDINATE:g} in size"
        )
    stray = int((~np.isfinite(vertices).all(axis=1)).sum())
    if stray:
        repairs.append(f"{stray} nan or infinite vertices without a face ignored")
    corners = vertices[faces]
    areas = triangle_areas(corners)
    has_area = areas > 0
    flat = int((~has_area).sum())
    if flat == len(faces):
        raise RecordError("no_area", f"none of the {len(faces)} faces has an area")
    if flat:
        repairs.append(f"{flat} faces without area dropped")
        corners, areas = corners[has_area], areas[has_area]
    return Surface(corners, areas, used, is_watertight(vertices, faces), tuple(repairs))


def is_watertight(vertices: np.ndarray, faces: np.ndarray) -> bool:
    """Whether every edge has exactly two faces, equal vertices merged and collapsed faces gone."""
    order = np.lexsort(vertices.T)
    placed = vertices[order]
    is_new = np.ones(len(vertices), bool)
    is_new[1:] = (placed[1:] != placed[:-1]).any(axis=1)
    merged = np.empty(len(vertices), np.int64)
    merged[order] = np.cumsum(is_new) - 1
    a, b, c = merged[faces].T
    whole = (a != b) & (b != c) & (c != a)
    a, b, c = a[whole], b[whole], c[whole]
    starts, ends = np.concatenate([a, b, c]), np.concatenate([b, c, a])
    edges = np.minimum(starts, ends) * len(vertices) + np.maximum(starts, ends)
    counts = np.unique(edges, return_counts=True)[1]
    return bool(len(counts) and (counts == 2).all())


def _surface_facts(mesh: Mesh, surface: Surface) -> dict[str, Any]:
    return {
        "vertices": len(mesh.vertices),
        "faces": len(surface.areas),
        "area": float(surface.areas.sum()),
        "box": _box(surface.used),
        "watertight": surface.watertight,
        "background": None,
        "repaired": "; ".join(surface.repairs) or None,
    }


def _scan_facts(scan: Scan, background: str) -> tuple[np.ndarray, dict[str, Any]]:
    """The points to sample from and what is known of them; the box is that of these points."""
    points, share = scan.points, None
    if scan.background is not None:
        share = float(scan.background.mean()) if len(scan.background) else 0.0
    if background == "drop":
        if scan.background is None:
            raise RecordError(
                "no_mask", "nothing says which points are background; use background: keep"
            )
        points = points[~scan.background]
    if not len(points):
        raise RecordError("no_points", "no point is left, expected at least one")
    if not np.isfinite(points).all():
        bad = int((~np.isfinite(points).all(axis=1)).sum())
        raise RecordError("non_finite_point", f"{bad} of {len(points)} points are nan or infinite")
    if np.abs(points).max() > LARGEST_COORDINATE:
        raise RecordError(
            "huge_coordinates", f"a coordinate is above {LARGEST_COORDINATE:g} in size"
        )
    facts = {
        "kind": "scan",
        "vertices": len(points),
        "faces": None,
        "area": None,
        "box": _box(points),
        "watertight": None,
        "background": share,
        "repaired": None,
    }
    return points, facts


def _box(points: np.ndarray) -> list[float]:
    return [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()]
