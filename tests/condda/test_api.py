"""The /v1 JSON API over a real server: resources, status codes, repeated requests, bad input."""

import io
import json
import uuid
import zipfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.condda.commands import Limits
from tasks.condda.server.api import Results, csv_bytes, finite
from tasks.condda.server.app import _ENVELOPE_BYTES
from tasks.condda.server.serve import running
from tests.condda.small import DOMAIN, IDS, TEST, round_ids, write_test

LARGEST = 20_000
ROUNDLESS = "OND.1.1.8"
NEW = {"protocol": "OND", "domain": DOMAIN, "detector": "agent-1", "test_ids": [TEST]}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("api")
    write_test(folder / "data")
    write_test(folder / "data", ROUNDLESS, round_size=None)
    limits = Limits(post_bytes=LARGEST)
    with running(folder / "data", folder / "state", limits=limits) as url:
        with httpx.Client(base_url=f"{url}/v1", trust_env=False, timeout=30) as client:
            yield client


@pytest.fixture
def session(api: httpx.Client) -> str:
    return api.post("/sessions", json=NEW).json()["session_id"]


def rows(number: int, value: float = 0.1) -> dict[str, Any]:
    ids = list(round_ids(number))
    classes = [[0.0, 1.0, 0.0] for _ in ids]
    return {
        "detection": {"ids": ids, "values": [[value] for _ in ids]},
        "classification": {"ids": ids, "values": classes},
    }


def place(session: str, rest: str = "", test: str = TEST) -> str:
    return f"/sessions/{session}/tests/{test}{rest}"


def play(api: httpx.Client, session: str, value: float = 0.1) -> None:
    for number in range(3):
        assert api.get(place(session, f"/rounds/{number}")).status_code == 200
        answer = api.put(place(session, f"/rounds/{number}/results"), json=rows(number, value))
        assert answer.status_code == 204, answer.text
    assert api.put(place(session, "/completion")).status_code == 204


