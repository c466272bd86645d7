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
from schemas.errors import RecordError, SourceError
from schemas.novelcraft import (
    LABEL_DRIFT,
    MASKS,
    NOVEL_OBJECTS,
    SCENE_MAPS,
    TARGET_LABELS,
    TARGETS,
    RenderSettings,
    SplitSettings,
)
from schemas.table import Table
from storage.filehash import sha256_file
from storage.pieces import Part, Piece
from storage.raw import RawFile
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.novelcraft.classes import NOVEL_BLOCKS
from tasks.novelcraft.masks import encode_runs
from tasks.novelcraft.raycast import Rendering, segment
from tasks.novelcraft.render import render_all, view_of
from tasks.novelcraft.scene import Scene, build_scene
from tasks.novelcraft.targets import HEADER, label_drift, read_targets
from tasks.novelcraft.worldstate import Entity, WorldState

PLACE = ("frame_id", "class", "subset", "episode", "frame")
FRAME_COLUMNS = [
    "frame_id",
    "class",
    "subset",
    "episode",
    "frame",
    "position",
    "x",
    "y",
    "z",
    "yaw",
    "pitch",
]


def _tables(settings: RenderSettings) -> tuple[Table, ...]:
    extra = (SCENE_MAPS,) if settings.scene_maps else ()
    return (TARGETS, TARGET_LABELS, MASKS, NOVEL_OBJECTS, *extra)


def novel_names(class_: str, described: str | None) -> tuple[str, ...]:
    """Block keys that are novel in a class."""
    if class_ in NOVEL_BLOCKS:
        return NOVEL_BLOCKS[class_]
    return (described,) if described else ()


def states_of(
    frames: pl.DataFrame, blocks: pl.DataFrame, entities: pl.DataFrame
) -> Iterator[tuple[dict[str, Any], WorldState]]:
    """The world state of every frame, put together again from the tables."""
    by_frame: dict[str, list[Entity]] = {}
    columns = ("frame_id", "entity_id", "type", "name", "x", "y", "z", "color")
    for frame, identity, type_, name, x, y, z, color in entities.select(columns).iter_rows():
        by_frame.setdefault(frame, []).append(Entity(identity, type_, name, (x, y, z), color))
    for (class_, subset, episode), spans in blocks.group_by(
        "class", "subset", "episode", maintain_order=True
    ):
        here = (
            (pl.col("class") == class_)
            & (pl.col("subset") == subset)
            & (pl.col("episode") == episode)
        )
        keys, key_index = np.unique(spans["block"].to_numpy(), return_inverse=True)
        places = spans.select("x", "y", "z").to_numpy()
        first, last = spans["from_position"].to_numpy(), spans["to_position"].to_numpy()
        for row in frames.filter(here).iter_rows(named=True):
            stands = (first <= row["position"]) & (row["position"] <= last)
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
                    entities=tuple(by_frame.get(row["frame_id"], ())),
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


def plan_label_shards(ingested: list[Piece]) -> list[Shard]:
    """One shard for each of the ingested ones, so that only a changed episode is rendered again."""
    return [
        Shard(
            piece.shard,
            parts=tuple(
                piece.part(table) for table in ("episodes", "frames", "blocks", "entities")
            ),
        )
        for piece in ingested
        if piece.part("frames").rows
    ]


