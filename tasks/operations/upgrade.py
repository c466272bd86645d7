"""Bring tables of an older schema version up to today's, where that needs no raw files.

Enters: a lake. Leaves: a new version of each older table that declares how its rows change
(`Table.upgrades`), and the names of the others, which only a build makes anew.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from schemas.errors import LakeError
from schemas.manifest import Input, PieceManifest
from schemas.table import Table
from schemas.tables import find_table
from storage.layout import content_key
from storage.locks import benchmark_locked
from storage.pieces import Piece, find_piece, write_piece
from storage.tables import TableVersion, commit_table, current_versions
from storage.upkeep import read_build_record

STAGE, STAGE_VERSION = "upgrade_table", 1


@dataclass(frozen=True)
class Older:
    """A table whose schema was another one when it was written."""

    version: TableVersion
    table: Table

    @property
    def name(self) -> str:
        return self.version.name

    @property
    def was(self) -> int:
        return self.version.manifest.schema_version

    @property
    def can_be_upgraded(self) -> bool:
        return all(number in self.table.upgrades for number in range(self.was, self.table.version))


def older_tables(lake: Path) -> Iterator[Older]:
    """Current tables whose declaration has a higher version now."""
    for version in current_versions(lake):
        table = find_table(version.manifest.benchmark, version.manifest.table)
        if table is not None and version.manifest.schema_version < table.version:
            yield Older(version, table)


def upgrade(lake: Path, older: Older) -> None:
    """Publish the same rows under today's schema; the other tables stay as they are."""
    benchmark = older.version.manifest.benchmark
    with benchmark_locked(lake, benchmark):
        commit_table(lake, benchmark, older.table, [_upgraded(lake, older)])


def _upgraded(lake: Path, older: Older) -> Piece:
    manifest, table = older.version.manifest, older.table
    key = content_key({"from": manifest.key, "table": table.name, "to": table.version})
    earlier = find_piece(lake, manifest.benchmark, STAGE, key)
    if earlier is not None:
        return earlier
    rows, bad = table.check(_converted(older))
    if bad.height:
        first = bad.row(0, named=True)
        raise LakeError(
            f"{older.name} cannot be upgraded: {first['record']} breaks {first['rule']} "
            f"({first['message']}); make it anew with `{build_command(lake, manifest.benchmark)}`"
        )
    piece = PieceManifest(
        benchmark=manifest.benchmark,
        stage=STAGE,
        code=f"{__name__}:{STAGE}",
        stage_version=STAGE_VERSION,
        key=key,
        shard=table.name,
        settings={},
        source=None,
        inputs=[
            Input(name=table.name, digest=part.sha256, size=part.bytes, piece=part.piece)
            for part in manifest.parts
        ],
        inputs_verified=True,
        rows_in=rows.height,
        rows_out=rows.height,
        quarantined=0,
        parts=[],
    )
    return write_piece(lake, piece, {table.name: (table, rows)})


def _converted(older: Older) -> pl.DataFrame:
    rows = older.version.read()
    for number in range(older.was, older.table.version):
        rows = older.table.upgrades[number](rows)
    return rows


def build_command(lake: Path, benchmark: str) -> str:
    """What makes a benchmark's tables anew, as far as its last build tells."""
    record = read_build_record(lake, benchmark)
    sources = [source.root for source in record.sources] if record else []
    words = ["novelty", "build", benchmark, "--lake", str(lake)]
    for source in sources:
        words += ["--source", source]
    return shlex.join(words)