def reason(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()
    assert set(error) == {"reason", "message"}, error
    return answer.status_code, error["reason"]


def test_a_whole_session(api: httpx.Client) -> None:
    query = {"protocol": "OND", "domain": DOMAIN}
    offered = api.get("/tests", params=query).json()
    assert {"test_id": TEST, "protocol": "OND", "domain": DOMAIN} in offered
    opened = api.post("/sessions", json={**NEW, "hints": ["red_light"]})
    assert opened.status_code == 201
    session = opened.json()["session_id"]
    assert api.get("/sessions").json()[0] == session
    assert api.get(place(session, "/metadata")).json()["red_light"] == IDS[4]
    where = {"next_round": 0, "rounds": 3, "posted": [], "completed": False}
    assert api.get(place(session)).json() == {"test_id": TEST, **where}
    assert api.get(place(session, "/rounds/0")).json() == {"round": 0, "lines": list(IDS[:3])}
    play(api, session, 0.9)
    told = api.get(f"/sessions/{session}").json()
    assert told["tests"][TEST] == {"served": 3, "posted": 3, "attempt": 0, "completed": True}
    metrics = api.get(place(session, "/metrics"), params={"baseline": session}).json()
    assert metrics["m_num_stats"]["GT_indx"] == 5 and "m_nrp" in metrics
    assert metrics["m_acc"]["post_mean_top1"] is None  # NaN is no JSON
    accuracy = api.get(place(session, "/rounds/0/metrics")).json()
    assert accuracy["top1_accuracy_round_0"] == pytest.approx(2 / 3, abs=1e-5)
    posted = api.get(place(session, "/results/detection")).json()
    assert posted["ids"] == list(IDS) and posted["rounds"] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert posted["values"] == [[0.9]] * 8 and posted["cells"] == [None] * 8
    with zipfile.ZipFile(io.BytesIO(api.get(f"/sessions/{session}/archive").content)) as file:
        assert f"OND/{DOMAIN}/{session}.{TEST}_classification.csv" in file.namelist()
    assert api.delete(f"/sessions/{session}").status_code == 204
    assert api.get(f"/sessions/{session}").json()["terminated"] is not None


def test_repeated_requests_change_nothing(api: httpx.Client) -> None:
    session = str(uuid.uuid4())
    first = api.put(f"/sessions/{session}", json=NEW)
    again = api.put(f"/sessions/{session}", json=NEW)
    assert (first.status_code, again.status_code) == (201, 200) and first.json() == again.json()
    other = api.put(f"/sessions/{session}", json={**NEW, "detector": "other"})
    assert reason(other) == (409, "SessionExists")
    for number in range(3):
        for _ in range(2):
            assert api.get(place(session, f"/rounds/{number}")).status_code == 200
        for _ in range(2):
            sent = api.put(place(session, f"/rounds/{number}/results"), json=rows(number))
            assert sent.status_code == 204
    # Round 0 once more: on the wire this would be a restart.
    assert api.get(place(session, "/rounds/0")).status_code == 200
    assert len(api.get(place(session, "/results/detection")).json()["ids"]) == 8
    for _ in range(2):
        assert api.put(place(session, "/completion")).status_code == 204
    for _ in range(2):
        assert api.delete(f"/sessions/{session}").status_code == 204


def test_feedback(api: httpx.Client, session: str) -> None:
    question = {"type": "detection"}
    assert reason(api.post(place(session, "/feedback"), json=question)) == (409, "ResultsMissing")
    api.get(place(session, "/rounds/0"))
    api.put(place(session, "/rounds/0/results"), json=rows(0, 0.5))
    undeclared = api.post(place(session, "/feedback"), json=question)
    assert undeclared.json() == {"lines": []}
    api.get(place(session, "/rounds/1"))
    api.put(place(session, "/rounds/1/results"), json=rows(1, 0.6))
    asked = {"type": "detection", "ids": [IDS[4], IDS[0]], "round": 1}
    told = api.post(place(session, "/feedback"), json=asked)
    assert told.json() == {"lines": [[IDS[0], "0"], [IDS[4], "1"]]}
    spent = api.post(place(session, "/feedback"), json=question)
    assert reason(spent) == (409, "FeedbackBudgetExceeded")
    future = {"type": "classification", "ids": [IDS[7]]}
    assert reason(api.post(place(session, "/feedback"), json=future)) == (
        *(422, "FeedbackIdsNotServed"),
    )


def test_not_found(api: httpx.Client, session: str) -> None:
    for path in (
        "/sessions/none",
        "/sessions/none/archive",
        place("none"),
        place("none", "/metadata"),
    ):
        assert reason(api.get(path)) == (404, "session_id_invalid")
    for path in ("", "/metadata", "/rounds/0"):
        found = reason(api.get(place(session, path, test="none")))
        assert found == (404, "test_not_in_session")
    assert reason(api.get("/tests", params={"protocol": "X", "domain": "y"}))[0] == 404
    assert reason(api.delete("/sessions/none")) == (404, "session_id_invalid")
    assert reason(api.put(place("none", "/completion"))) == (404, "session_id_invalid")
    assert reason(api.get(place("none", "/metrics"))) == (404, "session_id_invalid")
    assert reason(api.get(place("none", "/results/detection"))) == (404, "session_id_invalid")
    assert reason(api.get("/nothing")) == (404, "NotFound")
    assert reason(api.patch("/sessions")) == (405, "MethodNotAllowed")
    unknown = {**NEW, "test_ids": ["OND.9.9.9"]}
    assert reason(api.post("/sessions", json=unknown)) == (404, "test_id_invalid")
    play(api, session)
    end = (409, "TestCompleted")
    assert reason(api.get(place(session, "/rounds/3"))) == end


def test_end_of_dataset_is_not_found(api: httpx.Client, session: str) -> None:
    for number in range(3):
        api.get(place(session, f"/rounds/{number}"))
        api.put(place(session, f"/rounds/{number}/results"), json=rows(number))
    assert reason(api.get(place(session, "/rounds/3"))) == (404, "EndOfDataset")


def test_conflicts(api: httpx.Client, session: str) -> None:
    results = place(session, "/rounds/0/results")
    assert reason(api.put(results, json=rows(0))) == (409, "RoundNotServed")
    assert reason(api.get(place(session, "/rounds/1"))) == (409, "RoundOrder")
    assert reason(api.put(place(session, "/completion"))) == (409, "TestIncomplete")
    assert reason(api.get(place(session, "/metrics"))) == (409, "TestInProcess")
    api.get(place(session, "/rounds/0"))
    api.put(results, json=rows(0))
    assert reason(api.put(results, json=rows(0, 0.7))) == (409, "DetectionRepost")
    assert reason(api.get(place(session, "/rounds/0/metrics"))) == (409, "TestInProcess")
    api.delete(f"/sessions/{session}")
    assert reason(api.get(place(session, "/metadata"))) == (409, "SessionEnded")


def test_the_wire_and_v1_share_sessions(api: httpx.Client, session: str) -> None:
    url = str(api.base_url).removesuffix("/v1/")
    about = {"session_id": session, "test_id": TEST, "round_id": 0}
    with httpx.Client(base_url=url, trust_env=False) as wire:
        served = wire.get("/session/dataset", params=about)
        assert (
            served.content.decode().split() == api.get(place(session, "/rounds/0")).json()["lines"]
        )
        api.put(place(session, "/rounds/0/results"), json=rows(0, 0.9))
        query = {**about, "feedback_type": "detection"}
        assert wire.get("/session/feedback", params=query).text == f"{IDS[0]},0\n{IDS[1]},0\n"


# Bad input --------------------------------------------------------------------------------------


def table(ids: object, values: object, **more: Any) -> dict[str, Any]:
    return {"detection": {"ids": ids, "values": values, **more}}


BAD_RESULTS = {
    "nothing": ({}, 422),
    "no ids": ({"detection": {"values": []}}, 422),
    "lengths": (table(["a"], []), 422),
    "foreign": (table(["a", "b", "c"], [[0], [0], [0]]), 422),
    "missing": (table([IDS[0]], [[0.5]]), 422),
    "twice": (table([IDS[0]] * 3, [[0]] * 3), 422),
    "order": (table(list(IDS[2::-1]), [[0]] * 3), 422),
    "range": (table(list(IDS[:3]), [[2]] * 3), 422),
    "text": (table(list(IDS[:3]), [["x"]] * 3), 422),
    "columns": (table(list(IDS[:3]), [[0.1] * 6] * 3), 422),
    "nested": (table(list(IDS[:3]), [[[0.1]]] * 3), 422),
    "null": (table(list(IDS[:3]), [[None]] * 3), 422),
    "huge number": (table(list(IDS[:3]), [[10**400]] * 3), 422),
    "extra key": (table(list(IDS[:3]), [[0]] * 3, more=1), 422),
    "type": ({"nope": {"ids": list(IDS[:3]), "values": [[0]] * 3}}, 422),
    "type name": ({"../x": {"ids": list(IDS[:3]), "values": [[0]] * 3}}, 422),
    "surrogate": (table(["\ud800", "b", "c"], [[0]] * 3), 422),
    "list": ([1, 2], 422),
    "large": (table(["x" * (LARGEST + 1)], [[0]]), 413),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_bad_results(api: httpx.Client, session: str, name: str) -> None:
    content, status = BAD_RESULTS[name]
    api.get(place(session, "/rounds/0"))
    answer = api.put(
        place(session, "/rounds/0/results"),
        content=json.dumps(content).encode(),
        headers={"content-type": "application/json"},
    )
    assert reason(answer)[0] == status, answer.text
    assert api.get(place(session, "/results/detection")).json()["ids"] == []


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999"], ids=["nan", "inf", "-inf", "1e999"]
)
def test_numbers_that_are_not_finite(api: httpx.Client, session: str, number: str) -> None:
    api.get(place(session, "/rounds/0"))
    text = json.dumps(table(list(IDS[:3]), [[0.5]] * 3)).replace("0.5", number, 1)
    headers = {"content-type": "application/json"}
    sent = api.put(place(session, "/rounds/0/results"), content=text, headers=headers)
    assert reason(sent) == (422, "NotFinite")
    text = json.dumps({**NEW, "detection_threshold": 0.5}).replace("0.5", number)
    assert reason(api.post("/sessions", content=text, headers=headers))[0] == 422


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[" * 5000, b"null", b'"text"'],
    ids=lambda body: str(len(body)),
)
def test_bodies_that_are_no_object(api: httpx.Client, session: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    for method, path in (
        *(("POST", "/sessions"), ("PUT", f"/sessions/{uuid.uuid4()}")),
        *(("PUT", place(session, "/rounds/0/results")), ("POST", place(session, "/feedback"))),
    ):
        answer = api.request(method, path, content=body, headers=headers)
        assert answer.status_code == 422, (path, answer.text)
        assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'{"protocol": 1', "the body: "),
        (b"", "the body: "),
        (json.dumps({**NEW, "test_ids": ["a", 1]}), "test_ids[1]: "),
        (json.dumps({**NEW, "threshold": 1}), "threshold: "),
        (json.dumps({"protocol": "OND"}), "domain: "),
    ],
)
def test_what_is_wrong_is_named(api: httpx.Client, content: bytes | str, place: str) -> None:
    answer = api.post("/sessions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422 and answer.json()["message"].startswith(place)


def test_the_line_that_is_wrong_is_named(api: httpx.Client, session: str) -> None:
    answer = api.put(place(session, "/rounds/0/results"), json=table(["a"], [[0.5, None]]))
    assert answer.json()["message"].startswith("detection.values[0][1]: ")
    answer = api.get("/sessions?limit=0")
    assert answer.json()["message"].startswith("limit: ")


def test_a_wrong_method_is_told_the_right_ones(api: httpx.Client, session: str) -> None:
    for path, allowed in (
        *(("/sessions", "GET, POST"), (f"/sessions/{session}", "DELETE, GET, PUT")),
        (place(session, "/completion"), "PUT"),
    ):
        answer = api.patch(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    wire = httpx.patch(str(api.base_url).removesuffix("/v1/") + "/session", trust_env=False)
    assert (wire.status_code, wire.headers["allow"]) == (400, "DELETE, POST")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"test_ids": []}, 422),
        ({"test_ids": [TEST, TEST]}, 422),
        ({"test_ids": ["../x"]}, 422),
        ({"detector": "x" * 513}, 422),
        ({"hints": ["x"] * 101}, 422),
        ({"detection_threshold": 1.5}, 422),
        ({"detection_threshold": 0.4}, 403),
        ({"hints": ["round_size=1"]}, 403),
        ({"protocol": "x"}, 404),
    ],
)
def test_what_a_session_may_be_is_in_the_schema(
    api: httpx.Client, change: dict[str, Any], status: int
) -> None:
    """A fuzzer of the schema finds no refusal that the schema does not tell."""
    assert reason(api.post("/sessions", json={**NEW, **change}))[0] == status
    schema = api.get(str(api.base_url).removesuffix("v1/") + "openapi.json").json()
    fields = schema["components"]["schemas"]["NewSession"]["properties"]
    assert fields["test_ids"]["minItems"] == 1 and fields["test_ids"]["uniqueItems"]
    assert fields["test_ids"]["items"]["pattern"] and fields["detector"]["maxLength"] == 512
    documented = schema["paths"]["/v1/sessions"]["post"]["responses"]
    assert str(status) in documented


