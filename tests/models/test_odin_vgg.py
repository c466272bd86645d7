"""ODIN on a VGG: without a step, its step against plain autograd, the choice on validation."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from schemas.errors import ConfigError
from tasks.features.images import IMAGENET_DEVIATION, IMAGENET_MEAN, for_classifier
from tasks.learning.samples import NOVEL
from tasks.models.odin import Configuration, Odin, OdinSettings, odin
from tests.models.synthetic import fit, novelty

NOVELCRAFT = {"base": "vgg_classifier", "epsilon": 0.0, "space": "pixel1"}


def fitted(classifier, train, valid=None, **settings) -> Odin:
    model = Odin(Configuration(**{**NOVELCRAFT, **settings}))
    fit(model, train, valid, base=classifier)
    return model


def test_the_grid_is_novelcrafts():
    paper = Odin.resolve("paper")
    assert len(paper.temperatures) * len(paper.epsilons) == 210
    assert (min(paper.epsilons), max(paper.epsilons)) == (0, 0.004)


def test_without_a_step_it_is_a_softmax_of_the_logits(classifier, train, test_set):
    logits = classifier.outputs(test_set).logits.astype(np.float64)
    powers = np.exp(logits / 1000)
    expected = -(powers / powers.sum(1, keepdims=True)).max(1)
    np.testing.assert_allclose(novelty(fitted(classifier, train), test_set), expected, rtol=1e-12)


@pytest.mark.parametrize("step", ["corrected", "released"])
def test_the_step_is_against_the_gradient(classifier, train, test_set, step):
    epsilon, temperature = 0.02, 10.0
    model = fitted(classifier, train, epsilon=epsilon, temperature=temperature, step=step)
    scores = novelty(model, test_set)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    for row in (0, 30):
        image = torch.from_numpy(test_set.images()[row : row + 1])
        x = for_classifier(image, scale=classifier.settings.scale).requires_grad_()
        logits = classifier.layers["vgg"](x)
        functional.cross_entropy(logits / temperature, logits.argmax(1)).backward()
        sign = (x.grad >= 0).float() * 2 - 1
        move = (sign - mean) / deviation if step == "released" else sign / deviation
        with torch.no_grad():
            moved = classifier.layers["vgg"](x - epsilon * move)
        expected = -torch.softmax(moved.double() / temperature, 1).max()
        assert scores[row] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("temperature", "epsilon", "released"),
    [
        (1000, 0.0, [-0.2043491, -0.2035047, -0.2038961]),
        (10, 0.004, [-0.7735257, -0.5018724, -0.5452629]),
        (2, 0.002, [-0.9999670, -0.7496080, -0.8702015]),
    ],
)
def test_numbers_are_those_of_the_released_code(temperature, epsilon, released):
    """Of a network whose weights are sines, on pictures of sines."""

    def wave(*shape: int, start: int) -> torch.Tensor:
        numbers = torch.arange(start, start + int(np.prod(shape)), dtype=torch.float64)
        return torch.sin(numbers).float().view(shape)

    def classify(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.tanh(pictures.flatten(1))
        return features @ wave(5, 48, start=3).T + wave(5, start=9), features

    settings = OdinSettings(
        temperature=temperature, epsilon=epsilon, space="pixel1", step="released"
    )
    deviation = 255 * torch.tensor(IMAGENET_DEVIATION)
    _, _, found = odin(classify, wave(3, 3, 4, 4, start=11), deviation, settings)
    np.testing.assert_allclose(found, released, rtol=0, atol=1e-6)


def test_a_small_step_makes_the_network_surer(classifier, train, test_set):
    plain = fitted(classifier, train, temperature=1)
    stepped = fitted(classifier, train, temperature=1, epsilon=0.002)
    assert (novelty(stepped, test_set) <= novelty(plain, test_set) + 1e-6).mean() > 0.9


def test_the_best_of_the_grid_is_kept(classifier, train, valid):
    grid = {"temperatures": (1, 1000), "epsilons": (0, 0.004)}
    model = Odin(Configuration(**NOVELCRAFT, choose="validation", **grid))
    history = fit(model, train, valid, base=classifier)
    assert history.columns == ["temperature", "epsilon", "valid_auroc", "chosen"]
    assert history.height == 4
    best = history.sort("valid_auroc", descending=True, maintain_order=True).row(0)
    assert (model.temperature, model.epsilon) == best[:2]
    assert best[3] == history["chosen"].sum() == 1
    assert model.record["chosen"] == {"temperature": best[0], "epsilon": best[1]}
    novel = valid.labels == NOVEL
    scores = novelty(model, valid)
    pairs = scores[novel][:, None] - scores[~novel]
    assert best[2] == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_choosing_needs_novel_validation_samples(classifier, train):
    with pytest.raises(ConfigError, match="found 48 and 0"):
        fitted(classifier, train, train, choose="validation")
    with pytest.raises(ConfigError, match="found 0 and 0"):
        fitted(classifier, train, None, choose="validation")
