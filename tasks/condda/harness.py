"""The harness: the protocol's calls in one process, each answered from tests and an event store.

Calls and commands are those of `commands.py`; an HTTP layer only translates. States of sessions
are kept in memory and brought up to date from the store before each command, so a restarted
process, or another one on the same store, answers the same. Whoever calls (`CALLER`) sees its
own sessions only, an operator all.
"""

import io
import json
import threading
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import polars as pl

from schemas.errors import LakeError, NoveltyError, SourceError
from tasks.condda import commands
from tasks.condda.commands import (
    CALLER,
    EVALUATION,
    Calls,
    Command,
    Decision,
    Event,
    Limits,
    Policy,
    ProtocolRefusal,
    refused,
)
from tasks.condda.domains import RED_LIGHT
from tasks.condda.measures import (
    DISCOVERED,
    Begun,
    Outcome,
    corrected_measures,
    evaluate_test,
    measurable,
    round_accuracy,
)
from tasks.condda.metrics import m_nrp
from tasks.condda.posts import RESULTS, read_lines
from tasks.condda.protocol import decide
from tasks.condda.session import (
    SessionState,
    check_text,
    check_texts,
    evolve,
    find_test,
    is_name,
    open_state,
    whole_round,
)
from tasks.condda.store import Conflict, EventStore
from tasks.condda.test_files import TestFile, TestLibrary

_TRIES = 100


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    state: SessionState | None = None


