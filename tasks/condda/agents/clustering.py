"""Clustering agent: detection as the threshold agent, and classes discovered round by round.

Unknown rows are gathered from the row on at which the world is declared changed. After each round
all of them are clustered: FINCH's finest partition, then clusters merged by average linkage of
their means up to a height. The height is learned: the one at which the same procedure, on the
examples, comes closest (adjusted Rand index) to the known classes. So new classes are as wide as
known ones. Once a class is discovered, rows below the threshold that are nearer to one of its rows
than to any example are taken into it as well; they are not gathered.

A cluster of enough rows gets a column of its own. Columns are stable (CONDDA rule 1, D clusters):
a cluster goes on in the column with which it shares most rows, a new one is appended until there
are `max_novel_classes`, and a column never gets another meaning; one whose cluster was merged into
another is empty until the cluster comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.condda.agents.base import TestInfo, Training
from tasks.condda.agents.threshold import Look, ThresholdAgent, ThresholdSettings, distances
from tasks.learning.finch import finch

# Examples that the height is learned on, and heights tried, at most.
CALIBRATION_ROWS = 2000
CALIBRATION_HEIGHTS = 200
# Share of examples that are no farther from the mean of their nearest neighbours than is usual.
USUAL = 0.95


class ClusteringSettings(ThresholdSettings):
    """How unknown rows become classes."""

    min_cluster: int = Field(4, ge=1)
    """Rows from which a cluster gets a column ..."""
    min_share: float = Field(0.05, ge=0, lt=1)
    """... if they are also this share of the rows gathered; fewer are outliers."""
    pool: int = Field(4000, ge=2)
    """Unknown rows that are kept, the oldest go first."""


class ClusteringAgent(ThresholdAgent):
    name: ClassVar[str] = "clustering"
    configuration: ClassVar[type[Settings]] = ClusteringSettings

    def fit(self, training: Training) -> None:
        super().fit(training)
        assert self.space is not None
        self.merger = Merger(self.space.rows, self.labels, self.settings.seed)

    def start(self, test: TestInfo) -> None:
        super().start(test)
        self.pool = np.empty((0, self.told_rows.shape[1]))
        self.serials = np.empty(0, np.int64)
        self.gathered = 0
        self.columns: list[np.ndarray] = []
        self.centroids: list[np.ndarray | None] = []

    def characterize(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        look = self._look(features, ids)
        return self._discover(look, look.declared)

    def characterize_test(self, features: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """Clusters of all rows at once, then [all known, D clusters]."""
        self._start_anew()
        look = self._look(features, ids)
        first = len(ids) if self.declared_row is None else self.declared_row
        vectors = self._discover(look, np.arange(len(ids)) >= first)
        known = vectors[:, 1 : 1 + self.known].sum(1, keepdims=True)
        return np.hstack([known, vectors[:, 1 + self.known :]])

    def _start_anew(self) -> None:
        self.pool, self.serials = self.pool[:0], self.serials[:0]
        self.columns, self.centroids = [], []

    def _discover(self, look: Look, changed: np.ndarray) -> np.ndarray:
        """Vectors of the rows after those that are unknown, of the changed world, were gathered."""
        new = np.flatnonzero(self._unknown(look) & changed)
        self.pool = np.vstack([self.pool, look.rows[new]])[-self.settings.pool :]
        numbers = self.gathered + np.arange(len(new))
        self.serials = np.concatenate([self.serials, numbers])[-self.settings.pool :]
        self.gathered += len(new)
        column = np.full(len(look.ids), -1)
        if len(self.pool):
            column_of = self._assign(self.merger.clusters(self.pool))
            kept = min(len(new), len(self.pool))
            column[new[len(new) - kept :]] = column_of[len(self.pool) - kept :]
            self._adopt(look, column, column_of, np.flatnonzero(changed & ~self._unknown(look)))
        return self._vectors(look, self._novel_shares(look, column))

    def _adopt(
        self, look: Look, column: np.ndarray, column_of: np.ndarray, rows: np.ndarray
    ) -> None:
        """Put those of `rows` into a column that are nearer to a row of it than to an example."""
        assert self.space is not None
        inside = np.flatnonzero(column_of >= 0)
        if not len(inside) or not len(rows):
            return
        away = distances(look.rows[rows], self.pool[inside])
        near = away.min(1) < self.space.nearest(look.rows[rows])
        column[rows[near]] = column_of[inside[away[near].argmin(1)]]
        look.p_value[rows[near]] = self._least_p_value

    def _assign(self, clusters: np.ndarray) -> np.ndarray:
        """The column of each gathered row, -1 for none; columns and centroids are renewed."""
        sizes = np.bincount(clusters)
        least = max(self.settings.min_cluster, self.settings.min_share * len(clusters))
        large = np.flatnonzero(sizes >= least)
        matched = self._match(clusters, sizes, large)
        most = self.test.max_novel_classes
        # The largest first, of equals the one that began earlier: clusters are numbered so.
        for cluster in large[np.argsort(-sizes[large], kind="stable")]:
            if cluster not in matched and (most is None or len(self.columns) < most):
                matched[int(cluster)] = len(self.columns)
                self.columns.append(np.empty(0, np.int64))
        self.centroids = [None] * len(self.columns)
        column_of = np.full(len(clusters), -1)
        for cluster, column in matched.items():
            inside = clusters == cluster
            column_of[inside] = column
            self.columns[column] = self.serials[inside]
            self.centroids[column] = self.pool[inside].mean(0)
        return column_of

    def _match(self, clusters: np.ndarray, sizes: np.ndarray, large: np.ndarray) -> dict[int, int]:
        """Cluster to column where they share at least half of the smaller one's rows."""
        from scipy.optimize import linear_sum_assignment

        members = [np.isin(self.serials, column) for column in self.columns]
        if not members or not len(large):
            return {}
        shared = np.stack([np.bincount(clusters[m], minlength=len(sizes))[large] for m in members])
        smaller = np.minimum(np.array([m.sum() for m in members])[:, None], sizes[large])
        shared = np.where(2 * shared >= smaller, shared, 0)
        pairs = zip(*linear_sum_assignment(shared, maximize=True), strict=True)
        return {int(large[place]): int(column) for column, place in pairs if shared[column, place]}

    def _novel_shares(self, look: Look, column: np.ndarray) -> np.ndarray:
        """(N, 1 + D): unknown rows all in their column or in `unknown`; for others, who knows.

        Rows that are not unknown get what the distances to the centroids say.
        """
        shares = np.zeros((len(column), 1 + len(self.columns)))
        living = [place for place, centroid in enumerate(self.centroids) if centroid is not None]
        if living:
            centroids = np.stack([c for c in self.centroids if c is not None])
            away = (distances(look.rows, centroids) / self.merger.height) ** 2 / 2
            shares[:, 1 + np.array(living)] = np.exp(away.min(1, keepdims=True) - away) / 2
        inside = np.flatnonzero(column >= 0)
        shares[inside, 1 + column[inside]] = 1.0
        unknown = self._unknown(look)
        shares[~unknown, 0] = 0.5
        shares[unknown & (column < 0), 0] = 1.0
        return shares


