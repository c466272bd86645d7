"""Bytes that are needed while a process lives: in a file without a name, so nothing is ever left.

Pages of such a file are the system's to take back, unlike anonymous memory. Another process opens
the file by the number that this one has for it, as long as this one lives.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.atomic import explained


class Scratch:
    """A file that grows at its end and is read as one array of bytes."""

    def __init__(self, folder: Path | None = None) -> None:
        place = Path(tempfile.gettempdir()) if folder is None else folder
        with explained(place):
            place.mkdir(parents=True, exist_ok=True)
            self.file: Any = tempfile.TemporaryFile(dir=place, buffering=0)  # noqa: SIM115
        self.place, self.size = place, 0

    def append(self, data: Any) -> int:
        """Where the bytes begin."""
        start, rest = self.size, memoryview(data).cast("B")
        with explained(self.place):
            while rest:
                rest = rest[self.file.write(rest) :]
        self.size += memoryview(data).nbytes
        return start

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self.file.fileno(), length, start)

    def array(self, shape: Sequence[int], dtype: Any) -> np.memmap:
        """The file as an array; a new one is as large as that and full of zeros."""
        if not self.size:
            with explained(self.place):
                self.file.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.memmap(self.file, dtype, "r+", shape=tuple(shape))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": f"/proc/{os.getpid()}/fd/{self.file.fileno()}", "size": self.size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.file, self.size = open(state["path"], "rb", buffering=0), state["size"]  # noqa: SIM115
        self.place = Path(state["path"])
