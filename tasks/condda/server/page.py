"""The operators' page: scoreboard, sessions, progress of tests, curves, exports; and /docs.

`page.html` is one file with its style and script; it asks the routes below every few seconds. They
read events and test files and change nothing. The red light is ground truth: whoever may open the
page may see it, agents have no other way to it than the hint.
"""

import base64
import hashlib
import html
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Response

from schemas.errors import NoveltyError
from tasks.condda.commands import ProtocolRefusal, refused
from tasks.condda.harness import Harness
from tasks.condda.measures import scoreboard
from tasks.condda.posts import parse
from tasks.condda.retention import RETIRED
from tasks.condda.server.api import finite
from tasks.condda.session import is_name, lenient_metadata, round_count

OPERATOR = "/operator"
_PAGE = Path(__file__).with_name("page.html")
_SESSIONS_SHOWN = 50
_BASELINE = "threshold"
_TESTS_SHOWN = 200
_CURVES_KEPT = 64
_TEST_MEASURES = {
    "novel from row": ("m_num_stats", "GT_indx"),
    "detected in row": ("m_num_stats", "P_indx_0.5"),
    "detected": ("m_is_cdt_and_is_early", "Is CDT"),
    "early": ("m_is_cdt_and_is_early", "Is Early"),
    "accuracy after novelty": ("m_acc", "post_top1"),
    "NMI": ("characterization", "post_nmi"),
    "discovery": ("characterization", "post_discovery_accuracy"),
    "stability": ("characterization", "post_column_stability"),
}
_FLAGS = ("detected", "early")
# Size of a curve in the SVG's own units, and the most points drawn.
_WIDTH, _HEIGHT, _MOST_POINTS = 600, 120, 1200


@dataclass(frozen=True)
class Curve:
    """Detection values posted for a test: rows of the test and P(world changed), by row."""

    rows: np.ndarray
    values: np.ndarray
    instances: int
    threshold: float
    red_light: int | None
    """First row where the world has changed."""

    @property
    def declared(self) -> int | None:
        """First row above the threshold."""
        above = np.flatnonzero(self.values > self.threshold)
        return int(self.rows[above[0]]) if len(above) else None


class Curves:
    """Curves of tests, kept so that a new round costs the reading of that round alone."""

    def __init__(self, harness: Harness):
        self.harness = harness
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, int], tuple[int, dict[int, float]]] = OrderedDict()

    def get(self, session: str, test: str) -> Curve:
        """The curve of a test since its last restart."""
        with self.harness.state(session) as state:
            attempt, threshold = state.test(test).attempt, state.threshold
            place = (state.protocol, state.domain)
        with self._lock:
            points = sorted(self._points(session, test, attempt).items())
        file = self.harness.library.load(test, *place)
        rows = np.array([row for row, _ in points], dtype=np.int64)
        values = np.array([value for _, value in points], dtype=float)
        changed = np.flatnonzero(file.truth[file.domain.changed].to_numpy() == 1)
        red_light = int(changed[0]) if len(changed) else None
        return Curve(rows, values, len(file.ids), threshold, red_light)

    def _points(self, session: str, test: str, attempt: int) -> dict[int, float]:
        key = (session, test, attempt)
        seq, points = self._kept.pop(key, (0, {}))
        wanted = {"kind": "posted", "test": test, "type": "detection", "attempt": attempt}
        for stored in self.harness.store.load(session, seq, bodies=True, **wanted):
            values = parse(stored.event.body or b"", self.harness.limits).first.tolist()
            pairs = zip(stored.event.detail["rows"], values, strict=True)
            points |= {row: value for row, value in pairs if row >= 0 and math.isfinite(value)}
            seq = stored.seq
        self._kept[key] = (seq, points)
        if len(self._kept) > _CURVES_KEPT:
            self._kept.popitem(last=False)
        return points


