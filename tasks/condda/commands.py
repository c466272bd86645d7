"""The API: every call of the CONDDA/OND protocol once, as a command and as a keyword method.

A command holds what a call says; `Calls` has the keyword methods, each of which makes one command.
Whoever answers commands has all calls: the harness in process, the client over HTTP. What a command
answers stands with its method, and where it is a decision (`protocol.py`), in `Decision`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from tasks.condda.session import Event

Number = Any
"""A round's number, which comes as text from a query; whoever decides makes it a whole number."""


@dataclass(frozen=True)
class Command:
    """What a call says; each kind is a dataclass of its own."""


@dataclass(frozen=True)
class ListTests(Command):
    protocol: str
    domain: str
    detector_seed: str | int = ""
    test_assumptions: str = "{}"


@dataclass(frozen=True)
class OpenSession(Command):
    tests: Sequence[str]
    protocol: str
    domain: str
    detector: str
    hints: Sequence[str] = ()
    threshold: float = 0.5
    owner: str = ""


@dataclass(frozen=True)
class Metadata(Command):
    test: str


@dataclass(frozen=True)
class Dataset(Command):
    test: str
    round: Number


@dataclass(frozen=True)
class Post(Command):
    test: str
    round: Number
    results: Mapping[str, bytes]


@dataclass(frozen=True)
class Feedback(Command):
    test: str
    type: str
    ids: Sequence[str] = ()
    round: Number | None = None


@dataclass(frozen=True)
class CompleteTest(Command):
    test: str


@dataclass(frozen=True)
class CheckEvaluable(Command):
    """Whether a test may be evaluated: the answer is None, or it is refused."""

    test: str
    devmode: bool = False


@dataclass(frozen=True)
class Evaluate(Command):
    test: str
    round: Number = 0
    baseline: str | None = None
    devmode: bool = False


@dataclass(frozen=True)
class EvaluateRound(Command):
    test: str
    round: Number


@dataclass(frozen=True)
class Terminate(Command):
    pass


@dataclass(frozen=True)
class Latest(Command):
    """Answer: {"finished_tests": [...]}."""


@dataclass(frozen=True)
class Resume(Command):
    test: str


@dataclass(frozen=True)
class Status(Command):
    pass


@dataclass(frozen=True)
class ListSessions(Command):
    after: str | None = None
    session: str | None = None
    tests: Sequence[str] | None = None
    detector: str | None = None
    include_tests: bool = False


@dataclass(frozen=True)
class Archive(Command):
    tests: Sequence[str] | None = None


@dataclass(frozen=True)
class PostedLines(Command):
    test: str
    type: str


@dataclass(frozen=True)
class Decision:
    """What happens, and what the agent is told."""

    events: tuple[Event, ...] = ()
    answer: Any = None


class Calls(ABC):
    """The calls of CONDDA rule 2: keyword arguments, bytes and dicts back.

    Every refusal is a `ProtocolRefusal`.
    """

    @abstractmethod
    def run(self, session: str | None, command: Command) -> Any:
        """Answer a command; `session` is None where it is of none, or of a new one."""

    def test_ids_request(
        self,
        *,
        protocol: str,
        domain: str,
        detector_seed: str | int = "",
        test_assumptions: str = "{}",
    ) -> bytes:
        """Ids of the tests on offer, one a line; seed and assumptions choose nothing."""
        return self.run(None, ListTests(protocol, domain, detector_seed, test_assumptions))

    def session_request(
        self,
        *,
        test_ids: Sequence[str],
        protocol: str,
        domain: str,
        novelty_detector_version: str,
        hints: Sequence[str] = (),
        detection_threshold: float = 0.5,
    ) -> str:
        """Open a session; gives its id."""
        named = (protocol, domain, novelty_detector_version)
        return self.run(None, OpenSession(test_ids, *named, hints, detection_threshold))

    def resume_session(self, *, session_id: str) -> list[str]:
        """Finished tests of a session."""
        return self.run(session_id, Latest())["finished_tests"]

    def resume_test(self, *, session_id: str, test_id: str) -> dict[str, Any]:
        """Where to go on in a test: next_round (None at the end), rounds, posted, completed."""
        return self.run(session_id, Resume(test_id))

    def session_progress(self, *, session_id: str) -> dict[str, Any]:
        """What a session was opened with and how far each of its tests is."""
        return self.run(session_id, Status())

    def get_test_metadata(self, *, session_id: str, test_id: str) -> dict[str, Any]:
        """Metadata of a test that the agent may see."""
        return self.run(session_id, Metadata(test_id))

    def dataset_request(self, *, test_id: str, round_id: Number, session_id: str) -> bytes:
        """Instances of one round; refusal 204 after the last."""
        return self.run(session_id, Dataset(test_id, round_id))

    def post_results(
        self,
        *,
        result_files: Mapping[str, bytes],
        test_id: str,
        round_id: Number,
        session_id: str,
    ) -> None:
        """Take the result files of one round, by type: all of them or none."""
        self.run(session_id, Post(test_id, round_id, result_files))

    def get_feedback_request(
        self,
        *,
        feedback_ids: Sequence[str] | None,
        feedback_type: str,
        test_id: str,
        session_id: str,
        round_id: Number | None = None,
    ) -> bytes:
        """Feedback of one type, maybe empty.

        No ids: the last lines posted. `round_id` None or "last": the last round posted.
        """
        number = None if round_id in ("", "last") else round_id
        return self.run(session_id, Feedback(test_id, feedback_type, feedback_ids or (), number))

    def evaluate(
        self,
        *,
        test_id: str,
        session_id: str,
        round_id: Number = 0,
        baseline_session_id: str | None = None,
        devmode: bool = False,
    ) -> dict[str, dict[str, Any]]:
        """The public server's metrics of a completed test, and m_nrp with a baseline session.

        `round_id` is part of the call and chooses nothing, as published. A CONDDA test, which has
        no public evaluation, has the corrected metrics and `characterization`. `devmode` evaluates
        a test that is not completed.
        """
        return self.run(session_id, Evaluate(test_id, round_id, baseline_session_id, devmode))

    def evaluate_round_wise(
        self, *, test_id: str, round_id: Number, session_id: str
    ) -> dict[str, Any]:
        """Accuracy of one posted round; as published, in process, while the test goes on too."""
        return self.run(session_id, EvaluateRound(test_id, round_id))

    def complete_test(self, *, session_id: str, test_id: str) -> None:
        """End a test."""
        self.run(session_id, CompleteTest(test_id))

    def terminate_session(self, *, session_id: str) -> None:
        """End a session, whatever its tests."""
        self.run(session_id, Terminate())

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
        return self.run(None, ListSessions(after, session_id, test_ids, detector, include_tests))

    def session_zip(self, *, session_id: str, test_ids: Sequence[str] | None = None) -> bytes:
        """Logs and result files of a session as a zip archive."""
        return self.run(session_id, Archive(test_ids))

    def results(self, session: str, test: str, kind: str) -> pl.DataFrame:
        """Lines posted since the test's last restart: `session_files.RESULTS`."""
        return self.run(session, PostedLines(test, kind))
