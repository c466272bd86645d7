"""What a session remembers, and what it sees of a test: its metadata, its rounds.

`evolve` adds an event to a `SessionState`, so that no decision reads the history. Posted files are
no part of it: an event carries in `detail` the few facts that later decisions need
(`posts.remember`), so a session is rebuilt without reading them.

Metadata as a session sees it is the test's file with what the operator fixed when the session was
opened, or the session's hints of the form "key=number" (docs/condda.md, rule 4), put over it: made
anew each time, so that no session changes another's. Round r is rows [r*size, (r+1)*size), the last
may be short (rule 5); a served dataset has one line per instance and no header (rule 3).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from schemas.errors import SourceError
from tasks.condda.commands import Event, Limits, OpenSession, Policy, ProtocolRefusal, refused
from tasks.condda.domains import SHOWN_METADATA
from tasks.condda.test_files import TestFile, TestLibrary

# Names that end up as members of an archive: no separators, no leading dot.
_NAME = re.compile(r"[\w-][\w.\-]*")


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

    @property
    def begun(self) -> bool:
        """Whether a round was served or has results."""
        return bool(self.served or self.posted)

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


@dataclass(frozen=True)
class Rules:
    library: TestLibrary
    policy: Policy
    strict: bool
    now: str
    limits: Limits


def check_text(value: object, name: str) -> str:
    """A text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise refused("InvalidParams", f"{name} must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused("InvalidParams", f"{name} holds half a surrogate pair") from error
    return value


def check_texts(values: object, name: str) -> tuple[str, ...]:
    """A list of such texts."""
    if not isinstance(values, list | tuple):
        raise refused("InvalidParams", f"{name} must be a list")
    return tuple(check_text(value, name) for value in values)


def is_name(name: str, limits: Limits) -> bool:
    """Whether a name can safely be part of a file's name in an export."""
    return len(name) <= limits.id_length and _NAME.fullmatch(name) is not None


def check_name(name: str, what: str, limits: Limits) -> None:
    """Refuse a name that could not safely be part of a file's name in an export."""
    if not is_name(name, limits):
        raise refused(
            "InvalidName",
            f"{what} {name[:80]!r} is not a name of letters, digits, '_', '-' and '.', "
            f"at most {limits.id_length} long",
        )


def whole_round(number: Any) -> int:
    """A round's number, which comes as text from a query."""
    try:
        return int(number)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused("ValueError", f"round_id {str(number)[:80]!r} is no whole number") from error


def unknown_test(test: str) -> ProtocolRefusal:
    return refused("test_id_invalid", f"there is no test {test[:80]!r} to serve")


def open_test(state: SessionState, test: str) -> TestState:
    progress = state.test(test)
    if progress.completed:
        raise refused("TestCompleted", f"test {test} is completed in this session")
    return progress


def overrides(hints: Sequence[str]) -> dict[str, int]:
    """Metadata that hints of the form "key=number" replace, for keys that an agent may see."""
    replaced = {}
    for hint in hints:
        key, equals, number = hint.partition("=")
        if equals and key in SHOWN_METADATA:
            try:
                replaced[key] = int(number)
            except ValueError as error:
                raise refused(
                    "ValueError", f"hint {hint!r} is not of the form key=whole number"
                ) from error
    return replaced


def find_test(
    opened: SessionState | OpenSession,
    test: str,
    library: TestLibrary,
    *,
    truth_first: bool = True,
) -> TestFile:
    """A test that must have ground truth and metadata, and that must be readable.

    As published some calls look for the truth first, others for the metadata.
    """
    try:
        return library.load(test, opened.protocol, opened.domain)
    except SourceError as error:
        place = (test, opened.protocol, opened.domain)
        has_truth, has_metadata = library.has_truth(*place), library.has_metadata(*place)
        if has_truth and has_metadata:
            raise refused("SourceError", str(error)) from error
    if has_truth or not (truth_first or has_metadata):
        raise refused("metadata_not_found", f"test {test} has no metadata")
    raise unknown_test(test)


def load_test(
    state: SessionState, test: str, rules: Rules, *, truth_first: bool = True
) -> tuple[TestFile, dict[str, Any]]:
    """A test, and its metadata as the session sees it."""
    file = find_test(state, test, rules.library, truth_first=truth_first)
    return file, {**file.metadata, **overrides(state.hints), **state.fixed}


def lenient_metadata(state: SessionState, test: TestFile) -> dict[str, Any]:
    """Metadata for taking results in: a bad hint or round size must not refuse them."""
    metadata = dict(test.metadata)
    try:
        metadata.update(overrides(state.hints) | dict(state.fixed))
        metadata["round_size"] = round_size(metadata, test.test_id)
    except ProtocolRefusal:
        metadata.pop("round_size", None)
    return metadata


def round_size(metadata: Mapping[str, Any], test: str) -> int:
    size = whole(metadata, "round_size") if "round_size" in metadata else 0
    if size < 1:
        raise refused("no_defined_rounds", f"test {test} has no round_size of at least 1")
    return size


def known_classes(metadata: Mapping[str, Any]) -> int | None:
    """K of a test; newer files call it nonnovel_classes, older ones have numbers as text."""
    for key in ("known_classes", "nonnovel_classes"):
        if key in metadata:
            return whole(metadata, key)
    return None


def count_known(test: TestFile) -> int:
    """K, the number of known classes: what the metadata says, else the labels."""
    said = known_classes(test.metadata)
    if said is None:
        return max(1, int(test.labels.max(initial=0)) + 1 - test.domain.first_label)
    return max(1, said - test.domain.unknown_counted)


def whole(metadata: Mapping[str, Any], key: str) -> int:
    """A whole number of the metadata, which may be written as text."""
    try:
        return int(metadata[key])
    except (TypeError, ValueError) as error:
        raise refused(
            "ValueError", f"{key} of the metadata is {metadata[key]!r}, not a whole number"
        ) from error


def round_count(test: TestFile, size: int) -> int:
    """Rounds of `size` rows, the last one maybe short."""
    return -(-len(test.ids) // size)


def round_rows(test: TestFile, number: int, size: int) -> slice:
    """Rows of a round; none for a negative one."""
    return slice(number * size, (number + 1) * size) if number >= 0 else slice(0, 0)


def round_bytes(test: TestFile, number: int, size: int) -> bytes:
    """The dataset of one round; a lone newline where there are no rows, as published."""
    rows = round_rows(test, number, size)
    domain = test.domain
    if domain.served == ("instance_id",):
        return ("\n".join(test.ids[rows]) + "\n").encode(domain.encoding)
    quote = domain.quotechar
    columns = []
    for name in domain.served:
        cells = ["" if cell is None else str(cell) for cell in test.truth[name][rows]]
        if name in domain.served_quoted:
            cells = [quote + cell.replace(quote, quote * 2) + quote for cell in cells]
        columns.append(cells)
    lines = [",".join(cells) for cells in zip(*columns, strict=True)]
    return ("\n".join(lines) + "\n").encode(domain.encoding)
