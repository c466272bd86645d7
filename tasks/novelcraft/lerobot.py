"""NovelCraft's episodes as a data set in LeRobot's v3.0 layout.

Enter: the tables frames, images, targets and frame_roles of a lake. Leaves a folder:
`meta/info.json`, `meta/stats.json`, `meta/tasks.parquet`, `meta/episodes/…` and `data/…` (see
`lerobot_files.py`), with pictures inside the data files as they are in the lake. The folder appears
whole or not at all.

Source of the layout: huggingface/lerobot, src/lerobot/datasets/ (`utils.py` paths and limits,
`feature_utils.py` types, `dataset_metadata.py` info and episodes, `io_utils.py` row groups, tasks),
and pull request 3807 there. What is not LeRobot's own: the features `novel_fraction` (NaN without
a label), `novel`, `kept`, `suspect_last` and `frame_id`, and four `novelcraft/` columns of the
episodes. There is no `action`: a raw state is the reply to the command SENSE_ALL, so the data name
no command of the agent (rule 3 of docs/novelcraft.md). There is no clock either: `fps` frames make
a second. lerobot 0.4.4 reads the folder, selects episodes and time windows of it, and its tools
edit it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from schemas.errors import ConfigError, LakeError
from storage.atomic import new_directory
from storage.parquet import opened_parquet
from storage.tables import TableVersion, current_version
from tasks.novelcraft.lerobot_files import (
    DATA_FILE_MB,
    EPISODES_A_FILE,
    NUMBERS,
    STATE,
    DataFiles,
    dataset_info,
    episode_table,
    place_of,
    write_episodes,
    write_json,
    write_tasks,
)
from tasks.novelcraft.lerobot_stats import Stats, number_stats, picture_stats, read_picture


@dataclass(frozen=True)
class Exported:
    episodes: int
    frames: int
    files: int
    without_role: int
    """Frames of classes that are neither normal nor novel; they are left out."""
    without_picture: int
    """Frames that the table of pictures lacks; they are left out."""


def export_lerobot(
    lake: Path,
    out: Path,
    classes: Sequence[str] | None = None,
    fps: int = 1,
    data_file_mb: float = DATA_FILE_MB,
) -> Exported:
    """Write the episodes of these classes (default: all) to a new folder `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; name a new folder with --out")
    if fps < 1:
        raise ConfigError(f"fps is {fps}, expected a whole number from 1")
    images = current_version(lake, "novelcraft", "images")
    frames = _frames(lake, classes)
    without_role = frames["role"].null_count()
    frames = frames.drop_nulls("role")
    if frames.is_empty():
        raise ConfigError("no frame of these classes is normal or novel; name others with --only")
    shape = _picture_shape(frames)
    tasks = frames["task"].unique().sort().to_list()
    with new_directory(out) as folder:
        with closing(DataFiles(folder, int(data_file_mb * 2**20))) as data:
            episodes, stats = _write_data(data, _episodes(images, frames), tasks, fps)
        count = episodes[-1]["dataset_to_index"]
        write_episodes(folder, episodes)
        write_tasks(folder, tasks)
        write_json(folder / "meta/stats.json", stats)
        info = dataset_info(shape, fps, len(episodes), count, len(tasks))
        write_json(folder / "meta/info.json", info)
    return Exported(len(episodes), count, data.count, without_role, frames.height - count)


def _write_data(
    data: DataFiles, episodes: Iterable[pl.DataFrame], tasks: list[str], fps: int
) -> tuple[list[dict[str, Any]], dict[str, Stats]]:
    """Write the frames of every episode; returns what is said of each, and statistics of all."""
    levels = np.zeros((3, 256), np.int64)
    numbers: list[pl.DataFrame] = []
    about: list[dict[str, Any]] = []
    index = 0
    for number, episode in enumerate(episodes):
        pictures, seen = _pictures(episode)
        rows = _numbered(episode.drop("png"), number, index, tasks, fps)
        place = data.write(episode_table(rows, pictures))
        stats = {"observation.image": picture_stats(seen, rows.height)} | _stats(rows)
        about.append(_episode_row(rows, number, index, place, stats))
        numbers.append(rows.select(*STATE, *NUMBERS))
        levels += seen
        index += rows.height
    if not about:
        raise LakeError("no frame has a picture; build novelcraft again")
    return about, {"observation.image": picture_stats(levels, index)} | _stats(pl.concat(numbers))


def _frames(lake: Path, classes: Sequence[str] | None) -> pl.DataFrame:
    """Everything about each frame but its picture."""

    def read(table: str, columns: list[str]) -> pl.DataFrame:
        return current_version(lake, "novelcraft", table).read(columns)

    columns = ["frame_id", "episode_id", "class", "width", "height", "suspect_last", "goal_type"]
    frames = read("frames", [*columns, *STATE])
    known = frames["class"].unique().sort().to_list()
    if unknown := sorted(set(classes or ()) - set(known)):
        raise ConfigError(f"no class {', '.join(unknown)}; there are: {', '.join(known)}")
    if classes:
        frames = frames.filter(pl.col("class").is_in(list(classes)))
    targets = read("targets", ["frame_id", "novel_fraction"])
    splits = read("frame_roles", ["frame_id", "role", "split", "kept"])
    return (
        frames.join(targets, on="frame_id", how="left")
        .join(splits, on="frame_id", how="left")
        .with_columns(
            pl.col("novel_fraction").fill_null(float("nan")),
            pl.col("role").is_in(["novel_valid", "novel_test"]).alias("novel"),
            pl.format("Polycraft goal {}", pl.col("goal_type").fill_null("unknown")).alias("task"),
        )
    )


def _picture_shape(frames: pl.DataFrame) -> tuple[int, int]:
    sizes = frames.select("height", "width").unique().sort("height", "width").rows()
    if len(sizes) > 1:
        raise ConfigError(
            f"pictures have the sizes {sizes} (height, width), and LeRobot wants one; export "
            "classes of one size with --only"
        )
    return sizes[0]


def _episodes(images: TableVersion, frames: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The frames of each episode with their pictures, one episode in memory at a time."""
    seen: set[str] = set()
    groups = itertools.groupby(_row_groups(images, frames), lambda rows: rows["episode_id"][0])
    for episode_id, rows in groups:
        if episode_id in seen:
            raise LakeError(f"episode {episode_id} stands in two shards; build novelcraft again")
        seen.add(episode_id)
        yield pl.concat(list(rows))


def _row_groups(images: TableVersion, frames: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Joined row groups, cut where the episode changes; pictures nobody asked for stay unread."""
    for path in images.files:
        with opened_parquet(path) as file:
            for group in range(file.num_row_groups):
                names = file.read_row_group(group, columns=["frame_id"])
                ids = cast(pl.DataFrame, pl.from_arrow(names))
                places = ids.join(frames, on="frame_id", how="left", maintain_order="left")
                if places["episode_id"].null_count() == places.height:
                    continue
                png = cast(pl.DataFrame, pl.from_arrow(file.read_row_group(group, columns=["png"])))
                joined = pl.concat([places, png], how="horizontal").drop_nulls("episode_id")
                yield from joined.partition_by("episode_id", maintain_order=True)


def _pictures(episode: pl.DataFrame) -> tuple[list[bytes], np.ndarray]:
    pictures, levels = [], np.zeros((3, 256), np.int64)
    for frame_id, png in episode.select("frame_id", "png").iter_rows():
        picture, seen = read_picture(png, frame_id)
        pictures.append(picture)
        levels += seen
    return pictures, levels


def _numbered(
    episode: pl.DataFrame, number: int, first: int, tasks: list[str], fps: int
) -> pl.DataFrame:
    place = pl.int_range(pl.len(), dtype=pl.Int64)
    return episode.with_columns(
        (place / fps).alias("timestamp"),
        place.alias("frame_index"),
        pl.lit(number, pl.Int64).alias("episode_index"),
        (place + first).alias("index"),
        pl.col("task")
        .replace_strict({task: i for i, task in enumerate(tasks)})
        .alias("task_index"),
    )


def _stats(rows: pl.DataFrame) -> dict[str, Stats]:
    """Statistics of the number features of these frames."""
    groups = {"observation.state": list(STATE)} | {name: [name] for name in NUMBERS}
    return {
        feature: number_stats(rows.select(pl.col(names).cast(pl.Float64)).to_numpy())
        for feature, names in groups.items()
    }


def _episode_row(
    rows: pl.DataFrame, number: int, first: int, place: dict[str, int], stats: dict[str, Stats]
) -> dict[str, Any]:
    meta = place_of(number // EPISODES_A_FILE)
    splits = rows["split"].drop_nulls()
    row: dict[str, Any] = {
        "episode_index": number,
        "tasks": rows["task"].unique(maintain_order=True).to_list(),
        "length": rows.height,
        "data/chunk_index": place["chunk_index"],
        "data/file_index": place["file_index"],
        "dataset_from_index": first,
        "dataset_to_index": first + rows.height,
        "meta/episodes/chunk_index": meta["chunk_index"],
        "meta/episodes/file_index": meta["file_index"],
        "novelcraft/episode_id": rows["episode_id"][0],
        "novelcraft/class": rows["class"][0],
        "novelcraft/role": rows["role"][0],
        "novelcraft/split": splits[0] if splits.len() else "none",
    }
    for feature, measured in stats.items():
        row |= {f"stats/{feature}/{name}": value for name, value in measured.items()}
    return row
