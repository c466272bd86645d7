"""Is every byte of a lake still what was written? Names what is not, and takes it out.

Enters: a lake, or one table of it. Leaves: damage in words; after `drop`, a lake in which the next
build makes anew what is gone. All pieces, versions, snapshots, manifests and build records are
read, published or not. What is derived (catalogue, reports, digests of raw files) is not: it is
made again at will.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import ConfigError, LakeError
from schemas.manifest import BuildRecord, PieceManifest, Snapshot
from storage.layout import (
    MANIFEST,
    SNAPSHOT,
    build_record_path,
    inner,
    pieces_path,
    top_folders,
    versions_path,
)
from storage.objects import bucket_of
from storage.pieces import piece_manifest
from storage.remote import files_of, piece_prefix, version_prefix
from storage.remote_upkeep import (
    delete_tombstone,
    drop_objects,
    object_tombstones,
    piece_manifests,
    restore_objects,
    verify_objects,
)
from storage.snapshots import current_snapshot, history, is_whole_snapshot, publication_base
from storage.tables import (
    Contents,
    TableVersion,
    current_version,
    find_version,
    no_table,
    pieces_by_run,
    pieces_of,
    publish,
    read_manifest,
    versions_of,
)
from storage.tombstones import bury, discard, new_name, tombstones, unbury
from storage.upkeep import ancestors_of, require_listings
from storage.verified import CURE, File, Known, problem_of


@dataclass(frozen=True)
class Damage:
    table: str
    """The table, piece or record, for people."""
    file: PurePath
    """A `Path` on this machine, or the name of an object in the bucket."""
    problem: str
    owner: PurePath
    """What goes when it is dropped: the folder of a piece or version, a file, or a prefix."""


@dataclass(frozen=True)
class Checked:
    folders: int
    files: int
    damage: list[Damage]


def verify_lake(lake: Path, table: str | None = None) -> Checked:
    """Compare every file with its digest; of one table only what it is made from."""
    require_listings(lake)
    if table is None:
        versions = sorted(lake.glob("[!.]*/*/versions/[!.]*"))
        pieces = sorted(pieces_path(lake).glob("*/*/[!.]*"))
        damage = [*_verify_records(lake), *_verify_snapshots(lake)]
        prefixes = None
    else:
        benchmark, _, name = table.partition("/")
        damage = []
        snapshot = current_snapshot(lake, benchmark)
        key = snapshot.tables.get(name) if snapshot is not None else None
        if key is None:
            raise no_table(lake, benchmark, name)
        versions, pieces = [versions_path(lake, benchmark, name) / key], []
        with suppress(LakeError):  # else its manifest is named as damaged
            version = current_version(lake, benchmark, name)
            addresses = [piece.address for piece in ancestors_of(lake, version)]
            addresses += [part.piece for part in version.manifest.parts if part.piece]
            pieces = [pieces_path(lake) / address for address in sorted(set(addresses))]
        prefixes = [version_prefix(benchmark, name, folder.name) for folder in versions]
        prefixes += [piece_prefix(str(path.relative_to(pieces_path(lake)))) for path in pieces]
    known: Known = {}
    files = 0
    for folder in [*versions, *pieces]:
        count, problems = _verify_folder(lake, folder, known)
        files += count
        damage += problems
    folders = len(versions) + len(pieces)
    if (bucket := bucket_of(lake)) is not None:
        objects = verify_objects(bucket, prefixes)
        damage += [
            Damage(owner, PurePosixPath(name), problem, PurePosixPath(owner))
            for owner, name, problem in objects.problems
        ]
        folders, files = objects.folders, objects.files
    return Checked(folders, files, damage)


def verify_version(version: TableVersion) -> list[Damage]:
    """Compare every file of a version with the manifest.

    Of a bucket every object is read, and of the cache what it has.
    """
    _, damage = _verify_folder(version.lake, version.folder, {})
    if (bucket := bucket_of(version.lake)) is not None:
        manifest = version.manifest
        prefix = version_prefix(manifest.benchmark, manifest.table, manifest.key)
        damage += [
            Damage(version.name, PurePosixPath(name), problem, PurePosixPath(owner))
            for owner, name, problem in verify_objects(bucket, [prefix]).problems
        ]
    return damage


def _verify_folder(lake: Path, folder: Path, known: Known) -> tuple[int, list[Damage]]:
    """How many files a piece or version lists, and what is wrong in its folder."""
    is_version = folder.parent.name == "versions"
    label = "/".join(folder.parts[-4:-2] if is_version else ("piece", *folder.parts[-3:]))
    files: Sequence[File]
    rows: dict[str, int]
    try:
        if is_version:
            parts = read_manifest(folder).parts
            files, rows = parts, {part.file: part.rows for part in parts}
        else:
            manifest = PieceManifest.unsealed((folder / MANIFEST).read_bytes())
            files, rows = files_of(manifest), {part.file: part.rows for part in manifest.parts}
    except PermissionError:
        raise
    except (LakeError, OSError, ValueError):
        return 0, [Damage(label, folder / MANIFEST, "is missing or damaged", folder)]
    damage = []
    cache = bucket_of(lake) is not None  # it has what was fetched, and no more
    for file in files:
        path = folder / file.file
        problem = problem_of(path, file, known)
        if problem is None and file.file in rows:
            problem = _wrong_rows(path, rows[file.file])
        if problem and not (cache and problem == "is missing"):
            damage.append(Damage(label, path, problem, folder))
    listed = {file.file for file in files} | {MANIFEST}
    damage += [
        Damage(label, path, "is not in the manifest", folder)
        for path in sorted(folder.iterdir())
        if path.name not in listed
    ]
    return len(files), damage


def _wrong_rows(path: Path, expected: int) -> str | None:
    try:
        rows = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        return f"cannot be read: {error}"
    return None if rows == expected else f"has {rows} rows, expected {expected}"


def _verify_records(lake: Path) -> list[Damage]:
    damage = []
    for path in sorted((inner(lake) / "builds").glob("[!.]*.json")):
        try:
            record = BuildRecord.unsealed(path.read_bytes())
            fits = build_record_path(lake, record.benchmark) == path
        except PermissionError:
            raise
        except (OSError, ValueError):
            fits = False
        if not fits:
            damage.append(Damage(f"record of {path.stem}", path, "is damaged", path))
    return damage


def _verify_snapshots(lake: Path) -> list[Damage]:
    """Damaged records and links that lead nowhere; a cache has none of its own."""
    if bucket_of(lake) is not None:
        return []
    damage = [
        Damage(f"snapshot of {folder.parts[-3]}", folder / SNAPSHOT, "is damaged", folder)
        for folder in sorted(lake.glob("[!.]*/snapshots/[!.]*"))
        if not is_whole_snapshot(folder)
    ]
    tops = top_folders(lake)
    folders = [*tops, *(folder for top in tops for folder in top.glob("[!.]*"))]
    links = [folder / "current" for folder in folders] + [*lake.glob("[!.]*/current/[!_]*")]
    return damage + [
        Damage("/".join(link.relative_to(lake).parts[:2]), link, "leads nowhere", link)
        for link in sorted(links)
        if link.is_symlink() and not link.exists()
    ]


def drop(lake: Path, damage: Sequence[Damage]) -> None:
    """Take what is damaged out of the lake, into a tombstone, so that a build makes it again.

    Pieces made from a damaged one go with it unless their inputs were verified when they were made:
    those read good bytes. Whatever gives the reason for another removal goes after it, so that a
    killed drop finds the rest again.
    """
    _publish_without(lake, damage)
    # A damaged link or pointer is not among them: the publication has replaced it.
    objects = {
        str(entry.owner)
        for entry in damage
        if not isinstance(entry.owner, Path) and entry.file != entry.owner
    }
    if objects and (bucket := bucket_of(lake)) is not None:
        top = piece_prefix("")
        damaged = [name.removeprefix(top) for name in objects if name.startswith(top)]
        suspects = _suspects(damaged, piece_manifests(bucket)) if damaged else []
        children = [piece_prefix(address) for address in suspects]
        drop_objects(bucket, [*children, *sorted(objects)], new_name())
        copies = [lake / name for name in (*children, *objects)]
        discard(lake, [path for path in copies if path.exists()])
    owners = {
        entry.owner
        for entry in damage
        if isinstance(entry.owner, Path) and not entry.owner.is_symlink()
    }
    if bucket_of(lake) is not None:
        # Damage in the cache alone is no reason to drop objects: they are fetched again.
        discard(lake, sorted(owners))
        return
    if not owners:
        return
    home = pieces_path(lake)
    pieces = [str(o.relative_to(home)) for o in owners if o.is_relative_to(home)]
    manifests = [piece_manifest(folder) for folder in home.glob("*/*/[!.]*")] if pieces else []
    suspects = _suspects(pieces, [manifest for manifest in manifests if manifest is not None])
    descendants = [home / address for address in suspects]
    first = [owner for owner in owners if owner.parent.name == "versions"] + descendants
    others = [owner for owner in owners if owner not in first]
    bury(lake, [*first, *sorted(others)], f"{damage[0].file.name} {damage[0].problem}")


def _publish_without(lake: Path, damage: Sequence[Damage]) -> None:
    """Publish each damaged benchmark again, without the tables whose versions are dropped."""
    remote = bucket_of(lake) is not None
    paths = [
        PurePosixPath(
            os.path.relpath(entry.owner, lake) if isinstance(entry.owner, Path) else entry.owner
        )
        for entry in damage
        if not (remote and isinstance(entry.owner, Path))  # the cache is fetched again
    ]
    paths = [path for path in paths if not str(path).startswith(".novelty")]
    for benchmark in sorted({path.parts[0] for path in paths}):
        dropped_versions = {
            (path.parts[1], path.parts[3])
            for path in paths
            if path.match(f"{benchmark}/*/versions/*")
        }
        lost_tables = {path.name for path in paths if path.match(f"{benchmark}/current/*")}
        lost_tables |= {path.parts[1] for path in paths if path.match(f"{benchmark}/*/current")}

        def plan(
            old: Snapshot | None,
            dropped_versions: set[tuple[str, str]] = dropped_versions,
            lost_tables: set[str] = lost_tables,
        ) -> Contents:
            if old is None:
                return Contents()
            tables = {
                t: key
                for t, key in old.tables.items()
                if (t, key) not in dropped_versions and t not in lost_tables
            }
            return Contents(kept=tables, runs=old.runs or _register(lake, old, tables))

        current = publication_base(lake, benchmark).snapshot
        if current is not None:
            publish(lake, benchmark, plan, partial=current.partial)


def _register(lake: Path, snapshot: Snapshot, tables: Iterable[str]) -> dict[str, list[str]]:
    """The pieces of each run, read from the tables of a snapshot whose record lost them."""
    return pieces_by_run(pieces_of(lake, versions_of(lake, snapshot, list(tables))))


def _suspects(damaged: Iterable[str], manifests: Iterable[PieceManifest]) -> list[str]:
    """Pieces that may hold what was made from damaged bytes, the furthest first.

    A piece made from a damaged one is a suspect unless its inputs were verified, and so is a piece
    made from a suspect. The key of a run does not see the digests of its inputs, so what a run made
    from a suspect is one even if its inputs were verified.
    """
    children: dict[str, list[PieceManifest]] = {}
    for manifest in manifests:
        for address in {source.piece for source in manifest.inputs if source.piece}:
            children.setdefault(address, []).append(manifest)
    addresses = sorted(damaged)
    roots = len(addresses)
    for number, address in enumerate(addresses):  # grows while it is walked
        descendants = {
            child.address
            for child in children.get(address, [])
            if not child.inputs_verified or (number >= roots and child.run is not None)
        }
        addresses += sorted(descendants - set(addresses))
    return addresses[: roots - 1 if roots else None : -1]


def restorable(lake: Path) -> dict[str, tuple[str, list[str]]]:
    """Removals that can be undone, the oldest first: why, and what went."""
    if (bucket := bucket_of(lake)) is not None:
        objects = sorted(object_tombstones(bucket).items())
        return {name: ("dropped", sorted(names)) for name, names in objects}
    return {buried.name: (buried.record.reason, buried.record.paths) for buried in tombstones(lake)}


def restore(lake: Path, begin: str) -> tuple[list[str], list[str]]:
    """Undo the removal whose name begins so: (what came back, what was made anew meanwhile)."""
    names = [name for name in restorable(lake) if name.startswith(begin)]
    if len(names) != 1:
        raise ConfigError(
            f"{len(names)} removals begin with {begin!r}; `novelty restore` lists what there is"
        )
    if (bucket := bucket_of(lake)) is not None:
        paths = object_tombstones(bucket)[names[0]]
        restored, newer = restore_objects(bucket, names[0])
        _publish_again(lake, paths)
        delete_tombstone(bucket, names[0])
        return restored, newer
    (buried,) = (buried for buried in tombstones(lake) if buried.name == names[0])
    restored, newer = unbury(lake, buried)
    _publish_again(lake, buried.record.paths)
    discard(lake, [buried.folder])
    return restored, newer


def _publish_again(lake: Path, restored: Iterable[str]) -> None:
    """Show restored tables again, unless a build made them anew meanwhile.

    If several versions of a table came back, the one that was shown last is taken.
    """
    paths = [PurePosixPath(path) for path in restored]
    back = {path.parts[:4] for path in paths if path.parts[2:3] == ("versions",)}
    for benchmark in sorted({benchmark for benchmark, *_ in back}):
        last: dict[str, str] = {}
        for snapshot in history(lake, benchmark):
            last |= snapshot.tables
        versions = {}
        for table, key in last.items():
            with suppress(LakeError):  # its manifest is what was damaged
                if (benchmark, table, "versions", key) in back:
                    versions[table] = find_version(lake, benchmark, table, key).manifest.key

        def plan(old: Snapshot | None, versions: dict[str, str] = versions) -> Contents:
            kept = versions | (old.tables if old is not None else {})
            return Contents(kept=kept, runs=old.runs if old is not None else {})

        current = publication_base(lake, benchmark).snapshot
        publish(lake, benchmark, plan, partial=current is not None and current.partial)


def restore_snapshot(lake: Path, snapshot: Snapshot) -> Snapshot:
    """Make the tables and runs of an older snapshot current again, as a new one."""
    versions = versions_of(lake, snapshot)  # a sentence if one is gone
    for version in versions:
        if verify_version(version):
            raise LakeError(f"{version.name} of {snapshot.name} is damaged; {CURE}")
    contents = Contents(kept=snapshot.tables, runs=snapshot.runs)
    return publish(
        lake,
        snapshot.benchmark,
        lambda old: contents,
        partial=snapshot.partial,
        restored=snapshot.name,
        settings=snapshot.settings,
    )
