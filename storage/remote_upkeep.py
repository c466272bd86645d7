"""Looking after a lake's bucket: read back what was committed, find what nothing needs.

Enters: manifests. Leaves: problems in words, or objects to remove. Another machine may be building
while this one looks, and nothing tells us so: what is younger than a grace period stays. The
version that a pointer replaced stays as long too, for readers who still read it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from schemas.manifest import PieceManifest, TableManifest
from storage.layout import MANIFEST
from storage.objects import Bucket, Listed
from storage.remote import (
    PIECES,
    at_once,
    files_of,
    piece_object,
    piece_prefix,
    pointer_name,
    read_pointer,
    version_prefix,
)

GRACE_HOURS = 24.0
_VERSION = re.compile(r"([^./][^/]*/[^/]+/versions/[^/]+)/")
_PIECE = re.compile(rf"({re.escape(PIECES)}/[^/]+/[^/]+/[^/]+)/")


def verify_objects(bucket: Bucket, manifest: TableManifest) -> list[tuple[str, str]]:
    """(object, what is wrong with it) of one version; every byte is read."""
    prefix = version_prefix(manifest.benchmark, manifest.table, manifest.key)
    there = bucket.listing(prefix)
    digests = at_once(bucket.digest, [f"{prefix}/{part.file}" for part in manifest.parts])
    problems = []
    for part, digest in zip(manifest.parts, digests, strict=True):
        name = f"{prefix}/{part.file}"
        size = there[name].bytes if name in there else None
        if digest is None or size is None:
            problems.append((name, "is missing"))
        elif size != part.bytes:
            problems.append((name, f"has {size} bytes, expected {part.bytes}"))
        elif digest != part.sha256:
            said = f"has sha256 {digest[:16]}…, expected {part.sha256[:16]}…"
            problems.append((name, said))
    listed = {f"{prefix}/{part.file}" for part in manifest.parts} | {f"{prefix}/{MANIFEST}"}
    if f"{prefix}/{MANIFEST}" not in there:
        problems.append((f"{prefix}/{MANIFEST}", "is missing"))
    problems += [(name, "is not in the manifest") for name in sorted(there.keys() - listed)]
    return problems


def drop_objects(bucket: Bucket, manifest: TableManifest, bad: set[str]) -> None:
    """Remove a version with its pointer, and the pieces of its bad parts: pointers first."""
    bucket.delete([pointer_name(manifest.benchmark, manifest.table)])
    pieces = {part.piece for part in manifest.parts if part.file in bad and part.piece}
    prefixes = [piece_prefix(address) for address in sorted(pieces)]
    prefixes.append(version_prefix(manifest.benchmark, manifest.table, manifest.key))
    for prefix in prefixes:
        bucket.delete([f"{prefix}/{MANIFEST}"])
        bucket.delete(bucket.listing(prefix))


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
        match = _VERSION.match(name) or _PIECE.match(name)
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
