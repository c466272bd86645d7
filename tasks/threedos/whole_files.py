"""Whether a PLY, STL or GLB file has all that it announces, before a library reads it.

Libraries take what is there: a file that a copy cut short, or whose end was never written and is
zeros, gives a smaller shape and no error. Enters: the bytes. Leaves: nothing, or a RecordError.
"""

import json
import re
import struct
from typing import Any, NamedTuple, NoReturn

import numpy as np

from schemas.errors import RecordError

PLY_TYPES = {
    b"char": "i1", b"int8": "i1", b"uchar": "u1", b"uint8": "u1", b"short": "i2", b"int16": "i2",
    b"ushort": "u2", b"uint16": "u2", b"int": "i4", b"int32": "i4", b"uint": "u4", b"uint32": "u4",
    b"float": "f4", b"float32": "f4", b"double": "f8", b"float64": "f8",
}  # fmt: skip
STL_HEAD, STL_TRIANGLE = 84, 50
GLB_JSON, GLB_BIN = 0x4E4F534A, 0x004E4942
COMPONENTS = {5120: 1, 5121: 1, 5122: 2, 5123: 2, 5125: 4, 5126: 4}
COUNTS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT2": 4, "MAT3": 9, "MAT4": 16}
ZERO_BYTES = 512
"""So many zeros at the end are no shape: a disk gives them for what was never written."""


class Announced(NamedTuple):
    """What a file says that it holds; None where it does not say."""

    vertices: int | None = None
    triangles: int | None = None


class _List(NamedTuple):
    length: np.dtype
    entry: np.dtype


class _Element(NamedTuple):
    name: bytes
    count: int  # type: ignore[assignment]
    properties: list[np.dtype | _List]


def check_whole(data: bytes, reader: str) -> Announced:
    """What the file announces, all of which is there."""
    return {"ply": check_ply, "stl": check_stl, "glb": check_glb}[reader](data)


def _truncated(message: str) -> NoReturn:
    raise RecordError("truncated", message)


