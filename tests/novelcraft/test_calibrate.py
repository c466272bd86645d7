"""The camera search: the published cameras and agreements come out again."""

import csv

import numpy as np
import polars as pl
import pytest

from schemas.errors import SourceError
from tasks.novelcraft.calibrate import PUBLISHED_GRIDS, Grid, search_camera
from tasks.novelcraft.masks import decode_png
from tasks.novelcraft.raycast import novel_mask
from tasks.novelcraft.scene import View, build_scene
from tasks.novelcraft.worldstate import WorldState, parse_world_state
from tests.novelcraft.test_scene import small_state
from tests.shared import shared_path

FRAMES = ("1", "7", "50", "52", "90")
TABLE = ["minecraft:crafting_table"]
PUBLISHED = {"coarse": "_1", "medium": "_2", "fine": ""}


def hand_made(frames: tuple[str, ...]) -> tuple[dict[str, WorldState], dict[str, np.ndarray]]:
    episode = shared_path("novelcraft/episodes/polycraft_v1")
    hand = shared_path("novelcraft/camera/manual_segments")
    states = {name: parse_world_state((episode / f"{name}.json").read_bytes()) for name in frames}
    return states, {name: decode_png((hand / f"{name}.png").read_bytes()) for name in frames}


def published(grid: str) -> pl.DataFrame:
    path = shared_path(f"novelcraft/camera/cam_param_search{PUBLISHED[grid]}.csv")
    return pl.read_csv(path)


def test_grids_are_the_published_ones() -> None:
    for grid in PUBLISHED_GRIDS:
        table = published(grid.name)
        assert np.allclose(table["FoV"].unique().sort(), grid.fovs)
        assert np.allclose(table["Y-Offset"].unique().sort(), grid.offsets)


def test_the_published_camera_wins_around_itself() -> None:
    states, masks = hand_made(FRAMES)
    fine = PUBLISHED_GRIDS[2]
    corner = Grid("corner", fine.fovs[3:6], fine.offsets[1:5])
    table, best = search_camera(states, masks, TABLE, [corner])
    assert table.height == 3 * 4 * 5
    assert (round(best.fov, 2), round(best.offset, 3)) == (71.27, 1.107)
    assert best.mean_iou == pytest.approx(0.92696, abs=0.001)
    expected = {
        row["frame"]: float(row["iou_published"])
        for row in csv.DictReader(shared_path("novelcraft/expected/camera_iou.csv").open())
    }
    won = table.filter(fov=best.fov, eye_height=best.offset)
    for frame, iou in won.select("frame", "iou").iter_rows():
        assert iou == pytest.approx(expected[frame], abs=0.002), frame


@pytest.mark.slow
def test_all_grids_give_the_published_winners() -> None:
    states, masks = hand_made(FRAMES)
    table, best = search_camera(states, masks, TABLE)
    assert table.height == 3 * 100 * 5
    assert (best.grid, round(best.fov, 2), round(best.offset, 3)) == ("fine", 71.27, 1.107)
    for grid in PUBLISHED_GRIDS:
        theirs = published(grid.name)
        means = (
            table.filter(grid=grid.name)
            .group_by("fov", "eye_height", maintain_order=True)
            .agg(pl.col("iou").mean())
        )
        won, row = means.row(means["iou"].arg_max()), theirs.row(theirs["Mean IoU"].arg_max())
        assert np.allclose(won[:2], row[:2]), grid.name
        assert won[2] == pytest.approx(row[2], abs=0.001)
        assert (means["iou"] - theirs["Mean IoU"]).abs().mean() < 0.003


def test_finds_the_camera_that_made_the_masks() -> None:
    blocks = {(0, 4, 3): "minecraft:tnt", (2, 4, 6): "minecraft:tnt", (-1, 4, 4): "minecraft:stone"}
    states = {str(yaw): small_state(blocks, yaw=yaw) for yaw in (0, 15, 345)}
    view = View(fov=68.0, eye_offset=1.3, resolution=64)
    masks = {
        name: novel_mask(build_scene(state, ["minecraft:tnt"], view), 8)
        for name, state in states.items()
    }
    grid = Grid("own", np.array([66.0, 68.0, 70.0]), np.array([1.1, 1.3]))
    table, best = search_camera(
        states, masks, "minecraft:tnt", [grid], View(resolution=64), samples=8
    )
    assert best == ("own", 68.0, 1.3, 1.0)
    assert table["iou"].is_between(0.0, 1.0).all()


def test_states_and_masks_must_agree() -> None:
    states = {"1": small_state({})}
    with pytest.raises(SourceError, match="same frames"):
        search_camera(states, {}, ["minecraft:tnt"])
    with pytest.raises(SourceError, match="256x256"):
        search_camera(states, {"1": np.zeros((4, 4), bool)}, ["minecraft:tnt"])