@contextmanager
def lake_refusals() -> Iterator[None]:
    """Damaged files and full disks refuse the one request; the sentence says what to do."""
    try:
        yield
    except (LakeError, SourceError) as error:
        raise refused(type(error).__name__, str(error), 500) from error


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
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """States of sessions; the least used are dropped when there are too many."""
        self._entries_lock = threading.Lock()
        self._clock = clock
        self._new_id = new_id
        self._opening = threading.Lock()
        self._measured: dict[tuple[str, str], dict[str, Any]] = {}
        self._answers: dict[type, Callable[[Any, Any], Any]] = {
            commands.ListTests: self._list_tests,
            commands.OpenSession: self._open,
            commands.Evaluate: self._evaluate,
            commands.EvaluateRound: self._evaluate_round,
            commands.ListSessions: self._list_sessions,
            commands.Archive: self._archive,
            commands.PostedLines: self._posted_lines,
        }
        """Of commands that no state of a session decides."""

    def run(self, session: str | None, command: Command) -> Any:
        """Answer a command: by the newest state of its session, or out of tests and store.

        What happens is stored before it is answered. If another writer was faster, its events are
        read and the decision is made again.
        """
        answer = self._answers.get(type(command))
        for name, value in (("session_id", session), ("test_id", getattr(command, "test", ""))):
            if not isinstance(value, str) and (value is not None or answer is None):
                raise refused("InvalidParams", f"{name} must be text")
        if answer is not None:
            with lake_refusals():
                return answer(session, command)
        for _ in range(_TRIES):
            with self._entry(str(session)) as entry:
                decision = self._decide(entry.state, command)
                if not decision.events:
                    return decision.answer
                assert entry.state is not None
                try:
                    self.store.append(entry.state.session, entry.state.seq, decision.events)
                except Conflict:
                    continue
                try:
                    for event in decision.events:
                        evolve(entry.state, event)
                except BaseException:
                    entry.state = None  # half taken in: to be read again
                    raise
                return decision.answer
        raise refused("Conflict", "others write to this session all the time; wait")

    def _decide(self, state: SessionState | None, command: Command) -> Decision:
        if state is not None and not CALLER.get().has(state.owner):
            state = None  # of another: as if there were none
        return decide(state, command, self.library, self.policy, self._clock(), limits=self.limits)

    @contextmanager
    def state(self, session: str) -> Iterator[SessionState]:
        """Newest state of a session of the caller's, under its lock."""
        with self._entry(session) as entry:
            if entry.state is None or not CALLER.get().has(entry.state.owner):
                raise refused("session_id_invalid", "there is no session with this id")
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
        with self._entries_lock:
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
                with self._entries_lock:
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
            owner=CALLER.get().owner if CALLER.get().role == "agent" else "",
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
                raise refused(
                    "AttemptsExceeded",
                    f"test {test} was opened {most} times by {caller.owner}, as often as the "
                    "operator allows; go on in that session if it is open",
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
        try:
            return evaluate_test(test, detection, classification, baseline)
        except ProtocolRefusal:
            # What the public code has no number for must not stay without one.
            if not self.policy.strict:
                raise
            measures = self._corrected(session, test)
            if command.baseline is not None:
                base = self._corrected(command.baseline, test)
                measures["m_nrp"] = m_nrp(measures["m_acc"], base["m_acc"])
            return measures

    def _corrected(self, session: str, test: TestFile) -> dict[str, dict[str, Any]]:
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

    def begun(self) -> Iterator[Begun]:
        """Tests that the caller's sessions have begun, oldest first."""
        for session in self.sessions():
            with self.state(session) as state:
                group = (state.owner, state.detector, state.protocol, state.domain)
                finished, red_light = list(state.finished), RED_LIGHT in state.hints
                left: Outcome = "given_up" if state.terminated else "open"
                begun = [name for name, test in state.progress.items() if test.begun]
            for test in dict.fromkeys((*finished, *begun)):
                about = (*group, test, red_light)
                if test not in finished:
                    yield Begun(*about, left)
                    continue
                try:
                    metrics = self.measures(session, test)
                except NoveltyError:
                    yield Begun(*about, "no_measures")
                    continue
                shape = metrics.get("characterization", {})
                discovered = {f"post_{name}": shape.get(f"post_{name}") for name in DISCOVERED}
                yield Begun(*about, "measured", metrics, discovered)

    def _evaluate_round(self, session: str, command: commands.EvaluateRound) -> dict[str, Any]:
        number = whole_round(command.round)
        test = self._evaluable(session, command.test, devmode=not self.policy.strict)
        return round_accuracy(test, self.results(session, command.test, "classification"), number)

    def _list_sessions(self, session: None, asked: commands.ListSessions) -> str:
        """`session,detector[,test],start,end` lines, sorted by detector and session.

        `after` keeps sessions that ended at that time or later and those still open. The start of a
        test is the first result of its round 0; a session without completed tests has the test NA.
        Sessions of others than the caller are left out.
        """
        bound = None if asked.after is None else _moment(asked.after)
        times = {end.session: end.event.time for end in self.store.of_kinds(["terminated"])}
        completed: dict[str, list[str | None]] = {}
        starts: dict[tuple[str, str | None, int], str] = {}
        if asked.include_tests:
            for stored in self.store.of_kinds(["completed"]):
                if asked.tests is None or stored.event.test in asked.tests:
                    completed.setdefault(stored.session, []).append(stored.event.test)
            for stored in self.store.of_kinds(["posted"], round=0):
                place = (stored.session, stored.event.test, stored.event.attempt)
                starts.setdefault(place, stored.event.time)
        newest = {(session, test): time for (session, test, _), time in starts.items()}
        lines = []
        for stored in self.store.of_kinds(["opened"]):
            name, opened, detail = stored.session, stored.event.time, stored.event.detail
            version, ended = detail["detector"], times.get(name)
            wanted = asked.session in (None, name) and asked.detector in (None, version)
            if asked.session is None and bound is not None and ended is not None:
                wanted = wanted and _moment(ended) >= bound
            if not wanted or not CALLER.get().has(detail.get("owner", "")):
                continue
            starting = [opened]
            if asked.include_tests:
                tests = completed.get(name, [])
                starting = [f"{test},{newest.get((name, test), 'N/A')}" for test in tests]
            for start in starting or [f" NA,{opened}"]:
                line = f"{name},{version},{start},{ended or 'Incomplete'}"
                lines.append((version, name, line))
        return "\n".join(line for _, _, line in sorted(lines, key=lambda line: line[:2]))

    def _archive(self, session: str, command: commands.Archive) -> bytes:
        """A bzip2 zip of the session's logs and result files, of some tests if asked.

        Its members are those of the public server's result folder (docs/condda.md, rule 8).
        """
        with self.state(session) as state:
            events = [stored.event for stored in self.store.load(state.session, bodies=True)]
            members: dict[str, bytes] = {f"{state.session}.json": _json(_session_log(state))}
            for test, progress in state.progress.items():
                if command.tests is not None and test not in command.tests:
                    continue
                newest = (test, progress.attempt)
                kept = [event for event in events if (event.test, event.attempt) == newest]
                members[f"{state.session}.{test}.json"] = _json(_test_log(state, test, kept))
                for event in kept:
                    if event.kind == "posted" and event.body is not None:
                        name = _result_name(state, test, event.type or "")
                        # A last line is ended, so that the next one does not run into it.
                        open_end = event.body and not event.body.endswith(b"\n")
                        members[name] = members.get(name, b"") + event.body + b"\n" * bool(open_end)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for name, content in members.items():
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_BZIP2)
        return buffer.getvalue()

    def _posted_lines(self, session: str, command: commands.PostedLines) -> pl.DataFrame:
        with self.state(session) as state:
            attempt = state.test(command.test).attempt
        place: dict[str, Any] = {"test": command.test, "type": command.type, "attempt": attempt}
        posts = self.store.load(session, bodies=True, kind="posted", **place)
        frames = [read_lines(post.event, self.limits) for post in posts]
        return pl.concat([pl.DataFrame(schema=RESULTS), *frames])

    def _evaluable(self, session: str, test: str, devmode: bool) -> TestFile:
        """The test, if it may be evaluated in this session."""
        self.run(session, commands.CheckEvaluable(test, devmode))
        with self.state(session) as state:
            # Measures are truth: an agent has them when it can use them no more.
            if self.policy.strict and not state.terminated and CALLER.get().role == "agent":
                raise refused("SessionOpen", "end the session to see its measures")
            return find_test(state, test, self.library)


