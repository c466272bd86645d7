"""The CONDDA/OND protocol as a pure machine: state and command in, events and answer out.

`decide` does no input or output and has no clock; what it lets happen it returns as events, which
`session.evolve` adds to the state. CONDDA rules 1 to 7 (life cycle, rounds, feedback) and 10
(errors).

The policy `published` takes all that the published client sends and answers as the public server
was seen to; docs/condda.md lists where it differs, on purpose. `evaluation` also refuses what the
protocol forbids: rounds out of order, results that were not asked for, foreign ids, wrong columns,
values that are no probabilities, feedback on instances that are not answered yet; what the operator
has not allowed; and tests that cannot be measured, or results that would leave one so: each round
needs all that the test is measured by before the next one, feedback or the end.

Posts: all files of a post are taken or none; the same file again, for the same round and type, is a
repeated request and makes no event. Feedback: rows are rows of the test, an answer is in their
order. The score of nlt is as published: each question adds to it the right flags and writers of the
last lines posted, each label told costs a point.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from tasks.condda import commands
from tasks.condda.commands import Command, Decision, Event, Limits, Policy, ProtocolRefusal, refused
from tasks.condda.domains import (
    DOMAINS,
    MEASURED,
    PROTOCOLS,
    RED_LIGHT,
    SHOWN_METADATA,
    TELLING_METADATA,
    FeedbackType,
    Values,
)
from tasks.condda.posts import OUTSIDE, ResultFile, parse, remember
from tasks.condda.session import (
    Rules,
    SessionState,
    TestState,
    check_name,
    count_known,
    find_test,
    known_classes,
    lenient_metadata,
    load_test,
    open_test,
    round_bytes,
    round_count,
    round_rows,
    round_size,
    unknown_test,
    whole,
    whole_round,
)
from tasks.condda.test_files import TestFile, TestLibrary


def decide(
    state: SessionState | None,
    command: Command,
    library: TestLibrary,
    policy: Policy,
    now: datetime,
    *,
    limits: Limits | None = None,
) -> Decision:
    """Decide one command; `state` is None for a session that does not exist (yet)."""
    rules = Rules(library, policy, policy.strict, now.isoformat(), limits or Limits())
    if isinstance(command, commands.OpenSession):
        return _open(command, rules)
    test, number = getattr(command, "test", None), getattr(command, "round", 0)
    # The last round posted is meant where feedback names none.
    if type(number) is not int and (number is not None or type(command) is not commands.Feedback):
        try:
            number = whole_round(number)
        except ProtocolRefusal:
            if isinstance(command, commands.Dataset):
                # The public server looks the session and the test up before it reads the number.
                decide(state, commands.Metadata(command.test), library, policy, now, limits=limits)
            raise
        command = replace(command, round=number)  # type: ignore[call-arg]
    if state is None:
        return _unknown_session(command, rules)
    # Evaluation, progress and export still answer when a session has ended.
    if state.terminated and not isinstance(command, commands.CheckEvaluable | commands.Status):
        raise refused("SessionEnded", f"session {state.session} has ended; open one")
    if test is not None:
        check_name(test, "test", rules.limits)
        if rules.strict and test not in state.tests:
            raise refused(
                "test_not_in_session", f"test {test} was not named when the session was opened"
            )
    if number is not None and abs(number) > rules.limits.round_id:
        raise refused("TooLarge", f"no test has a round {str(number)[:40]}")
    return _HANDLERS[type(command)](state, command, rules)


def _unknown_session(command: Command, rules: Rules) -> Decision:
    if not rules.strict:
        if isinstance(command, commands.CompleteTest | commands.Terminate):
            return Decision()
        if isinstance(command, commands.Post):
            raise refused("KeyError", "'created'")
        if isinstance(command, commands.Latest):
            raise refused("KeyError", "'tests'")
        if isinstance(command, commands.CheckEvaluable):
            raise _in_process(command.test)
    raise refused("session_id_invalid", "there is no session with this id; open one first")


def _open(command: commands.OpenSession, rules: Rules) -> Decision:
    limits = rules.limits
    if not command.tests:
        raise refused("EmptyFile", "no test ids were given")
    for found, most, what in (
        (len(command.tests), limits.session_tests, "tests"),
        (len(command.hints), limits.session_hints, "hints"),
        (max(map(len, (command.detector, *command.hints))), limits.id_length, "characters"),
    ):
        if found > most:
            raise refused("TooLarge", f"a session has {found} {what}, limit {most}")
    for test in command.tests:
        if not rules.library.has_truth(test, command.protocol, command.domain):
            raise unknown_test(test)
    if command.protocol not in PROTOCOLS or command.domain not in DOMAINS:
        raise refused(
            "BadDomain", f"{command.protocol}/{command.domain} is not a protocol and a domain"
        )
    if not math.isfinite(command.threshold):
        raise refused("InvalidThreshold", "detection_threshold is not finite")
    if rules.strict:
        if len(set(command.tests)) != len(command.tests):
            raise refused("RepeatedTests", "a test id was given twice")
        _check_asked(command, rules.policy)
        for test in command.tests:
            _check_runnable(find_test(command, test, rules.library))
    lists = {"tests": list(command.tests), "hints": list(command.hints)}
    detail = {**vars(command), **lists, "fixed": rules.policy.fixed}
    return Decision((Event("opened", rules.now, detail=detail),))


def _check_asked(command: commands.OpenSession, policy: Policy) -> None:
    """Refuse what the operator decides."""
    allowed = (RED_LIGHT,) if policy.red_light else ()
    for hint in command.hints:
        if hint not in allowed:
            raise refused(
                "HintNotAllowed",
                f"hint {hint[:80]!r}: round size, budgets and hints are the operator's here; ask "
                f"for {' or '.join(allowed) or 'none'}",
            )
    if command.threshold != policy.detection_threshold:
        raise refused(
            "InvalidThreshold",
            f"detection_threshold is {policy.detection_threshold:g} here, not {command.threshold}",
        )


def _check_runnable(test: TestFile) -> None:
    """Refuse what could not be served or measured: opening it would cost its owner an attempt."""
    round_size(test.metadata, test.test_id)
    if not test.ids:
        raise refused("no_defined_rounds", f"test {test.test_id} has no instances")
    if known_classes(test.metadata) is None:
        raise refused("no_known_classes", f"test {test.test_id} does not say its known_classes")


def _require_results(
    state: SessionState, test: str, rounds: Iterable[int], reason: str, before: str
) -> None:
    """Refuse what may only be asked when these rounds have all that the test is measured by.

    Under the red light detection is not asked for: a reaction baseline posts none, in any round.
    """
    progress = state.test(test)
    detects = RED_LIGHT not in state.hints or progress.has_posted("detection")
    kinds = (*(("detection",) if detects else ()), MEASURED[state.protocol])
    for number in rounds:
        missing = [kind for kind in kinds if kind not in progress.posted.get(number, {})]
        if missing:
            raise refused(reason, f"post {' and '.join(missing)} of round {number} {before}")


def _metadata(state: SessionState, command: commands.Metadata, rules: Rules) -> Decision:
    _, metadata = load_test(state, command.test, rules, truth_first=False)
    shown = {*SHOWN_METADATA, *((RED_LIGHT,) if RED_LIGHT in state.hints else ())}
    if rules.strict:
        shown -= set(TELLING_METADATA)
    return Decision(answer={key: metadata[key] for key in metadata if key in shown})


def _serve(state: SessionState, command: commands.Dataset, rules: Rules) -> Decision:
    progress = open_test(state, command.test)
    test, metadata = load_test(state, command.test, rules)
    size = round_size(metadata, command.test)
    if rules.strict:
        _check_round_order(state, command, round_count(test, size))
    events: list[Event] = []
    attempt = progress.attempt
    served = progress.served
    # Nothing is lost when only round 0 was served: then this is a repeated request.
    if not rules.strict and command.round == 0 and (progress.posted or served - {0}):
        attempt, served = attempt + 1, set()
        events.append(Event("restarted", rules.now, command.test, attempt))
    if command.round * size >= len(test.ids):
        raise refused("EndOfDataset", f"test {command.test} has no round {command.round}")
    if command.round >= 0 and command.round not in served:
        events.append(Event("served", rules.now, command.test, attempt, command.round))
    return Decision(tuple(events), round_bytes(test, command.round, size))


def _check_round_order(state: SessionState, command: commands.Dataset, rounds: int) -> None:
    served = state.test(command.test).served
    following = len(served)
    if command.round in served or (command.round >= rounds == following):
        return
    if command.round != following:
        raise refused(
            "RoundOrder", f"round {command.round} was asked for, round {following} is next"
        )
    over = range(max(following - 1, 0), following)
    _require_results(state, command.test, over, "RoundOrder", "before the next round")


def _complete(state: SessionState, command: commands.CompleteTest, rules: Rules) -> Decision:
    progress = open_test(state, command.test)
    if rules.strict:
        test, metadata = load_test(state, command.test, rules)
        rounds = round_count(test, round_size(metadata, command.test))
        if len(progress.served) < rounds:
            raise refused(
                "TestIncomplete",
                f"{len(progress.served)} of {rounds} rounds of {command.test} were served; go on, "
                "or end the session to give up",
            )
        whole_test = f"before test {command.test} is completed, or end the session to give up"
        _require_results(state, command.test, range(rounds), "TestIncomplete", whole_test)
    return Decision((Event("completed", rules.now, command.test, progress.attempt),))


def _evaluable(state: SessionState, command: commands.CheckEvaluable, rules: Rules) -> Decision:
    if not command.devmode and not state.test(command.test).completed:
        raise _in_process(command.test)
    return Decision()


def _terminate(state: SessionState, command: commands.Terminate, rules: Rules) -> Decision:
    return Decision((Event("terminated", rules.now),))


def _latest(state: SessionState, command: commands.Latest, rules: Rules) -> Decision:
    if not state.finished and not rules.strict:
        raise refused("KeyError", "'tests'")
    return Decision(answer={"finished_tests": list(state.finished)})


def _resume(state: SessionState, command: commands.Resume, rules: Rules) -> Decision:
    test, metadata = load_test(state, command.test, rules)
    rounds = round_count(test, round_size(metadata, command.test))
    progress = state.test(command.test)
    last = max(progress.served, default=-1)
    following = last + 1 if last < 0 or last in progress.posted else last
    return Decision(
        answer={
            "test_id": command.test,
            "next_round": None if progress.completed or following >= rounds else following,
            "rounds": rounds,
            "posted": sorted(progress.posted.get(following, {})),
            "completed": progress.completed,
        }
    )


def _status(state: SessionState, command: commands.Status, rules: Rules) -> Decision:
    tests = {}
    for name in dict.fromkeys((*state.tests, *state.progress)):
        progress = state.test(name)
        counts = {"served": len(progress.served), "posted": len(progress.posted)}
        tests[name] = {**counts, "attempt": progress.attempt, "completed": progress.completed}
    return Decision(
        answer={
            "session_id": state.session,
            "protocol": state.protocol,
            "domain": state.domain,
            "detector": state.detector,
            "owner": state.owner,
            "hints": list(state.hints),
            "detection_threshold": state.threshold,
            "opened": state.opened,
            "terminated": state.terminated,
            "tests": tests,
        }
    )


def _in_process(test: str) -> ProtocolRefusal:
    return refused("TestInProcess", f"test {test} is not completed")


# ---------------------------------------------------------------- posts


def take_results(state: SessionState, command: commands.Post, rules: Rules) -> Decision:
    progress = open_test(state, command.test)
    if not command.results:
        raise refused("MissingParamsError", "no result file was given")
    post = _Posted(command, state, progress, *_posted_test(state, command.test, rules))
    before = progress.posted.get(command.round, {})
    events = []
    for kind, body in command.results.items():
        check_name(kind, "result type", rules.limits)
        sha256 = hashlib.sha256(body).hexdigest()
        if sha256 in before.get(kind, ()):
            continue
        if kind in before and (rules.strict or kind == "detection"):
            raise refused(
                "DetectionRepost" if kind == "detection" else "ResultRepost",
                f"{kind} of round {command.round} was posted before with other content",
            )
        result = parse(body, rules.limits)
        if rules.strict:
            post.check(kind, result)
        facts = remember(result, DOMAINS[state.domain].results.get(kind), post.test)
        facts["round_size"] = post.metadata.get("round_size", 0)
        place = (command.test, progress.attempt, command.round, kind)
        events.append(Event("posted", rules.now, *place, sha256, facts, body))
    return Decision(tuple(events))


def _posted_test(
    state: SessionState, name: str, rules: Rules
) -> tuple[TestFile | None, Mapping[str, Any]]:
    """The test of a post; none is known, and nothing of it, where anything may be posted."""
    if rules.strict:
        test, metadata = load_test(state, name, rules)
        return test, {**metadata, "round_size": round_size(metadata, name)}
    try:
        file = find_test(state, name, rules.library)
    except ProtocolRefusal as refusal:
        if refusal.reason == "SourceError":
            raise
        return None, {}
    return file, lenient_metadata(state, file)


@dataclass(frozen=True)
class _Posted:
    """A post, and what it is checked against where the policy is strict."""

    command: commands.Post
    session: SessionState
    progress: TestState
    test: TestFile | None
    metadata: Mapping[str, Any]

    def check(self, kind: str, result: ResultFile) -> None:
        """Refuse a file whose type, ids, columns or values the protocol forbids."""
        values = DOMAINS[self.session.domain].results.get(kind)
        if values is None:
            raise refused("UnknownResultType", f"{kind} is no result type of {self.session.domain}")
        _check_ids(kind, result.ids, self._expected_names(kind))
        width = int(result.widths.max(initial=0))
        narrowest = int(result.widths.min(initial=width))
        if narrowest < width:
            raise refused("WrongColumns", f"lines of {kind} have {narrowest} to {width} values")
        least, most = self._columns_allowed(values, self.progress.columns.get(kind))
        if width < least or (most is not None and width > most):
            allowed = (
                f"{least} or more" if most is None else f"{least}" + f" to {most}" * (most > least)
            )
            raise refused(
                "WrongColumns", f"{kind} has {width} values on a line, expected {allowed}"
            )
        if values == "text":
            return
        if values == "labels" and result.fault in (None, OUTSIDE):
            if not np.isin(result.first, (0.0, 1.0)).all():
                raise refused("OutOfRange", f"a flag of {kind} is neither 0 nor 1")
        elif result.fault is not None:
            raise refused(result.fault[0], f"{kind} holds {result.fault[1]}")

    def _expected_names(self, kind: str) -> Sequence[str]:
        """Names of the rows that a file must answer, in order: those of the round just served.

        OND characterization is posted once, after the last round, as round 0 for the whole test.
        """
        assert self.test is not None
        number, size, served = self.command.round, self.metadata["round_size"], self.progress.served
        if self.session.protocol == "OND" and kind == "characterization":
            if number != 0 or len(served) < round_count(self.test, size):
                raise refused(
                    "RoundOrder",
                    "OND characterization is posted as round 0 when all rounds have been served",
                )
            return self.test.names
        if number not in served:
            raise refused("RoundNotServed", f"ask for the data of round {number} before posting")
        if number != len(served) - 1:
            raise refused("RoundOrder", f"round {number} is over, {len(served) - 1} is open")
        if kind == "detection" and number and kind not in self.progress.posted.get(0, {}):
            raise refused("RoundOrder", "round 0 has no detection, so no round can have one")
        return self.test.names[round_rows(self.test, number, size)]

    def _columns_allowed(self, values: Values, before: int | None) -> tuple[int, int | None]:
        """Least and greatest number of values on a line; `before` is what earlier files had.

        A file has as many as the first of its type, but what CONDDA discovers may grow.
        known_classes is not to be trusted to one (CONDDA rule 3): a classification may have K or
        K+1 columns, but an unknown column that is first is never left out.
        """
        assert self.test is not None
        domain, known = self.test.domain, count_known(self.test)
        if values == "characterization":
            # No bound by the number of novel classes: being refused would tell it.
            least = known + 1 if self.session.protocol == "CONDDA" else 1
            return max(least, before or 0), None
        if before is not None:
            return before, before
        return {
            "detection": (1, 2),
            "text": (1, 1),
            "labels": (2, 2),
            "classification": (known + domain.first_label, known + 1 + domain.unknown_counted),
        }[values]


def _check_ids(kind: str, ids: list[str], expected: Sequence[str]) -> None:
    if ids == list(expected):
        return
    foreign = next((name for name in ids if name not in set(expected)), None)
    if foreign is not None:
        raise refused("ForeignIds", f"{kind} names {foreign!r}, which is not of this round")
    if len(set(ids)) != len(ids):
        raise refused("RepeatedIds", f"{kind} has an instance twice; post one line for each")
    if len(ids) != len(expected):
        raise refused(
            "MissingIds", f"{kind} has {len(ids)} of the {len(expected)} instances served"
        )
    raise refused("WrongOrder", f"{kind} is not in the order in which the instances were served")


# ---------------------------------------------------------------- feedback


def give_feedback(state: SessionState, command: commands.Feedback, rules: Rules) -> Decision:
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
        if rules.strict:
            raise refused("ResultsMissing", "post results of a round before asking for feedback")
        raise refused("KeyError", "'post_results'")
    asked = _Question(kind, command, state, progress, test, metadata, rules)
    current = progress.last_round
    if rules.strict and asked.constrained and command.round not in (None, current):
        raise refused("NotLastRound", f"feedback is given on round {current}, the last one posted")
    left = asked.ids_left(progress.spent.get((current, command.type), 0))
    may_lack = rules.strict and RED_LIGHT in state.hints  # its instance declares novelty
    if not (progress.has_posted("detection") or may_lack):
        raise refused("DetectionPostRequired", "post detection results before asking for feedback")
    if rules.strict:
        before = "before asking for feedback"
        _require_results(state, command.test, [current], "ResultsMissing", before)
    if not asked.declared and (rules.strict or not kind.undeclared):
        return Decision(answer=b"")
    rows = asked.rows_asked() if command.ids else asked.rows_without_ids()
    text, count, score = asked.answer(rows, left)
    event = Event(
        *("feedback", rules.now, command.test, progress.attempt, current, command.type),
        detail={"count": count, "score": score, "asked": len(command.ids)},
    )
    return Decision((event,), text.encode())


@dataclass(frozen=True)
class _Question:
    """What is asked, of which test, and what the session has posted of it."""

    kind: FeedbackType
    command: commands.Feedback
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
        if RED_LIGHT not in self.session.hints or self.posted.red_light_posted:
            return RED_LIGHT in self.session.hints
        # As published only detection passes it; who may leave that out passes it with any results.
        light = self.test.rows([self.test.red_light or ""])[0] if self.rules.strict else -1
        return light >= 0 and any(light in marks for marks in self.posted.marks.values())

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
        if not self.kind.wrong_only:
            return self.last_rows()
        return [row for row in self.last_rows() if self.marks[row] < 0 or not self.marks[row] & 1]

    def rows_asked(self) -> list[int]:
        """Rows of the ids that are asked and were seen in the session; where the policy is strict,
        that are answered: what is told of a row must not help to answer it."""
        asked = self.test.rows(self.command.ids)
        size = round_size(self.metadata, self.command.test)

        def seen(row: int) -> bool:
            if row < 0:
                return False
            if self.rules.strict:
                return self.kind.result in self.posted.posted.get(row // size, ())
            marked = any(row in marks for marks in self.posted.marks.values())
            return marked or row // size in self.posted.served

        hidden = [name for name, row in zip(self.command.ids, asked, strict=True) if not seen(row)]
        if hidden and self.rules.strict:
            raise refused(
                "FeedbackIdsNotServed",
                f"{hidden[0]!r} is of no round with {self.kind.result} in this session",
            )
        return [row for row in asked if seen(row)]

    def answer(self, rows: Sequence[int], left: int | None) -> tuple[str, int, int]:
        """Lines about `rows`, cut to the `left` ids of the budget; what they cost of it; what the
        score gains by asking."""
        if self.kind.answer == "accuracy":
            return f"accuracy,{self._accuracy()}\n", 1, 0
        if self.kind.answer == "points":
            gain = self._gain()
            return f"current_score,{self.posted.score + gain}\n", 1, gain
        if self.kind.answer == "distance":
            last = self.last_rows()
            rows = [row for row in rows if row in last]
        rows = sorted(set(rows))[:left]
        values = zip(rows, self._values(rows), strict=True)
        lines = (f"{self.test.names[row]},{value}\n" for row, value in values)
        return "".join(lines), len(rows), -self.kind.points * len(rows)

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
        cells = self.test.truth.select(present)[rows].rows() if present else [()] * len(rows)
        return [",".join("" if cell is None else str(cell) for cell in row) for row in cells]


_HANDLERS: dict[type, Callable[[SessionState, Any, Rules], Decision]] = {
    commands.Metadata: _metadata,
    commands.Dataset: _serve,
    commands.Post: take_results,
    commands.Feedback: give_feedback,
    commands.CompleteTest: _complete,
    commands.CheckEvaluable: _evaluable,
    commands.Terminate: _terminate,
    commands.Latest: _latest,
    commands.Resume: _resume,
    commands.Status: _status,
}
