"""The web application: published REST API, /v1, operators' page, and the guard before them.

One harness answers all of it. `Guard` lets a request in: token and role, host, origin, size of the
body. The published paths (`ROUTES`) have their own policy and few status codes (CONDDA rules 9 and
10); they are answered without a framework, for speed: `read_sent` takes a request apart, a handler
gets what it carries, calls one method of the harness and answers as the public server. /v1 is
our own and always `evaluation`, so that reading a round is never a restart. A refusal says the same
everywhere; its status code is looked up here.
"""

import asyncio
import base64
import binascii
import hmac
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from urllib3.filepost import encode_multipart_formdata
from werkzeug.exceptions import HTTPException as WerkzeugError
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder

from tasks.condda import commands
from tasks.condda.commands import CALLER, Caller, HttpStatus, ProtocolRefusal, refused
from tasks.condda.harness import Harness
from tasks.condda.server.api import API, api_router
from tasks.condda.server.connection import BODY
from tasks.condda.server.page import OPERATOR, docs_router, page_router
from tasks.condda.server.serve import Token
from tasks.condda.session import check_text, check_texts
from tasks.condda.test_files import CELL_EDGES

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Room for names and headers of parts around the files themselves.
_ENVELOPE_BYTES = 1024 * 1024
# The longest that a client may send nothing, and that its whole body may take.
_CHUNK_SECONDS = 60.0
_BODY_SECONDS = 600.0
_WORKERS = 32
_log = logging.getLogger(__name__)
_UNREADABLE = "a file of the server cannot be read or written; its log says which one and why"

_REASONS = {
    403: "HintNotAllowed InvalidThreshold",
    404: "session_id_invalid test_id_invalid test_not_in_session metadata_not_found BadDomain "
    "InvalidFeedbackType EndOfDataset result_file_not_found",
    409: "RoundOrder RoundNotServed DetectionRepost ResultRepost TestCompleted SessionEnded "
    "TestIncomplete TestInProcess DetectionPostRequired KeyError FeedbackBudgetExceeded "
    "IncompleteResults ResultsMissing NotLastRound SessionExists SessionOpen AttemptsExceeded",
    413: "TooLarge",
    500: "LakeError SourceError",
    503: "TooManySessions Conflict",
}
_OUR_STATUS = {name: status for status, names in _REASONS.items() for name in names.split()}
"""Status of a refusal outside of the published paths; 422 of all others."""
# On the published paths the harness's own, but for what the agent can mend.
_WIRE_STATUS = dict.fromkeys(("UnicodeDecodeError", "InvalidResults", "IncompleteResults"), 400)


