"""The extreme value machine (Rudd et al. 2017) on features, as KOWL-718 uses it (section 5).

For each labelled sample a Weibull distribution is fitted to its distances (cosine) to the nearest
samples of other labels; it says how surely another point at a distance still belongs to the label.
A greedy set cover keeps the samples that represent the others of their label. Out: the largest
probability per label, p_unknown = 1 - the largest of all, divided by the sum.

Weibull convention of the released code (libmr): fitted by maximum likelihood to
x = 1 + largest tail distance - distance, so the probability is the distribution function at x.
`tail_rule` `released` repeats its defect: the tail is tail_size times the number of labels.
`cover_rule` `released` repeats its set cover: a sample represents those whose own distributions it
belongs to, and of the n best after n - 1 choices the first that is not chosen yet is taken, in the
order of torch's unsorted top-k, so that better ones may come later or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.learning.memory import new_array
from tasks.learning.samples import Rows
from tasks.predictors.base import UNKNOWN, Examples, Prediction, Predictor

if TYPE_CHECKING:
    import torch

# Distances held at a time: 128 MB of float32.
BLOCK_ELEMENTS = 2**25
# A tail of equal distances has no finite shape; at this one the distribution is a step.
LARGEST_SHAPE = 1e4


class Configuration(Settings):
    tail_size: int = Field(100, ge=1, description="Nearest samples of other labels in the fit.")
    tail_rule: Literal["absolute", "released"] = Field(
        "absolute", description="tail_size as it is, or times the number of labels as released."
    )
    cover_rule: Literal["paper", "released"] = Field(
        "paper", description="Greedy set cover by a sample's own distribution, or as released."
    )
    cover_threshold: float = Field(
        0.7, gt=0, le=1, description="Probability from which a sample represents another."
    )
    distance_multiplier: float = Field(
        1.0, gt=0, description="Factor of the tail distances before the fit."
    )
    tolerance: float = Field(
        1e-5, gt=0, description="Largest distance of a sample to itself; more is refused."
    )


class Evm(Predictor):
    name: ClassVar[str] = "evm"
    reads_blocks: ClassVar[bool] = True
    version: ClassVar[int] = 2
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {"tail_rule": "released", "cover_rule": "released"},
        "small": {"tail_size": 20, "distance_multiplier": 0.5},
    }
    # One row per vector that represents its label, sorted by label: the vector of length 1, its
    # (shape, scale, largest tail distance), and the place of the label in `known`.
    vectors: torch.Tensor
    weibull: torch.Tensor
    owner: torch.Tensor

    def _fit(
        self,
        train: Examples,
        valid: Examples | None,
        *,
        before: tuple[str, ...],
        seed: Sequence[int],
    ) -> None:
        import torch

        codes = train.codes(self.known)
        sizes = np.bincount(codes, minlength=len(self.known))
        if np.count_nonzero(sizes) < 2:
            raise ConfigError(
                f"predictor {self.name}: all samples have one label; it needs at least two"
            )
        order = np.argsort(codes, kind="stable")
        rows, off = self._unit_rows(train.features, order)
        if off > self.settings.tolerance:
            raise ConfigError(
                f"predictor {self.name}: a sample is {off:.2g} away from itself, expected at most "
                f"{self.settings.tolerance:g}; a feature vector of zeros has no cosine, leave such "
                "samples out"
            )
        kept, weibull = [], []
        ends = np.cumsum(sizes)
        for label in np.flatnonzero(sizes):
            start, end = int(ends[label] - sizes[label]), int(ends[label])
            fits = self._tail_fits(rows, start, end)
            covers = self._covers(rows[start:end], fits)
            cover = (
                set_cover(covers)
                if self.settings.cover_rule == "paper"
                else released_cover(covers.T.contiguous())
            )
            kept.append(start + cover)
            weibull.append(fits[cover])
        places = torch.cat(kept)
        self.vectors, self.weibull = rows[places], torch.cat(weibull)
        self.owner = torch.from_numpy(codes[order]).to(self.device)[places]

    def _unit_rows(self, features: Rows, order: np.ndarray) -> tuple[torch.Tensor, float]:
        """All rows of length 1 in that order, and how far one of them is from that at most.

        They lie in a file where the memory does not suffice; on a GPU in its memory.
        """
        import torch

        width, off = features.shape[1], 0.0
        array = new_array((len(order), width), np.float32)
        step = max(1, BLOCK_ELEMENTS // width)
        for start in range(0, len(order), step):
            block = self._unit(features[order[start : start + step]])
            off = max(off, float((block.square().sum(1) - 1).abs().max()))
            array[start : start + step] = block.cpu().numpy()
        return torch.from_numpy(array).to(self.device), off

    def _unit(self, features: np.ndarray) -> torch.Tensor:
        import torch

        rows = torch.from_numpy(np.ascontiguousarray(features, np.float32)).to(self.device)
        return torch.nn.functional.normalize(rows)

    def _tail_fits(self, rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Weibull parameters of rows start to end, fitted to their nearest rows outside."""
        import torch

        settings = self.settings
        tail = settings.tail_size * (1 if settings.tail_rule == "absolute" else len(self.known))
        tail = min(tail, len(rows) - (end - start))
        # Two blocks of this width and two tails are held for each of `high` rows.
        high = max(1, min(end - start, BLOCK_ELEMENTS // (2 * tail)))
        wide = max(1, BLOCK_ELEMENTS // high)
        fits = []
        for top in range(start, end, high):
            mine = rows[top : min(top + high, end)]
            nearest = mine.new_empty(len(mine), 0)
            for others in (*rows[:start].split(wide), *rows[end:].split(wide)):
                if len(others):
                    nearest = torch.cat([nearest, 1 - mine @ others.T], 1)
                    size = min(tail, nearest.shape[1])
                    nearest = nearest.topk(size, 1, largest=False).values
            fits.append(fit_weibull(nearest.double() * settings.distance_multiplier))
        return torch.cat(fits)

    def _covers(self, rows: torch.Tensor, fits: torch.Tensor) -> torch.Tensor:
        """bool (n, n): whether row i represents row j."""
        import torch

        parts = []
        high = max(1, BLOCK_ELEMENTS // len(rows))
        for mine, fit in zip(rows.split(high), fits.split(high), strict=True):
            parts.append(belonging(1 - mine @ rows.T, fit) >= self.settings.cover_threshold)
        covers = torch.cat(parts)
        return covers.fill_diagonal_(True)

    def _members(self, features: Rows) -> Iterator[torch.Tensor]:
        """Probabilities (labels, rows) of belonging to each known label, some rows at a time."""
        import torch

        sizes = torch.bincount(self.owner, minlength=len(self.known))
        size = max(1, BLOCK_ELEMENTS // max(len(self.vectors), len(self.known) + 1))
        for start in range(0, len(features), size):
            rows = self._unit(features[start : start + size])
            inside = belonging(1 - self.vectors @ rows.T, self.weibull)
            yield torch.segment_reduce(inside, "max", lengths=sizes, axis=0, initial=0)

    def _predict(self, features: Rows) -> Prediction:
        import torch

        parts = [np.empty((0, len(self.known) + 1), np.float32)]
        for best in self._members(features):
            every = torch.cat([1 - best.max(0, keepdim=True).values, best])
            parts.append((every / every.sum(0)).T.float().cpu().numpy())
        return Prediction((UNKNOWN, *self.known), np.concatenate(parts))

    def _novelty(self, features: Rows) -> np.ndarray:
        """Minus the largest probability of belonging to a known label."""
        parts = [best.max(0).values.cpu().numpy() for best in self._members(features)]
        return -np.concatenate([np.empty(0), *parts])

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {"vectors": self.vectors, "weibull": self.weibull, "owner": self.owner}

    def restore(self, state: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        self.vectors = state["vectors"].to(self.device)
        self.weibull = state["weibull"].to(self.device)
        self.owner = state["owner"].to(self.device)


def belonging(distances: torch.Tensor, fits: torch.Tensor) -> torch.Tensor:
    """Probability (V, N) that points at these distances from V vectors are of their labels."""
    import torch

    shape, scale, largest = fits.T[:, :, None]
    x = (1 + largest - distances.double()).clamp_(min=0)
    return -torch.expm1(-((x / scale) ** shape))


def fit_weibull(tails: torch.Tensor) -> torch.Tensor:
    """Distances float64 (V, T) to (shape, scale, largest distance), each row by itself.

    Maximum likelihood: Newton's method for the shape, from the estimate by the deviation of log x.
    """
    import torch

    largest = tails.max(1, keepdim=True).values
    x = 1 + largest - tails
    # Divided by the largest, so that no power overflows; the shape does not change.
    unit = x.max(1, keepdim=True).values
    logs = (x / unit).log()
    mean = logs.mean(1, keepdim=True)
    deviation = logs.std(1, correction=0, keepdim=True)
    shape = (torch.pi / 6**0.5 / deviation).clamp(max=LARGEST_SHAPE)
    for _ in range(100):
        power = (shape * logs).exp()
        total = power.sum(1, keepdim=True)
        first = (power * logs).sum(1, keepdim=True) / total
        second = (power * logs.square()).sum(1, keepdim=True) / total
        slope = second - first.square() + 1 / shape.square()
        step = (first - mean - 1 / shape) / slope
        moved = torch.minimum(torch.maximum(shape - step, shape / 2), shape * 2)
        moved = moved.clamp(max=LARGEST_SHAPE)
        done = bool(((moved - shape).abs() <= 1e-10 * shape).all())
        shape = moved
        if done:
            break
    scale = unit * (shape * logs).exp().mean(1, keepdim=True) ** (1 / shape)
    return torch.cat([shape, scale, largest], 1)


def set_cover(covers: torch.Tensor) -> torch.Tensor:
    """Row numbers, ascending: greedily the row that covers most of what is left, the first of
    equals, until all columns are covered. The diagonal must be true."""
    import torch

    gain = covers.sum(1)
    left = torch.ones(len(covers), dtype=torch.bool, device=covers.device)
    chosen = []
    while bool(left.any()):
        best = int(gain.argmax())
        chosen.append(best)
        fresh = (covers[best] & left).nonzero()[:, 0]
        gain -= covers[:, fresh].sum(1)
        left[fresh] = False
    return torch.tensor(sorted(chosen), device=covers.device)


def released_cover(covers: torch.Tensor) -> torch.Tensor:
    """Row numbers, ascending, as the release chooses them until all columns are covered.

    Its n-th choice is the first row not chosen before in torch's unsorted list of the n rows that
    cover most of what is left; equals and order are torch's. The diagonal must be true.
    """
    import torch

    gain = covers.sum(1)
    left = torch.ones(len(covers), dtype=torch.bool, device=covers.device)
    chosen: list[int] = []
    while bool(left.any()):
        best = torch.topk(gain, len(chosen) + 1, sorted=False).indices.tolist()
        chosen.append(next(row for row in best if row not in chosen))
        fresh = (covers[chosen[-1]] & left).nonzero()[:, 0]
        gain -= covers[:, fresh].sum(1)
        left[fresh] = False
    return torch.tensor(sorted(chosen), device=covers.device)
