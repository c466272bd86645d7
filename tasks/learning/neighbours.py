"""Exact nearest neighbours with bounded memory: features in, distances and row numbers out.

Products in float32 rule out what cannot be among the k nearest, by a bound on their rounding error;
the few pairs that are left are measured again in float64 from the rows themselves. So distances are
exact to float64 and do not depend on row order, block size or threads; d = 0 is exactly 0; equally
near rows come in the order of their numbers. The scores `nearest`, `cosine` and `knn` use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from schemas.errors import ConfigError, NoveltyError
from tasks.learning.samples import Rows

if TYPE_CHECKING:
    import torch

Metric = Literal["euclidean", "cosine"]
Pairs = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""Rows, columns and keys."""

# Products, or numbers of pairs measured again, held at a time: 16 MB in float32, 32 in float64.
_BLOCK = 2**22
# Pairs a query that float32 may leave before products are made again in float64.
_MANY = 16
# Pairs held at a time; where more queries leave more, fewer queries are taken.
_PAIRS = 2**24


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Both (queries, k), nearest first; `distance` float64 (cosine: 1 - cosine), `index` int64."""

    distance: np.ndarray
    index: np.ndarray


def nearest(
    queries: Rows,
    train: Rows,
    *,
    k: int = 1,
    metric: Metric = "euclidean",
    device: str = "cpu",
) -> Neighbours:
    """The k rows of `train` that are nearest to each row of `queries`.

    The cosine of a row of zeros to any other is 0. Both sides are read in blocks, so they may lie
    in a file. Products are made on `device`. Raises a ConfigError if there are fewer than k
    training rows or widths differ.
    """
    _check(queries, train, k, metric)
    search = _Search(_in_one_layout(train), k, metric, device)
    queries = _in_one_layout(queries)
    step = min(max(1, len(queries)), math.isqrt(_BLOCK))
    blocks = [search(queries[at : at + step]) for at in range(0, len(queries), step)]
    empty = np.zeros((0, k))
    return Neighbours(
        np.concatenate([empty, *(distance for distance, _ in blocks)]),
        np.concatenate([empty.astype(np.int64), *(index for _, index in blocks)]),
    )


def _in_one_layout(rows: Rows) -> Rows:
    """Sums follow the layout of the memory; one layout, one result."""
    return np.ascontiguousarray(rows) if isinstance(rows, np.ndarray) else rows


def _check(queries: Rows, train: Rows, k: int, metric: str) -> None:
    if metric not in get_args(Metric):
        raise ConfigError(f"nearest: metric {metric!r}; expected one of {get_args(Metric)}")
    both = queries.shape, train.shape
    if any(len(shape) != 2 for shape in both) or queries.shape[1] != train.shape[1]:
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

    def __init__(self, train: Rows, k: int, metric: Metric, device: str = "cpu") -> None:
        import torch

        self.train, self.k, self.metric, self.device = train, k, metric, device
        # Distances do not change with the origin; near the data, products lose fewer digits.
        self.origin = np.zeros(train.shape[1], train.dtype)
        self.sizes: np.ndarray | None = None
        if metric == "euclidean":
            self.origin = _mean(train).astype(train.dtype)
        else:
            self.sizes = _sizes(train)
        self.longest = max(
            float(self._placed(block, sizes, torch.float64).square().sum(1).amax().sqrt())
            for block, sizes in self._blocks(_step(train))
        )
        # A user may have allowed coarser products (TF32, bfloat16): the bound does not hold them.
        self.trusts_float32 = torch.get_float32_matmul_precision() == "highest"

    def __call__(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        import torch

        sizes = None if self.sizes is None else _sizes(queries)
        pairs = None
        if self.trusts_float32:
            placed = self._placed(queries, sizes, torch.float32)
            pairs = self._candidates(placed, _MANY * self.k * len(queries))
        if pairs is None:
            placed = self._placed(queries, sizes, torch.float64)
            pairs = self._candidates(placed, _PAIRS if len(queries) > 1 else None)
        if pairs is None and len(queries) > 1:
            halves = [self(half) for half in np.array_split(queries, 2)]
            return np.concatenate([d for d, _ in halves]), np.concatenate([i for _, i in halves])
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

    def _blocks(self, step: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Training rows and their lengths."""
        for at in range(0, len(self.train), step):
            sizes = None if self.sizes is None else self.sizes[at : at + step]
            yield self.train[at : at + step], sizes

    def _placed(
        self, rows: np.ndarray, sizes: np.ndarray | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows as the products take them: about the origin, or of length 1."""
        import torch

        wide = rows.astype(np.float64) if dtype == torch.float64 else rows
        placed = wide - self.origin if sizes is None else wide / sizes[:, None]
        return torch.from_numpy(placed).to(self.device, dtype)

    def _candidates(
        self, queries: torch.Tensor, most: int | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Row and column of every pair that may be among the k nearest, sorted by row.

        None where keys may overflow, or where there are more than `most`.
        """
        import torch

        number = torch.finfo(queries.dtype)
        # A sum of D products is off by at most D roundings of |q||t|; the rest covers the rounding
        # of the placed rows, of the offset and of this bound itself, and underflow.
        longest = self.longest * (1 + 2**-20)
        largest = longest * (2 * queries.norm(dim=1) + longest)
        if not bool(torch.isfinite(4 * largest).all()):
            return None
        error = (queries.shape[1] + 16) * number.eps / 2 * largest + number.tiny
        limit = queries.new_full((len(queries),), torch.inf)
        best = queries.new_empty(len(queries), 0)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        pairs = (none, none, queries.new_empty(0))
        step, first = max(1, _BLOCK // len(queries)), 0
        products = queries.new_empty(len(queries), min(step, len(self.train)))
        for block, sizes in self._blocks(step):
            train = self._placed(block, sizes, queries.dtype)
            squares = train.square().sum(1)
            offset = squares if self.sizes is None else torch.zeros_like(squares)
            # One buffer for all blocks: the heap would be left in pieces.
            key = products[:, : len(train)]
            torch.addmm(offset, queries, train.T, alpha=-2, out=key)
            best = torch.cat([best, _least(key, self.k)], 1)
            best = _least(best, self.k)
            if best.shape[1] == self.k:
                limit = best.amax(1)
            # The k-th key may be too low by the error, and a nearer one too high by it.
            row, column = (key <= (limit + 2.1 * error)[:, None]).nonzero(as_tuple=True)
            # This block may have lowered the limit for what earlier ones left.
            new = (row, column + first, key[row, column])
            pairs = _within(pairs, new, limit + 2.1 * error)
            if most is not None and len(pairs[0]) > most:
                return None
            first += len(block)
        row, column, _ = pairs
        order = torch.argsort(row, stable=True)
        return row[order].cpu().numpy(), column[order].cpu().numpy()

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


def _least(keys: torch.Tensor, k: int) -> torch.Tensor:
    """The k smallest of each row, or all."""
    if k == 1 and keys.shape[1]:
        return keys.amin(1, keepdim=True)
    return keys.topk(min(k, keys.shape[1]), 1, largest=False, sorted=False).values


def _within(old: Pairs, new: Pairs, limit: torch.Tensor) -> Pairs:
    """Of both those that are not above the limits of their rows."""
    import torch

    row, column, key = (torch.cat(part) for part in zip(old, new, strict=True))
    kept = key <= limit[row]
    return row[kept], column[kept], key[kept]


def _step(rows: Rows) -> int:
    return max(1, _BLOCK // max(1, rows.shape[1]))


def _mean(rows: Rows) -> np.ndarray:
    step, total = _step(rows), np.zeros(rows.shape[1])
    for at in range(0, len(rows), step):
        total += rows[at : at + step].sum(0, dtype=np.float64)
    return total / len(rows)


def _sizes(rows: Rows) -> np.ndarray:
    """Lengths in float64, 1 for a row of zeros."""
    sizes, step = np.empty(len(rows)), _step(rows)
    for at in range(0, len(rows), step):
        block = rows[at : at + step].astype(np.float64)
        sizes[at : at + step] = np.sqrt(np.square(block).sum(1))
    return np.where(sizes > 0, sizes, 1.0)
