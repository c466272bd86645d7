"""A lake in a bucket: how its objects and this machine's cache folder agree.

Enters: pieces and table versions that were just made here, or names of what others made. Leaves:
objects in the bucket, or files in the cache. S3 has no rename, so a manifest is the commit mark:

- A piece: its files are put first, under names that carry their hash; then its manifest, only if
  there is none. If another machine was first, its piece counts and ours is forgotten. Only then
  does the piece appear in the cache, so what the cache has was committed to the bucket.
- A table version: parts are copied inside the store, then the manifest is put.
- A snapshot of a benchmark: once all its versions are there its record is put, then the pointer
  `<benchmark>/current.json` is swapped if it still is what was read (compare-and-swap on the
  e-tag). Who is too late reads the new snapshot, adds what it has, and tries again.

There is no lock object. Whatever a builder writes before the swap has a name made of its content,
so two builders write the same bytes or different names; and the swap is one object, so a reader
sees one builder's tables or the other's, never a mixture. A lock would only add a holder that
dies. A store that ignores the conditions keeps all this but the order of two swaps.

Manifests are fetched when they are asked for, files when they are read (`fetch_files`), each
checked by its SHA-256. `step` marks where the crash tests kill.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson

from schemas.errors import LakeError
from schemas.manifest import PieceManifest, Snapshot, TableManifest
from storage.atomic import explained, new_directory, step, temporary_name, write_bytes
from storage.layout import (
    MANIFEST,
    SNAPSHOT,
    build_record_path,
    piece_path,
    versions_path,
)
from storage.objects import Bucket, StoredObject, bucket_of
from storage.tombstones import discard
from storage.verified import CURE, File, problem_of, verified

AT_ONCE = 16
LARGEST_COPY = 5 << 30  # S3 copies no larger object in one request
SWAPS = 50
PIECES = ".novelty/pieces"
Item = TypeVar("Item")
Result = TypeVar("Result")


def at_once(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Requests wait for the network, so many go out together."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(function, items))


def files_of(manifest: PieceManifest) -> list[File]:
    return [*manifest.parts, *manifest.files]


def piece_prefix(address: str) -> str:
    return f"{PIECES}/{address}"


def piece_object(address: str, file: File) -> str:
    """A piece's file in the bucket: two machines that made other bytes do not overwrite them."""
    return f"{piece_prefix(address)}/{file.sha256[:16]}-{file.file}"


def version_prefix(benchmark: str, table: str, key: str) -> str:
    return f"{benchmark}/{table}/versions/{key}"


def pointer_name(benchmark: str) -> str:
    return f"{benchmark}/current.json"


def snapshot_object(benchmark: str, name: str, file: str = SNAPSHOT) -> str:
    return f"{benchmark}/snapshots/{name}/{file}"


def commit_piece(bucket: Bucket, folder: Path, manifest: PieceManifest) -> None:
    """Put a piece that stands in `folder`, which is still temporary; the first manifest wins."""
    files = files_of(manifest)
    for file in files:
        bucket.put(piece_object(manifest.address, file), folder / file.file)
        step("piece_file_put")
    name = f"{piece_prefix(manifest.address)}/{MANIFEST}"
    ours = (folder / MANIFEST).read_bytes()
    if not bucket.create(name, ours):
        theirs = _required(bucket, name)
        if theirs.data != ours:
            # The stage gave other bytes here: theirs are fetched when they are read.
            write_bytes(folder / MANIFEST, theirs.data)
            for file in files:
                (folder / file.file).unlink()
    step("piece_manifest_put")


def pull_piece(bucket: Bucket, lake: Path, benchmark: str, stage: str, key: str) -> bool:
    """Bring a piece's manifest to the cache; False if there is none. One request."""
    require_inside(bucket, benchmark, stage, key)
    manifest = bucket.get(f"{piece_prefix(f'{benchmark}/{stage}/{key}')}/{MANIFEST}")
    if manifest is None:
        return False
    _keep_manifest(piece_path(lake, benchmark, stage, key), manifest)
    return True


def push_lost_pieces(bucket: Bucket, lake: Path, manifests: Sequence[PieceManifest]) -> None:
    """Put again what the cache has and the bucket lost (another machine's `gc`)."""
    stages = {(manifest.benchmark, manifest.stage) for manifest in manifests}
    names: set[str] = set()
    for listing in at_once(lambda s: bucket.listing(piece_prefix("/".join(s))), stages):
        names |= listing.keys()
    for manifest in manifests:
        if f"{piece_prefix(manifest.address)}/{MANIFEST}" in names:
            continue
        folder = piece_path(lake, *manifest.address.split("/"))
        if any(problem_of(folder / file.file, file) for file in files_of(manifest)):
            forget_piece(lake, manifest.address)
            raise _lost(bucket, manifest.address)
        commit_piece(bucket, folder, manifest)


