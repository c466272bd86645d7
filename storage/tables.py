"""Table versions: parts of pieces gathered under one immutable, content-keyed folder.

A version hard-links the parts it shares with earlier ones, so committing costs what changed. Part
names carry their hash, so a reader who listed the old version can never open a file of the new one
under the same name. `publish` makes versions and then one snapshot that names them all. Of a lake
in a bucket the pointer is asked for each time; the cache has the manifest, and a part when it is
read.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl

from schemas.errors import LakeError
from schemas.manifest import PartFile, Snapshot, TableManifest, VersionPart
from schemas.table import Table
from storage.atomic import link_or_copy, new_directory, step
from storage.layout import MANIFEST, content_key, file_slug, lake_address, versions_path
from storage.locks import locked
from storage.objects import bucket_of
from storage.parquet import WRITER_VERSION, read_parquet, write_parquet
from storage.pieces import Piece, find_piece
from storage.remote import (
    SWAPS,
    at_once,
    fetch_files,
    pull_manifests,
    pull_record,
    pull_version,
    push_lost_pieces,
    put_version,
    renew_version,
    version_prefix,
)
from storage.snapshots import (
    benchmarks_in,
    commit_snapshot,
    current_snapshot,
    link_tables,
    publication_base,
)
from storage.tombstones import bury, tombstones
from storage.verified import ABSENT, CURE, verified_all


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
    table: Table, pairs: Iterable[tuple[Piece, PartFile]]
) -> list[tuple[Piece, PartFile]]:
    """Parts by first key; refuses a key that stands in two parts."""
    parts = sorted(pairs, key=lambda pair: (pair[1].first or [], pair[0].shard))
    is_disjoint = all(
        before.last is not None and after.first is not None and before.last < after.first
        for (_, before), (_, after) in itertools.pairwise(parts)
    )
    if not is_disjoint and len(parts) > 1:
        files = [piece.part(table.name).path for piece, _ in parts]
        keys = read_parquet(files, list(table.key))
        repeated = keys.filter(pl.struct(table.key).is_duplicated())
        if repeated.height:
            raise LakeError(
                f"table {table.name}: key {repeated.row(0)} stands in two shards; the stage that "
                "writes it must put every record in exactly one shard"
            )
    return parts


@dataclass(frozen=True)
class Contents:
    """What a snapshot is to show: tables gathered from pieces, and versions that stay as they are.

    `runs` are the pieces of each run.
    """

    tables: Sequence[Table] = ()
    pieces: Sequence[Piece] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, Sequence[str]] = field(default_factory=dict)


def publish(
    lake: Path,
    benchmark: str,
    plan: Callable[[Snapshot | None], Contents],
    *,
    partial: bool = False,
    finished: bool = False,
    restored: str | None = None,
    settings: Mapping[str, Any] | None = None,
    lock_wait: float = 60.0,
) -> Snapshot:
    """Make a snapshot of what is planned the current one; a no-op if it shows that already.

    `plan` gets the current snapshot. If another machine publishes meanwhile, `plan` is called again
    with the new one, so that no run of either is lost. A build that ends says `finished`.
    """
    with locked(lake, f"{benchmark}.snapshot", lock_wait):
        for _ in range(SWAPS):
            base = publication_base(lake, benchmark)
            old = base.snapshot
            contents = plan(old)
            before = old.tables if old is not None else {}
            tables = dict(contents.kept)
            for name, key in tables.items():
                if before.get(name) != key:
                    _renew_version(lake, benchmark, name, key)
            for table in contents.tables:
                tables[table.name] = _commit_version(
                    lake, benchmark, table, contents.pieces, before.get(table.name)
                )
            now = datetime.now(UTC)
            snapshot = Snapshot(
                benchmark=benchmark,
                number=old.number + 1 if old is not None else 1,
                previous=old.name if old is not None else None,
                made=now,
                finished=now if finished else old.finished if old is not None else None,
                partial=partial,
                restored=restored,
                settings=dict(settings or {}),
                tables=dict(sorted(tables.items())),
                runs={run: sorted(set(pieces)) for run, pieces in sorted(contents.runs.items())},
            )
            stays = old is not None and old.number and not base.damaged
            if old is not None and stays and _shows(old, snapshot):
                link_tables(lake, old)
                return old
            if commit_snapshot(lake, snapshot, base):
                return snapshot
            time.sleep(random.uniform(0.01, 0.1))
    raise LakeError(
        f"{benchmark} in {lake_address(lake)} is published by others all the time; run the same "
        "command again"
    )


def _renew_version(lake: Path, benchmark: str, table: str, key: str) -> None:
    """An old version becomes current again: other machines' `gc` must not take it meanwhile."""
    find_version(lake, benchmark, table, key)  # a sentence if it is gone
    if (bucket := bucket_of(lake)) is not None:
        renew_version(bucket, benchmark, table, key)


def _shows(old: Snapshot, new: Snapshot) -> bool:
    """Nothing new to see: a finished publication of the same rows is not replaced by a partial."""
    return (old.tables, old.runs) == (new.tables, new.runs) and (new.partial or not old.partial)


