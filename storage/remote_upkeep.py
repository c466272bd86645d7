"""Looking after a lake's bucket: read back what was committed, find what nothing needs.

Enters: manifests. Leaves: problems in words, or objects to remove. Another machine may be building
while this one looks, and nothing tells us so: what is younger than a grace period stays, and so
does what was made since the benchmark was last published whole.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from schemas.manifest import PieceManifest, Snapshot, TableManifest
from storage.atomic import step
from storage.layout import MANIFEST, SNAPSHOT
from storage.objects import Bucket, Listed
from storage.remote import (
    LARGEST_COPY,
    PIECES,
    at_once,
    files_of,
    piece_object,
    piece_prefix,
    read_pointer,
    version_prefix,
)
from storage.verified import File

TOMBSTONES = ".novelty/tombstones"
_VERSION = re.compile(r"([^./][^/]*/[^/]+/versions/[^/]+)/")
_PIECE = re.compile(rf"({re.escape(PIECES)}/[^/]+/[^/]+/[^/]+)/")
_SNAPSHOT = re.compile(r"([^./][^/]*/snapshots/[^/]+)/")
_POINTER = re.compile(r"([^./][^/]*)/current\.json")
_TOMBSTONE = re.compile(rf"({re.escape(TOMBSTONES)}/[^/]+)/")
_REMOVABLE = (_VERSION, _PIECE, _SNAPSHOT, _TOMBSTONE)
COMMIT_MARKS = (f"/{MANIFEST}", f"/{SNAPSHOT}")


@dataclass(frozen=True)
class CheckedObjects:
    folders: int
    files: int
    problems: list[tuple[str, str, str]]
    """(piece or version, object, what is wrong with it)"""


def verify_objects(bucket: Bucket, prefixes: Sequence[str] | None = None) -> CheckedObjects:
    """Read every byte of these pieces and versions, or of all that are committed."""
    objects = bucket.listing("")
    folders: dict[str, set[str]] = {prefix: set() for prefix in prefixes or _committed(objects)}
    problems: list[tuple[str, str, str]] = []
    if prefixes is None:
        for pointer, versions in _pointed_at(bucket, objects).items():
            if versions is None:
                problems.append((pointer, pointer, "is no pointer"))
            for prefix in versions or ():
                folders.setdefault(prefix, set())
        problems += _damaged_snapshots(bucket, objects)
    for name in objects:
        match = _VERSION.match(name) or _PIECE.match(name)
        if match is not None and match[1] in folders:
            folders[match[1]].add(name)
    manifests = at_once(lambda prefix: _listed_files(bucket, prefix), folders)
    entries: list[tuple[str, str, File]] = []
    for (prefix, names), files in zip(folders.items(), manifests, strict=True):
        if isinstance(files, str):
            problems.append((prefix, f"{prefix}/{MANIFEST}", files))
            continue
        entries += [(prefix, name, file) for name, file in files.items()]
        if _VERSION.match(f"{prefix}/"):  # a piece may have objects of a machine that came second
            stray = names - files.keys() - {f"{prefix}/{MANIFEST}"}
            problems += [(prefix, name, "is not in the manifest") for name in sorted(stray)]
    digests = at_once(lambda entry: bucket.digest(entry[1]), entries)
    for (prefix, name, file), digest in zip(entries, digests, strict=True):
        size = objects[name].bytes if name in objects else None
        if digest is None or size is None:
            problems.append((prefix, name, "is missing"))
        elif size != file.bytes:
            problems.append((prefix, name, f"has {size} bytes, expected {file.bytes}"))
        elif digest != file.sha256:
            problem = f"has sha256 {digest[:16]}…, expected {file.sha256[:16]}…"
            problems.append((prefix, name, problem))
    return CheckedObjects(len(folders), len(entries), problems)


def _committed(names: Iterable[str]) -> list[str]:
    """What has no manifest is being put now, or was never finished."""
    matches = [_VERSION.match(name) or _PIECE.match(name) for name in names]
    return [match[1] for match in matches if match and match.string == f"{match[1]}/{MANIFEST}"]


def _pointed_at(bucket: Bucket, objects: Iterable[str]) -> dict[str, list[str] | None]:
    """The versions that each benchmark's pointer names; None if it is no pointer."""
    names = [match for name in objects if (match := _POINTER.fullmatch(name))]
    pointers = at_once(lambda match: read_pointer(bucket.get(match.string)), names)
    return {
        match.string: [f"{match[1]}/{path}" for path in pointer.get("tables", {}).values()]
        if isinstance(pointer.get("snapshot"), str)
        else None
        for match, pointer in zip(names, pointers, strict=True)
    }


def _damaged_snapshots(bucket: Bucket, objects: Iterable[str]) -> list[tuple[str, str, str]]:
    names = [name for name in objects if _SNAPSHOT.match(name) and name.endswith(f"/{SNAPSHOT}")]
    problems = []
    for name, content in zip(names, at_once(bucket.get, names), strict=True):
        owner = name.rpartition("/")[0]
        try:
            fits = Snapshot.unsealed(content.data if content else b"").name == owner.split("/")[-1]
        except ValueError:
            fits = False
        if not fits:
            problems.append((owner, name, "is damaged"))
    return problems


