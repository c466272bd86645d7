"""Post-hoc scores: values by hand, oracles by autograd, and properties of every score."""

from dataclasses import replace
from math import exp, inf, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, NoveltyError
from tasks.scores import base, find, names
from tasks.scores.base import Outputs, Reference, Score
from tests.scores import CLASSES, WIDTH, make_world, plain_head, scored

WORLD = make_world()
LOGITS = np.log(np.array([[1, 2, 5], [1, 1, 1]], np.float64))


OF_NETWORKS = tuple(name for name in names() if find(name).needs & {"logits", "features"})


def fitted(name: str) -> Score:
    score = find(name)()
    score.fit(WORLD.reference)
    return score


def test_scores_of_logits_by_hand() -> None:
    outputs = Outputs(LOGITS)
    assert scored("msp", outputs) == pytest.approx([-5 / 8, -1 / 3])
    assert scored("mls", outputs) == pytest.approx([-log(5), 0])
    assert scored("energy", outputs) == pytest.approx([-log(8), -log(3)])
    # T = 2: softmax and sums of square roots.
    roots = 1 + 2**0.5 + 5**0.5
    assert scored("energy", outputs, temperature=2) == pytest.approx([-2 * log(roots), -2 * log(3)])
    assert scored("odin_without_step", outputs, temperature=2) == pytest.approx(
        [-(5**0.5) / roots, -1 / 3]
    )
    entropy = -sum(p * log(p) for p in (1 / 8, 2 / 8, 5 / 8)) / 3
    assert scored("entropy", outputs) == pytest.approx([entropy, log(3) / 3])


def test_odin_is_at_temperature_1000_unless_told() -> None:
    outputs = Outputs(np.array([[1000.0, 0.0], [0.0, 2000.0]]))
    known = [-1 / (1 + exp(-1)), -1 / (1 + exp(-2))]
    assert scored("odin_without_step", outputs) == pytest.approx(known)


def test_odin_tells_apart_what_float32_ties() -> None:
    logits = np.array([[1.0, 0.0], [1.00001, 0.0]], np.float32)
    short = torch.from_numpy(logits / 1000).softmax(1).amax(1)
    assert short[0] == short[1]
    score = scored("odin_without_step", Outputs(logits))
    assert score[1] < score[0]


def test_gradnorm_by_hand() -> None:
    # z = (3, -0.2): ||z||_1 = 3.2; C p = 3/8, 6/8, 15/8: 5/8 + 2/8 + 7/8 = 14/8.
    head = plain_head([[0.0, 0.0]] * 3, slope=0.2)
    outputs = Outputs(LOGITS[:1], np.array([[3.0, -1.0]]))
    assert scored("gradnorm", outputs, Reference(head=head)) == pytest.approx([-3.2 * 14 / 8])


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_gradnorm_is_the_norm_of_the_gradient(temperature: float) -> None:
    """The released rule: one backward pass a sample, targets of 1, the last weight alone."""
    layers = make_world().layers.double()
    last = layers[-1]
    expected = []
    for g in torch.from_numpy(WORLD.test.features[:50]).double():
        layers.zero_grad()
        loss = -(layers(g[None]) / temperature).log_softmax(1).sum()
        loss.backward()
        expected.append(-last.weight.grad.abs().sum().item())
    logits = layers(torch.from_numpy(WORLD.test.features[:50]).double()).detach().numpy()
    outputs = Outputs(logits, WORLD.test.features[:50])
    found = scored("gradnorm", outputs, WORLD.reference, temperature=temperature)
    assert found == pytest.approx(expected, rel=1e-9)


def test_react_by_hand() -> None:
    # The 90th percentile of 0, 1, ..., 10, whatever rows they stand in, is 9.
    valid = Outputs(features=np.array([[10.0, 1, 2, 9, 4, 5, 6, 7, 8, 3, 0]]))
    head = plain_head([[1.0] + [0.0] * 10, [0.0, 1.0] + [0.0] * 9])
    test = Outputs(features=np.array([[20.0, -4] + [0] * 9, [3.0, 30] + [0] * 9]))
    expected = [-np.logaddexp(9, -4), -np.logaddexp(3, 9)]
    assert scored("react", test, Reference(valid=valid, head=head)) == pytest.approx(expected)
    expected = [-np.logaddexp(5, -4), -np.logaddexp(3, 5)]
    reference = Reference(valid=valid, head=head)
    assert scored("react", test, reference, percentile=50) == pytest.approx(expected)


