"""The harness over HTTP: the same calls, answered by a server, and mirrored if they are exported.

Calls of the published protocol go over the wire API, the others over /v1. A refusal of the server
is raised as the `ProtocolRefusal` that the harness raises in process. A connection that breaks is
tried again for a while: posts may be repeated (the same file counts once), and an end that was
reached by the lost request counts as reached. Only feedback may be paid for twice.

`Mirrored` sends every call to the server first; what it accepts is then told to a harness on the
same tests in this process. The server's answers count, the mirror's are ignored.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import polars as pl

from schemas.errors import ConfigError, SourceError
from tasks.condda import commands
from tasks.condda.commands import PUBLISHED, Calls, Command, Policy, ProtocolRefusal
from tasks.condda.harness import Harness
from tasks.condda.posts import RESULTS
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary


class HttpHarness(Calls):
    """A client of one server; close it, or use it in a with statement."""

    def __init__(
        self, url: str, *, token: str | None = None, timeout: float = 60.0, patience: float = 30.0
    ):
        """`patience`: seconds for which a server that does not answer is asked again."""
        import httpx

        try:
            host = httpx.URL(url).host if url.startswith(("http://", "https://")) else ""
        except httpx.InvalidURL:
            host = ""
        if not host:
            raise ConfigError(f"server {url!r} is no URL such as http://127.0.0.1:3307")
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self.url = url.rstrip("/")
        self._patience = patience
        # Only what the user names is asked: no proxy from the environment.
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=False
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> "HttpHarness":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def policy(self) -> Policy:
        """What its operator lets agents ask for; a server without /v1 is a public one."""
        try:
            return Policy(**self._send("GET", "/v1/policy").json())
        except SourceError:
            return PUBLISHED

    def run(self, session: str | None, command: Command) -> Any:
        """Send a command to the place that it has, and read the answer."""
        test = getattr(command, "test", None)
        about: dict[str, Any] = {"session_id": session}
        path = f"/v1/sessions/{_quoted(session or '')}"
        if test is not None:
            about["test_id"] = test
            path += f"/tests/{_quoted(test)}"
        match command:
            case commands.ListTests():
                wanted = asdict(command)
                parts = {"test_assumptions": wanted.pop("test_assumptions")}
                parts["test_requirements"] = json.dumps(wanted)
                return self._send("GET", "/test/ids", parts=parts).content
            case commands.OpenSession():
                settings = {
                    "protocol": command.protocol,
                    "novelty_detector_version": command.detector,
                    "domain": command.domain,
                    "hints": list(command.hints),
                    "detection_threshold": command.threshold,
                }
                tests = "".join(f"{test}\n" for test in command.tests)
                parts = {"test_ids": tests, "configuration": json.dumps(settings)}
                return self._send("POST", "/session", parts=parts).json()["session_id"]
            case commands.Latest():
                return self._send("GET", "/session/latest", about).json()
            case commands.Resume() | commands.Status():
                return self._send("GET", path).json()
            case commands.Metadata():
                return self._send("GET", "/test/metadata", about).json()
            case commands.Dataset(round=number):
                answer = self._send("GET", "/session/dataset", {**about, "round_id": number})
                if answer.status_code == 204:
                    raise ProtocolRefusal(204, "EndOfDataset", f"test {test} has no round {number}")
                return answer.content
            case commands.Post(results=files):
                types = "|".join(files)
                sent = {**about, "round_id": command.round, "result_types": types}
                parts = {"test_identification": json.dumps(sent)}
                parts |= {f"{kind}_file": body for kind, body in files.items()}
                self._send("POST", "/session/results", parts=parts)
            case commands.Feedback():
                query = {**about, "feedback_type": command.type, "round_id": command.round}
                query["feedback_ids"] = "|".join(command.ids)
                return self._send("GET", "/session/feedback", query).content
            case commands.Evaluate():
                query = {**about, "round_id": command.round}
                query["baseline_session_id"] = command.baseline
                query["devmode"] = "true" if command.devmode else None
                return self._send("GET", "/session/evaluations", query).json()
            case commands.EvaluateRound(round=number):
                return self._send("GET", f"{path}/rounds/{_quoted(str(number))}/metrics").json()
            case commands.CompleteTest():
                self._send("DELETE", "/test", about, done="TestCompleted")
            case commands.Terminate():
                self._send("DELETE", "/session", about, done="SessionEnded")
            case commands.ListSessions():
                query = {
                    "after": command.after,
                    "session_id": command.session,
                    "test_ids": _listed(command.tests),
                    "detector": command.detector,
                    "include_tests": "true" if command.include_tests else None,
                }
                return self._send("GET", "/session/status", query).text
            case commands.Archive():
                query = {**about, "test_id": _listed(command.tests)}
                return self._send("GET", "/session/zip", query).content
            case commands.PostedLines(type=kind):
                return _frame(self._send("GET", f"{path}/results/{_quoted(kind)}").json())
            case _:
                raise TypeError(f"a server takes no {type(command).__name__}")
        return None

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        parts: Mapping[str, str | bytes] | None = None,
        done: str | None = None,
    ) -> Any:
        """One exchange, repeated while the server is away; `done` is no refusal of a repeat."""
        import httpx

        query = {name: value for name, value in (query or {}).items() if value is not None}
        files = None if parts is None else {name: (name, part) for name, part in parts.items()}
        deadline = time.monotonic() + self._patience
        pause, repeated = 0.05, False
        while True:
            try:
                response = self._http.request(method, path, params=query, files=files)
                break
            except httpx.TransportError as error:
                if time.monotonic() + pause > deadline:
                    raise SourceError(
                        f"the server {self.url} does not answer ({error}); see that it runs"
                    ) from error
                time.sleep(pause)
                pause, repeated = min(2 * pause, 2.0), True
        if response.status_code >= 400:
            refusal = _refusal(self.url, response)
            if not (repeated and refusal.reason == done):
                raise refusal
        return response


def _refusal(url: str, response: Any) -> ProtocolRefusal:
    try:
        error = response.json()
        reason, message = str(error["reason"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        raise SourceError(
            f"{url} answered {response.status_code} and no protocol error; is it our server?"
        ) from None
    # /v1 has codes that the protocol has not.
    return ProtocolRefusal(500 if response.status_code >= 500 else 400, reason, message)


def _frame(lines: Mapping[str, list]) -> pl.DataFrame:
    """Posted lines as the harness gives them; numbers that are not finite are NaN."""
    values = [
        None if row is None else [math.nan if value is None else value for value in row]
        for row in lines["values"]
    ]
    columns = (lines["rounds"], lines["ids"], values, lines["cells"])
    return pl.DataFrame(dict(zip(RESULTS, columns, strict=True)), schema=RESULTS)


def _listed(tests: Sequence[str] | None) -> str | None:
    return None if tests is None else "|".join(tests)


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


MIRRORED = (
    "dataset_request",
    "post_results",
    "get_feedback_request",
    "complete_test",
    "terminate_session",
)


class Mirrored:
    """The calls of `commands.Calls` on `server`; `local` is the harness to export from."""

    def __init__(self, server: Any, library: TestLibrary, store: EventStore):
        self.server = server
        self.session = ""
        self.local = Harness(library, store, PUBLISHED, new_id=lambda: self.session)

    def session_request(self, **arguments: Any) -> str:
        self.session = self.server.session_request(**arguments)
        self.local.session_request(**arguments)
        return self.session

    def resume_session(self, *, session_id: str) -> list[str]:
        """As the server knows it; the mirror is told what a killed run could not tell it."""
        try:
            finished = self.server.resume_session(session_id=session_id)
        except ProtocolRefusal as refusal:
            if refusal.reason == "SessionEnded":
                with suppress(ProtocolRefusal):
                    self.local.terminate_session(session_id=session_id)
            raise
        tests = self.local.session_progress(session_id=session_id)["tests"]
        for test in finished:
            if not tests.get(test, {}).get("completed"):
                with suppress(ProtocolRefusal):
                    self.local.complete_test(session_id=session_id, test_id=test)
        return finished

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.server, name)
        if name not in MIRRORED:
            return call

        def mirrored(**arguments: Any) -> Any:
            answer = call(**arguments)
            with suppress(ProtocolRefusal):
                getattr(self.local, name)(**arguments)
            return answer

        return mirrored
