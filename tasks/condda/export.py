"""Sessions of an event store as frames for the lake, with what was measured of completed tests.

Enters: a harness over tests and a store. Leaves: frames of `schemas.condda`, one session at a time,
so that an export costs what is new: a session that has not changed since is not read again.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from schemas.condda import (
    CHARACTERIZATION,
    FEEDBACK,
    METRICS,
    RESULTS,
    ROUNDS,
    SESSIONS,
)
from schemas.errors import NoveltyError
from schemas.table import Table
from tasks.condda import metrics, metrics_upstream
from tasks.condda.characterization import characterize, pad_blocks
from tasks.condda.domains import RED_LIGHT
from tasks.condda.evaluation import aligned, matrix
from tasks.condda.harness import Harness
from tasks.condda.lookup import known_classes, round_size
from tasks.condda.metrics import Columns
from tasks.condda.session import Event, SessionState
from tasks.condda.test_files import TestFile
from tasks.stage import Reject

# Times of sessions that the flow ran itself: the same run must give the same bytes.
NO_TIME = "1970-01-01T00:00:00+00:00"


def describe_test(test: TestFile) -> dict[str, Any]:
    """A row of TESTS."""
    changed, novel = (
        test.truth[name].to_numpy() for name in (test.domain.changed, test.domain.novel)
    )
    known = count_known(test)
    labels = set(np.unique(test.labels).tolist())
    first = int(test.domain.unknown == "first")
    size = round_size(test.metadata, test.test_id)
    return {
        "protocol": test.protocol,
        "domain": test.domain.name,
        "test_id": test.test_id,
        "rows": len(test.ids),
        "round_size": size,
        "rounds": -(-len(test.ids) // size),
        "known_classes": known,
        "novel_classes": len(labels - set(range(first, first + known))),
        "novel_rows": int((novel != 0).sum()),
        "change_row": _first(changed != 0),
        "novel_row": _first(novel != 0),
    }


def count_known(test: TestFile) -> int:
    """K, the number of known classes: what the metadata says, else the labels."""
    said = known_classes(test.metadata)
    if said is None:
        largest = int(test.labels.max(initial=0))
        return max(1, largest if test.domain.unknown == "first" else largest + 1)
    return max(1, said - test.domain.unknown_counted)


def _first(flags: np.ndarray) -> int | None:
    return int(flags.argmax()) if flags.any() else None


def session_frames(harness: Harness, session: str) -> tuple[dict[str, pl.DataFrame], list[Reject]]:
    """SESSIONS, ROUNDS, RESULTS, FEEDBACK, METRICS and CHARACTERIZATION of one session.

    A mode that takes what the published client posts takes results that cannot be measured, and
    completions of tests that are not there: each is refused with a sentence, the rest stays.
    """
    events = [stored.event for stored in harness.store.load(session)]
    with harness.states.get(session) as state:
        about = _session(state)
        finished, place = list(state.finished), (state.protocol, state.domain)
        posted = {test: sorted(progress.columns) for test, progress in state.progress.items()}
    results = {
        (test, kind): harness.results(session, test, kind)
        for test, kinds in posted.items()
        for kind in kinds
    }
    measured, described = [METRICS.empty()], [CHARACTERIZATION.empty()]
    rejects = []
    for test in finished:
        of_test = {kind: rows for (name, kind), rows in results.items() if name == test}
        try:
            long, shape = measure_test(harness.library.load(test, *place), of_test)
        except NoveltyError as error:
            name = f"{session}/{test}"
            rejects.append(Reject(name, "not_measurable", str(error), METRICS.name))
            continue
        measured.append(_placed(METRICS, long, session, test))
        described.append(_placed(CHARACTERIZATION, shape, session, test))
    frames = {
        "sessions": pl.DataFrame([about], schema=SESSIONS.polars_schema),
        "rounds": pl.DataFrame(_rounds(session, events), schema=ROUNDS.polars_schema),
        "results": pl.concat([RESULTS.empty(), *(_lines(session, *r) for r in results.items())]),
        "feedback": pl.DataFrame(_feedback(session, events), schema=FEEDBACK.polars_schema),
        "metrics": pl.concat(measured),
        "characterization": pl.concat(described),
    }
    return frames, rejects


def measure_test(
    test: TestFile, results: dict[str, pl.DataFrame]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Metrics in both forms, and characterization; empty where the results do not allow them.

    A CONDDA test is measured as one of K + 1 classes by its characterization, whose discovered
    columns count as unknown. A reaction baseline posts no detection: it has its accuracy alone.
    """
    kind = "classification" if "classification" in results else "characterization"
    nothing = METRICS.empty().drop("session_id", "test_id"), CHARACTERIZATION.empty()
    if kind not in results:
        return nothing[0], nothing[1].drop("session_id", "test_id")
    novel = (test.truth[test.domain.novel].to_numpy() != 0).astype(np.int64)
    chances = None
    if "detection" in results:
        chances = aligned(test, results["detection"], "detection")[:, 0]
    columns = columns_of(test, results[kind])
    if kind == "characterization":
        results = results | {kind: _as_wide_as_the_last(results[kind], columns)}
    chosen = aligned(test, results[kind], kind)
    clusters = nothing[1].drop("session_id", "test_id")
    upstream: dict[str, Any] = {}
    if kind == "characterization":
        found = characterize(chosen, test.labels, novel, columns)
        clusters = found.with_columns(pl.col("novel_class").cast(pl.String).fill_null("")).select(
            clusters.columns
        )
    else:
        try:
            if chances is None:
                upstream = {"m_acc": metrics_upstream.m_acc(novel, chosen, test.labels)}
            else:
                upstream = metrics_upstream.evaluate(chances, chosen, novel, test.labels)
        except NoveltyError:
            upstream = {}  # the public code has no value for such a test
    size = round_size(test.metadata, test.test_id)
    if chances is None:
        corrected = {"m_acc": metrics.m_acc(novel, chosen, test.labels, columns, size)}
    else:
        corrected = metrics.evaluate(chances, chosen, novel, test.labels, columns, size)
    return metrics.long_form(upstream, corrected), clusters