def test_react_is_energy_of_the_clipped_network() -> None:
    threshold = np.percentile(WORLD.reference.valid.features.ravel(), 90)
    clipped = torch.from_numpy(np.minimum(WORLD.test.features, threshold))
    with torch.no_grad():
        expected = -make_world().layers(clipped).logsumexp(1).numpy()
    assert scored("react", WORLD.test, WORLD.reference) == pytest.approx(expected, rel=1e-5)
    whole = scored("react", WORLD.test, WORLD.reference, percentile=100)
    assert not np.allclose(whole, expected, rtol=1e-3)


def test_nearest_and_cosine_by_hand() -> None:
    train = Outputs(features=np.array([[0.0, 0], [3, 4], [0, 10]]))
    reference = Reference(train, np.array([7, 5, 9]))
    test = Outputs(features=np.array([[3.0, 4], [0, 6], [8, 0]]))
    assert scored("nearest", test, reference).tolist() == [0, 13**0.5, 41**0.5]
    assert scored("nearest", test, reference, k=2).tolist() == [5, 4, 8]
    # Cosines to (3, 4): 1, 4/5, 3/5; to (0, 10): 4/5, 1, 0.
    assert scored("cosine", test, reference) == pytest.approx([-1, -1, -0.8])
    for name, classes in (("nearest", [5, 5, 5]), ("cosine", [5, 9, 5])):
        score = find(name)()
        score.fit(reference)
        assert score.predicted(test).tolist() == classes
        score.fit(replace(reference, train_labels=None))
        with pytest.raises(ConfigError, match="no train_labels"):
            score.predicted(test)


def test_mahalanobis_by_hand() -> None:
    # Two classes with means (0, 0) and (10, 0), pooled variances 4 and 1, no covariance.
    corners = np.array([[2.0, 1], [-2, 1], [2, -1], [-2, -1]])
    train = Outputs(features=np.concatenate([corners, corners + np.array([10, 0])]))
    reference = Reference(train, np.repeat(np.array([3, 8]), 4))
    test = Outputs(features=np.array([[0.0, 0], [2, 3], [9, 1]]))
    found = scored("mahalanobis", test, reference, ridge=1e-12)
    assert found == pytest.approx([0, 1 + 9, 0.25 + 1])
    score = find("mahalanobis")()
    score.fit(reference)
    assert score.predicted(test).tolist() == [3, 3, 8]
    with pytest.raises(ConfigError, match="train_labels"):
        score.fit(Reference(train))
    with pytest.raises(ConfigError, match="equals its class mean"):
        score.fit(Reference(train, np.arange(8)))


def test_mahalanobis_with_fewer_samples_than_dimensions() -> None:
    random = np.random.default_rng(0)
    train = Outputs(features=random.normal(size=(20, 64)).astype(np.float32))
    reference = Reference(train, np.arange(20) % 2)
    far = Outputs(features=train.features + np.float32(5))
    near = scored("mahalanobis", train, reference)
    assert scored("mahalanobis", far, reference).min() > near.max()


def test_the_known_class_is_the_largest_logit_unless_the_score_says_else() -> None:
    expected = WORLD.test.logits.argmax(1)
    for name in ("msp", "react", "gradnorm"):
        assert fitted(name).predicted(WORLD.test).tolist() == expected.tolist()


@pytest.mark.parametrize("name", OF_NETWORKS)
def test_novel_samples_score_higher(name: str) -> None:
    """Test features lie wider than training ones: every distance must see it; signs are checked by
    a sure and an unsure sample for the scores of logits."""
    score = fitted(name)
    if name == "openmax" or not score.needs & {"logits", "head"}:
        assert np.median(score.score(WORLD.test)) > np.median(score.score(WORLD.reference.valid))
        return
    g = torch.from_numpy(WORLD.reference.valid.features)
    order = WORLD.head(g).amax(1).argsort().numpy()
    features = WORLD.reference.valid.features[order]
    logits = WORLD.reference.valid.logits[order]
    unsure, sure = np.array_split(score.score(Outputs(logits, features)), 2)
    assert unsure.mean() > sure.mean()


