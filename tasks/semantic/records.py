"""Files of many images to labels and pixels: CIFAR-10 (binary, python), STL-10.

Rule 4 of docs/semantic.md.
Enters: bytes of a file. Leaves: labels and uint8 pixels (N, H, W, 3).

The python batches are pickles. They are read by an unpickler that finds no class but its own
stand-ins for numpy's array and type, so nothing in the file can be called; and since a pickle may
still ask for much memory, `read_python_batch` runs in a child process (`tasks.ingest.native.pool`).
"""

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.errors import RecordError

CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
STL_CLASSES = (
    "airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck",
)  # fmt: skip
CIFAR_SIDE, STL_SIDE = 32, 96
CIFAR_PIXELS, STL_PIXELS = 3 * CIFAR_SIDE**2, 3 * STL_SIDE**2
CIFAR_RECORD = 1 + CIFAR_PIXELS


class Records(NamedTuple):
    """`rest` is the number of bytes after the last whole record."""

    labels: NDArray[np.int64]
    pixels: NDArray[np.uint8]
    rest: int = 0


def read_cifar_binary(data: bytes) -> Records:
    """1 label byte and 3,072 pixel bytes a record, channel after channel, row after row."""
    count, rest = divmod(len(data), CIFAR_RECORD)
    rows = np.frombuffer(data, np.uint8, count * CIFAR_RECORD).reshape(count, CIFAR_RECORD)
    return Records(rows[:, 0].astype(np.int64), _channels_last(rows[:, 1:], CIFAR_SIDE), rest)


def read_stl(pixels: bytes, labels: bytes) -> Records:
    """3 x 96 x 96 bytes an image, each channel column after column; labels 1 to 10 become 0 to 9.

    The two files must hold the same number of images.
    """
    count, rest = divmod(len(pixels), STL_PIXELS)
    if rest or count != len(labels):
        message = f"{len(pixels)} bytes of pixels for {len(labels)} labels, expected {STL_PIXELS}"
        raise RecordError("label_length", f"{message} bytes for each; fetch both files again")
    columns = np.frombuffer(pixels, np.uint8).reshape(count, 3, STL_SIDE, STL_SIDE)
    classes = np.frombuffer(labels, np.uint8).astype(np.int64) - 1
    return Records(classes, columns.transpose(0, 3, 2, 1))


def _channels_last(rows: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    return rows.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)


# ---------------------------------------------------------------- pickles


class _Type:
    """Stands for numpy.dtype; only bytes are known."""

    def __init__(self, *arguments: Any):
        name = arguments[0] if arguments else None
        if name not in ("u1", b"u1"):
            raise RecordError("unsafe_pickle", f"holds an array of type {name!r}, expected u1")

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for numpy.ndarray; takes shape and bytes from the state that numpy writes."""

    def __init__(self, *arguments: Any):
        self.values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, column_major, data = state
        self.take(data, kind, shape, "F" if column_major else "C")

    def take(self, data: Any, kind: Any, shape: Any, order: Any) -> "_Array":
        if not isinstance(kind, _Type) or not isinstance(data, bytes | bytearray):
            raise RecordError("unsafe_pickle", "holds an array that is not one of plain bytes")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order=order)
        return self


def _from_buffer(data: Any, kind: Any, shape: Any, order: Any) -> _Array:
    """Stands for numpy's function of that name: how protocol 5 writes an array."""
    return _Array().take(data, kind, shape, order)


def _latin_bytes(text: Any, encoding: Any = "latin1") -> bytes:
    """Stands for _codecs.encode: how Python 3 writes bytes for old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise RecordError("unsafe_pickle", f"encodes with {encoding!r}, expected latin1")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _latin_bytes,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            message = f"asks for {module}.{name}; only arrays, lists, numbers and text are read"
            raise RecordError("unsafe_pickle", message)
        return _STAND_INS[module, name]


def read_cifar_python(data: bytes) -> Records:
    """A dict with `data` (N, 3072) and `labels`, keys as text or bytes."""
    try:
        batch = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    except RecordError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        message = f"not a whole pickle: {type(error).__name__}: {error}"
        raise RecordError("damaged_pickle", message) from None
    if not isinstance(batch, dict):
        raise RecordError("not_a_batch", f"holds a {type(batch).__name__}, expected a dict")
    pixels = batch.get(b"data", batch.get("data"))
    labels = batch.get(b"labels", batch.get("labels"))
    if not isinstance(pixels, _Array) or pixels.values is None:
        raise RecordError("not_a_batch", "has no array `data` of bytes")
    values = pixels.values
    if values.ndim != 2 or values.shape[1] != CIFAR_PIXELS:
        raise RecordError("not_a_batch", f"data is {values.shape}, expected (N, {CIFAR_PIXELS})")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise RecordError("not_a_batch", "has no list `labels` of whole numbers")
    if len(labels) != len(values):
        message = f"{len(values)} images and {len(labels)} labels, expected as many"
        raise RecordError("label_length", message)
    # A number beyond 64 bits is no label of ours; 255 is none either and is refused by name.
    safe = [label if 0 <= label < 255 else 255 for label in labels]
    return Records(np.array(safe, np.int64), _channels_last(values, CIFAR_SIDE))


def read_python_batch(item: dict[str, Any], out: Path) -> dict[str, Any]:
    """`read_cifar_python` for a child process."""
    records = read_cifar_python(Path(item["path"]).read_bytes())
    return {"labels": records.labels, "pixels": np.ascontiguousarray(records.pixels)}
