"""Raw shapes to the tables SHAPES, SAMPLES and POINT_CLOUDS.

Enters: listings of sources (`tasks.threedos.sources`). Leaves: one shard per bucket of shapes, read
and sampled in child processes that may hang, crash or eat memory; what cannot be read goes to
quarantine under its shape id.

A bucket is a prefix of the hash of the shape id, one bit longer wherever more than
`SHAPES_PER_SHARD` shapes share it. So a new shape changes one shard (or splits it in two), whatever
its name, and no shard grows with the source. Rows of an h5 or npz file are cut by row number: such
a file changes as a whole.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import RecordError
from schemas.table import Table
from schemas.tables import SAMPLES
from schemas.threedos import SHAPES, ShapeSettings, point_clouds_table
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.ingest.native.pool import Limits, Outcome, run_batch
from tasks.ingest.raw_files import hash_buckets, on_disk
from tasks.threedos.formats import OPEN3D_READERS
from tasks.threedos.sampling import Z_UP
from tasks.threedos.sources import Entry, Listing, place

SHAPES_PER_SHARD = 256
REFUSED = "refused"
SAMPLE = "tasks.threedos.formats:sample_file"


# ---------------------------------------------------------------- shards


def plan_shape_shards(listings: Sequence[Listing]) -> list[Shard]:
    """Shards of at most `SHAPES_PER_SHARD` shapes of one source, and its refusals.

    A shape that an earlier listing has already (ModelNet40 as meshes and as text) is refused.
    """
    names = [listing.name for listing in listings]
    if len(set(names)) != len(names):
        raise ValueError(f"two sources have the same name: {names}")
    owner: dict[str, str] = {}
    shards = []
    for listing in listings:
        refused = [tuple(row) for row in listing.refused]
        first_entries = []
        for entry in listing.entries:
            if entry.sample_id in owner:
                message = f"{place(entry)}: source {owner[entry.sample_id]} has this shape already"
                refused.append((entry.sample_id, "duplicate_id", message))
            else:
                first_entries.append(entry)
        owner |= {entry.sample_id: listing.name for entry in first_entries}
        for name, entries in _buckets(first_entries):
            files = sorted({entry.file for entry in entries})
            shards.append(
                Shard(
                    f"{listing.name}/{name}",
                    files=tuple(listing.files[file] for file in files),
                    source=listing.root,
                    about={"source": listing.name, "shapes": [list(entry) for entry in entries]},
                )
            )
        if refused:
            name = f"{listing.name}/{REFUSED}"
            shards.append(Shard(name, source=listing.root, about=sorted(map(list, refused))))
    return sorted(shards, key=lambda shard: shard.name)


def _buckets(entries: Iterable[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    rows: dict[str, list[Entry]] = defaultdict(list)
    single: dict[str, Entry] = {}
    for entry in entries:
        if entry.row is None:
            single[entry.sample_id] = entry
        else:
            number = entry.row // SHAPES_PER_SHARD
            rows[f"{entry.file}/{entry.part}/{number:05d}"].append(entry)
    for name, ids in hash_buckets(single, SHAPES_PER_SHARD):
        yield name, [single[shape] for shape in ids]
    yield from rows.items()


# ---------------------------------------------------------------- the stage


def _tables(settings: ShapeSettings) -> tuple[Table, ...]:
    return SHAPES, SAMPLES, point_clouds_table(settings.points)


@stage(writes=_tables, version=3)
def sample_shapes(shard: Shard, settings: ShapeSettings) -> Produced:
    """Read some shapes, sample their surfaces and normalise the clouds."""
    if shard.name.endswith(f"/{REFUSED}"):
        rejects = [Reject(*refused) for refused in shard.about]
        return Produced({}, len(rejects), rejects)
    entries = [Entry(*row) for row in shard.about["shapes"]]
    by_file: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_file[entry.file].append(entry)
    rows = _Rows(shard.about["source"], settings)
    for paths in on_disk(shard.source or "", shard.files, settings.max_file_bytes):
        readable = [entry for name in paths for entry in by_file[name]]
        for entry, outcome in _sampled(readable, paths, settings):
            rows.add(entry, outcome)
    return rows.produced(len(entries))


def _sampled(
    entries: Sequence[Entry], paths: Mapping[str, Path | RecordError], settings: ShapeSettings
) -> Iterator[tuple[Entry, Outcome | RecordError]]:
    """The outcome of each shape; the entries' order is kept, so rows of a file come in turn."""
    todo = []
    for entry in entries:
        path = paths[entry.file]
        if isinstance(path, RecordError):
            yield entry, path
        else:
            todo.append((entry, path))
    names = ("points", "candidates", "farthest", "normalisation", "background", "seed")
    how = {name: getattr(settings, name) for name in names}
    items = [
        {
            "path": str(path),
            "reader": entry.reader,
            "part": entry.part,
            "row": entry.row,
            "sample_id": entry.sample_id,
            **how,
        }
        for entry, path in todo
    ]
    limits = Limits(seconds_per_item=settings.seconds_per_shape, memory_bytes=settings.memory_bytes)
    readers = {entry.reader for entry in entries}
    imports = ["open3d"] if readers & set(OPEN3D_READERS) else []
    imports += ["h5py"] if "h5" in readers else []
    imports += ["fpsample"] if settings.farthest == "bucket" else []
    outcomes = run_batch(SAMPLE, items, limits=limits, imports=imports, batch=SHAPES_PER_SHARD)
    for (entry, _), outcome in zip(todo, outcomes, strict=True):
        yield entry, outcome


