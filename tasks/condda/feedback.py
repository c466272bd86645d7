"""Feedback (docs/condda.md, rule 6): which rows of a test an agent is told about, and what.

`give_feedback` decides a request in the order of the public server's checks; `_Question` is a
request that may be answered. Rows are rows of the test, and an answer is in their order. The score
of nlt is as published: each question adds to it the right flags and writers of the last lines
posted, each label told costs a point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.condda.commands import Decision, Feedback
from tasks.condda.domains import DOMAINS, RED_LIGHT, FeedbackType
from tasks.condda.lookup import Rules, known_classes, load_test, open_test, round_size, whole
from tasks.condda.rules import refused
from tasks.condda.session import Event, SessionState, TestState
from tasks.condda.test_files import TestFile


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
        raise refused("KeyError", "'post_results'")
    asked = _Question(kind, command, state, progress, test, metadata, rules)
    current = progress.last_round
    if rules.strict and asked.constrained and command.round not in (None, current):
        raise refused("NotLastRound", f"feedback is given on round {current}, the last one posted")
    left = asked.ids_left(progress.spent.get((current, command.type), 0))
    if not progress.has_posted("detection"):
        raise refused("DetectionPostRequired", "post detection results before asking for feedback")
    if not asked.declared and (rules.strict or not kind.undeclared):
        return Decision(answer=b"")
    told = asked.answer(asked.rows_asked() if command.ids else asked.rows_without_ids(), left)
    event = Event(
        *("feedback", rules.now, command.test, progress.attempt, current, command.type),
        detail={"count": told.count, "score": told.score, "asked": len(command.ids)},
    )
    return Decision((event,), told.text.encode())


@dataclass(frozen=True)
class _Told:
    """Answer lines, what they cost of the round's budget, and what the score gains by asking."""

    text: str
    count: int
    score: int = 0


@dataclass(frozen=True)
class _Question:
    """What is asked, of which test, and what the session has posted of it."""

    kind: FeedbackType
    command: Feedback
    session: SessionState
    posted: TestState
    test: TestFile
    metadata: Mapping[str, Any]
    rules: Rules

    @property
    def constrained(self) -> bool:
        """Whether feedback is on the last round only; the metadata may widen it to all."""
        return bool(self.metadata.get("feedback_constrained", True))

    @property
    def declared(self) -> bool:
        """Whether the agent has said that the world changed, or the red light has been passed.

        The threshold itself does not count as declared.
        """
        highest = self.posted.highest
        if highest is not None and highest > self.session.threshold:
            return True
        return RED_LIGHT in self.session.hints and self.posted.red_light_posted

    def ids_left(self, spent: int) -> int | None:
        """Ids that an answer may have; None is any number. A test without a budget allows none.

        As published some types are not cut to the budget, but asking again when it is spent is
        refused.
        """
        key = next((name for name in self.kind.budget if name in self.metadata), None)
        most = 0 if key is None else whole(self.metadata, key)
        free = self.kind.free_when_given and RED_LIGHT in self.session.hints
        cut = self.rules.strict or (self.kind.counted and not free)
        if spent >= most and (cut or spent):
            raise refused(
                "FeedbackBudgetExceeded",
                f"{spent} of {most} ids of {self.command.type} are used up",
            )
        return most - spent if cut else None

    @property
    def marks(self) -> Mapping[int, int]:
        return self.posted.marks.get(self.kind.result, {})

    def last_rows(self) -> list[int]:
        """The last round_size lines posted of the type, or all of them if it is widened."""
        if self.constrained:
            return [row for row in self.posted.last_rows.get(self.kind.result, []) if row >= 0]
        return list(self.marks)

    def rows_without_ids(self) -> list[int]:
        """Rows told of when no ids are asked."""
        marks, wrong_only = self.marks, self.kind.wrong_only
        return [
            row
            for row in self.last_rows()
            if not wrong_only or marks[row] < 0 or not marks[row] & 1
        ]

    def rows_asked(self) -> list[int]:
        """Rows of the ids that are asked and were seen in the session."""
        asked = self.test.rows(self.command.ids)
        size = round_size(self.metadata, self.command.test)

        def seen(row: int) -> bool:
            if row < 0:
                return False
            posted = not self.rules.strict and any(
                row in marks for marks in self.posted.marks.values()
            )
            return row // size in self.posted.served or posted

        hidden = [name for name, row in zip(self.command.ids, asked, strict=True) if not seen(row)]
        if hidden and self.rules.strict:
            raise refused(
                "FeedbackIdsNotServed", f"{hidden[0]!r} has not been served in this session"
            )
        return [row for row in asked if seen(row)]

    def answer(self, rows: Sequence[int], left: int | None) -> _Told:
        """Lines about `rows`, cut to the `left` ids of the budget."""
        if self.kind.answer == "accuracy":
            return _Told(f"accuracy,{self._accuracy()}\n", 1)
        if self.kind.answer == "points":
            gain = self._gain()
            return _Told(f"current_score,{self.posted.score + gain}\n", 1, gain)
        if self.kind.answer == "distance":
            last = self.last_rows()
            rows = [row for row in rows if row in last]
        rows = sorted(set(rows))[:left]
        values = zip(rows, self._values(rows), strict=True)
        lines = (f"{self.test.names[row]},{value}\n" for row, value in values)
        return _Told("".join(lines), len(rows), -self.kind.points * len(rows))

    def _gain(self) -> int:
        """Points of the last lines posted: one for a right flag, one for a right writer."""
        last = [self.marks[row] for row in set(self.last_rows())]
        if min(last, default=0) < 0:
            raise refused("InvalidTuple", f"a flag of {self.kind.result} is not 0 or 1")
        return sum(mark.bit_count() for mark in last)

    def _accuracy(self) -> float:
        result = self.kind.result
        if not self.posted.answered.get(result):
            raise refused(
                "feedback_type_invalid", f"no {result} of this test's instances was posted"
            )
        return self.posted.right.get(result, 0) / self.posted.answered[result]

    def _values(self, rows: list[int]) -> list[str]:
        if self.kind.answer == "distance":
            return [str(self.marks[row]) for row in rows]
        if self.kind.answer == "label":
            labels = self.test.truth[self.kind.columns[0]].gather(rows)
            known = known_classes(self.metadata)
            return [str(label if known is None else min(label, known)) for label in labels]
        # Older activity tests have no names: then nothing stands after the id, as published.
        present = [name for name in self.kind.columns if name in self.test.truth.columns]
        told = self.test.truth.select("instance_id", *present)[rows]
        return [
            ",".join("" if cell is None else str(cell) for cell in row[1:]) for row in told.rows()
        ]
