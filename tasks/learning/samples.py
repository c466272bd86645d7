"""Samples as models get them: ids, labels and named arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.errors import ConfigError

NOVEL = -1


@dataclass(frozen=True, eq=False)
class Samples:
    """`labels` are indices of known classes, NOVEL (-1) for a sample of none of them.

    `arrays` hold one row per id: "images" uint8 (N, H, W, 3); "logits", "features", ... as floats.
    """

    ids: Sequence[str]
    labels: np.ndarray | None
    arrays: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if self.labels is not None:
            lengths["labels"] = len(self.labels)
        wrong = {name: length for name, length in lengths.items() if length != len(self.ids)}
        if wrong:
            raise ConfigError(f"samples: {len(self.ids)} ids, but rows of {wrong}")
        if self.labels is not None and self.labels.dtype != np.int64:
            raise ConfigError(f"samples: labels are {self.labels.dtype}, expected int64")

    def __len__(self) -> int:
        return len(self.ids)

    def array(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise ConfigError(f"samples have no array {name!r}, only {sorted(self.arrays)}")
        return self.arrays[name]

    def images(self) -> np.ndarray:
        images = self.array("images")
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise ConfigError(
                f"images are {images.dtype} {images.shape}, expected uint8 (N, H, W, 3)"
            )
        return images

    def known(self) -> Samples:
        """Those of known classes; all of them if there are no labels."""
        if self.labels is None or (self.labels != NOVEL).all():
            return self
        rows = np.flatnonzero(self.labels != NOVEL)
        return Samples(
            [self.ids[row] for row in rows],
            self.labels[rows],
            {name: array[rows] for name, array in self.arrays.items()},
        )

    def fingerprint(self) -> str:
        """sha256 of ids, labels and arrays."""
        digest = hashlib.sha256(json.dumps(list(self.ids)).encode())
        parts = {**self.arrays, **({} if self.labels is None else {"labels": self.labels})}
        for name, array in sorted(parts.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            for row in range(0, len(array), 1024):
                digest.update(np.ascontiguousarray(array[row : row + 1024]))
        return digest.hexdigest()
