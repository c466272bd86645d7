"""The published API over a real server: recordings, every row of the error table, bad input."""

import asyncio
import io
import json
import socket
import tracemalloc
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.condda.commands import EVALUATION, PUBLISHED, Caller, Limits, ProtocolRefusal
from tasks.condda.server.app import _ENVELOPE_BYTES, ROUTES, Guard, _parts
from tasks.condda.server.client import HttpHarness
from tasks.condda.server.serve import Token, check_access, read_tokens, running, serve
from tests.condda.recorded import exchanges
from tests.condda.small import CONDDA, DOMAIN, IDS, TEST, classes, detection, round_ids, write_test
from tests.shared import shared_path

LARGEST = 20_000
TOKEN = "a-token-that-is-long-enough"
BROKEN = "OND.1.1.9"  # ground truth only
ROUNDLESS = "OND.1.1.8"  # metadata without round_size
SETTINGS = {
    "protocol": "OND",
    "novelty_detector_version": "agent-1",
    "domain": DOMAIN,
    "hints": [],
    "detection_threshold": 0.5,
}


def multipart(parts: Mapping[str, str | bytes]) -> tuple[bytes, dict[str, str]]:
    """A body as the published client sends it: filenames, no content types."""
    body = b""
    for name, content in parts.items():
        data = content if isinstance(content, bytes) else content.encode()
        head = f'Content-Disposition: form-data; name="{name}"; filename="{name}"'
        body += b"--limit\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n"
    return body + b"--limit--\r\n", {"content-type": "multipart/form-data; boundary=limit"}


class Wire:
    """Requests as the published client sends them."""

    def __init__(self, url: str, folder: Path):
        self.url = url
        self.folder = folder
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=30)

    def send(self, method: str, path: str, parts: Mapping | None = None, **query: Any):
        body, headers = (b"", {}) if parts is None else multipart(parts)
        return self.http.request(method, path, params=query, content=body, headers=headers)

    def open(self, tests: str = TEST, **options: Any) -> str:
        parts = {"test_ids": f"{tests}\n", "configuration": json.dumps({**SETTINGS, **options})}
        return self.send("POST", "/session", parts).json()["session_id"]

    def post(self, session: str, files: Mapping, number: Any = 0, test: str = TEST, **about: Any):
        sent = {"session_id": session, "test_id": test, "round_id": number}
        sent |= {"result_types": "|".join(files), **about}
        parts = {"test_identification": json.dumps(sent)}
        parts |= {f"{kind}_file": body for kind, body in files.items()}
        return self.send("POST", "/session/results", parts)


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    folder = tmp_path_factory.mktemp("wire")
    write_test(folder / "data")
    write_test(folder / "data", CONDDA, protocol="CONDDA")
    write_test(folder / "data", ROUNDLESS, round_size=None)
    write_test(folder / "data", BROKEN)
    (folder / "data" / "OND" / DOMAIN / f"{BROKEN}_metadata.json").unlink()
    limits = Limits(post_bytes=LARGEST)
    with running(folder / "data", folder / "state", limits=limits) as url:
        client = Wire(url, folder)
        yield client
        client.http.close()


