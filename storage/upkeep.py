"""Looking after a lake: say what is stale, trace lineage, find what nothing needs."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from schemas.errors import LakeError, NoveltyError
from schemas.manifest import (
    BuildRecord,
    PieceManifest,
    Snapshot,
    SourceListing,
    TableManifest,
)
from storage.atomic import write_bytes
from storage.layout import LOST_AND_FOUND, build_record_path, content_key, inner, pieces_path
from storage.objects import bucket_of
from storage.pieces import find_piece
from storage.remote import at_once, push_file
from storage.remote_upkeep import Garbage, garbage_of, remove_objects
from storage.snapshots import (
    GRACE_HOURS,
    KEEP,
    benchmarks_in,
    current_snapshot,
    is_whole_snapshot,
    retained,
    version_folders,
)
from storage.tables import TableVersion, current_versions, last_versions, versions_of
from storage.tombstones import tombstones
from storage.verified import CURE


def ancestors_of(lake: Path, *versions: TableVersion) -> list[PieceManifest]:
    """Manifests of all pieces that the versions were made from, directly or not."""
    return _with_ancestors(lake, _gathered_from(version.manifest for version in versions))


def _gathered_from(manifests: Iterable[TableManifest]) -> set[str]:
    return {part.piece for manifest in manifests for part in manifest.parts if part.piece}


def _with_ancestors(lake: Path, addresses: set[str]) -> list[PieceManifest]:
    """Manifests of these pieces and of all that they were made from."""
    by_address: dict[str, PieceManifest] = {}
    waiting = addresses
    while waiting:
        pieces = at_once(lambda address: find_piece(lake, *address.split("/")), waiting)
        manifests = [piece.manifest for piece in pieces if piece is not None]
        by_address |= {manifest.address: manifest for manifest in manifests}
        inputs = {i.piece for manifest in manifests for i in manifest.inputs if i.piece}
        waiting = inputs - by_address.keys()
    return [by_address[address] for address in sorted(by_address)]


def _lost_pieces(version: TableVersion, ancestors: list[PieceManifest]) -> set[str]:
    """Pieces that a version was made from and that are not there, or not whole."""
    addresses = _gathered_from([version.manifest])
    addresses |= {source.piece for piece in ancestors for source in piece.inputs if source.piece}
    return addresses - {piece.address for piece in ancestors}


@dataclass(frozen=True)
class Status:
    name: str
    rows: int
    bytes: int
    quarantined: int
    age_seconds: float
    stale: list[str]


def write_build_record(lake: Path, record: BuildRecord) -> None:
    path = build_record_path(lake, record.benchmark)
    write_bytes(path, record.sealed())
    push_file(lake, path)


def read_build_record(lake: Path, benchmark: str) -> BuildRecord | None:
    path = build_record_path(lake, benchmark)
    try:
        return BuildRecord.unsealed(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LakeError(f"{path} is damaged: {_first_line(error)}; {CURE}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def statuses(
    lake: Path,
    stage_version: Callable[[str], int | None],
    schema_version: Callable[[str, str], int | None],
    list_source: Callable[[Path], Mapping[str, str]],
) -> list[Status]:
    """Every table: how large, how old, and every reason why a build would make it anew.

    `list_source` gives name -> digest of the raw files under a root, as they are now.
    """
    listings: dict[str, Mapping[str, str] | None] = {}

    def listing(root: str) -> Mapping[str, str] | None:
        if root not in listings:
            try:
                listings[root] = list_source(Path(root))
            except (NoveltyError, OSError):
                listings[root] = None
        return listings[root]

    result = []
    for version in current_versions(lake):
        manifest = version.manifest
        ancestors = ancestors_of(lake, version)
        reasons = []
        declared = schema_version(manifest.benchmark, manifest.table)
        if declared is not None and declared != manifest.schema_version:
            reasons.append(f"schema is version {declared} now, was {manifest.schema_version}")
        for code, old in sorted({(p.code, p.stage_version) for p in ancestors}):
            new = stage_version(code)
            if new is not None and new != old:
                reasons.append(f"stage {code.split(':')[-1]} is version {new} now, was {old}")
        if lost := _lost_pieces(version, ancestors):
            reasons.append(f"{len(lost)} pieces it was made from are gone ({min(lost)})")
        record = read_build_record(lake, manifest.benchmark)
        for source in record.sources if record else []:
            used = {
                i.name: i.digest
                for p in ancestors
                if p.source == source.root
                for i in p.inputs
                if i.piece is None
            }
            if not used:
                continue
            now = listing(source.root)
            if now is None:
                reasons.append(f"source {source.root} cannot be read now")
            elif content_key(dict(now)) != source.digest and (why := _changes(used, now, source)):
                reasons.append(f"raw files under {source.root}: {why}")
        result.append(
            Status(
                name=version.name,
                rows=manifest.rows,
                bytes=manifest.bytes,
                quarantined=manifest.quarantined,
                age_seconds=max(0.0, time.time() - version.made),
                stale=reasons,
            )
        )
    return result


def _changes(old: Mapping[str, str], new: Mapping[str, str], source: SourceListing) -> str:
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    removed = sorted(old.keys() - new.keys())
    more = len(new) - source.files + len(removed)
    phrases = [
        f"{len(names)} {word} ({names[0]}{', …' if len(names) > 1 else ''})"
        for word, names in (("changed", changed), ("removed", removed))
        if names
    ]
    if more > 0:
        phrases.append(f"{more} added")
    return ", ".join(phrases)


@dataclass
class Lineage:
    """A stage that made something, and what it was made from."""

    stage: str
    stage_version: int
    shards: set[str] = field(default_factory=set)
    raw: dict[str, set[str]] = field(default_factory=dict)  # source root -> file names
    tables: dict[str, "Lineage"] = field(default_factory=dict)  # "table" read -> who made it


def trace_lineage(lake: Path, version: TableVersion) -> dict[str, Lineage]:
    """The chain from a table back to the raw files, by stage."""
    seen: dict[str, PieceManifest | None] = {}

    def manifest_of(address: str) -> PieceManifest | None:
        if address not in seen:
            piece = find_piece(lake, *address.split("/"))
            seen[address] = piece.manifest if piece else None
        return seen[address]

    def grow(into: dict[str, Lineage], label: str, addresses: set[str]) -> None:
        by_stage: dict[str, list[PieceManifest]] = {}
        for address in addresses:
            if (manifest := manifest_of(address)) is not None:
                by_stage.setdefault(manifest.stage, []).append(manifest)
        for stage, manifests in sorted(by_stage.items()):
            node = Lineage(stage, manifests[0].stage_version)
            sources: dict[str, set[str]] = {}
            for manifest in manifests:
                node.shards.add(manifest.shard)
                for source in manifest.inputs:
                    if source.piece is None:
                        node.raw.setdefault(manifest.source or "", set()).add(source.name)
                    else:
                        sources.setdefault(source.name, set()).add(source.piece)
            for table, pieces in sorted(sources.items()):
                grow(node.tables, table, pieces)
            into[f"{label} ← {stage}" if label in into else label] = node

    tree: dict[str, Lineage] = {}
    grow(tree, version.name, {part.piece for part in version.manifest.parts if part.piece})
    return tree


@dataclass(frozen=True)
class Kept:
    """What `gc` leaves: snapshots, the versions in them, and the pieces behind these."""

    snapshots: list[Snapshot]
    versions: list[TableManifest]
    pieces: dict[str, PieceManifest]
    finished: dict[str, datetime | None]
    """When the last build of each ended; younger pieces are of one that did not."""


def _kept(lake: Path, grace_hours: float, keep: int) -> Kept:
    benchmarks = benchmarks_in(lake)
    snapshots = [s for name in benchmarks for s in retained(lake, name, grace_hours, keep)]
    manifests = {version.folder: version.manifest for version in last_versions(lake)}
    for snapshot in snapshots:
        with suppress(LakeError):  # of an old one a version may be damaged
            versions = versions_of(lake, snapshot)
            manifests |= {version.folder: version.manifest for version in versions}
    addresses = _gathered_from(manifests.values())
    addresses |= {address for s in snapshots for pieces in s.runs.values() for address in pieces}
    pieces = {piece.address: piece for piece in _with_ancestors(lake, addresses)}
    current = {name: current_snapshot(lake, name) for name in benchmarks}
    finished = {name: snapshot.finished if snapshot else None for name, snapshot in current.items()}
    return Kept(snapshots, list(manifests.values()), pieces, finished)


def require_listings(lake: Path) -> None:
    """Every folder can be listed: what a glob leaves out in silence must not count as absent."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a build beside us removes its own
            raise error

    for folder, below, _ in os.walk(lake, onerror=refuse):
        if folder == str(lake) and LOST_AND_FOUND in below:
            below.remove(LOST_AND_FOUND)


