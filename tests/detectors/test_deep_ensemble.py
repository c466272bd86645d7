"""The ensemble: member 0 is the shared classifier, the others are new; mean softmax."""

import numpy as np

from tasks.detectors.deep_ensemble import Configuration, DeepEnsemble
from tasks.learning.samples import Samples


def test_score_and_members(classifier, train, test_set):
    before = classifier.fingerprint()
    detector = DeepEnsemble(Configuration(members=3))
    history = detector.fit(train, seed=5, device="cpu", base=classifier)
    assert classifier.fingerprint() == before
    assert history["member"].unique().sort().to_list() == [1, 2]
    members = [classifier, *detector.others]
    assert len({member.fingerprint() for member in members}) == 3
    assert all(member.settings == classifier.settings for member in members)
    powers = [np.exp(m.outputs(test_set).logits.astype(np.float64)) for m in members]
    mean = np.mean([p / p.sum(1, keepdims=True) for p in powers], 0)
    np.testing.assert_allclose(detector.score(test_set), -mean.max(1), rtol=1e-9)
    np.testing.assert_allclose(np.exp(detector.outputs(test_set).logits), mean, rtol=1e-3, atol=0)
    # Logits given with the samples are those of member 0 only.
    outputs = classifier.outputs(test_set)
    given = {"logits": outputs.logits, "features": outputs.features}
    both = Samples(test_set.ids, test_set.labels, {**test_set.arrays, **given})
    np.testing.assert_array_equal(detector.score(both), detector.score(test_set))


def test_the_paper_has_five():
    assert DeepEnsemble.resolve("paper").members == 5