def thinned(rows: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points: lowest and highest of each stretch of rows, so no peak is lost."""
    if len(rows) <= most:
        return rows, values
    stretches = np.array_split(np.arange(len(rows)), most // 2)
    kept = sorted({int(s[place(values[s])]) for s in stretches for place in (np.argmin, np.argmax)})
    return rows[kept], values[kept]


def curve_svg(curve: Curve) -> str:
    """An SVG of a curve; colours come from the page by class."""
    last = max(curve.instances - 1, 1)

    def x(row: int | np.ndarray) -> Any:
        return np.round(np.asarray(row) / last * _WIDTH, 1)

    def y(value: float | np.ndarray) -> Any:
        return np.round((1 - np.clip(value, 0, 1)) * _HEIGHT, 1)

    def side(row: int) -> str:
        return "start" if row < last / 2 else "end"

    def label(at: float, height: float, anchor: str, text: str) -> str:
        return f'<text x="{at:g}" y="{height:g}" text-anchor="{anchor}">{text}</text>'

    level = y(curve.threshold)
    parts = [
        f'<rect class="frame" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<line class="threshold" x1="0" y1="{level:g}" x2="{_WIDTH}" y2="{level:g}"/>',
        *(label(-4, y(value) + 4, "end", f"{value:g}") for value in (0, 1)),
    ]
    if 0.15 < curve.threshold < 0.85:
        parts.append(label(-4, level + 4, "end", f"{curve.threshold:.3g}"))
    if (row := curve.red_light) is not None:
        parts.append(
            f'<line class="red-light" data-row="{row}" x1="{x(row):g}" y1="0" x2="{x(row):g}" '
            f'y2="{_HEIGHT}"/>{label(x(row), _HEIGHT + 12, side(row), f"red light: row {row}")}'
        )
    rows, values = thinned(curve.rows, curve.values, _MOST_POINTS)
    if len(rows):
        points = " ".join(f"{a:g},{b:g}" for a, b in zip(x(rows), y(values), strict=True))
        parts.append(f'<polyline class="curve" points="{points}"/>')
    if (row := curve.declared) is not None:
        at, height = x(row), y(curve.values[np.searchsorted(curve.rows, row)])
        beside = at + (8 if side(row) == "start" else -8)
        parts.append(
            f'<circle class="declared" data-row="{row}" cx="{at:g}" cy="{height:g}" r="4"/>'
            f"{label(beside, max(height - 2, 10), side(row), f'row {row}')}"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-26 -6 {_WIDTH + 32} {_HEIGHT + 22}" '
        f'role="img" aria-label="P(world changed) over {curve.instances} instances">'
        f"{''.join(parts)}</svg>"
    )


def session_list(harness: Harness, search: str = "", skip: int = 0) -> dict[str, Any]:
    """A page of sessions, newest first, and how many have all words of `search` in what they were
    opened with."""
    wanted = search.lower().split()
    ids = []
    for stored in reversed(harness.store.of_kinds(["opened"])):
        opened_with = " ".join(map(str, stored.event.detail.values())).lower()
        if all(word in f"{stored.session} {opened_with}" for word in wanted):
            ids.append(stored.session)
    sessions = [_summary(harness, session) for session in ids[skip : skip + _SESSIONS_SHOWN]]
    return {"total": len(ids), "page": _SESSIONS_SHOWN, "sessions": sessions}


def scores(harness: Harness) -> dict[str, Any]:
    """The scoreboard over all tests that were begun in the sessions here, and where others are."""
    board: dict[str, Any] = {"rows": scoreboard(list(harness.begun()), _BASELINE)}
    if count := harness.store.retired_count():
        board["retired"] = (
            f"{count} retired sessions are not shown; novelty build condda --tests DIR --state "
            f"{harness.store.path.parent / RETIRED} makes tables of them."
        )
    return {"baseline": _BASELINE, **board}


def _summary(harness: Harness, session: str) -> dict[str, Any]:
    progress = harness.session_progress(session_id=session)
    tests = progress.pop("tests").values()
    counts = {key: sum(test[key] for test in tests) for key in ("completed", "posted")}
    return {**progress, "last": harness.store.last_time(session), "tests": len(tests), **counts}


def session_tests(harness: Harness, session: str) -> dict[str, Any]:
    """Progress of a session's tests; the number of rounds is null where it cannot be read."""
    tests = harness.session_progress(session_id=session)["tests"]
    shown = [
        {
            "test": name,
            **progress,
            "rounds": _rounds(harness, session, name),
            "measures": _measures(harness, session, name) if progress["completed"] else None,
        }
        for name, progress in list(tests.items())[:_TESTS_SHOWN]
    ]
    return {"session": session, "total": len(tests), "tests": shown}


def _measures(harness: Harness, session: str, test: str) -> dict[str, Any]:
    """A few corrected measures of a completed test, or why there are none."""
    try:
        measures = harness.measures(session, test)
    except NoveltyError as error:
        return {"none": error.message if isinstance(error, ProtocolRefusal) else "test not read"}
    values = {
        name: measures[group][key]
        for name, (group, key) in _TEST_MEASURES.items()
        if key in measures.get(group, {})
    }
    return finite(
        {name: bool(value) if name in _FLAGS else value for name, value in values.items()}
    )


def _rounds(harness: Harness, session: str, test: str) -> int | None:
    try:
        with harness.state(session) as state:
            file = harness.library.load(test, state.protocol, state.domain)
            size = lenient_metadata(state, file).get("round_size")
    except NoveltyError:
        return None  # a test that is not in the data directory can be posted to, not shown
    return round_count(file, size) if size else None


def page_router(harness: Harness) -> APIRouter:
    """The page and what it asks for."""
    router = APIRouter(include_in_schema=False)
    text = _PAGE.read_text(encoding="utf-8")
    headers = {"content-security-policy": content_policy(text), "cache-control": "no-cache"}
    curves = Curves(harness)

    @router.get("/")
    def page() -> Response:
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    @router.get(OPERATOR + "/sessions")
    def sessions(
        search: str = "", skip: Annotated[int, Query(ge=0, le=harness.limits.sessions)] = 0
    ) -> Response:
        return _json(session_list(harness, search, skip))

    @router.get(OPERATOR + "/scoreboard")
    def board() -> Response:
        return _json(finite(scores(harness)))

    @router.get(OPERATOR + "/tests")
    def tests(session_id: str) -> Response:
        return _json(session_tests(harness, session_id))

    @router.get(OPERATOR + "/curve")
    def curve(session_id: str, test_id: str) -> Response:
        try:
            drawn = curve_svg(curves.get(session_id, test_id))
        except NoveltyError as error:
            if isinstance(error, ProtocolRefusal):
                raise
            # The error itself may quote ground truth.
            refusal = refused("test_id_invalid", "the files of this test are not read")
            raise refusal from error
        return Response(drawn, media_type="image/svg+xml")

    @router.get(OPERATOR + "/results")
    def results(session_id: str, test_id: str, type: str) -> Response:
        if not (is_name(test_id, harness.limits) and is_name(type, harness.limits)):
            raise refused("InvalidName", "no such test or result type")
        with harness.state(session_id) as state:
            attempt = state.test(test_id).attempt
        found = harness.store.load(
            session_id, bodies=True, kind="posted", test=test_id, type=type, attempt=attempt
        )
        body = b"".join((stored.event.body or b"").rstrip(b"\n") + b"\n" for stored in found)
        name = f'attachment; filename="{session_id}.{test_id}_{type}.csv"'
        if not name.isascii():
            name = "attachment"
        headers = {"content-disposition": name}
        return Response(body, media_type="text/csv; charset=utf-8", headers=headers)

    return router


def content_policy(page: str) -> str:
    """A policy that lets only this page's own style and script run, and fetch from here."""

    def sources(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(b.encode()).digest()).decode() for b in blocks]
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")


