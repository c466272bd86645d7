"""A rule-based machine that plays the protocol against any client and a plain oracle.

A client is anything with the methods of `tasks.condda.harness.Harness` that `Client` names, raising
`ProtocolRefusal`: the harness itself, or an adapter over HTTP. The oracle keeps whole histories in
dicts and lists and works everything out anew each time.

    TestOverHttp = protocol_machine(PUBLISHED, start).TestCase

`start(folder)` gives a client over the tests in `folder/data` with its store below `folder`; the
machine calls it again with the same folder to see that nothing depends on a process's memory.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tasks.condda.commands import EVALUATION, Policy, ProtocolRefusal
from tests.condda.small import CHANGED, DOMAIN, IDS, ROUND_SIZE, classes, detection, write_test

TESTS = ("OND.1.1.1", "OND.1.1.2")
ROUNDS = 3
BUDGET = 2
THRESHOLD = 0.5
VALUES = (0.1, 0.5, 0.9)
TYPES = ("detection", "characterization")
MOST_SESSIONS = 3


class Client(Protocol):
    """The calls that the machine makes."""

    def session_request(self, **options: Any) -> str: ...
    def resume_session(self, *, session_id: str) -> list[str]: ...
    def get_test_metadata(self, *, session_id: str, test_id: str) -> dict[str, Any]: ...
    def dataset_request(self, *, test_id: str, round_id: int, session_id: str) -> bytes: ...
    def post_results(
        self, *, result_files: Mapping[str, bytes], test_id: str, round_id: int, session_id: str
    ) -> None: ...
    def get_feedback_request(
        self,
        *,
        feedback_ids: Sequence[str] | None,
        feedback_type: str,
        test_id: str,
        session_id: str,
    ) -> bytes: ...
    def complete_test(self, *, session_id: str, test_id: str) -> None: ...
    def terminate_session(self, *, session_id: str) -> None: ...


class Oracle:
    """One session as a list of what happened to each test since its last restart."""

    def __init__(self, strict: bool):
        self.strict = strict
        self.ended = False
        self.finished: list[str] = []
        self.served: dict[str, list[int]] = {test: [] for test in TESTS}
        self.posts: dict[str, list[tuple[int, str, bytes]]] = {test: [] for test in TESTS}
        self.told: dict[str, list[tuple[int, int]]] = {test: [] for test in TESTS}

    def dataset(self, test: str, number: int) -> bytes | tuple[int, str]:
        refusal = self._closed(test)
        if refusal:
            return refusal
        served, posted = self.served[test], {number for number, _, _ in self.posts[test]}
        lacking = bool(served) and not self.answered(test, served[-1])
        if self.strict and number not in served:
            if len(served) == ROUNDS and number >= ROUNDS:
                return 204, "EndOfDataset"
            if number != len(served) or lacking:
                return 400, "RoundOrder"
        if not self.strict and number == 0 and (posted or set(served) - {0}):
            self.served[test], self.posts[test], self.told[test] = [], [], []
        if number * ROUND_SIZE >= len(IDS):
            return 204, "EndOfDataset"
        if number < 0:
            return b"\n"
        if number not in self.served[test]:
            self.served[test].append(number)
        return "".join(f"{name}\n" for name in ids_of(number)).encode()

    def post(self, test: str, number: int, kind: str, body: bytes) -> tuple[int, str] | None:
        refusal = self._closed(test)
        if refusal:
            return refusal
        before = [content for n, k, content in self.posts[test] if (n, k) == (number, kind)]
        if body in before:
            return None
        if before and (self.strict or kind == "detection"):
            return 400, "DetectionRepost" if kind == "detection" else "ResultRepost"
        if self.strict:
            if kind == "characterization":
                return 400, self._why_not_characterization(test, number, body)
            if number not in self.served[test]:
                return 400, "RoundNotServed"
            if number != self.served[test][-1]:
                return 400, "RoundOrder"
            if b"foreign" in body:
                return 400, "ForeignIds"
        self.posts[test].append((number, kind, body))
        return None

    def _why_not_characterization(self, test: str, number: int, body: bytes) -> str:
        """The machine posts one for a round; OND wants one for the test after its end."""
        if number != 0 or len(self.served[test]) < ROUNDS:
            return "RoundOrder"
        return "ForeignIds" if b"foreign" in body else "MissingIds"

    def feedback(self, test: str) -> bytes | tuple[int, str]:
        refusal = self._closed(test)
        if refusal:
            return refusal
        if not self.posts[test]:
            return (400, "ResultsMissing") if self.strict else (500, "KeyError")
        current = max(number for number, _, _ in self.posts[test])
        left = BUDGET - sum(told for number, told in self.told[test] if number == current)
        if left <= 0:
            return 400, "FeedbackBudgetExceeded"
        lines = self.lines(test, "detection")
        if not any(kind == "detection" for _, kind, _ in self.posts[test]):
            return 400, "DetectionPostRequired"
        if self.strict and not self.answered(test, current):
            return 400, "ResultsMissing"
        if not any(value > THRESHOLD for _, value in lines):
            return b""
        rows = sorted({IDS.index(name) for name, _ in lines[-ROUND_SIZE:] if name in IDS})[:left]
        self.told[test].append((current, len(rows)))
        return "".join(f"{IDS[row]},{CHANGED[row]}\n" for row in rows).encode()

    def complete(self, test: str) -> tuple[int, str] | None:
        refusal = self._closed(test)
        if refusal:
            return refusal
        if self.strict and not all(self.answered(test, number) for number in range(ROUNDS)):
            return 400, "TestIncomplete"
        self.finished.append(test)
        return None

    def latest(self) -> list[str] | tuple[int, str]:
        if self.ended:
            return 400, "SessionEnded"
        return self.finished if self.finished or self.strict else (500, "KeyError")

    def terminate(self) -> tuple[int, str] | None:
        if self.ended:
            return 400, "SessionEnded"
        self.ended = True
        return None

    def answered(self, test: str, number: int) -> bool:
        """Whether a round has all that an OND test is measured by."""
        posted = {kind for of, kind, _ in self.posts[test] if of == number}
        return {"detection", "classification"} <= posted

    def lines(self, test: str, kind: str) -> list[tuple[str, float]]:
        """Every line posted, in order."""
        texts = [body.decode() for _, k, body in self.posts[test] if k == kind]
        cells = [line.split(",") for text in texts for line in text.splitlines()]
        return [(name, float(value)) for name, value in cells]

    def _closed(self, test: str) -> tuple[int, str] | None:
        if self.ended:
            return 400, "SessionEnded"
        return (400, "TestCompleted") if test in self.finished else None


def ids_of(number: int) -> tuple[str, ...]:
    """Ids of a round; one id for rounds that there are not."""
    return IDS[number * ROUND_SIZE : (number + 1) * ROUND_SIZE] if 0 <= number < ROUNDS else IDS[:1]


def protocol_machine(mode: Policy, start: Callable[[Path], Client]) -> type[RuleBasedStateMachine]:
    """A machine class whose `.TestCase` pytest can run."""

    class ProtocolMachine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.folder = Path(tempfile.mkdtemp(prefix="protocol"))
            for test in TESTS:
                write_test(self.folder / "data", test, feedback_max_ids=BUDGET)
            self.client = start(self.folder)
            self.sessions: dict[str, Oracle] = {}
            self.open()

        def teardown(self) -> None:
            if hasattr(self, "folder"):
                stop(self.client)
                shutil.rmtree(self.folder)

        @precondition(lambda self: len(self.sessions) < MOST_SESSIONS)
        @rule()
        def open(self) -> None:
            session = self.client.session_request(
                test_ids=list(TESTS),
                protocol="OND",
                domain=DOMAIN,
                novelty_detector_version="agent-1",
                hints=[],
                detection_threshold=THRESHOLD,
            )
            assert session not in self.sessions
            self.sessions[session] = Oracle(mode == EVALUATION)

        @rule()
        def restart(self) -> None:
            stop(self.client)
            self.client = start(self.folder)

        @rule(data=st.data(), test=st.sampled_from(TESTS), number=st.integers(-1, ROUNDS + 1))
        def dataset(self, data: st.DataObject, test: str, number: int) -> None:
            session = self.pick(data)
            expected = self.sessions[session].dataset(test, number)
            about = {"test_id": test, "round_id": number, "session_id": session}
            self.compare(expected, lambda: self.client.dataset_request(**about))

        @rule(
            data=st.data(),
            test=st.sampled_from(TESTS),
            number=st.integers(-1, ROUNDS),
            kind=st.sampled_from(TYPES),
            value=st.sampled_from(VALUES),
            foreign=st.integers(0, 9).map(lambda draw: draw == 0),
        )
        def post(
            self,
            data: st.DataObject,
            test: str,
            number: int,
            kind: str,
            value: float,
            foreign: bool,
        ) -> None:
            session = self.pick(data)
            ids = (*ids_of(number), *(("foreign",) if foreign else ()))
            self.send(session, test, number, kind, detection(ids, value))

        @rule(data=st.data(), test=st.sampled_from(TESTS), value=st.sampled_from(VALUES))
        def next_round(self, data: st.DataObject, test: str, value: float) -> None:
            """What an agent does; chance alone would hardly ever finish a strict test."""
            session = self.pick(data)
            oracle = self.sessions[session]
            number = len(oracle.served[test])
            about = {"test_id": test, "round_id": number, "session_id": session}
            expected = oracle.dataset(test, number)
            self.compare(expected, lambda: self.client.dataset_request(**about))
            if isinstance(expected, bytes):
                ids = ids_of(number)
                self.send(session, test, number, "detection", detection(ids, value))
                self.send(session, test, number, "classification", classes(ids))

        @rule(data=st.data(), test=st.sampled_from(TESTS))
        def feedback(self, data: st.DataObject, test: str) -> None:
            session = self.pick(data)
            expected = self.sessions[session].feedback(test)
            about = {"feedback_type": "detection", "test_id": test, "session_id": session}
            self.compare(
                expected, lambda: self.client.get_feedback_request(feedback_ids=None, **about)
            )

        @rule(data=st.data(), test=st.sampled_from(TESTS))
        def complete(self, data: st.DataObject, test: str) -> None:
            session = self.pick(data)
            expected = self.sessions[session].complete(test)
            self.compare(
                expected, lambda: self.client.complete_test(session_id=session, test_id=test)
            )

        @rule(data=st.data())
        def latest(self, data: st.DataObject) -> None:
            session = self.pick(data)
            expected = self.sessions[session].latest()
            self.compare(expected, lambda: self.client.resume_session(session_id=session))

        @precondition(lambda self: len(self.sessions) == MOST_SESSIONS)
        @rule(data=st.data())
        def terminate(self, data: st.DataObject) -> None:
            session = self.pick(data)
            expected = self.sessions[session].terminate()
            self.compare(expected, lambda: self.client.terminate_session(session_id=session))

        @rule(data=st.data(), test=st.sampled_from(TESTS), kind=st.sampled_from(TYPES))
        def results(self, data: st.DataObject, test: str, kind: str) -> None:
            """Every posted line is kept once and in order, where the client can tell."""
            if not hasattr(self.client, "results"):
                return
            session = self.pick(data)
            frame = self.client.results(session, test, kind)
            found = list(zip(frame["instance_id"], frame["values"].list.first(), strict=True))
            assert found == self.sessions[session].lines(test, kind)

        def pick(self, data: st.DataObject) -> str:
            return data.draw(st.sampled_from(list(self.sessions)), label="session")

        def send(self, session: str, test: str, number: int, kind: str, body: bytes) -> None:
            expected = self.sessions[session].post(test, number, kind, body)
            about = {"test_id": test, "round_id": number, "session_id": session}
            self.compare(
                expected, lambda: self.client.post_results(result_files={kind: body}, **about)
            )

        def compare(self, expected: Any, call: Callable[[], Any]) -> None:
            try:
                got = call()
            except ProtocolRefusal as refusal:
                got = (refusal.status, refusal.reason)
            assert got == expected

    ProtocolMachine.TestCase.settings = settings(
        max_examples=25, stateful_step_count=40, deadline=None, derandomize=True
    )
    return ProtocolMachine


def stop(client: Any) -> None:
    """Let go of a client: `close()` of it or of its store."""
    (client if hasattr(client, "close") else client.store).close()
