"""What the /v1 API takes and answers, as pydantic models with their descriptions."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tasks.condda.rules import Limits

_MOST = Limits()
NAME: Any = {"pattern": r"^[\p{L}\p{N}_-][\p{L}\p{N}_.-]*$", "max_length": _MOST.id_length}
"""What the names of tests and types are like."""
Name = Annotated[str, Field(**NAME)]
Text = Annotated[str, Field(max_length=_MOST.id_length)]


class Model(BaseModel):
    """Base of what is sent and answered; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class OfferedTest(Model):
    """A test that a session may name."""

    test_id: str
    protocol: str
    domain: str


class NewSession(Model):
    """What a session is opened with."""

    protocol: str
    """OND or CONDDA."""
    domain: str
    """Domain of the tests, such as image_classification."""
    detector: Text
    """Name and version of the detector."""
    test_ids: Annotated[
        list[Name],
        Field(
            min_length=1,
            max_length=_MOST.session_tests,
            json_schema_extra={"uniqueItems": True},
        ),
    ]
    """Tests that the session will run."""
    hints: Annotated[list[Text], Field(max_length=_MOST.session_hints)] = []
    """red_light, where the operator allows it."""
    detection_threshold: float = Field(0.5, ge=0, le=1)
    """P(world changed) above which novelty counts as declared; the operator's."""


class TestProgress(Model):
    """How far a test is."""

    __test__ = False

    served: int
    """Rounds served."""
    posted: int
    """Rounds with results."""
    attempt: int
    """Restarts so far (the wire API restarts a test when round 0 is asked for again)."""
    completed: bool


class Session(Model):
    """A session and its tests."""

    session_id: str
    protocol: str
    domain: str
    detector: str
    owner: str
    """Owner of the token that opened it; empty without tokens."""
    hints: list[str]
    detection_threshold: float
    opened: str
    """Time of opening, ISO 8601."""
    terminated: str | None
    """Time of its end; null while it is open."""
    tests: dict[str, TestProgress]


class Place(Model):
    """Where to go on in a test."""

    test_id: str
    next_round: int | None
    """Round to ask for or to post next; null at the end."""
    rounds: int
    """Rounds of the test."""
    posted: list[str]
    """Result types that the next round already has."""
    completed: bool


class Round(Model):
    """Instances of one round."""

    round: int
    lines: list[str]
    """One per instance, as the wire API serves it: its id, for nlt also its text and so on."""


class Results(Model):
    """Result lines of one type."""

    ids: list[str]
    """Instance ids in the order of serving."""
    values: list[list[float | str]]
    """Values of each instance: P(world changed), or a vector of probabilities, or a text."""


class PostedResults(Model):
    """Result lines that the store holds, in the order of posting."""

    rounds: list[int]
    ids: list[str]
    values: list[list[float | None] | None]
    """Numbers of each line, null if not finite; null for a line with a cell that is no number."""
    cells: list[list[str] | None]
    """The cells of such a line as they were posted."""


class Question(Model):
    """What feedback is asked for."""

    type: str
    """Feedback type of the domain, such as classification, detection or score."""
    ids: Annotated[list[str], Field(max_length=_MOST.feedback_ids)] | None = None
    """Instances to be told about; null for the last ones posted."""
    round: Annotated[int, Field(ge=0, le=_MOST.round_id)] | None = None
    """The last round posted, or null for it."""


class Feedback(Model):
    """Feedback lines."""

    lines: list[list[str]]
    """Instance id and what is told, or a name and a number; none if novelty is not declared."""


class Problem(Model):
    """Why a request is refused."""

    reason: str
    """A fixed word for programs."""
    message: str
    """A sentence for people."""
