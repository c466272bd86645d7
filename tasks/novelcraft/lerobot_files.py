"""The files of a data set in LeRobot's v3.0 layout: data, episodes, tasks, statistics, info.

Enter: frames of one episode after the other, numbered, and their pictures. Leave: data files
`data/chunk-000/file-000.parquet` of about 100 MB with one row group an episode, and those under
`meta/`. Source of the layout: see `lerobot.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from storage.atomic import fsync_path

VERSION = "v3.0"
FILES_A_CHUNK = 1000
DATA_FILE_MB = 100
VIDEO_FILE_MB = 200
EPISODES_A_FILE = 10_000
PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
STATE = ("x", "y", "z", "yaw", "pitch")

_SCALARS = {
    "novel_fraction": pa.float32(),
    "novel": pa.bool_(),
    "kept": pa.bool_(),
    "suspect_last": pa.bool_(),
    "frame_id": pa.string(),
    "timestamp": pa.float32(),
    "frame_index": pa.int64(),
    "episode_index": pa.int64(),
    "index": pa.int64(),
    "task_index": pa.int64(),
}
_NAMES = {pa.float32(): "float32", pa.int64(): "int64", pa.bool_(): "bool", pa.string(): "string"}
NUMBERS = [name for name, kind in _SCALARS.items() if kind != pa.string()]


def _schema() -> pa.Schema:
    """Arrow types, and the description that lets the `datasets` library decode the pictures."""
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    state = pa.list_(pa.float32(), len(STATE))
    fields = [pa.field("observation.image", picture), pa.field("observation.state", state)]
    fields += [pa.field(name, kind) for name, kind in _SCALARS.items()]
    number = {"dtype": "float32", "_type": "Value"}
    features: dict[str, Any] = {
        "observation.image": {"_type": "Image"},
        "observation.state": {"feature": number, "length": len(STATE), "_type": "Sequence"},
    }
    features |= {name: {"dtype": _NAMES[kind], "_type": "Value"} for name, kind in _SCALARS.items()}
    return pa.schema(fields, {"huggingface": orjson.dumps({"info": {"features": features}})})


def episode_table(rows: pl.DataFrame, pictures: list[bytes]) -> pa.Table:
    schema = _schema()
    nothing = pa.nulls(len(pictures), pa.string())
    image = pa.StructArray.from_arrays(
        [pa.array(pictures, pa.binary()), nothing], ["bytes", "path"]
    )
    state = rows.select(STATE).to_numpy().astype(np.float32).ravel()
    columns = [image, pa.FixedSizeListArray.from_arrays(pa.array(state), len(STATE))]
    columns += [rows[name].to_arrow().cast(kind) for name, kind in _SCALARS.items()]
    return pa.Table.from_arrays(columns, schema=schema)


class DataFiles:
    """Data files in order, a new one before an episode would pass the limit."""

    def __init__(self, folder: Path, limit: int):
        self.folder = folder
        self.limit = limit
        self.count = 0
        self.bytes = 0
        self.path: Path | None = None
        self.writer: pq.ParquetWriter | None = None

    def write(self, episode: pa.Table) -> dict[str, int]:
        """Append an episode as one row group; says in which file."""
        if self.writer is None or self.bytes + episode.nbytes > self.limit:
            self.close()
            self.path = self.folder / "data" / PLACE.format(**place_of(self.count))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = pq.ParquetWriter(
                self.path, episode.schema, compression="snappy", use_dictionary=["frame_id"]
            )
            self.count += 1
            self.bytes = 0
        self.writer.write_table(episode, row_group_size=episode.num_rows)
        self.bytes += episode.nbytes
        return place_of(self.count - 1)

    def close(self) -> None:
        if self.writer is not None and self.path is not None:
            self.writer.close()
            fsync_path(self.path)
            self.writer = None


def place_of(number: int) -> dict[str, int]:
    return {"chunk_index": number // FILES_A_CHUNK, "file_index": number % FILES_A_CHUNK}


def write_episodes(folder: Path, rows: list[dict[str, Any]]) -> None:
    for start in range(0, len(rows), EPISODES_A_FILE):
        place = PLACE.format(**place_of(start // EPISODES_A_FILE))
        table = pa.Table.from_pylist(rows[start : start + EPISODES_A_FILE])
        _write_parquet(table, folder / "meta/episodes" / place)


def write_tasks(folder: Path, tasks: Sequence[str]) -> None:
    """As pandas writes a frame whose index is the task: LeRobot looks tasks up by that index."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": tasks})
    index = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {
                "name": name,
                "field_name": name,
                "pandas_type": kind,
                "numpy_type": numpy,
                "metadata": None,
            }
            for name, kind, numpy in (
                ("task_index", "int64", "int64"),
                ("task", "unicode", "object"),
            )
        ],
        "pandas_version": "2.0.0",
    }
    table = table.replace_schema_metadata({"pandas": orjson.dumps(index)})
    _write_parquet(table, folder / "meta/tasks.parquet")


def _write_parquet(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="snappy")
    fsync_path(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
    fsync_path(path)


def dataset_info(
    shape: tuple[int, int], fps: int, episodes: int, frames: int, tasks: int
) -> dict[str, Any]:
    features: dict[str, Any] = {
        "observation.image": {
            "dtype": "image",
            "shape": [*shape, 3],
            "names": ["height", "width", "channels"],
        },
        "observation.state": {"dtype": "float32", "shape": [len(STATE)], "names": list(STATE)},
    }
    features |= {
        name: {"dtype": _NAMES[kind], "shape": [1], "names": None}
        for name, kind in _SCALARS.items()
    }
    return {
        "codebase_version": VERSION,
        "robot_type": "polycraft",
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": FILES_A_CHUNK,
        "data_files_size_in_mb": DATA_FILE_MB,
        "video_files_size_in_mb": VIDEO_FILE_MB,
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": f"data/{PLACE}",
        "video_path": None,
        "features": features,
    }
