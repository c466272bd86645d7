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


def test_defaults_are_the_papers():
    paper = OneClassSvm.resolve("paper")
    assert (paper.nu, paper.gamma, paper.variant) == (0.8, 1e-5, "corrected")
    np.testing.assert_allclose(paper.gammas, np.logspace(-5, 1, 9), rtol=1e-5)


def test_the_best_gamma_is_kept(classifier, train, valid):
    model = fitted(classifier, train, valid, choose="validation", gammas=(1e-4, 0.1, 10))
    best = model.history.sort("valid_auroc", descending=True, maintain_order=True)["gamma"][0]
    assert model.learned["gamma"] == best
    scores, novel = novelty(model, valid), valid.labels == NOVEL
    pairs = scores[novel][:, None] - scores[~novel]
    area = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert area == pytest.approx(model.history["valid_auroc"].max())
