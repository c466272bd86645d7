"""The /v1 JSON API: sessions, tests, rounds, results, feedback and metrics as resources.

Our own counterpart of the wire API, over the same harness calls (CONDDA rule 2), always by the
policy `evaluation`. First what is sent and answered, then the routes.
PUT and DELETE may be repeated: the same content again changes nothing and is answered the same.
Feedback spends a budget each time it is asked for (docs/condda.md, rule 6). Refusals are
{"reason", "message"} with 403, 404, 409, 413 or 422.
"""

import csv
import io
import math
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from tasks.condda import commands
from tasks.condda.commands import Limits, Policy, ProtocolRefusal, refused
from tasks.condda.domains import DOMAINS
from tasks.condda.harness import Harness
from tasks.condda.media import TYPES, MediaLinks
from tasks.condda.session import check_text
from tasks.condda.store import Conflict

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
    """The last round posted; null for it, or for ids of any round that was answered."""


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


API = "/v1"
SessionId = Annotated[str, Path(description="Id of a session")]
TestId = Annotated[str, Path(description="Id of a test", **NAME)]
RoundId = Annotated[int, Path(description="Number of a round", ge=0, le=Limits().round_id)]
_SESSION = "/sessions/{session_id}"
_TEST = _SESSION + "/tests/{test_id}"


def finite(content: Any) -> Any:
    """The same with null for numbers that JSON has not."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def csv_bytes(results: Results) -> bytes:
    """A result file of the wire's form; the same results always give the same bytes."""
    if len(results.ids) != len(results.values):
        raise refused("InvalidParams", "ids and values differ in length")
    for name in results.ids:
        check_text(name, "ids")
    buffer = io.StringIO()
    rows = zip(results.ids, results.values, strict=True)
    csv.writer(buffer, lineterminator="\n").writerows([name, *row] for name, row in rows)
    return check_text(buffer.getvalue(), "values").encode()


def _open(harness: Harness, wanted: NewSession, session_id: str | None = None) -> str:
    named = (wanted.protocol, wanted.domain, wanted.detector)
    asked = (wanted.hints, wanted.detection_threshold)
    return harness.run(session_id, commands.OpenSession(wanted.test_ids, *named, *asked))


def _session(harness: Harness, session_id: str) -> Session:
    return Session(**harness.session_progress(session_id=session_id))


def api_router(harness: Harness, policy: Policy) -> APIRouter:
    """Routes of /v1 over a harness with the policy `evaluation`; `policy` is the wire API's."""
    described: dict[int | str, dict[str, Any]] = {
        401: {"description": "No token"},
        403: {"description": "The operator does not allow it"},
        404: {"description": "No such session, test, round or type"},
        409: {"description": "Not now: out of order, done before otherwise, completed or ended"},
        413: {"description": "Too large"},
        422: {"description": "Not understood"},
    }
    described = {code: {"model": Problem, **about} for code, about in described.items()}
    router = APIRouter(prefix=API, responses=described)

    @router.get("/policy", tags=["tests"], summary="What the published paths let agents ask for")
    def operators_policy() -> Policy:
        return policy

    _add_sessions(router, harness)
    _add_tests(router, harness)
    _add_results(router, harness)
    _add_media(router, harness)
    return router


