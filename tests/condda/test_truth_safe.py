"""What an agent can see of a generated test in a whole run over HTTP: nothing of its truth.

Tests are of all scenarios; neither names, order, sizes nor metadata tell which.
"""

import io
import json
import zipfile
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score

from schemas.condda import TestSettings
from tasks.condda.commands import Caller
from tasks.condda.make_tests import planned
from tasks.condda.scenarios import SCENARIOS
from tasks.condda.server.serve import Token, running
from tasks.condda.test_files import TestFile, TestLibrary
from tests.condda.test_make_tests import pool

TOKEN = "a-token-that-is-long-enough"
TESTS = 24
SETTINGS = TestSettings(
    scenario=("all",), tests=TESTS, rows=80, round_size=16, feedback_max_ids=3, seed=20260101
)


class Watched:
    """A client of /v1 and of the wire that keeps every response."""

    def __init__(self, url: str):
        headers = {"authorization": f"Bearer {TOKEN}"}
        self.http = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30)
        self.kept: list[tuple[str, httpx.Response]] = []

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self.http.request(method, path, **options)
        self.kept.append((f"{method} {path}", answer))
        return answer


def play(agent: Watched, session: str, test: str, alarm: int) -> None:
    """A whole test: every question that an agent may ask, right or wrong."""
    place = f"/v1/sessions/{session}/tests/{test}"
    about = {"session_id": session, "test_id": test}

    def ask(kind: str, ids: list[str] | None = None) -> None:
        agent("POST", f"{place}/feedback", json={"type": kind, "ids": ids})
        named = {"feedback_ids": "|".join(ids)} if ids else {}
        agent("GET", "/session/feedback", params={**about, "feedback_type": kind, **named})

    agent("GET", place)
    agent("GET", f"{place}/metadata")
    agent("GET", "/test/metadata", params=about)
    for number in range(5):
        ids = agent("GET", f"{place}/rounds/{number}").json()["lines"]
        agent("GET", "/session/dataset", params={**about, "round_id": number})
        chances = [[float(number >= alarm)] for _ in ids]
        vectors = [[0.1, 0.6, 0.1, 0.1, 0.1, 0.0, 0.0] for _ in ids]
        for kind, values in (("detection", chances), ("characterization", vectors)):
            # Of what is served and not answered, or not all of it, nothing is told to anyone.
            ask("classification", ids)
            ask("detection", ids)
            ask("score")
            results = {kind: {"ids": ids, "values": values}}
            sent = agent("PUT", f"{place}/rounds/{number}/results", json=results)
            assert sent.status_code == 204, sent.text
        for kind in ("classification", "detection", "score", "labels", "no such"):
            if number < alarm:
                ask(kind)
        agent("GET", f"{place}/metrics")
        agent("GET", f"{place}/rounds/{number}/metrics")
        agent("GET", "/session/evaluations", params={**about, "devmode": "1"})
        agent("GET", "/session/evaluations", params={**about, "round_id": number})
        agent("GET", f"{place}/results/detection")
        agent("GET", f"{place}/results/characterization")
    agent("GET", f"{place}/rounds/5")
    agent("PUT", f"{place}/completion")
    agent("GET", f"{place}/metrics")
    agent("GET", "/session/evaluations", params=about)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, list[TestFile]]]:
    """All tests, played by an agent with a token; and their truth."""
    folder = tmp_path_factory.mktemp("safe")
    made = planned(pool(each=80), folder / "data", SETTINGS).write(folder / "data")
    assert set(made["scenario"]) == set(SCENARIOS)
    tests = made["test_id"].to_list()
    tokens = [Token(TOKEN, Caller("alice", "agent"))]
    with running(folder / "data", folder / "state", tokens=tokens) as url:
        agent = Watched(url)
        agent("GET", "/v1/tests", params={"protocol": "CONDDA", "domain": "novelty"})
        agent("GET", "/test/ids", params={"protocol": "CONDDA", "domain": "novelty"})
        new = {"protocol": "CONDDA", "domain": "novelty", "detector": "a", "test_ids": tests}
        for hint in ("red_light", "round_size=80", "feedback_max_ids=80"):
            asked = agent("POST", "/v1/sessions", json={**new, "hints": [hint]})
            assert asked.json()["reason"] == "HintNotAllowed"
        session = agent("POST", "/v1/sessions", json=new).json()["session_id"]
        for number, test in enumerate(tests):
            play(agent, session, test, 5 if number else 3)
        for path in ("/", "/operator/sessions", f"/operator/tests?session_id={session}", "/docs"):
            agent("GET", path)
        status = ("/session/status", "/session/status?include_tests=1", "/session/latest")
        for path in (f"/v1/sessions/{session}", "/v1/sessions", *status, "/nothing"):
            agent("GET", path)
        agent("GET", f"/operator/curve?session_id={session}&test_id={tests[0]}")
        archives = (f"/v1/sessions/{session}/archive", f"/session/zip?session_id={session}")
        for path in archives:
            with zipfile.ZipFile(io.BytesIO(agent("GET", path).content)) as file:
                inside = "".join(file.read(name).decode() for name in file.namelist())
            agent.kept.append((f"members of {path}", httpx.Response(200, text=inside)))
        library = TestLibrary(folder / "data")
        yield agent, [library.load(test, "CONDDA", "novelty") for test in tests]


