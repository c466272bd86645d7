"""Scores of features alone, by hand: knn, residual, mahalanobis, rmd, gmm, one_class_svm."""

from math import exp, log, pi, sqrt

import numpy as np
import pytest

from schemas.errors import ConfigError
from tasks.scores import find
from tasks.scores.base import Outputs, Reference
from tests.scores import make_world, scored

WORLD = make_world()
CORNERS = np.array([[2.0, 1], [-2, 1], [2, -1], [-2, -1]])
# Two classes with means (0, 0) and (10, 0), variances 4 and 1, no covariance.
TWO = Reference(
    Outputs(features=np.concatenate([CORNERS, CORNERS + np.array([10, 0])])),
    np.repeat(np.array([3, 8]), 4),
)


def features(*rows: list[float]) -> Outputs:
    return Outputs(features=np.array(rows, np.float64))


def test_knn_by_hand() -> None:
    train = features([2.0, 0], [0, 3], [-1, 0], [0, -5])
    reference, test = Reference(train, np.array([1, 0, 2, 2])), features([3.0, 4], [0, -1])
    # Cosines of (3, 4): 0.6, 0.8, -0.6, -0.8; of (0, -1): 0, -1, 0, 1.
    for k, cosines in ((1, (0.8, 1)), (2, (0.6, 0)), (4, (-0.8, -1))):
        found = scored("knn", test, reference, k=k)
        assert found == pytest.approx([sqrt(2 - 2 * cosine) for cosine in cosines], abs=1e-7)
    found = scored("knn", test, reference, k=2, normalise=False)
    assert found == pytest.approx([sqrt(17), sqrt(5)])
    with pytest.raises(ConfigError, match="k = 5 of 4 training samples; lower k"):
        scored("knn", test, reference, k=5)
    score = find("knn")()
    score.fit(reference)
    assert score.predicted(test).tolist() == [0, 2]


def test_knn_looks_no_further_than_a_class_reaches() -> None:
    def k(rows: int, classes: int | None) -> int:
        labels = None if classes is None else np.arange(rows) % classes
        score = find("knn")()
        score.fit(Reference(Outputs(features=np.ones((rows, 2))), labels))
        return score.search()[0]

    assert [k(200, 2), k(99, 2), k(99, None), k(7, None), k(3, 3)] == [50, 49, 50, 7, 1]


def test_knn_is_nearest_and_cosine() -> None:
    plain = scored("knn", WORLD.test, WORLD.reference, k=1, normalise=False)
    assert np.array_equal(plain, scored("nearest", WORLD.test, WORLD.reference))
    scaled = scored("knn", WORLD.test, WORLD.reference, k=1)
    cosine = scored("cosine", WORLD.test, WORLD.reference)
    np.testing.assert_allclose(scaled**2 / 4 - 1, cosine, rtol=1e-12)


def test_residual_by_hand() -> None:
    # About the mean (1, 1, 1): x varies most, then y, z not at all.
    train = features([6.0, 1, 1], [-4, 1, 1], [1, 3, 1], [1, -1, 1])
    test = features([50.0, 1, 1], [9, 4, 5], [1, 1, 1])
    assert scored("residual", test, Reference(train), dimension=1) == pytest.approx([0, 5, 0])
    assert scored("residual", test, Reference(train)) == pytest.approx([0, 5, 0])
    assert scored("residual", test, Reference(train), dimension=0) == pytest.approx(
        [49, sqrt(64 + 9 + 16), 0]
    )
    with pytest.raises(ConfigError, match=r"2 directions leave nothing .* span 2 of 3; lower"):
        scored("residual", test, Reference(train), dimension=2)


def test_the_rule_of_dimensions() -> None:
    def dimension(width: int, rows: int) -> int:
        random = np.random.default_rng(0)
        score = find("residual")()
        score.fit(Reference(Outputs(features=random.normal(size=(rows, width)))))
        return width - score.subspace.left.shape[1]

    assert dimension(40, 100) == 20 and dimension(768, 600) == 512
    # 12 rows about their mean span 11 directions.
    assert dimension(40, 12) == 10 and dimension(768, 12) == 10 and dimension(1, 5) == 0


def test_mahalanobis_as_pytorch_ood_has_it() -> None:
    # Sums of squares 32 and 8 of 8 samples, the ridge as it is, half of the distance.
    test = features([2.0, 3], [9, 1])
    found = scored("mahalanobis", test, TWO, covariance="sum", ridge=2)
    assert found == pytest.approx([(4 / 34 + 9 / 10) / 2, (1 / 34 + 1 / 10) / 2])


def test_a_setting_that_is_new_leaves_the_key_of_the_old_ones() -> None:
    kind = find("mahalanobis").configuration
    assert kind().model_dump(mode="json") == {"ridge": 1e-6}
    assert kind(covariance="sum").model_dump(mode="json") == {"ridge": 1e-6, "covariance": "sum"}


