"""What a request may be at most, and how one is refused (docs/condda.md, rule 10)."""

from typing import Literal

from schemas.config import Settings
from schemas.errors import NoveltyError

Status = Literal[204, 400, 500]
Mode = Literal["strict", "compat"]


class ProtocolRefusal(NoveltyError):
    """A request is refused. 204 is the end of a dataset; the published client knows no other code
    than 204, 400 (the agent's mistake) and 500 (taken as the server's)."""

    def __init__(self, status: Status, reason: str, message: str):
        super().__init__(f"{reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


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
