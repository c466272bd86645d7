"""Feedback (docs/condda.md, rule 6): which rows of a test an agent is told about, and what.

`give_feedback` decides a request in the order of the public server's checks; `gate` says whether
novelty has been declared, `answer` gives the lines and what they cost. Rows are rows of the test,
and an answer is in their order. The score of nlt is as published: each question adds to it the
right flags and writers of the last lines posted, each label told costs a point.
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
    refused,
    round_size,
    whole,
)
from tasks.condda.rules import ProtocolRefusal
from tasks.condda.session import Event, SessionState, TestState
from tasks.condda.test_files import TestFile


@dataclass(frozen=True)
class Told:
    """Answer lines, what they cost of the round's budget, and what the score gains by asking."""

    text: str
    count: int
    score: int = 0


def declared(session: SessionState, test: TestState) -> bool:
    """Whether the agent has said that the world changed, or the red light has been passed.

    The threshold itself does not count as declared.
    """
    if test.highest is not None and test.highest > session.threshold:
        return True
    return RED_LIGHT in session.hints and test.red_light_posted


def ids_left(
    command: Feedback, spent: int, session: SessionState, metadata: Mapping[str, Any], rules: Rules
) -> int | None:
    """Ids that an answer may have; None is any number. A test that names no budget allows none.

    As published some types are not cut to the budget, but asking again when it is spent is refused.
    """
    kind = DOMAINS[session.domain].feedback[command.type]
    key = next((name for name in kind.budget if name in metadata), None)
    most = 0 if key is None else whole(metadata, key)
    given = kind.free_when_given and RED_LIGHT in session.hints
    cut = rules.strict or (kind.counted and not given)
    if spent >= most and (cut or spent):
        raise refused(
            "FeedbackBudgetExceeded", f"{spent} of {most} ids of {command.type} are used up"
        )
    return most - spent if cut else None


def gate(kind: FeedbackType, session: SessionState, test: TestState, rules: Rules) -> bool:
    """Whether to answer; False is an empty answer."""
    if not test.has_posted("detection"):
        raise refused("DetectionPostRequired", "post detection results before asking for feedback")
    return declared(session, test) or (kind.undeclared == "answer" and not rules.strict)


def rows_without_ids(kind: FeedbackType, test: TestState, metadata: Mapping[str, Any]) -> list[int]:
    """Rows told of when no ids are asked: the last round_size lines posted of the type.

    Metadata `feedback_constrained: false` widens that to all lines posted.
    """
    rows = _last_round(test, kind.result, metadata)
    if kind.wrong_only:
        marks = test.marks.get(kind.result, {})
        rows = [row for row in rows if marks[row] < 0 or not marks[row] & 1]
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
        return Told(f"accuracy,{_accuracy(kind, state)}\n", 1)
    if kind.answer == "points":
        gain = _gain(kind, state, metadata)
        return Told(f"current_score,{state.score + gain}\n", 1, gain)
    if kind.answer == "distance":
        told = _last_round(state, kind.result, metadata)
        rows = [row for row in rows if row in told]
    rows = sorted(set(rows))[:left]
    values = _values(kind, rows, state, test, metadata)
    lines = (f"{test.names[row]},{value}\n" for row, value in zip(rows, values, strict=True))
    return Told("".join(lines), len(rows), -kind.points * len(rows))


def _gain(kind: FeedbackType, state: TestState, metadata: Mapping[str, Any]) -> int:
    """Points of the last lines posted: one for a right flag, one for a right writer."""
    marks = state.marks.get(kind.result, {})
    last = [marks[row] for row in set(_last_round(state, kind.result, metadata))]
    if min(last, default=0) < 0:
        raise refused("InvalidTuple", f"a flag of {kind.result} is not 0 or 1")
    return sum(mark.bit_count() for mark in last)


def _accuracy(kind: FeedbackType, state: TestState) -> float:
    answered = state.answered.get(kind.result, 0)
    if not answered:
        raise refused(
            "feedback_type_invalid", f"no {kind.result} of this test's instances was posted"
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
        raise refused(
            "TooLarge", f"{len(command.ids)} ids asked, limit {rules.limits.feedback_ids}"
        )
    test, metadata = load_test(state, command.test, rules, truth_first=False)
    progress = open_test(state, command.test)
    kind = DOMAINS[state.domain].feedback.get(command.type)
    if kind is None:
        raise refused("InvalidFeedbackType", f"{state.domain} has no {command.type} feedback")
    if progress.last_round is None:
        raise ProtocolRefusal(500, "KeyError", "'post_results'")
    current = progress.last_round
    _check_feedback_round(command, current, metadata, rules)
    spent = progress.spent.get((current, command.type), 0)
    left = ids_left(command, spent, state, metadata, rules)
    if not gate(kind, state, progress, rules):
        return Decision(answer=b"")
    if command.ids:
        rows = _asked_rows(command, progress, test, metadata, rules)
    else:
        rows = rows_without_ids(kind, progress, metadata)
    told = answer(kind, rows, left, progress, test, metadata)
    event = Event(
        *("feedback", rules.now, command.test, progress.attempt, current, command.type),
        detail={"count": told.count, "score": told.score, "asked": len(command.ids)},
    )
    return Decision((event,), told.text.encode())


def _check_feedback_round(
    command: Feedback, current: int, metadata: Mapping[str, Any], rules: Rules
) -> None:
    if command.round is None or command.round == current or not rules.strict:
        return
    if metadata.get("feedback_constrained", True):
        raise refused("NotLastRound", f"feedback is given on round {current}, the last one posted")


def _asked_rows(
    command: Feedback,
    progress: TestState,
    test: TestFile,
    metadata: Mapping[str, Any],
    rules: Rules,
) -> list[int]:
    asked = test.rows(command.ids)
    size = round_size(metadata, command.test)

    def seen(row: int) -> bool:
        if row < 0:
            return False
        posted = not rules.strict and any(row in marks for marks in progress.marks.values())
        return row // size in progress.served or posted

    hidden = [name for name, row in zip(command.ids, asked, strict=True) if not seen(row)]
    if hidden and rules.strict:
        raise refused("FeedbackIdsNotServed", f"{hidden[0]!r} has not been served in this session")
    return [row for row in asked if seen(row)]
