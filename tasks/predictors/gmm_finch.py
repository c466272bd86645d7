"""A Gaussian mixture per label, its components found by FINCH (KOWL-718 section 5, "GMM-FINCH").

Fit: FINCH (cosine) on the samples of each label, last partition; a cluster is a Gaussian with its
mean and unbiased covariance, plus epsilon * I if that is not positive definite (always so with
fewer samples than dimensions, and for a single sample); equal weights. One threshold T for all:
the least, over training samples, of their largest log density over labels; then, of the validation
samples below T for every label, the quantile of their largest log densities that the accepted error
names. New samples below T for every label are `unknown`; two or more of them are clustered by FINCH
into components unknown_0, unknown_1, ... of their own.

A covariance is kept as the singular vectors of its samples, so a component of n samples takes n x D
numbers, not D x D, and the density is exact: inside their span by the variances, outside by
epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.learning.devices import seeded
from tasks.learning.finch import finch
from tasks.learning.memory import new_array
from tasks.learning.samples import Rows, some_rows
from tasks.predictors.base import UNKNOWN, Examples, Prediction, Predictor, with_unknown

if TYPE_CHECKING:
    import torch

# Projections held at a time: 128 MB of float64.
BLOCK_ELEMENTS = 2**24
MEAN_ROWS = 512


class Configuration(Settings):
    level: int = Field(-1, description="Partition of FINCH to use: 0 the finest, -1 the coarsest.")
    precision: Literal["float64", "float32"] = Field(
        "float64", description="Of the densities; with float32 use an epsilon of 1e-4 or more."
    )
    epsilon: float = Field(
        1e-12, gt=0, description="Added to the diagonal of a covariance that is not definite."
    )
    accepted_error: float = Field(
        0.05, ge=0, lt=1, description="Quantile among refused validation samples that sets T."
    )
    calibrate: Literal["first_fit", "every_fit"] = Field(
        "first_fit", description="When validation lowers T; first: later fits never raise it."
    )
    names: Literal["stable", "restart"] = Field(
        "stable",
        description="Discovered clusters keep their names, or count from 0 at each discovery.",
    )
    batch_size: int = Field(8192, ge=1, description="Samples whose densities are made at a time.")


class GmmFinch(Predictor):
    name: ClassVar[str] = "gmm_finch"
    version: ClassVar[int] = 2
    discovers: ClassVar[bool] = True
    reads_blocks: ClassVar[bool] = True
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {"names": "restart"},
        "small": {"epsilon": 1e-2, "calibrate": "every_fit"},
    }
    mixture: Mixture
    discovered: Mixture | None = None
    names: tuple[str, ...] = ()
    next_name: int = 0
    threshold: float | None = None

    def _fit(
        self,
        train: Examples,
        valid: Examples | None,
        *,
        before: tuple[str, ...],
        seed: Sequence[int],
    ) -> None:
        codes = train.codes(self.known)
        order = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[order], np.arange(len(self.known) + 1))
        parts: list[tuple[int, Rows]] = []
        for label, (start, end) in enumerate(pairwise(bounds)):
            if start < end:
                rows = some_rows(train.features, order[start:end])
                clusters = finch(rows, device=self.device)[:, self.settings.level]
                parts += [(label, some_rows(rows, members)) for members in _members(clusters)]
        center = _mean(train.features)
        self.mixture = self._mixture(parts, center)
        lowest = float(self._highest(train.features).min())
        anew = self.threshold is None or self.settings.calibrate == "every_fit"
        self.threshold = lowest if anew else min(lowest, cast(float, self.threshold))
        if valid is not None and anew:
            highest = self._highest(valid.features)
            refused = highest[highest < self.threshold]
            if len(refused):
                self.threshold = float(np.quantile(refused, self.settings.accepted_error))

    def _mixture(self, parts: Sequence[tuple[int, Rows]], center: np.ndarray) -> Mixture:
        import torch

        precision = getattr(torch, self.settings.precision)
        return Mixture.fit(parts, center, self.settings.epsilon, precision, self.device)

    def _blocks(self, features: Rows) -> Iterator[np.ndarray]:
        for start in range(0, len(features), self.settings.batch_size):
            yield features[start : start + self.settings.batch_size]

    def _highest(self, features: Rows) -> np.ndarray:
        """The largest log density over the known labels."""
        owners = len(self.known)
        parts = [
            self.mixture.log_density(block, owners).max(1).values.cpu().numpy()
            for block in self._blocks(features)
        ]
        return np.concatenate(parts).astype(np.float64) if parts else np.empty(0)

    def discover(self, features: Rows, *, most: int | None = None) -> None:
        """Clusters of the samples that no known label accounts for; fewer than two are none."""
        rows = some_rows(features, np.flatnonzero(self._highest(features) < self.threshold))
        if len(rows) < 2:
            self.discovered, self.names = None, ()
            return
        clusters = finch(rows, device=self.device)[:, self.settings.level]
        parts = [(n, some_rows(rows, members)) for n, members in enumerate(_members(clusters))]
        center = self.mixture.center.cpu().numpy()
        found = self._mixture(parts, center)
        self.names = self._named(found)
        self.discovered = found

    def _named(self, found: Mixture) -> tuple[str, ...]:
        """Stable: a cluster keeps the name of an earlier one if each is the other's nearest."""
        if self.settings.names == "restart":
            return tuple(f"{UNKNOWN}_{number}" for number in range(len(found.mean)))
        kept: dict[int, str] = {}
        if self.discovered is not None:
            old, new = (
                rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
                for rows in (
                    (mixture.mean + mixture.center).cpu().numpy()
                    for mixture in (self.discovered, found)
                )
            )
            likeness = new @ old.T
            nearest = likeness.argmax(1)
            mutual = likeness.argmax(0)[nearest] == np.arange(len(new))
            kept = {int(row): self.names[nearest[row]] for row in np.flatnonzero(mutual)}
        fresh = count(self.next_name)
        names = tuple(
            kept.get(number) or f"{UNKNOWN}_{next(fresh)}" for number in range(len(found.mean))
        )
        self.next_name = next(fresh)
        return names

    def _likelihoods(self, features: Rows) -> np.ndarray:
        """Log densities of the known labels, then of the discovered components."""
        sides = [(self.mixture, len(self.known))]
        if self.discovered is not None:
            sides.append((self.discovered, len(self.names)))
        parts = [
            np.hstack([mixture.log_density(block, size).cpu().numpy() for mixture, size in sides])
            for block in self._blocks(features)
        ]
        width = len(self.known) + len(self.names)
        return np.concatenate(parts).astype(np.float64) if parts else np.empty((0, width))

    def _predict(self, features: Rows) -> Prediction:
        densities = self._likelihoods(features)
        shares = np.pad(_softmax(densities), ((0, 0), (1, 0))).astype(np.float32)
        detected = (densities < self.threshold).all(1)
        labels = (UNKNOWN, *self.known, *self.names)
        return Prediction(labels, with_unknown(shares, detected))

    def _novelty(self, features: Rows) -> np.ndarray:
        """Minus the largest log density among the known labels."""
        return -self._highest(features)

    def feedback_order(self, features: Rows, *, seed: Sequence[int]) -> np.ndarray:
        """The least certain first, before any sample is called unknown; equals in given order."""
        self._check_fitted(features)
        certainty = _softmax(self._likelihoods(features)).max(1)
        return np.argsort(certainty, kind="stable")

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        parts = {"known": self.mixture}
        if self.discovered is not None:
            parts["discovered"] = self.discovered
        return {
            f"{part}.{field.name}": getattr(mixture, field.name)
            for part, mixture in parts.items()
            for field in fields(mixture)
        }

    def record(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "names": list(self.names),
            "next_name": self.next_name,
        }

    def restore(self, state: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        def mixture(part: str) -> Mixture:
            return Mixture(
                **{f.name: state[f"{part}.{f.name}"].to(self.device) for f in fields(Mixture)}
            )

        self.mixture = mixture("known")
        self.names, self.next_name = tuple(record["names"]), record["next_name"]
        self.discovered = mixture("discovered") if self.names else None
        self.threshold = record["threshold"]


def _mean(features: Rows) -> np.ndarray:
    """In float64, some rows at a time; to the bit that of all at once."""
    total = np.zeros((1, features.shape[1]))
    for start in range(0, len(features), MEAN_ROWS):
        rows = features[start : start + MEAN_ROWS].astype(np.float64)
        total = np.add.reduce(np.concatenate([total, rows]), 0, keepdims=True)
    mean: np.ndarray = total[0] / len(features)
    return mean


def _members(clusters: np.ndarray) -> Iterator[np.ndarray]:
    order = np.argsort(clusters, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(clusters[order])) + 1)


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@dataclass(frozen=True, eq=False)
class Mixture:
    """K Gaussians sorted by owner: N(center + mean, basis^T diag(variance) basis + epsilon I).

    Component k has `rank[k]` consecutive rows of `basis` (orthonormal) and of `variance`;
    `epsilon[k]` is 0 where its covariance is definite by itself.
    """

    center: torch.Tensor
    mean: torch.Tensor
    basis: torch.Tensor
    variance: torch.Tensor
    rank: torch.Tensor
    epsilon: torch.Tensor
    owner: torch.Tensor

    @classmethod
    def fit(
        cls,
        parts: Sequence[tuple[int, Rows]],
        center: np.ndarray,
        epsilon: float,
        precision: torch.dtype,
        device: str,
    ) -> Mixture:
        """One component per (owner, samples). The bases may lie in a file, on a GPU in its memory.

        They have as many numbers as all samples.
        """
        import torch

        middle = torch.tensor(center, dtype=precision, device=device)
        means, ranks, variances, epsilons = [], [], [], []
        width, filled = len(center), 0
        most = sum(min(len(samples), width) for _, samples in parts)
        bases = new_array((most, width), torch.empty(0, dtype=precision).numpy().dtype)
        smallest = torch.finfo(precision).eps
        # Threads cost far more than they save on matrices this small.
        with seeded([0], device, threads=1):
            for _, samples in parts:
                rows = torch.as_tensor(samples[:]).to(device, precision) - middle
                mean = rows.mean(0)
                size = len(rows)
                scaled = (rows - mean) / math.sqrt(max(size - 1, 1))
                vectors, values, _ = torch.linalg.svd(scaled.T, full_matrices=False)
                spread = values.square()
                inside = values > values.max() * max(size, width) * smallest
                # What a Cholesky decomposition of the covariance could still tell from 0.
                least = spread.max() * width * smallest
                definite = len(spread) == width and bool(spread.min() > least)
                basis = vectors.T[inside]
                bases[filled : filled + len(basis)] = basis.cpu().numpy()
                filled += len(basis)
                means.append(mean)
                ranks.append(len(basis))
                variances.append(spread[inside])
                epsilons.append(0.0 if definite else epsilon)
        return cls(
            center=middle,
            mean=torch.stack(means),
            basis=torch.from_numpy(bases[:filled]).to(device),
            variance=torch.cat(variances),
            rank=torch.tensor(ranks, device=device),
            epsilon=torch.tensor(epsilons, dtype=precision, device=device),
            owner=torch.tensor([owner for owner, _ in parts], device=device),
        )

    def log_density(self, features: np.ndarray, owners: int) -> torch.Tensor:
        """(N, owners): log of the mean density of an owner's components; -inf without any."""
        import torch

        x = torch.as_tensor(np.ascontiguousarray(features)).to(self.mean) - self.center
        lengths = x.square().sum(1)
        width = x.shape[1]
        density = x.new_full((owners, len(x)), -torch.inf)
        for first, last, top, bottom in self._chunks(max(1, BLOCK_ELEMENTS // max(len(x), 1))):
            basis, mean = self.basis[top:bottom], self.mean[first:last]
            rank, epsilon = self.rank[first:last], self.epsilon[first:last]
            wide = self.variance[top:bottom] + epsilon.repeat_interleave(rank)
            shift = (basis * mean.repeat_interleave(rank, 0)).sum(1)
            inside = torch.addmm(-shift[:, None], basis, x.T).square_()
            span = _sums(inside, rank)
            squared = torch.addmm(mean.square().sum(1)[:, None] + lengths, mean, x.T, alpha=-2)
            # Rounding can put a point that lies in the span just below 0 outside it.
            outside = (squared - span).clamp_(min=0)
            missing = torch.where(epsilon > 0, epsilon, 1)[:, None]
            distance = _sums(inside.div_(wide[:, None]), rank)
            distance += torch.where(epsilon[:, None] > 0, outside / missing, 0)
            volume = _sums(wide.log()[:, None], rank) + (width - rank)[:, None] * missing.log()
            component = -0.5 * (distance + volume + width * math.log(2 * math.pi))
            owner, sizes = torch.unique_consecutive(self.owner[first:last], return_counts=True)
            density[owner] = _log_sums(component, sizes) - sizes[:, None].to(x).log()
        return density.T

    def _chunks(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """(first, last component, first, last row of basis), owners whole, about `rows` rows."""
        import torch

        ends = torch.cumsum(self.rank, 0).tolist()
        _, sizes = torch.unique_consecutive(self.owner, return_counts=True)
        first = top = 0
        last = 0
        for size in sizes.tolist():
            if last > first and ends[last + size - 1] - top > rows:
                yield first, last, top, ends[last - 1]
                first, top = last, ends[last - 1]
            last += size
        yield first, last, top, ends[last - 1]


def _sums(rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Sums of consecutive rows, `sizes` many each."""
    import torch

    return torch.segment_reduce(rows, "sum", lengths=sizes, axis=0, initial=0)


def _log_sums(rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    import torch

    highest = torch.segment_reduce(rows, "max", lengths=sizes, axis=0)
    return highest + _sums((rows - highest.repeat_interleave(sizes, 0)).exp_(), sizes).log()
