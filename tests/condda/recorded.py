"""Recorded exchanges of the published client and server, as calls of the harness."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tasks.condda.commands import ProtocolRefusal
from tasks.condda.harness import Harness

JSON_BODIES = ("/session", "/test/metadata", "/session/latest")


def exchanges(path: Path) -> list[dict[str, Any]]:
    """Request and response pairs of one recorded file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def replay(harness: Harness, path: Path) -> list[tuple[str, tuple[int, Any], tuple[int, Any]]]:
    """(request, expected (status, body), got (status, body)) of every exchange."""
    names: dict[str, str] = {}
    compared = []
    for exchange in exchanges(path):
        request, response = exchange["request"], exchange["response"]
        target = request["path"]
        for placeholder, session in names.items():
            target = target.replace(placeholder, session)
        parts = {part["name"]: part["body"] for part in request.get("multipart", [])}
        for name in parts:
            for placeholder, session in names.items():
                parts[name] = parts[name].replace(placeholder, session)
        url = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        expected: Any = response["body"]
        try:
            got: Any = call(harness, request["method"], url.path, query, parts)
            status = 200
        except ProtocolRefusal as refusal:
            got, status = "", refusal.status
        if url.path in JSON_BODIES and expected.startswith("{"):
            expected = json.loads(expected)
        if request["method"] == "POST" and url.path == "/session":
            names[expected["session_id"]] = got["session_id"]
            expected = got
        label = f"{request['method']} {request['path']}"
        compared.append((label, (response["status"], expected), (status, got)))
    return compared


def call(
    harness: Harness, method: str, path: str, query: dict[str, str], parts: dict[str, str]
) -> Any:
    """One request as the harness answers it: text, or what the JSON body holds."""
    if (method, path) == ("GET", "/test/ids"):
        wanted = json.loads(parts["test_requirements"])
        return harness.test_ids_request(
            **wanted, test_assumptions=parts["test_assumptions"]
        ).decode()
    if (method, path) == ("POST", "/session"):
        session = harness.session_request(
            test_ids=parts["test_ids"].split(), **json.loads(parts["configuration"])
        )
        return {"session_id": session}
    if (method, path) == ("POST", "/session/results"):
        about = json.loads(parts["test_identification"])
        files = {kind: parts[f"{kind}_file"].encode() for kind in about["result_types"].split("|")}
        harness.post_results(
            result_files=files,
            test_id=about["test_id"],
            round_id=about["round_id"],
            session_id=about["session_id"],
        )
        return "OK"
    if (method, path) == ("GET", "/session/feedback"):
        ids = query.pop("feedback_ids", "")
        return harness.get_feedback_request(
            feedback_ids=ids.split("|") if ids else None, **query
        ).decode()
    if (method, path) == ("GET", "/session/dataset"):
        return harness.dataset_request(**query).decode()
    if (method, path) == ("GET", "/test/metadata"):
        return harness.get_test_metadata(**query)
    if (method, path) == ("GET", "/session/latest"):
        return {"finished_tests": harness.resume_session(**query)}
    if (method, path) == ("DELETE", "/test"):
        harness.complete_test(**query)
        return "OK"
    if (method, path) == ("DELETE", "/session"):
        harness.terminate_session(**query)
        return "OK"
    raise AssertionError(f"no call for {method} {path}")
