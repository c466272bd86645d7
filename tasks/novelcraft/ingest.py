"""Raw NovelCraft episodes to tables: samples, frames, images, blocks, entities, inventory, …

Enters: `class/episode/frame.png|.json` from a folder or the official zip (NovelCraft+ one level
deeper). Leaves: one shard per class and ten episodes, so that a touched episode costs one shard.
A frame is a pair of files; a missing half, a bad PNG or a bad state sends the frame to quarantine.
"""

import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import RecordError, SourceError
from schemas.novelcraft import (
    BLOCKS,
    ENTITIES,
    EPISODES,
    FRAMES,
    IMAGES,
    INVENTORY,
    IngestSettings,
    SplitSettings,
)
from schemas.table import Table
from schemas.tables import SAMPLES
from storage.archives import ArchiveLimits
from storage.layout import content_key
from storage.raw import RawFile, RawSource, open_raw
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.ingest.png import check_png
from tasks.novelcraft.classes import class_warnings
from tasks.novelcraft.worldstate import WorldState, parse_world_state

log = logging.getLogger(__name__)

NAME = re.compile(
    r"(?P<class>[^/]+)/(?:(?P<subset>normal_\d+)/)?(?P<episode>\d{1,6})/(?P<frame>\d{1,6})\.(?P<kind>png|json)"
)
DESCRIPTION = "novelty_description.json"
# A bomb in a zip is one bad record: it is refused by the size it declares when it is read.
ARCHIVE_LIMITS = ArchiveLimits(total_bytes=1 << 60, ratio=math.inf)
EPISODES_PER_SHARD = 10
UNRECOGNISED, SKIPPED = "unrecognised", "unreadable"


def folder_of_classes(path: Path) -> str:
    """The folder inside a source that holds the class folders: "", or in many zips a top one."""
    names = [file.name for file in open_raw(path, limits=ARCHIVE_LIMITS).files(digests=False)]
    inside = ""
    while names and not any(NAME.fullmatch(name.removeprefix(inside)) for name in names):
        tops = {name.removeprefix(inside).partition("/")[0] for name in names}
        if len(tops) > 1 or f"{inside}{min(tops)}" in names:
            return ""
        inside += f"{tops.pop()}/"
    return inside


def warn_of_classes(source: RawSource, settings: SplitSettings, labelled: bool = False) -> None:
    """Say before any work which classes of the source will not be labelled as one expects.

    `labelled`: the labels come from a file, so that no novel block need be known.
    """
    names = [file.name for file in source.files()]
    frames = [match for name in names if (match := NAME.fullmatch(name))]
    described = {name.split("/")[0] for name in names if name.endswith(f"/{DESCRIPTION}")}
    classes = {match["class"] for match in frames}
    for warning in class_warnings(classes, classes if labelled else described, settings.roles):
        log.warning("WARNING: %s", warning)


def plan_episode_shards(source: RawSource) -> list[Shard]:
    """Shards by class and tens of episodes; what is no frame or no readable file gets its own."""
    groups: dict[str, list[RawFile]] = defaultdict(list)
    descriptions: dict[str, RawFile] = {}
    for file in source.files():
        match = NAME.fullmatch(file.name)
        if match:
            ten = int(match["episode"]) // EPISODES_PER_SHARD * EPISODES_PER_SHARD
            groups[f"{match['class']}/{match['subset'] or ''}/{ten:06d}"].append(file)
        elif file.name.count("/") == 1 and file.name.endswith(f"/{DESCRIPTION}"):
            descriptions[file.name.split("/")[0]] = file
        else:
            groups[UNRECOGNISED].append(file)
    if not groups.keys() - {UNRECOGNISED}:
        raise SourceError(
            f"no frames found in {source.root}: expected files such as normal/0/1.png and "
            "normal/0/1.json; name the folder or zip that holds the class folders"
        )
    shards = []
    for name, files in sorted(groups.items()):
        description = descriptions.get(name.split("/")[0])
        extra = (description,) if description and name != UNRECOGNISED else ()
        shards.append(Shard(name, files=(*files, *extra), source=source.root))
    if source.skipped:
        reasons = [[skipped.name, skipped.reason] for skipped in source.skipped]
        shards.append(Shard(SKIPPED, source=source.root, about=reasons))
    return shards


