"""Table versions: parts of pieces gathered under one immutable, content-keyed folder.

A version hard-links the parts it shares with earlier ones, so committing costs what changed. The
`current` symlink is swapped last; part names carry their hash, so a reader who listed the old
version can never open a file of the new one under the same name.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from schemas.errors import LakeError
from schemas.manifest import PartFile, TableManifest, VersionPart
from schemas.table import Table
from storage.atomic import link_or_copy, new_directory, step, swap_symlink
from storage.layout import MANIFEST, content_key, current_path, file_slug, versions_path
from storage.locks import locked
from storage.parquet import read_parquet, write_parquet
from storage.pieces import Piece


@dataclass(frozen=True)
class TableVersion:
    folder: Path
    manifest: TableManifest

    @property
    def name(self) -> str:
        return f"{self.manifest.benchmark}/{self.manifest.table}"

    @property
    def files(self) -> list[Path]:
        return [self.folder / part.file for part in self.manifest.parts]

    def read(self, columns: list[str] | None = None) -> pl.DataFrame:
        return read_parquet(self.files, columns)


def _in_key_order(
    table: Table, chosen: Iterable[tuple[Piece, PartFile]]
) -> list[tuple[Piece, PartFile]]:
    """Parts by first key; refuses a key that stands in two parts."""
    parts = sorted(chosen, key=lambda pair: (pair[1].first or [], pair[0].shard))
    apart = all(
        before.last is not None and after.first is not None and before.last < after.first
        for (_, before), (_, after) in itertools.pairwise(parts)
    )
    if not apart and len(parts) > 1:
        keys = read_parquet([piece.folder / part.file for piece, part in parts], list(table.key))
        repeated = keys.filter(pl.struct(table.key).is_duplicated())
        if repeated.height:
            raise LakeError(
                f"table {table.name}: key {repeated.row(0)} stands in two shards; the stage that "
                "writes it must put every record in exactly one shard"
            )
    return parts


def commit_table(
    lake: Path,
    benchmark: str,
    table: Table,
    pieces: Sequence[Piece],
    lock_wait: float = 60.0,
) -> TableVersion:
    """Make the parts of `table` in `pieces` its current version; a no-op if they are it."""
    chosen = [
        (piece, part)
        for piece in pieces
        for part in piece.manifest.parts
        if part.table == table.name and part.rows
    ]
    parts = _in_key_order(table, chosen)
    key = content_key(
        {
            "table": f"{benchmark}/{table.name}",
            "schema_version": table.version,
            "parts": [[part.sha256, piece.manifest.address] for piece, part in parts],
        }
    )
    folder = versions_path(lake, benchmark, table.name) / key
    with locked(lake, f"{benchmark}.{table.name}", lock_wait):
        if not folder.exists():
            _write_version(folder, benchmark, table, key, parts, pieces)
        swap_symlink(current_path(lake, benchmark, table.name), f"versions/{key}")
    return TableVersion(folder, read_manifest(folder))


def _write_version(
    folder: Path,
    benchmark: str,
    table: Table,
    key: str,
    parts: list[tuple[Piece, PartFile]],
    pieces: Sequence[Piece],
) -> None:
    with new_directory(folder) as temporary:
        listed = []
        for number, (piece, part) in enumerate(parts):
            name = f"{number:05d}-{file_slug(piece.shard)}-{part.sha256[:12]}.parquet"
            link_or_copy(piece.folder / part.file, temporary / name)
            listed.append(
                VersionPart(
                    file=name,
                    sha256=part.sha256,
                    bytes=part.bytes,
                    rows=part.rows,
                    piece=piece.manifest.address,
                    shard=piece.shard,
                )
            )
            step("part_linked")
        if not listed:
            empty = write_parquet(table.empty(), table, temporary / "00000-empty.parquet")
            listed.append(
                VersionPart(
                    file=empty.file,
                    sha256=empty.sha256,
                    bytes=empty.bytes,
                    rows=0,
                    piece=None,
                    shard="",
                )
            )
        manifest = TableManifest(
            benchmark=benchmark,
            table=table.name,
            key=key,
            schema_version=table.version,
            rows=sum(part.rows for part in listed),
            bytes=sum(part.bytes for part in listed),
            rows_in=sum(piece.manifest.rows_in for piece in pieces if piece.has(table.name)),
            quarantined=sum(
                piece.manifest.quarantined for piece in pieces if piece.has(table.name)
            ),
            parts=listed,
        )
        (temporary / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
        step("table_manifest_written")


def read_manifest(folder: Path) -> TableManifest:
    try:
        return TableManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise LakeError(
            f"no readable manifest in {folder}: {error}; build the table again"
        ) from error


def current_version(lake: Path, benchmark: str, table: str) -> TableVersion:
    link = current_path(lake, benchmark, table)
    try:
        folder = link.parent / os.readlink(link)
    except OSError:
        raise LakeError(
            f"no table {benchmark}/{table} in {lake}; `novelty status` lists what there is, "
            f"`novelty build {benchmark}` makes it"
        ) from None
    return TableVersion(folder, read_manifest(folder))


def current_versions(lake: Path, benchmark: str | None = None) -> list[TableVersion]:
    """The current version of every table in the lake, by name."""
    links = sorted(lake.glob(f"{benchmark or '[!.]*'}/*/current"))
    return [current_version(lake, link.parts[-3], link.parts[-2]) for link in links]
