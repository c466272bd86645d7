"""The ensemble: member 0 is the shared classifier, the others are new; mean softmax."""

import numpy as np
import pytest

from tasks.models.deep_ensemble import Configuration, DeepEnsemble
from tasks.models.vgg_classifier import VggClassifier
from tasks.scores.base import Outputs
from tests.models.synthetic import fit, novelty, tiny


def test_score_and_members(classifier, train, test_set):
    before = classifier.fingerprint()
    model = DeepEnsemble(Configuration(members=3, softmax="float64"))
    history = fit(model, train, seed=5, base=classifier)
    assert classifier.fingerprint() == before
    assert history["member"].unique().sort().to_list() == [1, 2]
    members = [classifier, *model.others]
    assert len({member.fingerprint() for member in members}) == 3
    assert all(member.settings == classifier.settings for member in members)
    powers = [np.exp(m.outputs(test_set).logits.astype(np.float64)) for m in members]
    mean = np.mean([p / p.sum(1, keepdims=True) for p in powers], 0)
    np.testing.assert_allclose(novelty(model, test_set), -mean.max(1), rtol=1e-9)
    np.testing.assert_allclose(np.exp(model.outputs(test_set).logits), mean, rtol=1e-3, atol=0)


def test_the_paper_has_five_in_float32():
    paper, small = DeepEnsemble.resolve("paper"), DeepEnsemble.resolve("small")
    assert (paper.members, paper.softmax, small.softmax) == (5, "float32", "float64")


@pytest.mark.parametrize(("precision", "certain"), [("float32", True), ("float64", False)])
def test_a_clear_lead_is_certain_in_float32_only(monkeypatch, train, precision, certain):
    def surely(leads: list[float]) -> VggClassifier:
        member = VggClassifier(tiny(VggClassifier))
        logits = np.array([[lead, 0, 0] for lead in leads], np.float32)
        monkeypatch.setattr(member, "outputs", lambda samples: Outputs(logits=logits))
        return member

    model = DeepEnsemble(Configuration(members=2, softmax=precision))
    model.bases, model.others = (surely([20, 2]),), [surely([18, 1])]
    found = model._outputs(train).novelty
    assert (found[0] == -1) == certain
    # The softmax of 2, 0, 0 and of 1, 0, 0.
    assert found[1] == pytest.approx(-(0.7869860421615985 + 0.5761168847658291) / 2, rel=1e-6)
