"""The network: its form, its head when labels are added, its threshold."""

import numpy as np
import polars as pl
import pytest
import torch

from tasks.predictors.ann import Ann
from tasks.predictors.base import Examples
from tests.predictors import WIDTH, examples, named, samples


def changed(preset: str = "small", **values) -> Ann:
    settings = Ann.resolve(preset)
    return Ann(type(settings).model_validate({**settings.model_dump(), **values}), device="cpu")


def test_numbers_of_the_paper_and_of_the_release():
    paper, released = Ann.resolve("paper"), Ann.resolve("released")
    assert (paper.hidden, paper.dropout, paper.epochs) == (None, 0.5, 1)
    assert Ann.resolve("paper_100") == Ann.resolve("paper", {"epochs": 100})
    assert (paper.batch_size, paper.learning_rate, paper.optimizer) == (1000, 1e-3, "adam")
    assert (paper.accepted_error, paper.head) == (0.1, "grow")
    assert (released.dropout, released.head) == (0.75, "remake")


@pytest.mark.parametrize(("width", "numbers"), [(768, 905_882), (8192, 17_619_354)])
def test_it_is_as_large_as_the_release_s(width, numbers):
    """TimeSformer 768 and X3D-M 8192 to 2048, 409 labels and `unknown`: counted there."""
    predictor = Ann("paper", device="cpu")
    predictor.width, predictor.known = width, tuple(map(str, range(409)))
    with torch.device("meta"):
        layers = predictor._build()
    assert sum(each.numel() for each in layers.parameters()) == numbers


def test_the_same_weights_put_out_what_the_release_s_network_does():
    """Weights are sines of 1, 2, 3, ..., layer by layer; the numbers are from its code."""
    predictor = Ann("paper", device="cpu")
    predictor.width, predictor.known = 5, ("a", "b", "c")
    state, start = {}, 1
    for name, value in predictor._build().state_dict().items():
        places = torch.arange(start, start + value.numel(), dtype=torch.float64)
        state[name], start = places.sin().view(value.shape).float(), start + value.numel()
    predictor.restore(state, {"threshold": None})
    found = predictor.predict(np.cos(np.arange(10.0)).reshape(2, 5))
    expected = [
        [0.0323386, 0.0122039, 0.11808, 0.8373776],
        [0.1735595, 0.0016429, 0.0053666, 0.819431],
    ]
    np.testing.assert_allclose(found.probabilities, expected, atol=2e-7)


def test_layers():
    predictor = changed(epochs=1)
    predictor.fit(examples("abc", 5, 1))
    kinds = [type(layer).__name__ for layer in predictor.layers]
    assert kinds == ["Linear", "Dropout", "LeakyReLU", "Linear"]
    assert predictor.layers[3].out_features == 4


@pytest.mark.parametrize("head", ["grow", "remake"])
def test_the_head_when_labels_are_added(head):
    # Steps too small to move a weight leave what was taken over as it was.
    predictor = changed(head=head, epochs=1, learning_rate=1e-30)
    predictor.fit(examples("abc", 10, 1), seed=[1])
    before = {name: value.clone() for name, value in predictor.layers.state_dict().items()}
    predictor.fit(examples("abcde", 10, 2), seed=[2])
    after = predictor.layers.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert after["3.weight"].shape == (6, 64)
    kept = torch.equal(after["3.weight"][:4], before["3.weight"])
    assert kept == (head == "grow")
    # Without new labels nothing is made anew, whatever the rule.
    predictor.fit(examples("abcde", 10, 3), seed=[3])
    assert torch.equal(predictor.layers.state_dict()["3.weight"], after["3.weight"])


@pytest.mark.parametrize("error", [0.0, 0.1, 0.4])
def test_the_threshold_refuses_the_accepted_share_of_validation(error):
    valid = examples("abcd", 50, 2)
    predictor = changed(accepted_error=error)
    predictor.fit(examples("abcd", 40, 1), valid)
    refused = (named(predictor, valid.features) == "unknown").mean()
    assert refused == pytest.approx(error, abs=0.01)


def test_without_validation_nothing_is_refused():
    predictor = changed()
    predictor.fit(examples("abcd", 40, 1))
    assert predictor.threshold is None
    assert not (named(predictor, samples("xyz", 20, 3)[0]) == "unknown").any()


@pytest.mark.parametrize(("rule", "moves"), [("first_fit", False), ("every_fit", True)])
def test_when_the_threshold_is_set(rule, moves):
    predictor = changed(calibrate=rule, epochs=5)
    predictor.fit(examples("abcd", 40, 1), examples("abcd", 20, 2), seed=[1])
    first = predictor.threshold
    predictor.fit(examples("abcdef", 40, 3), examples("abcdef", 20, 4), seed=[2])
    assert (predictor.threshold != first) == moves


def test_unlabelled_samples_are_not_trained():
    features, labels = samples("abc", 10, 1)
    more = np.concatenate([features, np.full((7, WIDTH), 9.0, np.float32)])
    gaps = pl.concat([labels, pl.Series([None] * 7, dtype=pl.String)])
    one, two = changed(epochs=2), changed(epochs=2)
    one.fit(Examples(features, labels), seed=[1])
    two.fit(Examples(more, gaps), seed=[1])
    for name, value in one.layers.state_dict().items():
        assert torch.equal(value, two.layers.state_dict()[name])
