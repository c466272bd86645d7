"""Scaling that fits the features, classes as wide as known ones, names that last."""

import numpy as np
import polars as pl
import pytest

from tasks.predictors import find_predictor
from tasks.predictors.base import Examples
from tasks.predictors.clustering import Clustering

WIDTH = 8
CORNERS = 10.0 * np.eye(WIDTH)


def rows_of(classes: list[int], seed: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed)
    return CORNERS[classes] + draws.standard_normal((len(classes), WIDTH))


def fitted(features: np.ndarray, labels: np.ndarray, **settings: object) -> Clustering:
    kind = find_predictor("clustering")
    predictor = kind(kind.resolve("small", settings), device="cpu")
    predictor.fit(Examples(features, pl.Series([f"known {label}" for label in labels])))
    assert isinstance(predictor, Clustering)
    return predictor


@pytest.fixture
def predictor() -> Clustering:
    labels = np.repeat(np.arange(4), 40)
    return fitted(rows_of(labels.tolist()), labels)


def named(predictor: Clustering, features: np.ndarray) -> list[str]:
    labels, probabilities = predictor.predict(features)
    return [labels[column] for column in probabilities.argmax(1)]


@pytest.mark.parametrize("method", ["ward", "average", "finch", "gmm"])
def test_every_method_tells_classes_apart(method: str) -> None:
    labels = np.repeat(np.arange(4), 40)
    predictor = fitted(rows_of(labels.tolist()), labels, method=method)
    classes = [4] * 12 + [5] * 12 + [6] * 12
    rows = rows_of(classes, 1)
    predictor.discover(rows)
    found = np.array(named(predictor, rows)).reshape(3, 12)
    assert [len(set(names)) for names in found] == [1, 1, 1] and len(set(found[:, 0])) == 3
    assert all(name.startswith("unknown_") for name in found[:, 0])


@pytest.mark.parametrize("most", [None, 1])
def test_a_class_of_which_a_few_labels_were_learned_is_not_discovered_again(most) -> None:
    labels = np.repeat(np.arange(4), 40)
    rows, examples = rows_of([4] * 15 + [5] * 15, 1), rows_of([4, 4, 4], 2)
    names = [f"known {label}" for label in labels]
    predictor = fitted(rows_of(labels.tolist()), labels)
    predictor.discover(rows)
    assert predictor.living.sum() == 2
    train = np.vstack([rows_of(labels.tolist()), examples])
    predictor.fit(Examples(train, pl.Series([*names, *["told"] * 3])))
    predictor.discover(rows, most=most)
    assert predictor.living.sum() == 1
    assert set(named(predictor, rows)[15:]) == {f"unknown_{int(predictor.living.argmax())}"}
    assert set(named(predictor, rows)[:15]) <= {"told", "unknown"}


def test_known_classes_set_the_width_of_new_ones() -> None:
    """The same rows are one class where known classes are wide, and four where they are narrow."""
    labels = np.repeat(np.arange(4), 40)
    narrow = rows_of(labels.tolist())
    rows = rows_of((4 + labels).tolist(), 1)
    few = fitted(narrow, labels, scaling="none")
    few.discover(rows)
    assert few.living.sum() == 4
    wide = fitted(np.vstack([narrow, narrow + 1000]), np.repeat([0, 1], 160), scaling="none")
    wide.discover(rows + 500)
    assert wide.living.sum() == 1


def test_names_stay_through_growth_merge_absence_and_return(predictor: Clustering) -> None:
    first, second, third = (rows_of([label] * 10, label) for label in (4, 5, 6))
    predictor.discover(np.vstack([first, second]))
    one, two = named(predictor, np.vstack([first[:1], second[:1]]))
    assert {one, two} == {"unknown_0", "unknown_1"}
    # Another order, more rows, another class: the same names, and a new one at the end.
    predictor.discover(np.vstack([third, second, first]))
    assert named(predictor, np.vstack([first[:1], second[:1], third[:1]])) == [
        one,
        two,
        "unknown_2",
    ]
    # Absent: its column stays, without rows; on return, with other rows, it has its name.
    predictor.discover(np.vstack([second, third]))
    labels, shares = predictor.predict(second)
    assert labels[-3:] == ("unknown_0", "unknown_1", "unknown_2")
    assert (shares[:, labels.index(one)] == 0).all()
    predictor.discover(np.vstack([second, rows_of([4] * 10, 44), third]))
    assert named(predictor, first[:1]) == [one]


def test_no_more_names_than_there_may_be(predictor: Clustering) -> None:
    rows = rows_of([4] * 10 + [5] * 10 + [6] * 10, 3)
    predictor.discover(rows, most=2)
    assert predictor.predict(rows).labels[5:] == ("unknown_0", "unknown_1")
    predictor.discover(rows, most=0)
    assert len(predictor.living) == 2


def test_a_feature_that_hardly_varies_does_not_count_as_much() -> None:
    """Units differ a thousandfold: `auto` scales; nearly constant features: it does not."""
    labels = np.repeat(np.arange(4), 40)
    features = rows_of(labels.tolist())
    noise = np.random.default_rng(1).standard_normal((len(labels), 1))
    assert not np.allclose(fitted(np.hstack([features, 1e4 * noise]), labels).whole.space.matrix, 1)
    quiet = fitted(np.hstack([features, 1e-3 * np.repeat(noise, 60, axis=1)]), labels)
    assert quiet.whole.space.matrix.ndim == 2 or quiet.whole.space.matrix.max() < 10


def test_directions_count_where_lengths_tell_nothing() -> None:
    """Classes are directions and samples of any length: `auto` takes samples of length 1."""
    labels = np.repeat(np.arange(4), 40)
    length = np.random.default_rng(2).uniform(0.2, 5, (len(labels), 1))
    predictor = fitted(length * rows_of(labels.tolist()), labels)
    assert predictor.whole.space.unit
    assert np.allclose(np.linalg.norm(predictor.whole.rows, axis=1), 1)
    assert not predictor.whole.space.scaled(np.zeros((1, WIDTH))).any()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_how_many_are_called_unknown_is_learned_of_unlabelled_samples(
    predictor: Clustering, share: float
) -> None:
    """Of p-values, uniform for known samples and mostly below 0.3 for novel ones."""
    draws, gains = np.random.default_rng(3), []
    for _ in range(20):
        novel = draws.random(300) < share
        p_values = np.where(novel, 0.3 * draws.random(300), draws.random(300))
        error = predictor._learned_error(p_values)
        assert 0.05 <= error <= 0.5
        told = [((p_values <= limit) == novel).mean() for limit in (error, 0.05)]
        gains.append(told[0] - told[1])
    assert np.mean(gains) >= (0.1 if share >= 0.5 else -0.005)
    assert predictor._learned_error(np.empty(0)) == 0.05
