"""Threshold predictor that discovers classes among what is unknown, with names that last.

Unlabelled samples tell how many of them are known: about twice those with a p-value above a half.
So `accepted_error` is raised to the limit by which most of these are told right, since many novel
ones lie close to known ones. All that are then unknown are clustered: by hierarchical linkage,
FINCH or Gaussian mixtures. The number of clusters is that of Ward linkage below a height, which is
learned: the one that tells pools of known labels, drawn, apart best (adjusted Rand index). So new
classes are as wide as known ones. Where the most that there may be is told, it is taken if the
heights of single labels allow about as many. Clusters of enough samples are classes, two where a
number is told. A few examples of labels that were learned since the first fit are clustered too, as
much of such a label is still unknown: the cluster that has most of them is no new class.

A class keeps its name: a cluster goes on under the name whose samples it has (or has neighbours of,
as near as known samples are to each other), one to one; others get a new name, or, where there are
as many as may be, one that has lost its cluster. A name whose cluster was merged or has left comes
back with it. A sample is of the class of its nearest clustered sample if it is unknown and near
enough, or nearer to it than to any example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.learning.finch import VERSION, finch
from tasks.predictors.base import UNKNOWN, Examples, Prediction
from tasks.predictors.threshold import Configuration as ThresholdConfiguration
from tasks.predictors.threshold import Threshold, blocks_of_distances

if TYPE_CHECKING:
    import torch

# Pools that heights are learned on: so many of 1 label, of 2, ... of 5, cut into 1 to 10 clusters.
POOLS, POOL_LABELS, MOST_CLUSTERS = 3, 5, 10
# Distance, in units of the median one to a nearest example, below which two samples are the same.
SAME = 1e-3
# Examples of each label learned since the first fit that are clustered beside unknown samples.
TAUGHT = 8


class Configuration(ThresholdConfiguration):
    method: Literal["ward", "average", "finch", "gmm"] = Field(
        "ward", description="How unknown samples are clustered: linkage, FINCH or mixtures."
    )
    min_cluster: int = Field(1, ge=1, description="Samples from which a cluster is a class ...")
    min_share: float = Field(
        0.05, ge=0, lt=1, description="... if they are also this share of all that are unknown."
    )
    pool: int = Field(1000, ge=2, description="Unknown samples that are clustered, the latest.")


class Clustering(Threshold):
    name: ClassVar[str] = "clustering"
    discovers: ClassVar[bool] = True
    configuration: ClassVar[type[Settings]] = Configuration
    first: int
    """Labels of the first fit."""
    seed: list[int]
    limits: dict[int, tuple[float, float]]
    """See `_limits`, by size of the pool."""
    members: np.ndarray
    """Features of samples of the discovered classes, each class as it was last seen."""
    member_of: np.ndarray
    """The class of each, as a place among all names."""
    living: np.ndarray
    """Whether the latest clusters have a class; the others wait to come back."""

    @classmethod
    def versions(cls, settings: Any) -> dict[str, int]:
        used = {"finch": VERSION} if settings.method == "finch" else {}
        return {**super().versions(settings), **used}

    def _fit(
        self,
        train: Examples,
        valid: Examples | None,
        *,
        before: tuple[str, ...],
        seed: Sequence[int],
    ) -> None:
        super()._fit(train, valid, before=before, seed=seed)
        if not before:
            self.first = len(self.known)
            self.members = np.empty((0, self.width))
            self.member_of, self.living = np.empty(0, np.int64), np.empty(0, bool)
        self.seed, self.limits = list(seed), {}

    def discover(self, features: np.ndarray, *, most: int | None = None) -> None:
        p_values = self._p_values(features)
        self.error = self._learned_error(p_values)
        unknown = features[p_values < self._limit][-self.settings.pool :]
        self._name(unknown, self._clusters(self.whole.space.scaled(unknown), most), most)

    def _learned_error(self, p_values: np.ndarray) -> float:
        """The share of known samples to call unknown so that most of these samples are told right.

        Of those that a limit makes unknown, the limit times `known` are wrongly so, the others
        rightly; both numbers are taken one standard deviation worse than they look.
        """
        least, size = float(self.settings.accepted_error), len(p_values)
        if not size:
            return least
        upper = float((p_values > 0.5).mean())
        known = min(1.0, 2 * (upper + np.sqrt(upper * (1 - upper) / size)))
        more = np.sort(p_values[(p_values > least) & (p_values <= 0.5)])
        limits = np.append(least, more)
        unknown = np.searchsorted(more, limits, side="right") / size
        gain = unknown - np.sqrt(unknown / size) - 2 * known * (limits - least)
        return float(limits[np.argmax(gain)])

    def _clusters(self, rows: np.ndarray, most: int | None) -> np.ndarray:
        """The cluster of each row, the largest first; -1 for those of too few rows, or of a label
        learned since the first fit."""
        if not len(rows):
            return np.empty(0, np.int64)
        examples, labels = self._taught()
        pool, taught = np.vstack([rows, examples]), np.unique(labels)
        height, single = self._limits(len(pool))
        height = height if most is None else min(height, single)
        count = 1 + int((_heights(pool) > height).sum())
        if most is not None and count >= most + len(taught) - 1:
            count = min(max(most, 1) + len(taught), len(pool))
        clusters, of_examples = np.split(self._partition(pool, count), [len(rows)])
        old = [np.bincount(of_examples[labels == label]).argmax() for label in taught]
        fresh = ~np.isin(clusters, old)
        _, first, members = np.unique(clusters[fresh], return_index=True, return_inverse=True)
        sizes = np.bincount(members)
        least = max(self.settings.min_cluster, self.settings.min_share * len(rows))
        least = least if most is None else 2
        # Of equally large ones the one that began earlier.
        order = np.lexsort((first, -sizes))
        place = np.where(sizes[order] >= least, np.arange(len(order)), -1)
        numbers = np.full(len(rows), -1)
        numbers[fresh] = place[np.argsort(order)][members]
        return numbers

    def _taught(self) -> tuple[np.ndarray, np.ndarray]:
        """Scaled examples of labels learned since the first fit, some of each, and their labels."""
        rank = np.arange(len(self.owner)) - np.searchsorted(self.owner, self.owner)
        taught = (self.owner >= self.first) & (rank < TAUGHT)
        return self.whole.rows[taught], self.owner[taught]

    def _partition(self, rows: np.ndarray, count: int) -> np.ndarray:
        if count == 1:
            return np.zeros(len(rows), np.int64)
        if self.settings.method == "finch":
            partitions = finch(rows).T
            return min(partitions, key=lambda found: abs(int(found.max()) + 1 - count))
        if self.settings.method == "gmm":
            from sklearn.mixture import GaussianMixture

            mixture = GaussianMixture(count, covariance_type="diag", random_state=0)
            return mixture.fit_predict(rows)
        from scipy.cluster.hierarchy import fcluster, linkage

        return fcluster(linkage(rows, self.settings.method), count, "maxclust")

    def _limits(self, size: int) -> tuple[float, float]:
        """Height between two classes in a pool of about this size, and that of one label alone."""
        size = 1 << (min(max(size, 8), len(self.owner)).bit_length() - 1)
        if size not in self.limits:
            self.limits[size] = self._learned_limits(size)
        return self.limits[size]

    def _learned_limits(self, size: int) -> tuple[float, float]:
        """By pools of one, two and more known labels, drawn; of one label the median height."""
        from scipy.cluster.hierarchy import fcluster, linkage
        from sklearn.metrics import adjusted_rand_score

        draws = np.random.default_rng([*self.seed, size])
        labels, trials, tops = np.unique(self.owner), [], []
        for number in range(1, min(len(labels), POOL_LABELS) + 1):
            for _ in range(POOLS):
                parts = [
                    draws.permutation(np.flatnonzero(self.owner == label))[: -(-size // number)]
                    for label in draws.choice(labels, number, replace=False)
                ]
                pool = np.concatenate(parts)
                if len(pool) < 3:
                    continue
                tree, truth = linkage(self.whole.rows[pool], "ward"), self.owner[pool]
                likeness = [
                    adjusted_rand_score(truth, fcluster(tree, count, "maxclust"))
                    for count in range(1, min(MOST_CLUSTERS, len(pool)) + 1)
                ]
                trials.append((tree[:, 2] / np.sqrt(len(pool)), likeness))
                if number == 1:
                    tops.append(trials[-1][0][-1])
        tried = np.unique(np.concatenate([[0.0], *(heights for heights, _ in trials)]))[::-1]
        gained = [
            sum(found[min((heights > h).sum(), len(found) - 1)] for heights, found in trials)
            for h in tried
        ]
        height = float(tried[int(np.argmax(gained))]) if trials else 0.0
        return height, float(np.median(tops)) if tops else height

    def _away(self, features: np.ndarray, names: Sequence[int] | np.ndarray) -> np.ndarray:
        """(N, all names): distance to the nearest sample of each of `names`, else infinite."""
        rows, members = map(self.whole.space.scaled, (features, self.members))
        away = np.full((len(rows), len(self.living)), np.inf)
        for name in names:
            for place, block in blocks_of_distances(rows, members[self.member_of == name]):
                away[place, name] = block.min(1)
        return away

    def _name(self, features: np.ndarray, clusters: np.ndarray, most: int | None) -> None:
        """Give each cluster the name it had, or a new one while there are fewer than `most`."""
        from scipy.optimize import linear_sum_assignment

        names, count = len(self.living), int(clusters.max(initial=-1)) + 1
        away = self._away(features, range(names))
        nearest = away.min(1, keepdims=True, initial=np.inf)
        # A sample that was in two classes, one after the other, speaks for both.
        near = (away <= nearest + SAME * self.middle) & (nearest <= self.reach)
        shared = np.array(
            [[near[clusters == cluster, name].sum() for cluster in range(count)]
             for name in range(names)]
        ).reshape(names, count)  # fmt: skip
        sizes = np.bincount(clusters[clusters >= 0], minlength=count)
        before = np.bincount(self.member_of, minlength=names)
        shared = np.where(2 * shared >= np.minimum(sizes, before[:, None]), shared, 0)
        pairs = zip(*linear_sum_assignment(shared, maximize=True), strict=True)
        name_of = {int(cluster): int(name) for name, cluster in pairs if shared[name, cluster]}
        left = [name for name in range(names) if name not in name_of.values()]
        for cluster in range(count):
            if cluster in name_of:
                continue
            if most is None or names < most:
                name_of[cluster] = names
                names += 1
            elif left:
                name_of[cluster] = left.pop(0)
        self.living = np.isin(np.arange(names), list(name_of.values()))
        kept = ~self.living[self.member_of]
        found = np.isin(clusters, list(name_of))
        named = np.array([name_of[int(c)] for c in clusters[found]], np.int64)
        self.members = np.vstack([self.members[kept], features[found]])
        self.member_of = np.concatenate([self.member_of[kept], named])

    def _predict(self, features: np.ndarray) -> Prediction:
        far = self.whole.label_distances(features, len(self.known))
        p_values = self._p_values(features)
        away = self._away(features, np.flatnonzero(self.living))
        nearest = away.min(1, initial=np.inf)
        unknown = p_values < self._limit
        inside = np.where(unknown, nearest <= self.reach, nearest < far.min(1))
        p_values[inside] = 1 / (1 + len(self.held_out))
        # Classes by how near they are; `unknown` on top where the row is in none of them.
        least = np.where(np.isfinite(nearest), nearest, 0)[:, None]
        fall = np.exp((least**2 - away**2) / (2 * self.middle**2))
        weights = np.hstack([np.ones((len(fall), 1)), fall / 2])
        weights[inside] = np.hstack([np.full((len(fall), 1), 0.5), fall])[inside]
        names = [f"{UNKNOWN}_{number}" for number in range(len(self.living))]
        return self._shared(far, p_values, weights, names)

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        found = {"members": self.members, "member_of": self.member_of, "living": self.living}
        return {**super().state(), **found}

    def record(self) -> dict[str, Any]:
        return {**super().record(), "seed": self.seed, "first": self.first}

    def restore(self, state: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        super().restore(state, record)
        self.members, self.member_of, self.living = (
            state[name].cpu().numpy() for name in ("members", "member_of", "living")
        )
        self.seed, self.limits = list(record["seed"]), {}
        self.first = int(record["first"])


def _heights(rows: np.ndarray) -> np.ndarray:
    """Heights of Ward linkage, by the root of the number of rows, so that pools can be compared."""
    from scipy.cluster.hierarchy import linkage

    return linkage(rows, "ward")[:, 2] / np.sqrt(len(rows)) if len(rows) > 1 else np.empty(0)
