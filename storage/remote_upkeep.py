"""Looking after a lake's bucket: read back what was committed, find what nothing needs.

Enters: manifests. Leaves: problems in words, or objects to remove. Another machine may be building
while this one looks, and nothing tells us so: what is younger than a grace period stays. The
version that a pointer replaced stays as long too, for readers who still read it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from schemas.manifest import PieceManifest, TableManifest
from storage.atomic import step
from storage.layout import MANIFEST
from storage.objects import Bucket, Listed
from storage.remote import (
    LARGEST_COPY,
    PIECES,
    at_once,
    files_of,
    piece_object,
    piece_prefix,
    pointer_name,
    read_pointer,
    version_prefix,
)
from storage.verified import File

GRACE_HOURS = 24.0
TOMBSTONES = ".novelty/tombstones"
_VERSION = re.compile(r"([^./][^/]*/[^/]+/versions/[^/]+)/")
_PIECE = re.compile(rf"({re.escape(PIECES)}/[^/]+/[^/]+/[^/]+)/")
_POINTER = re.compile(r"([^./][^/]*)/([^/]+)/current\.json")
_TOMBSTONE = re.compile(rf"({re.escape(TOMBSTONES)}/[^/]+)/")


@dataclass(frozen=True)
class CheckedObjects:
    folders: int
    files: int
    problems: list[tuple[str, str, str]]
    """(piece or version, object, what is wrong with it)"""


def verify_objects(bucket: Bucket, prefixes: Sequence[str] | None = None) -> CheckedObjects:
    """Read every byte of these pieces and versions, or of all that are committed."""
    there = bucket.listing("")
    folders: dict[str, set[str]] = {prefix: set() for prefix in prefixes or _committed(there)}
    problems: list[tuple[str, str, str]] = []
    if prefixes is None:
        for pointer, prefix in _pointed_at(bucket, there).items():
            if prefix is None:
                problems.append((pointer, pointer, "is no pointer"))
            else:
                folders.setdefault(prefix, set())
    for name in there:
        match = _VERSION.match(name) or _PIECE.match(name)
        if match is not None and match[1] in folders:
            folders[match[1]].add(name)
    manifests = at_once(lambda prefix: _listed_files(bucket, prefix), folders)
    wanted: list[tuple[str, str, File]] = []
    for (prefix, names), files in zip(folders.items(), manifests, strict=True):
        if isinstance(files, str):
            problems.append((prefix, f"{prefix}/{MANIFEST}", files))
            continue
        wanted += [(prefix, name, file) for name, file in files.items()]
        if _VERSION.match(f"{prefix}/"):  # a piece may have objects of a machine that came second
            stray = names - files.keys() - {f"{prefix}/{MANIFEST}"}
            problems += [(prefix, name, "is not in the manifest") for name in sorted(stray)]
    digests = at_once(lambda entry: bucket.digest(entry[1]), wanted)
    for (prefix, name, file), digest in zip(wanted, digests, strict=True):
        size = there[name].bytes if name in there else None
        if digest is None or size is None:
            problems.append((prefix, name, "is missing"))
        elif size != file.bytes:
            problems.append((prefix, name, f"has {size} bytes, expected {file.bytes}"))
        elif digest != file.sha256:
            said = f"has sha256 {digest[:16]}…, expected {file.sha256[:16]}…"
            problems.append((prefix, name, said))
    return CheckedObjects(len(folders), len(wanted), problems)


def _committed(there: Iterable[str]) -> list[str]:
    """What has no manifest is being put now, or was never finished."""
    matches = [_VERSION.match(name) or _PIECE.match(name) for name in there]
    return [match[1] for match in matches if match and match.string == f"{match[1]}/{MANIFEST}"]


def _pointed_at(bucket: Bucket, there: Iterable[str]) -> dict[str, str | None]:
    """The version that each pointer names; None if it names none."""
    names = [match for name in there if (match := _POINTER.fullmatch(name))]
    pointers = at_once(lambda match: bucket.get(match.string), names)
    keys = [read_pointer(pointer).get("version") for pointer in pointers]
    return {
        match.string: version_prefix(match[1], match[2], key) if isinstance(key, str) else None
        for match, key in zip(names, keys, strict=True)
    }


def _listed_files(bucket: Bucket, prefix: str) -> dict[str, File] | str:
    """The objects that a manifest lists, or what is wrong with it."""
    found = bucket.get(f"{prefix}/{MANIFEST}")
    if found is None:
        return "is missing"
    try:
        if _VERSION.match(f"{prefix}/"):
            parts = TableManifest.unsealed(found.data).parts
            return {f"{prefix}/{part.file}": part for part in parts}
        piece = PieceManifest.unsealed(found.data)
        return {piece_object(piece.address, file): file for file in files_of(piece)}
    except ValueError:
        return "is damaged"


def piece_manifests(bucket: Bucket) -> list[PieceManifest]:
    """Of all committed pieces; damaged ones are left out."""
    found = []
    prefixes = _committed(bucket.listing(PIECES))
    for entry in at_once(lambda prefix: bucket.get(f"{prefix}/{MANIFEST}"), prefixes):
        try:
            found.append(PieceManifest.unsealed(entry.data if entry else b""))
        except ValueError:
            continue
    return found


def drop_objects(bucket: Bucket, prefixes: Iterable[str], tombstone: str) -> None:
    """Copy pieces and versions to a tombstone and delete them, in this order: pointers first.

    What is too large to be copied inside the store is deleted for good.
    """
    for prefix in prefixes:
        if _POINTER.fullmatch(prefix):
            bucket.copy(prefix, f"{TOMBSTONES}/{tombstone}/{prefix}")
            bucket.delete([prefix])
            continue
        objects = bucket.listing(prefix)
        small = [name for name, entry in objects.items() if entry.bytes < LARGEST_COPY]
        if _VERSION.match(f"{prefix}/"):
            benchmark, table, _, key = prefix.split("/")
            pointer = pointer_name(benchmark, table)
            if read_pointer(bucket.get(pointer)).get("version") == key:
                bucket.copy(pointer, f"{TOMBSTONES}/{tombstone}/{pointer}")
                bucket.delete([pointer])
                step("pointer_deleted")
        at_once(lambda name: bucket.copy(name, f"{TOMBSTONES}/{tombstone}/{name}"), small)
        step("objects_copied")
        bucket.delete([name for name in objects if name == f"{prefix}/{MANIFEST}"])
        step("manifest_deleted")
        bucket.delete(objects)


def object_tombstones(bucket: Bucket) -> dict[str, list[str]]:
    """Removals that can be undone: their names and objects."""
    found: dict[str, list[str]] = {}
    for name in bucket.listing(TOMBSTONES):
        tombstone, _, rest = name.removeprefix(f"{TOMBSTONES}/").partition("/")
        found.setdefault(tombstone, []).append(rest)
    return found


def restore_objects(bucket: Bucket, tombstone: str) -> tuple[list[str], list[str]]:
    """Undo a drop: (what came back, what was made anew meanwhile); manifests and pointers last."""
    objects = object_tombstones(bucket)[tombstone]
    there = bucket.listing("")
    owners = {match[1] for name in there if (match := _VERSION.match(name) or _PIECE.match(name))}
    committed = {owner for owner in owners if f"{owner}/{MANIFEST}" in there}

    def is_newer(name: str) -> bool:
        match = _VERSION.match(name) or _PIECE.match(name)
        return match[1] in committed if match else name in there

    newer = [name for name in objects if is_newer(name)]
    back = sorted(set(objects) - set(newer), key=lambda name: (_order(name), name))
    for name in back:
        bucket.copy(f"{TOMBSTONES}/{tombstone}/{name}", name)
        step("object_restored")
    bucket.delete([f"{TOMBSTONES}/{tombstone}/{name}" for name in objects])
    return back, newer


def _order(name: str) -> int:
    return name.endswith(f"/{MANIFEST}") + 2 * name.endswith("/current.json")


@dataclass(frozen=True)
class Garbage:
    """Objects of one piece or version that nothing needs."""

    name: str
    bytes: int
    objects: tuple[str, ...]


def garbage_of(
    bucket: Bucket,
    versions: Sequence[TableManifest],
    pieces: Mapping[str, PieceManifest],
    grace_hours: float,
) -> list[Garbage]:
    """What is neither a current version, nor one of the pieces they need, nor young."""
    young = datetime.now(UTC) - timedelta(hours=grace_hours)
    kept = {version_prefix(v.benchmark, v.table, v.key) for v in versions}
    kept |= {prefix for v in versions for prefix in _just_replaced(bucket, v, young)}
    listed = {f"{piece_prefix(address)}/{MANIFEST}" for address in pieces} | {
        piece_object(address, file) for address, piece in pieces.items() for file in files_of(piece)
    }
    folders: dict[str, dict[str, Listed]] = {}
    for name, entry in bucket.listing("").items():
        match = _VERSION.match(name) or _PIECE.match(name) or _TOMBSTONE.match(name)
        if match is not None and match[1] not in kept and name not in listed:
            folders.setdefault(match[1], {})[name] = entry
    return [
        Garbage(folder, sum(entry.bytes for entry in entries.values()), tuple(sorted(entries)))
        for folder, entries in sorted(folders.items())
        if all(entry.modified < young for entry in entries.values())
    ]


def _just_replaced(bucket: Bucket, version: TableManifest, young: datetime) -> list[str]:
    """The version before the current one, while the swap is young."""
    pointer = bucket.get(pointer_name(version.benchmark, version.table))
    if pointer is None or pointer.modified < young:
        return []
    previous = read_pointer(pointer).get("previous")
    return [version_prefix(version.benchmark, version.table, previous)] if previous else []


def remove_objects(bucket: Bucket, garbage: Sequence[Garbage]) -> None:
    """Manifests first: what is half removed must not look committed."""
    bucket.delete([o for entry in garbage for o in entry.objects if o.endswith(f"/{MANIFEST}")])
    bucket.delete([o for entry in garbage for o in entry.objects if not o.endswith(f"/{MANIFEST}")])