class _Rows:
    """Rows of the tables, gathered shape by shape."""

    def __init__(self, source: str, settings: ShapeSettings):
        self.source, self.settings = source, settings
        self.shapes: list[dict[str, Any]] = []
        self.clouds: list[dict[str, Any]] = []
        self.points: list[np.ndarray] = []
        self.rejects: list[Reject] = []

    def add(self, entry: Entry, outcome: Outcome | RecordError) -> None:
        value = None if isinstance(outcome, RecordError) else outcome.value
        if value is None:
            rule, message = outcome.rule or "", outcome.message or ""
            self.rejects.append(Reject(entry.sample_id, rule, f"{place(entry)}: {message}"))
            return
        ends = [f"{end}_{axis}" for end in ("min", "max") for axis in "xyz"]
        about = {
            "sample_id": entry.sample_id,
            "source": self.source,
            "class": entry.class_,
            "split": entry.split,
            "file": entry.file,
            "row": entry.row,
            **dict(zip(ends, value["box"], strict=True)),
        }
        self.shapes.append({name: value.get(name) for name in SHAPES.polars_schema} | about)
        x, y, z = value["center"]
        self.clouds.append(
            {
                "sample_id": entry.sample_id,
                "normalisation": self.settings.normalisation,
                "center_x": x,
                "center_y": y,
                "center_z": z,
                "scale": value["scale"],
                "count": value["count"],
            }
        )
        self.points.append(value["points"])

    def produced(self, records: int) -> Produced:
        table = point_clouds_table(self.settings.points)
        schema = dict(table.polars_schema)
        flat = schema.pop("points")
        clouds = pl.DataFrame(self.clouds, schema=schema)
        points = np.array(self.points, np.float32).reshape(-1, 3 * self.settings.points)
        clouds = clouds.with_columns(pl.Series("points", points, dtype=flat))
        shapes = pl.DataFrame(self.shapes, schema=SHAPES.polars_schema)
        samples = shapes.select(
            "sample_id",
            "class",
            pl.lit(None, pl.String).alias("sequence"),
            pl.lit(None, pl.Int32).alias("position"),
            pl.col("file").alias("source"),
            pl.lit("cloud").alias("modality"),
        ).with_columns(
            pl.Series(
                "digest",
                [
                    cloud_digest(row, cloud["count"], self.settings.normalisation, self.source)
                    for row, cloud in zip(points, self.clouds, strict=True)
                ],
                pl.String,
            )
        )
        tables = {SHAPES.name: shapes, SAMPLES.name: SAMPLES.conform(samples), table.name: clouds}
        return Produced(tables, records, self.rejects)


def cloud_digest(points: np.ndarray, count: int, normalisation: str, source: str) -> str:
    """Digest of what a network gets to see: the stored points, and whether they are turned."""
    preparation = json.dumps([count, normalisation, source in Z_UP])
    return hashlib.sha256(points.astype("<f4").tobytes() + preparation.encode()).hexdigest()