def test_lines_for_no_test_are_not_found_whatever_they_are(api: httpx.Client) -> None:
    odd = {"a": {"ids": [], "values": [[""]]}}
    assert reason(api.put(place("none", "/rounds/0/results"), json=odd))[0] == 404


NAMES = (
    "%2e%2e",
    "%2e%2e%2fx",
    "..%2f..%2fetc%2fpasswd",
    "a%00b",
    "%ff%fe",
    "x" * 5000,
    "%20",
    "a%0d%0ab",
)


@pytest.mark.parametrize("name", NAMES, ids=[f"name{n}" for n in range(len(NAMES))])
def test_odd_names_are_not_found(api: httpx.Client, session: str, name: str) -> None:
    for path in (
        *(f"/sessions/{name}", place(name), place(session, "/metadata", test=name)),
        *(place(session, f"/rounds/{name}"), place(session, "/metrics", test=name)),
    ):
        answer = api.get(path)
        assert answer.status_code in (400, 404, 409, 422), (path, answer.text)
    assert api.get(place(session, f"/results/{name}")).status_code in (200, 404, 422)
    assert api.put(f"/sessions/{name}", json=NEW).status_code in (404, 405, 422)


def test_too_large_bodies(api: httpx.Client) -> None:
    body = b"x" * (LARGEST + _ENVELOPE_BYTES + 1)
    assert reason(api.post("/sessions", content=body)) == (413, "TooLarge")