def _refuse_zeros(body: bytes) -> None:
    zeros = len(body) - len(body.rstrip(b"\0"))
    if zeros >= min(ZERO_BYTES, max(64, len(body) // 4)):
        _truncated(f"the last {zeros} of {len(body)} bytes are zeros, as of a file not written out")


# ---------------------------------------------------------------- PLY


def check_ply(data: bytes) -> Announced:
    """Every vertex and face of the header is in the body."""
    elements, layout, body = _ply_header(data)
    if layout == b"ascii":
        _check_ply_text(elements, body)
    else:
        _check_ply_bytes(elements, body, "<" if layout == b"binary_little_endian" else ">")
    counts = {element.name: element.count for element in elements}
    return Announced(vertices=counts.get(b"vertex", 0))


def _ply_header(data: bytes) -> tuple[list[_Element], bytes, bytes]:
    end = re.search(rb"end_header[ \t]*(\r\n|\n|\r)", data)
    if not data.startswith(b"ply") or end is None:
        raise RecordError("bad_header", "no PLY header that ends with end_header")
    elements: list[_Element] = []
    layout = b""
    for line in data[: end.start()].splitlines():
        words = line.split()
        try:
            if words[:1] == [b"format"]:
                layout = words[1]
            elif words[:1] == [b"element"]:
                elements.append(_Element(words[1], int(words[2]), []))
            elif words[:2] == [b"property", b"list"]:
                pair = (np.dtype(PLY_TYPES[words[2]]), np.dtype(PLY_TYPES[words[3]]))
                elements[-1].properties.append(_List(*pair))
            elif words[:1] == [b"property"]:
                elements[-1].properties.append(np.dtype(PLY_TYPES[words[1]]))
        except (IndexError, ValueError, KeyError):
            raise RecordError("bad_header", f"the PLY header has {line[:60]!r}") from None
    if layout not in (b"ascii", b"binary_little_endian", b"binary_big_endian"):
        raise RecordError("bad_header", f"the PLY format is {layout[:40]!r}")
    if any(element.count < 0 for element in elements):
        raise RecordError("bad_header", "the PLY header announces a negative number")
    return elements, layout, data[end.end() :]


def _check_ply_text(elements: list[_Element], body: bytes) -> None:
    if b"\0" in body:
        _truncated("the text of the PLY file holds zero bytes, as of a file not written out")
    lines = [line.split() for line in body.splitlines() if line.strip()]
    for element in elements:
        rows, lines = lines[: element.count], lines[element.count :]
        if len(rows) < element.count:
            _missing(element, len(rows))
        for number, words in enumerate(rows):
            if not _fits(words, element.properties):
                _missing(element, number)


def _fits(words: list[bytes], properties: list[np.dtype | _List]) -> bool:
    """Whether a line has a word for each property, and for each entry of a list."""
    place = 0
    for kind in properties:
        if isinstance(kind, _List):
            if place >= len(words) or not words[place].isdigit():
                return False
            place += int(words[place])
        place += 1
    return place <= len(words)


def _check_ply_bytes(elements: list[_Element], body: bytes, order: Any) -> None:
    place = 0
    for element in elements:
        last, place = _last_row(element, body, place, order)
        has_lists = any(isinstance(kind, _List) for kind in element.properties)
        if has_lists and last < place and not any(body[last:place]):
            _truncated(f"the last {_shown(element)} is zeros, as of a file not written out")
    if body[place:].strip(b"\0\r\n\t "):
        return  # more than announced: the author's business
    if len(body) - place >= 64:
        _truncated(f"{len(body) - place} bytes of zeros follow the last element")
    _refuse_zeros(body)


def _last_row(element: _Element, body: bytes, place: int, order: Any) -> tuple[int, int]:
    """Where it begins and ends; whole rows of equal length are looked at together."""
    stride, lists = _first_row(element, body, place, order)
    if element.count and place + stride * element.count <= len(body):
        rows = np.frombuffer(body, np.uint8, stride * element.count, place)
        rows = rows.reshape(element.count, stride)
        if all((rows[:, at : at + size] == rows[0, at : at + size]).all() for at, size in lists):
            end = place + stride * element.count
            return end - stride, end
    last = place
    for number in range(element.count):
        stride, _ = _first_row(element, body, place, order)
        last, place = place, place + stride
        if place > len(body) or not stride:
            _missing(element, number)
    return last, place


def _first_row(
    element: _Element, body: bytes, place: int, order: Any
) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the row at that place, and where in it the lengths of its lists are."""
    stride, lists = 0, []
    for kind in element.properties:
        if isinstance(kind, _List):
            at, length = place + stride, kind.length.newbyteorder(order)
            lists.append((stride, length.itemsize))
            lengths = np.frombuffer(body[at : at + length.itemsize].ljust(8, b"\0"), length, 1)
            stride += length.itemsize + max(0, int(lengths[0])) * kind.entry.itemsize
        else:
            stride += kind.itemsize
    return stride, lists


def _missing(element: _Element, count: int) -> NoReturn:
    _truncated(f"{element.count} of element {_shown(element)} are announced, {count} are there")


def _shown(element: _Element) -> str:
    return element.name.decode("latin-1")[:40]


# ---------------------------------------------------------------- STL


def check_stl(data: bytes) -> Announced:
    """Every triangle of the head is in the body; a text ends with endsolid."""
    if data.startswith(b"solid") and b"facet" in data[:1024] and b"\0" not in data[:1024]:
        begun, ended = len(re.findall(rb"\bfacet\s", data)), len(re.findall(rb"\bendfacet\b", data))
        if begun != ended or b"endsolid" not in data[-1024:]:
            _truncated(f"{begun} facets begin, {ended} end; expected endsolid at the end")
        return Announced(triangles=begun)
    if len(data) < STL_HEAD:
        _truncated(f"{len(data)} bytes, an STL file begins with {STL_HEAD}")
    (count,) = struct.unpack_from("<I", data, STL_HEAD - 4)
    count_here = (len(data) - STL_HEAD) // STL_TRIANGLE
    if count_here < count:
        _truncated(f"{count} triangles are announced, {count_here} are there")
    body = data[STL_HEAD : STL_HEAD + count * STL_TRIANGLE]
    if count and not any(body[-STL_TRIANGLE:]):
        _truncated("the last triangle is zeros, as of a file not written out")
    return Announced(triangles=count)


# ---------------------------------------------------------------- GLB


def check_glb(data: bytes) -> Announced:
    """The chunks have the announced bytes, and the buffer all that its accessors name."""
    if len(data) < 20 or data[:4] != b"glTF":
        raise RecordError("bad_header", "no GLB header")
    (length,) = struct.unpack_from("<I", data, 8)
    if length > len(data):
        _truncated(f"{length} bytes are announced, {len(data)} are there")
    chunks: dict[int, bytes] = {}
    place = 12
    while place + 8 <= length:
        size, kind = struct.unpack_from("<II", data, place)
        if place + 8 + size > length:
            _truncated(f"a chunk announces {size} bytes, {length - place - 8} are there")
        chunks.setdefault(kind, data[place + 8 : place + 8 + size])
        place += 8 + size
    try:
        document = json.loads(chunks[GLB_JSON])
        body = chunks.get(GLB_BIN, b"")
        _check_accessors(document, body)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise RecordError(
            "bad_header", f"the GLB file does not describe its buffer: {error}"
        ) from None
    _refuse_zeros(body)
    return Announced()


def _check_accessors(document: dict, body: bytes) -> None:
    buffers, views = document.get("buffers", []), document.get("bufferViews", [])
    for number, buffer in enumerate(buffers):
        if "uri" in buffer and not buffer["uri"].startswith("data:"):
            raise RecordError("foreign_bytes", "a buffer is in another file; store the data itself")
        if number == 0 and "uri" not in buffer and buffer["byteLength"] > len(body):
            _truncated(f"the buffer announces {buffer['byteLength']} bytes, {len(body)} are there")
    for view in views:
        whole = buffers[view["buffer"]]["byteLength"]
        if view.get("byteOffset", 0) + view["byteLength"] > whole:
            _truncated("a view reaches beyond its buffer")
    for accessor in document.get("accessors", []):
        if "bufferView" not in accessor:
            continue
        view = views[accessor["bufferView"]]
        size = COMPONENTS[accessor["componentType"]] * COUNTS[accessor["type"]]
        stride = view.get("byteStride") or size
        ends = accessor.get("byteOffset", 0) + stride * (accessor["count"] - 1) + size
        if accessor["count"] and ends > view["byteLength"]:
            _truncated(f"{accessor['count']} values are announced, their view is too short")
        if accessor["type"] == "SCALAR" and view["buffer"] == 0 and accessor["count"] > 3 and body:
            end = view.get("byteOffset", 0) + ends
            if not any(body[max(0, end - 3 * size) : end]):
                _truncated("the last triangle is zeros, as of a file not written out")