class Merger:
    """Clusters as wide as the known classes are."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray, seed: int) -> None:
        from sklearn.metrics import adjusted_rand_score

        if len(rows) > CALIBRATION_ROWS:
            drawn = np.random.default_rng([seed, 1]).choice(len(rows), CALIBRATION_ROWS, False)
            rows, labels = rows[np.sort(drawn)], labels[np.sort(drawn)]
        self.radius, self.height = np.inf, np.inf
        fine, means = _finest(rows)
        away = np.linalg.norm(rows - means[fine], axis=1)
        self.radius = float(np.quantile(away[_pure(fine, labels)], USUAL)) or np.inf
        fine, means = _finest(rows, self.radius)
        if len(means) == 1:
            self.height = 2 * self.radius
            return
        tree = _tree(means)
        merges = tree[:, 2]
        if len(np.unique(labels)) == 1:
            self.height = float(merges[-1])
            return
        # Cutting between two merges: after merge i and before merge i + 1.
        ends = np.append(merges[1:], merges[-1])
        tried = np.unique(np.linspace(0, len(merges) - 1, CALIBRATION_HEIGHTS).astype(int))
        heights = (merges[tried] + ends[tried]) / 2
        found = [adjusted_rand_score(labels, _cut(tree, height)[fine]) for height in heights]
        self.height = float(heights[int(np.argmax(found))])

    def clusters(self, rows: np.ndarray) -> np.ndarray:
        """Cluster of each row, numbered in the order of their first rows."""
        fine, means = _finest(rows, self.radius)
        if len(means) > 1:
            fine = _cut(_tree(means), self.height)[fine]
        _, first, inverse = np.unique(fine, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[inverse]


def _pure(clusters: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether all rows of a row's cluster have one label; all rows if there is no such cluster."""
    low, high = (np.full(clusters.max() + 1, fill) for fill in (labels.max(), labels.min()))
    np.minimum.at(low, clusters, labels)
    np.maximum.at(high, clusters, labels)
    pure = (low == high)[clusters]
    return pure if pure.any() else ~pure


def _finest(rows: np.ndarray, radius: float = np.inf) -> tuple[np.ndarray, np.ndarray]:
    """FINCH's finest clusters and their means; rows beyond `radius` of their mean stand alone.

    FINCH links every row to its nearest one, however far that is.
    """
    clusters = finch(rows)[:, 0]
    means = _means(rows, clusters)
    alone = np.linalg.norm(rows - means[clusters], axis=1) > radius
    clusters = np.where(alone, len(means) + np.cumsum(alone), clusters)
    _, clusters = np.unique(clusters, return_inverse=True)
    return clusters, _means(rows, clusters)


def _means(rows: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    order = np.argsort(clusters, kind="stable")
    starts = np.flatnonzero(np.diff(clusters[order], prepend=-1))
    return np.add.reduceat(rows[order], starts) / np.bincount(clusters)[:, None]


def _tree(means: np.ndarray) -> np.ndarray:
    from scipy.cluster.hierarchy import linkage

    return linkage(means, "average")


def _cut(tree: np.ndarray, height: float) -> np.ndarray:
    from scipy.cluster.hierarchy import fcluster

    return fcluster(tree, height, "distance") - 1
