"""Snapshots: all tables of a benchmark, published together by one swap.

A snapshot is a small record: the version of every table, and the pieces of every run. Its folder
has a link to each version, so that it can be read by path. What swaps is one symlink, or in a
bucket one object, put only if it still is what was read. A snapshot is never changed; pinning one
puts a file beside the record, and restoring one publishes the same tables anew.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from schemas.errors import ConfigError, LakeError
from schemas.manifest import Snapshot
from storage.atomic import new_directory, step, swap_symlink, write_bytes
from storage.layout import (
    PINNED,
    SNAPSHOT,
    current_path,
    lake_address,
    pointer_path,
    snapshot_path,
    snapshots_path,
    top_folders,
    versions_path,
)
from storage.objects import Bucket, StoredObject, bucket_of
from storage.remote import (
    at_once,
    old_pointers,
    pointer_name,
    pull_snapshot,
    put_snapshot,
    read_pointer,
    require_inside,
    snapshot_object,
    swap_pointer,
)
from storage.tombstones import bury
from storage.verified import ABSENT, CURE

GRACE_HOURS = 24.0
KEEP = 5


@dataclass(frozen=True)
class Base:
    """What a publication stands on: the current snapshot, and in a bucket the pointer to it."""

    snapshot: Snapshot | None
    pointer: StoredObject | None = None
    damaged: bool = False
    """The snapshot is what the rest of a damaged one tells, or the newest that is whole."""


def benchmarks_in(lake: Path) -> list[str]:
    """Names of the benchmarks that may have tables."""
    if (bucket := bucket_of(lake)) is not None:
        return [name for name in bucket.folders("") if not name.startswith(".")]
    return [
        top.name
        for top in top_folders(lake)
        for folders in ([top, *top.glob("[!.]*")],)  # a glob finds no link to nothing
        if any((folder / "current").is_symlink() for folder in folders)
    ]


def current_snapshot(lake: Path, benchmark: str) -> Snapshot | None:
    """The snapshot to read; None if nothing was published."""
    return _base(lake, benchmark).snapshot


def publication_base(lake: Path, benchmark: str) -> Base:
    """What to publish upon. A record or pointer that is damaged is no obstacle: it is replaced."""
    try:
        return _base(lake, benchmark)
    except LakeError:
        return _mended(lake, benchmark)


def _base(lake: Path, benchmark: str) -> Base:
    if (bucket := bucket_of(lake)) is not None:
        return _bucket_base(bucket, lake, benchmark)
    link = pointer_path(lake, benchmark)
    if link.is_symlink():
        return Base(read_snapshot(link.parent / os.readlink(link)))
    links = [link for link in _table_links(lake, benchmark) if link.is_symlink()]
    return Base(_before_snapshots(lake, benchmark, {p.parts[-2]: os.readlink(p) for p in links}))


def _table_links(lake: Path, benchmark: str) -> list[Path]:
    """Where links of tables are, whatever they lead to."""
    folders = sorted((lake / benchmark).glob("[!.]*"))
    return [folder / "current" for folder in folders if not folder.is_symlink()]


def _bucket_base(bucket: Bucket, lake: Path, benchmark: str) -> Base:
    pointer = bucket.get(pointer_name(benchmark))
    if pointer is None:
        targets = {
            table: str(old.get("path", "")) for table, old in old_pointers(bucket, benchmark)
        }
        return Base(_before_snapshots(lake, benchmark, targets))
    name = read_pointer(pointer).get("snapshot")
    if not isinstance(name, str):
        raise LakeError(
            f"{bucket.address}/{pointer_name(benchmark)} is no pointer; `novelty verify --drop` "
            f"mends it, and so does building {benchmark}"
        )
    return Base(_pulled(bucket, lake, benchmark, name), pointer)


def _pulled(bucket: Bucket, lake: Path, benchmark: str, name: str) -> Snapshot:
    """A snapshot of the bucket, which the cache has from now on; it never changes."""
    require_inside(bucket, name)
    folder = snapshot_path(lake, benchmark, name)
    if not is_whole_snapshot(folder):
        data = pull_snapshot(bucket, benchmark, name)
        snapshot = _parsed(data, folder)
        require_inside(bucket, *snapshot.tables, *snapshot.tables.values())
        _write(lake, snapshot, data)
    return read_snapshot(folder)


def _before_snapshots(lake: Path, benchmark: str, targets: Mapping[str, str]) -> Snapshot | None:
    """A lake of the time when each table had a pointer of its own, as number 0."""
    tables = {
        table: target.removeprefix("versions/")
        for table, target in targets.items()
        if target.startswith("versions/")
    }
    if not tables:
        return None
    places = [versions_path(lake, benchmark, table) / key for table, key in tables.items()]
    ages = [place.stat().st_mtime for place in places if place.exists()]
    made = datetime.fromtimestamp(max(ages), UTC) if ages else datetime.now(UTC)
    return Snapshot(benchmark=benchmark, number=0, made=made, finished=made, tables=tables)


def _mended(lake: Path, benchmark: str) -> Base:
    """The tables that a damaged snapshot's links, or a bucket's pointer, still name; no runs."""
    number, pointer = 0, None
    if (bucket := bucket_of(lake)) is not None:
        pointer = bucket.get(pointer_name(benchmark))
        content = read_pointer(pointer)
        versions, count = content.get("tables"), content.get("number")
        targets = (
            {str(t): str(path) for t, path in versions.items()}
            if isinstance(versions, dict)
            else {}
        )
        number = count if isinstance(count, int) else 0
        require_inside(bucket, *targets)
    else:
        folder = pointer_path(lake, benchmark).resolve()
        links = [path for path in folder.glob("[!_]*") if path.is_symlink()]
        targets = {path.name: os.readlink(path) for path in links}
        digits = folder.name[1:].partition("-")[0]
        number = int(digits) if digits.isdecimal() else 0
    tables = {table: target.rpartition("/")[2] for table, target in targets.items()}
    if not tables:
        snapshots = _all_snapshots(lake, benchmark)
        return Base(snapshots[-1] if snapshots else None, pointer, damaged=True)
    snapshot = Snapshot(benchmark=benchmark, number=number, made=datetime.now(UTC), tables=tables)
    return Base(snapshot, pointer, damaged=True)


def read_snapshot(folder: Path) -> Snapshot:
    """One that is absent or damaged is a LakeError. What the disk does not give now may be whole,
    so that is not: `gc` removes what no whole snapshot names.
    """
    try:
        data = (folder / SNAPSHOT).read_bytes()
    except ABSENT as error:
        raise LakeError(f"no snapshot in {folder}: {error.strerror}; {CURE}") from error
    return _parsed(data, folder)


def _parsed(data: bytes, folder: Path) -> Snapshot:
    try:
        snapshot = Snapshot.unsealed(data)
        if (snapshot.benchmark, snapshot.name) != (folder.parts[-3], folder.name):
            raise ValueError("it is another one")
        return snapshot
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise LakeError(f"{folder / SNAPSHOT} is damaged: {reason}; {CURE}") from error


def is_whole_snapshot(folder: Path) -> bool:
    try:
        return bool(read_snapshot(folder))
    except LakeError:
        return False


def commit_snapshot(lake: Path, snapshot: Snapshot, base: Base) -> bool:
    """Make it the current one; False if another machine published meanwhile."""
    bucket = bucket_of(lake)
    if bucket is None and base.snapshot is not None and not base.snapshot.number:
        _write(lake, base.snapshot)
        _swap(lake, base.snapshot)  # the same tables; from here on they change together
    _write(lake, snapshot)
    if bucket is not None:
        put_snapshot(bucket, snapshot)
        if not swap_pointer(bucket, snapshot, base.pointer):
            return False
    _swap(lake, snapshot)
    return True


def _write(lake: Path, snapshot: Snapshot, data: bytes | None = None) -> None:
    folder = snapshot_path(lake, snapshot.benchmark, snapshot.name)
    if folder.exists():
        if is_whole_snapshot(folder):
            return  # of a publication that was killed before its swap
        bury(lake, [folder], "was no whole snapshot when it was to be published")
    with new_directory(folder) as temporary:
        (temporary / SNAPSHOT).write_bytes(data or snapshot.sealed())
        for table, key in snapshot.tables.items():
            (temporary / table).symlink_to(f"../../{table}/versions/{key}")
        step("snapshot_written")


def _swap(lake: Path, snapshot: Snapshot) -> None:
    swap_symlink(pointer_path(lake, snapshot.benchmark), f"snapshots/{snapshot.name}")
    link_tables(lake, snapshot)


def link_tables(lake: Path, snapshot: Snapshot) -> None:
    """`<table>/current` goes through the one link that is swapped; it is made once."""
    for table in snapshot.tables:
        link = current_path(lake, snapshot.benchmark, table)
        link.parent.mkdir(parents=True, exist_ok=True)
        swap_symlink(link, f"../current/{table}")
    for link in _table_links(lake, snapshot.benchmark):
        if link.is_symlink() and link.parts[-2] not in snapshot.tables:
            link.unlink()


def _all_snapshots(lake: Path, benchmark: str) -> list[Snapshot]:
    """Every whole snapshot by number, also what was never swapped in."""
    if (bucket := bucket_of(lake)) is not None:
        listing = bucket.listing(f"{benchmark}/snapshots")
        names = [name.split("/")[-2] for name in listing if name.endswith(f"/{SNAPSHOT}")]
        snapshots = at_once(lambda name: _whole(lake, benchmark, name, bucket), names)
    else:
        folders = sorted(snapshots_path(lake, benchmark).glob("[!.]*"))
        snapshots = [_whole(lake, benchmark, folder.name) for folder in folders]
    return sorted(filter(None, snapshots), key=lambda snapshot: (snapshot.number, snapshot.name))


def _whole(lake: Path, benchmark: str, name: str, bucket: Bucket | None = None) -> Snapshot | None:
    try:
        if bucket is not None:
            return _pulled(bucket, lake, benchmark, name)
        return read_snapshot(snapshot_path(lake, benchmark, name))
    except LakeError:
        return None


def history(lake: Path, benchmark: str) -> list[Snapshot]:
    """Every snapshot that was current and that `gc` left, the oldest first.

    A publication that was killed, or that another machine overtook, leaves a snapshot that never
    was current. It has the number of one that was, or a number that is still to come.
    """
    current = current_snapshot(lake, benchmark)
    if current is None:
        return []
    snapshots = _all_snapshots(lake, benchmark)
    if not current.number:
        return [current]
    real_names = {snapshot.previous for snapshot in snapshots} | {current.name}
    real_numbers = {snapshot.number for snapshot in snapshots if snapshot.name in real_names}
    return [
        snapshot
        for snapshot in snapshots
        if snapshot.number <= current.number
        and (snapshot.name in real_names or snapshot.number not in real_numbers)
    ]


def find_snapshot(lake: Path, text: str) -> Snapshot:
    """`benchmark`, or `benchmark@s12`: the number, or the beginning of a name."""
    benchmark, _, label = text.partition("@")
    current = current_snapshot(lake, benchmark)
    if current is None:
        raise ConfigError(
            f"nothing of {benchmark!r} is in {lake_address(lake)}; `novelty status` lists what is"
        )
    if not label:
        return current
    number = int(label[1:]) if label[1:].isdecimal() else None
    matches = [
        snapshot
        for snapshot in history(lake, benchmark)
        if snapshot.number == number or (number is None and snapshot.name.startswith(label))
    ]
    if len(matches) != 1:
        raise ConfigError(
            f"{len(matches)} snapshots of {benchmark} are called {label!r}; "
            f"`novelty history {benchmark}` lists them"
        )
    return matches[0]


def pinned_names(lake: Path, benchmark: str) -> set[str]:
    """Snapshots that `gc` keeps for ever."""
    if (bucket := bucket_of(lake)) is not None:
        objects: Iterable[str] = bucket.listing(f"{benchmark}/snapshots")
        return {name.split("/")[-2] for name in objects if name.endswith(f"/{PINNED}")}
    return {path.parent.name for path in snapshots_path(lake, benchmark).glob(f"[!.]*/{PINNED}")}


def pin(lake: Path, snapshot: Snapshot, pinned: bool = True) -> None:
    name = snapshot_object(snapshot.benchmark, snapshot.name, PINNED)
    if (bucket := bucket_of(lake)) is not None:
        if pinned:
            bucket.put(name, b"pinned\n")
        else:
            bucket.delete([name])
    elif pinned:
        write_bytes(lake / name, b"pinned\n")
    else:
        (lake / name).unlink(missing_ok=True)


def retained(
    lake: Path, benchmark: str, grace_hours: float = GRACE_HOURS, keep: int = KEEP
) -> list[Snapshot]:
    """What `gc` keeps: the current one, those replaced within the grace time, pinned ones, and
    the last `keep` that are not partial.
    """
    snapshots = history(lake, benchmark)
    pinned = pinned_names(lake, benchmark)
    last = [snapshot.name for snapshot in snapshots if not snapshot.partial][-keep:] if keep else []
    young = datetime.now(UTC) - timedelta(hours=grace_hours)
    replaced: Sequence[datetime | None] = [*(after.made for after in snapshots[1:]), None]
    return [
        snapshot
        for snapshot, end in zip(snapshots, replaced, strict=True)
        if end is None or end > young or snapshot.name in pinned or snapshot.name in last
    ]


def version_folders(lake: Path, snapshots: Iterable[Snapshot]) -> set[Path]:
    """Folders of the versions that the snapshots name."""
    return {
        versions_path(lake, snapshot.benchmark, table) / key
        for snapshot in snapshots
        for table, key in snapshot.tables.items()
    }
