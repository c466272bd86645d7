"""Neighbourhoods against explicit loops."""

import numpy as np
import pytest
import torch

from tasks.networks import geometry

torch.set_num_threads(1)


def cloud(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tiny_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "LARGEST_TABLE", 1)


def test_nearest_are_the_k_smallest_distances_and_include_the_point() -> None:
    points = cloud(3, 40, 5)
    found = geometry.nearest(points, 7)
    expected = torch.cdist(points.double(), points.double()).argsort(2)[..., :7]
    assert torch.equal(found.sort(2).values, expected.sort(2).values)
    assert (found == torch.arange(40)[None, :, None]).any(2).all()


def test_more_neighbours_than_points_are_all_points() -> None:
    assert (
        geometry.nearest(cloud(2, 5, 3), 20).sort(2).values.tolist() == [[[0, 1, 2, 3, 4]] * 5] * 2
    )


def test_nearest_of_another_cloud() -> None:
    left, right = cloud(3, 20, 3), cloud(3, 31, 3, seed=1)
    expected = torch.cdist(left.double(), right.double()).argmin(2)
    assert torch.equal(geometry.nearest_other(left, right), expected)


@pytest.mark.usefixtures("tiny_tables")
def test_tables_of_one_cloud_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    points, centers = cloud(4, 30, 3), cloud(4, 6, 3, seed=1)
    parts = geometry.nearest(points, 4), geometry.in_ball(points, centers, 0.8, 5)
    monkeypatch.setattr(geometry, "LARGEST_TABLE", 10**6)
    whole = geometry.nearest(points, 4), geometry.in_ball(points, centers, 0.8, 5)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


def farthest_loop(points: np.ndarray, count: int, skip: bool) -> list[int]:
    chosen = [0]
    while len(chosen) < count:
        gaps = ((points[:, None] - points[chosen][None]) ** 2).sum(2).min(1)
        if skip:
            gaps[(points**2).sum(1) <= 1e-3] = -1
        chosen.append(int(gaps.argmax()))
    return chosen


@pytest.mark.parametrize("skip", [False, True])
def test_farthest_points_start_at_zero_and_follow_the_plain_loop(skip: bool) -> None:
    points = cloud(3, 50, 3)
    points[:, 10:20] *= 0.005
    found = geometry.farthest_points(points, 45, skip_origin=skip)
    expected = [farthest_loop(one, 45, skip) for one in points.double().numpy()]
    assert found.tolist() == expected
    assert ((found >= 10) & (found < 20)).any().item() is not skip


def test_farthest_points_refuse_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="6 of 5"):
        geometry.farthest_points(cloud(1, 5, 3), 6)


def test_a_ball_is_open_takes_members_by_index_and_repeats_the_first() -> None:
    points = torch.tensor([[[9.0, 0, 0], [1, 0, 0], [0.5, 0, 0], [0, 0, 0], [0.25, 0, 0]]])
    center = torch.zeros(1, 1, 3)
    assert geometry.in_ball(points, center, 1.0, 5).tolist() == [[[2, 3, 4, 2, 2]]]
    assert geometry.in_ball(points, center, 1.0, 2).tolist() == [[[2, 3]]]
    assert geometry.in_ball(points, center, 1.0001, 7).tolist() == [[[1, 2, 3, 4, 1, 1, 1]]]
    assert geometry.in_ball(points, center + 50, 1.0, 3).tolist() == [[[0, 0, 0]]]


def test_gathered_rows_keep_to_their_cloud() -> None:
    values = cloud(3, 8, 2)
    index = torch.randint(8, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    found = geometry.gather_rows(values, index)
    assert torch.equal(found[2, 1, 3], values[2, index[2, 1, 3]])
    assert torch.equal(found[0], values[0][index[0]])