def make_app(harness: Harness, *, tokens: Sequence[Token] = ()) -> ASGIApp:
    """The application over one store of tests and events; `tokens` lock every route."""
    app = FastAPI(
        title="CONDDA and OND test server",
        description="Sessions, tests, rounds, results, feedback and metrics of novelty detectors.",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    # A further part of the server is a router more: of agents below /v1, by the same harness.
    app.include_router(api_router(_evaluating(harness), harness.policy))
    app.include_router(page_router(harness))
    app.include_router(docs_router(app.openapi))
    for kind in (HTTPException, RequestValidationError, ProtocolRefusal, Exception):
        app.add_exception_handler(kind, _refusal)
    return Guard(app, harness, tokens)


def _evaluating(harness: Harness) -> Harness:
    if harness.policy.strict:
        return harness
    policy = harness.policy.model_copy(update={"name": "evaluation"})
    return Harness(harness.library, harness.store, policy, limits=harness.limits)


def _is_ours(path: str) -> bool:
    """Whether any status code may be used: not on the wire, nor where a wire client may stray."""
    return path == "/" or path.startswith((API, OPERATOR, "/docs", "/openapi.json"))


def error_response(
    path: str, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A refusal as the part of the server that was asked says it.

    The published client takes any status but 200, 204, 400 and 500 for a success, and needs three
    keys in an error; there is never a real trace.
    """
    if status == 204:
        return Response(status_code=204, media_type="application/json")
    content = {"message": message, "reason": reason}
    if not _is_ours(path):
        status = 400 if status < 500 else 500
        content["stack_trace"] = ""
    text = json.dumps(content, separators=(",", ":")) + "\n"
    response = Response(text, status, headers, media_type="application/json")
    if status == 401:
        response.headers["www-authenticate"] = 'Basic realm="novelty", charset="UTF-8"'
    return response


def response_to(path: str, error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """What is answered instead of an answer; a trace goes to the server's log only."""
    match error:
        case _Refused():
            status, reason, message = error.args
            return error_response(path, status, reason, message, {"connection": "close"})
        case ProtocolRefusal(reason=reason, message=message):
            if reason in ("SourceError", "LakeError"):
                # What is wrong with a file may be ground truth.
                _log.error("%s", message)
                message = _UNREADABLE
            ours, wire = _OUR_STATUS.get(reason, 422), _WIRE_STATUS.get(reason, error.status)
            return error_response(path, ours if _is_ours(path) else wire, reason, message)
        case RequestValidationError():
            # What was sent is not sent back: it may be large, or no JSON (NaN).
            message = "; ".join(f"{_place(one)}: {one['msg']}" for one in error.errors()[:5])
            return error_response(path, 422, "InvalidRequest", message)
        case HTTPException(status_code=status, detail=message):
            reason = {404: "NotFound", 405: "MethodNotAllowed"}.get(status, "InvalidRequest")
            # The framework's 400 is a body that it cannot read.
            status = 422 if status == 400 else status
            return error_response(path, status, reason, str(message), headers)
    return error_response(path, 500, "InternalError", "a defect of the server; see its log")


def _place(wrong: Mapping[str, Any]) -> str:
    """Where something is wrong, such as test_ids[0], of what pydantic says."""
    _, *names = wrong["loc"]
    if not names or wrong["type"] == "json_invalid":
        return "the body"
    kinds = ("float", "str", "[key]")  # what it tried to read a value as
    while len(names) > 1 and names[-1] in kinds:
        names.pop()
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)[1:]


async def _refusal(request: Request, error: Exception) -> Response:
    wrong_method = isinstance(error, HTTPException) and error.status_code == 405
    headers = {"allow": ", ".join(_methods(request))} if wrong_method else {}
    return response_to(request.url.path, error, headers)


def _methods(request: Request) -> list[str]:
    """Methods that a path has."""

    def has(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in ("DELETE", "GET", "POST", "PUT") if has(method)]


class _Refused(Exception):
    """Status, reason and message of a request that is not let in."""


class Guard:
    """ASGI middleware: lets a request in with its whole body read, or answers it.

    A token comes as `Authorization: Bearer <token>`, or as the password of Basic authorization,
    which is what a browser asks its user for and what the published client makes of
    http://agent:<token>@host. Its owner is the caller; an agent sees no page of operators. Without
    tokens only this machine is served, so the Host must be one
    of its names: else a web page elsewhere could reach the server through a name of its own.
    A request that a browser sends for a page of another origin is refused.
    """

    def __init__(self, app: ASGIApp, harness: Harness, tokens: Sequence[Token] = ()):
        self.app = app
        self.harness = harness
        self.tokens = {token.text.encode(): token.caller for token in tokens}
        self.body_bytes = harness.limits.post_bytes + _ENVELOPE_BYTES
        self.workers = ThreadPoolExecutor(_WORKERS, "condda request")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        try:
            caller, body = self._caller(headers, path), scope["state"].get(BODY)
            if body is None:
                body = await self._body(headers, receive)
        except _Refused as error:
            response = response_to(path, error)
            if error.args[0] == 413:
                await self._refuse(response, receive, send)
                return
        else:
            if body is None:
                return  # the client has gone
            if path not in _WIRE:
                CALLER.set(caller)
                await self.app(scope, _replay(body, receive), send)
                return
            response = await asyncio.get_running_loop().run_in_executor(
                self.workers, self._answer, caller, scope, headers.get("content-type", ""), body
            )
        await response(scope, receive, send)

    def _answer(self, caller: Caller, scope: Scope, content_type: str, body: bytes) -> Response:
        """The answer of a published path, made in a thread of its own."""
        CALLER.set(caller)
        path, handlers = scope["path"], _WIRE[scope["path"]]
        if scope["method"] not in handlers:
            allowed = {"allow": ", ".join(sorted(handlers))}
            return error_response(path, 405, "MethodNotAllowed", "Method Not Allowed", allowed)
        # The first of a name counts.
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        try:
            sent = read_sent(content_type, dict(reversed(pairs)), body)
            return handlers[scope["method"]](self.harness, sent)
        except Exception as error:
            if not isinstance(error, ProtocolRefusal):
                _log.exception("a defect in the answer to %s", path)
            return response_to(path, error)

    def _caller(self, headers: Headers, path: str) -> Caller:
        """Who asks, if it may."""
        host, caller = headers.get("host", ""), CALLER.get()
        if self.tokens:
            owner = self._owner(headers.get("authorization", ""))
            if owner is None:
                raise _Refused(401, "Unauthorized", "send the header Authorization: Bearer <token>")
            if owner.role == "agent" and (path == "/" or path.startswith(OPERATOR)):
                raise _Refused(403, "Forbidden", "this page is for operators")
            caller = owner
        elif _host_name(host) not in LOOPBACK:
            raise _Refused(403, "WrongHost", "this server answers only as 127.0.0.1 or localhost")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise _Refused(403, "WrongOrigin", "requests from pages of other origins are refused")
        return caller

    def _owner(self, authorization: str) -> Caller | None:
        scheme, _, given = authorization.partition(" ")
        token = given.strip().encode("utf-8", "replace")
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif scheme.lower() != "bearer":
            return None
        # All are compared: the time taken does not tell which one it was.
        same = [owner for known, owner in self.tokens.items() if hmac.compare_digest(token, known)]
        return same[0] if same else None

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None if the client went away."""
        too_large = _Refused(413, "TooLarge", f"a request has at most {self.body_bytes} bytes")
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self.body_bytes:
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while more:
                    message = await asyncio.wait_for(receive(), _CHUNK_SECONDS)
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self.body_bytes:
                        body.clear()
                        raise too_large
        except TimeoutError:
            raise _Refused(408, "Timeout", "the body took too long") from None
        return bytes(body)

    async def _refuse(self, response: Response, receive: Receive, send: Send) -> None:
        """Answer at once, then take what still comes: a client may read when it has sent all.

        Twice the limit is enough; nothing of it is kept.
        """
        status, headers = response.status_code, response.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        size, more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(_BODY_SECONDS):
                while more and size <= 2 * self.body_bytes:
                    message = await asyncio.wait_for(receive(), _CHUNK_SECONDS)
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)
        await send({"type": "http.response.body"})


@lru_cache(256)
def _host_name(host: str) -> str:
    """Name of a Host header without its port, of [::1]:80 too; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or "" if host.isprintable() else ""
    except ValueError:
        return ""


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


# Literally so on the public server, whatever the encoding of the body.
DATASET_TYPE = "Content-Type: text/csv; charset=utf-16"
_DEFAULT_DOMAIN = "image_classification"
_MOST_PARTS = 100


Handler = Callable[[Harness, "Sent"], Response]


@dataclass(frozen=True)
class Sent:
    """What a request carries. An item is looked up in parts, then query, then JSON body."""

    parts: Mapping[str, bytes]
    query: Mapping[str, str]
    document: Mapping[str, Any]

    def find(self, name: str) -> Any:
        """Bytes of a part, text of a query parameter, or any JSON; None if there is none."""
        if name in self.parts:
            return self.parts[name]
        return self.query.get(name, self.document.get(name))

    def text(self, name: str) -> str | None:
        """The same as text."""
        found = self.find(name)
        if isinstance(found, bytes):
            try:
                return found.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise refused("UnicodeDecodeError", f"{name} is not UTF-8 text") from error
        return None if found is None else check_text(found, name)

    def settings(self, name: str, invalid: HttpStatus = 400) -> dict[str, Any] | None:
        """The same as a JSON object; `invalid` is the status if it is none."""
        found = self.find(name)
        if isinstance(found, Mapping):
            return dict(found)
        content = self.text(name)
        return None if content is None else json_object(content, name, invalid)

    def need(self, *names: str) -> list[str]:
        """Query parameters that must be there."""
        return list(needed(self.query, *names).values())


def read_sent(content_type: str, query: Mapping[str, str], body: bytes) -> Sent:
    """Take a request's body apart as its content type says."""
    kind, options = parse_options_header(content_type)
    if kind == "multipart/form-data":
        return Sent(_parts(body, options.get("boundary", "")), query, {})
    if kind == "application/x-www-form-urlencoded":
        pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
        return Sent({name: value.encode() for name, value in pairs}, query, {})
    if kind == "application/json" and body:
        return Sent({}, query, json_object(body, "the body"))
    return Sent({}, query, {})


def _parts(body: bytes, boundary: str) -> dict[str, bytes]:
    """Parts by name, the first one of each; whether a part has a filename does not matter."""
    parts: dict[str, bytes] = {}
    name, chunks = "", io.BytesIO()
    try:
        decoder = MultipartDecoder(boundary.encode("ascii"), max_parts=_MOST_PARTS)
        decoder.receive_data(body)
        decoder.receive_data(None)
        while not isinstance(event := decoder.next_event(), Epilogue):
            if isinstance(event, Field | File):
                name, chunks = event.name, io.BytesIO()
            elif isinstance(event, Data):
                chunks.write(event.data)
                if not event.more_data:
                    parts.setdefault(name, chunks.getvalue())
    except (ValueError, KeyError, WerkzeugError) as error:
        raise refused("InvalidMultipart", "the body is not multipart/form-data") from error
    return parts


def json_object(content: str | bytes, name: str, invalid: HttpStatus = 400) -> dict[str, Any]:
    """A JSON object out of text."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refused("JSONDecodeError", f"{name} is not JSON", invalid) from error
    if not isinstance(found, dict):
        raise refused("InvalidParams", f"{name} is no JSON object")
    return found


def needed(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those values, all of which must be there."""
    lacking = [name for name in names if name not in values]
    if lacking:
        raise refused("MissingParamsError", f"the request lacks {', '.join(lacking)}")
    return {name: values[name] for name in names}


def json_response(content: Any, status: int = 200) -> Response:
    """JSON in the public server's form: sorted, without blanks, with a line end."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"
    return Response(text, status, media_type="application/json")


def _csv(body: bytes) -> Response:
    return Response(body, media_type="text/csv; charset=utf-8")


def _page(text: str) -> Response:
    return Response(text, media_type="text/html; charset=utf-8")


def list_tests(harness: Harness, sent: Sent) -> Response:
    """GET /test/ids."""
    wanted = sent.settings("test_requirements")
    if wanted is None:
        protocol = sent.text("protocol")
        if protocol is None:
            raise refused("MissingRequestValue", "test_requirements or protocol is missing")
        domain = sent.text("domain")
        wanted = {"protocol": protocol, "domain": _DEFAULT_DOMAIN if domain is None else domain}
    else:
        needed(wanted, "protocol", "domain", "detector_seed")
    return _csv(harness.test_ids_request(protocol=wanted["protocol"], domain=wanted["domain"]))


def open_session(harness: Harness, sent: Sent) -> Response:
    """POST /session."""
    settings = sent.settings("configuration", invalid=500) or {}
    named = needed(settings, "protocol", "novelty_detector_version", "detection_threshold")
    if "test_ids" in settings:
        tests = settings["test_ids"]
    elif (listed := sent.text("test_ids")) is None:
        raise refused("MissingParamsError", "the request lacks test_ids")
    else:
        tests = [line.strip(CELL_EDGES + ",\r\t") for line in listed.split("\n") if line.strip()]
    session = harness.session_request(
        test_ids=tests,
        domain=settings.get("domain", _DEFAULT_DOMAIN),
        hints=settings.get("hints", []),
        **named,
    )
    return json_response({"session_id": session})


def _by_query(answered: Callable[[Any], Response], command: Any, *names: str) -> Handler:
    """A call whose command is made of the query."""

    def handler(harness: Harness, sent: Sent) -> Response:
        session, *values = sent.need("session_id", *names)
        return answered(harness.run(session, command(*values)))

    return handler


def _dataset(body: bytes) -> Response:
    return Response(body, headers={"content-type": DATASET_TYPE})


def _done(_: None) -> Response:
    return _page("OK")


def results(harness: Harness, sent: Sent) -> Response:
    """POST /session/results."""
    about = sent.settings("test_identification") or {}
    types = needed(about, "result_types")["result_types"]
    _post(harness, sent, about, check_text(types, "result_types").split("|"))
    return _page("OK")


def _post(harness: Harness, sent: Sent, about: dict[str, Any], types: Sequence[str]) -> None:
    session, test, number = needed(about, "session_id", "test_id", "round_id").values()
    files = {}
    for kind in types:
        body = sent.find(f"{kind}_file")
        if body is None:
            raise refused("MissingParamsError", f"the request lacks the file {kind[:80]}_file")
        files[kind] = body if isinstance(body, bytes) else check_text(body, kind).encode()
    harness.run(session, commands.Post(test, number, files))


def feedback(harness: Harness, sent: Sent) -> Response:
    """GET /session/feedback."""
    session, test, types = sent.need("session_id", "test_id", "feedback_type")
    ids = sent.query.get("feedback_ids", "")
    number = sent.query.get("round_id", "last")
    if not harness.policy.strict and not number.isdecimal():
        number = "last"  # the public server only puts it into a file's name
    asked = {"feedback_ids": ids.split("|") if ids else None, "round_id": number}
    return _feedback(harness, session, test, types.split("|"), number, asked)


def results_feedback(harness: Harness, sent: Sent) -> Response:
    """POST /session/resultsfeedback: types and ids are JSON lists here."""
    about = sent.settings("test_identification") or {}
    session, test, number, types = needed(
        about, "session_id", "test_id", "round_id", "result_types"
    ).values()
    kinds = check_texts(about.get("feedback_types", []), "feedback_types")
    ids = about.get("feedback_ids")
    ids = None if ids is None else check_texts(ids, "feedback_ids")
    types = check_texts(types, "result_types")
    if not types:
        raise refused("MissingParamsError", "the request names no result type")
    _post(harness, sent, about, types)
    if not kinds:
        return _csv(b"")
    asked = {"feedback_ids": ids, "round_id": "last"}
    return _feedback(harness, session, test, kinds, number, asked)


def _feedback(
    harness: Harness, session: str, test: str, kinds: Sequence[str], number: Any, asked: Any
) -> Response:
    """Lines of one type as CSV; of several as multipart, one part each (docs/condda.md, rule 9)."""
    place = {"session_id": session, "test_id": test, **asked}
    answers = {kind: harness.get_feedback_request(feedback_type=kind, **place) for kind in kinds}
    if len(kinds) == 1:
        return _csv(answers[kinds[0]])
    # What the harness took for a number is one; only then may it stand in a header.
    name = f"{session}.{test}.{'last' if number in ('', 'last') else int(number)}"
    parts = {kind: (f"{name}_{kind}.csv", lines, "text/csv") for kind, lines in answers.items()}
    body, content_type = encode_multipart_formdata(parts)
    return Response(body, headers={"content-type": content_type})


def evaluations(harness: Harness, sent: Sent) -> Response:
    """GET /session/evaluations; `baseline_session_id` is ours and adds m_nrp.

    Published: devmode evaluates a test that goes on, so it tells about ground truth; not if strict.
    """
    session, test = sent.need("session_id", "test_id")
    metrics = harness.evaluate(
        test_id=test,
        session_id=session,
        baseline_session_id=sent.query.get("baseline_session_id"),
        devmode=not harness.policy.strict and _is_true(sent.query.get("devmode", "")),
    )
    return json_response(metrics)


def status(harness: Harness, sent: Sent) -> Response:
    """GET /session/status."""
    tests, of = sent.query.get("test_ids"), sent.query.get
    lines = harness.session_status(
        after=of("after"),
        session_id=of("session_id"),
        test_ids=tests.split("|") if tests else None,
        detector=of("detector"),
        include_tests=_is_true(of("include_tests", "")),
    )
    return _page(lines)


def archive(harness: Harness, sent: Sent) -> Response:
    """GET /session/zip."""
    [session] = sent.need("session_id")
    tests = sent.query.get("test_id")
    content = harness.session_zip(session_id=session, test_ids=tests.split("|") if tests else None)
    # The session exists, so its id is a name without quotes or line ends.
    headers = {"content-disposition": f'attachment; filename="{session}.zip"'}
    return Response(content, headers=headers, media_type="application/zip")


def _is_true(value: str) -> bool:
    return value.lower() not in ("", "0", "false")


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/test/ids", list_tests),
    ("GET", "/test/metadata", _by_query(json_response, commands.Metadata, "test_id")),
    ("DELETE", "/test", _by_query(_done, commands.CompleteTest, "test_id")),
    ("POST", "/session", open_session),
    ("DELETE", "/session", _by_query(_done, commands.Terminate)),
    ("GET", "/session/latest", _by_query(json_response, commands.Latest)),
    ("GET", "/session/dataset", _by_query(_dataset, commands.Dataset, "test_id", "round_id")),
    ("POST", "/session/results", results),
    ("GET", "/session/feedback", feedback),
    ("POST", "/session/resultsfeedback", results_feedback),
    ("GET", "/session/evaluations", evaluations),
    ("GET", "/session/status", status),
    ("GET", "/session/zip", archive),
)
_WIRE: dict[str, dict[str, Any]] = {}
for _method, _path, _handler in ROUTES:
    _WIRE.setdefault(_path, {})[_method] = _handler
