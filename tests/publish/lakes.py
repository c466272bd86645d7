"""Lakes to publish: one with every kind of column, and any declared table with generated rows."""

import datetime
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from schemas.manifest import TableManifest, VersionPart
from schemas.table import Column, Table
from storage.atomic import swap_symlink
from storage.layout import MANIFEST, current_path, versions_path
from storage.parquet import write_parquet


def _png() -> bytes:
    """A grey picture of 2 by 1, by the PNG format's own rules."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", 2, 1, 8, 0, 0, 0, 0)
    body = zlib.compress(b"\x00\x10\x20")
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


PNG = _png()
KINDS = Table(
    name="kinds",
    description="Every kind of column.",
    columns=(
        Column("id", pa.string(), "Row"),
        Column("small", pa.int16(), "Small number", nullable=True),
        Column("large", pa.int64(), "Large number", unit="byte"),
        Column("share", pa.float32(), "Share", nullable=True),
        Column("exact", pa.float64(), "Exact number", unit="metre"),
        Column("yes", pa.bool_(), "Whether", nullable=True),
        Column("day", pa.date32(), "Day", nullable=True),
        Column("moment", pa.timestamp("us", tz="UTC"), "Moment", nullable=True),
        Column("names", pa.list_(pa.string()), "Names", nullable=True),
        Column("vector", pa.list_(pa.float32(), 3), "Vector of three"),
        Column("grid", pa.list_(pa.list_(pa.int32(), 2)), "Pairs"),
        Column("picture", pa.binary(), "A picture", nullable=True),
        Column("raw", pa.binary(), "Bytes of no kind"),
        Column("nothing", pa.string(), "Never there", nullable=True),
    ),
    key=("id",),
)
EXPECTED = {  # Croissant type and arrayShape of each column of KINDS, by the vocabulary's text
    "id": ("sc:Text", None),
    "small": ("cr:Int16", None),
    "large": ("cr:Int64", None),
    "share": ("cr:Float32", None),
    "exact": ("cr:Float64", None),
    "yes": ("sc:Boolean", None),
    "day": ("sc:Date", None),
    "moment": ("sc:DateTime", None),
    "names": ("sc:Text", "-1"),
    "vector": ("cr:Float32", "3"),
    "grid": ("cr:Int32", "-1,2"),
    "picture": ("sc:ImageObject", None),
    "raw": ("sc:Text", None),
    "nothing": ("sc:Text", None),
}
NONE = Table(
    name="none",
    description="A table without rows.",
    columns=KINDS.columns,
    key=("id",),
)


def kinds_rows() -> pl.DataFrame:
    moment = datetime.datetime(2026, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    rows = [
        {
            "id": f"row{number}",
            "small": None if number == 1 else number,
            "large": 2**40 + number,
            "share": None if number == 1 else 0.5 * number,
            "exact": 0.1 * number,
            "yes": None if number == 1 else number == 2,
            "day": None if number == 1 else moment.date(),
            "moment": None if number == 1 else moment,
            "names": None if number == 1 else ["a", "ü"][:number],
            "vector": [1.0, 2.0, float(number)],
            "grid": [[number, 1]] * number,
            "picture": None if number == 0 else PNG,
            "raw": b"\x00\xff" * number,
            "nothing": None,
        }
        for number in range(3)
    ]
    return pl.DataFrame(rows, schema=KINDS.polars_schema)


def put_table(lake: Path, benchmark: str, table: Table, frame: pl.DataFrame) -> None:
    """A table version of one file, as a build leaves it, without the pieces."""
    folder = versions_path(lake, benchmark, table.name) / ("0" * 32)
    folder.mkdir(parents=True)
    part = write_parquet(frame, table, folder / "00000-all.parquet")
    manifest = TableManifest(
        benchmark=benchmark,
        table=table.name,
        key=folder.name,
        schema_version=table.version,
        rows=part.rows,
        bytes=part.bytes,
        rows_in=part.rows,
        quarantined=0,
        parts=[
            VersionPart(
                file=part.file,
                sha256=part.sha256,
                bytes=part.bytes,
                rows=part.rows,
                piece=None,
                shard="all",
            )
        ],
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    swap_symlink(current_path(lake, benchmark, table.name), f"versions/{folder.name}")


def any_rows(table: Table, count: int = 3) -> pl.DataFrame:
    """Rows of the declared types; every nullable column is null in the second row."""
    rows = [
        {
            column.name: None
            if column.nullable and number == 1
            else _value(column.type, number, column.name)
            for column in table.columns
        }
        for number in range(count)
    ]
    return pl.DataFrame(rows, schema=table.polars_schema)


def _value(kind: pa.DataType, number: int, name: str) -> Any:
    types = pa.types
    if types.is_fixed_size_list(kind):
        return [_value(kind.value_type, number, name)] * kind.list_size
    if types.is_list(kind):
        return [_value(kind.value_type, number, name)] * number
    simple: Mapping[Any, Any] = {
        pa.string(): f"{name} {number}",
        pa.bool_(): number == 1,
        pa.date32(): datetime.date(2020, 1, 1 + number),
        pa.binary(): PNG,
    }
    if kind in simple:
        return simple[kind]
    assert types.is_integer(kind) or types.is_floating(kind), kind
    return number if types.is_integer(kind) else number / 4
