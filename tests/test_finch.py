"""FINCH against its definition with full matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import cosine_distances

from schemas.errors import ConfigError
from tasks.learning import neighbours
from tasks.learning.finch import finch, first_neighbours
from tasks.learning.samples import SomeRows


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_definition(features: np.ndarray) -> np.ndarray:
    """The paper's adjacency (A + I)(A + I)^T, dense, step by step."""

    def step(rows: np.ndarray) -> np.ndarray:
        distance = cosine_distances(rows)
        np.fill_diagonal(distance, np.inf)
        adjacency = np.eye(len(rows))
        adjacency[np.arange(len(rows)), distance.argmin(1)] = 1
        return connected_components(adjacency @ adjacency.T)[1]

    partitions = [step(features)]
    while partitions[-1].max() > 0:
        latest = partitions[-1]
        means = np.stack([features[latest == c].mean(0) for c in range(latest.max() + 1)])
        merged = step(means)[latest]
        before, after = latest.max() + 1, merged.max() + 1
        if after in (1, before):
            break
        partitions.append(merged)
        if before - after == 1:
            break
    return np.stack(partitions, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 150), st.integers(2, 12), st.integers(0, 2**20))
def test_equals_the_definition(count, width, seed):
    features = np.random.default_rng(seed).normal(size=(count, width))
    np.testing.assert_array_equal(finch(features), by_definition(features))


@pytest.mark.parametrize("elements", [40, 300, 10_000])
def test_neither_the_size_of_a_block_nor_where_rows_lie_changes_anything(elements, monkeypatch):
    features = np.random.default_rng(1).normal(size=(200, 8))
    whole = finch(features)
    monkeypatch.setattr(neighbours, "_BLOCK", elements)
    monkeypatch.setattr("tasks.learning.finch.BLOCK_ELEMENTS", elements)
    np.testing.assert_array_equal(finch(features), whole)
    np.testing.assert_array_equal(finch(SomeRows(features[::-1], np.arange(200)[::-1])), whole)


def test_every_partition_is_coarser_than_the_one_before():
    partitions = finch(np.random.default_rng(2).normal(size=(500, 6)))
    assert partitions.shape[1] >= 2
    for fine, coarse in zip(partitions.T[:-1], partitions.T[1:], strict=True):
        assert coarse.max() < fine.max()
        pairs = np.unique(np.stack([fine, coarse]), axis=1)
        assert pairs.shape[1] == fine.max() + 1


def test_finds_separate_groups():
    random = np.random.default_rng(3)
    truth = np.repeat(np.arange(5), 40)
    features = 10 * np.eye(5)[truth] + random.normal(size=(200, 5)) * 0.1
    partitions = finch(features)
    assert adjusted_rand_score(truth, partitions[:, -1]) == 1.0


def test_few_rows():
    assert finch(np.ones((1, 3))).tolist() == [[0]]
    assert finch(np.eye(2)).tolist() == [[0], [0]]
    assert finch(np.zeros((3, 2))).shape == (3, 1)


def test_numbers_follow_first_appearance():
    partitions = finch(np.random.default_rng(4).normal(size=(80, 4)))
    for partition in partitions.T:
        _, first = np.unique(partition, return_index=True)
        assert (np.diff(first) > 0).all()


def test_of_equally_near_rows_the_first_is_the_neighbour():
    assert first_neighbours(np.array([[1.0, 0], [1, 0], [1, 0], [0, 1]])).tolist()[:3] == [1, 0, 0]


def test_wrong_features():
    with pytest.raises(ConfigError, match="expected"):
        finch(np.zeros((0, 3)))
    with pytest.raises(ConfigError, match="finite"):
        finch(np.full((2, 2), np.nan))