@stage(writes=_tables, version=3)
def render_targets(shard: Shard, settings: RenderSettings) -> Produced:
    """Render the novel pixels of every frame of some episodes."""
    frames = shard.read("frames", FRAME_COLUMNS)
    described = dict(shard.read("episodes", ["class", "novel_item"]).unique().iter_rows())
    places, states = [], []
    for row, state in states_of(frames, shard.read("blocks"), shard.read("entities")):
        places.append({name: row[name] for name in PLACE})
        states.append((state, novel_names(row["class"], described.get(row["class"]))))
    rows: dict[str, list[dict[str, Any]]] = {table.name: [] for table in _tables(settings)}
    rejects = []
    for place, outcome in zip(places, render_all(states, settings, work=shard.work), strict=True):
        if isinstance(outcome, RecordError):
            rejects.append(Reject.of(place["frame_id"], outcome))
        else:
            _add_rendering(rows, place, outcome, settings)
    if settings.scene_maps:
        view = view_of(settings)
        rows["scene_maps"] = [
            place | _scene_map(build_scene(state, (), view))
            for place, (state, _) in zip(places, states, strict=True)
        ]
    tables = {
        table.name: pl.DataFrame(rows[table.name], schema=table.polars_schema)
        for table in _tables(settings)
    }
    return Produced(tables, frames.height, rejects)


def _add_rendering(
    rows: dict[str, list[dict[str, Any]]],
    place: dict[str, Any],
    rendering: Rendering,
    settings: RenderSettings,
) -> None:
    rows["targets"].append(
        place
        | {
            "novel_fraction": rendering.fraction,
            "novel_pixels": rendering.pixels,
            "renderer": settings.renderer,
            "rotation": settings.rotation,
        }
    )
    if rendering.pixels:
        height, width = rendering.mask.shape
        runs = encode_runs(rendering.mask).tolist()
        rows["masks"].append(place | {"height": height, "width": width, "runs": runs})
    rows["target_labels"] += [
        place | {"label": label, "pixels": pixels}
        for label, pixels in rendering.label_pixels.items()
        if pixels
    ]
    for number, seen in enumerate(rendering.objects):
        rows["novel_objects"].append(place | {"object": number} | seen._asdict())


def _scene_map(scene: Scene) -> dict[str, Any]:
    labels, depth = segment(scene)
    height, width = labels.shape
    return {
        "height": height,
        "width": width,
        "labels": list(scene.labels),
        "segmentation": labels.ravel().tolist(),
        "depth": depth.ravel().tolist(),
    }


def plan_official_targets(path: Path, frames: tuple[Part, ...]) -> list[Shard]:
    """One shard: the official file, and the frames that it labels."""
    return [_shard_of_file(path, frames)]


def plan_drift(path: Path, targets: tuple[Part, ...]) -> list[Shard]:
    """One shard: another version of the labels, and ours."""
    return [_shard_of_file(path, targets)]


def _shard_of_file(path: Path, parts: tuple[Part, ...]) -> Shard:
    if not path.is_file():
        raise SourceError(f"targets file {path} is missing; expected a CSV with header {HEADER}")
    file = RawFile(path.name, path.stat().st_size, sha256_file(path))
    return Shard("all", files=(file,), parts=parts, source=str(path.absolute().parent))


@stage(writes=(TARGETS,), version=1)
def read_official_targets(shard: Shard, settings: Settings) -> Produced:
    """Take the novel fractions from an official targets.csv.

    Standard frames are not in that file and get no target; a line without a frame is quarantined.
    """
    (file,) = shard.files
    targets, refused = read_targets(Path(shard.source or "") / file.name)
    places = shard.read("frames", list(PLACE))
    joined = targets.join(places, on="frame_id", how="inner").with_columns(
        pl.lit("official").alias("renderer"), pl.lit("published").alias("rotation")
    )
    lonely = targets.join(places, on="frame_id", how="anti")["frame_id"]
    rejects = [Reject(*row) for row in refused.iter_rows()]
    rejects += [Reject(name, "no_such_frame", "the source has no such frame") for name in lonely]
    return Produced({"targets": joined}, targets.height + refused.height, rejects)


@stage(writes=(LABEL_DRIFT,), version=1)
def compare_targets(shard: Shard, settings: SplitSettings) -> Produced:
    """Find the frames whose label differs from another version of the labels."""
    (file,) = shard.files
    old, _ = read_targets(Path(shard.source or "") / file.name)
    drift = label_drift(old, shard.read("targets"), settings.novel_from)
    drift = drift.filter(pl.col("change") != "same")
    return Produced({"label_drift": drift}, drift.height)
