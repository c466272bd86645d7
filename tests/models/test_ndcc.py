"""NDCC's score and loss against direct formulas."""

import numpy as np
import pytest
import torch

from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch
from tasks.models.ndcc import Ndcc
from tasks.models.vgg_classifier import VggClassifier
from tests.models.synthetic import fit, novelty, tiny


@pytest.fixture(scope="module")
def model(train):
    # Large rates for sigma and delta, so that they differ from their start.
    model = Ndcc(tiny(Ndcc, sigma_rate=1e-3, delta_rate=1e-3, likelihood=1.0))
    fit(model, train, seed=2)
    return model


def test_defaults_are_the_papers():
    paper = Ndcc.resolve("paper")
    assert paper.precision == VggClassifier.resolve("paper").precision == "float32"
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


def wave(*shape: int, start: int = 0) -> torch.Tensor:
    numbers = torch.arange(start, start + int(np.prod(shape)), dtype=torch.float64)
    return torch.sin(numbers).float().view(shape)


def test_numbers_are_those_of_the_released_code_with_the_same_weights(monkeypatch):
    settings = tiny(Ndcc, consistency=0.2, likelihood=1 / 4096)
    model = Ndcc(settings)
    model.classes = 3
    model._make_layers()
    scatter, last = model.layers["scatter"], model.last_layer
    last.weight.data, last.bias.data = 2 * wave(3, 16, start=100), wave(3, start=7)
    scatter["sigma"].data, scatter["delta"].data = torch.tensor([0.9]), 0.2 * wave(16, start=50)
    monkeypatch.setattr(model.layers["vgg"], "embed", lambda inputs: wave(6, 16))
    pictures = np.zeros((6, 64, 64, 3), np.uint8)
    six = Samples([*"abcdef"], np.array([0, 1, 2, 0, 1, 2]), {"images": pictures})
    scores = [175.8521, 198.8369, 197.4929, 274.0710, 273.4138, 273.8740]
    np.testing.assert_allclose(novelty(model, six), scores, rtol=1e-5)
    losses = model.losses(Batch(six, np.arange(6), torch.device("cpu")))
    assert losses["cross_entropy"].item() == pytest.approx(27.548483, rel=1e-5)
    assert losses["distance"].item() == pytest.approx(143.75946, rel=1e-5)
    assert losses["loss"].item() == pytest.approx(56.307320, rel=1e-5)
    losses["loss"].backward()
    np.testing.assert_allclose(last.weight.grad[0, :3], [-0.10569, -0.40058, -0.28558], atol=2e-5)
    assert scatter["sigma"].grad.item() == pytest.approx(-2.486409, rel=1e-4)
    np.testing.assert_allclose(scatter["delta"].grad[:2], [-0.318727, 0.510543], rtol=1e-4)


def test_the_papers_network_has_its_parameters():
    model = Ndcc("paper")
    model.classes = 5
    with torch.device("meta"):
        layers = model.build()
    # VGG-16 with a last layer of five classes; sigma and 4,096 deltas.
    assert sum(p.numel() for p in layers["vgg"].parameters()) == 134_281_029
    assert sum(p.numel() for p in layers["scatter"].parameters()) == 4097


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
