"""The paper's camera search: field of view and eye height against masks drawn by hand (spec 2.4).

Enters: world states and hand masks by frame name, novel names, grids. Leaves: one row per grid,
camera and frame with the agreement (IoU), and the camera with the best mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl

from schemas.errors import SourceError
from tasks.novelcraft.masks import mask_iou
from tasks.novelcraft.raycast import render
from tasks.novelcraft.scene import View, build_scene
from tasks.novelcraft.worldstate import WorldState


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
) -> tuple[pl.DataFrame, Camera]:
    """Every camera of every grid on every frame: columns grid, fov, offset, frame, iou. The best
    camera has the highest mean over frames, the first of equals."""
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
    rows = [
        (grid.name, float(fov), float(offset), frame, float(mask_iou(shown, masks[frame])))
        for grid in grids
        for fov in grid.fovs
        for offset in grid.offsets
        for frame in states
        for shown in [
            render(
                build_scene(
                    states[frame], novel, replace(view, fov=float(fov), eye_offset=float(offset))
                )
            ).mask
        ]
    ]
    table = pl.DataFrame(
        rows,
        schema={
            "grid": pl.String,
            "fov": pl.Float64,
            "offset": pl.Float64,
            "frame": pl.String,
            "iou": pl.Float64,
        },
        orient="row",
    )
    means = table.group_by("grid", "fov", "offset", maintain_order=True).agg(pl.col("iou").mean())
    return table, Camera(*means.row(int(means["iou"].arg_max())))  # type: ignore[arg-type]
