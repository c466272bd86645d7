"""Every score on few, constant, rank-deficient or one-class features: numbers or a sentence."""

import warnings
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from schemas.errors import NoveltyError
from tasks.scores import find, names
from tasks.scores.base import Head, Outputs, Reference

OF_NETWORKS = tuple(name for name in names() if find(name).needs & {"logits", "features"})
KINDS = (
    *("gaussian", "constant", "zeros", "one direction", "two directions", "below zero", "huge"),
    *("tiny", "duplicates", "far from the origin", "two values", "dead units"),
)
VARIANTS: dict[str, tuple[dict[str, object], ...]] = {
    "ash": ({"variant": "b"}, {"variant": "p"}),
    "gmm": ({"over": "all", "components": 3}, {"components": 2, "covariance": "full"}),
    "knn": ({"normalise": False},),
    "mahalanobis": ({"covariance": "sum"},),
    "rmd": ({"covariance": "sum"},),
    "temperature": ({"rows": "train"},),
}


def drawn(kind: str, rows: int, width: int, random: np.random.Generator) -> np.ndarray:
    features = random.normal(size=(rows, width))
    match kind:
        case "constant":
            features[:] = 0.1
        case "zeros":
            features[:] = 0
        case "one direction":
            features[:] = features[:, :1]
        case "two directions":
            features = features[:, :1] @ np.ones((1, width)) + features[:, -1:] @ np.eye(1, width)
        case "below zero":
            features = -np.abs(features)
        case "huge":
            features *= 1e30
        case "tiny":
            features *= 1e-30
        case "duplicates":
            features[:] = features[0]
            features[: rows // 2] += 1
        case "far from the origin":
            features = features * 1e-3 + 1e4
        case "two values":
            features = np.where(features > 0, 1.0, 0.0)
        case "dead units":
            features = np.maximum(features, 0)
            features[:, ::2] = 0
    return features.astype(np.float32)


@cache
def made(
    kind: str, rows: int, width: int, classes: int, one: bool, seed: int = 0
) -> tuple[Reference, Outputs]:
    """A reference and nine test rows, of a network with random weights."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    linear, norm = nn.Linear(width, classes), nn.BatchNorm1d(width)
    with torch.no_grad():
        for tensor in (linear.weight, linear.bias, norm.weight, norm.bias, norm.running_mean):
            tensor.normal_(generator=generator)
    head = Head.of(linear, norm, 0.2) if rows % 2 else Head.of(linear, slope=0.0)

    def outputs(count: int) -> Outputs:
        features = drawn(kind, count, width, random)
        return Outputs(head(torch.from_numpy(features)).numpy(), features)

    def labels(count: int) -> np.ndarray:
        return np.arange(count) % (1 if one else classes)

    train, valid = outputs(rows), outputs(max(1, rows // 2))
    reference = Reference(train, labels(rows), valid, head, labels(len(valid)))
    return reference, outputs(9)


def settings_of(name: str) -> Iterator[dict[str, object]]:
    yield from ({}, *VARIANTS.get(name, ()))


def close(found: np.ndarray, expected: np.ndarray) -> None:
    size = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-6 * size + 1e-12)


SHAPES = ((1, 4, 1), (2, 5, 2), (3, 1, 2), (7, 16, 3), (24, 6, 4))


@pytest.mark.parametrize("name", OF_NETWORKS)
def test_numbers_or_a_sentence(name: str) -> None:
    """Warnings of NumPy count as crashes; a sentence names the score."""
    kind, made_some = find(name), False
    for features in KINDS:
        for rows, width, classes in SHAPES:
            for one in (False, True)[: 1 + (rows > 3)]:
                reference, test = made(features, rows, width, classes, one)
                for changed in settings_of(name):
                    score = kind(kind.configuration(**changed))
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        try:
                            score.fit(reference)
                            found = score.score(test)
                        except NoveltyError as error:
                            assert str(error).startswith(f"score {name}")
                            continue
                    made_some = True
                    assert np.isfinite(found).all() and found.shape == (9,)
                    again = score.score(Outputs(test.logits[::-1], test.features[::-1]))
                    close(again[::-1], found)
    assert made_some


@pytest.mark.parametrize("name", OF_NETWORKS)
def test_ordinary_features_of_few_rows_give_numbers(name: str) -> None:
    """Three rows of each of three classes are enough for every score, wide or narrow."""
    for width in (2, 50):
        reference, test = made("gaussian", 9, width, 3, False)
        score = find(name)()
        score.fit(reference)
        assert np.ptp(score.score(test)) > 0


@given(
    st.sampled_from(OF_NETWORKS),
    st.integers(6, 30),
    st.integers(1, 12),
    st.integers(2, 4),
    st.integers(0, 99),
    st.permutations(range(9)),
    st.integers(0, 9),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_rows_are_scored_by_themselves(
    name: str, rows: int, width: int, classes: int, seed: int, order: list[int], cut: int
) -> None:
    """Finite, whatever the order of the test rows and however they are cut into two calls."""
    reference, test = made("gaussian", rows, width, classes, False, seed)
    score = find(name)()
    score.fit(reference)
    whole = score.score(test)
    assert np.isfinite(whole).all()
    close(score.score(Outputs(test.logits[order], test.features[order])), whole[order])
    parts = [
        score.score(Outputs(test.logits[some], test.features[some]))
        for some in (slice(cut), slice(cut, None))
    ]
    close(np.concatenate(parts), whole)


def moved(
    reference: Reference, test: Outputs, change: Callable[[np.ndarray], np.ndarray]
) -> tuple[Reference, Outputs]:
    """Features that are changed, without a head."""

    def changed(outputs: Outputs) -> Outputs:
        return Outputs(outputs.logits, change(outputs.features.astype(np.float64)))

    train = changed(reference.train)
    return Reference(train, reference.train_labels), changed(test)


def measured(name: str, case: tuple[Reference, Outputs], **given: object) -> np.ndarray:
    kind = find(name)
    score = kind(kind.configuration(**given))
    score.fit(case[0])
    return score.score(case[1])


SHIFTED = ("nearest", "mahalanobis", "rmd", "residual", "gmm", "one_class_svm")
SCALED = dict.fromkeys(("cosine", "knn", "mahalanobis", "rmd", "one_class_svm"), 0)
SCALED |= {"nearest": 1, "residual": 1}
"""Scores of features by the power with which they grow as the features do."""


@given(st.integers(0, 99), st.floats(-20, 20), st.floats(-4, 4))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_shifted_and_scaled_features(seed: int, shift: float, power: float) -> None:
    case, factor = made("gaussian", 40, 6, 3, False, seed), 2.0 ** round(power)
    direction = np.linspace(-1, 1, 6)
    plain = moved(*case, lambda features: features)
    for name in SHIFTED:
        # Steps of 1 / 8 lose no digit of a float32 feature in float64.
        found = measured(name, moved(*case, lambda f: f + round(shift * 8) / 8 * direction))
        np.testing.assert_allclose(found, measured(name, plain), rtol=1e-6, atol=1e-6)
    for name, grows in SCALED.items():
        found = measured(name, moved(*case, lambda features: features * factor))
        expected = measured(name, plain) * factor**grows
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * factor**grows)
    # A density is that of a volume.
    found = measured("gmm", moved(*case, lambda features: features * factor))
    np.testing.assert_allclose(found, measured("gmm", plain) + 6 * np.log(factor), rtol=1e-6)


@given(st.integers(0, 99), st.floats(-50, 50))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_a_shift_of_all_logits_of_a_row(seed: int, shift: float) -> None:
    """Scores of the softmax stay."""
    reference, test = made("gaussian", 40, 6, 3, False, seed)
    later = Outputs(test.logits.astype(np.float64) + shift)
    for name in ("gen", "kl_matching", "temperature"):
        score = find(name)()
        score.fit(reference)
        expected = score.score(Outputs(test.logits))
        np.testing.assert_allclose(score.score(later), expected, rtol=1e-6, atol=1e-9)


@given(st.integers(0, 99), st.floats(0.1, 50))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_fdbd_does_not_depend_on_the_units_of_weights_and_activations(
    seed: int, factor: float
) -> None:
    reference, test = made("gaussian", 40, 6, 3, False, seed)
    head = reference.head
    expected = measured("fdbd", (reference, test))
    louder = Head(head.weight * 2, head.bias * 2, head.norm, head.slope)
    found = measured(
        "fdbd", (Reference(Outputs(features=reference.train.features), head=louder), test)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    wider = Head(head.weight, head.bias * factor, head.norm, head.slope)
    grown = [
        Outputs(features=part.features * np.float64(factor)) for part in (reference.train, test)
    ]
    found = measured("fdbd", (Reference(grown[0], head=wider), grown[1]))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
