"""Scores of the input of the last Linear, by hand: vim, dice, ash, scale, she, nnguide, fdbd."""

from math import e, exp, log

import numpy as np
import pytest
import torch
from torch import nn

from schemas.errors import ConfigError
from tasks.scores import find
from tasks.scores.base import Head, Outputs, Reference
from tests.scores import make_world, plain_head, scored

NAMES = ("vim", "dice", "ash", "scale", "she", "nnguide", "fdbd")


def features(*rows: list[float]) -> Outputs:
    return Outputs(features=np.array(rows, np.float64))


def lse(*logits: float) -> float:
    return log(sum(exp(logit) for logit in logits))


@pytest.mark.parametrize("name", NAMES)
def test_they_see_the_input_of_the_last_linear(name: str) -> None:
    """g with its BatchNorm and activation scores as z does with the Linear alone."""
    world = make_world(learnt=True)
    reference, head = world.reference, world.head
    linear = Head(head.weight, head.bias)

    def activated(outputs: Outputs) -> Outputs:
        z = head.activated(torch.from_numpy(outputs.features.astype(np.float64)))
        return Outputs(outputs.logits, z.numpy())

    after = Reference(activated(reference.train), reference.train_labels, None, linear)
    found = scored(name, activated(world.test), after)
    np.testing.assert_allclose(scored(name, world.test, reference), found, rtol=1e-9)


def test_vim_by_hand() -> None:
    # f = (x + 1, y): they vanish at o = (-1, 0, 0). About it the rows are (+-4, +-1 or 3, 0):
    # the first direction is x, and lengths in the others are 1, 1, 3, 3.
    head = plain_head([[1.0, 0, 0], [0, 1, 0]], bias=[1.0, 0])
    train = features([3.0, 1, 0], [3, -1, 0], [-5, 3, 0], [-5, -3, 0])
    reference = Reference(train, head=head)
    # Largest logits 4, 4, 3, -3: their mean is 2, as that of the lengths.
    test = features([7.0, 3, 4], [-1, 0, 0])
    expected = [5 - lse(8, 3), -lse(0, 0)]
    assert scored("vim", test, reference, dimension=1) == pytest.approx(expected)
    # The rule: half of three is one.
    assert scored("vim", test, reference) == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"vim: 2 directions leave nothing .* span 2 of 3"):
        scored("vim", test, reference, dimension=2)


def test_dice_by_hand() -> None:
    # Mean z (2, 1): contributions 2, 3, -4, 4; their median is 2.5: 3 and 4 stay.
    head = plain_head([[1.0, 3], [-2, 4]], bias=[0.5, 0])
    reference = Reference(features([1.0, 0], [3, 2]), head=head)
    test = features([2.0, 1])
    assert scored("dice", test, reference, percentile=50) == pytest.approx([-lse(3.5, 4)])
    # Below the least: what is equal to it goes.
    assert scored("dice", test, reference, percentile=0) == pytest.approx([-lse(5.5, 4)])
    assert scored("dice", test, reference, percentile=100) == pytest.approx([-lse(0.5, 0)])


def test_ash_and_scale_by_hand() -> None:
    # Of 4 values the 2 largest, 4 and 2, are kept; sums 7 and 6.
    head = plain_head([[1.0, 0, 0, 0], [0, 1, 1, 1]])
    reference, test = Reference(head=head), features([4.0, 1, 2, 0])
    grown = exp(7 / 6)
    for variant, logits in (("p", (4, 2)), ("b", (3.5, 3.5)), ("s", (4 * grown, 2 * grown))):
        found = scored("ash", test, reference, variant=variant, percentile=50)
        assert found == pytest.approx([-lse(*logits)])
    found = scored("scale", test, reference, percentile=50)
    assert found == pytest.approx([-lse(4 * grown, 3 * grown)])


def test_shaping_of_values_below_zero() -> None:
    """Sums are of positive values; without any, values grow by e and nothing is put in."""
    head = plain_head([[1.0, 0, 0, 0], [0, 1, 1, 1]])
    reference, test = Reference(head=head), features([3.0, 1, -5, -1], [-1, -2, -3, -4])
    found = scored("ash", test, reference, variant="s", percentile=75)
    assert found == pytest.approx([-lse(3 * exp(4 / 3), 0), -lse(-e, 0)])
    found = scored("ash", test, reference, variant="b", percentile=75)
    assert found == pytest.approx([-lse(4, 0), -lse(0, 0)])
    found = scored("scale", test, reference, percentile=75)
    assert found == pytest.approx([-lse(3 * exp(4 / 3), -5 * exp(4 / 3)), -lse(-e, -9 * e)])