@pytest.mark.parametrize("name", OF_NETWORKS)
def test_rows_are_scored_by_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their order, their company and the size of a block."""
    score, test = fitted(name), WORLD.test
    whole = score.score(test)
    assert whole.dtype == np.float64 and np.array_equal(whole, score.score(test))
    order = np.random.default_rng(1).permutation(len(test))
    moved = score.score(Outputs(test.logits[order], test.features[order]))
    np.testing.assert_allclose(moved, whole[order], rtol=1e-12)
    monkeypatch.setattr(base, "_BLOCK", 7 * WIDTH)
    np.testing.assert_allclose(score.score(test), whole, rtol=1e-12)
    assert score.score(Outputs(test.logits[:0], test.features[:0])).shape == (0,)


@pytest.mark.parametrize("name", OF_NETWORKS)
def test_the_order_of_the_reference_does_not_matter(name: str) -> None:
    order = np.random.default_rng(2).permutation(len(WORLD.reference.train))
    train, valid = WORLD.reference.train, WORLD.reference.valid
    moved = Reference(
        Outputs(train.logits[order], train.features[order]),
        WORLD.reference.train_labels[order],
        Outputs(valid.logits[::-1], valid.features[::-1]),
        WORLD.reference.head,
        WORLD.reference.valid_labels[::-1],
    )
    score, other = fitted(name), find(name)()
    other.fit(moved)
    np.testing.assert_allclose(other.score(WORLD.test), score.score(WORLD.test), rtol=1e-9)
    if "train" in score.needs:
        assert np.array_equal(other.predicted(WORLD.test), score.predicted(WORLD.test))


FINITE = st.floats(-300, 300, width=32)
ROWS = st.lists(st.lists(FINITE, min_size=4, max_size=4), min_size=1, max_size=8)


@given(ROWS, st.floats(-50, 50))
@settings(max_examples=60, deadline=None)
def test_a_shift_of_all_logits(rows: list[list[float]], shift: float) -> None:
    """Softmax scores stay; MLS and energy fall by the shift."""
    logits = np.array(rows)
    for name in ("msp", "odin_without_step", "entropy"):
        moved = scored(name, Outputs(logits + shift))
        np.testing.assert_allclose(moved, scored(name, Outputs(logits)), rtol=1e-9, atol=1e-12)
    for name in ("mls", "energy"):
        moved = scored(name, Outputs(logits + shift))
        np.testing.assert_allclose(moved, scored(name, Outputs(logits)) - shift, atol=1e-9)


@given(ROWS, st.permutations(range(4)))
@settings(max_examples=60, deadline=None)
def test_classes_may_be_renamed(rows: list[list[float]], order: list[int]) -> None:
    logits = np.array(rows)
    reference = Reference(head=plain_head([[0.0, 0.0]] * 4, slope=0.2))
    features = np.tile([1.5, -2.0], (len(rows), 1))
    for name in ("msp", "mls", "odin_without_step", "energy", "entropy", "gradnorm"):
        moved = scored(name, Outputs(logits[:, order], features), reference)
        still = scored(name, Outputs(logits, features), reference)
        np.testing.assert_allclose(moved, still, rtol=1e-9, atol=1e-12)


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_scores_stay_within_their_bounds(rows: list[list[float]]) -> None:
    outputs = Outputs(np.array(rows, np.float32))
    msp, mls, energy, entropy = (scored(n, outputs) for n in ("msp", "mls", "energy", "entropy"))
    assert ((msp >= -1) & (msp <= -0.25 + 1e-12)).all()
    assert ((entropy >= 0) & (entropy <= log(4) / 4 + 1e-12)).all()
    # logsumexp lies between the largest and the largest + log C.
    assert ((energy <= mls + 1e-9) & (energy >= mls - log(4) - 1e-9)).all()


def test_extreme_logits_give_finite_scores() -> None:
    outputs = Outputs(np.array([[3e38, -3e38], [-3e38, -3e38]], np.float32))
    for name in ("msp", "mls", "odin_without_step", "energy", "entropy"):
        assert np.isfinite(scored(name, outputs)).all()


def test_a_score_that_overflows_is_a_sentence() -> None:
    outputs = Outputs(np.full((1, 2), 1e300), np.full((1, 2), 1e308))
    said = r"gradnorm gave NaN for 1 of 1 samples whose .* first row 0; .* largest is 1e\+308"
    with pytest.raises(NoveltyError, match=said):
        scored("gradnorm", outputs, Reference(head=plain_head([[0.0, 0.0]] * 2)))
    assert -inf < scored("mls", outputs)[0]


def test_the_world_has_what_the_tests_assume() -> None:
    assert WORLD.test.logits.shape[1] == CLASSES and (WORLD.test.features < 0).any()