def commit_table(lake: Path, benchmark: str, table: Table, pieces: Sequence[Piece]) -> TableVersion:
    """Publish one table of these pieces; the other tables stay as they are."""

    def plan(old: Snapshot | None) -> Contents:
        kept = old.tables if old else {}
        runs = {run: list(addresses) for run, addresses in (old.runs if old else {}).items()}
        for run, addresses in pieces_by_run(pieces).items():
            runs[run] = [*runs.get(run, []), *addresses]
        return Contents([table], pieces, kept, runs)

    snapshot = publish(lake, benchmark, plan)
    return find_version(lake, benchmark, table.name, snapshot.tables[table.name])


def pieces_by_run(pieces: Iterable[Piece]) -> dict[str, list[str]]:
    """The register of a snapshot: addresses of the pieces of each run."""
    runs: dict[str, list[str]] = {}
    for piece in pieces:
        if piece.manifest.run is not None:
            runs.setdefault(piece.manifest.run.run_id, []).append(piece.manifest.address)
    return runs


def _commit_version(
    lake: Path, benchmark: str, table: Table, pieces: Sequence[Piece], current: str | None
) -> str:
    """Gather the parts of `table` in `pieces`; the key of the version."""
    parts = _in_key_order(
        table,
        (
            (piece, part)
            for piece in pieces
            for part in piece.manifest.parts
            if part.table == table.name and part.rows
        ),
    )
    key = content_key(
        {
            "table": f"{benchmark}/{table.name}",
            "schema_version": table.version,
            "writer": WRITER_VERSION,
            "parts": [[part.sha256, piece.manifest.address] for piece, part in parts],
        }
    )
    folder = versions_path(lake, benchmark, table.name) / key
    if folder.exists() and not _is_whole(lake, folder):
        bury(lake, [folder], "was no whole version when it was to be published")
    if not folder.exists():
        _write_version(folder, benchmark, table, key, parts, pieces)
    if (bucket := bucket_of(lake)) is not None:
        manifests = {p.manifest.address: p.manifest for p in pieces if p.has(table.name)}
        push_lost_pieces(bucket, lake, list(manifests.values()))
        put_version(bucket, lake, read_manifest(folder), manifests, key == current)
    return key


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
    except (LakeError, *ABSENT):
        return False


def read_manifest(folder: Path) -> TableManifest:
    try:
        return TableManifest.unsealed((folder / MANIFEST).read_bytes())
    except (*ABSENT, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise LakeError(f"no readable manifest in {folder}: {reason}; {CURE}") from error


def current_version(lake: Path, benchmark: str, table: str) -> TableVersion:
    snapshot = current_snapshot(lake, benchmark)
    if snapshot is not None and table in snapshot.tables:
        return versions_of(lake, snapshot, [table])[0]
    raise no_table(lake, benchmark, table)


def no_table(lake: Path, benchmark: str, table: str) -> LakeError:
    return LakeError(
        f"no table {benchmark}/{table} in {lake_address(lake)}; `novelty status` lists what there "
        f"is, `novelty build {benchmark}` makes it"
    )


def current_versions(lake: Path, benchmark: str | None = None) -> list[TableVersion]:
    """The current version of every table in the lake, by name; those of a benchmark belong
    together.
    """
    names = [benchmark] if benchmark else benchmarks_in(lake)
    if (bucket := bucket_of(lake)) is not None:
        at_once(lambda name: pull_record(bucket, lake, name), names)
    snapshots = [
        snapshot for name in names if (snapshot := current_snapshot(lake, name)) is not None
    ]
    return [version for snapshot in snapshots for version in versions_of(lake, snapshot)]


def versions_of(
    lake: Path, snapshot: Snapshot, tables: Sequence[str] | None = None
) -> list[TableVersion]:
    """The tables that a snapshot shows, or some of them, by name."""
    names = sorted(snapshot.tables if tables is None else tables)

    def find(name: str) -> TableVersion:
        return find_version(lake, snapshot.benchmark, name, snapshot.tables[name])

    return at_once(find, names) if bucket_of(lake) is not None else [find(n) for n in names]


def find_version(lake: Path, benchmark: str, table: str, key: str) -> TableVersion:
    """A version by its key; of a bucket its manifest is fetched."""
    bucket = bucket_of(lake)
    if bucket is not None and not pull_version(bucket, lake, benchmark, table, key):
        raise LakeError(
            f"version {key} of {benchmark}/{table} is missing in {bucket.address}; build "
            f"{benchmark} again to mend it"
        )
    folder = versions_path(lake, benchmark, table) / key
    return TableVersion(folder, read_manifest(folder))


def last_versions(lake: Path, benchmark: str | None = None) -> list[TableVersion]:
    """The current version of every table; the dropped one if it was dropped as damaged.

    A dropped version still tells which pieces the table was gathered from. Its files are gone.
    """
    versions = {version.name: version for version in current_versions(lake, benchmark)}
    for buried in reversed(tombstones(lake)):
        for path in map(PurePosixPath, buried.record.paths):
            name, folder = "/".join(path.parts[:2]), buried.folder / path
            is_version = path.match("*/*/versions/*") and benchmark in (None, path.parts[0])
            if is_version and name not in versions and _has_manifest(folder):
                versions[name] = TableVersion(folder, read_manifest(folder))
    return [versions[name] for name in sorted(versions)]


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


def pieces_of(lake: Path, versions: Iterable[TableVersion]) -> list[Piece]:
    """The pieces that versions were gathered from; lost ones are left out."""
    addresses = {
        part.piece for version in versions for part in version.manifest.parts if part.piece
    }
    pieces = at_once(lambda address: find_piece(lake, *address.split("/")), sorted(addresses))
    return [piece for piece in pieces if piece is not None]
