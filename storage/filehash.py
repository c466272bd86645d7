"""SHA-256 of files, remembered by their stat so that a second run does not read gigabytes again.

Enters: file paths. Leaves: lowercase hex digests. A remembered digest answers only while absolute
path, size, mtime, ctime and inode are all unchanged; a file modified less than two seconds before
it was hashed is never remembered, since a later write could leave the same mtime (git's rule).
The cache is one SQLite file in WAL mode, opened anew for each operation, so that threads,
processes and forks may share it. It holds nothing that cannot be computed again.
"""

import fcntl
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

from schemas.errors import LakeError, SourceError

RACY_NS = 2_000_000_000
BATCH = 10_000
"""Files per SQL round trip and per transaction; below SQLite's 32,766 parameters."""
SMALL = 1 << 20
LAYOUT = 1
"""Raise when the tables below change: a cache of another layout is rebuilt."""

_TABLES = (
    "drop table if exists files",
    "drop table if exists notes",
    "create table files (path blob primary key, size integer, mtime integer, ctime integer,"
    " inode integer, sha256 text) without rowid",
    "create table notes (key text primary key, body blob) without rowid",
    f"pragma user_version = {LAYOUT}",
)

AnyPath = str | os.PathLike[str]
Stamp = tuple[int, int, int, int]
Result = TypeVar("Result")


class _Hashed(NamedTuple):
    digest: str
    stamp: Stamp | None
    """None if it must not be remembered."""


def sha256_file(path: AnyPath) -> str:
    return sha256_files([path], threads=1)[0]


def sha256_files(
    paths: Iterable[AnyPath],
    threads: int | None = None,
    failed: dict[str, OSError] | None = None,
) -> list[str]:
    """Digests in the order given, without a cache; `failed` as in `HashCache.sha256_many`."""
    names = [os.fspath(path) for path in paths]
    return [file.digest for file in _hash_many(names, threads, failed)]


