"""Random states that depend on a seed and a name, not on the order in which items come."""

import hashlib

import numpy as np


def item_rng(seed: int, *name: object) -> np.random.Generator:
    """A generator that depends only on the seed and the item's name."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, "<u4").tolist()])
