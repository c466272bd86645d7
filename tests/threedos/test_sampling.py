"""Points are uniform by area, and the farthest ones are those of the plain definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chisquare, kstest

from schemas.errors import RecordError
from schemas.threedos import ShapeSettings
from tasks.threedos.sampling import (
    bucketed_farthest_points,
    farthest_points,
    filled,
    make_cloud,
    normalise,
    sample_surface,
    shape_rng,
    thinned,
    triangle_areas,
)

# A large triangle (area 8) and a small one (area 2) far from it.
CORNERS = np.array([[[0, 0, 0], [4, 0, 0], [0, 4, 0]], [[9, 0, 0], [11, 0, 0], [9, 0, 2]]], float)


def plain_farthest(points: np.ndarray, count: int) -> list[int]:
    """The definition, one distance row after another."""
    nearest = np.full(len(points), np.inf, np.float32)
    chosen = [0]
    while len(chosen) < count:
        nearest = np.minimum(nearest, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
        chosen.append(int(nearest.argmax()))
    return chosen


def test_areas_of_triangles():
    assert triangle_areas(CORNERS).tolist() == [8, 2]


def test_points_are_uniform_by_area():
    points = sample_surface(CORNERS, triangle_areas(CORNERS), 20_000, np.random.default_rng(5))
    small = points[:, 0] > 8
    large = points[~small]
    # Four congruent quarters of the large triangle: cut at the middles of its sides.
    quarter = np.where(large[:, 0] > 2, 0, np.where(large[:, 1] > 2, 1, 2))
    quarter[(quarter == 2) & (large[:, :2].sum(axis=1) > 2)] = 3
    counts = [small.sum(), *np.bincount(quarter, minlength=4)]
    assert chisquare(counts, np.array([0.2] * 5) * 20_000).pvalue > 1e-3
    # The share of a triangle below height x: 1 - (1 - x/4)^2.
    assert kstest(large[:, 0], lambda x: 1 - (1 - x / 4) ** 2).pvalue > 1e-3
    assert (large.min(axis=0) >= 0).all() and (large[:, 2] == 0).all()
    assert (large.sum(axis=1) <= 4 + 1e-9).all()


def test_a_biased_sampler_would_be_found():
    """The same test refuses points that are uniform by face instead of by area."""
    points = sample_surface(CORNERS, np.ones(2), 20_000, np.random.default_rng(5))
    small = int((points[:, 0] > 8).sum())
    assert chisquare([small, 20_000 - small], [4_000, 16_000]).pvalue < 1e-6


def test_faces_without_area_get_no_point():
    corners = np.concatenate([CORNERS[:1], np.full((3, 3, 3), 50.0), CORNERS[1:]])
    points = sample_surface(corners, triangle_areas(corners), 5_000, np.random.default_rng(0))
    assert points.max() < 12


def test_random_numbers_belong_to_seed_and_shape():
    drawn = {
        (seed, name): shape_rng(seed, name).random() for seed in (0, 1, 2**40) for name in "abc"
    }
    assert len(set(drawn.values())) == 9
    assert shape_rng(1, "b").random() == drawn[1, "b"]


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float32, st.tuples(st.integers(2, 60), st.just(3)), elements=st.integers(-3, 3)),
    st.data(),
)
def test_farthest_points_are_those_of_the_plain_loop_with_ties(points, data):
    count = data.draw(st.integers(1, len(points)))
    assert farthest_points(points, count).tolist() == plain_farthest(points, count)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
@pytest.mark.parametrize("kind", ["ball", "line", "clusters"])
def test_farthest_points_are_those_of_the_plain_loop(kind, scale):
    rng = np.random.default_rng(3)
    points = rng.normal(size=(1500, 3))
    if kind == "line":
        points *= (0.001, 1, 0.001)
    elif kind == "clusters":
        points = points * 0.01 + rng.integers(0, 3, (1500, 3))
    points = (points * scale).astype(np.float32)
    assert farthest_points(points, 700).tolist() == plain_farthest(points, 700)


@pytest.mark.parametrize("kind", ["ball", "line", "grid"])
def test_buckets_give_the_same_choice_from_another_first_point(kind):
    pytest.importorskip("fpsample", reason="fpsample is not installed (extra threed)")
    points = np.random.default_rng(5).normal(size=(1500, 3)).astype(np.float32)
    if kind == "line":
        points *= np.float32((0.001, 1, 0.001))
    indices = bucketed_farthest_points(points, 700)
    if kind == "grid":  # many equal distances: another choice of the farthest is as good
        points = points.round()
        indices = bucketed_farthest_points(points, 100)
        chosen = points[indices].astype(np.float64)
        gaps = [np.square(points - p).sum(1) for p in chosen]
        nearest = np.minimum.accumulate(gaps)
        assert all(nearest[k - 1][indices[k]] == nearest[k - 1].max() for k in range(1, 100))
        return
    order = np.r_[indices[0], np.delete(np.arange(1500), indices[0])]
    assert indices.tolist() == order[farthest_points(points[order], 700)].tolist()


def test_few_points_need_no_buckets():
    points = np.random.default_rng(5).normal(size=(63, 3)).astype(np.float32)
    assert np.array_equal(bucketed_farthest_points(points, 20), farthest_points(points, 20))
    plain, bucket = (make_cloud(points, 20, "unit_sphere", how) for how in ("plain", "bucket"))
    assert np.array_equal(plain.points, bucket.points)


def test_how_points_are_found_is_in_the_key_only_where_it_is_not_the_default():
    assert "farthest" not in ShapeSettings().model_dump()
    assert ShapeSettings(farthest="bucket").model_dump()["farthest"] == "bucket"


def test_a_beginning_is_the_choice_of_fewer():
    points = np.random.default_rng(0).random((900, 3)).astype(np.float32)
    whole = farthest_points(points, 512)
    for count in (1, 64, 256):
        assert whole[:count].tolist() == farthest_points(points, count).tolist()
    assert sorted(farthest_points(points, 900)) == list(range(900))


def test_more_points_than_there_are_are_refused():
    with pytest.raises(ValueError, match="11 of 10"):
        farthest_points(np.zeros((10, 3)), 11)


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, (2, 30, 3), elements=st.floats(-1e3, 1e3, width=32)),
    st.sampled_from(["unit_sphere", "unit_cube"]),
    st.floats(1e-3, 1e9),
    st.floats(-1e6, 1e6),
)
def test_normalised_clouds(points, kind, scale, move):
    points[:, 0] = (2000, 0, 0)
    cloud = normalise(points, kind)
    assert np.abs(cloud.mean(axis=1)).max() < 1e-9
    sizes = np.linalg.norm(cloud, axis=2) if kind == "unit_sphere" else np.abs(cloud).max(axis=2)
    assert sizes.max(axis=1) == pytest.approx([1, 1])
    again = normalise(points * scale + move * scale, kind)
    assert again == pytest.approx(cloud, abs=1e-6)


def test_normalisations_by_hand():
    points = np.array([[3.0, 0, 0], [-3, 0, 0], [0, 4, 0], [0, -4, 0], [3, 4, 0], [-3, -4, 0]]) + 7
    assert normalise(points, "unit_sphere")[4] == pytest.approx([0.6, 0.8, 0])
    assert normalise(points, "unit_cube")[4] == pytest.approx([0.75, 1, 0])


def test_one_place_has_no_extent():
    with pytest.raises(RecordError, match="one place") as caught:
        normalise(np.full((5, 3), 2.0))
    assert caught.value.rule == "no_extent"


def test_a_cloud_far_away_keeps_its_shape():
    """Float32 has 7 digits: at 1e9 a cloud of size 1 would collapse before normalisation."""
    points = np.random.default_rng(1).random((500, 3))
    near, far = (make_cloud(points + offset, 100, "unit_sphere") for offset in (0, 1e9))
    assert far.points == pytest.approx(near.points, abs=1e-5)
    assert near.points.dtype == np.float32
    assert far.scale == pytest.approx(near.scale, rel=1e-5)
    raw = near.points * near.scale + near.center
    assert np.linalg.norm(points[:, None] - raw[None], axis=2).min(axis=0).max() < 1e-6


def test_short_clouds_start_again_and_long_ones_are_thinned():
    points = np.arange(12.0).reshape(4, 3)
    assert filled(points, 10).tolist() == [*points.tolist(), *points.tolist(), *points[:2].tolist()]
    assert filled(points, 3).tolist() == points[:3].tolist()
    many = np.arange(300.0).reshape(100, 3)
    some = thinned(many, 30, np.random.default_rng(0))
    assert len({tuple(row) for row in some.tolist()}) == 30 and (np.diff(some[:, 0]) > 0).all()
    assert thinned(points, 30, np.random.default_rng(0)) is points
