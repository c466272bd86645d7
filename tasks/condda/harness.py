"""The harness: the protocol's calls in one process, each answered from tests and an event store.

Calls and commands are those of `commands.py`; an HTTP layer only translates. States of sessions
are kept in memory and brought up to date from the store before each command, so a restarted
process, or another one on the same store, answers the same. Whoever calls (`rules.CALLER`) sees its
own sessions only, an operator all.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import polars as pl

from schemas.errors import NoveltyError
from tasks.condda import commands, session_files
from tasks.condda.commands import Calls, Command, Decision
from tasks.condda.domains import RED_LIGHT
from tasks.condda.evaluation import evaluate_test, measurable, round_accuracy
from tasks.condda.lookup import check_text, check_texts, find_test, whole_round
from tasks.condda.protocol import decide
from tasks.condda.rules import CALLER, EVALUATION, Limits, Policy, ProtocolRefusal, refused
from tasks.condda.session import SessionState
from tasks.condda.store import EventStore, SessionStates, lake_refusals
from tasks.condda.test_files import TestFile, TestLibrary

if TYPE_CHECKING:
    from tasks.condda.measures import Measured


class Harness(Calls):
    """Calls of the protocol over a library of tests and a store of events."""

    def __init__(
        self,
        library: TestLibrary,
        store: EventStore,
        policy: Policy = EVALUATION,
        *,
        limits: Limits | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ):
        self.library = library
        self.store = store
        self.policy = policy
        self.limits = limits or Limits()
        self.states = SessionStates(store, self.limits)
        self._clock = clock
        self._new_id = new_id
        self._opening = threading.Lock()
        self._measured: dict[tuple[str, str], dict[str, Any]] = {}
        self._answers: dict[type, Callable[[Any, Any], Any]] = {
            commands.ListTests: self._list_tests,
            commands.OpenSession: self._open,
            commands.Evaluate: self._evaluate,
            commands.EvaluateRound: self._evaluate_round,
            commands.ListSessions: lambda _, command: session_files.status(store, command),
            commands.Archive: self._archive,
            commands.PostedLines: self._posted_lines,
        }
        """Of commands that no state of a session decides."""

    def run(self, session: str | None, command: Command) -> Any:
        """Answer a command: by the state of its session, or out of tests and store."""
        answer = self._answers.get(type(command))
        for name, value in (("session_id", session), ("test_id", getattr(command, "test", ""))):
            if not isinstance(value, str) and (value is not None or answer is None):
                raise refused("InvalidParams", f"{name} must be text")
        if answer is None:
            return self.states.run(str(session), lambda state: self._decide(state, command))
        with lake_refusals():
            return answer(session, command)

    def offered_tests(self, *, protocol: str, domain: str) -> list[str]:
        """Ids of the tests on offer as a list."""
        self._check_offered(protocol, domain)
        with lake_refusals():
            return self.library.test_ids(protocol, domain)

    def _list_tests(self, session: None, command: commands.ListTests) -> bytes:
        self._check_offered(command.protocol, command.domain)
        return self.library.test_list(command.protocol, command.domain)

    def _check_offered(self, protocol: str, domain: str) -> None:
        check_text(protocol, "protocol")
        check_text(domain, "domain")
        if protocol not in self.library.protocols():
            raise refused("BadDomain", f"{protocol} not configured")
        if domain not in self.library.domains(protocol):
            raise refused("BadDomain", f"domain {domain} for {protocol} not configured")

    def _open(self, session: str | None, command: commands.OpenSession) -> str:
        """A new session, under an id of the caller's choice if there is one."""
        for name in ("protocol", "domain", "detector"):
            check_text(getattr(command, name), name)
        command = replace(
            command,
            tests=check_texts(command.tests, "test_ids"),
            hints=check_texts(command.hints, "hints"),
            threshold=_threshold(command.threshold),
            owner=CALLER.get().owner,
        )
        with self._opening:
            if self.store.session_count() >= self.limits.sessions:
                raise refused(
                    "TooManySessions", f"the store holds {self.limits.sessions} sessions, all"
                )
            session = self._new_id() if session is None else session
            events = self._decide(None, command).events
            if not self.store.load(session):
                self._check_attempts(command.tests)
            self.store.append(session, 0, events)
        return session

    def _check_attempts(self, tests: Sequence[str]) -> None:
        """An agent runs a test so often: what it was told before must not help it."""
        caller, most = CALLER.get(), self.policy.attempts
        if not self.policy.strict or caller.role == "operator":
            return
        opened = self.store.opened_tests(caller.owner)
        for test in tests:
            if sum(test in named for named in opened) >= most:
                raise ProtocolRefusal(
                    400,
                    "AttemptsExceeded",
                    f"test {test} was opened {most} times by {caller.owner}, as often as the "
                    "operator allows; go on in that session",
                )

    def sessions(self) -> list[str]:
        """Ids of the caller's sessions in the order of opening."""
        caller = CALLER.get()
        with lake_refusals():
            if caller.role == "operator":
                return self.store.sessions()
            return [stored.session for stored in self.store.opened(caller.owner)]

    def _evaluate(self, session: str, command: commands.Evaluate) -> dict[str, dict[str, Any]]:
        test = self._evaluable(session, command.test, command.devmode)
        if test.protocol == "CONDDA":
            return self._corrected(session, test)
        baseline = None
        if command.baseline is not None:
            self._evaluable(command.baseline, command.test, command.devmode)
            baseline = self.results(command.baseline, command.test, "classification")
        detection = self.results(session, command.test, "detection")
        classification = self.results(session, command.test, "classification")
        return evaluate_test(test, detection, classification, baseline)

    def _corrected(self, session: str, test: TestFile) -> dict[str, dict[str, Any]]:
        from tasks.condda.measures import corrected_measures

        with self.state(session) as state:
            types = sorted(state.test(test.test_id).columns)
        found = {kind: self.results(session, test.test_id, kind) for kind in types}
        with measurable():
            measures = corrected_measures(test, found)
        if not measures:
            raise refused(
                "result_file_not_found", f"no classes were posted for test {test.test_id}"
            )
        return measures

    def measures(self, session: str, test: str) -> dict[str, dict[str, Any]]:
        """Corrected measures of a completed test, of both protocols; they are made once."""
        file = self._evaluable(session, test, devmode=False)
        if (session, test) not in self._measured:
            self._measured[session, test] = self._corrected(session, file)
        return self._measured[session, test]

    def measured(self) -> Iterator["Measured"]:
        """Completed tests of the caller's sessions, oldest first, but those without measures."""
        from tasks.condda.measures import DISCOVERED, Measured

        for session in self.sessions():
            with self.state(session) as state:
                place = (state.protocol, state.domain)
                finished, red_light = list(state.finished), RED_LIGHT in state.hints
                agent = state.detector
            for test in finished:
                with suppress(NoveltyError):
                    metrics = self.measures(session, test)
                    shape = metrics.get("characterization", {})
                    discovered = {f"post_{name}": shape.get(f"post_{name}") for name in DISCOVERED}
                    yield Measured(agent, *place, test, red_light, metrics, discovered)

    def _evaluate_round(self, session: str, command: commands.EvaluateRound) -> dict[str, Any]:
        number = whole_round(command.round)
        test = self._evaluable(session, command.test, devmode=not self.policy.strict)
        return round_accuracy(test, self.results(session, command.test, "classification"), number)

    def _archive(self, session: str, command: commands.Archive) -> bytes:
        with self.state(session) as state:
            return session_files.archive(state, self.store, command.tests)

    def _posted_lines(self, session: str, command: commands.PostedLines) -> pl.DataFrame:
        with self.state(session) as state:
            place = (command.test, command.type, state.test(command.test).attempt)
        return session_files.results(self.store, session, *place, self.limits)

    def _evaluable(self, session: str, test: str, devmode: bool) -> TestFile:
        """The test, if it may be evaluated in this session."""
        self.run(session, commands.CheckEvaluable(test, devmode))
        with self.state(session) as state:
            # Measures are truth: an agent has them when it can use them no more.
            if self.policy.strict and not state.terminated and CALLER.get().role == "agent":
                raise refused("SessionOpen", "end the session to see its measures")
            return find_test(state, test, self.library)

    def _decide(self, state: SessionState | None, command: Command) -> Decision:
        if state is not None and not CALLER.get().has(state.owner):
            state = None  # of another: as if there were none
        return decide(state, command, self.library, self.policy, self._clock(), limits=self.limits)

    @contextmanager
    def state(self, session: str) -> Iterator[SessionState]:
        """Newest state of a session of the caller's, under its lock."""
        with self.states.get(session) as state:
            if not CALLER.get().has(state.owner):
                raise refused("session_id_invalid", "there is no session with this id")
            yield state


def _threshold(value: float) -> float:
    if isinstance(value, int) and abs(value) > 1e9:
        raise refused("InvalidThreshold", "detection_threshold is no probability")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(
            "InvalidThreshold", f"detection_threshold {str(value)[:80]!r} is no number"
        ) from error
