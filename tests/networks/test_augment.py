"""Random changes of clouds against the stated ranges."""

import math

import numpy as np
import pytest
import torch

from tasks.networks.augment import augment, draw_points, normalised, rotations
from tasks.threedos.sampling import normalise

torch.set_num_threads(1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clouds(batch: int = 500, points: int = 20) -> torch.Tensor:
    return torch.randn(batch, points, 3, generator=generator(7), dtype=torch.float64)


def test_st_is_one_scale_and_one_scalar_shift_a_cloud() -> None:
    before = clouds()
    after = augment(before, "st", generator=generator())
    spread = before - before[:, :1]
    scale = ((after - after[:, :1]).norm(dim=(1, 2)) / spread.norm(dim=(1, 2)))[:, None, None]
    shift = after - scale * before
    assert torch.allclose(shift, shift[:, :1, :1].expand_as(shift), atol=1e-9)
    shift, scale = shift[:, 0, 0], scale.flatten()
    assert 2 / 3 <= scale.min() < 0.7 and 1.45 < scale.max() <= 1.5
    assert -0.2 <= shift.min() < -0.19 and 0.19 < shift.max() <= 0.2
    assert abs(float(scale.mean()) - (2 / 3 + 3 / 2) / 2) < 0.04


@pytest.mark.parametrize("up", ["x", "y", "z"])
def test_rw_turns_freely_about_the_up_axis_only(up: str) -> None:
    axis = "xyz".index(up)
    before = torch.zeros(800, 4, 3, dtype=torch.float64)
    before[:, 0, axis] = 1
    before[:, 1, (axis + 1) % 3] = 1
    after = augment(before, "rw", up=up, generator=generator())
    after = after - after[:, 3:]  # without the shift
    upright, flat = after[:, 0], after[:, 1]
    # Scale .8 to 1.25, jitter up to .05 in each of two points, small turns up to about .3.
    assert (upright[:, axis] > 0.8 * math.cos(0.32) - 0.1).all()
    assert upright.norm(dim=1).max() < 1.25 + 0.18
    angle = torch.atan2(flat[:, (axis + 2) % 3], flat[:, (axis + 1) % 3])
    share = torch.histc(angle, 8, -math.pi, math.pi) / len(angle)
    assert share.min() > 0.08 and share.max() < 0.18


def test_rw_jitter_and_shift_have_the_stated_size() -> None:
    after = augment(torch.zeros(400, 50, 3), "rw", generator=generator())
    shift = after.mean((1, 2))
    jitter = after - shift[:, None, None]
    assert shift.abs().max() <= 0.1 + 0.01 and shift.abs().max() > 0.09
    assert abs(float(jitter.std()) - 0.01) < 5e-4 and jitter.abs().max() < 0.055


def test_rotations_are_right_handed() -> None:
    quarter = torch.tensor([math.pi / 2], dtype=torch.float64)
    x, y, z = torch.eye(3, dtype=torch.float64)
    for axis, start, end in (("x", y, z), ("y", z, x), ("z", x, y)):
        assert torch.allclose(rotations(quarter, axis)[0] @ start, end, atol=1e-12)
    turned = rotations(torch.linspace(0, 6, 10), "y")
    assert torch.allclose(turned @ turned.mT, torch.eye(3).expand(10, 3, 3), atol=1e-6)


def test_the_same_generator_gives_the_same_and_none_changes_nothing() -> None:
    before = clouds(4)
    kept = before.clone()
    for kind in ("st", "rw"):
        first = augment(before, kind, generator=generator(3))
        assert torch.equal(first, augment(before, kind, generator=generator(3)))
        assert not torch.equal(first, augment(before, kind, generator=generator(4)))
    assert torch.equal(augment(before, "none"), kept) and torch.equal(before, kept)


def test_points_are_drawn_without_replacement_while_there_are_enough() -> None:
    numbered = torch.arange(3 * 30.0).view(3, 30, 1).expand(-1, -1, 3)
    drawn = draw_points(numbered, 12, generator=generator())[..., 0]
    assert all(len(row.unique()) == 12 for row in drawn)
    assert ((drawn // 30) == torch.arange(3.0)[:, None]).all()
    assert not torch.equal(drawn[0], drawn[1] - 30)
    assert sorted(draw_points(numbered, 30, generator=generator())[0, :, 0].tolist()) == list(
        range(30)
    )
    assert draw_points(numbered, 50, generator=generator()).shape == (3, 50, 3)


def test_normalised_agrees_with_the_sampling() -> None:
    before = clouds(5) * 7 + 3
    assert np.allclose(normalised(before).numpy(), normalise(before.numpy()))
    cube = normalise(before.numpy(), "unit_cube")
    assert np.allclose(normalised(before, "unit_cube").numpy(), cube, atol=1e-6)
