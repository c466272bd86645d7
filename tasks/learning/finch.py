"""FINCH clustering (Sarfraz et al., CVPR 2019): parameter-free, by first neighbours.

In: features (N, D). Out: partitions (N, P), finest first, as cluster numbers from 0 in the order of
first appearance. Each row is linked to its nearest other row by cosine; connected rows are a
cluster; the clusters' means are clustered in the same way, until one is left or nothing merges
(that last partition is not kept). Linking to the first neighbour has the same connected components
as the paper's (A + I)(A + I)^T. Neighbours are exact at any N (`tasks/learning/neighbours.py`): no
N x N matrix exists, and block, threads and device change nothing. Of equally near rows the first is
the neighbour.
"""

from __future__ import annotations

import numpy as np

from schemas.errors import ConfigError
from tasks.learning.memory import new_array
from tasks.learning.neighbours import nearest
from tasks.learning.samples import Rows

VERSION = 2
"""Raised when the same features give other clusters."""
# Numbers of gathered rows held at a time: 32 MB of float64.
BLOCK_ELEMENTS = 2**22


def finch(features: Rows, *, device: str = "cpu") -> np.ndarray:
    """int64 (N, P), P >= 1; at least one row. Features may lie in a file."""
    if len(features.shape) != 2 or not len(features):
        raise ConfigError(f"FINCH: features are {features.shape}, expected (N, D) with N >= 1")
    if not all_finite(features):
        raise ConfigError("FINCH: features are not all finite; look for a diverged network")
    partitions = [_linked(first_neighbours(features, device))]
    while True:
        latest = partitions[-1]
        count = int(latest.max()) + 1
        if count == 1:
            break
        merged = _linked(first_neighbours(_means(features, latest, count), device))[latest]
        left = int(merged.max()) + 1
        if left == 1 or left == count:
            break
        partitions.append(merged)
        # As in the authors' code: a step that merged two clusters only is the last.
        if count - left == 1:
            break
    return np.stack(partitions, 1)


def first_neighbours(features: Rows, device: str = "cpu") -> np.ndarray:
    """The most similar other row of each row by cosine; a row of zeros is similar to none."""
    if len(features) == 1:
        return np.zeros(1, np.int64)
    index = nearest(features, features, k=2, metric="cosine", device=device).index
    # Where equals come before a row, both are others.
    itself = index[:, 0] == np.arange(len(index))
    return np.where(itself, index[:, 1], index[:, 0])


def all_finite(rows: Rows) -> bool:
    step = max(1, BLOCK_ELEMENTS // max(1, rows.shape[1]))
    return all(np.isfinite(rows[at : at + step]).all() for at in range(0, len(rows), step))


def _linked(neighbours: np.ndarray) -> np.ndarray:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    count = len(neighbours)
    links = csr_array((np.ones(count, np.int8), (np.arange(count), neighbours)), (count, count))
    return connected_components(links, directed=False)[1].astype(np.int64)


def _means(features: Rows, clusters: np.ndarray, count: int) -> np.ndarray:
    """Float64 (count, D), some clusters at a time."""
    from scipy.sparse import csr_array

    order = np.argsort(clusters, kind="stable")
    ends = np.cumsum(np.bincount(clusters, minlength=count))
    means = new_array((count, features.shape[1]), np.float64)
    most, first = max(1, BLOCK_ELEMENTS // features.shape[1]), 0
    while first < count:
        start = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, start + most, "right")))
        rows = order[start : ends[last - 1]]
        place = (clusters[rows] - first, np.arange(len(rows)))
        member = csr_array((np.ones(len(rows)), place), (last - first, len(rows)))
        sizes = np.diff(ends[first:last], prepend=start)
        means[first:last] = (member @ features[rows]) / sizes[:, None]
        first = last
    return means