@pytest.mark.parametrize("number", ["-1", "3", "10000000000000000000000", "1.5", "x"])
def test_odd_rounds(api: httpx.Client, session: str, number: str) -> None:
    answer = api.get(place(session, f"/rounds/{number}"))
    assert answer.status_code in (404, 409, 413, 422), answer.text
    put = api.put(place(session, f"/rounds/{number}/results"), json=rows(0))
    assert put.status_code in (404, 409, 413, 422), put.text


def test_openapi_describes_every_route(api: httpx.Client) -> None:
    url = str(api.base_url).removesuffix("/v1/")
    document = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    assert document["paths"] and all(path.startswith("/v1/") for path in document["paths"])
    operations = [op for path in document["paths"].values() for op in path.values()]
    assert len(operations) >= 16 and all(operation["summary"] for operation in operations)
    for operation in operations:
        assert all(given.get("description") for given in operation.get("parameters", []))
    for model in document["components"]["schemas"].values():
        assert model.get("description") or "Validation" in model["title"], model["title"]


# The parts that need no server ------------------------------------------------------------------


def test_results_become_a_file_of_the_wire() -> None:
    results = Results(ids=["a", 'b,"c"'], values=[[0.1, 1], ["some, text"]])
    assert csv_bytes(results) == b'a,0.1,1.0\n"b,""c""","some, text"\n'


@settings(derandomize=True)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_numbers_survive(values: list[float]) -> None:
    line = csv_bytes(Results(ids=["a"], values=[list(values)])).decode().strip()
    assert [float(cell) for cell in line.split(",")[1:]] == values


@settings(derandomize=True)
@given(st.recursive(st.floats() | st.text(), lambda inner: st.lists(inner) | st.tuples(inner)))
def test_finite_is_always_json(content: Any) -> None:
    json.dumps(finite({"key": content}), allow_nan=False)