@pytest.fixture
def session(wire: Wire) -> str:
    return wire.open()


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and reason, of an error that the published client can read."""
    error = response.json()
    assert set(error) == {"reason", "message", "stack_trace"} and error["stack_trace"] == ""
    assert response.headers["content-type"] == "application/json"
    return response.status_code, error["reason"]


# Recorded exchanges -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["harness_calls", "condda_mock_given", "condda_mock_system", "ond_precomputed_system"],
)
def test_recorded_exchanges_replay(name: str, tmp_path: Path) -> None:
    data = shared_path("sailon/sail-on-client/data")
    recorded = exchanges(shared_path(f"sailon/recorded/{name}.jsonl"))
    assert len(recorded) >= 15
    names: dict[str, str] = {}

    def known(text: str) -> str:
        for placeholder, session in names.items():
            text = text.replace(placeholder, session)
        return text

    with running(data, tmp_path / "state") as url, httpx.Client(trust_env=False) as http:
        for exchange in recorded:
            request, expected = exchange["request"], exchange["response"]
            body, headers = b"", {}
            if "multipart" in request:
                body, headers = multipart(
                    {part["name"]: known(part["body"]) for part in request["multipart"]}
                )
            got = http.request(
                request["method"], url + known(request["path"]), content=body, headers=headers
            )
            if (request["method"], request["path"]) == ("POST", "/session"):
                names[json.loads(expected["body"])["session_id"]] = got.json()["session_id"]
            about = (got.status_code, got.headers["content-type"], got.content.decode())
            wanted = (expected["status"], expected["content_type"], known(expected["body"]))
            assert about == wanted, request["path"]


def test_requests_library_as_the_published_client_uses_it(wire: Wire) -> None:
    requests = pytest.importorskip("requests")
    wanted = {"protocol": "OND", "domain": DOMAIN, "detector_seed": "5678"}
    parts = {
        "test_requirements": io.StringIO(json.dumps(wanted)),
        "test_assumptions": io.StringIO("{}"),
    }
    answer = requests.get(f"{wire.url}/test/ids", files=parts)
    assert (answer.status_code, answer.text) == (200, f"{TEST}\n{ROUNDLESS}\n{BROKEN}\n")
    files = {"test_ids": f"{TEST}\n", "configuration": io.StringIO(json.dumps(SETTINGS))}
    assert requests.post(f"{wire.url}/session", files=files).json()["session_id"]


# Every row of CONDDA rule 10 -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"protocol": "NOPE", "domain": DOMAIN, "detector_seed": 1}, (400, "BadDomain")),
        ({"protocol": "OND", "domain": "nope", "detector_seed": 1}, (400, "BadDomain")),
        ({"protocol": "OND", "domain": DOMAIN}, (400, "MissingParamsError")),
        ({"domain": DOMAIN, "detector_seed": 1}, (400, "MissingParamsError")),
    ],
    ids=["protocol", "domain", "no seed", "no protocol"],
)
def test_test_ids_refused(wire: Wire, wanted: dict, expected: tuple) -> None:
    parts = {"test_requirements": json.dumps(wanted), "test_assumptions": "{}"}
    answer = wire.send("GET", "/test/ids", parts)
    assert error_of(answer) == expected
    if wanted.get("protocol") == "NOPE":
        assert answer.json()["message"] == "NOPE not configured"
    if wanted["domain"] == "nope":
        assert answer.json()["message"] == "domain nope for OND not configured"


def test_test_ids_without_anything(wire: Wire) -> None:
    assert error_of(wire.send("GET", "/test/ids")) == (400, "MissingRequestValue")


@pytest.mark.parametrize("way", ["query", "form", "json", "parts", "default domain"])
def test_test_ids_other_ways(wire: Wire, way: str) -> None:
    wanted = {"protocol": "CONDDA", "domain": DOMAIN, "detector_seed": "1"}
    sent = {
        "query": {"params": wanted},
        "form": {"data": wanted},
        "json": {"json": wanted},
        "parts": {"files": {name: (None, value) for name, value in wanted.items()}},
        "default domain": {"params": {"protocol": "CONDDA"}},
    }[way]
    answer = wire.http.request("GET", "/test/ids", **sent)
    assert (answer.status_code, answer.text) == (200, f"{CONDDA}\n")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"


def test_session_unknown_test(wire: Wire) -> None:
    parts = {"test_ids": "OND.9.9.9\n", "configuration": json.dumps(SETTINGS)}
    assert error_of(wire.send("POST", "/session", parts)) == (500, "test_id_invalid")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"configuration": json.dumps(SETTINGS)}, (400, "MissingParamsError")),
        ({"test_ids": TEST}, (400, "MissingParamsError")),
        ({"test_ids": TEST, "configuration": '{"protocol": "OND"}'}, (400, "MissingParamsError")),
        ({"test_ids": "\n", "configuration": json.dumps(SETTINGS)}, (400, "EmptyFile")),
        (
            {"configuration": json.dumps({**SETTINGS, "test_ids": []})},
            (400, "EmptyFile"),
        ),
        ({"test_ids": TEST, "configuration": "{"}, (500, "JSONDecodeError")),
    ],
    ids=["no tests", "no configuration", "keys", "empty list", "empty JSON list", "invalid JSON"],
)
def test_session_refused(wire: Wire, parts: dict, expected: tuple) -> None:
    assert error_of(wire.send("POST", "/session", parts)) == expected


def test_session_with_tests_in_the_configuration_and_defaults(wire: Wire) -> None:
    short = {k: v for k, v in SETTINGS.items() if k not in ("domain", "hints")}
    parts = {"configuration": json.dumps({**short, "test_ids": [TEST]})}
    answer = wire.send("POST", "/session", parts)
    assert answer.status_code == 200 and list(answer.json()) == ["session_id"]
    also = wire.http.post("/session", json={"configuration": {**short, "test_ids": [TEST]}})
    assert also.status_code == 200


NEEDED = {
    "/test/metadata": ("session_id", "test_id"),
    "/test": ("session_id", "test_id"),
    "/session/latest": ("session_id",),
    "/session/dataset": ("session_id", "test_id", "round_id"),
    "/session/feedback": ("session_id", "test_id", "feedback_type"),
    "/session/evaluations": ("session_id", "test_id"),
    "/session/zip": ("session_id",),
}


@pytest.mark.parametrize(
    ("path", "lacking"), [(path, name) for path, names in NEEDED.items() for name in names]
)
def test_lacking_query_parameter(wire: Wire, session: str, path: str, lacking: str) -> None:
    query = {"session_id": session, "test_id": TEST, "round_id": 0, "feedback_type": "score"}
    query = {name: query[name] for name in NEEDED[path] if name != lacking}
    method = "DELETE" if path == "/test" else "GET"
    assert error_of(wire.send(method, path, **query)) == (400, "MissingParamsError")


def test_terminate_without_session(wire: Wire) -> None:
    assert error_of(wire.send("DELETE", "/session")) == (400, "MissingParamsError")


UNKNOWN = "00000000-0000-4000-8000-000000000000"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/test/metadata", (400, "session_id_invalid")),
        ("/session/dataset", (400, "session_id_invalid")),
        ("/session/latest", (500, "KeyError")),
        ("/session/evaluations", (400, "TestInProcess")),
    ],
)
def test_unknown_session(wire: Wire, path: str, expected: tuple) -> None:
    answer = wire.send("GET", path, session_id=UNKNOWN, test_id=TEST, round_id=0)
    assert error_of(answer) == expected
    if expected[1] == "KeyError":
        assert answer.json()["message"] == "'tests'"


def test_unknown_session_results_and_ends(wire: Wire) -> None:
    answer = wire.post(UNKNOWN, {"detection": detection(IDS)})
    assert error_of(answer) == (500, "KeyError") and answer.json()["message"] == "'created'"
    for path in ("/test", "/session"):
        answer = wire.send("DELETE", path, session_id=UNKNOWN, test_id=TEST)
        assert (answer.status_code, answer.text) == (200, "OK")
    assert UNKNOWN not in wire.send("GET", "/session/status").text


def test_unknown_test(wire: Wire, session: str) -> None:
    about = {"session_id": session, "test_id": "OND.9.9.9"}
    assert error_of(wire.send("GET", "/test/metadata", **about)) == (500, "metadata_not_found")
    answer = wire.send("GET", "/session/dataset", **about, round_id=0)
    assert error_of(answer) == (500, "test_id_invalid")
    assert wire.post(session, {"detection": b"a,1\n"}, test="OND.9.9.9").text == "OK"
    assert error_of(wire.send("GET", "/test/metadata", session_id=session, test_id=BROKEN)) == (
        *(500, "metadata_not_found"),
    )


def test_test_not_in_the_session_is_accepted(wire: Wire) -> None:
    session = wire.open(CONDDA, protocol="CONDDA")
    assert wire.post(session, {"detection": detection(IDS)}).text == "OK"


def test_rounds(wire: Wire, session: str) -> None:
    def get(number: object) -> httpx.Response:
        about = {"session_id": session, "test_id": TEST, "round_id": number}
        return wire.send("GET", "/session/dataset", **about)

    for _ in range(5):
        end = get(3)
        assert (end.status_code, end.content) == (204, b"")
        assert end.headers["content-type"] == "application/json"
    assert error_of(get("abc")) == (500, "ValueError")
    assert get(2).content == b"img_6.png\nimg_7.png\n"  # skipped
    assert get(2).status_code == 200  # repeated
    assert get(1).headers["content-type"] == "Content-Type: text/csv; charset=utf-16"
    assert get(-1).content == b"\n"
    roundless = wire.send(
        "GET", "/session/dataset", session_id=session, test_id=ROUNDLESS, round_id=0
    )
    assert error_of(roundless) == (400, "no_defined_rounds")


def test_round_zero_again_restarts(wire: Wire, session: str) -> None:
    about = {"session_id": session, "test_id": TEST, "round_id": 0}
    wire.send("GET", "/session/dataset", **about)
    wire.post(session, {"detection": detection(round_ids(0))})
    wire.send("GET", "/session/dataset", **about)
    assert wire.post(session, {"detection": detection(round_ids(0), 0.7)}).text == "OK"


def test_detection_again(wire: Wire, session: str) -> None:
    assert wire.post(session, {"detection": detection(IDS)}).text == "OK"
    again = wire.post(session, {"detection": detection(IDS, 0.4)})
    assert error_of(again) == (400, "DetectionRepost")


def test_declared_type_without_its_file(wire: Wire, session: str) -> None:
    answer = wire.post(
        session, {"detection": detection(IDS)}, result_types="detection|classification"
    )
    assert error_of(answer) == (400, "MissingParamsError")
    assert error_of(wire.post(session, {})) == (400, "MissingParamsError")


@pytest.mark.parametrize(
    "files",
    [
        {"no_such_type": b"a,1\n"},
        {"detection": b"foreign,0.5\n"},
        {"detection": b"img_0.png,high\n"},
        {"detection": detection(IDS * 3)},
        {"detection": b"img_0.png\n"},
        {"detection": b""},
        {"detection": b"img_0.png,NaN\nimg_1.png,inf\n"},
    ],
    ids=["type", "foreign", "text", "rows", "no value", "empty", "nan"],
)
def test_results_that_the_public_server_takes(wire: Wire, session: str, files: dict) -> None:
    answer = wire.post(session, files)
    assert (answer.status_code, answer.text) == (200, "OK")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


def feedback(wire: Wire, session: str, kind: str = "classification", **query: Any):
    about = {"session_id": session, "test_id": TEST, "feedback_type": kind, **query}
    return wire.send("GET", "/session/feedback", **about)


def test_feedback_refusals(wire: Wire, session: str) -> None:
    assert error_of(feedback(wire, session)) == (500, "KeyError")
    wire.post(session, {"classification": classes(IDS)})
    assert error_of(feedback(wire, session)) == (400, "DetectionPostRequired")
    wire.post(session, {"detection": detection(IDS, 0.9)})
    assert error_of(feedback(wire, session, "nope")) == (400, "InvalidFeedbackType")
    assert feedback(wire, session).text == "img_5.png,1\nimg_6.png,-1\n"
    assert error_of(feedback(wire, session)) == (400, "FeedbackBudgetExceeded")


def test_feedback_of_ids_and_before_novelty(wire: Wire, session: str) -> None:
    wire.post(session, {"classification": classes(IDS), "detection": detection(IDS, 0.5)})
    undeclared = feedback(wire, session, "detection")
    assert (undeclared.status_code, undeclared.content) == (200, b"")
    told = feedback(wire, session, feedback_ids="img_1.png|img_3.png", round_id="last")
    assert told.text == "img_1.png,2\nimg_3.png,2\n"
    assert told.headers["content-type"] == "text/csv; charset=utf-8"


def parts_of(answer: httpx.Response) -> dict[str, tuple[str, str, str]]:
    """Filename, content type and text of each part."""
    from email import message_from_bytes

    head = b"Content-Type: " + answer.headers["content-type"].encode() + b"\r\n\r\n"
    message = message_from_bytes(head + answer.content)
    assert message.is_multipart()
    return {
        str(part.get_param("name", header="content-disposition")): (
            str(part.get_filename()),
            part.get_content_type(),
            part.get_payload(),
        )
        for part in message.get_payload()
    }


def test_feedback_of_several_types(wire: Wire, session: str) -> None:
    wire.post(session, {"classification": classes(IDS), "detection": detection(IDS, 0.9)})
    answer = feedback(wire, session, "detection|score", feedback_ids="img_1.png")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("multipart/form-data; boundary=")
    name = f"{session}.{TEST}.last"
    assert parts_of(answer) == {
        "detection": (f"{name}_detection.csv", "text/csv", "img_1.png,0\n"),
        "score": (f"{name}_score.csv", "text/csv", "accuracy,0.375\n"),
    }


def results_feedback(wire: Wire, session: str, files: dict, **about: Any) -> httpx.Response:
    sent = {"session_id": session, "test_id": TEST, "round_id": 0, "result_types": list(files)}
    parts = {"test_identification": json.dumps({**sent, **about})}
    parts |= {f"{kind}_file": body for kind, body in files.items()}
    return wire.send("POST", "/session/resultsfeedback", parts)


def test_feedback_takes_any_round(wire: Wire, session: str) -> None:
    wire.post(session, {"detection": detection(round_ids(0), 0.9)})
    about = {"session_id": session, "test_id": TEST, "feedback_ids": IDS[0]}
    for number in ("nan", "-1", "7", "x\r\ny", ""):
        query = {**about, "feedback_type": "score|labels", "round_id": number}
        assert error_of(wire.send("GET", "/session/feedback", **query))[0] == 400
    answer = wire.send(
        "GET", "/session/feedback", **about, feedback_type="detection", round_id="nan"
    )
    assert (answer.status_code, answer.text) == (200, f"{IDS[0]},0\n")


def test_results_and_feedback_in_one(wire: Wire, session: str) -> None:
    files = {"classification": classes(IDS), "detection": detection(IDS, 0.9)}
    one = results_feedback(wire, session, files, feedback_types=["score"])
    assert (one.status_code, one.text) == (200, "accuracy,0.375\n")
    both = results_feedback(
        *(wire, session, files), feedback_types=["score", "detection"], feedback_ids=["img_4.png"]
    )
    assert parts_of(both)["detection"] == (
        *(f"{session}.{TEST}.0_detection.csv", "text/csv", "img_4.png,1\n"),
    )
    none = results_feedback(wire, session, files)
    assert (none.status_code, none.content) == (200, b"")
    lacking = results_feedback(wire, session, {"detection": b"a,1"}, result_types=["a"])
    assert error_of(lacking) == (400, "MissingParamsError")
    assert error_of(results_feedback(wire, session, {})) == (400, "MissingParamsError")


def test_evaluations(wire: Wire, session: str) -> None:
    about = {"session_id": session, "test_id": TEST, "round_id": 0}
    assert error_of(wire.send("GET", "/session/evaluations", **about)) == (400, "TestInProcess")
    wire.post(session, {"classification": classes(IDS), "detection": detection(IDS, 0.9)})
    dev = wire.send("GET", "/session/evaluations", **about, devmode="true")
    wire.send("DELETE", "/test", session_id=session, test_id=TEST)
    done = wire.send("GET", "/session/evaluations", **about)
    assert done.status_code == 200 and done.text == dev.text
    assert set(done.json()) == {
        *("m_num", "m_num_stats", "m_ndp", "m_ndp_pre", "m_ndp_post", "m_acc", "m_acc_failed"),
        "m_is_cdt_and_is_early",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"detection": detection(IDS)}, (500, "result_file_not_found")),
        ({"detection": detection(IDS[:2]), "classification": classes(IDS)}, (400, None)),
        ({"detection": b"img_0.png,x\n", "classification": classes(IDS)}, (400, None)),
    ],
    ids=["no classification", "half", "text"],
)
def test_evaluating_what_cannot_be(wire: Wire, session: str, files: dict, expected: tuple) -> None:
    wire.post(session, files)
    wire.send("DELETE", "/test", session_id=session, test_id=TEST)
    answer = wire.send("GET", "/session/evaluations", session_id=session, test_id=TEST)
    status, reason = error_of(answer)
    assert status == expected[0] and expected[1] in (None, reason)


def test_a_condda_test_has_its_measures(wire: Wire) -> None:
    session = wire.open(CONDDA, protocol="CONDDA")
    about = {"session_id": session, "test_id": CONDDA}
    picks = [1, 2, 1, 2, 3, 1, 3, 2]  # known_classes 2 counts unknown: column 2 is discovered, too
    files = {"detection": detection(IDS[:6]) + detection(IDS[6:], 0.9)}
    wire.post(session, files, test=CONDDA)
    wire.send("DELETE", "/test", **about)
    answer = wire.send("GET", "/session/evaluations", round_id=0, **about)
    assert error_of(answer) == (500, "result_file_not_found")
    session = wire.open(CONDDA, protocol="CONDDA")
    about = {"session_id": session, "test_id": CONDDA}
    wire.post(session, files | {"characterization": classes(IDS, picks, columns=5)}, test=CONDDA)
    wire.send("DELETE", "/test", **about)
    found = wire.send("GET", "/session/evaluations", round_id=0, **about).json()
    assert found["m_num_stats"]["GT_indx"] == 5 and found["m_num_stats"]["P_indx_0.5"] == 7
    assert found["m_is_cdt_and_is_early"]["Is CDT"] == 1
    assert found["characterization"]["post_discovery_accuracy"] > 0.5
    path = f"/v1/sessions/{session}/tests/{CONDDA}/metrics"
    assert wire.http.get(path).json() == found


def test_completed_test_and_ended_session(wire: Wire, session: str) -> None:
    about = {"session_id": session, "test_id": TEST}
    assert error_of(wire.send("GET", "/session/latest", session_id=session)) == (500, "KeyError")
    wire.post(session, {"detection": detection(IDS, 0.9)})
    assert wire.send("DELETE", "/test", **about).text == "OK"
    done = (400, "TestCompleted")
    assert error_of(wire.send("GET", "/session/dataset", **about, round_id=0)) == done
    assert error_of(wire.post(session, {"detection": detection(IDS)}, 1)) == done
    assert error_of(wire.send("DELETE", "/test", **about)) == done
    assert error_of(feedback(wire, session)) == done
    assert wire.send("GET", "/test/metadata", **about).status_code == 200
    assert wire.send("GET", "/session/latest", session_id=session).text == (
        f'{{"finished_tests":["{TEST}"]}}\n'
    )

    assert wire.send("DELETE", "/session", session_id=session).text == "OK"
    ended = (400, "SessionEnded")
    for method, path in (
        *(("GET", "/session/dataset"), ("GET", "/session/latest"), ("DELETE", "/session")),
        *(("GET", "/test/metadata"), ("GET", "/session/feedback"), ("DELETE", "/test")),
    ):
        answer = wire.send(method, path, **about, round_id=0, feedback_type="score")
        assert error_of(answer) == ended, path
    assert error_of(wire.post(session, {"detection": detection(IDS)}, 1)) == ended
    for path in ("/session/status", "/session/zip"):
        assert wire.send("GET", path, session_id=session).status_code == 200
    answer = wire.send("GET", "/session/evaluations", **about)
    assert error_of(answer) == (500, "result_file_not_found")


def test_terminate_with_open_tests(wire: Wire, session: str) -> None:
    wire.send("GET", "/session/dataset", session_id=session, test_id=TEST, round_id=0)
    assert wire.send("DELETE", "/session", session_id=session).text == "OK"


def test_bad_override_hint(wire: Wire) -> None:
    session = wire.open(hints=["round_size=abc"])
    about = {"session_id": session, "test_id": TEST}
    assert error_of(wire.send("GET", "/test/metadata", **about)) == (500, "ValueError")
    assert error_of(wire.send("GET", "/session/dataset", **about, round_id=0)) == (
        *(500, "ValueError"),
    )


def test_a_damaged_file_is_named_in_the_log_only(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """Its message quotes a cell of the ground truth, and a path of the server."""
    test = "OND.1.1.7"
    write_test(wire.folder / "data", test, truth="id,detection,classification\na,0,secret\n")
    about = {"session_id": wire.open(test), "test_id": test}
    for path in ("/session/dataset", "/test/metadata"):
        answer = wire.send("GET", path, **about, round_id=0)
        assert error_of(answer) == (500, "SourceError")
        assert "secret" not in answer.text and str(wire.folder) not in answer.text
    assert "classification of row 0 is 'secret'" in caplog.text
    for path in (f"/v1/sessions/{about['session_id']}/tests/{test}", "/operator/curve"):
        answer = wire.send("GET", path, **about)
        assert "secret" not in answer.text and str(wire.folder) not in answer.text


def test_status_and_zip(wire: Wire) -> None:
    session = wire.open(novelty_detector_version="status-1")
    wire.post(session, {"detection": detection(IDS)})
    wire.send("DELETE", "/test", session_id=session, test_id=TEST)
    lines = wire.send("GET", "/session/status", detector="status-1").text.split(",")
    assert lines[:2] == [session, "status-1"] and lines[3] == "Incomplete"
    with_tests = wire.send("GET", "/session/status", session_id=session, include_tests="True").text
    assert with_tests.split(",")[2] == TEST
    assert error_of(wire.send("GET", "/session/status", after="yesterday")) == (400, "ValueError")
    answer = wire.send("GET", "/session/zip", session_id=session, test_id=f"{TEST}|other")
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as file:
        assert f"OND/{DOMAIN}/{session}.{TEST}_detection.csv" in file.namelist()
    assert error_of(wire.send("GET", "/session/zip", session_id=UNKNOWN)) == (
        *(400, "session_id_invalid"),
    )


def test_strict_by_option(tmp_path: Path) -> None:
    write_test(tmp_path / "data")
    with running(tmp_path / "data", tmp_path / "state", policy=EVALUATION) as url:
        client = Wire(url, tmp_path)
        session = client.open()
        answer = client.post(session, {"detection": detection(IDS)})
        assert error_of(answer) == (400, "RoundNotServed")
        query = {"session_id": session, "test_id": TEST, "devmode": "true"}
        answer = client.send("GET", "/session/evaluations", **query)
        assert error_of(answer) == (400, "TestInProcess")
        client.http.close()


# Bad input --------------------------------------------------------------------------------------

# Reasons that may come with 500 (docs/condda.md, rule 10); all other refusals are 400.
LISTED = {
    *("test_id_invalid", "JSONDecodeError", "KeyError", "metadata_not_found", "ValueError"),
    "result_file_not_found",
}
TRAVERSAL = (
    *("../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "..\\..\\x", "%2e%2e%2f", "a\x00b"),
    *("", " ", "x" * 5000, "\u202ename", "é", "a|b", "'; drop table events; --", "con\r\nX: 1"),
)


def tame(response: httpx.Response) -> None:
    """An answer that the published client survives, with a 500 only where rule 10 has one."""
    assert response.status_code in (200, 204, 400, 500), response.content
    assert b"Traceback" not in response.content and b"/tasks/condda" not in response.content
    if response.status_code >= 400:
        status, reason = error_of(response)
        assert status == 400 or reason in LISTED, (status, reason, response.text)


def all_files(folder: Path) -> set[Path]:
    """All but what SQLite keeps beside a store for as long as some test has it open."""
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith((".sqlite-wal", ".sqlite-shm"))
    }


@pytest.mark.parametrize("name", TRAVERSAL, ids=[f"name{n}" for n in range(len(TRAVERSAL))])
def test_names_never_become_paths(wire: Wire, session: str, name: str) -> None:
    before = all_files(wire.folder)
    outside = all_files(wire.folder.parent)
    for method, path, _ in ROUTES:
        for wrong in ("session_id", "test_id", "round_id", "feedback_type", "feedback_ids"):
            query = {"session_id": session, "test_id": TEST, "round_id": 0}
            query |= {"feedback_type": "score", wrong: name}
            if method == "DELETE" and wrong not in NEEDED.get(path, ("session_id",)):
                continue  # would end the session
            tame(wire.send(method, path, **query))
    for wrong in ("session_id", "test_id", "round_id", "result_types"):
        tame(wire.post(session, {"detection": b"a,1\n"}, **{wrong: name}))
        tame(results_feedback(wire, session, {"detection": b"a,1\n"}, **{wrong: name}))
    tame(wire.post(session, {name.strip("\r\n\x00") or "x": b"a,1\n"}))
    for wrong in SETTINGS:
        parts = {"test_ids": TEST, "configuration": json.dumps({**SETTINGS, wrong: name})}
        tame(wire.send("POST", "/session", parts))
    tame(wire.send("POST", "/session", {"test_ids": name, "configuration": json.dumps(SETTINGS)}))
    tame(wire.send("GET", "/session/zip", session_id=session))
    assert all_files(wire.folder) == before and all_files(wire.folder.parent) == outside


ODD = (None, 5, -1.5, True, [], [1], {}, {"a": 1}, "text", "", 10**400, "\ud800", 1e308)


@pytest.mark.parametrize("odd", ODD, ids=[f"value{n}" for n in range(len(ODD))])
def test_wrong_types(wire: Wire, session: str, odd: object) -> None:
    for key in (*SETTINGS, "test_ids"):
        parts = {"test_ids": TEST, "configuration": json.dumps({**SETTINGS, key: odd})}
        tame(wire.send("POST", "/session", parts))
    for name in ("test_requirements", "configuration", "test_identification"):
        for method, path in (
            ("GET", "/test/ids"),
            ("POST", "/session"),
            ("POST", "/session/results"),
        ):
            tame(wire.send(method, path, {name: json.dumps(odd), "test_ids": TEST}))
            tame(
                wire.http.request(
                    method,
                    path,
                    content=json.dumps(odd).encode("utf-8"),
                    headers={"content-type": "application/json"},
                )
            )
    for key in ("session_id", "test_id", "round_id", "result_types"):
        tame(wire.post(session, {"detection": b"a,1\n"}, **{key: odd}))
    for key in ("round_id", "result_types", "feedback_types", "feedback_ids"):
        tame(results_feedback(wire, session, {"detection": b"a,1\n"}, **{key: odd}))
    wanted = {"protocol": "OND", "domain": DOMAIN, "detector_seed": "1"}
    for key in wanted:
        tame(wire.send("GET", "/test/ids", {"test_requirements": json.dumps({**wanted, key: odd})}))


BYTES = (b"\xff\xfe\x00", b"\x00" * 100, b"a,1\r\nb,2\r\n", b'"', b"\xef\xbb\xbfa,1\n", b",,,\n,\n")


@pytest.mark.parametrize("body", BYTES, ids=[f"bytes{n}" for n in range(len(BYTES))])
def test_odd_bytes(wire: Wire, session: str, body: bytes) -> None:
    tame(wire.post(session, {"detection": body, "classification": body}))
    tame(wire.send("POST", "/session", {"test_ids": body, "configuration": body}))
    tame(wire.send("POST", "/session/results", {"test_identification": body, "a_file": body}))
    tame(wire.send("GET", "/test/ids", {"test_requirements": body}))
    for kind in ("multipart/form-data", "multipart/form-data; boundary=limit", "application/json"):
        for method, path, _ in ROUTES:
            headers = {"content-type": kind}
            tame(wire.http.request(method, path, content=body, headers=headers))
    tame(wire.http.get(b"/session/dataset?session_id=%ff%fe&test_id=%00&round_id=%ff".decode()))


def test_non_utf8_results_are_refused_and_leave_nothing(wire: Wire, session: str) -> None:
    files = {"classification": classes(IDS), "detection": b"\xff\xfe,1\n"}
    assert error_of(wire.post(session, files)) == (400, "UnicodeDecodeError")
    assert error_of(feedback(wire, session, "score")) == (500, "KeyError")


def test_what_random_runs_beside_the_public_server_showed(wire: Wire, session: str) -> None:
    """Facts of those exchanges: the first is the same there, the others are listed as differing."""
    line = wire.send("GET", "/session/status", session_id=session, include_tests="true").text
    assert line.split(",")[:3] == [session, "agent-1", " NA"]  # with the blank, as there
    wire.post(session, {"detection": detection(IDS[:3], 0.9)})
    about = {"session_id": session, "test_id": TEST}
    told = wire.send("GET", "/session/feedback", feedback_type="classification", **about)
    assert (told.status_code, told.content) == (200, b"")  # there 500: nothing of it was posted
    score = wire.send("GET", "/session/feedback", feedback_type="score", **about)
    assert error_of(score) == (400, "feedback_type_invalid")  # there 500
    sent = {**about, "round_id": 0, "result_types": ["classification"], "feedback_types": []}
    parts = {"test_identification": json.dumps(sent), "classification_file": classes(IDS[:3])}
    both = wire.send("POST", "/session/resultsfeedback", parts)
    assert (both.status_code, both.content) == (200, b"")  # there 500
    assert error_of(wire.send("GET", "/session/latest", session_id=session)) == (500, "KeyError")
    wire.send("DELETE", "/test", **about)
    evaluated = wire.send("GET", "/session/evaluations", round_id=0, **about)
    assert error_of(evaluated) == (400, "IncompleteResults")  # there 500


def test_unknown_paths_and_methods(wire: Wire) -> None:
    for method, path in (
        *(("GET", "/nope"), ("GET", "/session"), ("PUT", "/session"), ("POST", "/test/ids")),
        *(("GET", "/session/"), ("GET", "/session/../x"), ("PATCH", "/session/zip")),
    ):
        assert error_of(wire.send(method, path))[0] == 400


def test_too_large(wire: Wire, session: str) -> None:
    large = b"a,1\n" * (LARGEST // 4 + 1)
    assert error_of(wire.post(session, {"detection": large})) == (400, "TooLarge")
    whole = b"x" * (LARGEST + _ENVELOPE_BYTES)
    assert error_of(wire.post(session, {"detection": whole})) == (400, "TooLarge")

    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 50_000

    answer = wire.http.post("/session/results", content=chunks())  # no content-length
    assert error_of(answer) == (400, "TooLarge")


def raw(url: str, request: bytes) -> bytes:
    """Send bytes and hang up for writing; gives all that comes back."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


