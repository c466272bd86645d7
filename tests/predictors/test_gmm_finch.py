"""GMM-FINCH: densities against torch, the threshold rule, discovered clusters."""

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from tasks.predictors import gmm_finch
from tasks.predictors.base import Examples
from tasks.predictors.gmm_finch import GmmFinch, Mixture
from tests.predictors import examples, named, samples


def changed(preset: str = "small", **values) -> GmmFinch:
    settings = GmmFinch.resolve(preset)
    changed_settings = type(settings).model_validate({**settings.model_dump(), **values})
    return GmmFinch(changed_settings, device="cpu")


def test_numbers_of_the_paper():
    paper = GmmFinch.resolve("paper")
    assert (paper.level, paper.precision, paper.epsilon) == (-1, "float64", 1e-12)
    assert (paper.accepted_error, paper.batch_size) == (0.05, 8192)
    assert GmmFinch.resolve("released").names == "restart"


# ---------------------------------------------------------------- densities


def parts(width: int, seed: int = 0) -> list[tuple[int, np.ndarray]]:
    """Owners 0, 1 and 3 with components of one, few, enough and equal samples."""
    random = np.random.default_rng(seed)
    sizes = [(0, 1), (0, 3), (0, width * 4), (1, width), (3, width + 5), (3, 2)]
    made = [
        (owner, random.normal(size=(size, width)) @ random.normal(size=(width, width)) + 3 * owner)
        for owner, size in sizes
    ]
    return [*made, (3, np.ones((4, width)))]


def expected(components, epsilon: float, x: np.ndarray, owners: int) -> np.ndarray:
    """The rule of the paper with full matrices."""
    found: list[list[torch.Tensor]] = [[] for _ in range(owners)]
    for owner, rows in components:
        rows = torch.tensor(rows)
        width = rows.shape[1]
        cov = rows.T.cov() if len(rows) > 1 else torch.zeros(width, width, dtype=torch.float64)
        cov = torch.atleast_2d(cov)
        if torch.linalg.matrix_rank(cov) < width:
            cov = cov + epsilon * torch.eye(width, dtype=torch.float64)
        normal = torch.distributions.MultivariateNormal(rows.mean(0), cov)
        found[owner].append(normal.log_prob(torch.tensor(x)))
    empty = torch.full((len(x),), -torch.inf, dtype=torch.float64)
    return np.stack(
        [torch.stack(f).exp().mean(0).log().numpy() if f else empty.numpy() for f in found], 1
    )


@pytest.mark.parametrize("width", [1, 2, 5])
def test_densities_equal_full_covariances(width):
    made = parts(width)
    center = np.full(width, 1.5)
    mixture = Mixture.fit(made, center, 0.5, torch.float64, "cpu")
    x = np.random.default_rng(1).normal(size=(40, width)) * 2
    np.testing.assert_allclose(
        mixture.log_density(x, 5).numpy(), expected(made, 0.5, x, 5), rtol=1e-7, atol=1e-7
    )


def test_chunks_change_nothing(monkeypatch):
    mixture = Mixture.fit(parts(6), np.zeros(6), 0.1, torch.float64, "cpu")
    x = np.random.default_rng(1).normal(size=(30, 6))
    whole = mixture.log_density(x, 4).numpy()
    for elements in (1, 200, 900):
        monkeypatch.setattr(gmm_finch, "BLOCK_ELEMENTS", elements)
        np.testing.assert_allclose(mixture.log_density(x, 4).numpy(), whole, rtol=1e-12)


def test_a_tiny_epsilon_is_exact_outside_the_span():
    """Two samples in 50 dimensions and epsilon 1e-12: only the span and the rest matter."""
    width, epsilon = 50, 1e-12
    rows = np.zeros((2, width))
    rows[0, 0], rows[1, 0] = -1, 1
    mixture = Mixture.fit([(0, rows)], np.zeros(width), epsilon, torch.float64, "cpu")
    x = np.zeros((3, width))
    x[1, 0] = 2
    x[2, 1] = 1e-3
    variance = 2.0 + epsilon
    volume = np.log(variance) + (width - 1) * np.log(epsilon) + width * np.log(2 * np.pi)
    distance = np.array([0, 4 / variance, 1e-6 / epsilon])
    np.testing.assert_allclose(
        mixture.log_density(x, 1).numpy()[:, 0], -0.5 * (distance + volume), rtol=1e-9, atol=1e-2
    )


def test_a_component_takes_as_many_rows_as_its_samples_span():
    random = np.random.default_rng(0)
    sizes = [1, 2, 10, 300]
    made = [(0, random.normal(size=(size, 200))) for size in sizes]
    mixture = Mixture.fit(made, np.zeros(200), 1e-4, torch.float32, "cpu")
    assert mixture.rank.tolist() == [0, 1, 9, 200]
    assert mixture.basis.shape == (210, 200)
    assert [round(float(e), 6) for e in mixture.epsilon] == [1e-4, 1e-4, 1e-4, 0]


# ---------------------------------------------------------------- threshold


