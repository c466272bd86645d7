"""The reference renderer, in child processes as in production, against the fast one."""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from tasks.ingest.native.pool import Limits, run_batch
from tasks.novelcraft.blender import BlenderRenderer, render_states
from tasks.novelcraft.masks import mask_iou
from tasks.novelcraft.raycast import SAMPLES, render
from tasks.novelcraft.scene import View, build_scene
from tasks.novelcraft.worldstate import world_state
from tasks.operations.doctor import BLENDER
from tests.novelcraft.test_raycast import (
    BEDROCK,
    BLENDER_COUNTS,
    LOG,
    NOVEL,
    TNT,
    count_rows,
    random_room,
)
from tests.novelcraft.test_scene import small_document
from tests.shared import need_libraries, shared_path

LIMITS = Limits(seconds_per_item=240, seconds_start=180)
Case = tuple[dict[str, Any], Sequence[str]]


def blender(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    need_libraries(BLENDER)
    outcomes = list(
        run_batch(
            "tasks.novelcraft.blender:render_states", items, limits=LIMITS, imports=("bpy", "cv2")
        )
    )
    assert [outcome.rule for outcome in outcomes] == [None] * len(items), outcomes[0].message
    return [outcome.value for outcome in outcomes if outcome.value is not None]


def compare(cases: Sequence[Case], **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Agreement, difference of the novel fraction and fast pixel count of every case."""
    view = View(**{name: value for name, value in options.items() if name == "rotation"})
    items = [{"states": [state], "novel": list(novel), **options} for state, novel in cases]
    masks = np.array([value["masks"][0] for value in blender(items)])
    samples = options.get("samples", SAMPLES)
    scenes = [build_scene(world_state(state), novel, view) for state, novel in cases]
    fast = np.array([render(scene, samples=samples).mask for scene in scenes])
    difference = np.abs(masks.mean((1, 2)) - fast.mean((1, 2)))
    return mask_iou(masks, fast), difference, fast.sum((1, 2))


def real_cases(every: int) -> list[Case]:
    """The first version's episode with three of its blocks taken for novel, and the second
    version's states with novel blocks put near the player. These states list every entity at the
    player's own place, where it would hide all: the entities walk away."""
    cases: list[Case] = []
    files = sorted(shared_path("novelcraft/episodes/polycraft_v1").glob("*.json"))
    for name in ("minecraft:crafting_table", "polycraft:tree_tap", LOG):
        cases += [(json.loads(file.read_bytes()), [name]) for file in files]
    with gzip.open(shared_path("novelcraft/world_states_v2/episode_a.jsonl.gz")) as file:
        for number, line in enumerate(file):
            state = json.loads(line)
            draw = random.Random(number)
            x, y, z = state["player"]["pos"]
            for _ in range(12):
                place = f"{x + draw.randint(-5, 5)},{y},{z + draw.randint(-5, 5)}"
                if state["map"].get(place, {}).get("name") == "minecraft:air":
                    state["map"][place] = {"name": TNT}
            for entity in state["entities"].values():
                entity["pos"] = [x + draw.randint(1, 6), y, z + draw.randint(1, 6)]
            cases.append((state, [TNT]))
    seen = [case for case in cases if render(build_scene(world_state(case[0]), case[1])).pixels]
    return seen[::every]


def rooms(count: int) -> list[Case]:
    return [(random_room(seed), NOVEL) for seed in range(count)]


def assert_same(cases: Sequence[Case], shown: int, **options: Any) -> None:
    iou, difference, pixels = compare(cases, **options)
    assert np.count_nonzero(pixels) >= shown
    assert iou.mean() >= 0.995
    assert difference.max() <= 0.0005


def test_same_masks_as_the_fast_renderer() -> None:
    assert_same(real_cases(every=8) + rooms(12), shown=16, samples=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rotation", ["published", "corrected"])
def test_same_masks_on_hundreds_of_states(rotation: str) -> None:
    cases = real_cases(every=1) + rooms(300)
    assert len(cases) >= 350
    assert_same(cases, shown=200, rotation=rotation, samples=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_published_settings_give_the_same_masks() -> None:
    large = [case for case in real_cases(every=1) if shown_pixels(case) > 500]
    assert_same(large[:: len(large) // 8], shown=8, settings="published")


def shown_pixels(case: Case) -> int:
    return render(build_scene(world_state(case[0]), case[1])).pixels


def lone(kind: str, dx: int, dz: int) -> Case:
    name = TNT if kind == "cube" else LOG
    return small_document({(dx, 4, dz): name}), [name]


def test_single_objects_have_the_published_pixel_counts() -> None:
    rows = [row for row in count_rows() if row["pixels_blender_bpy_5.0.1"]][::2]
    places = [("cube", int(row["dx_blocks"]), int(row["dz_blocks"])) for row in rows]
    items = [{"states": [lone(*place)[0]], "novel": [TNT], "samples": 8} for place in places]
    for row, value in zip(rows, blender(items), strict=True):
        assert abs(value["pixels"][0] - int(row["pixels_coverage_ge_0.1"])) <= 3, row


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_published_settings_decide_where_sample_counts_differ() -> None:
    items = [
        {"states": [state], "novel": list(novel), "settings": "published"}
        for state, novel in (lone(*place) for place in BLENDER_COUNTS)
    ]
    found = [int(value["pixels"][0]) for value in blender(items)]
    assert found == pytest.approx(list(BLENDER_COUNTS.values()), abs=3)


def test_coinciding_surfaces_are_decided_as_in_the_fast_renderer() -> None:
    here, there = {(0, 4, 0): ("E", "e")}, {(0, 4, 3): ("N", "n")}
    cases = [
        (small_document({(0, 4, 1): LOG}, here), [LOG]),
        (small_document({(0, 4, 1): BEDROCK}, here), ["E"]),
        (small_document({(0, 4, 0): LOG, (0, 4, 2): BEDROCK}), [LOG]),
        (small_document({(0, 4, 3): BEDROCK}, there), ["N"]),
        (small_document({(0, 4, 3): LOG, (0, 5, 3): TNT}), [TNT]),
        (small_document({(0, 4, 0): TNT}, here, pitch=64.7), [TNT]),
    ]
    iou, _, pixels = compare(cases, samples=5)
    assert (iou >= 0.9999).all()
    assert pixels.tolist()[:3] == [0, 65536, 65536]
    assert (pixels[3:] > 1000).all()


def test_states_from_a_file_and_a_bad_one_among_them(tmp_path: Path) -> None:
    path = tmp_path / "states.jsonl"
    states = [lone("cube", dx, 3)[0] for dx in (0, 1, 2)]
    lines = [json.dumps(state) for state in states]
    path.write_text("\n".join([lines[0], '{"map": 1}', lines[1], lines[2]]) + "\n")
    whole, part = blender(
        [
            {"path": str(path), "novel": [TNT], "resolution": 64},
            {"path": str(path), "start": 2, "count": 1, "novel": [TNT], "coverage": "half"},
        ]
    )
    assert whole["masks"].shape == (4, 64, 64)
    assert [error["index"] for error in whole["errors"]] == [1]
    assert whole["errors"][0]["rule"] == "type"
    assert [bool(count) for count in whole["pixels"]] == [True, False, True, True]
    scene = build_scene(world_state(states[1]), [TNT])
    assert np.array_equal(part["masks"][0], render(scene, "half").mask)


@pytest.mark.parametrize(
    "wrong",
    [
        {"settings": "fast"},
        {"coverage": "most"},
        {"settings": "published", "coverage": "half"},
        {"rotation": "other"},
        {"colour": "red"},
        {"path": "also.jsonl"},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        render_states({"states": [], "novel": [TNT], **wrong}, tmp_path)


def test_an_empty_chunk(tmp_path: Path) -> None:
    value = render_states({"states": [], "novel": [TNT]}, tmp_path)
    assert value["masks"].shape == (0, 256, 256)
    assert (value["pixels"].shape, value["errors"]) == ((0,), [])


def test_no_novel_box_needs_no_blender(tmp_path: Path) -> None:
    scene = build_scene(world_state(lone("cube", 0, 3)[0]), ["minecraft:sand"])
    assert not BlenderRenderer(tmp_path).render(scene).any()
    assert not list(tmp_path.iterdir())
