"""Scans and grids: ScanObjectNN h5 and .bin, point text, PLY points, occupancy grids.

Enters: a path, and for files of many shapes the data set and the row. Leaves: a `Scan`, or for a
grid the mesh of its outer faces, or a RecordError. Rows of a compressed npz are read in one pass:
asking for them in rising order costs one inflation, and memory stays that of one row.
"""

import hashlib
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schemas.errors import RecordError
from schemas.extras import require_library
from tasks.threedos.text_meshes import Mesh

BIN_COLUMNS = 11
BACKGROUND = -1
AXES = (("x", "y", "z"), ("origin_x", "origin_y", "origin_z"))


class Scan(NamedTuple):
    """`background` marks points that do not belong to the object; None where nothing says so."""

    points: np.ndarray
    background: np.ndarray | None = None


def read_bin(data: bytes) -> Scan:
    """Raw ScanObjectNN: the number of points, then for each x y z nx ny nz r g b and two labels."""
    if len(data) < 4 or len(data) % 4:
        raise RecordError("truncated", f"{len(data)} bytes are not a row of float32 numbers")
    numbers = np.frombuffer(data, "<f4")
    if numbers.size - 1 != numbers[0] * BIN_COLUMNS:
        raise RecordError(
            "truncated",
            f"{numbers[0]:g} points of {BIN_COLUMNS} numbers are announced, "
            f"{numbers.size - 1} numbers follow",
        )
    return Scan(numbers[1:].reshape(-1, BIN_COLUMNS)[:, :3].astype(np.float64))


def read_points_text(data: bytes) -> Scan:
    """Lines of x, y, z and more, by comma or space; a header may say which columns they are."""
    if not data.strip():
        raise RecordError("empty_file", "the file is empty")
    text = data.decode("latin-1")
    lines = text.split("\n")
    comma = "," if "," in lines[0] else None
    names = [name.strip().lower() for name in lines[0].split(comma)]
    columns = next((axes for axes in AXES if set(axes) <= set(names)), None)
    if columns is None and not _are_numbers(names):
        raise RecordError("bad_header", f"columns are {names[:8]}, expected x, y and z among them")
    body = lines[1:] if columns else lines
    use = [names.index(name) for name in columns] if columns else [0, 1, 2]
    if not any(line.strip() for line in body):
        raise RecordError("no_points", "the file has no points")
    try:
        points = np.loadtxt(body, delimiter=comma, usecols=use, ndmin=2, dtype=np.float64)
    except (ValueError, IndexError) as error:
        raise RecordError("bad_number", f"a line is not x, y, z: {error}") from None
    return Scan(points)


def _are_numbers(words: list[str]) -> bool:
    try:
        return len([float(word) for word in words]) >= 3
    except ValueError:
        return False


# ---------------------------------------------------------------- h5


@lru_cache(maxsize=1)
def _opened_h5(path: str) -> Any:
    require_library("h5py")
    import h5py

    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise RecordError("bad_h5", f"not a readable HDF5 file: {error}") from None


def _h5_dataset(file: Any, name: str) -> Any:
    """A data set whose bytes are in this file; HDF5 itself would read any other file it names."""
    import h5py

    try:
        parts = name.strip("/").split("/")
        for number in range(len(parts)):
            link = file.get("/".join(parts[: number + 1]), getlink=True)
            if link is not None and not isinstance(link, h5py.HardLink):
                raise RecordError(
                    "foreign_bytes", f"{name!r} is a link to elsewhere; store the data itself"
                )
        member = file[name]
        if not isinstance(member, h5py.Dataset):
            raise RecordError("bad_h5", f"{name!r} is a {type(member).__name__}, no data set")
        if member.is_virtual or member.external:
            raise RecordError(
                "foreign_bytes", f"the bytes of {name!r} are in other files; store the data itself"
            )
    except (KeyError, OSError, ValueError, RuntimeError) as error:
        raise RecordError("bad_h5", f"{name!r} is unreadable: {error}") from None
    return member


def read_h5_row(path: Path, dataset: str, row: int) -> Scan:
    """One cloud (points, 3) of a data set (N, points, 3), and of `mask` if there is one."""
    file = _opened_h5(str(path))
    points = _h5_array(file, dataset, row)
    if points.ndim != 2 or points.shape[1] != 3:
        raise RecordError("bad_shape", f"a cloud has shape {points.shape}, expected (points, 3)")
    mask = _h5_array(file, "mask", row) if _has(file, "mask") else None
    if mask is not None and mask.shape != points.shape[:1]:
        raise RecordError("bad_shape", f"mask has {mask.shape}, the cloud {points.shape[:1]}")
    return Scan(points.astype(np.float64), None if mask is None else mask == BACKGROUND)


def _h5_array(file: Any, dataset: str, row: int) -> np.ndarray:
    try:
        return np.asarray(_h5_dataset(file, dataset)[row])
    except (OSError, IndexError, ValueError, TypeError) as error:
        raise RecordError("bad_h5", f"row {row} of {dataset!r} is unreadable: {error}") from None