def test_threshold_is_the_least_largest_density_of_training():
    train = examples("abc", 30, 1)
    predictor = changed()
    predictor.fit(train)
    assert predictor.threshold == predictor._highest(train.features).min()
    assert not (named(predictor, train.features) == "unknown").any()


def test_validation_lowers_it_to_a_quantile_of_the_refused_only():
    train, valid = examples("abc", 30, 1), examples("abc", 40, 2)
    predictor = changed("paper")
    predictor.fit(train)
    lowest = predictor.threshold
    highest = predictor._highest(valid.features)
    refused = highest[highest < lowest]
    # With fewer samples than dimensions every new sample lies outside the spans.
    assert len(refused) == len(valid)
    predictor = changed("paper", accepted_error=0.25)
    predictor.fit(train, valid)
    assert predictor.threshold == np.quantile(refused, 0.25)
    # With covariances of full rank only part of validation is refused.
    train, valid = (Examples(e.features[:, :2], e.labels) for e in (train, valid))
    predictor = changed("paper", level=-1)
    predictor.fit(train)
    highest = predictor._highest(valid.features)
    refused = highest[highest < predictor.threshold]
    assert 0 < len(refused) < len(valid)
    predictor = changed("paper")
    predictor.fit(train, valid)
    assert predictor.threshold == np.quantile(refused, 0.05)


def test_later_fits_never_raise_the_threshold_of_the_first():
    predictor = changed("paper")
    predictor.fit(examples("abc", 30, 1), examples("abc", 40, 2))
    first = predictor.threshold
    predictor.fit(examples("abcd", 30, 1), examples("abcd", 40, 2))
    assert predictor.threshold == first


# ---------------------------------------------------------------- discovery


def unlabelled(labels: str, count: int, seed: int) -> np.ndarray:
    return samples(labels, count, seed)[0]


def test_unknown_samples_become_clusters_of_their_own():
    predictor = changed()
    predictor.fit(examples("abc", 40, 1), examples("abc", 20, 2))
    features, truth = samples("xyz", 30, 3)
    assert (named(predictor, features) == "unknown").mean() > 0.9
    predictor.discover(features)
    assert len(predictor.names) >= 3
    assert predictor.predict(features).labels == ("unknown", *"abc", *predictor.names)
    clusters = named(predictor, features)
    assert np.char.startswith(clusters, "unknown_").mean() > 0.9
    assert adjusted_rand_score(truth.to_numpy(), clusters) > 0.3
    assert (named(predictor, samples("abc", 20, 4)[0]) != "unknown").mean() > 0.8


def test_unlabelled_experience_is_clustered_by_fit_and_forgotten_once_labelled():
    features, labels = samples("abcx", 30, 1)
    hidden = Examples(
        features, pl.select(pl.when(labels != "x").then(labels)).to_series().cast(pl.String)
    )
    predictor = changed()
    predictor.fit(hidden, examples("abc", 20, 2))
    assert predictor.known == ("a", "b", "c") and predictor.names
    predictor.fit(Examples(features, labels), examples("abcx", 20, 2))
    assert predictor.known == ("a", "b", "c", "x") and not predictor.names


def test_one_unknown_sample_is_no_cluster():
    predictor = changed()
    predictor.fit(examples("abc", 40, 1), examples("abc", 20, 2))
    predictor.discover(unlabelled("x", 1, 3))
    assert predictor.names == () and predictor.discovered is None
    predictor.discover(np.empty((0, 32), np.float32))
    assert predictor.names == ()


@pytest.mark.parametrize("rule", ["stable", "restart"])
def test_names_of_clusters(rule):
    predictor = changed(names=rule)
    predictor.fit(examples("abc", 40, 1), examples("abc", 20, 2))
    first = unlabelled("x", 40, 3)
    predictor.discover(first)
    old = predictor.names
    assert old == tuple(f"unknown_{number}" for number in range(len(old)))
    # The same samples again, after many others.
    others = unlabelled("yz", 60, 4)
    predictor.discover(np.concatenate([others, first]))
    names = predictor.names
    assert len(set(names)) == len(names)
    kept, new = (np.isin(named(predictor, rows), old).mean() for rows in (first, others))
    if rule == "restart":
        assert names == tuple(f"unknown_{number}" for number in range(len(names)))
        assert new > 0.3
        return
    assert kept > 0.8 and new == 0
    # A name that is out of use does not come back for something else.
    predictor.discover(first[:0])
    predictor.discover(others)
    assert not set(predictor.names) & set(names)


def test_least_certain_samples_are_asked_for_first():
    predictor = changed(epsilon=1.0)
    predictor.fit(examples("abc", 40, 1), examples("abc", 20, 2))
    centers = np.stack([samples(name, 200, 5)[0].mean(0) for name in "ab"])
    between = np.stack([centers[0], 0.5 * centers.sum(0), 0.8 * centers[0] + 0.2 * centers[1]])
    order = predictor.feedback_order(between.astype(np.float32), seed=[0])
    certain = predictor._likelihoods(between)
    gaps = np.sort(certain, 1)[:, -1] - np.sort(certain, 1)[:, -2]
    assert order.tolist() == np.argsort(gaps, kind="stable").tolist()