def words(content: Any) -> Iterator[str]:
    """Every key and value of some JSON, as text."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield str(key)
            yield from words(value)
    elif isinstance(content, list):
        yield from chain.from_iterable(map(words, content))
    else:
        yield str(content)


def test_no_response_of_a_whole_run_tells_truth(run: tuple[Watched, list[TestFile]]) -> None:
    agent, tests = run
    assert len(agent.kept) > 24 * 60
    telling = ("novel_class", "pre_novelty", "prop_novel", "red_light", "GT_indx", "seed")
    telling += ("scenario", "turned", *(name for name in SCENARIOS if name != "none"))
    secrets = {name for test in tests for name in test.truth["sample_id"]}
    secrets |= {str(test.metadata["seed"]) for test in tests}
    secrets |= set(tests[0].metadata["known_class_names"])
    secrets |= {name for test in tests for name in test.metadata["novel_class_names"].values()}
    for asked, answer in agent.kept:
        if "/docs" in asked:
            continue
        text = answer.content.decode(errors="replace") + json.dumps(dict(answer.headers))
        # Refusing a hint repeats it.
        found = [word for word in telling if word in text and "HintNotAllowed" not in text]
        assert not found, (asked, found)
        assert not [word for word in secrets if word in text], asked
    refused = [(asked, answer) for asked, answer in agent.kept if "operator" in asked]
    assert len(refused) == 3 and all(answer.status_code == 403 for _, answer in refused)
    # Numbers that were answered: no change point, no count of novel classes, no label.
    for asked, answer in agent.kept:
        if asked.endswith("/metadata"):
            assert set(answer.json()) == {"protocol", "known_classes", "round_size"} | {
                "feedback_max_ids"
            }
        if asked.endswith("/feedback") and answer.status_code == 200:
            assert answer.text in ("", '{"lines":[]}'), asked


def test_metrics_wait_for_the_end_of_the_session(run: tuple[Watched, list[TestFile]]) -> None:
    asked = [a for path, a in run[0].kept if path.endswith(("/metrics", "/session/evaluations"))]
    assert len(asked) > 24 * 5 and all(answer.status_code >= 400 for answer in asked)
    reasons = {answer.json()["reason"] for answer in asked}
    assert reasons == {"TestInProcess", "SessionOpen"}


def seen(agent: Watched, test: TestFile) -> np.ndarray:
    """What stands around each instance: its name, place, and the responses it came in."""
    rows = []
    for asked, answer in agent.kept:
        if f"/tests/{test.test_id}/rounds/" not in asked or b"lines" not in answer.content:
            continue
        content = answer.json()
        for place, name in enumerate(content["lines"]):
            row = content["round"] * SETTINGS.round_size + place
            headers = len(answer.headers), int(answer.headers["content-length"])
            number = int(name, 16)
            letters = [number >> shift & 255 for shift in range(0, 64, 8)]
            rows.append([row, place, len(name), sum(map(ord, name)), *letters, *headers])
    assert len(rows) == len(test.ids)
    return np.array(rows, float)


def test_names_order_sizes_and_headers_are_at_chance(run: tuple[Watched, list[TestFile]]) -> None:
    agent, tests = run
    views = [seen(agent, test) for test in tests]
    # Of the changed world: which rows are novel. Learned on half of the tests, asked of the others.
    parts = [
        view[test.truth["detection"].to_numpy() == 1]
        for view, test in zip(views, tests, strict=True)
    ]
    truths = [test.truth.filter(pl.col("detection") == 1)["novel"].to_numpy() for test in tests]
    half = TESTS // 2
    forest = RandomForestClassifier(200, min_samples_leaf=5, random_state=0)
    forest.fit(np.vstack(parts[:half]), np.concatenate(truths[:half]))
    chances = forest.predict_proba(np.vstack(parts[half:]))[:, 1]
    truth = np.concatenate(truths[half:])
    area = roc_auc_score(truth, chances)
    deviation = (1 / 12 / (truth == 1).sum() + 1 / 12 / (truth == 0).sum()) ** 0.5
    assert abs(area - 0.5) < 4 * deviation, (area, deviation)


def test_the_row_of_the_change_is_another_in_each_test(run: tuple[Watched, list[TestFile]]) -> None:
    changing = [(n, test) for n, test in enumerate(run[1]) if test.truth["detection"].max()]
    rows = [int(test.truth["detection"].arg_max() or 0) for _, test in changing]
    low, high = SETTINGS.change_rows(80)
    assert len(set(rows)) > len(rows) // 3 and min(rows) < low + 6 and max(rows) > high - 6
    # Neither the id of a test nor its place in the list tells it.
    numbers = [number for number, _ in changing]
    assert abs(np.corrcoef(numbers, rows)[0, 1]) < 4 / len(rows) ** 0.5
    assert len({test.test_id.split(".")[3] for test in run[1]}) == 1


def test_nothing_tells_the_scenario(run: tuple[Watched, list[TestFile]]) -> None:
    agent, tests = run
    places = list(SCENARIOS)
    numbers = [places.index(test.metadata["scenario"]) for test in tests]
    unchanged = [not test.truth["detection"].max() for test in tests]
    assert 0 < sum(unchanged) < TESTS
    for values in (numbers, unchanged):
        assert abs(np.corrcoef(np.arange(TESTS), values)[0, 1]) < 3 / TESTS**0.5
    # All that is served of a test is of one size; the first was played otherwise.
    shapes = set()
    for test in tests[1:]:
        answers = [
            (path.replace(test.test_id, ""), answer.status_code, len(answer.content))
            for path, answer in agent.kept
            if test.test_id in path and path.startswith("GET") and "/rounds/" in path
        ]
        shapes.add((len(test.test_id), *answers))
    assert len(shapes) == len({len(test.test_id) for test in tests[1:]})