def forget_piece(lake: Path, address: str) -> None:
    """Remove a piece from the cache."""
    if (folder := piece_path(lake, *address.split("/"))).exists():
        discard(lake, [folder])


def put_version(
    bucket: Bucket,
    lake: Path,
    manifest: TableManifest,
    pieces: dict[str, PieceManifest],
    is_current: bool,
) -> None:
    """Put the parts and the manifest of a version, unless they are there."""
    prefix = version_prefix(manifest.benchmark, manifest.table, manifest.key)
    folder = versions_path(lake, manifest.benchmark, manifest.table) / manifest.key
    data = (folder / MANIFEST).read_bytes()
    objects = bucket.listing(prefix)
    missing = [
        part
        for part in manifest.parts
        if (entry := objects.get(f"{prefix}/{part.file}")) is None or entry.bytes != part.bytes
    ]
    sources = {
        (address, file.sha256): piece_object(address, file)
        for address, piece in pieces.items()
        for file in piece.parts
    }

    def place(part: File) -> None:
        target = f"{prefix}/{part.file}"
        source = sources.get((getattr(part, "piece", None) or "", part.sha256))
        copied = source and part.bytes < LARGEST_COPY and bucket.copy(source, target)
        if not copied:
            if source and problem_of(folder / part.file, part):
                _fetch(bucket, folder / part.file, part, source)
            bucket.put(target, verified(folder / part.file, part))
        step("version_part_put")

    at_once(place, missing)
    if f"{prefix}/{MANIFEST}" not in objects or not is_current:
        # An old version that becomes current again gets a young manifest: other machines' `gc`
        # must not take it before the swap.
        bucket.put(f"{prefix}/{MANIFEST}", data)
        step("version_manifest_put")


def renew_version(bucket: Bucket, benchmark: str, table: str, key: str) -> None:
    """Put the manifest once more, so that the version is young."""
    name = f"{version_prefix(benchmark, table, key)}/{MANIFEST}"
    bucket.put(name, _required(bucket, name).data)


def read_pointer(content: StoredObject | None) -> dict[str, Any]:
    """What a pointer says; nothing if it is absent or broken, so that a build can mend it."""
    try:
        pointer = orjson.loads(content.data) if content else {}
    except ValueError:
        return {}
    return pointer if isinstance(pointer, dict) else {}


def put_snapshot(bucket: Bucket, snapshot: Snapshot) -> None:
    """Put its record, unless a publication that was killed left it."""
    bucket.create(snapshot_object(snapshot.benchmark, snapshot.name), snapshot.sealed())
    step("snapshot_put")


def pull_snapshot(bucket: Bucket, benchmark: str, name: str) -> bytes:
    return _required(bucket, snapshot_object(benchmark, name)).data


