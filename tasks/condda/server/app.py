"""The web application: published wire API, /v1, operators' page, and the guard before them.

The wire API answers by the policy of its harness (CONDDA rules 9 and 10). /v1 is our own and always
`evaluation`, so that reading a round is never a restart; both write to one store. `Guard` lets a
request in: token and role, host, origin, size of the body.
"""

import asyncio
import base64
import binascii
import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.condda.harness import Harness
from tasks.condda.rules import CALLER, Caller, ProtocolRefusal
from tasks.condda.server.api import API, api_refusal, api_router, problem
from tasks.condda.server.page import OPERATOR, docs_router, page_router
from tasks.condda.server.serve import Token
from tasks.condda.server.wire import error_response, refusal_response, wire_router

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Room for names and headers of parts around the files themselves.
_ENVELOPE_BYTES = 1024 * 1024
_CHUNK_SECONDS = 60.0


def make_app(harness: Harness, *, tokens: Sequence[Token] = ()) -> FastAPI:
    """The application over one store of tests and events; `tokens` lock every route."""
    app = FastAPI(
        title="CONDDA and OND test server",
        description="Sessions, tests, rounds, results, feedback and metrics of novelty detectors.",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(wire_router(harness))
    app.include_router(api_router(_evaluating(harness)))
    app.include_router(page_router(harness))
    app.include_router(docs_router(app.openapi))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ProtocolRefusal, _refusal)
    app.add_exception_handler(Exception, _defect)
    most = harness.limits.post_bytes + _ENVELOPE_BYTES
    app.add_middleware(Guard, tokens=tokens, body_bytes=most)
    return app


def _evaluating(harness: Harness) -> Harness:
    if harness.policy.strict:
        return harness
    policy = harness.policy.model_copy(update={"name": "evaluation"})
    return Harness(harness.library, harness.store, policy, limits=harness.limits)


def _is_ours(path: str) -> bool:
    """Whether any status code may be used: not on the wire, nor where a wire client may stray."""
    return path == "/" or path.startswith((API, OPERATOR, "/docs", "/openapi.json"))


def refused(path: str, status: int, reason: str, message: str) -> Response:
    """A refusal outside of the protocol, as the part of the server that was asked says it."""
    if _is_ours(path):
        response = problem(status, reason, message)
    else:
        response = error_response(400 if status < 500 else 500, reason, message)
    if status == 401:
        response.headers["www-authenticate"] = 'Basic realm="novelty", charset="UTF-8"'
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = {404: "NotFound", 405: "MethodNotAllowed"}.get(error.status_code, "BadRequest")
    return refused(request.url.path, error.status_code, reason, str(error.detail))


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
    return api_refusal(error) if _is_ours(request.url.path) else refusal_response(error)


async def _defect(request: Request, error: Exception) -> Response:
    # The trace goes to the server's log, not to the client.
    return refused(request.url.path, 500, "InternalError", "a defect of the server; see its log")


class Guard:
    """ASGI middleware: lets a request in with its whole body read, or answers it.

    A token comes as `Authorization: Bearer <token>`, or as the password of Basic authorization,
    which is what a browser asks its user for and what the published client makes of
    http://agent:<token>@host. Its owner is the caller; an agent sees no page of operators. Without
    tokens only this machine is served, so the Host must be one
    of its names: else a web page elsewhere could reach the server through a name of its own.
    A request that a browser sends for a page of another origin is refused.
    """

    def __init__(self, app: ASGIApp, tokens: Sequence[Token], body_bytes: int):
        self.app = app
        self.tokens = {token.text.encode(): token.caller for token in tokens}
        self.body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = self._caller(headers, scope["path"])
        wrong = caller if isinstance(caller, tuple) else None
        if isinstance(caller, Caller):
            body = await self._body(headers, receive)
            if body is None:
                return  # the client has gone
            if isinstance(body, bytes):
                CALLER.set(caller)
                await self.app(scope, _replay(body, receive), send)
                return
            wrong = body
        assert wrong is not None
        response = refused(scope["path"], *wrong)
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _caller(self, headers: Headers, path: str) -> Caller | tuple[int, str, str]:
        """Who asks, or why nothing is answered."""
        host, caller = headers.get("host", ""), CALLER.get()
        if self.tokens:
            owner = self._owner(headers.get("authorization", ""))
            if owner is None:
                return 401, "Unauthorized", "send the header Authorization: Bearer <token>"
            if owner.role == "agent" and (path == "/" or path.startswith(OPERATOR)):
                return 403, "Forbidden", "this page is for operators"
            caller = owner
        elif _host_name(host) not in LOOPBACK:
            return 403, "WrongHost", "this server answers only as 127.0.0.1 or localhost"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "WrongOrigin", "requests from pages of other origins are refused"
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

    async def _body(self, headers: Headers, receive: Receive) -> bytes | tuple | None:
        """The whole body; else the refusal; None if the client went away."""
        chunks: list[bytes] = []
        size = 0
        declared = headers.get("content-length", "0")
        too_large = declared.isdigit() and int(declared) > self.body_bytes
        more = True
        while more:
            try:
                message = await asyncio.wait_for(receive(), _CHUNK_SECONDS)
            except TimeoutError:
                return 408, "Timeout", f"nothing was sent for {_CHUNK_SECONDS:g} seconds"
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
            return 413, "TooLarge", f"a request has at most {self.body_bytes} bytes"
        return b"".join(chunks)


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
