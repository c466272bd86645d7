"""What all generators draw and write with: a random state per item, files left alone if equal."""

import hashlib
from pathlib import Path

import numpy as np

from storage.atomic import write_bytes


def item_rng(seed: int, *name: object) -> np.random.Generator:
    """A generator that depends only on the seed and the item's name."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, "<u4").tolist()])


def put(path: Path, data: bytes) -> None:
    """Write atomically; a file that already holds these bytes is left alone."""
    if not (path.is_file() and path.read_bytes() == data):
        write_bytes(path, data)
