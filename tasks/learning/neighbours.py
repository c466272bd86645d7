"""Exact nearest neighbours with bounded memory: features in, distances and row numbers out.

Products in float32 rule out what cannot be among the k nearest, by a bound on their rounding error;
the few pairs that are left are measured again in float64 from the rows themselves. So distances are
exact to float64 and do not depend on row order, block size or threads; d = 0 is exactly 0; equally
near rows come in the order of their numbers. The scores `nearest`, `cosine` and `knn` use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from schemas.errors import ConfigError, NoveltyError

if TYPE_CHECKING:
    import torch

Metric = Literal["euclidean", "cosine"]

# Products, or numbers of pairs measured again, held at a time: 16 MB in float32, 32 in float64.
_BLOCK = 2**22
# Pairs a query that float32 may leave before products are made again in float64.
_MANY = 16


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Both (queries, k), nearest first; `distance` float64 (cosine: 1 - cosine), `index` int64."""

    distance: np.ndarray
    index: np.ndarray


def nearest(
    queries: np.ndarray, train: np.ndarray, *, k: int = 1, metric: Metric = "euclidean"
) -> Neighbours:
    """The k rows of `train` that are nearest to each row of `queries`.

    The cosine of a row of zeros to any other is 0. Raises a ConfigError if there are fewer than k
    training rows or widths differ.
    """
    _check(queries, train, k, metric)
    # Sums follow the layout of the memory; one layout, one result.
    queries, train = np.ascontiguousarray(queries), np.ascontiguousarray(train)
    search = _Search(train, k, metric)
    step = max(1, _BLOCK // len(train))
    found = [search(queries[at : at + step]) for at in range(0, len(queries), step)]
    empty = np.zeros((0, k))
    return Neighbours(
        np.concatenate([empty, *(distance for distance, _ in found)]),
        np.concatenate([empty.astype(np.int64), *(index for _, index in found)]),
    )


def _check(queries: np.ndarray, train: np.ndarray, k: int, metric: str) -> None:
    if metric not in get_args(Metric):
        raise ConfigError(f"nearest: metric {metric!r}; expected one of {get_args(Metric)}")
    if queries.ndim != 2 or train.ndim != 2 or queries.shape[1] != train.shape[1]:
        raise ConfigError(
            f"nearest: queries {queries.shape} and training features {train.shape}; expected rows "
            "of the same width, from the same network"
        )
    if not 1 <= k <= len(train):
        raise ConfigError(f"nearest: k = {k} of {len(train)} training samples; lower k")


class _Search:
    """The k nearest of `train`, in rounds of queries.

    Both metrics rank by a key, offset(t) - 2 q.t: squared distance less |q|^2, or, with rows scaled
    to length 1 and no offset, -2 cosine.
    """

    def __init__(self, train: np.ndarray, k: int, metric: Metric) -> None:
        import torch

        self.train, self.k, self.metric = train, k, metric
        # Distances do not change with the origin; near the data, products lose fewer digits.
        self.origin = train.mean(0) if metric == "euclidean" else np.zeros(train.shape[1])
        self.origin = self.origin.astype(train.dtype)
        self.sizes = None if metric == "euclidean" else _sizes(train)
        # A user may have allowed coarser products (TF32, bfloat16): the bound does not hold them.
        trusted = torch.get_float32_matmul_precision() == "highest"
        self.coarse = self._placed(train, self.sizes, torch.float32) if trusted else None
        self.fine: torch.Tensor | None = None

    def __call__(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        import torch

        sizes = None if self.sizes is None else _sizes(queries)
        pairs = None
        if self.coarse is not None:
            pairs = self._candidates(self._placed(queries, sizes, torch.float32), self.coarse)
        if pairs is None or len(pairs[0]) > _MANY * self.k * len(queries):
            if self.fine is None:
                self.fine = self._placed(self.train, self.sizes, torch.float64)
            pairs = self._candidates(self._placed(queries, sizes, torch.float64), self.fine)
        if pairs is None:
            raise NoveltyError("nearest: features are not finite or too large; look at the network")
        row, column = pairs
        distance = self._measured(queries, sizes, row, column)
        # Stable, so equally near columns stay in order.
        order = np.lexsort((distance, row))
        # Every query has at least k candidates, so its first k stand at its first place.
        first = np.searchsorted(row, np.arange(len(queries)))
        kept = order[first[:, None] + np.arange(self.k)]
        return distance[kept], column[kept]

    def _placed(
        self, rows: np.ndarray, sizes: np.ndarray | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows as the products take them: about the origin, or of length 1."""
        import torch

        wide = rows.astype(np.float64) if dtype == torch.float64 else rows
        placed = wide - self.origin if sizes is None else wide / sizes[:, None]
        return torch.from_numpy(placed).to(dtype)

    def _candidates(
        self, queries: torch.Tensor, train: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Row and column of every pair that may be among the k nearest, sorted by row.

        None where keys may overflow.
        """
        import torch

        squares = train.square().sum(1)
        offset = squares if self.sizes is None else torch.zeros_like(squares)
        key = torch.addmm(offset, queries, train.T, alpha=-2)
        if self.k == 1:
            limit = key.amin(1)
        else:
            limit = key.topk(self.k, 1, largest=False, sorted=False).values.amax(1)
        # A sum of D products is off by at most D roundings of |q||t|; the rest covers the rounding
        # of the placed rows, of the offset and of this bound itself, and underflow.
        longest = squares.amax().sqrt()
        largest = longest * (2 * queries.norm(dim=1) + longest)
        if not bool(torch.isfinite(4 * largest).all()):
            return None
        number = torch.finfo(train.dtype)
        error = (train.shape[1] + 16) * number.eps / 2 * largest + number.tiny
        # The k-th key may be too low by the error, and a nearer one too high by it.
        left = key <= (limit + 2.1 * error)[:, None]
        row, column = np.divmod(np.flatnonzero(left.numpy()), len(train))
        return row, column

    def _measured(
        self,
        queries: np.ndarray,
        sizes: np.ndarray | None,
        row: np.ndarray,
        column: np.ndarray,
    ) -> np.ndarray:
        """The distance of each pair in float64."""
        distance = np.empty(len(row))
        step = max(1, _BLOCK // queries.shape[1])
        for at in range(0, len(row), step):
            pairs = slice(at, at + step)
            q = queries[row[pairs]].astype(np.float64)
            t = self.train[column[pairs]]
            if sizes is None or self.sizes is None:
                distance[pairs] = np.sqrt(np.square(q - t).sum(1))
            else:
                both = sizes[row[pairs]] * self.sizes[column[pairs]]
                distance[pairs] = 1 - np.clip((q * t).sum(1) / both, -1, 1)
        return distance


def _sizes(rows: np.ndarray) -> np.ndarray:
    """Lengths in float64, 1 for a row of zeros."""
    sizes = np.empty(len(rows))
    step = max(1, _BLOCK // rows.shape[1])
    for at in range(0, len(rows), step):
        block = rows[at : at + step].astype(np.float64)
        sizes[at : at + step] = np.sqrt(np.square(block).sum(1))
    return np.where(sizes > 0, sizes, 1.0)
