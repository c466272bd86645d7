"""The harness over HTTP: the same keyword methods, answered by a server.

Calls of the published protocol go over the wire API, the others over /v1. A refusal of the server
is raised as the `ProtocolRefusal` that the harness raises in process. A connection that breaks is
tried again for a while: posts may be repeated (the same file counts once), and an end that was
reached by the lost request counts as reached. Only feedback may be paid for twice.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from schemas.errors import ConfigError, SourceError
from tasks.condda.rules import ProtocolRefusal
from tasks.condda.session_files import RESULTS


class HttpHarness:
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

    def test_ids_request(
        self,
        *,
        protocol: str,
        domain: str,
        detector_seed: str | int = "",
        test_assumptions: str = "{}",
    ) -> bytes:
        """Ids of the tests on offer, one a line."""
        wanted = {"protocol": protocol, "domain": domain, "detector_seed": detector_seed}
        parts = {"test_requirements": json.dumps(wanted), "test_assumptions": test_assumptions}
        return self._send("GET", "/test/ids", parts=parts).content

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
        settings = {
            "protocol": protocol,
            "novelty_detector_version": novelty_detector_version,
            "domain": domain,
            "hints": list(hints),
            "detection_threshold": detection_threshold,
        }
        parts = {
            "test_ids": "".join(f"{test}\n" for test in test_ids),
            "configuration": json.dumps(settings),
        }
        return self._send("POST", "/session", parts=parts).json()["session_id"]

    def resume_session(self, *, session_id: str) -> list[str]:
        """Finished tests of a session."""
        query = {"session_id": session_id}
        return self._send("GET", "/session/latest", query).json()["finished_tests"]

    def resume_test(self, *, session_id: str, test_id: str) -> dict[str, Any]:
        """Where to go on in a test."""
        found = self._send("GET", _path(session_id, test_id)).json()
        return {"test": found.pop("test_id"), **found}

    def session_progress(self, *, session_id: str) -> dict[str, Any]:
        """What a session was opened with and how far each of its tests is."""
        found = self._send("GET", _path(session_id)).json()
        return {
            "session": found.pop("session_id"),
            "threshold": found.pop("detection_threshold"),
            **found,
        }

    def get_test_metadata(self, *, session_id: str, test_id: str) -> dict[str, Any]:
        """Metadata of a test that the agent may see."""
        query = {"test_id": test_id, "session_id": session_id}
        return self._send("GET", "/test/metadata", query).json()

    def dataset_request(self, *, test_id: str, round_id: int | str, session_id: str) -> bytes:
        """Instances of one round; refusal 204 after the last."""
        query = {"session_id": session_id, "test_id": test_id, "round_id": round_id}
        response = self._send("GET", "/session/dataset", query)
        if response.status_code == 204:
            raise ProtocolRefusal(204, "EndOfDataset", f"test {test_id} has no round {round_id}")
        return response.content

    def post_results(
        self,
        *,
        result_files: Mapping[str, bytes],
        test_id: str,
        round_id: int | str,
        session_id: str,
    ) -> None:
        """Post the result files of one round, by type."""
        about = _about(session_id, test_id, round_id, result_types="|".join(result_files))
        self._send("POST", "/session/results", parts=_files(about, result_files))

    def get_feedback_request(
        self,
        *,
        feedback_ids: Sequence[str] | None,
        feedback_type: str,
        test_id: str,
        session_id: str,
        round_id: int | str | None = None,
    ) -> bytes:
        """Feedback of one type, maybe empty."""
        query = {
            "feedback_ids": "|".join(feedback_ids or ()),
            "session_id": session_id,
            "test_id": test_id,
            "feedback_type": feedback_type,
            **({} if round_id is None else {"round_id": round_id}),
        }
        return self._send("GET", "/session/feedback", query).content

    def evaluate(
        self,
        *,
        test_id: str,
        session_id: str,
        round_id: int | str = 0,
        baseline_session_id: str | None = None,
        devmode: bool = False,
    ) -> dict[str, dict[str, Any]]:
        """The public server's metrics of a completed test."""
        query = {"session_id": session_id, "test_id": test_id, "round_id": round_id}
        if baseline_session_id is not None:
            query["baseline_session_id"] = baseline_session_id
        if devmode:
            query["devmode"] = "true"
        return self._send("GET", "/session/evaluations", query).json()

    def evaluate_round_wise(
        self, *, test_id: str, round_id: int | str, session_id: str
    ) -> dict[str, Any]:
        """Accuracy of one posted round; over HTTP only when the test is completed."""
        path = f"{_path(session_id, test_id)}/rounds/{_quoted(str(round_id))}/metrics"
        return self._send("GET", path).json()

    def complete_test(self, *, session_id: str, test_id: str) -> None:
        """End a test."""
        query = {"test_id": test_id, "session_id": session_id}
        self._send("DELETE", "/test", query, done="TestCompleted")

    def terminate_session(self, *, session_id: str) -> None:
        """End a session."""
        self._send("DELETE", "/session", {"session_id": session_id}, done="SessionEnded")

    def session_status(
        self,
        *,
        after: str | None = None,
        session_id: str | None = None,
        test_ids: Sequence[str] | None = None,
        detector: str | None = None,
        include_tests: bool = False,
    ) -> str:
        """CSV lines of sessions."""
        query = {
            "after": after,
            "session_id": session_id,
            "test_ids": None if test_ids is None else "|".join(test_ids),
            "detector": detector,
            "include_tests": "true" if include_tests else None,
        }
        given = {name: value for name, value in query.items() if value is not None}
        return self._send("GET", "/session/status", given).text

    def session_zip(self, *, session_id: str, test_ids: Sequence[str] | None = None) -> bytes:
        """Logs and result files of a session as a zip archive."""
        tests = {} if test_ids is None else {"test_id": "|".join(test_ids)}
        return self._send("GET", "/session/zip", {"session_id": session_id, **tests}).content

    def results(self, session: str, test: str, kind: str) -> pl.DataFrame:
        """Lines posted since the test's last restart; numbers that are not finite are NaN."""
        path = f"{_path(session, test)}/results/{_quoted(kind)}"
        found = self._send("GET", path).json()
        values = [
            None if row is None else [math.nan if v is None else v for v in row]
            for row in found["values"]
        ]
        columns = (found["rounds"], found["ids"], values, found["cells"])
        return pl.DataFrame(dict(zip(RESULTS, columns, strict=True)), schema=RESULTS)

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


def _about(session_id: str, test_id: str, round_id: int | str, **more: Any) -> str:
    return json.dumps({"session_id": session_id, "test_id": test_id, "round_id": round_id, **more})


def _files(about: str, result_files: Mapping[str, bytes]) -> dict[str, str | bytes]:
    files = {f"{kind}_file": body for kind, body in result_files.items()}
    return {"test_identification": about, **files}


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _path(session_id: str, test_id: str | None = None) -> str:
    path = f"/v1/sessions/{_quoted(session_id)}"
    return path if test_id is None else f"{path}/tests/{_quoted(test_id)}"