def docs_router(openapi: Callable[[], dict[str, Any]]) -> APIRouter:
    """/docs: the OpenAPI document as a page of its own, without script or network."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    def docs() -> Response:
        page = docs_page(openapi())
        headers = {"content-security-policy": content_policy(page)}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    return router


_DOCS_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;"
    "margin:2rem auto;padding:0 1rem}code,pre{font:13px ui-monospace,monospace}summary{cursor:"
    "pointer;padding:.3rem 0}pre{overflow:auto;padding:.6rem;background:#8881}h2{margin-top:2rem}"
)


def docs_page(document: dict[str, Any]) -> str:
    """Operations by tag, then the models, each with its description and schema."""
    escape = html.escape

    def folded(code: str, about: str, content: Any) -> str:
        summary = f"<code>{escape(code)}</code> {escape(about)}"
        schema = escape(json.dumps(content, indent=1))
        return f"<details><summary>{summary}</summary><pre>{schema}</pre></details>"

    tagged: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts = ("parameters", "requestBody", "responses")
            about = {part: operation[part] for part in parts if part in operation}
            shown = folded(f"{method.upper()} {path}", operation.get("summary", ""), about)
            tagged.setdefault(operation.get("tags", ["other"])[0], []).append(shown)
    models = document.get("components", {}).get("schemas", {}).items()
    tagged["models"] = [folded(name, model.get("description", ""), model) for name, model in models]
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(items)}" for tag, items in tagged.items())
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(info['title'])}</title><style>{_DOCS_STYLE}</style>"
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])} The document itself: "
        f'<a href="/openapi.json">/openapi.json</a>. The published SAIL-ON API is served beside it '
        f"and is not described here.</p>{sections}</html>"
    )
