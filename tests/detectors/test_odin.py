"""ODIN: closed form without a step, the step against plain autograd, the choice on validation."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from schemas.errors import ConfigError
from tasks.detectors.odin import Configuration, Odin
from tasks.features.images import IMAGENET_DEVIATION, IMAGENET_MEAN, for_classifier
from tasks.learning.samples import NOVEL, Samples


def fitted(classifier, train, valid=None, **settings) -> Odin:
    detector = Odin(Configuration(**settings))
    detector.fit(train, valid, device="cpu", base=classifier)
    return detector


def test_the_paper_chose_1000_and_0():
    paper = Odin.resolve("paper")
    assert (paper.temperature, paper.epsilon) == (1000, 0)
    assert len(paper.temperatures) * len(paper.epsilons) == 210
    assert (min(paper.epsilons), max(paper.epsilons)) == (0, 0.004)


def test_without_a_step_it_is_a_softmax_of_the_logits(classifier, train, test_set):
    logits = classifier.outputs(test_set).logits.astype(np.float64)
    powers = np.exp(logits / 1000)
    expected = -(powers / powers.sum(1, keepdims=True)).max(1)
    np.testing.assert_allclose(fitted(classifier, train).score(test_set), expected, rtol=1e-12)


def test_given_logits_are_enough_without_a_step(classifier, train, test_set):
    detector = fitted(classifier, train)
    outputs = classifier.outputs(test_set)
    given = {"logits": outputs.logits, "features": outputs.features}
    without = Samples(test_set.ids, test_set.labels, given)
    np.testing.assert_array_equal(detector.score(without), detector.score(test_set))


@pytest.mark.parametrize("step", ["corrected", "released"])
def test_the_step_is_against_the_gradient(classifier, train, test_set, step):
    epsilon, temperature = 0.02, 10.0
    detector = fitted(classifier, train, epsilon=epsilon, temperature=temperature, step=step)
    scores = detector.score(test_set)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    for row in (0, 30):
        image = torch.from_numpy(test_set.images()[row : row + 1])
        x = for_classifier(image, scale=classifier.settings.scale).requires_grad_()
        logits = classifier.network(x)
        functional.cross_entropy(logits / temperature, logits.argmax(1)).backward()
        sign = (x.grad >= 0).float() * 2 - 1
        move = (sign - mean) / deviation if step == "released" else sign / deviation
        with torch.no_grad():
            moved = classifier.network(x - epsilon * move)
        expected = -torch.softmax(moved.double() / temperature, 1).max()
        assert scores[row] == pytest.approx(float(expected), rel=1e-5)


def test_a_small_step_makes_the_network_surer(classifier, train, test_set):
    plain = fitted(classifier, train, temperature=1)
    stepped = fitted(classifier, train, temperature=1, epsilon=0.002)
    assert (stepped.score(test_set) <= plain.score(test_set) + 1e-6).mean() > 0.9


def test_the_best_of_the_grid_is_kept(classifier, train, valid):
    detector = Odin(Configuration(choose="validation", temperatures=(1, 1000), epsilons=(0, 0.004)))
    history = detector.fit(train, valid, device="cpu", base=classifier)
    assert history.columns == ["temperature", "epsilon", "valid_auroc"]
    assert history.height == 4
    best = history.sort("valid_auroc", descending=True, maintain_order=True).row(0)
    assert (detector.temperature, detector.epsilon) == best[:2]
    novel = valid.labels == NOVEL
    scores = detector.score(valid)
    pairs = scores[novel][:, None] - scores[~novel]
    assert best[2] == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_choosing_needs_novel_validation_samples(classifier, train):
    with pytest.raises(ConfigError, match="found 48 and 0"):
        fitted(classifier, train, train, choose="validation")
    with pytest.raises(ConfigError, match="found 0 and 0"):
        fitted(classifier, train, None, choose="validation")
