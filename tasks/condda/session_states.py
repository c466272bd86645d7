"""States of sessions in memory: one lock for each, brought up to date from the store every time.

So a restarted process, or another one on the same store, decides on the same state. The least used
states are dropped when there are too many; a session that does not exist is not kept.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import LakeError, SourceError
from tasks.condda.commands import Decision
from tasks.condda.posts import is_name
from tasks.condda.rules import Limits, ProtocolRefusal
from tasks.condda.session import SessionState, evolve, open_state
from tasks.condda.store import Conflict, EventStore

_ATTEMPTS = 100


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    state: SessionState | None = None


class SessionStates:
    """The sessions of one store."""

    def __init__(self, store: EventStore, limits: Limits):
        self.store = store
        self.limits = limits
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def run(self, session: str, decide: Callable[[SessionState | None], Decision]) -> Any:
        """Decide on the newest state, and store what happens before answering.

        If another writer was faster, its events are read and the decision is made again.
        """
        for _ in range(_ATTEMPTS):
            with self._entry(session) as entry:
                decision = decide(entry.state)
                if not decision.events:
                    return decision.answer
                assert entry.state is not None
                try:
                    self.store.append(session, entry.state.seq, decision.events)
                except Conflict:
                    continue
                self._take_in(entry, decision)
                return decision.answer
        raise ProtocolRefusal(500, "Conflict", "others write to this session all the time; wait")

    @staticmethod
    def _take_in(entry: _Entry, decision: Decision) -> None:
        assert entry.state is not None
        try:
            for event in decision.events:
                evolve(entry.state, event)
        except BaseException:
            entry.state = None  # half taken in: to be read again
            raise

    @contextmanager
    def get(self, session: str) -> Iterator[SessionState]:
        """Newest state of a session that must exist, under its lock."""
        with self._entry(session) as entry:
            if entry.state is None:
                raise ProtocolRefusal(400, "session_id_invalid", "there is no session with this id")
            yield entry.state

    @contextmanager
    def _entry(self, session: str) -> Iterator[_Entry]:
        """A session under its lock, brought up to date from the store.

        An entry may be dropped while a thread uses it; another thread then builds its own, and the
        store's numbering lets only one of them write.
        """
        if not is_name(session, self.limits):
            yield _Entry()
            return
        with self._lock:
            entry = self._entries.setdefault(session, _Entry())
            self._entries.move_to_end(session)
            while len(self._entries) > self.limits.cached_sessions:
                self._entries.popitem(last=False)
        try:
            with entry.lock, lake_refusals():
                self._catch_up(session, entry)
                yield entry
        finally:
            if entry.state is None:
                with self._lock:
                    self._entries.pop(session, None)

    def _catch_up(self, session: str, entry: _Entry) -> None:
        state = entry.state
        if state is not None and state.terminated and not self.store.load(session, state.seq - 1):
            entry.state = None  # it has left the store
        seq = 0 if entry.state is None else entry.state.seq
        for stored in self.store.load(session, seq):
            if entry.state is None:
                entry.state = open_state(session, stored.event)
            else:
                evolve(entry.state, stored.event)


@contextmanager
def lake_refusals() -> Iterator[None]:
    """Damaged files and full disks refuse the one request; the sentence says what to do."""
    try:
        yield
    except (LakeError, SourceError) as error:
        raise ProtocolRefusal(500, type(error).__name__, str(error)) from error
