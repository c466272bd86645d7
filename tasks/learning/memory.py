"""How much memory samples and features may take in this process; what is over lies in a file.

`use_memory` sets the budget, as `use_threads` sets the threads. Arrays of `new_array` and decoded
pictures count until they are gone. Where a number lies changes no bit of a result.
"""

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.scratch import Scratch

GIGABYTE = 1_000_000_000
DEFAULT = 4.0


class _Budget:
    limit = int(DEFAULT * GIGABYTE)
    taken = 0
    folder: Path | None = None
    lock = threading.Lock()


def use_memory(gigabytes: float, folder: Path | None = None) -> None:
    """From now on; `folder` is where files of this process's scratch lie."""
    _Budget.limit, _Budget.folder = int(gigabytes * GIGABYTE), folder


def memory_left() -> int:
    """Bytes of the budget that nothing takes."""
    return max(0, _Budget.limit - _Budget.taken)


def counted(array: np.ndarray) -> np.ndarray:
    """The array; its bytes count against the budget until it is gone."""
    _add(array.nbytes)
    weakref.finalize(array, _add, -array.nbytes)
    return array


def _add(size: int) -> None:
    with _Budget.lock:
        _Budget.taken += size


def new_array(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array to be filled: in memory while the budget lasts, else in a file."""
    if int(np.prod(shape)) * np.dtype(dtype).itemsize <= memory_left():
        return counted(np.empty(tuple(shape), dtype))
    return new_scratch().array(shape, dtype)


def new_scratch() -> Scratch:
    return Scratch(_Budget.folder)
