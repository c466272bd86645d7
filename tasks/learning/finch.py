"""FINCH clustering (Sarfraz et al., CVPR 2019): parameter-free, by first neighbours.

In: features (N, D). Out: partitions (N, P), finest first, as cluster numbers from 0 in the order of
first appearance. Each row is linked to its nearest other row by cosine; connected rows are a
cluster; the clusters' means are clustered in the same way, until one is left or nothing merges
(that last partition is not kept). Linking to the first neighbour has the same connected components
as the paper's (A + I)(A + I)^T. Neighbours are exact at any N: similarities are made in blocks, so
no N x N matrix exists. Of equally near rows the first is the neighbour.
"""

from __future__ import annotations

import numpy as np

from schemas.errors import ConfigError

# Similarities held at a time: 64 MB of float32.
BLOCK_ELEMENTS = 2**24


def finch(
    features: np.ndarray, *, device: str = "cpu", block_elements: int = BLOCK_ELEMENTS
) -> np.ndarray:
    """int64 (N, P), P >= 1; at least one row."""
    if features.ndim != 2 or not len(features):
        raise ConfigError(f"FINCH: features are {features.shape}, expected (N, D) with N >= 1")
    if not np.isfinite(features).all():
        raise ConfigError("FINCH: features are not all finite; look for a diverged network")
    partitions = [_linked(first_neighbours(features, device, block_elements))]
    while True:
        latest = partitions[-1]
        count = int(latest.max()) + 1
        if count == 1:
            break
        means = _means(features, latest, count)
        merged = _linked(first_neighbours(means, device, block_elements))[latest]
        left = int(merged.max()) + 1
        if left == 1 or left == count:
            break
        partitions.append(merged)
        # As in the authors' code: a step that merged two clusters only is the last.
        if count - left == 1:
            break
    return np.stack(partitions, 1)


def first_neighbours(
    features: np.ndarray, device: str = "cpu", block_elements: int = BLOCK_ELEMENTS
) -> np.ndarray:
    """The most similar other row of each row by cosine; a row of zeros is similar to none."""
    import torch

    rows = torch.from_numpy(np.ascontiguousarray(features, np.float32)).to(device)
    rows = torch.nn.functional.normalize(rows)
    count = len(rows)
    if count == 1:
        return np.zeros(1, np.int64)
    nearest = torch.empty(count, dtype=torch.int64, device=device)
    size = max(1, block_elements // count)
    for start in range(0, count, size):
        block = rows[start : start + size] @ rows.T
        block.diagonal(start).fill_(-torch.inf)
        nearest[start : start + size] = block.argmax(1)
    return nearest.cpu().numpy()


def _linked(neighbours: np.ndarray) -> np.ndarray:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    count = len(neighbours)
    links = csr_array((np.ones(count, np.int8), (np.arange(count), neighbours)), (count, count))
    return connected_components(links, directed=False)[1].astype(np.int64)


def _means(features: np.ndarray, clusters: np.ndarray, count: int) -> np.ndarray:
    from scipy.sparse import csr_array

    rows = np.arange(len(features))
    member = csr_array((np.ones(len(rows)), (clusters, rows)), (count, len(rows)))
    return (member @ features) / np.bincount(clusters, minlength=count)[:, None]
