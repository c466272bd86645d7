"""The extreme value machine: Weibull fits, set cover, tails."""

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import weibull_min

from schemas.errors import ConfigError
from tasks.predictors import evm
from tasks.predictors.base import Examples
from tasks.predictors.evm import (
    LARGEST_SHAPE,
    Evm,
    belonging,
    fit_weibull,
    released_cover,
    set_cover,
)
from tests.predictors import examples, samples


def changed(**values) -> Evm:
    small = Evm.resolve("small")
    return Evm(type(small).model_validate({**small.model_dump(), **values}), device="cpu")


def test_numbers_of_the_paper():
    paper = Evm.resolve("paper")
    assert (paper.tail_size, paper.tail_rule, paper.cover_threshold) == (100, "absolute", 0.7)
    assert (paper.distance_multiplier, paper.tolerance) == (1.0, 1e-5)
    assert paper.cover_rule == "paper"
    assert Evm.resolve("released") == Evm.resolve(
        "paper", {"tail_rule": "released", "cover_rule": "released"}
    )


# ---------------------------------------------------------------- Weibull


def test_fits_equal_scipy():
    random = np.random.default_rng(0)
    tails = random.uniform(0.2, 1.0, (6, 50)) ** np.arange(1, 7)[:, None]
    fits = fit_weibull(torch.tensor(tails)).numpy()
    for row, (shape, scale, largest) in zip(tails, fits, strict=True):
        assert largest == row.max()
        x = 1 + largest - row
        by_scipy = weibull_min.fit(x, floc=0)
        assert weibull_min.nnlf((shape, 0, scale), x) <= weibull_min.nnlf(by_scipy, x) + 1e-6
        assert (shape, scale) == pytest.approx((by_scipy[0], by_scipy[2]), rel=1e-2)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**20), st.integers(2, 60), st.floats(1e-6, 1.0))
def test_the_slope_of_the_likelihood_is_zero(seed, size, spread):
    tails = np.random.default_rng(seed).uniform(0.5, 0.5 + spread, (4, size))
    shape, scale, largest = fit_weibull(torch.tensor(tails)).numpy().T
    x = 1 + largest[:, None] - tails
    power = (x / scale[:, None]) ** shape[:, None]
    np.testing.assert_allclose(power.mean(1), 1, rtol=1e-8)
    slope = (power * np.log(x)).sum(1) / power.sum(1) - np.log(x).mean(1) - 1 / shape
    inside = shape < LARGEST_SHAPE
    assert np.abs(slope[inside]).max(initial=0) < 1e-8
    assert (slope[~inside] < 1e-8).all()


def test_equal_distances_give_a_step():
    fits = fit_weibull(torch.full((1, 10), 0.4, dtype=torch.float64))
    near, far = belonging(torch.tensor([[0.39, 0.41]]), fits)[0].tolist()
    assert near == pytest.approx(1) and far == pytest.approx(0, abs=1e-12)


def test_belonging_falls_with_distance():
    tails = np.random.default_rng(1).uniform(0.3, 0.9, (1, 40))
    distances = torch.linspace(0, 2, 50)[None]
    found = belonging(distances, fit_weibull(torch.tensor(tails)))[0].numpy()
    assert (np.diff(found) <= 0).all() and found[0] > 0.99 and found[-1] == 0


# ---------------------------------------------------------------- cover


def test_greedy_cover_of_a_small_case():
    covers = torch.eye(6, dtype=torch.bool)
    covers[0, [1, 2]] = True
    covers[3, [2, 4]] = True
    covers[4, [3]] = True
    assert set_cover(covers).tolist() == [0, 3, 5]
    assert set_cover(torch.ones(4, 4, dtype=torch.bool)).tolist() == [0]
    assert set_cover(torch.eye(3, dtype=torch.bool)).tolist() == [0, 1, 2]


@settings(deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 25))
def test_cover_is_complete_and_greedy(seed, size):
    random = np.random.default_rng(seed)
    covers = random.random((size, size)) < 0.2
    np.fill_diagonal(covers, True)
    chosen, left = [], np.ones(size, bool)
    while left.any():
        best = int(covers[:, left].sum(1).argmax())
        chosen.append(best)
        left &= ~covers[best]
    assert set_cover(torch.tensor(covers)).tolist() == sorted(chosen)
    assert covers[chosen].any(0).all()


def test_a_vector_covers_by_its_own_distribution():
    rows = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tails = torch.tensor([[0.8, 0.9, 1.0], [0.05, 0.06, 0.07]], dtype=torch.float64)
    covers = changed()._covers(rows, fit_weibull(tails))
    assert covers.tolist() == [[True, True], [False, True]]


def test_the_released_cover_is_complete_and_may_take_what_covers_less():
    covers = torch.eye(6, dtype=torch.bool)
    covers[0, [1, 2]] = True
    covers[3, [2, 4]] = True
    chosen = released_cover(covers)
    assert covers[chosen].any(0).all() and chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) >= len(set_cover(covers))
    assert len(released_cover(torch.ones(4, 4, dtype=torch.bool))) == 1
    assert released_cover(torch.eye(3, dtype=torch.bool)).tolist() == [0, 1, 2]


