"""The operators' page: its data, its curves, and the page itself in a real browser."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.condda.measures import UNMEASURED
from tasks.condda.server import page
from tasks.condda.server.client import HttpHarness
from tasks.condda.server.page import Curve, Curves, content_policy, curve_svg, thinned
from tasks.condda.server.serve import make_harness, running
from tests.condda.small import DOMAIN, IDS, TEST, classes, detection, round_ids, write_test

HOSTILE = '<img src=x onerror="document.title=1">&'
RAMP = (0.1, 0.2, 0.1, 0.3, 0.4, 0.7, 0.9, 0.8)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """A server with an ended and an open session; its URL and the two ids."""
    folder = tmp_path_factory.mktemp("page")
    write_test(folder / "data")
    with running(folder / "data", folder / "state") as url, HttpHarness(url) as client:
        done = opened(client, "first-1")
        for number in range(3):
            post_ramp(client, done, number)
            files = {"classification": classes(round_ids(number))}
            client.post_results(result_files=files, test_id=TEST, round_id=number, session_id=done)
        client.complete_test(session_id=done, test_id=TEST)
        client.terminate_session(session_id=done)
        going = opened(client, HOSTILE)
        for number in range(2):
            post_ramp(client, going, number)
        yield url, done, going


def opened(client: HttpHarness, detector: str) -> str:
    return client.session_request(
        test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version=detector
    )


def post_ramp(client: HttpHarness, session: str, number: int) -> None:
    ids = round_ids(number)
    lines = [f"{name},{RAMP[IDS.index(name)]}\n" for name in ids]
    client.post_results(
        result_files={"detection": "".join(lines).encode()},
        test_id=TEST,
        round_id=number,
        session_id=session,
    )


def get(url: str, path: str, **query: str) -> httpx.Response:
    return httpx.get(url + path, params=query, trust_env=False)


def test_sessions_and_progress(site: tuple[str, str, str]) -> None:
    url, done, going = site
    listed = get(url, "/operator/sessions").json()
    assert listed["total"] == 2
    newest, oldest = listed["sessions"]
    assert (newest["session_id"], newest["terminated"], newest["posted"]) == (going, None, 2)
    assert (oldest["session_id"], oldest["tests"], oldest["completed"]) == (done, 1, 1)
    assert oldest["terminated"] and oldest["detector"] == "first-1"
    [test] = get(url, "/operator/tests", session_id=going).json()["tests"]
    progress = {"served": 0, "posted": 2, "rounds": 3, "attempt": 0, "completed": False}
    assert test == {"test": TEST, **progress, "measures": None}


def test_all_sessions_can_be_found(
    site: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, done, going = site

    def found(**query: str) -> list[str]:
        return [
            row["session_id"] for row in get(url, "/operator/sessions", **query).json()["sessions"]
        ]

    assert found(search="FIRST ond") == [done] and found(search=going[:13]) == [going]
    assert found(search=TEST) == [going, done] and found(search="nothing") == []
    monkeypatch.setattr(page, "_SESSIONS_SHOWN", 1)
    pages = [get(url, "/operator/sessions", skip=skip).json() for skip in "012"]
    assert [[row["session_id"] for row in one["sessions"]] for one in pages] == [
        [going],
        [done],
        [],
    ]
    assert {one["total"] for one in pages} == {2}
    newest = pages[0]["sessions"][0]
    assert newest["last"] > newest["opened"]
    assert get(url, "/operator/sessions", skip="-1").status_code == 422


def test_measures_and_scoreboard(site: tuple[str, str, str]) -> None:
    url, done, _ = site
    [test] = get(url, "/operator/tests", session_id=done).json()["tests"]
    assert test["measures"]["novel from row"] == 5 and test["measures"]["detected in row"] == 6
    board = get(url, "/operator/scoreboard").json()
    going, row = board["rows"]
    assert (going["agent"], going["tests"], going["open"], going["M1"]) == (HOSTILE, 0, 1, None)
    assert (row["agent"], row["tests"]) == ("first-1", 1)
    assert [row[name] for name in UNMEASURED] == [0, 0, 0]
    assert (row["M1"], row["no_cdt"], row["M2"], row["M2.1"]) == (1, 0, 100, 0)
    assert row["post_top1_system"] == 0.25 and row["post_top1_given"] is None


def test_curve_marks_red_light_and_first_row_above(site: tuple[str, str, str]) -> None:
    url, done, _ = site
    answer = get(url, "/operator/curve", session_id=done, test_id=TEST)
    assert answer.headers["content-type"] == "image/svg+xml"
    drawing = ElementTree.fromstring(answer.text)
    by_class = {node.get("class"): node for node in drawing if node.get("class")}
    texts = {node.text for node in drawing if node.tag.endswith("text")}
    assert texts == {"0", "0.5", "1", "red light: row 4", "row 5"}
    assert by_class["red-light"].get("data-row") == "4"
    assert by_class["declared"].get("data-row") == "5"
    points = [tuple(map(float, p.split(","))) for p in by_class["curve"].get("points").split()]
    expected = [(round(row / 7 * 600, 1), round((1 - v) * 120, 1)) for row, v in enumerate(RAMP)]
    assert points == expected
    assert float(by_class["threshold"].get("y1")) == 60


def test_exports(site: tuple[str, str, str]) -> None:
    url, done, _ = site
    about = {"session_id": done, "test_id": TEST, "type": "detection"}
    answer = get(url, "/operator/results", **about)
    assert answer.text == "".join(f"{i},{v}\n" for i, v in zip(IDS, RAMP, strict=True))
    assert answer.headers["content-disposition"].endswith(f'{done}.{TEST}_detection.csv"')
    assert get(url, "/session/zip", session_id=done).content[:2] == b"PK"


@pytest.mark.parametrize("name", ["../x", "", "a\r\nb: c", 'a"b', "é", "none"])
def test_odd_names(site: tuple[str, str, str], name: str) -> None:
    url, done, _ = site
    good = {"session_id": done, "test_id": TEST, "type": "detection"}
    for path in ("/operator/tests", "/operator/curve", "/operator/results"):
        for wrong in ("session_id", "test_id", "type"):
            answer = get(url, path, **{**good, wrong: name})
            assert answer.status_code in (200, 404, 422), (path, wrong, answer.text)
        assert get(url, path, **{**good, "session_id": name}).status_code == 404
    assert get(url, "/operator/curve", **{**good, "test_id": "none"}).status_code == 404
    assert get(url, "/operator/curve").status_code == 422


def test_curves_follow_posts_and_restarts(tmp_path: Path) -> None:
    write_test(tmp_path / "data")
    harness = make_harness(tmp_path / "data", tmp_path / "state")
    session = harness.session_request(
        test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version="a"
    )
    about = {"test_id": TEST, "session_id": session}
    curves = Curves(harness)
    assert len(curves.get(session, TEST).rows) == 0
    harness.dataset_request(round_id=0, **about)
    for number in range(2):
        files = {"detection": detection(round_ids(number), 0.2 + number / 2)}
        harness.post_results(result_files=files, round_id=number, **about)
        assert curves.get(session, TEST).rows.tolist() == list(range(3 * number + 3))
    curve = curves.get(session, TEST)
    assert (curve.declared, curve.red_light, curve.instances) == (3, 4, 8)
    odd = b"img_6.png,nan\nimg_7.png\nforeign,1\nimg_0.png,x\n"
    harness.post_results(result_files={"detection": odd}, round_id=2, **about)
    assert curves.get(session, TEST).values.tolist() == [0.2] * 3 + [0.7] * 3
    harness.dataset_request(round_id=0, **about)
    assert len(curves.get(session, TEST).rows) == 0
    harness.store.close()


@settings(derandomize=True)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=300),
    st.integers(2, 60),
)
def test_thinning_keeps_peaks(values: list[float], most: int) -> None:
    rows, kept = thinned(np.arange(len(values)), np.array(values), most)
    assert len(rows) <= max(most, 2) and kept.max() == max(values) and kept.min() == min(values)
    assert (np.diff(rows) > 0).all() and kept.tolist() == [values[row] for row in rows]


def test_curves_without_novelty_or_points() -> None:
    empty = Curve(np.array([], dtype=int), np.array([]), 0, 0.5, None)
    drawing = ElementTree.fromstring(curve_svg(empty))
    assert {node.get("class") for node in drawing} == {"frame", "threshold", None}


def test_page_needs_nothing_from_elsewhere(site: tuple[str, str, str]) -> None:
    for path in ("/", "/docs"):
        answer = get(site[0], path)
        assert not re.search(r"(src|href)=[\"']?(https?:)?//", answer.text), path
        assert "http://" not in answer.text and "https://" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy
        assert policy == content_policy(answer.text)
    docs = get(site[0], "/docs").text
    assert "PUT /v1/sessions/{session_id}" in docs and "NewSession" in docs


# In a browser -----------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def browse(url: str, folder: Path, *more: str) -> str:
    """The page's document after its script has run."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={folder / 'profile'}", "--window-size=1100,900"),
        *("--virtual-time-budget=5000", *more, url),
    ]
    # Nothing of the user's own browser settings, and no proxy.
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_in_a_browser(
    site: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, done, going = site
    asked = []
    listed = page.session_list
    monkeypatch.setattr(page, "session_list", lambda *about: asked.append(1) or listed(*about))
    document = browse(f"{url}/", tmp_path, "--dump-dom")
    assert len(asked) >= 2  # it asks again by itself
    assert "2 sessions" in document and "<title>CONDDA and OND sessions</title>" in document
    assert document.index(going) < document.index(done)  # newest first
    assert "<td" in document and "no_cdt" in document  # the scoreboard
    # The newest session is open: its test, progress and curve are there, the other's are not.
    assert document.count("<svg") == 1 and "2/3 rounds" in document
    assert 'class="red-light" data-row="4"' in document
    assert 'class="declared" data-row="5"' in document
    assert f"/session/zip?session_id={going}" in document
    # A hostile name is text.
    assert "<img" not in document and "&lt;img src=x" in document


def test_the_page_draws_something(site: tuple[str, str, str], tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(f"{site[0]}/", tmp_path, f"--screenshot={picture}")
    if keep := os.environ.get("NOVELTY_KEEP_SCREENSHOT"):
        shutil.copy(picture, keep)
    script = (
        "import sys, cv2; i = cv2.imread(sys.argv[1]); "
        "print(i.shape[0], i.shape[1], len({tuple(p) for p in i.reshape(-1, 3).tolist()}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(picture)], capture_output=True, text=True, check=True
    )
    height, width, colours = map(int, run.stdout.split())
    assert width == 1100 and height > 700 and colours > 50
