"""The CONDDA/OND protocol as a pure machine: state and command in, events and answer out.

`decide` does no input or output and has no clock; what it lets happen it returns as events, which
`session.evolve` adds to the state. CONDDA rules 1 to 7 (life cycle, rounds, feedback) and 10
(errors); `posts` and `feedback` hold those of the two long commands.

The policy `published` takes all that the published client sends and answers as the public server
was seen to; docs/condda.md lists where it differs, on purpose. `evaluation` also refuses what the
protocol forbids: rounds out of order, results that were not asked for, foreign ids, wrong columns,
values that are no probabilities, feedback on instances that were not served; and what the operator
has not allowed.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from tasks.condda import commands
from tasks.condda.commands import Command, Decision
from tasks.condda.domains import DOMAINS, PROTOCOLS, RED_LIGHT, SHOWN_METADATA, TELLING_METADATA
from tasks.condda.feedback import give_feedback
from tasks.condda.lookup import (
    Rules,
    load_test,
    open_test,
    round_bytes,
    round_count,
    round_size,
    unknown_test,
    whole_round,
)
from tasks.condda.posts import check_name, take_results
from tasks.condda.rules import Limits, Policy, ProtocolRefusal, refused
from tasks.condda.session import Event, SessionState, TestState
from tasks.condda.test_files import TestLibrary


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
        _check_round_order(command, progress, round_count(test, size))
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


def _check_round_order(command: commands.Dataset, progress: TestState, rounds: int) -> None:
    following = len(progress.served)
    if command.round in progress.served or (command.round >= rounds == following):
        return
    if command.round != following:
        raise refused(
            "RoundOrder", f"round {command.round} was asked for, round {following} is next"
        )
    if following and following - 1 not in progress.posted:
        raise refused("RoundOrder", f"post results of round {following - 1} before the next round")


def _complete(state: SessionState, command: commands.CompleteTest, rules: Rules) -> Decision:
    progress = open_test(state, command.test)
    if rules.strict:
        test, metadata = load_test(state, command.test, rules)
        rounds = round_count(test, round_size(metadata, command.test))
        if len(progress.served) < rounds or rounds - 1 not in progress.posted:
            raise refused(
                "TestIncomplete",
                f"{len(progress.served)} of {rounds} rounds of {command.test} were served and "
                "the last one must have results; go on, or end the session to give up",
            )
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
    names = dict.fromkeys((*state.tests, *state.progress))
    tests = {}
    for name in names:
        progress = state.test(name)
        tests[name] = {
            "served": len(progress.served),
            "posted": len(progress.posted),
            "attempt": progress.attempt,
            "completed": progress.completed,
        }
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


def _in_process(test: str) -> ProtocolRefusal:
    return refused("TestInProcess", f"test {test} is not completed")
