"""The fast renderer: against every ray on every box, published numbers and real frames."""

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.novelcraft import raycast
from tasks.novelcraft.masks import bounding_box, decode_png, mask_iou
from tasks.novelcraft.raycast import (
    SAMPLES,
    NovelObject,
    boxes_seen,
    novel_mask,
    novel_window,
    render,
    samples_per_pixel,
    segment,
)
from tasks.novelcraft.scene import (
    Scene,
    View,
    build_scene,
    camera_rotation,
    hit_depth,
    pixel_rays,
)
from tasks.novelcraft.worldstate import WorldState, parse_world_state, world_state
from tests.novelcraft.test_scene import small_document, small_state
from tests.shared import shared_path

TNT, LOG, BEDROCK = "minecraft:tnt", "minecraft:log", "minecraft:bedrock"
NOVEL = (TNT, "EntityPogoist")

# Rows of single_object_pixel_counts.csv in which an edge covers a tenth of a whole side of pixels.
# These counts are what Blender 4.5 renders with the published settings, and most labels have.
BLENDER_COUNTS = {
    ("cube", 1, 7): 915,
    ("tree_trunk", 0, 4): 7956,
    ("tree_trunk", 1, 4): 8762,
    ("tree_trunk", 2, 4): 10269,
    ("tree_trunk", 1, 7): 2509,
}


def random_room(seed: int) -> dict[str, Any]:
    """Blocks, trunks and entities around the player, now and then on the player."""
    draw = random.Random(seed)
    reach = draw.choice([2, 4, 8])
    blocks = {
        (
            draw.randint(-reach, reach),
            draw.choice([4, 4, 4, 3, 5, 6]),
            draw.randint(-reach, reach),
        ): draw.choice([BEDROCK, LOG, TNT])
        for _ in range(draw.choice([3, 15, 40]))
    }
    if draw.random() < 0.8:
        blocks = {place: name for place, name in blocks.items() if place[::2] != (0, 0)}
    kinds = ("EntityTrader", "EntityPogoist")
    entities = {
        (draw.randint(-reach, reach), 4, draw.randint(-reach, reach)): (
            draw.choice(kinds),
            "someone",
        )
        for _ in range(draw.choice([0, 0, 3]))
    }
    if draw.random() < 0.1:
        entities[0, 4, 0] = ("EntityTrader", "spawn bug")
    yaw = draw.choice([draw.uniform(0, 360), float(draw.randrange(0, 360, 15))])
    pitch = draw.choice([0.0, 0.0, 60.0, draw.uniform(-90, 90)])
    return small_document(blocks, entities, yaw, pitch)


