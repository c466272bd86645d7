"""Lakes of a few hand-written rows: any declared table, without the flow that would make it."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa

from schemas.manifest import PieceManifest
from schemas.table import Column
from schemas.tables import find_table
from storage.layout import content_key
from storage.pieces import write_piece
from storage.tables import TableVersion, commit_table


def put_table(
    lake: Path, benchmark: str, name: str, *shards: Sequence[dict] | pl.DataFrame
) -> TableVersion:
    """Commit rows (one piece per shard) as the current version; lacking columns get a default."""
    table = find_table(benchmark, name)
    assert table is not None, f"no table {benchmark}/{name} is declared"
    pieces = []
    for number, rows in enumerate(shards):
        frame = pl.DataFrame(rows, infer_schema_length=None)
        lacking = [column for column in table.columns if column.name not in frame.columns]
        frame = frame.with_columns(_default(column) for column in lacking)
        good, bad = table.check(frame)
        assert bad.is_empty(), bad.rows()
        key = content_key([benchmark, name, number, frame.hash_rows().to_list()])
        manifest = PieceManifest(
            benchmark=benchmark,
            stage="by_hand",
            code="tests.small_lake:put_table",
            stage_version=1,
            key=key,
            shard=str(number),
            settings={},
            source=None,
            inputs=[],
            rows_in=good.height,
            rows_out=good.height,
            quarantined=0,
            parts=[],
        )
        pieces.append(write_piece(lake, manifest, {name: (table, good)}))
    return commit_table(lake, benchmark, table, pieces)


def _default(column: Column) -> pl.Expr:
    if column.nullable:
        value: object = None
    elif column.allowed:
        value = column.allowed[0]
    elif pa.types.is_string(column.type):
        value = "x"
    elif pa.types.is_binary(column.type):
        value = b"x"
    elif pa.types.is_list(column.type):
        value = []
    elif pa.types.is_boolean(column.type):
        value = False
    else:
        value = max(column.minimum or 0, 0)
    return pl.lit(value).alias(column.name)