def probe_h5(item: dict[str, Any], work: Path) -> dict[str, Any]:
    """In a child process: rows of `data`, and `label` if there is one."""
    file = _opened_h5(item["path"])
    data = _h5_dataset(file, "data") if _has(file, "data") else None
    if data is None or data.ndim != 3 or data.shape[2] != 3:
        raise RecordError("bad_h5", "no data set `data` of shape (N, points, 3)")
    facts: dict[str, Any] = {"rows": int(data.shape[0])}
    if _has(file, "label"):
        label = _h5_dataset(file, "label")
        facts["label"] = np.asarray(label[:]).reshape(-1).astype(np.int64)
    return facts


def _has(file: Any, name: str) -> bool:
    """Whether there is an entry of that name; `in` would follow a link to find out."""
    return name in list(file)


# ---------------------------------------------------------------- grids


class _Rows:
    """Rows of one array of an npz, read forward."""

    def __init__(self, path: str, member: str):
        try:
            self._file = zipfile.ZipFile(path).open(f"{member}.npy")  # noqa: SIM115
            version = np.lib.format.read_magic(self._file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            self.shape, by_column, self.dtype = read(self._file)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise RecordError("bad_npz", f"no readable array {member!r}: {error}") from None
        if by_column or self.dtype.hasobject:
            raise RecordError("bad_npz", f"{member!r} is stored by columns or holds objects")
        self.next = 0
        self._bytes = int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def read(self, row: int) -> np.ndarray:
        if not self.next <= row < self.shape[0]:
            raise IndexError(row)
        data = b""
        while self.next <= row:
            try:
                data = self._file.read(self._bytes)
            except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
                raise RecordError("bad_npz", f"row {self.next} is damaged: {error}") from None
            if len(data) != self._bytes:
                raise RecordError("truncated", f"the array ends within row {self.next}")
            self.next += 1
        return np.frombuffer(data, self.dtype).reshape(self.shape[1:])


_opened_rows = lru_cache(maxsize=2)(_Rows)


def read_grid_row(path: Path, member: str, row: int) -> tuple[Mesh, str]:
    """The outer faces of one occupancy grid of an npz, and the digest of its numbers."""
    rows = _opened_rows(str(path), member)
    if row < rows.next:
        _opened_rows.cache_clear()
        rows = _opened_rows(str(path), member)
    grid = rows.read(row)
    return grid_surface(grid), hashlib.sha256(grid.tobytes()).hexdigest()


def probe_npz(item: dict[str, Any], work: Path) -> dict[str, Any]:
    """In a child process: for each `X_<part>` of an npz its rows, with the labels `y_<part>`."""
    try:
        names = zipfile.ZipFile(item["path"]).namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise RecordError("bad_npz", f"not a readable npz file: {error}") from None
    labels_of: dict[str, Any] = {}
    for name in sorted(names):
        member = name.removesuffix(".npy")
        if not member.startswith("X_"):
            continue
        rows = _Rows(item["path"], member)
        labels = _Rows(item["path"], f"y_{member[2:]}")
        count = rows.shape[0] if rows.shape else 0
        if len(rows.shape) != 4 or labels.shape[:1] != (count,):
            raise RecordError(
                "bad_npz", f"{member} has shape {rows.shape}, its labels {labels.shape}"
            )
        labels_of[member] = np.array([int(labels.read(i).reshape(-1)[0]) for i in range(count)])
    if not labels_of:
        raise RecordError("bad_npz", "no array X_<part>, expected X_train, y_train and so on")
    return labels_of


def grid_surface(grid: np.ndarray) -> Mesh:
    """The faces between occupied cells and free ones, as triangles that look outward."""
    occupied = np.pad(grid > 0, 1)
    if not occupied.any():
        raise RecordError("empty_grid", f"no cell of {grid.size} is occupied")
    if occupied.ndim != 3:
        raise RecordError("bad_shape", f"the grid has shape {grid.shape}, expected 3 axes")
    quads = []
    for axis in range(3):
        step = np.diff(occupied.astype(np.int8), axis=axis)
        beside, above = np.eye(3, dtype=np.int64)[[(axis + 1) % 3, (axis + 2) % 3]]
        for side in (1, -1):
            at = np.argwhere(step == side)
            at[:, (axis + 1) % 3] -= 1
            at[:, (axis + 2) % 3] -= 1
            square = np.stack([0 * beside, beside, beside + above, above])
            # A step up means that the cell behind it is outside: the face looks down the axis.
            quads.append(at[:, None, :] + (square[::-1] if side == 1 else square))
    corners = np.concatenate(quads).reshape(-1, 3)
    size = tuple(cells + 1 for cells in grid.shape)
    unique, index = np.unique(np.ravel_multi_index(tuple(corners.T), size), return_inverse=True)
    vertices = np.stack(np.unravel_index(unique, size), axis=1).astype(np.float64)
    quad = index.reshape(-1, 4)
    return Mesh(vertices, np.concatenate([quad[:, [0, 1, 2]], quad[:, [0, 2, 3]]]))
