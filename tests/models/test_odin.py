"""ODIN's input step: its size in each space, its sign, and what it does to the softmax."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.models.odin import OdinSettings, odin, perturbed, step_size

torch.set_num_threads(1)
# About CIFAR-10's deviations of pixels 0-255.
STD = torch.tensor([63.0, 62.1, 66.7])


@pytest.mark.parametrize(
    ("space", "first"),
    [("pixel255", 5e-5 / 63), ("pixel1", 5e-5 * 255 / 63), ("normalised", 5e-5)],
)
def test_a_step_is_as_long_as_its_space_says(space, first):
    step = step_size(OdinSettings(space=space), STD)
    assert step.shape == (3,) and math.isclose(step[0], first, rel_tol=1e-6)


def test_published_sizes_of_the_steps():
    assert step_size(OdinSettings(space="pixel255"), STD)[0] == pytest.approx(8e-7, rel=0.01)
    one = step_size(OdinSettings(space="pixel1"), 255 * torch.tensor([0.27, 0.27, 0.27]))
    assert one[0] == pytest.approx(1.9e-4, rel=0.03)


def test_a_zero_gradient_counts_as_positive():
    gradient = torch.tensor([-2.0, 0.0, 3.0]).view(1, 3, 1, 1)
    moved = perturbed(torch.zeros(1, 3, 1, 1), gradient, torch.tensor([0.1, 0.2, 0.3]))
    assert torch.allclose(moved.flatten(), torch.tensor([0.1, -0.2, -0.3]))


def linear(weight: torch.Tensor):
    """A network whose features are the pixels."""

    def forward(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = pictures.flatten(1)
        return features @ weight.T.to(features), features

    return forward


def by_hand(weight: np.ndarray, x: np.ndarray, step: np.ndarray, temperature: float) -> float:
    """-max softmax of x' with the gradient taken by differences, in float64."""

    def probabilities(values: np.ndarray) -> np.ndarray:
        logits = weight @ values / temperature
        odds = np.exp(logits - logits.max())
        return odds / odds.sum()

    told, width = probabilities(x).argmax(), 1e-4
    gradient = [
        (-np.log(probabilities(x + e)[told]) + np.log(probabilities(x - e)[told])) / (2 * width)
        for e in np.eye(len(x)) * width
    ]
    return -probabilities(x - np.where(np.array(gradient) >= 0, 1, -1) * step).max()


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1.0, 10.0]))
def test_novelty_is_minus_the_largest_softmax_of_the_moved_picture(seed, temperature):
    rng = np.random.default_rng(seed)
    weight, x = rng.normal(size=(4, 12)), rng.normal(size=12)
    settings = OdinSettings(temperature=temperature, epsilon=0.3, space="pixel255")
    std = torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64)
    picture = torch.from_numpy(x).view(1, 3, 2, 2)
    logits, features, novelty = odin(linear(torch.from_numpy(weight)), picture, std, settings)
    step = np.repeat(0.3 / std.numpy(), 4)
    assert novelty.dtype == torch.float64
    assert float(novelty[0]) == pytest.approx(by_hand(weight, x, step, temperature), rel=1e-6)
    assert np.allclose(logits[0], weight @ x) and np.allclose(features[0], x)


def test_the_step_raises_the_confidence_of_the_predicted_class():
    torch.manual_seed(0)
    forward = linear(torch.randn(5, 48))
    pictures, std = torch.randn(64, 3, 4, 4), torch.ones(3)
    settings = OdinSettings(temperature=10.0, epsilon=0.05, space="normalised")
    *_, moved = odin(forward, pictures, std, settings)
    *_, still = odin(forward, pictures, std, settings.model_copy(update={"epsilon": 0.0}))
    assert (moved < still).all()


def test_scores_at_a_high_temperature_do_not_tie():
    torch.manual_seed(0)
    *_, novelty = odin(
        linear(torch.randn(9, 48)), torch.randn(2000, 3, 4, 4), torch.ones(3), OdinSettings()
    )
    assert len(np.unique(novelty.numpy())) == 2000
    assert novelty.max() - novelty.min() < 5e-3
