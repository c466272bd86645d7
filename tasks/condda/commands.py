"""What can be asked of the CONDDA/OND protocol, by whom, within which limits, how it is refused.

Every call stands here once, as a command and as a keyword method: a command holds what a call says,
`Calls` has the methods, each of which makes one command. Whoever answers commands has all calls:
the harness in process, the client over HTTP. What a command answers stands with its method, and
where it is a decision (`protocol.py`), in `Decision`. docs/condda.md: "Policies", rules 2 and 10.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import NoveltyError

HttpStatus = Literal[204, 400, 500]
Role = Literal["agent", "operator"]


@dataclass(frozen=True)
class Caller:
    """Who sends a request: an agent has its own sessions, an operator all."""

    owner: str
    role: Role

    def has(self, owner: str) -> bool:
        """Whether a session of this owner is the caller's to see and to end."""
        return self.role == "operator" or self.owner == owner


_HERE = Caller("", "operator")
CALLER: ContextVar[Caller] = ContextVar("caller", default=_HERE)
"""The server's guard sets it for each request; whoever calls in process is the operator."""


class Policy(Settings):
    """What the operator lets agents see and ask for.

    `published` takes and answers what the public server does: every hint is obeyed. `evaluation`
    refuses what the protocol forbids; below is what an agent cannot choose there.
    """

    name: Literal["published", "evaluation"] = "evaluation"
    red_light: bool = False
    """Whether an agent may ask when the world changes."""
    detection_threshold: float = Field(0.5, ge=0, le=1)
    """P(world changed) above it declares novelty."""
    round_size: int | None = Field(None, ge=1)
    """Instances of a round (default: as the test has it)."""
    feedback_max_ids: int | None = Field(None, ge=0)
    """Ids of feedback a round and type (default: as the test has it)."""
    attempts: int = Field(1, ge=1)
    """Sessions in which one owner of a token may run a test: truth of the first helps a second."""

    @property
    def strict(self) -> bool:
        return self.name == "evaluation"

    @property
    def fixed(self) -> dict[str, int]:
        """Metadata that the operator has set."""
        budgets = ("feedback_max_ids", "max_detection_feedback_ids")
        values = {"round_size": self.round_size, **dict.fromkeys(budgets, self.feedback_max_ids)}
        return {key: value for key, value in values.items() if value is not None}


EVALUATION = Policy()
PUBLISHED = Policy(name="published", red_light=True)


class ProtocolRefusal(NoveltyError):
    """A request is refused. 204 is the end of a dataset; the published client knows no other code
    than 204, 400 (the agent's mistake) and 500 (taken as the server's)."""

    def __init__(self, status: HttpStatus, reason: str, message: str):
        super().__init__(f"{reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


_STATUS: dict[str, HttpStatus] = {
    "EndOfDataset": 204,
    **dict.fromkeys(("KeyError", "ValueError", "UnicodeDecodeError"), 500),
    **dict.fromkeys(("test_id_invalid", "metadata_not_found", "result_file_not_found"), 500),
    **dict.fromkeys(("InvalidResults", "IncompleteResults"), 500),
    **dict.fromkeys(("SourceError", "LakeError", "Conflict", "TooManySessions"), 500),
}
"""Status by reason as the public server has it; all others are 400."""


def refused(reason: str, message: str, status: HttpStatus | None = None) -> ProtocolRefusal:
    """A refusal, with the status that goes with its reason unless another is named."""
    return ProtocolRefusal(status or _STATUS.get(reason, 400), reason, message)


class Limits(Settings):
    """Bounds that keep one agent from filling the machine."""

    post_bytes: int = 64 * 1024 * 1024
    """Bytes of one posted result file."""
    post_rows: int = 200_000
    """Lines of one posted result file."""
    post_columns: int = 10_000
    """Values on one posted line."""
    id_length: int = 512
    """Characters of an instance, test or session id, a type, a hint or a detector's name."""
    round_id: int = 1_000_000_000
    """Highest number of a round, either way from 0."""
    session_tests: int = 10_000
    """Tests of one session."""
    session_hints: int = 100
    """Hints of one session."""
    feedback_ids: int = 200_000
    """Ids asked for in one feedback request."""
    sessions: int = 100_000
    """Sessions that one store holds."""
    cached_sessions: int = 1_000
    """Session states kept in memory; the others are read again from the store."""


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


Kind = Literal["opened", "served", "posted", "feedback", "restarted", "completed", "terminated"]


@dataclass(frozen=True)
class Event:
    """One thing that happened. `attempt` counts restarts of a test; `body` is a posted file."""

    kind: Kind
    time: str
    test: str | None = None
    attempt: int = 0
    round: int | None = None
    type: str | None = None
    sha256: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None


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
        """Lines posted since the test's last restart: `posts.RESULTS`."""
        return self.run(session, PostedLines(test, kind))
