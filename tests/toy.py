"""A small benchmark for tests of the foundation: text files of `name,value` lines become rows."""

from pathlib import Path

import polars as pl
import pyarrow as pa

from schemas.config import Settings
from schemas.table import Column, Reference, Table
from storage.layout import MANIFEST
from storage.pieces import Piece
from storage.raw import open_raw
from tasks.engine.stage import Build, Produced, Reject, Shard, stage

READINGS = Table(
    name="readings",
    description="Readings for tests.",
    columns=(
        Column("file", pa.string(), "Raw file"),
        Column("line", pa.int32(), "Line number", minimum=0),
        Column("value", pa.float64(), "Value read", unit="metre", minimum=0, maximum=100),
        Column("kind", pa.string(), "Kind", allowed=("a", "b"), nullable=True),
    ),
    key=("file", "line"),
    row_group_rows=1000,
)
FILES = Table(
    name="files",
    description="Files for tests.",
    columns=(Column("file", pa.string(), "Raw file"), Column("rows", pa.int64(), "Rows")),
    key=("file",),
    references=(Reference(("file",), "readings", ("file",)),),
)
TOTALS = Table(
    name="totals",
    description="Totals for tests.",
    columns=(Column("kind", pa.string(), "Kind"), Column("total", pa.float64(), "Sum")),
    key=("kind",),
)


class ReadSettings(Settings):
    scale: float = 1.0


@stage(writes=(READINGS, FILES), version=1)
def read_lines(shard: Shard, settings: ReadSettings) -> Produced:
    """Read lines of one file."""
    source = open_raw(Path(shard.source or ""))
    rows, rejects, records = [], [], 0
    for file in shard.files:
        for line, text in enumerate(source.read(file.name).decode().splitlines()):
            records += 1
            kind, _, value = text.partition(",")
            try:
                rows.append((file.name, line, float(value) * settings.scale, kind or None))
            except ValueError:
                rejects.append(Reject(f"{file.name}:{line}", "number", f"{value!r} is no number"))
    readings = pl.DataFrame(rows, schema=READINGS.polars_schema, orient="row")
    files = readings.group_by("file").agg(pl.len().cast(pl.Int64).alias("rows"))
    return Produced({"readings": readings, "files": files}, records, rejects)


@stage(writes=(TOTALS,), version=1)
def add_up(shard: Shard, settings: Settings) -> Produced:
    """Sum by kind."""
    rows = shard.read("readings").filter(pl.col("kind").is_not_null())
    totals = rows.group_by("kind").agg(pl.col("value").sum().alias("total"))
    return Produced({"totals": totals}, totals.height)


def write_raw(root: Path, files: int = 6, lines: int = 20) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        body = [f"{'ab'[i % 2]},{(number * 7 + i * 3) % 50}" for i in range(lines)]
        if number == 2:
            body[3] = "a,not a number"
            body[4] = "c,5"
            body[5] = "a,1000"
        (root / f"f{number}.txt").write_text("\n".join(body) + "\n")


def build_toy(
    lake: Path, raw: Path, *, workers: int = 2, reverse: bool = False, scale=1.0
) -> Build:
    with Build("toy", lake, workers=workers) as build:
        source = build.source(raw)
        shards = [Shard(file.name, files=(file,), source=source.root) for file in source.files()]
        if reverse:
            shards.reverse()
        build.run(read_lines, shards, ReadSettings(scale=scale))
        parts = tuple(sorted(build.table("readings"), key=lambda part: part.shard))
        build.run(add_up, [Shard("all", parts=parts)], Settings())
    return build


def parquet_bytes(lake: Path) -> dict[str, bytes]:
    """Every current Parquet file: its path and its bytes."""
    return {
        str(path.relative_to(lake)): path.read_bytes()
        for path in sorted(lake.glob("toy/*/current/*"))
    }


def unverified(piece: Piece) -> None:
    """Make it a piece of the time before inputs were verified."""
    old = piece.manifest.model_copy(update={"inputs_verified": False})
    (piece.folder / MANIFEST).write_bytes(old.sealed())