@pytest.mark.parametrize("length", ["99999", "3", "-1", "abc", "99999999999999999999"])
def test_content_length_lies(wire: Wire, length: str) -> None:
    body, headers = multipart({"test_requirements": "{}"})
    head = f"GET /test/ids HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n"
    head += f"Content-Type: {headers['content-type']}\r\n\r\n"
    answer = raw(wire.url, head.encode() + body)
    assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert wire.send("GET", "/session/status").status_code == 200


def test_a_body_declared_too_large_is_refused_before_it_comes(wire: Wire) -> None:
    place = urlsplit(wire.url)
    head = "PUT /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000000000000\r\n\r\n"
    with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
        connection.sendall(head.encode())
        answer = b""
        while not answer.endswith(b"}\n"):
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ") and b'"reason":"TooLarge"' in answer


def test_what_comes_of_a_body_that_is_too_large_is_not_kept() -> None:
    """It is answered while it comes; what comes after is taken up to twice the limit."""
    chunk, sent, kept = 1 << 20, [], []
    guard = Guard(None, SimpleNamespace(limits=Limits(post_bytes=7 * chunk)))  # type: ignore
    headers = [(b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": headers, "state": {}}

    async def receive() -> dict[str, Any]:
        kept.append(tracemalloc.get_traced_memory()[0])
        assert bool(sent) == (len(kept) > 9)
        return {"type": "http.request", "body": bytes(chunk), "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append((message["type"], message.get("more_body"), len(kept)))

    tracemalloc.start()
    try:
        asyncio.run(guard(scope, receive, send))
    finally:
        tracemalloc.stop()
    body = "http.response.body"
    assert sent == [("http.response.start", None, 9), (body, True, 9), (body, None, 26)]
    assert max(kept[:9]) > 7 * chunk and max(kept[10:]) < 3 * chunk


names = st.sampled_from(["session_id", "test_id", "round_id", "feedback_type", "feedback_ids"])
fields = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
json_values = st.recursive(
    fields,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
WIRE_SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@WIRE_SETTINGS
@given(
    route=st.sampled_from([route for route in ROUTES if route[0] == "GET"]),
    query=st.dictionaries(names, st.text(max_size=30)),
    body=st.binary(max_size=60),
)
def test_any_get(wire: Wire, route: tuple, query: dict, body: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=limit"}
    try:
        request = wire.http.build_request(
            "GET", route[1], params=query, content=body, headers=headers
        )
    except UnicodeEncodeError:
        return  # half a surrogate pair cannot be sent
    tame(wire.http.send(request))


@WIRE_SETTINGS
@given(
    path=st.sampled_from(["/session", "/session/results", "/session/resultsfeedback"]),
    about=st.dictionaries(
        st.sampled_from(["session_id", "test_id", "round_id", "result_types", *SETTINGS]),
        json_values,
    ),
    content=st.binary(max_size=60),
)
def test_any_post(wire: Wire, session: str, path: str, about: dict, content: bytes) -> None:
    known = {"session_id": session, "test_id": TEST, "round_id": 0, **SETTINGS}
    text = json.dumps({**known, "result_types": ["a"], **about})
    parts = {
        "configuration": text,
        "test_identification": text,
        "test_ids": TEST,
        "a_file": content,
    }
    tame(wire.send("POST", path, parts))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=9),
        st.binary(max_size=200).filter(lambda body: b"--limit" not in body),
        min_size=1,
    )
)
def test_parts_come_back_byte_for_byte(parts: dict[str, bytes]) -> None:
    assert _parts(multipart(parts)[0], "limit") == parts


HEAD = b'Content-Disposition: form-data; name="a"'
PIECES = st.sampled_from(
    [
        *(HEAD, b"--limit", b"\r\n", b"--", b"\n", b"a,1", b"; ", b'filename="b"', b'name="c"'),
        *(b"Content-Type: text/csv", b"limit", b"\xff", b""),
    ]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(PIECES, max_size=14), st.binary(max_size=5), st.booleans())
def test_odd_bodies_are_parts_or_refused(pieces: list[bytes], noise: bytes, whole: bool) -> None:
    body = b"".join(pieces) + noise
    if whole:
        body = multipart({"x": body, "y": noise})[0]
    try:
        parts = _parts(body, "limit")
    except ProtocolRefusal as refusal:
        assert refusal.reason == "InvalidMultipart"
    else:
        assert all(part in body for part in parts.values())


OPERATOR = Token(TOKEN, Caller("bob", "operator"))
AGENTS = tuple(Token(f"{name}-{TOKEN}", Caller(name, "agent")) for name in ("alice", "carl"))


# Who is let in ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("locked")
    write_test(folder / "data")
    write_test(folder / "data", "OND.1.1.2")
    with running(folder / "data", folder / "state", tokens=[*AGENTS, OPERATOR]) as url:
        yield url


OURS = ("/", "/docs", "/openapi.json", "/operator/sessions", "/v1/sessions")


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Token {TOKEN}", "Basic !"],
    ids=["none", "empty", "bearer", "longer", "shorter", "scheme", "basic"],
)
def test_every_route_needs_a_token(locked: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    with httpx.Client(base_url=locked, headers=headers, trust_env=False) as http:
        for method, path, _ in ROUTES:
            assert error_of(http.request(method, path)) == (400, "Unauthorized")
        for path in OURS:
            answer = http.get(path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"]


def test_tokens_let_in(locked: str) -> None:
    with HttpHarness(locked, token=TOKEN) as client:
        assert client.test_ids_request(protocol="OND", domain=DOMAIN).decode() == (
            f"{TEST}\nOND.1.1.2\n"
        )
    with httpx.Client(base_url=locked, trust_env=False) as http:
        for path in OURS:
            assert http.get(path, auth=("operator", TOKEN)).status_code == 200
    # What the published client sends if its URL carries the token.
    answer = httpx.get(locked.replace("//", f"//agent:{TOKEN}@") + "/session/status")
    assert answer.status_code == 200


def test_an_agent_sees_and_ends_its_own_sessions_only(locked: str) -> None:
    alice, carl = (HttpHarness(locked, token=token.text) for token in AGENTS)
    options = {"test_ids": [TEST], "protocol": "OND", "domain": DOMAIN}
    session = alice.session_request(**options, novelty_detector_version="a-1")
    about = {"session_id": session, "test_id": TEST}
    for call in (
        lambda: carl.session_progress(session_id=session),
        lambda: carl.get_test_metadata(**about),
        lambda: carl.dataset_request(round_id=0, **about),
        lambda: carl.post_results(result_files={"detection": b""}, round_id=0, **about),
        lambda: carl.results(session, TEST, "detection"),
        lambda: carl.session_zip(session_id=session),
        lambda: carl.evaluate(**about),
        lambda: carl.complete_test(**about),
        lambda: carl.terminate_session(session_id=session),
    ):
        with pytest.raises(ProtocolRefusal) as refusal:
            call()
        assert refusal.value.reason == "session_id_invalid"
    assert session in alice.session_status() and session not in carl.session_status()
    for token, listed in zip((*AGENTS, OPERATOR), (True, False, True), strict=True):
        headers = {"authorization": f"Bearer {token.text}"}
        with httpx.Client(base_url=locked, headers=headers, trust_env=False) as http:
            assert (session in http.get("/v1/sessions").json()) == listed
            pages = {http.get(path).status_code for path in ("/", "/operator/sessions")}
            assert pages == {403 if token in AGENTS else 200}
    # Measures are truth: they come when the session has ended, and the test is then spent.
    for number in range(3):
        alice.dataset_request(round_id=number, **about)
        ids = round_ids(number)
        files = {"detection": detection(ids), "classification": classes(ids)}
        alice.post_results(result_files=files, round_id=number, **about)
    alice.complete_test(**about)
    with pytest.raises(ProtocolRefusal, match="SessionOpen"):
        alice.evaluate(**about)
    with pytest.raises(ProtocolRefusal, match="SessionOpen"):
        alice.evaluate_round_wise(round_id=0, **about)
    alice.terminate_session(session_id=session)
    assert alice.evaluate(**about)["m_num_stats"]["GT_indx"] == 5
    with pytest.raises(ProtocolRefusal, match="AttemptsExceeded"):
        alice.session_request(**options, novelty_detector_version="a-2")
    other = {**options, "test_ids": ["OND.1.1.2"]}
    alice.session_request(**other, novelty_detector_version="a-2")
    carl.session_request(**options, novelty_detector_version="c-1")


def test_pages_elsewhere_cannot_reach_the_server(wire: Wire) -> None:
    for headers in (
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"host": "[::1"},
        {"origin": "http://[::1"},
    ):
        answer = wire.http.get("/session/status", headers=headers)
        assert error_of(answer) in ((400, "WrongHost"), (400, "WrongOrigin"))
        assert wire.http.get("/v1/sessions", headers=headers).status_code == 403
    own = {"origin": wire.url}
    assert wire.http.get("/session/status", headers=own).status_code == 200
    assert wire.http.get("/", headers={"host": "localhost"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_other_machines_need_tokens(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without tokens"):
        serve(tmp_path, tmp_path / "state", host=host, port=0)
    assert not (tmp_path / "state").exists()
    assert check_access(host, [OPERATOR]) == EVALUATION
    with pytest.raises(ConfigError, match="published tells agents ground truth"):
        check_access(host, [OPERATOR], PUBLISHED)


def test_weak_tokens_are_refused(tmp_path: Path) -> None:
    for token in ("short", "", "x" * 15, "pässword-that-is-long"):
        with pytest.raises(ConfigError, match="token"):
            check_access("127.0.0.1", [Token(token, Caller("a", "agent"))])
    lines = [f"{t.caller.role} {t.caller.owner}  {t.text}\n\n" for t in (*AGENTS, OPERATOR)]
    (tmp_path / "tokens").write_text("".join(lines))
    assert read_tokens(tmp_path / "tokens") == [*AGENTS, OPERATOR]
    for line in (TOKEN, f"king bob {TOKEN}"):
        (tmp_path / "tokens").write_text(f"{lines[0]}{line}\n")
        with pytest.raises(ConfigError, match=r"line 3 of .* is no token"):
            read_tokens(tmp_path / "tokens")
    with pytest.raises(ConfigError, match="cannot read the tokens"):
        read_tokens(tmp_path / "absent")


def test_a_port_in_use_is_a_sentence(wire: Wire, tmp_path: Path) -> None:
    write_test(tmp_path / "data")
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(tmp_path / "data", tmp_path / "state", port=urlsplit(wire.url).port)


# Many at once -----------------------------------------------------------------------------------


def test_fifty_sessions_in_parallel(wire: Wire) -> None:
    def play(number: int) -> str:
        with HttpHarness(wire.url) as client:
            session = client.session_request(
                test_ids=[TEST],
                protocol="OND",
                domain=DOMAIN,
                novelty_detector_version=f"many-{number}",
            )
            about = {"session_id": session, "test_id": TEST}
            for turn in range(3):
                ids = round_ids(turn)
                served = client.dataset_request(round_id=turn, **about)
                assert served.decode().split() == list(ids)
                files = {"detection": detection(ids, number / 100), "classification": classes(ids)}
                client.post_results(result_files=files, round_id=turn, **about)
                client.post_results(result_files=files, round_id=turn, **about)
            client.complete_test(**about)
            frame = client.results(session, TEST, "detection")
            assert frame["instance_id"].to_list() == list(IDS)
            assert frame["values"].list.first().to_list() == [number / 100] * len(IDS)
            client.terminate_session(session_id=session)
        return session

    with ThreadPoolExecutor(50) as pool:
        sessions = list(pool.map(play, range(50)))
    assert len(set(sessions)) == 50


def test_two_clients_on_one_session_post_each_round_once(wire: Wire, session: str) -> None:
    turns = count()

    def post(_: int) -> tuple[int, str]:
        turn = next(turns)
        answer = wire.post(session, {"detection": detection(IDS, (turn % 2) / 10)}, turn // 4)
        return answer.status_code, answer.text if answer.status_code == 200 else error_of(answer)[1]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(40)))
    # Of four posts to a round two have the content that won.
    assert answers.count((200, "OK")) == 20 and answers.count((400, "DetectionRepost")) == 20
    with HttpHarness(wire.url) as client:
        assert client.results(session, TEST, "detection").height == 10 * len(IDS)
