"""The harness: the protocol's calls in one process, each answered from tests and an event store.

One method per call of CONDDA rule 2 and per endpoint of rule 9, keyword arguments only, bytes and
dicts out; every refusal is a `ProtocolRefusal`. An HTTP layer only translates. States of sessions
are kept in memory and brought up to date from the store before each command, so a restarted
process, or another one on the same store, answers the same. Whoever calls (`rules.CALLER`) sees its
own sessions only, an operator all.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import polars as pl

from schemas.errors import NoveltyError
from tasks.condda import session_files
from tasks.condda.commands import (
    CheckEvaluable,
    Command,
    CompleteTest,
    Dataset,
    Decision,
    Feedback,
    Latest,
    Metadata,
    OpenSession,
    Post,
    Resume,
    Status,
    Terminate,
)
from tasks.condda.domains import RED_LIGHT
from tasks.condda.evaluation import evaluate_test, measurable, round_accuracy
from tasks.condda.lookup import unknown_test
from tasks.condda.protocol import decide
from tasks.condda.rules import CALLER, EVALUATION, Limits, Policy, ProtocolRefusal
from tasks.condda.session import SessionState
from tasks.condda.store import EventStore, SessionStates, lake_refusals
from tasks.condda.test_files import TestFile, TestLibrary

if TYPE_CHECKING:
    from tasks.condda.measures import Measured


class Harness:
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

    def test_ids_request(
        self,
        *,
        protocol: str,
        domain: str,
        detector_seed: str | int = "",
        test_assumptions: str = "{}",
    ) -> bytes:
        """Ids of the tests on offer, one a line; seed and assumptions choose nothing."""
        self._check_offered(protocol, domain)
        with lake_refusals():
            return self.library.test_list(protocol, domain)

    def offered_tests(self, *, protocol: str, domain: str) -> list[str]:
        """The same ids as a list."""
        self._check_offered(protocol, domain)
        with lake_refusals():
            return self.library.test_ids(protocol, domain)

    def _check_offered(self, protocol: str, domain: str) -> None:
        if protocol not in self.library.protocols():
            raise ProtocolRefusal(400, "BadDomain", f"{protocol} not configured")
        if domain not in self.library.domains(protocol):
            raise ProtocolRefusal(
                400, "BadDomain", f"domain {domain} for {protocol} not configured"
            )

    def session_request(
        self,
        *,
        test_ids: Sequence[str],
        protocol: str,
        domain: str,
        novelty_detector_version: str,
        hints: Sequence[str] = (),
        detection_threshold: float = 0.5,
        session_id: str | None = None,
    ) -> str:
        """Open a session; gives its id."""
        tests = _texts("test_ids", test_ids)
        named = (protocol, domain, novelty_detector_version)
        _texts("protocol, domain, version", named)
        asked = (_texts("hints", hints), _threshold(detection_threshold))
        command = OpenSession(tests, *named, *asked, CALLER.get().owner)
        with lake_refusals(), self._opening:
            if self.store.session_count() >= self.limits.sessions:
                raise ProtocolRefusal(
                    500, "TooManySessions", f"the store holds {self.limits.sessions} sessions, all"
                )
            session = self._new_id() if session_id is None else session_id
            events = self._decide(None, command).events
            if not self.store.load(session):
                self._check_attempts(tests)
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

    def resume_session(self, *, session_id: str) -> list[str]:
        """Finished tests of a session."""
        return self._run(session_id, Latest())["finished_tests"]

    def resume_test(self, *, session_id: str, test_id: str) -> dict[str, Any]:
        """Where to go on in a test (see `commands.Resume`)."""
        return self._run(session_id, Resume(test_id))

    def session_progress(self, *, session_id: str) -> dict[str, Any]:
        """What a session was opened with and how far each of its tests is."""
        return self._run(session_id, Status())

    def get_test_metadata(self, *, session_id: str, test_id: str) -> dict[str, Any]:
        """Metadata of a test that the agent may see."""
        return self._run(session_id, Metadata(test_id))

    def dataset_request(self, *, test_id: str, round_id: int | str, session_id: str) -> bytes:
        """Instances of one round; refusal 204 after the last."""
        # The public server looks the session and the test up before it reads the number.
        number = _whole(round_id)
        if number is None:
            self._run(session_id, Metadata(test_id))
            raise _not_whole(round_id)
        return self._run(session_id, Dataset(test_id, number))

    def post_results(
        self,
        *,
        result_files: Mapping[str, bytes],
        test_id: str,
        round_id: int | str,
        session_id: str,
    ) -> None:
        """Take the result files of one round, by type: all of them or none."""
        number = _whole(round_id)
        if number is None:
            raise _not_whole(round_id)
        self._run(session_id, Post(test_id, number, result_files))

    def get_feedback_request(
        self,
        *,
        feedback_ids: Sequence[str] | None,
        feedback_type: str,
        test_id: str,
        session_id: str,
        round_id: int | str | None = None,
    ) -> bytes:
        """Feedback of one type, maybe empty. `round_id` None or "last" is the last one posted."""
        number = None if round_id in (None, "", "last") else _whole(round_id)
        if number is None and round_id not in (None, "", "last"):
            raise _not_whole(round_id)
        ids = tuple(feedback_ids or ())
        return self._run(session_id, Feedback(test_id, feedback_type, ids, number))

    def evaluate(
        self,
        *,
        test_id: str,
        session_id: str,
        round_id: int | str = 0,
        baseline_session_id: str | None = None,
        devmode: bool = False,
    ) -> dict[str, dict[str, Any]]:
        """The public server's metrics of a completed test, and m_nrp with a baseline session.

        `round_id` is part of the call and chooses nothing, as published. A CONDDA test, which has
        no public evaluation, has the corrected metrics and `characterization`.
        """
        test = self._evaluable(session_id, test_id, devmode)
        if test.protocol == "CONDDA":
            return self._corrected(session_id, test)
        baseline = None
        if baseline_session_id is not None:
            self._evaluable(baseline_session_id, test_id, devmode)
            baseline = self.results(baseline_session_id, test_id, "classification")
        detection = self.results(session_id, test_id, "detection")
        classification = self.results(session_id, test_id, "classification")
        return evaluate_test(test, detection, classification, baseline)

    def _corrected(self, session: str, test: TestFile) -> dict[str, dict[str, Any]]:
        from tasks.condda.measures import corrected_measures

        with self.state(session) as state:
            types = sorted(state.test(test.test_id).columns)
        found = {kind: self.results(session, test.test_id, kind) for kind in types}
        with measurable():
            measures = corrected_measures(test, found)
        if not measures:
            raise ProtocolRefusal(
                500, "result_file_not_found", f"no classes were posted for test {test.test_id}"
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
        from tasks.condda.measures import SIDES, Measured

        for session in self.sessions():
            with self.state(session) as state:
                place = (state.protocol, state.domain)
                finished, red_light = list(state.finished), RED_LIGHT in state.hints
                agent = state.detector
            for test in finished:
                with suppress(NoveltyError):
                    metrics = self.measures(session, test)
                    shape = metrics.get("characterization", {})
                    discovered = {f"post_{name}": shape.get(f"post_{name}") for name in SIDES}
                    yield Measured(agent, *place, test, red_light, metrics, discovered)

    def evaluate_round_wise(
        self, *, test_id: str, round_id: int | str, session_id: str
    ) -> dict[str, Any]:
        """Accuracy of one posted round; as published while the test goes on, too."""
        number = _whole(round_id)
        if number is None:
            raise _not_whole(round_id)
        test = self._evaluable(session_id, test_id, devmode=not self.policy.strict)
        results = self.results(session_id, test_id, "classification")
        return round_accuracy(test, results, number)

    def complete_test(self, *, session_id: str, test_id: str) -> None:
        """End a test."""
        self._run(session_id, CompleteTest(test_id))

    def terminate_session(self, *, session_id: str) -> None:
        """End a session, whatever its tests."""
        self._run(session_id, Terminate())

    def session_status(
        self,
        *,
        after: str | None = None,
        session_id: str | None = None,
        test_ids: Sequence[str] | None = None,
        detector: str | None = None,
        include_tests: bool = False,
    ) -> str:
        """CSV lines `session,detector[,test],start,end`, end `Incomplete` while it is open."""
        with lake_refusals():
            return session_files.status(
                self.store,
                after=after,
                session=session_id,
                tests=test_ids,
                detector=detector,
                include_tests=include_tests,
            )

    def session_zip(self, *, session_id: str, test_ids: Sequence[str] | None = None) -> bytes:
        """Logs and result files of a session as a zip archive."""
        with self.state(session_id) as state:
            return session_files.archive(state, self.store, test_ids)

    def results(self, session: str, test: str, kind: str) -> pl.DataFrame:
        """Lines posted since the test's last restart: `session_files.RESULTS`."""
        with self.state(session) as state:
            attempt = state.test(test).attempt
        with lake_refusals():
            return session_files.results(self.store, session, test, kind, attempt, self.limits)

    def _evaluable(self, session: str, test: str, devmode: bool) -> TestFile:
        """The test, if it may be evaluated in this session."""
        self._run(session, CheckEvaluable(test, devmode))
        with self.state(session) as state:
            place = (state.protocol, state.domain)
            # Measures are truth: an agent has them when it can use them no more.
            if self.policy.strict and not state.terminated and CALLER.get().role == "agent":
                raise ProtocolRefusal(400, "SessionOpen", "end the session to see its measures")
        if not self.library.has_truth(test, *place):
            raise unknown_test(test)
        if not self.library.has_metadata(test, *place):
            raise ProtocolRefusal(500, "metadata_not_found", f"test {test} has no metadata")
        with lake_refusals():
            return self.library.load(test, *place)

    def _run(self, session: str, command: Command) -> Any:
        return self.states.run(session, lambda state: self._decide(state, command))

    def _decide(self, state: SessionState | None, command: Command) -> Decision:
        if state is not None and not CALLER.get().has(state.owner):
            state = None  # of another: as if there were none
        return decide(state, command, self.library, self.policy, self._clock(), limits=self.limits)

    @contextmanager
    def state(self, session: str) -> Iterator[SessionState]:
        """Newest state of a session of the caller's, under its lock."""
        with self.states.get(session) as state:
            if not CALLER.get().has(state.owner):
                raise ProtocolRefusal(400, "session_id_invalid", "there is no session with this id")
            yield state


def _texts(name: str, values: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise ProtocolRefusal(400, "InvalidParams", f"{name} must be text")
    return tuple(values)


def _threshold(value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolRefusal(
            400, "InvalidThreshold", f"detection_threshold {str(value)[:80]!r} is no number"
        ) from error


def _whole(number: Any) -> int | None:
    """A round's number, which comes as text from a query; None if it is none."""
    try:
        return int(number)
    except (TypeError, ValueError, OverflowError):
        return None


def _not_whole(number: object) -> ProtocolRefusal:
    return ProtocolRefusal(500, "ValueError", f"round_id {str(number)[:80]!r} is no whole number")