def columns_of(test: TestFile, results: pl.DataFrame) -> Columns:
    """Which columns of posted vectors are known classes, and where the unknown one is."""
    known = count_known(test)
    if results["values"].list.len().max() == known:
        return Columns(known, "none")
    return Columns(known, test.domain.unknown)


def _as_wide_as_the_last(results: pl.DataFrame, columns: Columns) -> pl.DataFrame:
    """Lines as wide as the widest: what was discovered later had probability 0 before."""
    wide = pad_blocks(list(_blocks(results["values"])), columns)
    return results.with_columns(pl.Series("values", wide.tolist(), pl.List(pl.Float64)))


def _blocks(values: pl.Series) -> Iterator[np.ndarray]:
    """Neighbouring lines of one width, as matrices."""
    runs = pl.DataFrame({"values": values, "run": values.list.len().rle_id()})
    for _, rows in runs.group_by("run", maintain_order=True):
        yield matrix(rows["values"], "characterization")


def _session(state: SessionState) -> dict[str, Any]:
    return {
        "session_id": state.session,
        "detector": state.detector,
        "protocol": state.protocol,
        "domain": state.domain,
        "red_light": RED_LIGHT in state.hints,
        "hints": " ".join(state.hints),
        "threshold": state.threshold,
        "tests": len(state.tests),
        "finished": len(state.finished),
        "opened": None if state.opened == NO_TIME else state.opened,
        "terminated": None if state.terminated == NO_TIME else state.terminated,
        "state": "terminated" if state.terminated else "open",
    }


def _rounds(session: str, events: Sequence[Event]) -> list[dict[str, Any]]:
    rounds: dict[tuple[str, int, int], dict[str, Any]] = defaultdict(
        lambda: {"served": 0, "posted": set(), "rows": 0, "feedback_ids": 0}
    )
    for event in events:
        if event.test is None or event.round is None:
            continue
        entry = rounds[event.test, event.attempt, event.round]
        if event.kind == "served":
            entry["served"] += 1
        elif event.kind == "posted":
            entry["posted"].add(event.type)
            entry["rows"] += len(event.detail["rows"])
        elif event.kind == "feedback":
            entry["feedback_ids"] += event.detail["count"]
    return [
        {
            "session_id": session,
            "test_id": test,
            "attempt": attempt,
            "round": number,
            **entry,
            "posted": " ".join(sorted(entry["posted"])),
        }
        for (test, attempt, number), entry in rounds.items()
    ]


def _feedback(session: str, events: Sequence[Event]) -> list[dict[str, Any]]:
    asked = [event for event in events if event.kind == "feedback"]
    return [
        {
            "session_id": session,
            "test_id": event.test,
            "number": number,
            "round": event.round,
            "type": event.type,
            "ids": event.detail["count"],
        }
        for number, event in enumerate(asked)
    ]


def _lines(session: str, named: tuple[str, str], rows: pl.DataFrame) -> pl.DataFrame:
    test, kind = named
    return RESULTS.conform(
        rows.with_row_index("position").select(
            pl.lit(session).alias("session_id"),
            pl.lit(test).alias("test_id"),
            pl.lit(kind).alias("type"),
            "position",
            "round",
            "instance_id",
            "values",
            pl.col("cells").list.join(",").alias("text"),
        )
    )


def _placed(table: Table, rows: pl.DataFrame, session: str, test: str) -> pl.DataFrame:
    return table.conform(
        rows.select(pl.lit(session).alias("session_id"), pl.lit(test).alias("test_id"), pl.all())
    )
