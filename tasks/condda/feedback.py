"""Feedback (docs/condda.md, rule 6): which rows of a test an agent is told about, and what.

`give_feedback` decides a request in the order of the public server's checks; `gate` says whether
novelty has been declared, `answer` gives the lines and what they cost. Rows are rows of the test,
and an answer is in their order. Points of nlt: right answers posted minus labels bought (the public
description names the cost only).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.condda.commands import Decision, Feedback
from tasks.condda.domains import DOMAINS, RED_LIGHT, FeedbackType
from tasks.condda.lookup import (
    Rules,
    known_classes,
    load_test,
    open_test,
    round_size,
    session_metadata,
    whole,
)
from tasks.condda.rules import ProtocolRefusal
from tasks.condda.session import Event, SessionState, TestState
from tasks.condda.test_files import TestFile


@dataclass(frozen=True)
class Told:
    """Answer lines, and what they cost: ids of the round's budget, points."""

    text: str
    count: int
    points: int


def declared(session: SessionState, test: TestState) -> bool:
    """Whether the agent has said that the world changed, or the red light has been passed.

    The threshold itself does not count as declared.
    """
    if test.highest is not None and test.highest > session.threshold:
        return True
    return RED_LIGHT in session.hints and test.red_light_posted


def budget(kind: FeedbackType, session: SessionState, metadata: Mapping[str, Any]) -> int | None:
    """Ids a round; None is unlimited. A test that names no budget allows none."""
    if not kind.budget or (kind.free_when_given and RED_LIGHT in session.hints):
        return None
    key = next((name for name in kind.budget if name in metadata), None)
    return 0 if key is None else whole(metadata, key)


def gate(name: str, kind: FeedbackType, session: SessionState, test: TestState) -> bool:
    """Whether to answer; False is an empty answer."""
    if kind.undeclared == "ungated":
        return True
    if not test.has_posted("detection"):
        raise ProtocolRefusal(
            400, "DetectionPostRequired", "post detection results before asking for feedback"
        )
    if declared(session, test) or kind.undeclared == "answer":
        return True
    if kind.undeclared == "refuse":
        raise ProtocolRefusal(
            400, "NoveltyDetectionRequired", f"declare novelty before asking for {name} feedback"
        )
    return False


def rows_without_ids(kind: FeedbackType, test: TestState, metadata: Mapping[str, Any]) -> list[int]:
    """Rows told of when no ids are asked: the last round_size lines posted of the type.

    Metadata `feedback_constrained: false` widens that to all lines posted.
    """
    rows = _last_round(test, kind.result, metadata)
    if kind.wrong_only:
        marks = test.marks.get(kind.result, {})
        rows = [row for row in rows if marks[row] != 1]
    return rows


def _last_round(test: TestState, result: str, metadata: Mapping[str, Any]) -> list[int]:
    if metadata.get("feedback_constrained", True):
        return [row for row in test.last_rows.get(result, []) if row >= 0]
    return list(test.marks.get(result, {}))


def answer(
    kind: FeedbackType,
    rows: Sequence[int],
    left: int | None,
    state: TestState,
    test: TestFile,
    metadata: Mapping[str, Any],
) -> Told:
    """Lines about `rows`, cut to the `left` ids of the budget."""
    if kind.answer == "accuracy":
        return Told(f"accuracy,{_accuracy(kind, state)}\n", 1, 0)
    if kind.answer == "points":
        return Told(f"current_score,{state.right.get(kind.result, 0) - state.points}\n", 1, 0)
    if kind.answer == "distance":
        told = _last_round(state, kind.result, metadata)
        rows = [row for row in rows if row in told]
    rows = sorted(set(rows))[:left]
    values = _values(kind, rows, state, test, metadata)
    lines = (f"{test.names[row]},{value}\n" for row, value in zip(rows, values, strict=True))
    return Told("".join(lines), len(rows), kind.points * len(rows))


