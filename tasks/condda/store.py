"""The event store: one append-only SQLite table, shared by threads and processes.

A row is an `Event` of a session, numbered from 1 without gaps; posted files are kept as bytes in
`body`. WAL with synchronous=FULL: a commit returns when its bytes are on the disk, so what was
acknowledged outlives kill -9 and a power cut. A writer says which number it expects to be last; if
another was faster, `append` raises `Conflict` and nothing is written.

One connection writes. Appends that come while a commit is under way wait for it and share the next
one: one sync of the disk for all of them, each answered after it. Readers have connections of their
own, which wait for no writer.

Nothing is changed here, and nothing leaves but whole sessions (`retention.py`), whose names stay in
`retired`. Two unique indexes make a doubled result impossible: the same file for the same test,
attempt, round and type, and any second detection for a round.
"""

import hashlib
import json
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from schemas.errors import LakeError
from tasks.condda.commands import Event, Kind

EVENTS = "events.sqlite"
"""The store's file in a state folder."""
_SCHEMA = """
create table if not exists events (
    id integer primary key autoincrement,
    session text not null,
    seq integer not null,
    time text not null,
    kind text not null,
    test text,
    attempt integer not null,
    round integer,
    type text,
    sha256 text,
    detail text not null,
    body blob,
    unique (session, seq)
);
create unique index if not exists one_file on events (session, test, attempt, round, type, sha256)
    where kind = 'posted';
create unique index if not exists one_detection on events (session, test, attempt, round)
    where kind = 'posted' and type = 'detection';
create index if not exists by_kind on events (kind, id);
create table if not exists retired
    (session text primary key, owner text not null, tests text not null);
"""
_COLUMNS = "session, seq, kind, time, test, attempt, round, type, sha256, detail"
_Facts = tuple[Kind, str, str | None, int, int | None, str | None, str | None]
"""Columns from `kind` to `sha256`."""
_RETIRED = "select count(*) from retired where session = ?"
_LAST = "select coalesce(max(seq), 0) from events where session = ?"
_INSERT = (
    "insert into events (session, seq, time, kind, test, attempt, round, type, sha256, detail, "
    "body) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_FILTERS = {"kind", "test", "attempt", "round", "type"}
_BUSY_SECONDS = 60.0


class Conflict(Exception):
    """Another writer added to the session first: read what it added and decide again."""


@dataclass(frozen=True)
class StoredEvent:
    """An event with its place in the store."""

    session: str
    seq: int
    event: Event


@dataclass
class _Append:
    """Rows that wait for a commit, and what became of them."""

    session: str
    seq: int
    rows: list[tuple]
    done: bool = False
    error: Exception | None = None


class EventStore:
    """Events of all sessions in one file."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock = threading.RLock()
        self._waiting: deque[_Append] = deque()
        self._readers: list[sqlite3.Connection] = []
        self._closed = False
        try:
            self._connection = self._connect()
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")
            with self.writing() as connection:
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
        except sqlite3.Error as error:
            raise LakeError(f"cannot open the event store {self.path}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        with self._lock:
            self._closed = True
            while self._readers:
                self._readers.pop().close()
            self._connection.close()

    def append(self, session: str, expected_seq: int, events: Sequence[Event]) -> int:
        """Add events after number `expected_seq`, all or none; gives the number of the last one."""
        rows = [
            (
                *(session, expected_seq + place, event.time, event.kind, event.test),
                *(event.attempt, event.round, event.type, event.sha256),
                json.dumps(dict(event.detail), separators=(",", ":")),
                event.body,
            )
            for place, event in enumerate(events, start=1)
        ]
        append = _Append(session, expected_seq, rows)
        self._waiting.append(append)
        with self._lock:
            # Whoever holds the lock commits for all that wait, maybe for this one too.
            if not append.done:
                self._commit([self._waiting.popleft() for _ in range(len(self._waiting))])
        if append.error is not None:
            raise append.error
        return expected_seq + len(rows)

    def _commit(self, batch: list[_Append]) -> None:
        """Write appends in one transaction; one that conflicts does not keep the others back."""
        try:
            with self.writing() as connection:
                for append in batch:
                    self._insert(connection, append)
        except BaseException as error:
            for append in batch:
                append.error = LakeError(
                    f"cannot write the event store {self.path}: {error}; see that its disk has "
                    "space and that it may be written, then send the request again"
                )
            if not isinstance(error, sqlite3.Error):
                raise
        finally:
            for append in batch:
                append.done = True

    def _insert(self, connection: sqlite3.Connection, append: _Append) -> None:
        last = connection.execute(_LAST, [append.session]).fetchone()[0]
        gone = not last and connection.execute(_RETIRED, [append.session]).fetchone()[0]
        if last != append.seq or gone:
            append.error = Conflict(f"session {append.session} has other events than expected")
            return
        connection.execute("savepoint one")
        try:
            connection.executemany(_INSERT, append.rows)
        except sqlite3.IntegrityError as error:
            connection.execute("rollback to one")
            append.error = Conflict(f"session {append.session}: {error}")
        connection.execute("release one")

    def load(
        self, session: str, after_seq: int = 0, *, bodies: bool = False, **filters: object
    ) -> list[StoredEvent]:
        """Events of a session after a number, in order; filters such as test="…", kind="posted"."""
        where, values = ["session = ?", "seq > ?"], [session, after_seq, *filters.values()]
        unknown = set(filters) - _FILTERS
        if unknown:
            raise ValueError(f"no filter {sorted(unknown)}, there are {sorted(_FILTERS)}")
        where += [f"{name} = ?" for name in filters]
        return self._select(" and ".join(where) + " order by seq", values, bodies)

    def of_kinds(self, kinds: Sequence[str], round: int | None = None) -> list[StoredEvent]:
        """Events of these kinds over all sessions, without bodies, in order."""
        where = f"kind in ({', '.join('?' * len(kinds))})"
        values: list[object] = list(kinds)
        if round is not None:
            where += " and round = ?"
            values.append(round)
        return self._select(where + " order by id", values, False)

    def sessions(self) -> list[str]:
        """Ids of all sessions in the order of opening."""
        rows = self._query("select session from events where kind = 'opened' order by id", [])
        return [row[0] for row in rows]

    def opened(self, owner: str) -> list[StoredEvent]:
        """The first event of each session of an owner."""
        where = "kind = 'opened' and coalesce(json_extract(detail, '$.owner'), '') = ? order by id"
        return self._select(where, [owner], False)

    def opened_tests(self, owner: str) -> list[list[str]]:
        """Tests of each session that an owner has opened, of those that have left too."""
        left = self._query("select tests from retired where owner = ?", [owner])
        here = [stored.event.detail["tests"] for stored in self.opened(owner)]
        return [*(json.loads(row[0]) for row in left), *here]

    def last_time(self, session: str) -> str:
        """Time of a session's last event."""
        query = "select time from events where session = ? order by seq desc limit 1"
        return str(self._query(query, [session])[0][0])

    def tests(self, session: str) -> list[str]:
        """Tests that a session has touched, by name."""
        rows = self._query(
            "select distinct test from events where session = ? and test is not null order by test",
            [session],
        )
        return [row[0] for row in rows]

    def fingerprint(self, session: str, test: str) -> tuple[int, str]:
        """Number and digest of a test's events in a session: equal if nothing has happened."""
        rows = self._query(
            "select seq, time, kind, coalesce(sha256, '') from events "
            "where session = ? and test = ? order by seq",
            [session, test],
        )
        return len(rows), hashlib.sha256(repr([session, test, rows]).encode()).hexdigest()

    def retired_count(self) -> int:
        """Number of sessions that have left."""
        return int(self._query("select count(*) from retired", [])[0][0])

    def session_count(self) -> int:
        """Number of sessions."""
        return int(self._query("select count(*) from events where kind = 'opened'", [])[0][0])

    def _select(self, where: str, values: Sequence[object], bodies: bool) -> list[StoredEvent]:
        body = "body" if bodies else "null"
        rows = self._query(f"select {_COLUMNS}, {body} from events where {where}", values)
        return [
            StoredEvent(
                *cast(tuple[str, int], row[:2]),
                Event(*cast(_Facts, row[2:9]), json.loads(row[9]), row[10]),
            )
            for row in rows
        ]

    def _query(self, statement: str, values: Sequence[object]) -> list[tuple]:
        try:
            with (
                self._reader() as connection,
                closing(connection.execute(statement, values)) as rows,
            ):
                return rows.fetchall()
        except sqlite3.Error as error:
            raise LakeError(f"cannot read the event store {self.path}: {error}") from error

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        """A connection for one reader at a time; as many are kept as ever read at once."""
        try:
            connection = self._readers.pop()
        except IndexError:
            connection = self._connect()
        try:
            yield connection
        finally:
            self._readers.append(connection)
            if self._closed:
                self.close()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The one connection that writes, in a transaction."""
        with self._lock:
            self._connection.execute("begin immediate")
            try:
                yield self._connection
                self._connection.execute("commit")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("rollback")
                raise
