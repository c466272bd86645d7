"""The web application: published wire API, /v1, operators' page, and the guard before them.

One harness answers all of it. The published paths have their own policy and few status codes
(CONDDA rules 9 and 10); they are answered without a framework, for speed. /v1 is
our own and always `evaluation`, so that reading a round is never a restart. `Guard` lets a request
in: token and role, host, origin, size of the body. A refusal says the same everywhere; its status
code is looked up here.
"""

import asyncio
import base64
import binascii
import hmac
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.condda.harness import Harness
from tasks.condda.rules import CALLER, Caller, ProtocolRefusal
from tasks.condda.server.api import API, api_router
from tasks.condda.server.connection import BODY
from tasks.condda.server.page import OPERATOR, docs_router, page_router
from tasks.condda.server.serve import Token
from tasks.condda.server.wire import ROUTES, read_sent

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Room for names and headers of parts around the files themselves.
_ENVELOPE_BYTES = 1024 * 1024
# The longest that a client may send nothing, and that its whole body may take.
_CHUNK_SECONDS = 60.0
_BODY_SECONDS = 600.0
_WORKERS = 32
_log = logging.getLogger(__name__)
_DEFECT = (500, "InternalError", "a defect of the server; see its log")

_REASONS = {
    403: "HintNotAllowed InvalidThreshold",
    404: "session_id_invalid test_id_invalid test_not_in_session metadata_not_found BadDomain "
    "InvalidFeedbackType EndOfDataset result_file_not_found",
    409: "RoundOrder RoundNotServed DetectionRepost ResultRepost TestCompleted SessionEnded "
    "TestIncomplete TestInProcess DetectionPostRequired KeyError FeedbackBudgetExceeded "
    "IncompleteResults NotLastRound SessionExists SessionOpen AttemptsExceeded",
    413: "TooLarge",
    500: "LakeError SourceError",
    503: "TooManySessions Conflict",
}
_OUR_STATUS = {name: status for status, names in _REASONS.items() for name in names.split()}
"""Status of a refusal outside of the published paths; 422 of all others."""
# On the published paths the harness's own, but for what the agent can mend.
_WIRE_STATUS = dict.fromkeys(("UnicodeDecodeError", "InvalidResults", "IncompleteResults"), 400)
_WIRE: dict[str, dict[str, Any]] = {}
for _method, _path, _handler in ROUTES:
    _WIRE.setdefault(_path, {})[_method] = _handler


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
    evaluating = _evaluating(harness)
    app.include_router(api_router(evaluating))
    app.include_router(page_router(harness))
    app.include_router(docs_router(app.openapi))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ProtocolRefusal, _refusal)
    app.add_exception_handler(Exception, _defect)
    return Guard(app, harness, tokens)


def _evaluating(harness: Harness) -> Harness:
    if harness.policy.strict:
        return harness
    policy = harness.policy.model_copy(update={"name": "evaluation"})
    return Harness(harness.library, harness.store, policy, limits=harness.limits)


def _is_ours(path: str) -> bool:
    """Whether any status code may be used: not on the wire, nor where a wire client may stray."""
    return path == "/" or path.startswith((API, OPERATOR, "/docs", "/openapi.json"))


def refused(
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


def _protocol_refused(path: str, refusal: ProtocolRefusal) -> Response:
    reason, message = refusal.reason, refusal.message
    if reason in ("SourceError", "LakeError"):
        # What is wrong with a file may be ground truth.
        _log.error("%s", message)
        message = "a file of the server cannot be read or written; its log says which one and why"
    if _is_ours(path):
        return refused(path, _OUR_STATUS.get(reason, 422), reason, message)
    return refused(path, _WIRE_STATUS.get(reason, refusal.status), reason, message)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # The framework's 400 is a body that it cannot read.
    status = 422 if error.status_code == 400 else error.status_code
    reason = {404: "NotFound", 405: "MethodNotAllowed"}.get(status, "InvalidRequest")
    headers = {"allow": ", ".join(_methods(request))} if status == 405 else {}
    return refused(request.url.path, status, reason, str(error.detail), headers)


def _methods(request: Request) -> list[str]:
    """Methods that a path has."""

    def has(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in ("DELETE", "GET", "POST", "PUT") if has(method)]


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # What was sent is not sent back: it may be large, or no JSON (NaN).
    places = [
        f"{'.'.join(str(part) for part in wrong['loc'])}: {wrong['msg']}"
        for wrong in error.errors()[:5]
    ]
    return refused(request.url.path, 422, "InvalidRequest", "; ".join(places))


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProtocolRefusal)
    return _protocol_refused(request.url.path, error)


async def _defect(request: Request, error: Exception) -> Response:
    # The trace goes to the server's log, not to the client.
    return refused(request.url.path, *_DEFECT)


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
        except _Refused as refusal:
            status, reason, message = refusal.args
            response = refused(path, status, reason, message, {"connection": "close"})
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
            return refused(path, 405, "MethodNotAllowed", "Method Not Allowed", allowed)
        # The first of a name counts.
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        try:
            sent = read_sent(content_type, dict(reversed(pairs)), body)
            return handlers[scope["method"]](self.harness, sent)
        except ProtocolRefusal as refusal:
            return _protocol_refused(path, refusal)
        except Exception:
            _log.exception("a defect in the answer to %s", path)
            return refused(path, *_DEFECT)

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
        if origin is not None and urlsplit(origin).netloc != host:
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
        chunks: list[bytes] = []
        size = 0
        declared = headers.get("content-length", "0")
        too_large = declared.isdigit() and int(declared) > self.body_bytes
        more, end = True, asyncio.get_running_loop().time() + _BODY_SECONDS
        while more:
            try:
                left = end - asyncio.get_running_loop().time()
                message = await asyncio.wait_for(receive(), min(left, _CHUNK_SECONDS))
            except TimeoutError:
                raise _Refused(408, "Timeout", "the body took too long") from None
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            too_large = too_large or size > self.body_bytes
            if too_large:
                chunks.clear()
                # A client reads the answer when it has sent all; twice the limit is enough.
                if size > 2 * self.body_bytes:
                    break
            else:
                chunks.append(chunk)
            more = message.get("more_body", False)
        if too_large:
            raise _Refused(413, "TooLarge", f"a request has at most {self.body_bytes} bytes")
        return b"".join(chunks)


@lru_cache(256)
def _host_name(host: str) -> str:
    """Name of a Host header without its port; of [::1]:80 too."""
    return urlsplit(f"//{host}").hostname or "" if host.isprintable() else ""


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever comes."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