def every_ray(scene: Scene, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(boxes, rows, columns): which boxes' surfaces are at the nearest place of every sample, from
    every ray on every box; and the depth of that place."""
    rays = pixel_rays(scene, samples)
    depths = np.array([hit_depth(scene, box, rays) for box in range(len(scene.lower))])
    nearest = depths.min(axis=0, initial=np.inf)
    return np.isfinite(depths) & (depths <= nearest + 1e-9), nearest


@given(
    st.integers(0, 1 << 32),
    st.sampled_from(["published", "corrected"]),
    st.sampled_from([View().eye_offset, 1.45, 0.3]),
    st.sampled_from(["published", "half"]),
)
@settings(max_examples=40, deadline=None)
def test_equal_to_every_ray_on_every_box(
    seed: int, rotation: Any, eye_offset: float, coverage: str
) -> None:
    view = View(rotation=rotation, eye_offset=eye_offset, resolution=48)
    scene = build_scene(world_state(random_room(seed)), NOVEL, view)
    samples = 8  # any number will do; every ray of more takes long
    met, _ = every_ray(scene, samples)
    least = {"published": 7, "half": 32}[coverage]
    found = render(scene, coverage, samples)
    novel, other = met[scene.novel].any(0), met[~scene.novel].any(0)
    assert (found.mask >= (samples_per_pixel(novel & ~other, samples) >= least)).all()
    assert (found.mask <= (samples_per_pixel(novel, samples) >= least)).all()
    assert found.pixels == np.count_nonzero(found.mask)
    if coverage == "published":
        assert np.array_equal(novel_mask(scene, samples), found.mask)
    if met.sum(0).max(initial=0) > 1:
        return
    objects = []
    for box in scene.novel.nonzero()[0]:
        covered = samples_per_pixel(met[box], samples) >= least
        if bounds := bounding_box(covered):
            label = scene.labels[scene.label_index[box]]
            objects.append(NovelObject(label, *bounds, int(covered.sum())))
    assert sorted(found.objects) == sorted(objects)
    for label, pixels in found.label_pixels.items():
        of_label = met[scene.novel & (scene.label_index == scene.labels.index(label))].any(0)
        assert pixels == np.count_nonzero(samples_per_pixel(of_label, samples) >= least)


@given(st.integers(0, 1 << 32), st.floats(0.05, 3.0), st.floats(4.1, 12.0))
@settings(max_examples=40, deadline=None)
def test_segmentation_and_depth_equal_to_every_ray(seed: int, near: float, span: float) -> None:
    view = View(resolution=64, near=near, far=near + span)
    scene = build_scene(world_state(random_room(seed)), NOVEL, view)
    met, nearest = every_ray(scene, 1)
    labels, depth = segment(scene)
    for box, at in enumerate(met & (met.sum(0) == 1)):
        assert (labels[at] == scene.label_index[box]).all()
    assert np.array_equal(labels >= 0, met.any(0))
    assert depth.dtype == np.float32
    assert np.allclose(depth, nearest, rtol=1e-6)


@given(st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_boxes_of_any_size_anywhere_equal_to_every_ray(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 40))
    lower = draw.integers(-24, 24, (count, 3)) / 4  # quarters: some touch, overlap, hold the camera
    sides = draw.integers(1, 40, (count, 3)) / 8
    turn = camera_rotation(*draw.uniform(-90, 90, 2), "corrected")
    label = np.arange(count)
    novel = np.zeros(count, bool)
    eye = draw.uniform(-1, 1, 3)
    scene = Scene(lower, lower + sides, label, (), novel, eye, turn, View(resolution=150))
    met, _ = every_ray(scene, 1)
    owner = boxes_seen(scene)
    assert np.array_equal(owner >= 0, met.any(0))
    rows, columns = np.nonzero(owner >= 0)
    assert met[owner[rows, columns], rows, columns].all()


def count_rows() -> list[dict[str, str]]:
    path = shared_path("novelcraft/expected/single_object_pixel_counts.csv")
    return list(csv.DictReader(path.open()))


def lone_object(row: dict[str, str]) -> tuple[tuple[str, int, int], Scene]:
    dx, dz = int(row["dx_blocks"]), int(row["dz_blocks"])
    name = TNT if row["object"] == "cube" else LOG
    return (row["object"], dx, dz), build_scene(small_state({(dx, 4, dz): name}), [name])


def test_8x8_samples_have_the_pixel_counts_of_the_table() -> None:
    rows = count_rows()
    assert len(rows) == 94
    for row in rows:
        place, scene = lone_object(row)
        assert render(scene, samples=8).pixels == int(row["pixels_coverage_ge_0.1"]), place
        half = render(scene, "half", 8).pixels
        assert abs(half - int(row["pixels_coverage_ge_0.5"])) <= 1, place


def test_the_default_has_the_counts_of_blender() -> None:
    differences = []
    for row in count_rows():
        place, scene = lone_object(row)
        expected = BLENDER_COUNTS.get(place, int(row["pixels_coverage_ge_0.1"]))
        pixels = render(scene).pixels
        assert abs(pixels - expected) <= 6, place
        if row["pixels_blender_bpy_5.0.1"]:
            differences.append(abs(pixels - int(row["pixels_blender_bpy_5.0.1"])))
    assert len(differences) == 23
    assert max(differences) <= 2


def test_the_default_agrees_with_most_published_labels() -> None:
    """Labels within a pixel of the count of a single object; Blender 4.5's counts have 2,663."""
    targets = pl.read_csv(shared_path("novelcraft/labels/targets.csv"))
    pixels = (targets["novel_percent"] * 65536).round().cast(pl.Int64)
    fence, tree = (targets["id"].str.starts_with(f"{name}/") for name in ("fence", "tree_easy"))
    labels = {"tree_trunk": pixels.filter(tree), "cube": pixels.filter(~tree & ~fence)}
    labels = {kind: np.bincount(counts, minlength=65540) for kind, counts in labels.items()}

    def agreeing(samples: int) -> int:
        found = 0
        for row in count_rows():
            count = render(lone_object(row)[1], samples=samples).pixels
            if 0 < count < 65536:
                found += int(labels[row["object"]][max(count - 1, 1) : count + 2].sum())
        return found

    assert {n: agreeing(n) for n in (1, 2, 4, 5, 8, SAMPLES)} == {
        1: 538, 2: 1568, 4: 2176, 5: 2365, 8: 2444, SAMPLES: 2518,
    }  # fmt: skip


def real_state(frame: str) -> WorldState:
    path = shared_path(f"novelcraft/episodes/polycraft_v1/{frame}.json")
    return parse_world_state(path.read_bytes())


def test_hand_masks() -> None:
    path = shared_path("novelcraft/expected/camera_iou.csv")
    for row in csv.DictReader(path.open()):
        frame = row["frame"]
        hand = decode_png(
            shared_path(f"novelcraft/camera/manual_segments/{frame}.png").read_bytes()
        )
        assert hand.sum() == int(row["manual_mask_pixels"])
        found = render(build_scene(real_state(frame), ["minecraft:crafting_table"]))
        assert abs(found.pixels - int(row["pixels_bpy_5.0.1"])) <= 4
        assert abs(mask_iou(found.mask, hand) - float(row["iou_published"])) <= 0.002, frame


def test_published_rotation_loses_what_the_corrected_one_sees() -> None:
    path = shared_path("novelcraft/expected/pitch_rotation_check.csv")
    rows = list(csv.reader(path.open()))[1:]
    assert len(rows) == 5
    for frame, name, _, _, published, corrected in rows:
        state = real_state(frame)
        for rotation, expected in (("published", published), ("corrected", corrected)):
            scene = build_scene(state, [name], View(rotation=rotation))
            # The table was made with one ray a pixel.
            assert render(scene, samples=1).pixels == int(expected)
            assert abs(render(scene).pixels - int(expected)) <= 150
            assert bool(render(scene).pixels) == bool(int(expected))


def test_corrected_mask_lies_on_the_tree_tap_of_the_picture() -> None:
    import cv2

    path = shared_path("novelcraft/episodes/polycraft_v1/65.png")
    blue, green, red = np.moveaxis(cv2.imread(str(path)).astype(int)[:234], 2, 0)
    wooden = (red > 1.5 * green) & (red > 1.5 * blue)
    assert wooden.sum() > 10_000
    state = real_state("65")
    seen = {
        rotation: render(build_scene(state, ["polycraft:tree_tap"], View(rotation=rotation))).mask
        for rotation in ("published", "corrected")
    }
    assert seen["corrected"][:234][wooden].mean() > 0.99
    assert not seen["published"].any()


def test_nothing_novel() -> None:
    scene = build_scene(small_state({(0, 4, 3): BEDROCK}), [TNT])
    found = render(scene)
    assert (found.pixels, found.fraction, found.label_pixels, found.objects) == (0, 0.0, {}, ())
    assert not found.mask.any()
    assert novel_window(scene) is None


def test_novel_behind_the_camera_or_hidden() -> None:
    behind = render(build_scene(small_state({(0, 4, -3): TNT}), [TNT]))
    assert (behind.pixels, behind.label_pixels) == (0, {TNT: 0})
    hidden = render(build_scene(small_state({(0, 4, 2): LOG, (0, 4, 5): TNT}), [TNT]))
    assert (hidden.pixels, hidden.objects) == (0, ())
    assert render(build_scene(small_state({(0, 4, 5): LOG, (0, 4, 2): TNT}), [TNT])).pixels > 0


def test_labels_and_objects() -> None:
    state = small_state({(-1, 4, 4): TNT, (1, 4, 4): TNT, (3, 4, 6): "minecraft:sand"})
    found = render(build_scene(state, [TNT, "minecraft:sand"]))
    assert [thing.label for thing in found.objects].count(TNT) == 2
    left, right = sorted(o for o in found.objects if o.label == TNT)
    # +x is on the left for a player who faces south.
    assert left.x1 <= right.x0
    assert found.label_pixels[TNT] == left.pixels + right.pixels
    for thing in found.objects:
        assert found.mask[thing.y0 : thing.y1, thing.x0 : thing.x1].sum() >= thing.pixels
    assert found.fraction == found.pixels / 65536


def test_camera_inside_a_box() -> None:
    """The inner side of the box hides everything outside, adjacent faces included."""
    spawn = {(0, 4, 0): ("EntityTrader", "t")}
    for blocks in ({(0, 4, 1): TNT}, {(0, 4, 1): LOG}, {(0, 4, 2): TNT}):
        assert render(build_scene(small_state(blocks, spawn), [TNT, LOG])).pixels == 0
    novel = build_scene(small_state({(0, 4, 1): BEDROCK}, spawn), ["EntityTrader"])
    assert render(novel).pixels == 65536
    in_trunk = build_scene(small_state({(0, 4, 0): LOG, (0, 4, 2): BEDROCK}), [LOG])
    assert render(in_trunk).pixels == 65536


def test_overlapping_boxes() -> None:
    """A novel entity in the place of a block is seen whole; its own block hides none of it."""
    alone = render(build_scene(small_state({}, {(0, 4, 3): ("N", "n")}), ["N"]))
    both = render(build_scene(small_state({(0, 4, 3): BEDROCK}, {(0, 4, 3): ("N", "n")}), ["N"]))
    assert np.array_equal(alone.mask, both.mask)
    above = small_state({(0, 4, 0): TNT}, {(0, 4, 0): ("E", "e")}, pitch=64.7)
    assert 40_000 < render(build_scene(above, [TNT])).pixels < 50_000


def test_what_is_smaller_than_a_pixel_counts() -> None:
    view = View(fov=2 * np.degrees(np.arctan(4)), resolution=33)
    scene = build_scene(small_state({(1, 4, 20): LOG}), [LOG], view)
    assert every_ray(scene, 4)[0].sum() == 2
    assert render(scene).pixels == 1
    assert render(scene, "half").pixels == 0
    assert not every_ray(scene, 1)[0].any(), "no ray through the centre of a pixel meets it"


def test_one_sample_mask_is_the_segmentation() -> None:
    scene = build_scene(real_state("50"), ["minecraft:crafting_table", LOG])
    labels, depth = segment(scene)
    novel = np.isin(labels, scene.label_index[scene.novel])
    assert np.array_equal(novel, render(scene, samples=1).mask)
    assert np.array_equal(np.isfinite(depth), labels >= 0)
    assert depth[labels >= 0].min() >= 0.1


def test_a_crowded_frame_is_painted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = [build_scene(world_state(random_room(seed)), NOVEL) for seed in range(20)]
    whole = [render(scene) for scene in scenes]
    assert sum(found.pixels > 0 for found in whole) > 5
    monkeypatch.setattr(raycast, "_RUNS_AT_ONCE", 2)
    monkeypatch.setattr(raycast, "_CONTESTED_ROWS", 100)
    for scene, found in zip(scenes, whole, strict=True):
        assert np.array_equal(render(scene).mask, found.mask)


@pytest.mark.parametrize("wrong", [{"coverage": "most"}, {"samples": 0}, {"samples": 16}])
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        render(build_scene(small_state({(0, 4, 3): TNT}), [TNT]), **wrong)


def test_memory_stays_flat_over_2000_frames() -> None:
    scenes = [
        build_scene(world_state(random_room(seed)), NOVEL, View(resolution=64))
        for seed in range(50)
    ]

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for scene in scenes:
        render(scene, samples=8)
    before = resident()
    for i in range(2000):
        render(scenes[i % 50], samples=8)
    assert resident() - before < 32 << 20
