"""Thresholds calibrated by examples that are held out in turn."""

import numpy as np
import polars as pl
import pytest

from storage.tensors import as_tensors
from tasks.predictors import find_predictor
from tasks.predictors.base import Examples, revive
from tasks.predictors.threshold import Threshold

CLASSES, WIDTH = 4, 6


def samples(size: int, seed: int) -> Examples:
    """So many rows of each of four Gaussian classes that overlap a little."""
    labels = np.repeat(np.arange(CLASSES), size)
    centers = 3 * np.random.default_rng(7).standard_normal((CLASSES, WIDTH))
    noise = np.random.default_rng([seed, 8]).standard_normal((len(labels), WIDTH))
    return Examples(centers[labels] + noise, pl.Series([f"class {label}" for label in labels]))


def fitted(
    train: Examples, valid: Examples | None = None, seed: int = 0, **settings: object
) -> Threshold:
    kind = find_predictor("threshold")
    predictor = kind(kind.resolve("small", settings), device="cpu")
    predictor.fit(train, valid, seed=[seed])
    assert isinstance(predictor, Threshold)
    return predictor


def test_every_example_is_held_out_once_but_a_label_never_whole() -> None:
    one = Examples(np.full((1, WIDTH), 50.0), pl.Series(["alone"]))
    train = samples(9, 0)
    both = Examples(
        np.vstack([one.features, train.features]), pl.concat([one.labels, train.labels])
    )
    predictor = fitted(both)
    assert len(predictor.folds) == 5 and len(predictor.held_out) == len(train)
    for label in range(1 + CLASSES):
        rows = predictor.share[predictor.owner == label]
        counts = np.bincount(rows[rows >= 0], minlength=5)
        assert counts.tolist() == [0] * 5 if len(rows) == 1 else sorted(counts) == [1, 2, 2, 2, 2]
    # Novelty of an example never comes from the example itself.
    assert predictor.held_out.min() > 0


def in_groups(size: int, each: int, seed: int) -> Examples:
    """Groups of `each` rows that share a shift, `size` rows a class; one class is of one group."""
    rows, labels = samples(size, seed), np.repeat(np.arange(CLASSES), size)
    groups = np.where(labels == 3, 3 * size // each, np.arange(len(labels)) // each)
    shift = 2 * np.random.default_rng([seed, 9]).standard_normal((groups.max() + 1, WIDTH))
    return Examples(rows.features + shift[groups], rows.labels, groups)


def test_examples_of_a_group_are_of_one_fold_and_labels_are_spread_over_all() -> None:
    train = in_groups(40, 4, 0)
    predictor, again = fitted(train), fitted(train)
    assert np.array_equal(predictor.share, again.share)
    for group in range(30):  # the examples are sorted by class already
        assert len(set(predictor.share[train.groups == group])) == 1
    for label in range(CLASSES):
        # Two of ten groups a fold; the class of one group is spread by single examples.
        assert np.bincount(predictor.share[predictor.owner == label]).tolist() == [8] * 5
    alone = Examples(train.features, train.labels, np.full(len(train), -1))
    assert sorted(np.bincount(fitted(alone).share)) == [32] * 5


def test_a_label_of_two_groups_is_never_left_out_whole() -> None:
    labels = np.repeat([0, 0, 1, 1, 1, 1], 6)
    groups = np.repeat([0, 1, 0, 1, 2, 3], 6)
    features = np.random.default_rng(0).standard_normal((36, WIDTH))
    train = Examples(features, pl.Series([f"class {label}" for label in labels]), groups)
    for seed in range(10):
        share = fitted(train, seed=seed, folds=2).share
        assert set(share[:6]) != set(share[6:12]) and set(share) == {0, 1}


def test_rows_of_new_groups_are_as_novel_as_examples_only_if_groups_are_held_out() -> None:
    shares = []
    for seed in range(10):
        train, test = in_groups(60, 6, 2 * seed), in_groups(60, 6, 2 * seed + 1)
        rows = test.features[:180]
        ways = (train, Examples(train.features, train.labels))
        values = [fitted(way, seed=seed)._p_values(rows) for way in ways]
        shares.append([(value <= 0.1).mean() for value in values])
    by_group, by_row = np.mean(shares, 0)
    assert by_group < 0.15 and by_row > 0.25


@pytest.mark.parametrize("score", ["nearest", "mahalanobis"])
@pytest.mark.parametrize("scaling", ["none", "whiten"])
def test_known_samples_are_as_novel_as_held_out_examples(score: str, scaling: str) -> None:
    """Their p-values are uniform: a tenth of them is below 0.1, and so on."""
    shares = []
    for seed in range(20):
        predictor = fitted(samples(15, 2 * seed), seed=seed, score=score, scaling=scaling)
        values = predictor._p_values(samples(100, 2 * seed + 1).features)
        shares.append([(values <= limit).mean() for limit in (0.1, 0.3, 0.5, 0.9)])
    np.testing.assert_allclose(np.mean(shares, 0), [0.1, 0.3, 0.5, 0.9], atol=0.05)


def test_validation_samples_calibrate_where_there_are_any() -> None:
    train, valid = samples(20, 0), samples(10, 1)
    predictor = fitted(train, valid)
    assert predictor.folds == [predictor.whole] and len(predictor.held_out) == len(valid)
    np.testing.assert_array_equal(np.sort(predictor.novelty(valid.features)), predictor.held_out)


@pytest.mark.parametrize("scaling", ["robust", "whiten"])
def test_one_that_was_saved_gives_the_same_bits(scaling: str) -> None:
    predictor = fitted(samples(12, 0), scaling=scaling)
    state, rows = as_tensors(predictor.state()), samples(20, 1).features
    again = revive(Threshold, predictor.header(), state, device="cpu")
    assert np.array_equal(again.novelty(rows), predictor.novelty(rows))
    assert np.array_equal(again.predict(rows)[1], predictor.predict(rows)[1])


def test_labels_of_unknown_samples_are_wanted_first() -> None:
    predictor = fitted(samples(30, 0))
    known, novel = samples(10, 1).features, np.full((5, WIDTH), 20.0)
    order = predictor.feedback_order(np.vstack([known, novel]), seed=[0])
    unknown = predictor.predict(np.vstack([known, novel]))[1].argmax(1) == 0
    assert set(range(40, 45)) <= set(np.flatnonzero(unknown))
    assert set(order[: unknown.sum()]) == set(np.flatnonzero(unknown))
