"""What a session remembers: events in, summaries out, so that no decision reads the history.

`Event` is what the store keeps; `evolve` adds one to a `SessionState`. Only an opened session has a
state. Posted files themselves are not part of it: an event carries in `detail` the few facts that
later decisions need (`posts.remember`), so a session is rebuilt without reading them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

Kind = Literal["opened", "served", "posted", "feedback", "restarted", "completed", "terminated"]


@dataclass(frozen=True)
class Event:
    """One thing that happened. `attempt` counts restarts of a test; `body` is a posted file."""

    kind: Kind
    time: str
    test: str | None = None
    attempt: int = 0
    round: int | None = None
    type: str | None = None
    sha256: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None


@dataclass
class TestState:
    """One test of a session, since its last restart."""

    __test__ = False

    attempt: int = 0
    served: set[int] = field(default_factory=set)
    """Rounds served."""
    posted: dict[int, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    """Round and type to the SHA-256 of each file posted."""
    columns: dict[str, int] = field(default_factory=dict)
    """Most values on a line so far, per type."""
    last_rows: dict[str, list[int]] = field(default_factory=dict)
    """Rows of the last round_size lines posted, per type; -1 for an id the test does not have."""
    marks: dict[str, dict[int, int]] = field(default_factory=dict)
    """Type to row to mark of the last answer given (-1: no mark)."""
    right: dict[str, int] = field(default_factory=dict)
    """Rows with mark 1, per type."""
    answered: dict[str, int] = field(default_factory=dict)
    """Rows with mark 0 or more, per type."""
    last_round: int | None = None
    """Highest round with a posted result."""
    highest: float | None = None
    """Highest detection value posted."""
    red_light_posted: bool = False
    spent: dict[tuple[int, str], int] = field(default_factory=dict)
    """Round and feedback type to the number of ids answered."""
    score: int = 0
    """Points of nlt."""
    completed: bool = False

    def has_posted(self, kind: str) -> bool:
        """Whether any file of this type was posted."""
        return kind in self.columns


@dataclass
class SessionState:
    """One session: what it was opened with, its tests, whether it has ended."""

    session: str
    opened: str
    """Time of opening; from here to `fixed` is the detail of the first event."""
    protocol: str
    domain: str
    detector: str
    tests: Sequence[str]
    hints: Sequence[str]
    threshold: float
    owner: str = ""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Metadata that the operator's policy replaced when the session was opened."""
    terminated: str | None = None
    finished: list[str] = field(default_factory=list)
    """Completed tests in the order of completion."""
    progress: dict[str, TestState] = field(default_factory=dict)
    seq: int = 0
    """Number of events taken in."""

    def test(self, test_id: str) -> TestState:
        """State of a test; a fresh one, not kept, if nothing happened to it yet."""
        return self.progress.get(test_id) or TestState()


def open_state(session: str, event: Event) -> SessionState:
    """State of a session after its first event."""
    return SessionState(session, event.time, **event.detail, seq=1)


def evolve(state: SessionState, event: Event) -> SessionState:
    """Take in one event, in place; the work is that of the event, whatever came before."""
    state.seq += 1
    if event.kind == "terminated":
        state.terminated = event.time
        return state
    assert event.test is not None, f"event {event.kind} names no test"
    if event.kind == "restarted":
        state.progress[event.test] = TestState(attempt=event.attempt)
        return state
    test = state.progress.setdefault(event.test, TestState(attempt=event.attempt))
    if event.kind == "served":
        assert event.round is not None
        test.served.add(event.round)
    elif event.kind == "posted":
        _take_post(test, event)
    elif event.kind == "feedback":
        assert event.round is not None and event.type is not None
        key = (event.round, event.type)
        test.spent[key] = test.spent.get(key, 0) + event.detail["count"]
        test.score += event.detail.get("score", 0)
    elif event.kind == "completed":
        test.completed = True
        # Only feedback asks for these, and there is no more of it: they are most of a state.
        test.marks.clear()
        test.last_rows.clear()
        state.finished.append(event.test)
    return state


def _take_post(test: TestState, event: Event) -> None:
    kind, facts = event.type, event.detail
    assert kind is not None and event.round is not None and event.sha256 is not None
    of_round = test.posted.setdefault(event.round, {})
    of_round[kind] = (*of_round.get(kind, ()), event.sha256)
    test.last_round = event.round if test.last_round is None else max(test.last_round, event.round)
    test.columns[kind] = max(test.columns.get(kind, 0), facts["columns"])
    rows = facts["rows"]
    keep = facts["round_size"]
    test.last_rows[kind] = (test.last_rows.get(kind, []) + rows)[-keep:] if keep else []
    marks = test.marks.setdefault(kind, {})
    right = answered = 0
    for row, mark in zip(rows, facts.get("marks") or repeat(-1, len(rows)), strict=True):
        if row >= 0:
            before = marks.get(row, -1)
            if mark != before:
                right += (mark == 1) - (before == 1)
                answered += (mark >= 0) - (before >= 0)
            marks[row] = mark
    test.right[kind] = test.right.get(kind, 0) + right
    test.answered[kind] = test.answered.get(kind, 0) + answered
    highest = facts.get("highest")
    if highest is not None and (test.highest is None or highest > test.highest):
        test.highest = highest
    test.red_light_posted |= bool(facts.get("red_light"))
