"""Boxes and camera of a world state."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.novelcraft.scene import (
    PUBLISHED_EYE_OFFSET,
    PUBLISHED_FOV,
    Scene,
    View,
    build_scene,
    camera_rotation,
    hit_depth,
    pixel_rays,
)
from tasks.novelcraft.worldstate import WorldState, world_state
from tests.shared import shared_path


def small_state(
    blocks: dict[tuple[int, int, int], str],
    entities: dict[tuple[int, int, int], tuple[str, str]] | None = None,
    yaw: float = 0.0,
    pitch: float = 0.0,
    player: tuple[int, int, int] = (0, 4, 0),
) -> WorldState:
    """A state with these blocks (keys by position) and entities ((type, name) by position)."""
    return world_state(small_document(blocks, entities, yaw, pitch, player))


def small_document(
    blocks: dict[tuple[int, int, int], str],
    entities: dict[tuple[int, int, int], tuple[str, str]] | None = None,
    yaw: float = 0.0,
    pitch: float = 0.0,
    player: tuple[int, int, int] = (0, 4, 0),
) -> dict[str, Any]:
    return {
        "map": {",".join(map(str, place)): {"name": name} for place, name in blocks.items()},
        "entities": {
            str(i): {"type": kind, "name": name, "pos": list(place)}
            for i, (place, (kind, name)) in enumerate((entities or {}).items())
        },
        "player": {"pos": list(player), "yaw": yaw, "pitch": pitch},
        "step": 0,
    }


def test_camera_constants_are_the_published_ones() -> None:
    import json

    spec = json.loads(shared_path("novelcraft/camera/scene_spec.json").read_text())["camera"]
    assert pytest.approx(spec["fov_degrees"], abs=1e-12) == PUBLISHED_FOV
    assert pytest.approx(spec["y_offset_above_player_pos"], abs=1e-12) == PUBLISHED_EYE_OFFSET
    assert [View().near, View().far] == spec["clip"]


def test_box_sizes() -> None:
    state = small_state(
        {
            (1, 4, 2): "minecraft:tnt",
            (3, 4, 2): "minecraft:log_var_oak",
            (5, 4, 2): "minecraft:air",
        },
        {(7, 4, 2): ("EntityTrader", "trader")},
    )
    scene = build_scene(state, ["minecraft:tnt"])
    boxes = {
        scene.labels[label]: (low.tolist(), high.tolist())
        for label, low, high in zip(scene.label_index, scene.lower, scene.upper, strict=True)
    }
    assert boxes == {
        "minecraft:tnt": ([0.5, 3.5, 1.5], [1.5, 4.5, 2.5]),
        "minecraft:log_var_oak": ([2.5, 3.5, 1.5], [3.5, 6.5, 2.5]),
        "trader": ([6.5, 3.5, 1.5], [7.5, 5.3, 2.5]),
    }
    assert scene.eye.tolist() == [0.0, 4 + PUBLISHED_EYE_OFFSET, 0.0]


@pytest.mark.parametrize(
    ("novel", "found"),
    [
        (["minecraft:tnt"], {"minecraft:tnt"}),
        ("minecraft:tnt", {"minecraft:tnt"}),
        (["minecraft:prismarine_var_prismarine"], {"minecraft:prismarine_var_prismarine"}),
        (
            ["minecraft:prismarine"],
            {"minecraft:prismarine_var_prismarine", "minecraft:prismarine_var_dark"},
        ),
        (["minecraft:prismarine_var_bricks"], set()),
        (["minecraft:log"], {"minecraft:log_var_oak"}),
        (["EntityTrader"], {"ann", "bob"}),
        (["bob"], {"bob"}),
        (["minecraft:t"], set()),
        ([], set()),
    ],
)
def test_which_names_are_novel(novel: Any, found: set[str]) -> None:
    names = [
        "minecraft:tnt",
        "minecraft:log_var_oak",
        "minecraft:prismarine_var_prismarine",
        "minecraft:prismarine_var_dark",
    ]
    state = small_state(
        {(i, 4, 5): name for i, name in enumerate(names)},
        {(0, 4, 9): ("EntityTrader", "ann"), (1, 4, 9): ("EntityTrader", "bob")},
    )
    scene = build_scene(state, novel)
    assert {scene.labels[i] for i in scene.label_index[scene.novel]} == found


@pytest.mark.parametrize(
    ("yaw", "forward"), [(0, (0, 0, 1)), (90, (-1, 0, 0)), (180, (0, 0, -1)), (270, (1, 0, 0))]
)
@pytest.mark.parametrize("rotation", ["published", "corrected"])
def test_yaw_turns_from_south_over_west(
    yaw: float, forward: tuple[int, ...], rotation: str
) -> None:
    turned = camera_rotation(yaw, 0.0, rotation)
    assert (turned @ (0, 0, -1)).tolist() == list(forward)
    assert (turned @ (0, 1, 0)).tolist() == [0, 1, 0]


@given(st.floats(0, 360), st.floats(-90, 90), st.sampled_from(["published", "corrected"]))
def test_rotations_are_rotations(yaw: float, pitch: float, rotation: str) -> None:
    turned = camera_rotation(yaw, pitch, rotation)
    assert np.allclose(turned @ turned.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(turned) == pytest.approx(1.0)


@given(st.floats(0, 360), st.floats(-90, 90))
def test_corrected_rotation_looks_where_the_player_looks(yaw: float, pitch: float) -> None:
    turned = camera_rotation(yaw, pitch, "corrected")
    y, p = np.radians(yaw), np.radians(pitch)
    forward = (-np.sin(y) * np.cos(p), -np.sin(p), np.cos(y) * np.cos(p))
    assert np.allclose(turned @ (0, 0, -1), forward, atol=1e-12)
    assert (turned @ (1, 0, 0))[1] == pytest.approx(0.0, abs=1e-12)


@given(st.floats(-90, 90))
def test_rotations_agree_facing_south_only(pitch: float) -> None:
    one, other = (camera_rotation(0.0, pitch, name) for name in ("published", "corrected"))
    assert np.allclose(one, other)
    up = camera_rotation(180.0, pitch, "published") @ (0, 0, -1)
    assert up[1] == pytest.approx(np.sin(np.radians(pitch)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rotation": "other"},
        {"fov": 0.0},
        {"fov": 180.0},
        {"fov": float("nan")},
        {"eye_offset": float("inf")},
        {"resolution": 0},
        {"near": 2.0, "far": 1.0},
        {"near": 2.0, "far": 5.0},
        {"near": 0.0},
    ],
)
def test_views_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        View(**wrong)


def test_pixel_rays() -> None:
    scene = build_scene(small_state({}, yaw=90.0), [], View(fov=90.0, resolution=4))
    rays = pixel_rays(scene)
    assert rays.shape == (4, 4, 3)
    assert np.allclose(rays @ scene.rotation @ (0, 0, -1), 1.0)
    assert np.allclose(rays[0, 0] @ scene.rotation, (-0.75, 0.75, -1))
    assert np.allclose(rays[3, 2] @ scene.rotation, (0.25, -0.75, -1))
    fine = pixel_rays(scene, 2, slice(2, 5), slice(1, 3))
    assert np.array_equal(fine, pixel_rays(scene, 2)[2:5, 1:3])
    assert np.allclose(pixel_rays(scene, 2).reshape(4, 2, 4, 2, 3).mean((1, 3)), rays)


@given(st.floats(0, 360), st.floats(-90, 90))
def test_corners_in_camera_axes(yaw: float, pitch: float) -> None:
    scene = build_scene(small_state({(2, 4, 5): "minecraft:log"}, yaw=yaw, pitch=pitch), [])
    corners = scene.corners(np.array([0]))[0] * (1, 1, -1) @ scene.rotation.T + scene.eye
    assert np.allclose(corners.min(0), scene.lower[0])
    assert np.allclose(corners.max(0), scene.upper[0])


def depth_of(scene: Scene, *direction: float) -> float:
    return float(hit_depth(scene, 0, np.array(direction)))


def test_hit_depth() -> None:
    scene = build_scene(small_state({(0, 5, 3): "minecraft:tnt"}), [])
    assert depth_of(scene, 0, 0, 1) == 2.5
    assert depth_of(scene, 0, 0, -1) == np.inf
    assert depth_of(scene, 1, 0, 1) == np.inf
    inside = build_scene(small_state({(0, 5, 0): "minecraft:tnt"}), [])
    assert depth_of(inside, 0, 0, 1) == 0.5
    assert depth_of(inside, 0.5, 0, 1) == 0.5


def test_hit_depth_between_the_clip_planes() -> None:
    blocks = {(0, 5, 3): "minecraft:tnt"}
    near = build_scene(small_state(blocks), [], View(near=3.0))
    assert depth_of(near, 0, 0, 1) == 3.5, "the far side, from within"
    assert depth_of(build_scene(small_state(blocks), [], View(near=3.6)), 0, 0, 1) == np.inf
    beyond = small_state({(0, 5, 5): "minecraft:tnt"})
    assert depth_of(build_scene(beyond, [], View(far=4.4)), 0, 0, 1) == np.inf
    assert depth_of(build_scene(beyond, [], View(far=4.6)), 0, 0, 1) == 4.5
