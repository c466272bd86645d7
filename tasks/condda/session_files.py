"""Sessions as files and frames: posted lines, the status list, the zip archive.

The archive has the members of the public server's result folder (docs/condda.md, rule 8): a log per
session and per test, and one CSV per test and result type.
"""

import io
import json
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import polars as pl

from tasks.condda.commands import ListSessions
from tasks.condda.posts import read_cells
from tasks.condda.rules import CALLER, Limits, refused
from tasks.condda.session import Event, SessionState
from tasks.condda.store import EventStore, StoredEvent

RESULTS: dict[str, pl.DataType | type[pl.DataType]] = {
    "round": pl.Int64,
    "instance_id": pl.String,
    # Numbers on the line; null if one of its cells is none, and then `cells` is what was posted.
    "values": pl.List(pl.Float64),
    "cells": pl.List(pl.String),
}


def results(
    store: EventStore, session: str, test: str, kind: str, attempt: int, limits: Limits
) -> pl.DataFrame:
    """Lines of one type in the order of posting."""
    found = store.load(session, bodies=True, kind="posted", test=test, type=kind, attempt=attempt)
    return pl.concat(
        [pl.DataFrame(schema=RESULTS), *(_lines(stored.event, limits) for stored in found)]
    )


def _lines(event: Event, limits: Limits) -> pl.DataFrame:
    assert event.body is not None
    ids, cells, numbers = read_cells(event.body, limits)
    numeric = numbers.list.eval(pl.element().is_not_null()).list.all()
    return pl.DataFrame(
        {
            "round": pl.Series([event.round] * len(ids), dtype=pl.Int64),
            "instance_id": pl.Series(ids, dtype=pl.String),
            "values": numbers,
            "cells": cells,
        },
        schema=RESULTS,
    ).with_columns(
        values=pl.when(numeric).then(pl.col("values")),
        cells=pl.when(~numeric).then(pl.col("cells")),
    )


def status(store: EventStore, asked: ListSessions) -> str:
    """`session,detector[,test],start,end` lines, sorted by detector and session.

    `after` keeps sessions that ended at that time or later and those still open. The start of a
    test is the first result of its round 0; a session without completed tests has the test NA.
    Sessions of others than the caller are left out.
    """
    bound = None if asked.after is None else _moment(asked.after)
    ended, completed = _ends_and_completions(store)
    starts = _starts(store) if asked.include_tests else {}
    lines = []
    for stored in store.of_kinds(["opened"]):
        name, version = stored.session, stored.event.detail["detector"]
        end = ended.get(name, "Incomplete")
        if not CALLER.get().has(stored.event.detail.get("owner", "")):
            continue
        if asked.session not in (None, name) or asked.detector not in (None, version):
            continue
        if asked.session is None and bound is not None and name in ended and _moment(end) < bound:
            continue
        if not asked.include_tests:
            lines.append((version, name, f"{name},{version},{stored.event.time},{end}"))
            continue
        kept = asked.tests
        finished = [test for test in completed.get(name, []) if kept is None or test in kept]
        for test in finished or [" NA"]:
            start = starts.get((name, test), "N/A") if finished else stored.event.time
            lines.append((version, name, f"{name},{version},{test},{start},{end}"))
    return "\n".join(line for _, _, line in sorted(lines, key=lambda line: line[:2]))


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise refused(
            "ValueError", f"{text[:80]!r} is not a time such as 2024-05-01T12:00:00", 400
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _ends_and_completions(store: EventStore) -> tuple[dict[str, str], dict[str, list[str]]]:
    ended: dict[str, str] = {}
    completed: dict[str, list[str]] = {}
    for stored in store.of_kinds(["completed", "terminated"]):
        if stored.event.kind == "terminated":
            ended[stored.session] = stored.event.time
        elif stored.event.test is not None:
            completed.setdefault(stored.session, []).append(stored.event.test)
    return ended, completed


def _starts(store: EventStore) -> dict[tuple[str, str], str]:
    """Time of the first post of round 0 in the newest attempt of each test."""
    starts: dict[tuple[str, str], tuple[int, str]] = {}
    for stored in store.of_kinds(["posted"], round=0):
        key, event = (stored.session, stored.event.test or ""), stored.event
        if key not in starts or starts[key][0] < event.attempt:
            starts[key] = (event.attempt, event.time)
    return {key: time for key, (_, time) in starts.items()}


def archive(state: SessionState, store: EventStore, tests: Sequence[str] | None = None) -> bytes:
    """A bzip2 zip of the session's logs and result files, of some tests if asked."""
    events = store.load(state.session, bodies=True)
    newest = {test: progress.attempt for test, progress in state.progress.items()}
    members: dict[str, bytes] = {f"{state.session}.json": _json(_session_log(state, events))}
    for test in newest if tests is None else [test for test in newest if test in tests]:
        kept = [
            stored.event
            for stored in events
            if stored.event.test == test and stored.event.attempt == newest[test]
        ]
        members[f"{state.session}.{test}.json"] = _json(_test_log(state, test, kept))
        for event in kept:
            if event.kind == "posted" and event.body is not None:
                name = _result_name(state, test, event.type or "")
                members[name] = members.get(name, b"") + _ended(event.body)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression=zipfile.ZIP_BZIP2) as file:
        for name, content in members.items():
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_BZIP2)
    return buffer.getvalue()


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _ended(body: bytes) -> bytes:
    """A file whose last line ends, so that the next one does not run into it."""
    return body if body.endswith(b"\n") or not body else body + b"\n"


def _result_name(state: SessionState, test: str, kind: str) -> str:
    return f"{state.protocol}/{state.domain}/{state.session}.{test}_{kind}.csv"


def _session_log(state: SessionState, events: list[StoredEvent]) -> dict[str, Any]:
    log: dict[str, Any] = {
        "created": {
            "time": [state.opened],
            "protocol": state.protocol,
            "domain": state.domain,
            "detector": state.detector,
            "detection_threshold": state.threshold,
            "hints": list(state.hints),
            "test_ids": list(state.tests),
        }
    }
    if state.finished:
        log["tests"] = {"completed_tests": list(state.finished)}
    if state.terminated:
        log["termination"] = {"time": [state.terminated]}
    return log


_ACTIVITY = {"served": "data_request", "posted": "post_results", "feedback": "get_feedback"}


def _test_log(state: SessionState, test: str, events: list[Event]) -> dict[str, Any]:
    log: dict[str, Any] = {}
    for event in events:
        if event.kind == "completed":
            log["completion"] = {"time": [event.time]}
        if event.kind not in _ACTIVITY:
            continue
        activity = log.setdefault(_ACTIVITY[event.kind], {"time": [], "rounds": {}})
        activity["time"].append(event.time)
        activity["last round"] = str(event.round)
        entry = activity["rounds"].setdefault(str(event.round), {"time": []})
        entry["time"].append(event.time)
        if event.kind == "posted":
            activity[f"{event.type} file path"] = _result_name(state, test, event.type or "")
            entry.setdefault("types", []).append(event.type)
        elif event.kind == "feedback" and event.type is not None:
            entry[event.type] = entry.get(event.type, 0) + event.detail["count"]
    return log
