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
