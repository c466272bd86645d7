"""Commands of the CONDDA/OND protocol, each with the answer it has, and what a decision is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.condda.session import Event


@dataclass(frozen=True)
class OpenSession:
    """Answer: None; the caller has chosen the session's id."""

    tests: tuple[str, ...]
    protocol: str
    domain: str
    detector: str
    hints: tuple[str, ...] = ()
    threshold: float = 0.5
    owner: str = ""


@dataclass(frozen=True)
class Metadata:
    """Answer: the metadata that an agent may see."""

    test: str


@dataclass(frozen=True)
class Dataset:
    """Answer: bytes of one round; refusal 204 at the end."""

    test: str
    round: int


@dataclass(frozen=True)
class Post:
    """Answer: None. `results` has the bytes of a file for each type."""

    test: str
    round: int
    results: Mapping[str, bytes]


@dataclass(frozen=True)
class Feedback:
    """Answer: bytes, maybe none. No ids: the last lines posted; no round: the last one posted."""

    test: str
    type: str
    ids: tuple[str, ...] = ()
    round: int | None = None


@dataclass(frozen=True)
class CompleteTest:
    """Answer: None."""

    test: str


@dataclass(frozen=True)
class CheckEvaluable:
    """Answer: None. `devmode` evaluates a test that is not completed."""

    test: str
    devmode: bool = False


@dataclass(frozen=True)
class Terminate:
    """Answer: None."""


@dataclass(frozen=True)
class Latest:
    """Answer: {"finished_tests": [...]}."""


@dataclass(frozen=True)
class Resume:
    """Answer: where to go on in a test: next_round (None at the end), rounds, posted, completed."""

    test: str


@dataclass(frozen=True)
class Status:
    """Answer: what the session was opened with and how far each test is."""


Command = (
    OpenSession
    | Metadata
    | Dataset
    | Post
    | Feedback
    | CompleteTest
    | CheckEvaluable
    | Terminate
    | Latest
    | Resume
    | Status
)


@dataclass(frozen=True)
class Decision:
    """What happens, and what the agent is told."""

    events: tuple[Event, ...] = ()
    answer: Any = None
