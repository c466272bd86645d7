"""The ensemble: member 0 is the shared classifier, the others are new; mean softmax."""

import numpy as np

from tasks.models.deep_ensemble import Configuration, DeepEnsemble
from tests.models.synthetic import fit, novelty


def test_score_and_members(classifier, train, test_set):
    before = classifier.fingerprint()
    model = DeepEnsemble(Configuration(members=3))
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


def test_the_paper_has_five():
    assert DeepEnsemble.resolve("paper").members == 5