def _add_sessions(router: APIRouter, harness: Harness) -> None:
    @router.get("/tests", tags=["tests"], summary="Tests on offer")
    def offered(
        protocol: Annotated[str, Query(description="OND or CONDDA")],
        domain: Annotated[str, Query(description="Domain of the tests")],
    ) -> list[OfferedTest]:
        listed = harness.offered_tests(protocol=protocol, domain=domain)
        return [OfferedTest(test_id=test, protocol=protocol, domain=domain) for test in listed]

    @router.get("/sessions", tags=["sessions"], summary="Ids of sessions, newest first")
    def sessions(
        limit: Annotated[int, Query(ge=1, le=1000, description="How many at most")] = 100,
        skip: Annotated[int, Query(ge=0, description="How many newer ones to leave out")] = 0,
    ) -> list[str]:
        return harness.sessions()[::-1][skip : skip + limit]

    @router.post("/sessions", status_code=201, tags=["sessions"], summary="Open a session")
    def open_session(wanted: NewSession) -> Session:
        return _session(harness, _open(harness, wanted))

    @router.put(
        _SESSION, status_code=201, tags=["sessions"], summary="Open a session under a chosen id"
    )
    def put_session(
        session_id: Annotated[
            str, Path(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", description="A UUID")
        ],
        wanted: NewSession,
        response: Response,
    ) -> Session:
        try:
            _open(harness, wanted, session_id)
        except Conflict:
            session = _session(harness, session_id)
            opened = {**session.model_dump(), "test_ids": list(session.tests)}
            if wanted.model_dump() != {key: opened[key] for key in NewSession.model_fields}:
                said = "this id belongs to a session that was opened otherwise"
                raise refused("SessionExists", said) from None
            response.status_code = 200
        return _session(harness, session_id)

    @router.get(_SESSION, tags=["sessions"], summary="A session and how far its tests are")
    def session(session_id: SessionId) -> Session:
        return _session(harness, session_id)

    @router.delete(_SESSION, status_code=204, tags=["sessions"], summary="End a session")
    def end_session(session_id: SessionId) -> None:
        if _session(harness, session_id).terminated is None:
            _unless("SessionEnded", lambda: harness.terminate_session(session_id=session_id))

    @router.get(
        _SESSION + "/archive",
        tags=["sessions"],
        summary="Logs and result files as a zip archive",
        response_class=Response,
        responses={200: {"content": {"application/zip": {}}}},
    )
    def archive(session_id: SessionId) -> Response:
        return Response(harness.session_zip(session_id=session_id), media_type="application/zip")


def _unless(reason: str, call: Any) -> None:
    """Call; being refused because it was done before is as good."""
    try:
        call()
    except ProtocolRefusal as refusal:
        if refusal.reason != reason:
            raise


def _add_tests(router: APIRouter, harness: Harness) -> None:
    @router.get(_TEST, tags=["tests"], summary="Where to go on in a test")
    def place(session_id: SessionId, test_id: TestId) -> Place:
        return Place(**harness.resume_test(session_id=session_id, test_id=test_id))

    @router.get(_TEST + "/metadata", tags=["tests"], summary="What an agent may know of a test")
    def metadata(session_id: SessionId, test_id: TestId) -> dict[str, Any]:
        return finite(harness.get_test_metadata(session_id=session_id, test_id=test_id))

    @router.put(_TEST + "/completion", status_code=204, tags=["tests"], summary="End a test")
    def complete(session_id: SessionId, test_id: TestId) -> None:
        _session(harness, session_id)
        _unless("TestCompleted", lambda: harness.run(session_id, commands.CompleteTest(test_id)))

    @router.get(_TEST + "/rounds/{round_id}", tags=["rounds"], summary="Instances of a round")
    def get_round(session_id: SessionId, test_id: TestId, round_id: RoundId) -> Round:
        body = harness.run(session_id, commands.Dataset(test_id, round_id))
        domain = harness.session_progress(session_id=session_id)["domain"]
        encoding = DOMAINS[domain].encoding
        return Round(round=round_id, lines=body.decode(encoding).removesuffix("\n").split("\n"))

    @router.get(
        _TEST + "/metrics",
        tags=["metrics"],
        summary="Metrics of a completed test, as the public server's",
    )
    def metrics(
        session_id: SessionId,
        test_id: TestId,
        baseline: Annotated[
            str | None, Query(description="A session to compare with, for m_nrp")
        ] = None,
    ) -> dict[str, Any]:
        _session(harness, session_id)
        return finite(harness.run(session_id, commands.Evaluate(test_id, baseline=baseline)))

    @router.get(
        _TEST + "/rounds/{round_id}/metrics",
        tags=["metrics"],
        summary="Accuracy of a round of a completed test",
    )
    def round_metrics(session_id: SessionId, test_id: TestId, round_id: RoundId) -> dict[str, Any]:
        _session(harness, session_id)
        return finite(harness.run(session_id, commands.EvaluateRound(test_id, round_id)))


def _add_results(router: APIRouter, harness: Harness) -> None:
    @router.put(
        _TEST + "/rounds/{round_id}/results",
        status_code=204,
        tags=["results"],
        summary="Post the results of a round, all types or none",
    )
    def put_results(
        session_id: SessionId,
        test_id: TestId,
        round_id: RoundId,
        results: Annotated[
            dict[Name, Results],
            Body(
                description="Result lines by type",
                min_length=1,
                json_schema_extra={"additionalProperties": False},
            ),
        ],
    ) -> None:
        # Whether there is such a test comes before what is wrong with the lines.
        harness.resume_test(session_id=session_id, test_id=test_id)
        files = {kind: csv_bytes(lines) for kind, lines in results.items()}
        harness.run(session_id, commands.Post(test_id, round_id, files))

    @router.get(_TEST + "/results/{type}", tags=["results"], summary="Result lines posted so far")
    def get_results(
        session_id: SessionId,
        test_id: TestId,
        type: Annotated[str, Path(description="Result type, such as detection", **NAME)],
    ) -> PostedResults:
        frame = harness.results(session_id, test_id, type)
        return PostedResults(
            rounds=frame["round"].to_list(),
            ids=frame["instance_id"].to_list(),
            values=finite(frame["values"].to_list()),
            cells=frame["cells"].to_list(),
        )

    @router.post(_TEST + "/feedback", tags=["feedback"], summary="Ask for feedback")
    def feedback(session_id: SessionId, test_id: TestId, question: Question) -> Feedback:
        asked = (question.type, question.ids or (), question.round)
        told = harness.run(session_id, commands.Feedback(test_id, *asked))
        return Feedback(lines=[line.split(",") for line in told.decode().splitlines()])


def _add_media(router: APIRouter, harness: Harness) -> None:
    media, place = MediaLinks(harness), _TEST + "/media"
    test = Annotated[str, Path(description="Id of a test")]

    @router.get(place, tags=["media"], summary="Links to the media of served instances, in order")
    def links(session_id: SessionId, test_id: test) -> dict[str, Any]:
        answer = media.links(session_id, test_id)
        base = f"{API}{place.format(session_id=session_id, test_id=test_id)}"
        for link in answer["links"]:
            link["url"] = f"{base}/{link.pop('path')}"
        return answer

    @router.get(
        place + "/{instance_id}",
        tags=["media"],
        summary="The picture or cloud of a link",
        response_class=Response,
        responses={200: {"content": {kind: {} for kind in TYPES.values()}}},
    )
    def medium(
        session_id: SessionId,
        test_id: test,
        instance_id: Annotated[str, Path(description="Id of a served instance")],
        expires: Annotated[int, Query(description="Seconds since 1970", ge=0, le=1 << 53)],
        signature: Annotated[str, Query(description="As the link has it", max_length=64)],
    ) -> Response:
        data, kind = media.read(session_id, test_id, instance_id, expires, signature)
        return Response(data, media_type=kind, headers={"cache-control": "no-store"})
