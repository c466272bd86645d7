"""Samples as models get them: ids, labels and named arrays."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from schemas.errors import ConfigError

NOVEL = -1
# Of an array, read at a time for a fingerprint.
FINGERPRINT_BYTES = 1 << 24


class Rows(Protocol):
    """One row per sample: a NumPy array, or what makes one of the rows that are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any) -> np.ndarray: ...


class SomeRows:
    """Some rows of others, made when they are asked for."""

    def __init__(self, every: Rows, rows: np.ndarray) -> None:
        self.every, self.rows = every, rows

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), *self.every.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.every.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.every[self.rows[rows]]


def some_rows(every: Rows, rows: np.ndarray) -> Rows:
    """These rows: in memory if all of them are there, else lazily."""
    if type(every) is np.ndarray:
        return every[rows]
    if isinstance(every, SomeRows):
        return some_rows(every.every, every.rows[rows])
    take = None if isinstance(every, np.ndarray) else getattr(every, "take", None)
    return SomeRows(every, rows) if take is None else take(rows)


def is_there(every: Rows) -> bool:
    """Whether rows are only copied, from memory or a file; others are decoded or made."""
    while isinstance(every, SomeRows):
        every = every.every
    return isinstance(every, np.ndarray)


@dataclass(frozen=True, eq=False)
class Samples:
    """`labels` are indices of known classes, NOVEL (-1) for a sample of none of them.

    `arrays` hold one row per id: "images" uint8 (N, H, W, 3), "clouds" float32 (N, P, 3), ...;
    `classes` are the names of the labels; `about` is what holds for all of them, such as the
    normalisation of clouds.
    """

    ids: Sequence[str]
    labels: np.ndarray | None
    arrays: Mapping[str, Rows]
    classes: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if self.labels is not None:
            lengths["labels"] = len(self.labels)
        wrong = {name: length for name, length in lengths.items() if length != len(self.ids)}
        if wrong:
            raise ConfigError(f"samples: {len(self.ids)} ids, but rows of {wrong}")
        if self.labels is not None and self.labels.dtype != np.int64:
            raise ConfigError(f"samples: labels are {self.labels.dtype}, expected int64")

    @classmethod
    def unnamed(cls, **arrays: Rows) -> Samples:
        """Samples without labels that are called by their numbers."""
        count = len(next(iter(arrays.values())))
        return cls([str(row) for row in range(count)], None, arrays)

    def __len__(self) -> int:
        return len(self.ids)

    def array(self, name: str) -> Rows:
        if name not in self.arrays:
            raise ConfigError(f"samples have no array {name!r}, only {sorted(self.arrays)}")
        return self.arrays[name]

    def images(self) -> Rows:
        images = self.array("images")
        if images.dtype != np.uint8 or len(images.shape) != 4 or images.shape[3] != 3:
            raise ConfigError(
                f"images are {images.dtype} {images.shape}, expected uint8 (N, H, W, 3)"
            )
        return images

    def take(self, rows: np.ndarray) -> Samples:
        """Those of these rows; what is not in memory stays where it is."""
        return replace(
            self,
            ids=[self.ids[row] for row in rows],
            labels=None if self.labels is None else self.labels[rows],
            arrays={name: some_rows(array, rows) for name, array in self.arrays.items()},
        )

    def known(self) -> Samples:
        """Those of known classes; all of them if there are no labels."""
        if self.labels is None or (self.labels != NOVEL).all():
            return self
        return self.take(np.flatnonzero(self.labels != NOVEL))

    def fingerprint(self) -> str:
        """sha256 of ids, labels and arrays."""
        digest = hashlib.sha256(json.dumps(list(self.ids)).encode())
        parts: dict[str, Rows] = dict(self.arrays)
        if self.labels is not None:
            parts["labels"] = self.labels
        for name, array in sorted(parts.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            size = array.dtype.itemsize * math.prod(array.shape[1:])
            step = max(1, FINGERPRINT_BYTES // max(size, 1))
            for row in range(0, len(array), step):
                digest.update(np.ascontiguousarray(array[row : row + step]).data)
        return digest.hexdigest()
