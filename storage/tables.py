"""Table versions: parts of pieces gathered under one immutable, content-keyed folder.

A version hard-links the parts it shares with earlier ones, so committing costs what changed. The
`current` symlink is swapped last; part names carry their hash, so a reader who listed the old
version can never open a file of the new one under the same name. Of a lake in a bucket the pointer
is asked for each time; the cache has the manifest, and a part when it is read.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import polars as pl

from schemas.errors import LakeError
from schemas.manifest import PartFile, TableManifest, VersionPart
from schemas.table import Table
from storage.atomic import link_or_copy, new_directory, step, swap_symlink
from storage.layout import (
    MANIFEST,
    content_key,
    current_path,
    file_slug,
    lake_address,
    versions_path,
)
from storage.locks import locked
from storage.objects import bucket_of
from storage.parquet import WRITER_VERSION, read_parquet, write_parquet
from storage.pieces import Piece
from storage.remote import (
    fetch_files,
    publish_version,
    pull_manifests,
    pull_version,
    pull_versions,
    push_lost_pieces,
    version_prefix,
)
from storage.tombstones import bury, tombstones
from storage.verified import CURE, verified_all


@dataclass(frozen=True)
class TableVersion:
    folder: Path
    manifest: TableManifest

    @property
    def name(self) -> str:
        return f"{self.manifest.benchmark}/{self.manifest.table}"

    @property
    def lake(self) -> Path:
        """Four folders up; `novelty diff` also opens folders that are in no lake."""
        parents = self.folder.parents
        return parents[min(3, len(parents) - 1)]

    @property
    def files(self) -> list[Path]:
        """The parts on this machine: fetched if need be, compared with their digests."""
        if (bucket := bucket_of(self.lake)) is not None:
            prefix = version_prefix(self.manifest.benchmark, self.manifest.table, self.manifest.key)
            parts = [(part, f"{prefix}/{part.file}") for part in self.manifest.parts]
            fetch_files(bucket, self.folder, parts)
        return verified_all(list(zip(self.places, self.manifest.parts, strict=True)))

    @property
    def made(self) -> float:
        """When this content was first committed, or came here from a bucket."""
        return (self.folder / MANIFEST).stat().st_mtime

    @property
    def smallest(self) -> VersionPart:
        """The part that costs least to compare with its digest; all have the same schema."""
        return min(self.manifest.parts, key=lambda part: part.bytes)

    @property
    def places(self) -> list[Path]:
        """Where the parts stand, fetched or not."""
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
        files = [piece.part(table.name).path for piece, _ in parts]
        keys = read_parquet(files, list(table.key))
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
            "writer": WRITER_VERSION,
            "parts": [[part.sha256, piece.manifest.address] for piece, part in parts],
        }
    )
    folder = versions_path(lake, benchmark, table.name) / key
    bucket = bucket_of(lake)
    with locked(lake, f"{benchmark}.{table.name}", lock_wait):
        if folder.exists() and not _is_whole(lake, folder):
            bury(lake, [folder], "was no whole version when it was to be published")
        if not folder.exists():
            _write_version(folder, benchmark, table, key, parts, pieces)
        if bucket is not None:
            used = {p.manifest.address: p.manifest for p in pieces if p.has(table.name)}
            push_lost_pieces(bucket, lake, list(used.values()))
            publish_version(bucket, lake, read_manifest(folder), used)
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
            if not piece.lake or (piece.folder / part.file).exists():
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
        (temporary / MANIFEST).write_bytes(manifest.sealed())
        step("table_manifest_written")


def _is_whole(lake: Path, folder: Path) -> bool:
    """A version with a good manifest and every file of the right size; of a cache the manifest."""
    try:
        parts = read_manifest(folder).parts
        return bucket_of(lake) is not None or all(
            (folder / part.file).stat().st_size == part.bytes for part in parts
        )
    except (LakeError, FileNotFoundError):
        return False


def read_manifest(folder: Path) -> TableManifest:
    try:
        return TableManifest.unsealed((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise LakeError(f"no readable manifest in {folder}: {reason}; {CURE}") from error


def current_version(lake: Path, benchmark: str, table: str) -> TableVersion:
    bucket = bucket_of(lake)
    there = bucket is None or pull_version(bucket, lake, benchmark, table)
    if there and current_path(lake, benchmark, table).is_symlink():
        return _local_version(lake, benchmark, table)
    raise LakeError(
        f"no table {benchmark}/{table} in {lake_address(lake)}; `novelty status` lists what there "
        f"is, `novelty build {benchmark}` makes it"
    )


def current_versions(lake: Path, benchmark: str | None = None) -> list[TableVersion]:
    """The current version of every table in the lake, by name."""
    if (bucket := bucket_of(lake)) is not None:
        names = pull_versions(bucket, lake, benchmark)
    else:
        links = sorted(lake.glob(f"{benchmark or '[!.]*'}/*/current"))
        names = [(link.parts[-3], link.parts[-2]) for link in links]
    return [_local_version(lake, *name) for name in names]


def last_versions(lake: Path, benchmark: str | None = None) -> list[TableVersion]:
    """The current versions, and of a table whose version was dropped as damaged that one.

    It tells which pieces the table was gathered from; its files are not there to be read.
    """
    found = {version.name: version for version in current_versions(lake, benchmark)}
    for buried in reversed(tombstones(lake)):
        for path in map(PurePosixPath, buried.record.paths):
            name, folder = "/".join(path.parts[:2]), buried.folder / path
            wanted = path.match("*/*/versions/*") and benchmark in (None, path.parts[0])
            if wanted and name not in found and _has_manifest(folder):
                found[name] = TableVersion(folder, read_manifest(folder))
    return [found[name] for name in sorted(found)]


def _has_manifest(folder: Path) -> bool:
    try:
        return bool(read_manifest(folder))
    except LakeError:
        return False


def all_versions(lake: Path, benchmark: str, table: str) -> list[TableVersion]:
    """Every version of a table that `gc` left, the newest first."""
    if (bucket := bucket_of(lake)) is not None:
        pull_manifests(bucket, lake, benchmark, table)
    manifests = [
        path
        for path in versions_path(lake, benchmark, table).glob(f"*/{MANIFEST}")
        if not path.parent.name.startswith(".")
    ]
    manifests.sort(key=lambda path: (-path.stat().st_mtime_ns, path.parent.name))
    return [TableVersion(path.parent, read_manifest(path.parent)) for path in manifests]


def _local_version(lake: Path, benchmark: str, table: str) -> TableVersion:
    link = current_path(lake, benchmark, table)
    folder = link.parent / os.readlink(link)
    return TableVersion(folder, read_manifest(folder))