def find_garbage(lake: Path, grace_hours: float = GRACE_HOURS, keep: int = KEEP) -> list[Path]:
    """What nothing needs: old snapshots, their versions, unused pieces, dead leftovers.

    Snapshots come first: what is half removed must show no table with a hole. What a drop or a
    build put aside can be restored for the grace time. Pieces and checkpoints that are younger than
    the last finished build belong to one that did not end, and stay.
    """
    require_listings(lake)
    kept = _kept(lake, grace_hours, keep)
    names = {(snapshot.benchmark, snapshot.name) for snapshot in kept.snapshots}
    folders = version_folders(lake, kept.snapshots)
    versions = last_versions(lake)
    folders |= {version.folder for version in versions}
    # Nobody knows what a lost piece was made from, or what a table without a readable version was
    # gathered from. So the next build may need any piece of that benchmark.
    lost = [_lost_pieces(version, ancestors_of(lake, version)) for version in versions]
    unsure = {address.partition("/")[0] for addresses in lost for address in addresses}
    tables = {version.name for version in versions}
    table_folders = [folder.parts[-3:-1] for folder in lake.glob("[!.]*/*/versions")]
    unsure |= {
        benchmark for benchmark, table in table_folders if f"{benchmark}/{table}" not in tables
    }

    def is_unfinished(benchmark: str, path: Path) -> bool:
        finished = kept.finished.get(benchmark)
        return finished is None or path.stat().st_mtime > finished.timestamp()

    garbage = [
        folder
        for folder in sorted(lake.glob("[!.]*/snapshots/[!.]*"))
        if (folder.parts[-3], folder.name) not in names and is_whole_snapshot(folder)
    ]
    garbage += [
        folder for folder in sorted(lake.glob("[!.]*/*/versions/[!.]*")) if folder not in folders
    ]
    garbage += [
        folder
        for folder in sorted(pieces_path(lake).glob("*/*/[!.]*"))
        if str(folder.relative_to(pieces_path(lake))) not in kept.pieces
        and folder.parts[-3] not in unsure
        and not is_unfinished(folder.parts[-3], folder)
    ]
    garbage += [
        folder
        for folder in sorted((inner(lake) / "work").glob("*/*/*"))
        if not is_unfinished(folder.parts[-3], folder)
    ]
    garbage += [
        buried.folder for buried in tombstones(lake) if buried.age_seconds > grace_hours * 3600
    ]
    garbage += [path for path in sorted(lake.rglob(".*.tmp*")) if not _owner_lives(path)]
    return [path for path in garbage if not set(path.parents) & set(garbage)]


