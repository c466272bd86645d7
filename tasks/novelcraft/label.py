"""World states to novel fractions: the stages that make or import `targets`.

Enters: frames, blocks and entities of some episodes. Leaves: targets, masks, novel objects and, on
request, segmentation and depth. What is novel in a class is the block that the paper's label list
names for it, else the item of novelty_description.json (NovelCraft section 3.2).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.errors import RecordError
from schemas.novelcraft import MASKS, NOVEL_OBJECTS, SCENE_MAPS, TARGETS, RenderSettings
from schemas.table import Table
from tasks.novelcraft.classes import NOVEL_BLOCKS
from tasks.novelcraft.masks import encode_runs
from tasks.novelcraft.scene import View, build_scene
from tasks.novelcraft.targets import read_targets
from tasks.novelcraft.worldstate import Entity, WorldState
from tasks.stage import Produced, Reject, Shard, stage

_PLACE = ("frame_id", "class", "subset", "episode", "frame")
_FRAME_COLUMNS = ["frame_id", "class", "subset", "episode", "frame", "position", "x", "y", "z", "yaw", "pitch"]


def _tables(settings: RenderSettings) -> tuple[Table, ...]:
    extra = (SCENE_MAPS,) if settings.scene_maps else ()
    return (TARGETS, MASKS, NOVEL_OBJECTS, *extra)


def novel_names(class_: str, described: str | None) -> tuple[str, ...]:
    """Block keys that are novel in a class."""
    if class_ in NOVEL_BLOCKS:
        return NOVEL_BLOCKS[class_]
    return (described,) if described else ()


def states_of(
    frames: pl.DataFrame, blocks: pl.DataFrame, entities: pl.DataFrame
) -> Iterator[tuple[dict[str, Any], WorldState]]:
    """The world state of every frame, put together again from the tables."""
    by_frame = {key[0]: group for key, group in entities.group_by("frame_id")}
    for (class_, subset, episode), spans in blocks.group_by("class", "subset", "episode", maintain_order=True):
        here = (pl.col("class") == class_) & (pl.col("subset") == subset) & (pl.col("episode") == episode)
        keys, key_index = np.unique(spans["block"].to_numpy(), return_inverse=True)
        places = spans.select("x", "y", "z").to_numpy()
        first, last = spans["from_position"].to_numpy(), spans["to_position"].to_numpy()
        for row in frames.filter(here).iter_rows(named=True):
            stands = (first <= row["position"]) & (row["position"] <= last)
            group = by_frame.get(row["frame_id"])
            yield (
                row,
                WorldState(
                    positions=places[stands],
                    keys=tuple(keys),
                    key_index=key_index[stands].astype(np.int32),
                    player=(row["x"], row["y"], row["z"]),
                    yaw=row["yaw"],
                    pitch=row["pitch"],
                    facing=None,
                    entities=() if group is None else _entities(group),
                    inventory=(),
                    selected=None,
                    block_in_front="",
                    step=0,
                    game_over=None,
                    goal_type=None,
                    goal_achieved=None,
                    command=None,
                    command_argument=None,
                    command_result=None,
                ),
            )


def _entities(group: pl.DataFrame) -> tuple[Entity, ...]:
    return tuple(
        Entity(row["entity_id"], row["type"], row["name"], (row["x"], row["y"], row["z"]), row["color"])
        for row in group.iter_rows(named=True)
    )
