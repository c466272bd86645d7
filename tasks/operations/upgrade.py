"""Bring tables of an older schema version up to today's, where that needs no raw files.

Enters: a lake. Leaves: a new version of each older table that declares how its rows change
(`Table.upgrades`), and the names of the others, which only a build makes anew.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
RAW = ("source", "lists", "videos", "tests")
"""Settings that name raw files."""


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
    words = ["novelty", "build", benchmark, "--lake", str(lake)]
    if record := read_build_record(lake, benchmark):
        roots = [source.root for source in record.sources]
        words += _raw_options(record.settings, roots) or [
            word for root in roots for word in ("--source", root)
        ]
    return shlex.join(words)


def _raw_options(settings: dict[str, Any], roots: list[str]) -> list[str]:
    """The options that name raw files, with the folders that a relative path stood for."""

    def whole(path: str) -> str:
        end = Path(path).parts
        return next((root for root in roots if Path(root).parts[-len(end) :] == end), path)

    words: list[str] = []
    for name in RAW:
        value = settings.get(name)
        if isinstance(value, dict):
            for kind, path in value.items():
                words += [f"--{name}", f"{kind}={whole(str(path))}"]
        elif value:
            words += [f"--{name}", whole(str(value))]
    return words