def _listed_files(bucket: Bucket, prefix: str) -> dict[str, File] | str:
    """The objects that a manifest lists, or what is wrong with it."""
    content = bucket.get(f"{prefix}/{MANIFEST}")
    if content is None:
        return "is missing"
    try:
        if _VERSION.match(f"{prefix}/"):
            parts = TableManifest.unsealed(content.data).parts
            return {f"{prefix}/{part.file}": part for part in parts}
        piece = PieceManifest.unsealed(content.data)
        return {piece_object(piece.address, file): file for file in files_of(piece)}
    except ValueError:
        return "is damaged"


def piece_manifests(bucket: Bucket) -> list[PieceManifest]:
    """Of all committed pieces; damaged ones are left out."""
    manifests = []
    prefixes = _committed(bucket.listing(PIECES))
    for entry in at_once(lambda prefix: bucket.get(f"{prefix}/{MANIFEST}"), prefixes):
        try:
            manifests.append(PieceManifest.unsealed(entry.data if entry else b""))
        except ValueError:
            continue
    return manifests


def drop_objects(bucket: Bucket, prefixes: Iterable[str], tombstone: str) -> None:
    """Copy pieces, versions and snapshots to a tombstone and delete them, in this order.

    What is too large to be copied inside the store is deleted for good.
    """
    for prefix in prefixes:
        objects = bucket.listing(prefix)
        small = [name for name, entry in objects.items() if entry.bytes < LARGEST_COPY]
        at_once(lambda name: bucket.copy(name, f"{TOMBSTONES}/{tombstone}/{name}"), small)
        step("objects_copied")
        bucket.delete([name for name in objects if name.endswith(COMMIT_MARKS)])
        step("manifest_deleted")
        bucket.delete(objects)


def object_tombstones(bucket: Bucket) -> dict[str, list[str]]:
    """Removals that can be undone: their names and objects."""
    tombstones: dict[str, list[str]] = {}
    for name in bucket.listing(TOMBSTONES):
        tombstone, _, path = name.removeprefix(f"{TOMBSTONES}/").partition("/")
        tombstones.setdefault(tombstone, []).append(path)
    return tombstones


def restore_objects(bucket: Bucket, tombstone: str) -> tuple[list[str], list[str]]:
    """Undo a drop: (what came back, what was made anew meanwhile); manifests last.

    The tombstone stays, so that an undoing that is killed can be done again.
    """
    objects = object_tombstones(bucket)[tombstone]
    current_objects = bucket.listing("")
    owners = {
        match[1]
        for name in current_objects
        if (match := _VERSION.match(name) or _PIECE.match(name))
    }
    committed = {owner for owner in owners if f"{owner}/{MANIFEST}" in current_objects}

    def is_newer(name: str) -> bool:
        match = _VERSION.match(name) or _PIECE.match(name)
        return match[1] in committed if match else name in current_objects

    newer = [name for name in objects if is_newer(name)]
    back = sorted(set(objects) - set(newer), key=lambda name: (name.endswith(COMMIT_MARKS), name))
    for name in back:
        bucket.copy(f"{TOMBSTONES}/{tombstone}/{name}", name)
        step("object_restored")
    return back, newer


def delete_tombstone(bucket: Bucket, tombstone: str) -> None:
    bucket.delete(bucket.listing(f"{TOMBSTONES}/{tombstone}"))


@dataclass(frozen=True)
class Garbage:
    """Objects of one piece or version that nothing needs."""

    name: str
    bytes: int
    objects: tuple[str, ...]


def garbage_of(
    bucket: Bucket,
    snapshots: Sequence[Snapshot],
    versions: Sequence[TableManifest],
    pieces: Mapping[str, PieceManifest],
    finished: Mapping[str, datetime | None],
    grace_hours: float,
) -> list[Garbage]:
    """What none of these need. Young objects stay, and pieces younger than the `finished` build."""
    young = datetime.now(UTC) - timedelta(hours=grace_hours)
    needed_folders = {version_prefix(v.benchmark, v.table, v.key) for v in versions}
    needed_folders |= {f"{s.benchmark}/snapshots/{s.name}" for s in snapshots}
    needed_folders |= {
        version_prefix(s.benchmark, t, key) for s in snapshots for t, key in s.tables.items()
    }
    needed_objects = {f"{piece_prefix(address)}/{MANIFEST}" for address in pieces} | {
        piece_object(address, file) for address, piece in pieces.items() for file in files_of(piece)
    }
    folders: dict[str, dict[str, Listed]] = {}
    for name, entry in bucket.listing("").items():
        match = next((m for pattern in _REMOVABLE if (m := pattern.match(name))), None)
        if match is not None and match[1] not in needed_folders and name not in needed_objects:
            folders.setdefault(match[1], {})[name] = entry

    def is_old(folder: str, modified: datetime) -> bool:
        address = folder.removeprefix(f"{PIECES}/")
        if not _PIECE.match(f"{folder}/") or address in pieces:  # of a machine that came second
            return modified < young
        end = finished.get(address.partition("/")[0])
        return modified < young and end is not None and modified < end

    return [
        Garbage(folder, sum(entry.bytes for entry in entries.values()), tuple(sorted(entries)))
        for folder, entries in sorted(folders.items())
        if all(is_old(folder, entry.modified) for entry in entries.values())
    ]


def remove_objects(bucket: Bucket, garbage: Sequence[Garbage]) -> None:
    """Snapshots first, then manifests: what is half removed must not look committed."""
    objects = [name for entry in garbage for name in entry.objects]
    for marks in (f"/{SNAPSHOT}", COMMIT_MARKS, ""):
        bucket.delete([name for name in objects if name.endswith(marks)])
        step("garbage_deleted")
