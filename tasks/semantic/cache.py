"""Pictures out of the table PICTURES: encoded bytes in memory, pixels on demand.

Enters: parts (or files) of the table. Leaves: uint8 RGB arrays (N, H, W, 3) in the order asked for.
With a `side`, pictures of another size are cut to that square by Pillow's bicubic filter.
Small sets (CIFAR-10 has 184 MB, STL-10 360 MB of pixels) are better held: decoded only once.
Indexed like an array (`tasks.learning.samples.Rows`) it does so by itself.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from schemas.errors import ConfigError, LakeError
from tasks.semantic.pictures import cut_square

# Sets with more bytes of pixels are decoded batch by batch.
HOLD_BYTES = 4 << 30


class PictureCache:
    """Encoded pictures in the order of `sample_ids`; all bytes lie in one buffer."""

    def __init__(self, frame: pl.DataFrame, side: int | None = None):
        self.side = side
        self.sample_ids = frame["sample_id"]
        self.sizes = frame.select("width", "height").to_numpy()
        encoded = frame["data"].rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
        width = np.int64 if "large" in str(encoded.type) else np.int32
        _, offsets, data = encoded.buffers()
        self._edges = np.frombuffer(offsets, width)[encoded.offset :][: len(encoded) + 1]
        self._bytes = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        self._held: NDArray[np.uint8] | None = None

    @classmethod
    def read(
        cls,
        files: Iterable[Path],
        sample_ids: Sequence[str] | pl.Series,
        side: int | None = None,
    ) -> "PictureCache":
        """Those pictures of the files, in that order."""
        ids = pl.DataFrame({"sample_id": sample_ids}, schema={"sample_id": pl.String})
        rows = pl.scan_parquet(list(files), glob=False).select(
            "sample_id", "width", "height", "data"
        )
        pictures = rows.join(ids.lazy(), on="sample_id", how="semi").collect()
        frame = ids.join(pictures, on="sample_id", how="left", maintain_order="left")
        if frame["data"].null_count():
            first = frame.filter(pl.col("data").is_null())["sample_id"][0]
            raise LakeError(
                f"{frame['data'].null_count()} pictures are not in the table, such as {first}; "
                "build the benchmark again"
            )
        return cls(frame, side)

    def __len__(self) -> int:
        return self.sample_ids.len()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        width, height = self.size() if len(self) else (0, 0)
        return len(self), height, width, 3

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8)

    def __getitem__(self, rows: Any) -> NDArray[np.uint8]:
        if self._held is None and np.prod(self.shape) <= HOLD_BYTES:
            self.hold()
        if self._held is not None:
            return self._held[rows]
        numbers = np.arange(len(self))[rows]
        return self.decode(numbers) if numbers.ndim else self.decode([int(numbers)])[0]

    def size(self) -> tuple[int, int]:
        """(width, height), which all pictures must share unless there is a side."""
        if self.side is not None:
            return self.side, self.side
        distinct = np.unique(self.sizes, axis=0)
        if len(distinct) != 1:
            sizes = ", ".join(f"{w} x {h}" for w, h in distinct[:3])
            raise ConfigError(
                f"pictures have {len(distinct)} sizes ({sizes}, ...), expected one; leave the data "
                "set out of pictures.keep so that they are cut to one"
            )
        width, height = distinct[0]
        return int(width), int(height)

    @property
    def encoded_bytes(self) -> int:
        return int(self._edges[-1] - self._edges[0])

    def hold(self, threads: int = 1) -> "PictureCache":
        """Decode everything now and keep the pixels in memory."""
        self._held = self.decode(threads=threads)
        return self

    def decode(
        self, rows: Iterable[int] | NDArray[np.integer] | None = None, threads: int = 1
    ) -> NDArray[np.uint8]:
        """uint8 RGB (N, H, W, 3) of some rows, or of all."""
        import cv2

        numbers = np.arange(len(self)) if rows is None else np.asarray(list(rows), np.int64)
        if self._held is not None:
            return self._held[numbers]
        width, height = self.size()
        out = np.empty((len(numbers), height, width, 3), np.uint8)

        def fill(places: range) -> None:
            for place in places:
                row = numbers[place]
                encoded = self._bytes[self._edges[row] : self._edges[row + 1]]
                pixels = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)
                if pixels is not None and self.side is not None:
                    pixels = _square(pixels, self.side)
                if pixels is None or pixels.shape != out.shape[1:]:
                    raise LakeError(
                        f"picture {self.sample_ids[int(row)]} is damaged; run `novelty verify`"
                    )
                out[place] = pixels

        positions = range(len(numbers))
        step = max(1, -(-len(numbers) // threads))
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(fill, [positions[i : i + step] for i in positions[::step]]):
                pass  # an error comes out here
        return out


def _square(pixels: NDArray[Any], side: int) -> NDArray[Any]:
    """The middle square of a picture at that side."""
    from PIL import Image

    if pixels.shape[:2] == (side, side):
        return pixels
    return np.asarray(cut_square(Image.fromarray(pixels), side, "BICUBIC"))
