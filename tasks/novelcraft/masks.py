"""Boolean masks: run lengths, agreement, bounding boxes, PNG.

Enters and leaves: (height, width) bool arrays, row 0 on top. Run lengths are COCO's uncompressed
form: lengths of alternating runs of false and true, false first, down the columns (or along rows).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from schemas.errors import RecordError
from storage.atomic import write_bytes
from storage.tables import TableVersion

GREY_THRESHOLD = 128
MAX_PIXELS = 1 << 24

Order = Literal["column", "row"]
_NUMPY_ORDER: dict[str, Literal["F", "C"]] = {"column": "F", "row": "C"}


def encode_runs(mask: np.ndarray, order: Order = "column") -> np.ndarray:
    """Run lengths of a mask, uint32; their sum is its size."""
    flat = np.asarray(mask, bool).ravel(_NUMPY_ORDER[order])
    starts = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    first = [0, 0] if flat.size and flat[0] else [0]
    return np.diff(np.concatenate([first, starts, [flat.size]])).astype(np.uint32)


def decode_runs(runs: np.ndarray, shape: tuple[int, int], order: Order = "column") -> np.ndarray:
    """The mask of `shape` (height, width) that has these run lengths."""
    runs = np.asarray(runs)
    size = shape[0] * shape[1]
    if runs.ndim != 1 or size > MAX_PIXELS or (len(runs) and runs.min() < 0) or runs.sum() != size:
        raise RecordError(
            "run_lengths",
            f"{runs.size} run lengths do not make a mask of {shape[0]}x{shape[1]} pixels: expected "
            f"a list of counts >= 0 with sum {size}, at most {MAX_PIXELS}",
        )
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return flat.reshape(shape, order=_NUMPY_ORDER[order])


def mask_iou(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Intersection over union over the last two axes; two empty masks agree, 1 (rule 7)."""
    both = np.count_nonzero(first & second, axis=(-2, -1))
    either = np.count_nonzero(first | second, axis=(-2, -1))
    return np.where(either == 0, 1.0, both / np.maximum(either, 1))


def bounding_box(mask: np.ndarray) -> tuple[int, int, int, int] | None:
    """x0, y0, x1, y1 with x1 and y1 one past the last pixel; None for an empty mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return None
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def encode_png(mask: np.ndarray) -> bytes:
    """An 8-bit grey PNG, 255 where the mask is set."""
    import cv2

    done, data = cv2.imencode(".png", np.where(mask, 255, 0).astype(np.uint8))
    if not done:
        raise RecordError("png_encode", f"a mask of shape {mask.shape} could not be written as PNG")
    return data.tobytes()


def decode_png(data: bytes) -> np.ndarray:
    """The mask of a PNG in any colour mode: set where its grey is at least 128 (rule 6)."""
    import cv2

    header = data[:24]
    if len(header) < 24 or not header.startswith(b"\x89PNG\r\n\x1a\n") or header[12:16] != b"IHDR":
        raise RecordError("png_header", f"the mask begins with {header[:8]!r}, expected a PNG file")
    width, height = (int.from_bytes(header[at : at + 4]) for at in (16, 20))
    if not 0 < width * height <= MAX_PIXELS:
        raise RecordError(
            "png_size", f"the mask is {width}x{height} pixels, expected 1 to {MAX_PIXELS} pixels"
        )
    grey = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
    if grey is None:
        raise RecordError("png_decode", f"the mask ({len(data)} bytes) is a damaged PNG")
    return grey >= GREY_THRESHOLD


def export_masks(
    version: TableVersion, out: str | Path, classes: Sequence[str] | None = None
) -> int:
    """The masks of a table version as `class/episode/frame.png`; returns how many."""
    rows = version.read(["frame_id", "class", "height", "width", "runs"])
    if classes:
        rows = rows.filter(pl.col("class").is_in(list(classes)))
    for frame_id, _, height, width, runs in rows.iter_rows():
        mask = decode_runs(np.array(runs), (height, width))
        write_bytes(Path(out) / f"{frame_id}.png", encode_png(mask))
    return rows.height