def _accuracy(kind: FeedbackType, state: TestState) -> float:
    answered = state.answered.get(kind.result, 0)
    if not answered:
        raise ProtocolRefusal(
            400, "feedback_type_invalid", f"no {kind.result} of this test's instances was posted"
        )
    return state.right.get(kind.result, 0) / answered


def _values(
    kind: FeedbackType,
    rows: list[int],
    state: TestState,
    test: TestFile,
    metadata: Mapping[str, Any],
) -> list[str]:
    if kind.answer == "distance":
        return [str(state.marks[kind.result][row]) for row in rows]
    if kind.answer == "label":
        labels = test.truth[kind.columns[0]].gather(rows)
        known = known_classes(metadata)
        return [str(label if known is None else min(label, known)) for label in labels]
    # Older activity tests have no names: then nothing stands after the id, as published.
    present = [name for name in kind.columns if name in test.truth.columns]
    told = test.truth.select("instance_id", *present)[rows]
    return [",".join("" if cell is None else str(cell) for cell in row[1:]) for row in told.rows()]


def give_feedback(state: SessionState, command: Feedback, rules: Rules) -> Decision:
    if len(command.ids) > rules.limits.feedback_ids:
        raise ProtocolRefusal(
            400, "TooLarge", f"{len(command.ids)} ids asked, limit {rules.limits.feedback_ids}"
        )
    metadata = session_metadata(state, command.test, rules)
    progress = open_test(state, command.test)
    kind = DOMAINS[state.domain].feedback.get(command.type)
    if kind is None:
        raise ProtocolRefusal(
            400, "InvalidFeedbackType", f"{state.domain} has no {command.type} feedback"
        )
    if progress.last_round is None:
        raise ProtocolRefusal(500, "KeyError", "'post_results'")
    current = progress.last_round
    _check_feedback_round(command, current, metadata, rules)
    most = budget(kind, state, metadata)
    spent = progress.spent.get((current, command.type), 0)
    if most is not None and spent >= most:
        raise ProtocolRefusal(
            400, "FeedbackBudgetExceeded", f"{spent} of {most} ids of {command.type} are used up"
        )
    test = load_test(state, command.test, rules)[0]
    if not gate(command.type, kind, state, progress):
        return Decision(answer=b"")
    if command.ids:
        rows = _asked_rows(command, progress, test, metadata, rules)
    else:
        rows = rows_without_ids(kind, progress, metadata)
    left = None if most is None else most - spent
    told = answer(kind, rows, left, progress, test, metadata)
    event = Event(
        *("feedback", rules.now, command.test, progress.attempt, current, command.type),
        detail={"count": told.count, "points": told.points, "asked": len(command.ids)},
    )
    return Decision((event,), told.text.encode())


def _check_feedback_round(
    command: Feedback, current: int, metadata: Mapping[str, Any], rules: Rules
) -> None:
    if command.round is None or command.round == current or not rules.strict:
        return
    if metadata.get("feedback_constrained", True):
        raise ProtocolRefusal(
            400, "NotLastRound", f"feedback is given on round {current}, the last one posted"
        )


def _asked_rows(
    command: Feedback,
    progress: TestState,
    test: TestFile,
    metadata: Mapping[str, Any],
    rules: Rules,
) -> list[int]:
    asked = test.rows(command.ids)
    if rules.answer_future_ids:
        return [row for row in asked if row >= 0]
    size = round_size(metadata, command.test)

    def seen(row: int) -> bool:
        if row < 0:
            return False
        posted = not rules.strict and any(row in marks for marks in progress.marks.values())
        return row // size in progress.served or posted

    hidden = [name for name, row in zip(command.ids, asked, strict=True) if not seen(row)]
    if hidden and rules.strict:
        raise ProtocolRefusal(
            400, "FeedbackIdsNotServed", f"{hidden[0]!r} has not been served in this session"
        )
    return [row for row in asked if seen(row)]
