"""OFF and OBJ text to vertices and triangles in float64, whatever their authors did to the format.

Enters: the bytes of one file. Leaves: a `Mesh` whose indices are not yet checked, or a RecordError.
Numbers are parsed in bulk; lines are looked at one by one only where faces differ in length.
OFF: header glued to the counts (`OFF110 78 0`, 315 of 1,688 files), comments, colours, polygons.
OBJ: `v/vt/vn` corners, indices from the end, continued lines, polygons; groups and materials do
not matter. Polygons become fans around their first corner.
"""

import re
import warnings
from typing import NamedTuple

import numpy as np

from schemas.errors import RecordError

OFF_HEADER = re.compile(r"(ST)?C?N?OFF(?![A-Za-z])[ \t]*\n?")
OTHER_OFF = re.compile(r"(ST)?C?N?4?n?OFF")
VERTEX_COLUMNS = range(3, 13)


class Mesh(NamedTuple):
    """`repairs` says what was done to read it, in words for the column `repaired`."""

    vertices: np.ndarray
    faces: np.ndarray
    repairs: tuple[str, ...] = ()


def read_off(data: bytes) -> Mesh:
    """An OFF file; what stands after a # does not count."""
    text = _text(data)
    if "#" in text:
        text = re.sub(r"#[^\n]*", "", text)
    text = text.lstrip()
    header = OFF_HEADER.match(text)
    if header is None:
        if OTHER_OFF.match(text):
            raise RecordError("unsupported_off", f"header {text[:12]!r}, expected 3 dimensions")
        raise RecordError("bad_header", f"starts with {text[:12]!r}, expected OFF")
    counts_line, _, body = text[header.end() :].lstrip().partition("\n")
    vertices, faces = _off_counts(counts_line)
    glued = ("header glued to the counts",) if text[header.end() - 1] not in " \t\n" else ()
    if 2 * (vertices + faces) > len(body) + 2:
        raise RecordError(
            "truncated", f"{len(body)} characters cannot hold {vertices} vertices, {faces} faces"
        )
    if not vertices or not faces:
        raise RecordError("no_faces", f"{vertices} vertices and {faces} faces announced")
    columns = len(body.lstrip().partition("\n")[0].split())
    if columns not in VERTEX_COLUMNS:
        raise RecordError("bad_vertex", f"{columns} numbers in the first vertex, expected 3 to 12")
    numbers = _numbers(body)
    split = vertices * columns
    if numbers.size == split + 4 * faces:
        rows = numbers[split:].reshape(faces, 4)
        if (rows[:, 0] == 3).all():
            points = numbers[:split].reshape(vertices, columns)[:, :3]
            return Mesh(points, _integers(rows[:, 1:]), glued)
    return _off_by_lines(body, vertices, faces, columns, glued)


def _off_counts(line: str) -> tuple[int, int]:
    words = line.split()
    if not 2 <= len(words) <= 3 or not all(word.isdecimal() for word in words):
        raise RecordError(
            "bad_header", f"counts are {line[:40].strip()!r}, expected vertices, faces, edges"
        )
    return int(words[0]), int(words[1])


def _off_by_lines(
    body: str, vertices: int, faces: int, columns: int, repairs: tuple[str, ...]
) -> Mesh:
    lines = [line for line in body.split("\n") if line.strip()]
    if len(lines) < vertices + faces:
        raise RecordError(
            "truncated",
            f"{len(lines)} lines, but {vertices} vertices and {faces} faces are announced",
        )
    if len(lines) > vertices + faces:
        raise RecordError(
            "surplus_lines",
            f"{len(lines)} lines, but only {vertices} vertices and {faces} faces are announced",
        )
    points = _numbers(" ".join(lines[:vertices]))
    if points.size != vertices * columns:
        raise RecordError("bad_vertex", f"the vertices do not all have {columns} numbers")
    words = [line.split() for line in lines[vertices:]]
    try:
        counts = np.array([int(face[0]) for face in words])
    except ValueError:
        raise RecordError("bad_face", "a face does not begin with its number of corners") from None
    if any(not 0 <= count < len(face) for count, face in zip(counts.tolist(), words, strict=True)):
        raise RecordError("bad_face", "a face has fewer corners than it says")
    corners = " ".join(
        word
        for count, face in zip(counts.tolist(), words, strict=True)
        for word in face[1:][:count]
    )
    triangles, cut = fan(_integers(_numbers(corners)), counts)
    return Mesh(points.reshape(vertices, columns)[:, :3], triangles, repairs + cut)


