"""The paper's camera search: field of view and eye height against masks drawn by hand.

Enters: world states and hand masks by frame name, novel names, grids. Leaves: one row per grid,
camera and frame with the agreement (IoU), and the camera with the best mean. Cameras of a fine grid
move an edge by a hundredth of a pixel, so pixels are sampled 15x15: with 4x4 whole rows of a small
object flip together and a neighbour of the published camera wins (docs/novelcraft.md, rule 7).
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from schemas.errors import SourceError
from schemas.novelcraft import CALIBRATION, CameraSettings
from storage.filehash import sha256_file
from storage.raw import RawFile
from tasks.engine.stage import Produced, Shard, stage
from tasks.novelcraft.masks import decode_png, mask_iou
from tasks.novelcraft.raycast import novel_mask
from tasks.novelcraft.scene import View, build_scene
from tasks.novelcraft.worldstate import WorldState, parse_world_state


class Grid(NamedTuple):
    name: str
    fovs: np.ndarray
    offsets: np.ndarray


class Camera(NamedTuple):
    grid: str
    fov: float
    offset: float
    mean_iou: float


PUBLISHED_GRIDS = (
    Grid("coarse", np.linspace(65.0, 80.0, 10), np.linspace(1.0, 1.2, 10)),
    Grid("medium", np.linspace(70.0, 73.0, 10), np.linspace(1.07, 1.18, 10)),
    Grid("fine", np.linspace(71.0, 71.6, 10), np.linspace(1.1, 1.13, 10)),
)


def search_camera(
    states: Mapping[str, WorldState],
    masks: Mapping[str, np.ndarray],
    novel: Iterable[str],
    grids: Sequence[Grid] = PUBLISHED_GRIDS,
    view: View | None = None,
    samples: int = 15,
) -> tuple[pl.DataFrame, Camera]:
    """Every camera of every grid on every frame: columns grid, fov, eye_height, frame, iou.

    The best camera has the highest mean over frames, the first of equals.
    """
    if not masks or set(states) != set(masks):
        raise SourceError(
            f"camera search: frames with a mask are {sorted(masks)}, frames with a state are "
            f"{sorted(states)}; expected the same frames, at least one"
        )
    view = view or View()
    novel = frozenset([novel] if isinstance(novel, str) else novel)
    sizes = {name: mask.shape for name, mask in masks.items()}
    if set(sizes.values()) != {(view.resolution, view.resolution)}:
        raise SourceError(
            f"camera search: mask sizes are {sizes}, expected {view.resolution}x{view.resolution}"
        )
    rows = []
    for grid in grids:
        for fov, offset in product(grid.fovs.tolist(), grid.offsets.tolist()):
            camera = replace(view, fov=fov, eye_offset=offset)
            for frame, state in states.items():
                shown = novel_mask(build_scene(state, novel, camera), samples)
                rows.append((grid.name, fov, offset, frame, float(mask_iou(shown, masks[frame]))))
    table = pl.DataFrame(
        rows,
        schema={
            "grid": pl.String,
            "fov": pl.Float64,
            "eye_height": pl.Float64,
            "frame": pl.String,
            "iou": pl.Float64,
        },
        orient="row",
    )
    by_camera = table.group_by("grid", "fov", "eye_height", maintain_order=True)
    means = by_camera.agg(pl.col("iou").mean())
    return table, Camera(*means.row(int(means["iou"].arg_max())))  # type: ignore[arg-type]


def plan_camera_search(states: Path, masks: Path) -> list[Shard]:
    """One shard: the hand-made masks and the world states of the same names."""
    for folder in (states, masks):
        if not folder.is_dir():
            raise SourceError(f"camera search: {folder} is not a folder")
    root = Path(os.path.commonpath([states.absolute(), masks.absolute()]))
    paths = []
    for mask in sorted(masks.absolute().glob("*.png")):
        state = states.absolute() / f"{mask.stem}.json"
        if not state.is_file():
            raise SourceError(f"camera search: mask {mask} has no world state {state}")
        paths += [mask, state]
    files = [
        RawFile(str(path.relative_to(root)), path.stat().st_size, sha256_file(path))
        for path in paths
    ]
    return [Shard("all", files=tuple(files), source=str(root))]


@stage(writes=(CALIBRATION,), version=2)
def calibrate_camera(shard: Shard, settings: CameraSettings) -> Produced:
    """Search the camera that makes rendered masks agree best with hand-made ones."""
    root = Path(shard.source or "")
    names = [Path(file.name) for file in shard.files]
    masks = {n.stem: decode_png((root / n).read_bytes()) for n in names if n.suffix == ".png"}
    states = {
        n.stem: parse_world_state((root / n).read_bytes()) for n in names if n.suffix == ".json"
    }
    table, _ = search_camera(states, masks, settings.novel)
    return Produced({"calibration": table}, table.height)