def _owner_lives(path: Path) -> bool:
    match = re.search(r"\.(\d+)\.[0-9a-f]{8}\.tmp(\.wal)?$", path.name)  # DuckDB's log beside it
    if match is None:
        return True
    try:
        os.kill(int(match.group(1)), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def find_remote_garbage(
    lake: Path, grace_hours: float = GRACE_HOURS, keep: int = KEEP
) -> list[Garbage]:
    """What nothing needs in the lake's bucket; nothing for a lake that is a folder."""
    if (bucket := bucket_of(lake)) is None:
        return []
    kept = _kept(lake, grace_hours, keep)
    return garbage_of(
        bucket, kept.snapshots, kept.versions, kept.pieces, kept.finished, grace_hours
    )


def remove_remote_garbage(lake: Path, garbage: list[Garbage]) -> None:
    if garbage and (bucket := bucket_of(lake)) is not None:
        remove_objects(bucket, garbage)


def size_of(path: Path) -> int:
    """Bytes that removing `path` may free (hard-linked parts count in full)."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def require_lake(lake: Path) -> None:
    if not lake.is_dir():
        raise LakeError(
            f"there is no lake at {lake}; build something first (`novelty build …`, `make demo`) "
            "or name another with --lake or NOVELTY_LAKE"
        )
