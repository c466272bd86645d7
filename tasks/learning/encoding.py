"""Counts and words as one matrix: counts as they are, words as one-hot groups of a vocabulary.

The first entry of a group stands for every word that the vocabulary lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class ColumnGroups:
    """Which columns of a matrix are counts, and which make up each one-hot group."""

    numeric: slice
    categorical: tuple[slice, ...]
    width: int


def learn_vocabulary(categories: Mapping[str, np.ndarray]) -> dict[str, tuple[str, ...]]:
    """The sorted words of each category in the training frames."""
    return {name: tuple(np.unique(values).tolist()) for name, values in categories.items()}


def column_groups(numeric: int, vocabulary: Mapping[str, tuple[str, ...]]) -> ColumnGroups:
    """The groups of a matrix with so many counts, in the vocabulary's order."""
    sizes = [1 + len(known) for known in vocabulary.values()]
    ends = numeric + np.cumsum([0, *sizes])
    parts = tuple(slice(int(a), int(b)) for a, b in pairwise(ends))
    return ColumnGroups(slice(0, numeric), parts, int(ends[-1]))


def encoded(
    counts: np.ndarray,
    categories: Mapping[str, np.ndarray],
    vocabulary: Mapping[str, tuple[str, ...]],
) -> np.ndarray:
    """Counts (..., C) and words (...) side by side as float32 (..., D); a word that is not in the
    vocabulary is entry 0 of its group."""
    groups = column_groups(counts.shape[-1], vocabulary)
    matrix = np.zeros((*counts.shape[:-1], groups.width), np.float32)
    matrix[..., groups.numeric] = counts
    for (name, known), part in zip(vocabulary.items(), groups.categorical, strict=True):
        ordered = np.array(known, np.str_)
        place = np.searchsorted(ordered, categories[name])
        is_known = ordered[np.minimum(place, len(ordered) - 1)] == categories[name]
        entry = np.where(is_known, place + 1, 0)[..., None]
        np.put_along_axis(matrix[..., part], entry, 1, axis=-1)
    return matrix