def swap_pointer(bucket: Bucket, snapshot: Snapshot, before: StoredObject | None) -> bool:
    """Make it the current snapshot; False if the pointer has changed since `before` was read."""
    benchmark = snapshot.benchmark
    pointer = {
        "snapshot": snapshot.name,
        "number": snapshot.number,
        "partial": snapshot.partial,
        "tables": {table: f"{table}/versions/{key}" for table, key in snapshot.tables.items()},
    }
    data = orjson.dumps(pointer, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    step("before_pointer")
    if not bucket.replace(pointer_name(benchmark), data, before):
        return False
    step("after_pointer")
    if before is None:
        # Of the time when each table had a pointer of its own.
        old = [_table_pointer(benchmark, table) for table, _ in old_pointers(bucket, benchmark)]
        bucket.delete(old)
    return True


def old_pointers(bucket: Bucket, benchmark: str) -> list[tuple[str, dict[str, Any]]]:
    """Tables with a pointer of their own: a bucket of the time before snapshots."""
    tables = bucket.folders(benchmark)
    objects = at_once(lambda table: bucket.get(_table_pointer(benchmark, table)), tables)
    pointers = zip(tables, objects, strict=True)
    return [(table, read_pointer(pointer)) for table, pointer in pointers if pointer is not None]


def _table_pointer(benchmark: str, table: str) -> str:
    return f"{benchmark}/{table}/current.json"


def pull_version(bucket: Bucket, lake: Path, benchmark: str, table: str, key: str) -> bool:
    """Bring a version's manifest to the cache; False if it has none, or nobody finished it."""
    require_inside(bucket, benchmark, table, key)
    folder = versions_path(lake, benchmark, table) / key
    if (folder / MANIFEST).exists():
        return True
    manifest = bucket.get(f"{version_prefix(benchmark, table, key)}/{MANIFEST}")
    if manifest is None:
        return False
    _keep_manifest(folder, manifest)
    return True


def pull_manifests(bucket: Bucket, lake: Path, benchmark: str, table: str) -> None:
    """Bring the manifests of a table's versions, old ones too, to the cache."""
    keys = bucket.folders(f"{benchmark}/{table}/versions")
    at_once(lambda key: pull_version(bucket, lake, benchmark, table, key), keys)


def pull_record(bucket: Bucket, lake: Path, benchmark: str) -> None:
    """Bring the record of a benchmark's last build to the cache."""
    path = build_record_path(lake, benchmark)
    if (record := bucket.get(str(path.relative_to(lake)))) is not None:
        write_bytes(path, record.data)


def push_file(lake: Path, path: Path) -> str:
    """Put a file of the cache under the same name; its address, or the path of a plain lake."""
    if (bucket := bucket_of(lake)) is None:
        return str(path)
    name = str(path.relative_to(lake))
    bucket.put(name, path)
    return f"{bucket.address}/{name}"


def pull_folder(lake: Path, name: str, suffix: str) -> None:
    """Bring the objects of a small folder to the cache; nothing for a lake that is a folder."""
    if (bucket := bucket_of(lake)) is None:
        return
    for path in bucket.listing(name):
        if not path.endswith(suffix):
            continue
        require_inside(bucket, *path.split("/"))
        if (content := bucket.get(path)) is not None:
            write_bytes(lake / path, content.data)


def fetch_files(bucket: Bucket, folder: Path, files: Sequence[tuple[File, str]]) -> None:
    """Bring files to a folder of the cache; each comes with the name of its object.

    A file that is there is fetched again only if it is damaged.
    """
    require_inside(bucket, *(file.file for file, _ in files))
    missing = [(file, name) for file, name in files if problem_of(folder / file.file, file)]
    at_once(lambda pair: _fetch(bucket, folder / pair[0].file, *pair), missing)


def fetch_piece_file(lake: Path, address: str, file: File) -> Path:
    """A file of a piece in this machine's cache, fetched unless it is there."""
    bucket = bucket_of(lake)
    folder = piece_path(lake, *address.split("/"))
    if bucket is None:
        return verified(folder / file.file, file)
    if problem_of(folder / file.file, file) is None:
        return folder / file.file
    if pull_piece(bucket, lake, *address.split("/")):
        fetch_files(bucket, folder, [(file, piece_object(address, file))])
        return folder / file.file
    forget_piece(lake, address)
    raise _lost(bucket, address)


def _lost(bucket: Bucket, address: str) -> LakeError:
    return LakeError(
        f"piece {address} is gone from {bucket.address}; run the same command again to make it anew"
    )


def _fetch(bucket: Bucket, path: Path, file: File, name: str) -> None:
    with explained(path):
        temporary = temporary_name(path)
        try:
            digest = bucket.digest(name, temporary)
            if digest is None:
                raise LakeError(f"{bucket.address}/{name} is missing; {CURE}")
            if digest != file.sha256:
                raise LakeError(
                    f"{bucket.address}/{name} has sha256 {digest[:16]}…, expected "
                    f"{file.sha256[:16]}…; {CURE}"
                )
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def require_inside(bucket: Bucket, *names: str) -> None:
    """Names from a bucket become names of files here: none may lead out of the cache."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise LakeError(
                f"{bucket.address} has a manifest or object with the name {name!r}, which leads "
                "out of the lake; find out who wrote it before you use this bucket"
            )


def _keep_manifest(folder: Path, manifest: StoredObject) -> None:
    """A folder of the cache with the manifest alone, as old as it is in the bucket."""
    with new_directory(folder) as temporary:
        (temporary / MANIFEST).write_bytes(manifest.data)
        os.utime(temporary / MANIFEST, (manifest.modified.timestamp(),) * 2)


def _required(bucket: Bucket, name: str) -> StoredObject:
    content = bucket.get(name)
    if content is None:
        raise LakeError(f"{bucket.address}/{name} vanished; run the same command again")
    return content
