"""NDCC's score and loss against direct formulas."""

import numpy as np
import pytest
import torch

from tasks.models.ndcc import Configuration, Ndcc
from tests.models.synthetic import fit, novelty, tiny


@pytest.fixture(scope="module")
def model(train):
    # Large rates for sigma and delta, so that they differ from their start.
    model = Ndcc(tiny(Ndcc, sigma_rate=1e-3, delta_rate=1e-3, likelihood=1.0))
    fit(model, train, seed=2)
    return model


def test_defaults_are_the_papers():
    paper = Configuration()
    assert (paper.optimizer, paper.momentum, paper.weight_decay) == ("sgd", 0.9, 5e-4)
    assert (paper.learning_rate, paper.classifier_rate) == (1e-4, 1e-2)
    assert (paper.sigma_rate, paper.delta_rate) == (1e-2, 1e-4)
    assert (paper.epochs, paper.batch_size, paper.milestones) == (30, 64, (25, 28, 30))
    assert (paper.radius, paper.consistency, paper.likelihood) == (16, 0.2, 1 / 4096)


def test_features_lie_on_the_sphere(model, test_set):
    features = model.outputs(test_set).features
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 16, rtol=1e-5)


def test_the_score_is_the_least_squared_mahalanobis_distance(model, test_set):
    state = {name: value.double().numpy() for name, value in model.state().items()}
    covariance = np.diag((state["scatter.sigma"] + state["scatter.delta"]) ** 2)
    inverse = np.linalg.inv(covariance)
    means = state["vgg.classifier.6.weight"] @ covariance
    features = model.outputs(test_set).features.astype(np.float64)
    assert np.ptp(np.diag(covariance)) > 0.01
    expected = [min((v - m) @ inverse @ (v - m) for m in means) for v in features]
    np.testing.assert_allclose(novelty(model, test_set), expected, rtol=1e-9)


def test_released_scatter_is_one(model, test_set):
    released = Ndcc(model.settings.model_copy(update={"scatter": "released"}))
    released.classes = model.classes
    released.restore(model.state())
    weights = model.state()["vgg.classifier.6.weight"].numpy()
    features = model.outputs(test_set).features
    expected = ((features[:, None].astype(float) - weights) ** 2).sum(2).min(1)
    np.testing.assert_allclose(novelty(released, test_set), expected, rtol=1e-6)
    assert not np.allclose(novelty(released, test_set), novelty(model, test_set))


def test_the_loss_is_the_papers(train):
    """One epoch of one batch at a rate of almost nothing: the history shows the starting loss."""
    still = dict.fromkeys(("learning_rate", "classifier_rate", "sigma_rate", "delta_rate"), 1e-30)
    settings = tiny(
        Ndcc, **still, epochs=1, batch_size=64, order="shuffled", train_mode=False, consistency=0.3,
        likelihood=0.5,
    )  # fmt: skip
    model = Ndcc(settings)
    history = fit(model, train, seed=2)
    outputs = model.outputs(train)
    logits = torch.from_numpy(outputs.logits).double()
    entropy = torch.nn.functional.cross_entropy(logits, torch.from_numpy(train.labels)).item()
    means, variance = model.gaussians()
    assert (variance == 1).all()
    distance = ((outputs.features - means[train.labels]) ** 2).sum(1).mean() / 2
    # log sigma is 0 at the start, so NLL is the distance again.
    expected = entropy + 0.3 * (distance + 0.5 * distance)
    assert history["cross_entropy"][0] == pytest.approx(entropy, rel=1e-5)
    assert history["loss"][0] == pytest.approx(expected, rel=1e-5)