def read_obj(data: bytes) -> Mesh:
    """An OBJ file: its `v` and `f` lines."""
    text = _text(data).replace("\\\n", " ")
    lines = text.split("\n")
    marks = [line.lstrip()[:2] for line in lines]
    at_vertex = [i for i, mark in enumerate(marks) if mark in ("v ", "v\t")]
    at_face = [i for i, mark in enumerate(marks) if mark in ("f ", "f\t")]
    if not at_vertex:
        raise RecordError("no_vertices", "no line begins with v, expected an OBJ mesh")
    if not at_face:
        raise RecordError("no_faces", f"{len(at_vertex)} vertices and no line that begins with f")
    points = [_rest(lines[i]) for i in at_vertex]
    columns = len(points[0].split())
    numbers = _numbers(" ".join(points))
    if columns not in VERTEX_COLUMNS or numbers.size != columns * len(points):
        raise RecordError("bad_vertex", "the vertices do not all have the same 3 or more numbers")
    faces = re.sub(r"/\S*", "", "\n".join(_rest(lines[i]) for i in at_face)).split("\n")
    counts = np.array([len(face.split()) for face in faces])
    corners = _integers(_numbers(" ".join(faces)))
    if corners.size != counts.sum():
        raise RecordError("bad_number", "a face has a corner that is not a number")
    if (corners == 0).any():
        raise RecordError("index_out_of_range", "a face names vertex 0; OBJ counts from 1")
    back = corners < 0
    if back.any():
        before = np.repeat(np.searchsorted(at_vertex, at_face), counts)
        corners = np.where(back, before + corners, corners - 1)
    else:
        corners = corners - 1
    triangles, cut = fan(corners, counts)
    return Mesh(numbers.reshape(len(points), columns)[:, :3], triangles, cut)


def _rest(line: str) -> str:
    """A line without its first word and without a comment."""
    return line.lstrip()[1:].partition("#")[0]


def fan(corners: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Polygons (corners one after another, and how many each has) to triangles, and what was done.

    Polygons of fewer than three corners have no surface and are dropped.
    """
    starts = np.cumsum(counts) - counts
    pieces = np.maximum(counts - 2, 0)
    first = np.repeat(starts, pieces)
    step = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    triangles = np.stack([corners[first], corners[first + step + 1], corners[first + step + 2]], 1)
    polygons, short = int((counts > 3).sum()), int((counts < 3).sum())
    done = []
    if polygons:
        done.append(f"{polygons} polygons cut into triangles")
    if short:
        done.append(f"{short} faces of fewer than 3 corners dropped")
    return triangles, tuple(done)


def _text(data: bytes) -> str:
    if not data.strip():
        raise RecordError("empty_file", "the file is empty")
    if b"\0" in data[:4096]:
        raise RecordError("not_text", "the file holds binary bytes, expected text")
    return data.decode("latin-1").replace("\r\n", "\n").replace("\r", "\n")


def _numbers(text: str) -> np.ndarray:
    """All numbers of a text in float64; anything else in it is an error."""
    if not text.strip():
        return np.empty(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return np.fromstring(text, sep=" ")
        except (DeprecationWarning, ValueError):
            raise RecordError("bad_number", f"{_odd_word(text)!r} is not a number") from None


def _odd_word(text: str) -> str:
    for word in text.split():
        try:
            float(word)
        except ValueError:
            return word[:40]
    return text[:40]


def _integers(numbers: np.ndarray) -> np.ndarray:
    """Indices that were parsed as float64, exact up to 2**53."""
    if not (np.isfinite(numbers).all() and (np.abs(numbers) < 2**53).all()):
        raise RecordError("bad_face", "a face has a corner that is not a finite number")
    whole = numbers.astype(np.int64)
    if (whole != numbers).any():
        raise RecordError("bad_face", "a face has a corner that is not a whole number")
    return whole
