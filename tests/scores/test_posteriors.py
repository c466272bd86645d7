"""Scores of logits that learn or have settings, by hand: gen, kl_matching, temperature, openmax."""

from math import exp, log

import numpy as np
import pytest
import torch
from scipy.stats import weibull_min

from schemas.errors import ConfigError
from tasks.scores import find
from tasks.scores.base import Outputs, Reference
from tasks.scores.openmax import weibull
from tasks.scores.temperature import fitted_temperature
from tests.scores import make_world, scored

EIGHTHS = Outputs(np.log(np.array([[1.0, 2, 5], [8 / 3, 8 / 3, 8 / 3]])))


def test_gen_by_hand() -> None:
    def terms(gamma: float) -> list[float]:
        return [(p * (1 - p)) ** gamma for p in (5 / 8, 2 / 8, 1 / 8)]

    flat = 3 * (2 / 9) ** 0.1
    assert scored("gen", EIGHTHS) == pytest.approx([sum(terms(0.1)), flat])
    found = scored("gen", EIGHTHS, gamma=2, largest=2)
    assert found == pytest.approx([sum(terms(2)[:2]), 2 * (2 / 9) ** 2])


def test_gen_tells_sure_samples_apart() -> None:
    """1 - p of both rounds to 0 in float64."""
    found = scored("gen", Outputs(np.array([[50.0, 0], [60, 0], [3e38, -3e38]])), gamma=1)
    assert found == pytest.approx([2 * exp(-50), 2 * exp(-60), 0])


def test_kl_matching_by_hand() -> None:
    # Two validation samples of the largest class 0, one of class 1, none of class 2.
    valid = Outputs(np.log(np.array([[6.0, 1, 1], [4, 3, 1], [1, 6, 1]]) / 8))
    known = np.array([[5, 2, 1], [1, 6, 1]]) / 8
    p = np.array([[1, 2, 5], [2, 5, 1]]) / 8
    expected = [min((row * np.log(row / one)).sum() for one in known) for row in p]
    found = scored("kl_matching", Outputs(np.log(p)), Reference(valid=valid))
    assert found == pytest.approx(expected)
    sure = Outputs(np.array([[3000.0, 0, 0]]))
    reference = Reference(valid=sure)
    assert scored("kl_matching", sure, reference) == pytest.approx([0])
    assert scored("kl_matching", Outputs(np.array([[0.0, 3000, 0]])), reference) == pytest.approx(
        [3000]
    )


def test_temperature_by_hand() -> None:
    """Three of four samples with odds of 9 are right: the likelihood is best at odds of 3."""
    logits = np.log(np.array([[9.0, 1]] * 4))
    labels = np.array([0, 0, 0, 1])
    temperature = log(9) / log(3)
    assert fitted_temperature(torch.from_numpy(logits), torch.from_numpy(labels)) == pytest.approx(
        temperature
    )
    reference = Reference(
        Outputs(np.zeros((1, 2))), np.array([0]), Outputs(logits), valid_labels=labels
    )
    # Odds of 16 against 1 are of 4 at T = 2.
    test = Outputs(np.log(np.array([[16.0, 1], [1, 1]])))
    assert scored("temperature", test, reference) == pytest.approx([-log(4), 0])


def test_temperature_without_labels_of_validation() -> None:
    world = make_world(learnt=True)
    given = world.reference
    without = Reference(given.train, given.train_labels, given.valid, given.head)
    train = scored("temperature", world.test, given, rows="train")
    assert np.array_equal(scored("temperature", world.test, without), train)
    assert not np.allclose(scored("temperature", world.test, given), train)
    with pytest.raises(ConfigError, match="needs valid_labels, which the reference lacks"):
        scored("temperature", world.test, without, rows="valid")


def test_temperature_has_bounds_and_does_not_tie() -> None:
    def temperature(labels: list[int]) -> float:
        logits = torch.tensor([[4.0, 0], [0, 5]], dtype=torch.float64)
        return fitted_temperature(logits, torch.tensor(labels))

    assert temperature([0, 1]) == 0.01 and temperature([1, 0]) == 100
    valid = Outputs(np.array([[4.0, 0], [0, 5]]))
    reference = Reference(valid, np.array([0, 1]), valid, valid_labels=np.array([0, 1]))
    # p of both is 1 in float64.
    assert scored("temperature", valid, reference) == pytest.approx([-400, -500])


def test_temperature_is_that_of_the_least_loss() -> None:
    world = make_world(learnt=True)
    logits = torch.from_numpy(world.reference.valid.logits).double()
    labels = torch.from_numpy(world.reference.valid_labels)
    best = fitted_temperature(logits, labels)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / temperature, labels))

    assert 0.01 < best < 100
    assert loss(best) < min(loss(best * 1.01), loss(best * 0.99))


def test_weibull_is_that_of_the_greatest_likelihood() -> None:
    values = weibull_min.rvs(3, scale=2, size=500, random_state=0)
    shape, scale = weibull(np.log(values / values.max()))
    expected, _, size = weibull_min.fit(values, floc=0)
    assert shape == pytest.approx(expected, rel=1e-4)
    assert values.max() * exp(scale) == pytest.approx(size, rel=1e-4)
    # A tail of equal values has no shape: all that is farther is outside.
    assert weibull(np.zeros(5)) == (1e15, 0)


def test_openmax_by_hand() -> None:
    """Classes of equal distances: the CDF is 0 within, 1 beyond."""
    train = Outputs(np.array([[8.0, 0], [10, 0], [0, 7], [0, 9]]))
    reference = Reference(train, np.array([0, 0, 1, 1]))
    test = Outputs(np.array([[9.0, 0.5], [6, 4], [3, 8]]))
    # Centres (9, 0) and (0, 8), both of distance 1. The first is 0.5 from (9, 0), but not near
    # (0, 8): of two revised logits the second gives a half. Then both give, then both but for 3.
    expected = [
        0.25 - np.logaddexp(9, 0.25),
        (6 + 2) - np.logaddexp(0, 2),
        (8 + 1.5) - np.logaddexp(0, 1.5),
    ]
    assert scored("openmax", test, reference) == pytest.approx(expected)
    # Of one revised logit only the largest gives.
    expected = [0 - np.logaddexp(9, 0.5), 6 - np.logaddexp(0, 4), 8 - np.logaddexp(0, 3)]
    assert scored("openmax", test, reference, alpha=1) == pytest.approx(expected)


def test_openmax_leaves_out_what_the_network_gets_wrong() -> None:
    train = Outputs(np.array([[8.0, 0], [10, 0], [0, 4], [0, 7], [0, 9]]))
    labels = np.array([0, 0, 0, 1, 1])

    def centres(**given: object) -> list[list[float]]:
        kind = find("openmax")
        score = kind(kind.configuration(**given))
        score.fit(Reference(train, labels))
        return score.centres.tolist()

    assert centres() == [[9, 0], [0, 8]]
    assert centres(only_right=False) == [[6, pytest.approx(4 / 3)], [0, 8]]


def test_openmax_does_not_depend_on_the_units_by_which_distances_were_moved() -> None:
    """Tails much narrower than what is added to them keep their digits."""
    world = make_world(learnt=True)
    reference = world.reference

    def outside(factor: float) -> torch.Tensor:
        score = find("openmax")()
        train = Outputs(reference.train.logits.astype(np.float64) * factor)
        score.fit(Reference(train, reference.train_labels))
        return score.fitted[:, 2] * score.fitted[:, 3]

    torch.testing.assert_close(outside(1e-3), outside(1e-6), rtol=1e-4, atol=1e-6)
