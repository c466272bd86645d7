"""The one-class SVM against scikit-learn, in both variants."""

import numpy as np
import pytest
from sklearn.svm import OneClassSVM

from tasks.learning.samples import NOVEL
from tasks.models.one_class_svm import Configuration, OneClassSvm
from tests.models.synthetic import fit, novelty


def fitted(classifier, train, valid=None, **settings) -> OneClassSvm:
    model = OneClassSvm(Configuration(**settings))
    model.history = fit(model, train, valid, base=classifier)
    return model


def unit(features, train_features):
    low, high = train_features.min(0), train_features.max(0)
    return (features - low) / np.where(high == low, 1, high - low)


@pytest.mark.parametrize("gamma", [1e-5, 0.5])
def test_both_variants_are_the_same_machine(classifier, train, test_set, gamma):
    learned, new = (classifier.outputs(s).features.astype(np.float64) for s in (train, test_set))
    machine = OneClassSVM(kernel="rbf", nu=0.8, gamma=gamma).fit(unit(learned, learned))
    corrected = novelty(fitted(classifier, train, gamma=gamma), test_set)
    released = novelty(fitted(classifier, train, gamma=gamma, variant="released"), test_set)
    near = {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(corrected, -machine.decision_function(unit(new, learned)), **near)
    np.testing.assert_allclose(released, machine.decision_function(new), **near)


def test_the_papers_grid():
    paper, small = OneClassSvm.resolve("paper"), OneClassSvm.resolve("small")
    assert (paper.choose, paper.order, paper.variant) == ("validation", "balanced", "corrected")
    assert (small.choose, small.order) == ("fixed", "once")
    np.testing.assert_allclose(paper.nus, np.linspace(0.1, 0.9, 9))
    np.testing.assert_allclose(paper.gammas, np.logspace(-5, 1, 9), rtol=1e-5)
    assert (paper.nu, paper.gamma) == (0.8, 1e-5)


def test_what_is_given_is_not_chosen():
    for changes, choose in (({}, "validation"), ({"nu": 0.5}, "fixed"), ({"gamma": 1}, "fixed")):
        (variant,) = OneClassSvm.variants("paper", changes, None, ())
        assert OneClassSvm.resolve("paper", variant).choose == choose


def test_the_best_of_the_grid_is_kept_and_recorded(classifier, train, valid):
    grid = {"nus": (0.1, 0.8), "gammas": (1e-4, 0.1, 10)}
    model = fitted(classifier, train, valid, choose="validation", **grid)
    history = model.history
    assert history.columns == ["nu", "gamma", "valid_auroc", "chosen"]
    assert history.height == 6
    best = history.sort("valid_auroc", descending=True, maintain_order=True).row(0, named=True)
    assert best["chosen"] == history["chosen"].sum() == 1
    assert model.record["chosen"] == {"nu": best["nu"], "gamma": best["gamma"]}
    again = fitted(classifier, train, nu=best["nu"], gamma=best["gamma"])
    assert again.fingerprint() == model.fingerprint()
    scores, novel = novelty(model, valid), valid.labels == NOVEL
    pairs = scores[novel][:, None] - scores[~novel]
    area = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert area == pytest.approx(best["valid_auroc"])


def test_balanced_draws_see_rare_classes_as_often(classifier, train):
    rare = train.take(np.flatnonzero((train.labels > 0) | (np.arange(len(train)) < 4)))
    plain = fitted(classifier, rare, nu=0.99, gamma=1.0)
    drawn = fitted(classifier, rare, nu=0.99, gamma=1.0, order="balanced")
    # With so large a nu every training row is a vector of the machine.
    assert len(plain.learned["vectors"]) == len(drawn.learned["vectors"]) == len(rare)
    sure = classifier.outputs(rare).features.astype(np.float64)[rare.labels == 0]

    def copies(model: OneClassSvm) -> int:
        rows = model.learned["vectors"] * model.learned["span"] + model.learned["low"]
        return sum(np.isclose(row, sure).all(1).any() for row in rows)

    assert copies(plain) == (rare.labels == 0).sum() == 2
    assert copies(drawn) > 5