# What the release keeps and says of points made by a formula: run there, on a CPU.
RELEASED_VECTORS = [2, 6, 12, 13, 14, 16, 23, 26, 28, 31, 33, 43, 45, 47, 59]
RELEASED_PROBABILITIES = [
    [0.000876, 0.737832, 0.228551, 0.032741],
    [0.000756, 0.491292, 0.503378, 0.004574],
    [0.003131, 0.654319, 0.276214, 0.066336],
]


def formula_points(rows: int, per_class: int, spread: float, bend: float, shift: str) -> np.ndarray:
    places = np.arange(rows * 5.0).reshape(rows, 5)
    wave = np.sin(places**2 * bend + (places if shift == "place" else 2))
    classes = np.arange(rows)[:, None] // per_class
    return (np.cos(classes * 2.1 + np.arange(5) * 1.3) + spread * wave).astype(np.float32)


def test_it_keeps_and_predicts_what_the_release_does():
    features = formula_points(60, 20, 1.2, 0.37, "place")
    train = Examples(features, pl.Series(np.repeat(["a", "b", "c"], 20)))
    asked = formula_points(60, 10, 0.6, 0.53, "two")[[0, 7, 31]]
    found = {}
    for rule in ("released", "paper"):
        values = {"tail_size": 4, "distance_multiplier": 1.0, "cover_rule": rule}
        predictor = Evm(Evm.resolve("released", values), device="cpu")
        predictor.fit(train)
        near = predictor._unit(features) @ predictor.vectors.T
        found[rule] = near.argmax(0).tolist(), predictor.predict(asked).probabilities
    assert found["released"][0] == RELEASED_VECTORS
    np.testing.assert_allclose(found["released"][1], RELEASED_PROBABILITIES, atol=1e-6)
    assert len(found["paper"][0]) == 6
    assert np.abs(found["paper"][1] - RELEASED_PROBABILITIES).max() > 0.01


# ---------------------------------------------------------------- machine


def test_tails_are_the_nearest_samples_of_other_labels(monkeypatch):
    train = examples("abc", 20, 1)
    seen = []

    def watched(tails):
        seen.append(tails.clone())
        return fit_weibull(tails)

    monkeypatch.setattr(evm, "fit_weibull", watched)
    unit = train.features / np.linalg.norm(train.features, axis=1, keepdims=True)
    distance = 1 - unit @ unit.T
    for rule, width in (("absolute", 7), ("released", 21)):
        seen.clear()
        changed(tail_size=7, tail_rule=rule, distance_multiplier=0.5).fit(train)
        assert [tuple(tails.shape) for tails in seen] == [(20, width)] * 3
        for name, tails in zip("abc", seen, strict=True):
            mine = (train.labels == name).to_numpy()
            expected = np.sort(distance[mine][:, ~mine], 1)[:, :width] / 2
            np.testing.assert_allclose(np.sort(tails.numpy(), 1), expected, atol=1e-6)


def test_blocks_change_nothing(monkeypatch):
    features = samples("abcxy", 15, 2)[0]
    whole = changed()
    whole.fit(examples("abc", 20, 1))
    expected = whole.predict(features).probabilities
    for elements in (50, 333):
        monkeypatch.setattr(evm, "BLOCK_ELEMENTS", elements)
        cut = changed()
        cut.fit(examples("abc", 20, 1))
        assert len(cut.vectors) == len(whole.vectors)
        np.testing.assert_allclose(cut.predict(features).probabilities, expected, atol=1e-5)


def test_unknown_is_what_the_best_label_leaves():
    predictor = changed()
    predictor.fit(examples("abc", 20, 1))
    features = samples("abcxy", 15, 2)[0]
    unit = predictor._unit(features)
    inside = belonging(1 - predictor.vectors @ unit.T, predictor.weibull).numpy()
    owner = predictor.owner.numpy()
    best = np.stack([inside[owner == label].max(0) for label in range(3)], 1)
    every = np.column_stack([1 - best.max(1), best])
    np.testing.assert_allclose(
        predictor.predict(features).probabilities, every / every.sum(1, keepdims=True), atol=1e-6
    )


def test_a_high_cover_threshold_keeps_more_vectors():
    few, many = changed(cover_threshold=0.3), changed(cover_threshold=1.0, distance_multiplier=0.1)
    for predictor in (few, many):
        predictor.fit(examples("abc", 20, 1))
    assert 3 <= len(few.vectors) < len(many.vectors) <= 60


def test_what_cannot_be_fitted():
    with pytest.raises(ConfigError, match="at least two"):
        changed().fit(examples("a", 20, 1))
    features, labels = samples("ab", 5, 1)
    features[3] = 0
    with pytest.raises(ConfigError, match="zeros"):
        changed().fit(Examples(features, labels))
    one_each = Examples(np.eye(3), pl.Series(["a", "b", "c"]))
    predictor = changed()
    predictor.fit(one_each)
    assert predictor.predict(np.eye(3)).probabilities.argmax(1).tolist() == [1, 2, 3]