def test_rmd_by_hand() -> None:
    # All samples: mean (5, 0), variances 4 + 25 and 1.
    test = features([0.0, 0], [2, 3], [5, 0], [12, 1])
    found = scored("rmd", test, TWO, ridge=1e-12)
    expected = [0 - 25 / 29, (1 + 9) - (9 / 29 + 9), 25 / 4 - 0, (1 + 1) - (49 / 29 + 1)]
    assert found == pytest.approx(expected)
    found = scored("rmd", features([12.0, 1]), TWO, covariance="sum", ridge=2)
    assert found == pytest.approx([(4 / 34 + 1 / 10) - (49 / 234 + 1 / 10)])
    score = find("rmd")()
    score.fit(TWO)
    assert score.predicted(test).tolist() == [3, 3, 3, 8]
    with pytest.raises(ConfigError, match="rmd needs training rows of two classes"):
        score.fit(Reference(TWO.train, np.zeros(8, np.int64)))


def normal(squared: float, variances: float) -> float:
    """Log density of two dimensions."""
    return -0.5 * (squared + log(variances)) - log(2 * pi)


def test_gmm_by_hand() -> None:
    test = features([0.0, 0], [5, 2])
    logs = [
        np.logaddexp(normal(0, 4), normal(25, 4)) - log(2),
        normal(25 / 4 + 4, 4),
    ]
    for kind in ("full", "diag"):
        found = scored("gmm", test, TWO, ridge=1e-12, covariance=kind)
        assert found == pytest.approx([-value for value in logs])
    # Over all: mean (5, 0), variances 29 and 1; labels are not asked for.
    for reference in (TWO, Reference(TWO.train)):
        found = scored("gmm", test, reference, over="all", ridge=1e-12)
        assert found == pytest.approx([-normal(25 / 29, 29), -normal(4, 29)])
    # Two components find both classes, to what a soft membership leaves.
    found = scored("gmm", test, Reference(TWO.train), over="all", components=2, ridge=1e-12)
    assert found == pytest.approx([-value for value in logs], rel=5e-3)
    with pytest.raises(ConfigError, match="needs train_labels"):
        scored("gmm", test, Reference(TWO.train))


def test_the_ridge_of_gmm_is_in_units_of_the_mean_variance() -> None:
    # Mean variance 2.5: variances 4 + 0.25 and 1 + 0.25. A class of one sample has the ridge alone.
    test = features([100.0, 0])
    train = np.concatenate([TWO.train.features, [[100.0, 0]]])
    reference = Reference(Outputs(features=train), np.append(TWO.train_labels, 9))
    ridge = 0.1 * (4 + 1) * 8 / 9 / 2
    found = scored("gmm", test, reference, covariance="full", ridge=0.1)
    assert found == pytest.approx([-normal(0, ridge**2) + log(9)])


def test_gmm_takes_full_covariances_where_samples_suffice() -> None:
    def kinds(rows: int, **given: object) -> set[str]:
        random = np.random.default_rng(0)
        kind = find("gmm")
        score = kind(kind.configuration(**given))
        labels = np.arange(rows) % 2
        score.fit(Reference(Outputs(features=random.normal(size=(rows, 3))), labels))
        return {mixture.covariance_type for _, mixture in score.mixtures}

    assert kinds(60) == {"full"} and kinds(59) == {"diag"}
    assert kinds(60, components=2) == {"diag"} and kinds(30, over="all") == {"full"}


def test_one_class_svm_by_hand() -> None:
    """Two samples share nu * 2 equally and lie on the boundary. Scaled, they are 0 and 1."""
    train, test = features([0.0, 7], [10, 7]), features([10.0, 7], [5, 7], [30, 9])
    found = scored("one_class_svm", test, Reference(train), nu=0.9, gamma=2)
    boundary = 1 + exp(-2)
    sums = [boundary, 2 * exp(-2 / 4), exp(-2 * (9 + 4)) + exp(-2 * (4 + 4))]
    assert found == pytest.approx([0.9 * (boundary - one) for one in sums], abs=1e-6)


def test_one_class_svm_of_many_rows_draws_some() -> None:
    random = np.random.default_rng(0)
    train = Reference(Outputs(features=random.normal(size=(60, 3))))
    few = [scored("one_class_svm", train.train, train, most=20, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(few[0], few[1]) and not np.allclose(few[0], few[2])
    kind = find("one_class_svm")
    score = kind(kind.configuration(most=20, nu=0.99))
    score.fit(train)
    assert len(score.machine.support_) == 20


def test_one_class_svm_scales_by_the_range() -> None:
    """Features in other units score the same."""
    units = np.logspace(-3, 3, WORLD.test.features.shape[1])
    train = Outputs(features=WORLD.reference.train.features * units + 5)
    test = Outputs(features=WORLD.test.features * units + 5)
    found = scored("one_class_svm", test, Reference(train))
    expected = scored("one_class_svm", WORLD.test, Reference(WORLD.reference.train))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.ptp(expected))
