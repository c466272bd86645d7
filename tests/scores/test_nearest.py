"""Nearest neighbours: equal to all pairs in float64, on easy and on hostile features."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, NoveltyError
from tasks.learning import neighbours as module
from tasks.learning.neighbours import Metric, Neighbours, nearest

METRICS: tuple[Metric, ...] = ("euclidean", "cosine")


def all_pairs(queries: np.ndarray, train: np.ndarray, k: int, metric: Metric) -> Neighbours:
    """In float64, without shortcuts; ties to the lower number."""
    q, t = queries.astype(np.float64), train.astype(np.float64)
    if metric == "euclidean":
        distance = np.sqrt(np.square(q[:, None] - t[None]).sum(2))
    else:
        lengths = [np.sqrt(np.square(rows).sum(1)) for rows in (q, t)]
        lengths = [np.where(length > 0, length, 1) for length in lengths]
        products = (q[:, None] * t[None]).sum(2)
        distance = 1 - np.clip(products / (lengths[0][:, None] * lengths[1]), -1, 1)
    index = np.argsort(distance, axis=1, kind="stable")[:, :k]
    return Neighbours(np.take_along_axis(distance, index, 1), index)


def random_features(kind: str, rows: int, seed: int) -> np.ndarray:
    random = np.random.default_rng([seed, rows])
    features = random.normal(size=(rows, 24))
    match kind:
        case "far from the origin":
            features = features * 1e-3 + 1e4
        case "one outlier":
            features[0] *= 1e6
        case "two tight clumps":
            clumps = np.random.default_rng(0).normal(size=(2, 24))
            features = clumps[random.integers(0, 2, rows)] + features * 5e-7
        case "duplicates":
            features = features[random.integers(0, 5, rows)]
        case "coarse grid":
            features = np.round(features)
        case "huge":
            features *= 1e30
        case "tiny":
            features *= 1e-30
        case "squares that underflow":
            features *= 1e-22
        case "some zero rows":
            features[::3] = 0
    return features.astype(np.float32)


KINDS = (
    *("gaussian", "far from the origin", "one outlier", "duplicates", "coarse grid", "huge"),
    *("tiny", "some zero rows", "two tight clumps", "squares that underflow"),
)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4])
def test_equal_to_all_pairs(kind: str, metric: Metric, k: int) -> None:
    train, queries = random_features(kind, 150, 0), random_features(kind, 90, 1)
    queries[:5] = train[10:15]
    found, expected = (
        nearest(queries, train, k=k, metric=metric),
        all_pairs(queries, train, k, metric),
    )
    assert np.array_equal(found.index, expected.index)
    assert np.array_equal(found.distance, expected.distance)
    assert found.distance.dtype == np.float64 and found.index.dtype == np.int64
    if metric == "euclidean":
        assert (found.distance[:5, 0] == 0).all()


@pytest.mark.parametrize("metric", METRICS)
def test_independent_of_order_blocks_threads_and_precision(
    metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, queries = random_features("gaussian", 500, 0), random_features("gaussian", 300, 1)
    whole = nearest(queries, train, k=3, metric=metric)

    def same(found: Neighbours, rows: np.ndarray | slice = slice(None)) -> None:
        assert np.array_equal(found.distance, whole.distance[rows])
        assert np.array_equal(found.index, whole.index[rows])

    order = np.random.default_rng(0).permutation(300)
    same(nearest(queries[order], train, k=3, metric=metric), order)
    moved = nearest(queries, train[::-1], k=3, metric=metric)
    same(Neighbours(moved.distance, 499 - moved.index))
    same(nearest(np.asfortranarray(queries), train, k=3, metric=metric))
    for block in (40, 700, 5000):
        monkeypatch.setattr(module, "_BLOCK", block)
        same(nearest(queries[:40], train, k=3, metric=metric), slice(40))
    monkeypatch.undo()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(2)
        same(nearest(queries, train, k=3, metric=metric))
        torch.set_float32_matmul_precision("medium")
        assert not module._Search(train, 3, metric).trusts_float32
        same(nearest(queries, train, k=3, metric=metric))
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def test_float32_products_leave_few_pairs() -> None:
    """The bound is tight enough: measuring again must not become the work."""
    train, queries = random_features("gaussian", 2000, 0), random_features("gaussian", 500, 1)
    search = module._Search(train, 1, "euclidean")
    row, _ = search._candidates(search._placed(queries, None, torch.float32), None)
    assert 500 <= len(row) < 550


def test_float64_products_are_made_of_unrounded_rows() -> None:
    """Else the bound of the second round would not hold."""
    train = random_features("gaussian", 50, 0)
    search = module._Search(train, 1, "euclidean")
    exact = train.astype(np.float64) - search.origin.astype(np.float64)
    assert np.array_equal(search._placed(train, None, torch.float64).numpy(), exact)


GRID = st.integers(-3, 3)


@given(
    st.lists(st.tuples(GRID, GRID, GRID), min_size=1, max_size=12),
    st.lists(st.tuples(GRID, GRID, GRID), min_size=1, max_size=12),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_ties_go_to_the_lower_number(queries: list, train: list, data: st.DataObject) -> None:
    q, t = np.array(queries, np.float32), np.array(train, np.float32)
    k = data.draw(st.integers(1, len(train)))
    found, expected = nearest(q, t, k=k), all_pairs(q, t, k, "euclidean")
    assert np.array_equal(found.index, expected.index)
    assert np.array_equal(found.distance, expected.distance)


def test_double_features_keep_their_digits() -> None:
    train = np.array([[1.0, 0.0], [1.0 + 1e-12, 0.0]])
    found = nearest(np.array([[1.0 + 9e-13, 0.0]]), train)
    assert found.index.tolist() == [[1]] and found.distance[0, 0] == pytest.approx(1e-13, rel=1e-2)


def test_no_queries() -> None:
    found = nearest(np.zeros((0, 3), np.float32), np.ones((2, 3), np.float32), k=2)
    assert found.distance.shape == found.index.shape == (0, 2) and found.index.dtype == np.int64


def test_mistakes_are_sentences() -> None:
    rows = np.ones((3, 2), np.float32)
    with pytest.raises(ConfigError, match="k = 4 of 3"):
        nearest(rows, rows, k=4)
    with pytest.raises(ConfigError, match="same width"):
        nearest(rows, rows[:, :1])
    with pytest.raises(ConfigError, match="metric 'l1'"):
        nearest(rows, rows, metric="l1")  # type: ignore[arg-type]
    with pytest.raises(NoveltyError, match="not finite"):
        nearest(rows * np.nan, rows)