def test_ash_has_the_percentiles_of_the_paper() -> None:
    world = make_world()
    for variant, percentile in (("p", 60), ("b", 65), ("s", 90)):
        default = scored("ash", world.test, world.reference, variant=variant)
        given = {"variant": variant, "percentile": percentile}
        assert np.array_equal(default, scored("ash", world.test, world.reference, **given))
    for name in ("ash", "scale"):
        assert len(scored(name, world.test, world.reference, percentile=99.9)) == len(world.test)


def test_she_by_hand() -> None:
    # Of class 0 the first two rows are right: (3, 1). Of class 1 none is: the mean of both, (2, 0).
    head = plain_head([[1.0, 0], [0, 1]])
    train = features([2.0, 0], [4, 2], [0, 5], [3, 1], [1, -1])
    reference = Reference(train, np.array([0, 0, 0, 1, 1]), head=head)
    test = features([2.0, 1], [1, 2])
    assert scored("she", test, reference) == pytest.approx([-7, -2])
    with pytest.raises(ConfigError, match="class 1 of the logits has no training rows"):
        scored("she", test, Reference(train, np.zeros(5, np.int64), head=head))
    with pytest.raises(ConfigError, match="labels from 0 to 2 are not columns of logits of 2"):
        scored("she", test, Reference(train, np.array([0, 1, 2, 0, 1]), head=head))
    with pytest.raises(ConfigError, match="needs train_labels"):
        scored("she", test, Reference(train, head=head))


def test_nnguide_by_hand() -> None:
    head = plain_head([[1.0, 0], [0, 1]])
    reference = Reference(features([3.0, 0], [0, 2], [-1, 0]), head=head)
    # Cosines of (0, 1) to them: 0, 1, 0.
    energies = lse(3, 0), lse(0, 2), lse(-1, 0)
    test, own = features([0.0, 1]), lse(0, 1)
    for k, guidance in ((1, energies[1]), (2, energies[1] / 2), (10, energies[1] / 3)):
        found = scored("nnguide", test, reference, k=k)
        assert found == pytest.approx([-own * guidance])
    assert scored("nnguide", features([3.0, 4]), reference, k=1) == pytest.approx(
        [-lse(3, 4) * max(0.6 * energies[0], 0.8 * energies[1])]
    )


def test_fdbd_by_hand() -> None:
    # Weights differ by (3, -4), length 5, and by (3, 0) and (0, 4); mean z (1, 1).
    head = plain_head([[3.0, 0], [0, 4], [0, 0]])
    reference = Reference(features([0.0, 2], [2, 0]), head=head)
    test = features([5.0, 1], [1, 1])
    # f = (15, 4, 0): (11 / 5 + 15 / 3) / 2 over the distance 4. f = (3, 4, 0): at the mean itself.
    expected = [-(11 / 5 + 15 / 3) / 2 / 4, -(1 / 5 + 4 / 4) / 2 / 1e-8]
    assert scored("fdbd", test, reference) == pytest.approx(expected)
    alike = Reference(
        reference.train, head=plain_head([[3.0, 0], [3, 0], [0, 0]], bias=[0.0, 9, 0])
    )
    assert scored("fdbd", features([5.0, 1]), alike) == pytest.approx([-(0 + 24 / 3) / 2 / 4])
    with pytest.raises(ConfigError, match="fdbd needs two classes"):
        scored("fdbd", test, Reference(reference.train, head=plain_head([[1.0, 2]])))


@pytest.mark.parametrize("name", ["ash", "scale"])
def test_the_network_itself_shaped(name: str) -> None:
    """The layers of torch with the shaping between activation and Linear."""
    world = make_world(slope=0.0)
    percentile = 75.0

    class Shaping(nn.Module):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            threshold = z.quantile(percentile / 100, 1, keepdim=True, interpolation="higher")
            pruned = torch.where(z >= threshold, z, 0)
            grown = (z.sum(1) / pruned.sum(1)).exp()[:, None]
            return (pruned if name == "ash" else z) * grown

    norm, activation, _, linear = world.layers.double()
    with torch.no_grad():
        layers = nn.Sequential(norm, activation, Shaping(), linear)
        expected = -layers(torch.from_numpy(world.test.features).double()).logsumexp(1).numpy()
    found = scored(name, world.test, world.reference, percentile=percentile)
    enough = (world.head.activated(torch.from_numpy(world.test.features)) > 0).sum(1).numpy() >= 8
    assert enough.mean() > 0.9
    assert found[enough] == pytest.approx(expected[enough], rel=1e-9)


def test_blocks_of_nnguide_follow_the_training_rows() -> None:
    world = make_world()
    score = find("nnguide")()
    score.fit(world.reference)
    assert score.held == len(world.reference.train)