def _hash_many(
    names: Sequence[str], threads: int | None, failed: dict[str, OSError] | None
) -> list[_Hashed]:
    def hash_some(part: Sequence[str]) -> list[_Hashed]:
        results = []
        for name in part:
            try:
                results.append(_hash(name))
            except OSError as error:
                if failed is None:
                    raise _unreadable(name, error) from None
                failed[name] = error
                results.append(_Hashed("", None))
        return results

    workers = threads or min(8, os.cpu_count() or 1)
    if workers == 1 or len(names) < 2:
        return hash_some(names)
    share = max(1, min(256, len(names) // (4 * workers)))
    parts = [names[at : at + share] for at in range(0, len(names), share)]
    with ThreadPoolExecutor(workers) as pool:
        return [file for part in pool.map(hash_some, parts) for file in part]


def _hash(path: str) -> _Hashed:
    """A file that changes while it is read has no digest."""
    start = time.time_ns()
    with open(path, "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        if before.st_size <= SMALL:
            digest = hashlib.sha256(file.readall()).hexdigest()
        else:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    if stamp_of(before) != stamp_of(after):
        raise OSError("it changed while it was being read")
    return _Hashed(digest, None if is_racy(after, start) else stamp_of(after))


def stamp_of(stat: os.stat_result) -> Stamp:
    """Changes whenever the content does, unless `is_racy`."""
    # SQLite integers are signed; inodes are not.
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino & (1 << 63) - 1


def is_racy(stat: os.stat_result, now_ns: int) -> bool:
    return now_ns - stat.st_mtime_ns < RACY_NS


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(
        f"{path} cannot be read: {error.strerror or error}. "
        "Check that the file is there, is complete and may be read, then run again."
    )


REBUILD_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Seconds between tries while another process may be rebuilding the cache."""


class HashCache:
    """`notes` are small blobs that derive from content alone (an archive's index), by key."""

    def __init__(self, db_path: AnyPath):
        self.path = Path(os.path.abspath(db_path))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LakeError(f"hash cache {self.path} cannot be made: {error.strerror}") from None
        self._frozen = not os.access(self.path.parent, os.W_OK)
        """In a read-only lake it tells what it knows, and learns nothing."""

    def sha256(self, path: AnyPath) -> str:
        return self.sha256_many([path], threads=1)[0]

    def sha256_many(
        self,
        paths: Iterable[AnyPath],
        threads: int | None = None,
        failed: dict[str, OSError] | None = None,
    ) -> list[str]:
        """Digests in the order given.

        A file that cannot be read raises SourceError, unless `failed` is given: then it is noted
        there under its path as given, and its digest is "".
        """
        names = [os.fspath(path) for path in paths]
        digests: list[str] = []
        for start in range(0, len(names), BATCH):
            digests += self._batch(names[start : start + BATCH], threads, failed)
        return digests

    def _batch(
        self, names: Sequence[str], threads: int | None, failed: dict[str, OSError] | None
    ) -> list[str]:
        keys = [os.fsencode(os.path.abspath(name)) for name in names]
        known = self._ask(lambda db: _select(db, keys)) or {}
        digests = [""] * len(names)
        missing = []
        for i, (name, key) in enumerate(zip(names, keys, strict=True)):
            row = known.get(key)
            try:
                if row is not None and stamp_of(os.stat(name)) == row[:4]:
                    digests[i] = row[4]
                    continue
            except OSError:
                pass
            missing.append(i)
        rows = []
        hashed = _hash_many([names[i] for i in missing], threads, failed)
        for i, file in zip(missing, hashed, strict=True):
            digests[i] = file.digest
            if file.stamp is not None:
                rows.append((keys[i], *file.stamp, file.digest))
        if rows:
            self._learn("replace into files values (?, ?, ?, ?, ?, ?)", rows)
        return digests

    def forget(self, paths: Iterable[AnyPath]) -> None:
        """Hash these files anew when they are asked for again."""
        keys = [[os.fsencode(os.path.abspath(path))] for path in paths]
        self._learn("delete from files where path = ?", keys)

    def note(self, key: str) -> bytes | None:
        row = self._ask(
            lambda db: db.execute("select body from notes where key = ?", [key]).fetchone()
        )
        return None if row is None else bytes(row[0])

    def set_note(self, key: str, body: bytes) -> None:
        self._learn("replace into notes values (?, ?)", [[key, body]])

    def _learn(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        if not self._frozen:
            self._run(lambda db: db.executemany(statement, rows))

    def _ask(self, question: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """None if it is read-only and cannot answer."""
        if not self._frozen:
            return self._run(question)
        address = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
        try:
            with closing(sqlite3.connect(address, uri=True)) as db:
                return question(db) if _layout(db) == LAYOUT else None
        except sqlite3.Error:
            return None

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """One transaction on a connection of its own; a damaged cache is rebuilt.

        Another process may rebuild it at this moment, which pulls the file away from under us.
        """
        try:
            for pause in REBUILD_PAUSES:
                try:
                    return self._transact(work)
                except sqlite3.DatabaseError as error:
                    if _is_damage(error):
                        self._discard_if_damaged()
                    elif not _may_pass(error):
                        raise
                time.sleep(pause)
            return self._transact(work)
        except (sqlite3.Error, OSError) as error:
            raise LakeError(
                f"hash cache {self.path} cannot be used: {error}. "
                "Check free space and permissions there, or delete the file: it is rebuilt."
            ) from None

    def _transact(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        with closing(sqlite3.connect(self.path, timeout=60)) as db:
            db.execute("pragma synchronous = normal")
            if _layout(db) != LAYOUT:
                self._lay_out(db)
            with db:
                return work(db)

    def _lay_out(self, db: sqlite3.Connection) -> None:
        """Make the tables, one process at a time: the switch to WAL does not wait for a lock."""
        with open(f"{self.path}.layout", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            db.execute("pragma journal_mode = wal")
            with db:
                db.execute("begin immediate")
                if _layout(db) != LAYOUT:
                    for statement in _TABLES:
                        db.execute(statement)

    def _discard_if_damaged(self) -> None:
        """Under a lock, and only if still damaged: another process may have rebuilt it."""
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if self._transact(lambda db: db.execute("pragma quick_check").fetchone()) == (
                    "ok",
                ):
                    return
            except sqlite3.DatabaseError as error:
                if _may_pass(error):
                    return
                if not _is_damage(error):
                    raise
            for suffix in ("-wal", "-shm", ""):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)


def _layout(db: sqlite3.Connection) -> int:
    return int(db.execute("pragma user_version").fetchone()[0])


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _may_pass(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR)


def _select(
    db: sqlite3.Connection, keys: Sequence[bytes]
) -> dict[bytes, tuple[int, int, int, int, str]]:
    marks = ",".join("?" * len(keys))
    rows = db.execute(
        f"select path, size, mtime, ctime, inode, sha256 from files where path in ({marks})", keys
    )
    return {row[0]: row[1:] for row in rows}
