"""Retention: sessions that ended long ago leave the server's state for a store of their own.

The store is the state folder `retired` inside the state folder, so `novelty build condda --state`
reads it like any other. A session is there, on the disk, before it is taken away here; what was
killed in between is finished by the next run. Running sessions stay. Kept here is which tests
an owner has opened: leaving does not give anyone another attempt.
"""

import json
import logging
import sqlite3
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from schemas.errors import ConfigError, LakeError, NoveltyError
from storage.atomic import explained
from tasks.condda.store import EVENTS, Conflict, EventStore

RETIRED = "retired"
_DAY_SECONDS = 86_400.0
_log = logging.getLogger(__name__)


def check_days(days: float) -> None:
    """Refuse a number of days that none are kept for."""
    if not days >= 0:  # NaN too
        raise ConfigError(f"sessions are kept for 0 days or more, not {days:g}")


def retire(state: Path, days: float, now: datetime | None = None) -> list[str]:
    """Move sessions that ended more than `days` ago; gives their ids."""
    check_days(days)
    if not (state / EVENTS).exists():
        raise ConfigError(f"{state} is no state folder of a server: it has no {EVENTS}")
    before = (now or datetime.now(UTC)) - timedelta(days=days)
    with closing(EventStore(state / EVENTS)) as store:
        sessions = [
            stored.session
            for stored in store.of_kinds(["terminated"])
            if datetime.fromisoformat(stored.event.time) < before
        ]
        if sessions:
            with explained(state / RETIRED):
                (state / RETIRED).mkdir(exist_ok=True)
            with closing(EventStore(state / RETIRED / EVENTS)) as kept:
                for session in sessions:
                    _move(session, store, kept)
    return sessions


def _move(session: str, store: EventStore, kept: EventStore) -> None:
    events = [stored.event for stored in store.load(session, bodies=True)]
    if not events:
        return  # another run has moved it meanwhile
    try:
        kept.append(session, 0, events)
    except Conflict:
        if [stored.event for stored in kept.load(session, bodies=True)] != events:
            raise LakeError(
                f"{kept.path} holds another session {session}; move that file away and try again"
            ) from None
    opened = events[0].detail
    try:
        with store.writing() as connection:
            connection.execute(
                "insert or ignore into retired (session, owner, tests) values (?, ?, ?)",
                (session, opened.get("owner", ""), json.dumps(opened["tests"])),
            )
            connection.execute("delete from events where session = ?", (session,))
    except sqlite3.Error as error:
        raise LakeError(f"cannot write the event store {store.path}: {error}") from error


def retire_daily(state: Path, days: float, stopped: threading.Event) -> threading.Thread:
    """The same now and every day, in a thread, until `stopped`; what fails is tried again then."""

    def work() -> None:
        while True:
            try:
                retire(state, days)
            except (NoveltyError, OSError) as error:
                _log.error("old sessions were not retired and will be tomorrow: %s", error)
            if stopped.wait(_DAY_SECONDS):
                return

    thread = threading.Thread(target=work, name="condda retention", daemon=True)
    thread.start()
    return thread