def _threshold(value: float) -> float:
    if isinstance(value, int) and abs(value) > 1e9:
        raise refused("InvalidThreshold", "detection_threshold is no probability")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(
            "InvalidThreshold", f"detection_threshold {str(value)[:80]!r} is no number"
        ) from error


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise refused(
            "ValueError", f"{text[:80]!r} is not a time such as 2024-05-01T12:00:00", 400
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _result_name(state: SessionState, test: str, kind: str) -> str:
    return f"{state.protocol}/{state.domain}/{state.session}.{test}_{kind}.csv"


def _session_log(state: SessionState) -> dict[str, Any]:
    log: dict[str, Any] = {
        "created": {
            "time": [state.opened],
            "protocol": state.protocol,
            "domain": state.domain,
            "detector": state.detector,
            "detection_threshold": state.threshold,
            "hints": list(state.hints),
            "test_ids": list(state.tests),
        }
    }
    if state.finished:
        log["tests"] = {"completed_tests": list(state.finished)}
    if state.terminated:
        log["termination"] = {"time": [state.terminated]}
    return log


_ACTIVITY = {"served": "data_request", "posted": "post_results", "feedback": "get_feedback"}


def _test_log(state: SessionState, test: str, events: list[Event]) -> dict[str, Any]:
    log: dict[str, Any] = {}
    for event in events:
        if event.kind == "completed":
            log["completion"] = {"time": [event.time]}
        if event.kind not in _ACTIVITY:
            continue
        activity = log.setdefault(_ACTIVITY[event.kind], {"time": [], "rounds": {}})
        activity["time"].append(event.time)
        activity["last round"] = str(event.round)
        entry = activity["rounds"].setdefault(str(event.round), {"time": []})
        entry["time"].append(event.time)
        if event.kind == "posted":
            activity[f"{event.type} file path"] = _result_name(state, test, event.type or "")
            entry.setdefault("types", []).append(event.type)
        elif event.kind == "feedback" and event.type is not None:
            entry[event.type] = entry.get(event.type, 0) + event.detail["count"]
    return log
