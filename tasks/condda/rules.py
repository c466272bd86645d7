"""Who asks, what the operator lets agents see, what a request may be at most, how one is refused.

Docs: docs/condda.md, "Policies" and rule 10.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from schemas.config import Settings
from schemas.errors import NoveltyError

Status = Literal[204, 400, 500]
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

    def __init__(self, status: Status, reason: str, message: str):
        super().__init__(f"{reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


_STATUS: dict[str, Status] = {
    "EndOfDataset": 204,
    **dict.fromkeys(("KeyError", "ValueError", "UnicodeDecodeError"), 500),
    **dict.fromkeys(("test_id_invalid", "metadata_not_found", "result_file_not_found"), 500),
    **dict.fromkeys(("InvalidResults", "IncompleteResults"), 500),
    **dict.fromkeys(("SourceError", "LakeError", "Conflict", "TooManySessions"), 500),
}
"""Status by reason as the public server has it; all others are 400."""


def refused(reason: str, message: str, status: Status | None = None) -> ProtocolRefusal:
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