@stage(writes=(FRAMES, SAMPLES, EPISODES, IMAGES, BLOCKS, ENTITIES, INVENTORY), version=2)
def ingest_episodes(shard: Shard, settings: IngestSettings) -> Produced:
    """Read the pictures and world states of some episodes of one class."""
    if shard.name == SKIPPED:
        rejects = [Reject(name, "unreadable", reason) for name, reason in shard.about]
        return Produced({}, len(rejects), rejects)
    if shard.name == UNRECOGNISED:
        message = "not a frame: expected class/episode/frame.png or .json with plain numbers"
        rejects = [Reject(file.name, "unrecognised_name", message) for file in shard.files]
        return Produced({}, len(rejects), rejects)
    source = open_raw(Path(shard.source or ""), limits=ARCHIVE_LIMITS)
    novel_item = None
    pairs: dict[tuple[str, str, int], dict[int, dict[str, RawFile]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for file in shard.files:
        match = NAME.fullmatch(file.name)
        if match is None:
            novel_item = _described_item(source, file.name)
            continue
        episode = (match["class"], match["subset"] or "", int(match["episode"]))
        pairs[episode][int(match["frame"])][match["kind"]] = file
    rows = _Rows()
    for episode, frames in sorted(pairs.items()):
        rows.add_episode(source, episode, frames, novel_item, settings)
    return rows.produced()


def _described_item(source: RawSource, name: str) -> str | None:
    """The item named by novelty_description.json; the file is a hint, not a record."""
    try:
        document = json.loads(source.read(name, limit=1 << 20))
        return str(document["novelty"][0]["noveltyItem"])
    except (RecordError, ValueError, KeyError, IndexError, TypeError):
        return None


class _Rows:
    """Columns gathered episode by episode."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.episodes: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []
        self.entities: list[dict[str, Any]] = []
        self.inventory: list[dict[str, Any]] = []
        self.blocks: list[pl.DataFrame] = []
        self.rejects: list[Reject] = []
        self.records = 0

    def add_episode(
        self,
        source: RawSource,
        episode: tuple[str, str, int],
        frames: dict[int, dict[str, RawFile]],
        novel_item: str | None,
        settings: IngestSettings,
    ) -> None:
        class_, subset, number = episode
        episode_id = "/".join(part for part in (class_, subset, str(number)) if part)
        states: list[WorldState] = []
        first = len(self.frames)
        for frame, files in sorted(frames.items()):
            self.records += 1
            frame_id = f"{episode_id}/{frame}"
            place = {"frame_id": frame_id, "class": class_, "subset": subset, "episode": number}
            place["frame"] = frame
            try:
                png, state, row = _read_frame(source, files, settings)
            except RecordError as error:
                self.rejects.append(Reject.of(frame_id, error))
                continue
            self.frames.append(place | {"episode_id": episode_id, "position": len(states)} | row)
            self.samples.append(
                {
                    "sample_id": frame_id,
                    "class": class_,
                    "sequence": episode_id,
                    "position": len(states),
                    "source": files["png"].name,
                    "digest": frame_digest(row, state),
                    "modality": "image",
                }
            )
            self.images.append(place | {"png": png})
            self._add_belongings(place, state)
            states.append(state)
        if states:
            numbers = [row["frame"] for row in self.frames[first:]]
            self.episodes.append(
                {
                    "episode_id": episode_id,
                    "class": class_,
                    "subset": subset,
                    "episode": number,
                    "frames": len(numbers),
                    "first_frame": numbers[0],
                    "last_frame": numbers[-1],
                    "goal_achieved": states[-1].goal_achieved,
                    "novel_item": novel_item,
                }
            )
            self.blocks.append(block_spans(states, class_, subset, number))

    def _add_belongings(self, place: dict[str, Any], state: WorldState) -> None:
        for entity in state.entities:
            x, y, z = entity.position
            about = {"entity_id": entity.id, "type": entity.type, "name": entity.name}
            self.entities.append(place | about | {"x": x, "y": y, "z": z, "color": entity.color})
        held = state.selected.slot if state.selected else None
        for slot in state.inventory:
            self.inventory.append(
                place
                | {
                    "slot": slot.slot,
                    "item": slot.item,
                    "count": slot.count,
                    "variant": slot.variant,
                    "selected": slot.slot == held,
                }
            )

    def produced(self) -> Produced:
        def frame(rows: Iterable[dict[str, Any]], table: Table) -> pl.DataFrame:
            return pl.DataFrame(rows, schema=table.polars_schema)

        return Produced(
            {
                "frames": frame(self.frames, FRAMES),
                "samples": frame(self.samples, SAMPLES),
                "episodes": frame(self.episodes, EPISODES),
                "images": frame(self.images, IMAGES),
                "blocks": pl.concat([BLOCKS.empty(), *self.blocks]),
                "entities": frame(self.entities, ENTITIES),
                "inventory": frame(self.inventory, INVENTORY),
            },
            self.records,
            self.rejects,
        )


def frame_digest(row: dict[str, Any], state: WorldState) -> str:
    """Of what models see of a frame: its picture, what the agent carries, holds and faces."""
    carried = [[slot.item, slot.count, slot.variant] for slot in state.inventory]
    return content_key([row["image_sha256"], row["selected_item"], row["block_in_front"], carried])


def _read_frame(
    source: RawSource, files: dict[str, RawFile], settings: IngestSettings
) -> tuple[bytes, WorldState, dict[str, Any]]:
    for kind, what in (("png", "picture"), ("json", "world state")):
        if kind not in files:
            raise RecordError(f"missing_{kind}", f"the frame has no {what} (.{kind} file)")
    png = source.read(files["png"].name, limit=settings.max_image_bytes)
    width, height = check_png(png)
    size = settings.image_size
    if (width, height) != (size, size):
        raise RecordError("image_size", f"the picture is {width}x{height}, expected {size}x{size}")
    text = source.read(files["json"].name, limit=settings.max_state_bytes)
    state = parse_world_state(text)
    if state.game_over and settings.last_frame == "drop":
        raise RecordError("finished_game", "the game is over: the picture may show the next game")
    x, y, z = state.player
    row = {
        "suspect_last": bool(state.game_over),
        "width": width,
        "height": height,
        "image_sha256": files["png"].sha256(png),
        "state_sha256": files["json"].sha256(text),
        "x": x,
        "y": y,
        "z": z,
        "yaw": state.yaw,
        "pitch": state.pitch,
        "facing": state.facing,
        "block_in_front": state.block_in_front,
        "selected_item": state.selected.item if state.selected else None,
        "goal_type": state.goal_type,
        "goal_achieved": state.goal_achieved,
        "command": state.command,
        "command_argument": state.command_argument,
        "command_result": state.command_result,
        "step": state.step,
        "game_over": state.game_over,
    }
    return png, state, row


def block_spans(states: list[WorldState], class_: str, subset: str, episode: int) -> pl.DataFrame:
    """One row for as long as the same block stands at the same place in an episode."""
    counts = [len(state.positions) for state in states]
    places = np.concatenate([state.positions for state in states])
    names = np.concatenate([np.array(state.keys, object)[state.key_index] for state in states])
    seen = pl.DataFrame(
        {
            "x": places[:, 0],
            "y": places[:, 1],
            "z": places[:, 2],
            "block": pl.Series(names, dtype=pl.String),
            "position": np.repeat(np.arange(len(states), dtype=np.int32), counts),
        }
    ).sort("x", "y", "z", "block", "position")
    same = pl.all_horizontal(
        pl.col(name) == pl.col(name).shift(1) for name in ("x", "y", "z", "block")
    )
    follows = pl.col("position") == pl.col("position").shift(1) + 1
    spans = (
        seen.with_columns((~(same & follows)).fill_null(True).cum_sum().alias("span"))
        .group_by("span", maintain_order=True)
        .agg(
            pl.col("x", "y", "z", "block").first(),
            pl.col("position").first().alias("from_position"),
            pl.col("position").last().alias("to_position"),
        )
    )
    return spans.select(
        pl.lit(class_).alias("class"),
        pl.lit(subset).alias("subset"),
        pl.lit(episode, dtype=pl.Int32).alias("episode"),
        "x",
        "y",
        "z",
        "from_position",
        "to_position",
        "block",
    )
