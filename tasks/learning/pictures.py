"""Pictures out of Parquet files: read row group by row group, decoded within the memory budget.

Enters: files of a table with a column of encoded pictures. Leaves: uint8 RGB arrays (N, H, W, 3) in
the order of the ids, as `tasks.learning.samples.Rows`. Nothing is read before pixels are asked for.
Then the files are read once: pictures that fit into the budget are decoded and kept, the others are
put into a scratch file as they are and decoded each time. So a set of any size takes the same
memory, and every order of the rows costs the same.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import ConfigError, LakeError
from storage.parquet import opened_parquet, read_parquet
from tasks.learning.memory import counted, memory_left, new_scratch
from tasks.learning.samples import Rows, SomeRows

SETS_KEPT = 3
"""Sets that stay open for the next use in this process."""
BATCH = 64
"""Rows of a row group that are unpacked at a time."""
_lock = threading.RLock()
_open: OrderedDict[str, _Opened] = OrderedDict()


def close_pictures() -> None:
    """Keep no set open."""
    with _lock:
        _open.clear()


class Pictures:
    """Pictures of these ids; `columns` are those of the id and of the encoded picture.

    All must have one size, or `cut` makes it: pixels in, pixels out.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        files: Sequence[Path],
        ids: Sequence[str] | pl.Series,
        columns: tuple[str, str] = ("sample_id", "data"),
        cut: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.files, self.columns, self.cut = tuple(files), columns, cut
        self.ids = pl.Series("id", ids, pl.String)
        self._opened: _Opened | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        height, width = self.opened.size
        return len(self), height, width, 3

    def __getitem__(self, rows: Any) -> np.ndarray:
        places = np.arange(len(self))[rows]
        return self.opened.decoded(np.atleast_1d(places)).reshape(*places.shape, *self.shape[1:])

    def take(self, rows: np.ndarray) -> Rows:
        """Those of these rows; of a set that is not open the others are never read."""
        if self._opened is not None:
            return SomeRows(self, rows)
        return Pictures(self.files, self.ids.gather(rows), self.columns, self.cut)

    @property
    def opened(self) -> _Opened:
        if self._opened is None:
            digest = hashlib.sha256("\0".join([*map(str, self.files), *self.columns]).encode())
            digest.update(repr(self.cut).encode())
            digest.update(self.ids.hash().to_numpy().data)
            key = digest.hexdigest()
            with _lock:
                if key not in _open:
                    while len(_open) >= SETS_KEPT:
                        _open.popitem(last=False)
                    _open[key] = _Opened(self)
                _open.move_to_end(key)
                self._opened = _open[key]
        return self._opened


class _Opened:
    """What was read of a set: pixels of its first rows, encoded bytes of the others."""

    def __init__(self, pictures: Pictures) -> None:
        self.ids, self.cut = pictures.ids, pictures.cut
        self.size: tuple[int, int] = (1, 1)
        self.held: np.ndarray | None = None
        self.starts = np.full(len(self.ids), -1, np.int64)
        self.lengths = np.zeros(len(self.ids), np.int64)
        self.scratch = new_scratch()
        for row, encoded in _encoded(pictures):
            if self.held is None:
                height, width, _ = self._pixels(row, encoded).shape
                self.size = height, width
                self.held = _room(len(self.ids), height, width)
            if row < len(self.held):
                self.held[row] = self._pixels(row, encoded)
                self.starts[row] = 0
            else:
                self.starts[row] = self.scratch.append(encoded)
                self.lengths[row] = len(encoded)
        missing = np.flatnonzero(self.starts < 0)
        if missing.size:
            raise LakeError(
                f"{missing.size} pictures are not in the table, such as "
                f"{self.ids[int(missing[0])]}; build the benchmark again"
            )

    def decoded(self, rows: np.ndarray) -> np.ndarray:
        held = np.empty((0, *self.size, 3), np.uint8) if self.held is None else self.held
        if len(held) == len(self.ids):
            return held[rows]
        out = np.empty((len(rows), *self.size, 3), np.uint8)
        for place, row in enumerate(rows):
            if row < len(held):
                out[place] = held[row]
                continue
            encoded = self.scratch.read(int(self.starts[row]), int(self.lengths[row]))
            out[place] = self._pixels(row, encoded)
        return out

    def _pixels(self, row: int, encoded: Any) -> np.ndarray:
        import cv2

        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
        if pixels is None:
            raise LakeError(f"picture {self.ids[int(row)]} is damaged; run `novelty verify`")
        if self.cut is not None:
            pixels = self.cut(pixels)
        if self.held is not None and pixels.shape[:2] != self.size:
            sizes = sorted({self.size[::-1], (pixels.shape[1], pixels.shape[0])})
            several = ", ".join(f"{width} x {height}" for width, height in sizes)
            raise ConfigError(
                f"pictures have several sizes ({several}, ...), expected one; leave the data set "
                "out of pictures.keep so that they are cut to one"
            )
        return pixels


def _room(count: int, height: int, width: int) -> np.ndarray:
    """Where as many decoded pictures fit as the budget allows; sets of before make way."""
    each = height * width * 3
    while _open and count * each > memory_left():
        _open.popitem(last=False)
    return counted(np.empty((min(count, memory_left() // each), height, width, 3), np.uint8))


def _encoded(pictures: Pictures) -> Iterator[tuple[int, memoryview]]:
    """The row of each picture and its bytes, in the order of the files."""
    row_of_id = pictures.ids.to_frame().with_row_index("row")
    name, data = pictures.columns
    every = [read_parquet([path], [name])[name] for path in pictures.files]
    file_ids = pl.concat([pl.Series([], dtype=pl.String), *every]).to_frame("id")
    # One join of all files: one for each would cost the square of their number.
    placement = file_ids.with_row_index("place").join(row_of_id, on="id").sort("place", "row")
    places, rows = (placement[column].to_numpy() for column in ("place", "row"))
    first = 0
    for path in pictures.files:
        with opened_parquet(path) as file:
            for group in range(file.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                if np.diff(np.searchsorted(places, (first, end))):
                    for batch in file.iter_batches(BATCH, [group], [data]):
                        low, high = np.searchsorted(places, (first, first + len(batch)))
                        for at in range(low, high):
                            encoded = batch[data][int(places[at]) - first].as_buffer()
                            yield int(rows[at]), memoryview(encoded)
                        first += len(batch)
                first = end
