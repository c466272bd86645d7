"""Tests and sessions as frames for the lake: what there is, what happened, what was measured.

Enters: a test file and, where there are, its training examples; or a harness over tests and a
store. Leaves: rows of `samples` and `splits`; frames of `schemas.condda`; of a completed test, a
run with `predictions` and `scores`, one test of one session at a time, so that an export costs what
is new: a test that has not changed since is not read again. The truth is for those who measure;
nothing of it is served to an agent.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import polars as pl

from schemas.condda import (
    CHARACTERIZATION,
    FEEDBACK,
    INSTANCES,
    RESULTS,
    ROUNDS,
    SESSION_MEASURES,
    SESSIONS,
)
from schemas.errors import NoveltyError, RecordError
from schemas.runs import RunFacts
from schemas.table import Table
from schemas.tables import PLAIN, PREDICTIONS, RUNS, SAMPLES, SCORES, SPLITS
from tasks.condda.agent import FeatureLookup, Training
from tasks.condda.commands import Event
from tasks.condda.domains import RED_LIGHT
from tasks.condda.harness import Harness
from tasks.condda.measures import class_kind, measure_test, posted_classes
from tasks.condda.metrics import Columns
from tasks.condda.session import SessionState, count_known, round_count, round_size
from tasks.condda.test_files import TRUTH, TestFile, features_file
from tasks.engine.stage import Reject
from tasks.evaluation.runs import run_id, run_row
from tasks.evaluation.stages import ScoreChoice

EXAMPLE = "example"


def class_text(test: TestFile, label: int) -> str:
    """The class of a label: its name where the metadata has names, else the label itself."""
    place = label - test.domain.first_label
    known = test.metadata.get("known_class_names")
    if isinstance(known, list) and 0 <= place < len(known):
        return str(known[place])
    novel = test.metadata.get("novel_class_names")
    if isinstance(novel, dict) and str(label) in novel:
        return str(novel[str(label)])
    return str(label)


def instance_rows(test: TestFile) -> pl.DataFrame:
    """sample_id, position, step, class, label and role of each instance, in the test's order.

    An instance is novel where the truth says so of the instance; a domain whose truth tells only
    whether the world has changed says so by the class, which is then not among the known ones.
    """
    place = test.labels - test.domain.first_label
    is_known = (place >= 0) & (place < count_known(test))
    novel = ~is_known
    if test.domain.novel != test.domain.changed:
        novel = test.truth[test.domain.novel].to_numpy() != 0
    position = np.arange(len(test.names), dtype=np.int32)
    texts = {label: class_text(test, label) for label in np.unique(test.labels).tolist()}
    return pl.DataFrame(
        {
            "sample_id": [f"{test.name}/{name}" for name in test.names],
            "position": position,
            "step": position // round_size(test.metadata, test.test_id),
            "class": [texts[label] for label in test.labels.tolist()],
            "label": pl.Series(np.where(is_known & ~novel, place, -1), dtype=pl.Int32),
            "role": np.where(novel, "novel", "known").astype(np.str_).tolist(),
        },
        schema_overrides={"class": pl.String, "sample_id": pl.String, "role": pl.String},
    ).with_columns(pl.col("label").replace(-1, None))


def example_ids(test: TestFile, count: int) -> list[str]:
    """Sample ids of the training examples of a test."""
    return [f"{test.name}/{EXAMPLE}/{number:08d}" for number in range(count)]


def sample_frames(
    test: TestFile, given: tuple[Training, FeatureLookup] | None
) -> dict[str, pl.DataFrame]:
    """`samples` and `splits` of the instances and, where there are features, of the examples."""
    digests = [None] * len(test.names) if given is None else row_digests(given[1].of(test.names))
    rows = instance_rows(test).with_columns(
        split=pl.lit("test"),
        sequence=pl.lit(test.name),
        source=pl.lit(f"{test.name}{TRUTH}"),
        digest=pl.Series(digests, dtype=pl.String),
    )
    if given is not None:
        training, shift = given[0], test.domain.first_label
        examples = pl.DataFrame(
            {
                "sample_id": example_ids(test, len(training.labels)),
                "class": [class_text(test, label + shift) for label in training.labels.tolist()],
                "label": pl.Series(training.labels, dtype=pl.Int32),
                "digest": row_digests(training.features),
            }
        ).with_columns(
            step=pl.lit(0, pl.Int32),
            role=pl.lit("known"),
            split=pl.lit("train"),
            source=pl.lit(features_file(test.test_id)),
        )
        rows = pl.concat([rows, examples], how="diagonal")
    rows = rows.with_columns(
        modality=pl.lit("features"),
        protocol=pl.lit(test.name),
        subset=pl.lit(None, pl.String),
    )
    tables = (SAMPLES, SPLITS)
    return {table.name: table.conform(rows.select(*table.polars_schema)) for table in tables}


def row_digests(features: np.ndarray) -> list[str]:
    """A digest of each row as an agent gets it."""
    kind = features.dtype.str.encode()
    return [hashlib.sha256(kind + row.tobytes()).hexdigest()[:32] for row in features]


SESSION_TABLES = (
    *(SESSIONS, RUNS, PREDICTIONS, SCORES),
    *(ROUNDS, RESULTS, FEEDBACK, INSTANCES, SESSION_MEASURES, CHARACTERIZATION),
)
P_UNKNOWN = ScoreChoice(name="p_unknown", version=1, settings={})
UNKNOWN = "unknown"

# Times of sessions that the flow ran itself: the same run must give the same bytes.
NO_TIME = "1970-01-01T00:00:00+00:00"


def describe_test(test: TestFile) -> dict[str, Any]:
    """A row of TESTS."""
    changed, novel = (
        test.truth[name].to_numpy() for name in (test.domain.changed, test.domain.novel)
    )
    known = count_known(test)
    labels = set(np.unique(test.labels).tolist())
    first = test.domain.first_label
    size = round_size(test.metadata, test.test_id)
    return {
        "protocol": test.protocol,
        "domain": test.domain.name,
        "test_id": test.test_id,
        "instances": len(test.ids),
        "round_size": size,
        "rounds": round_count(test, size),
        "known_classes": known,
        "novel_classes": len(labels - set(range(first, first + known))),
        "novel_rows": int((novel != 0).sum()),
        "change_row": _first(changed != 0),
        "novel_row": _first(novel != 0),
        "scenario": test.metadata.get("scenario"),
        "nuisance_row": _first(test.disturbed),
    }


def _first(flags: np.ndarray) -> int | None:
    return int(flags.argmax()) if flags.any() else None


def session_frames(
    harness: Harness, session: str, test: str, facts: RunFacts | None
) -> tuple[dict[str, pl.DataFrame], list[Reject]]:
    """Rows of `SESSION_TABLES` for one test of a session; `test` is empty where it touched none.

    A mode that takes what the published client posts takes results that cannot be measured, and
    completions of tests that are not there: each is refused with a sentence, the rest stays. A
    completed test is a run if it has `facts`; one that cannot be measured is a failed run.
    """
    events = [stored.event for stored in harness.store.load(session, test=test)]
    with harness.state(session) as state:
        completed = test in state.finished
        run = facts if completed else None
        about = _session(state, test, None if run is None else run_id(run))
        place = (state.protocol, state.domain)
        types = sorted(state.test(test).columns)
        ended = state.terminated is not None
    results = {kind: harness.results(session, test, kind) for kind in types}
    frames: dict[str, pl.DataFrame] = {}
    rejects, failed = [], None

    def put(table: Table, rows: pl.DataFrame) -> None:
        if rows.height:
            of = pl.lit(session).alias("session_id"), pl.lit(test).alias("test_id")
            frames[table.name] = table.conform(rows.select(*of, pl.all()))

    put(SESSIONS, pl.DataFrame([about]))
    put(ROUNDS, _rounds(events))
    put(FEEDBACK, _feedback(events))
    if results:
        put(RESULTS, pl.concat(_lines(*posted) for posted in results.items()))
    if completed:
        try:
            file = harness.library.load(test, *place)
            measures, shape = measure_test(file, results)
            put(SESSION_MEASURES, measures)
            put(CHARACTERIZATION, shape)
        except NoveltyError as error:
            name, failed = f"{session}/{test}", str(error)
            rejects.append(Reject(name, "not_measurable", failed, SESSION_MEASURES.name))
    if run is not None:
        if failed is None:
            try:
                frames |= prediction_frames(file, results, run_id(run))
            except NoveltyError as error:
                failed = str(error)
        frames[RUNS.name] = run_row(run, failed=failed)
    if ended and harness.library.has_truth(test, *place):
        with suppress(NoveltyError):  # what is wrong with a test stands in quarantine
            put(INSTANCES, _instances(harness.library.load(test, *place)))
    return frames, rejects


def _instances(test: TestFile) -> pl.DataFrame:
    """What each instance is, for those who own the lake."""
    nothing = pl.lit(None, pl.String)
    origin = {name: test.truth.get_column(name, default=None) for name in ("sample_id", "view")}
    return instance_rows(test).select(
        pl.Series("instance_id", test.names, dtype=pl.String),
        "position",
        *(nothing.alias(name) if of is None else of for name, of in origin.items()),
        "class",
        (pl.col("role") == "novel").alias("novel"),
        pl.Series("changed", test.truth[test.domain.changed].to_numpy() == 1),
    )


def prediction_frames(
    test: TestFile, results: dict[str, pl.DataFrame], run: str
) -> dict[str, pl.DataFrame]:
    """`predictions` and `scores` of each instance out of its last posted line of classes.

    The likeliest column is the prediction, the first of equals. P(unknown) is what the unknown and
    the discovered columns have together; lines without such columns have no score.
    """
    kind = class_kind(test, results)
    if kind is None:
        raise RecordError("no_classes", f"no classes were posted for test {test.test_id}")
    chances, columns = posted_classes(test, results[kind], kind)
    if not np.isfinite(chances).all():
        raise RecordError("not_finite", f"{kind} of {test.test_id} is not all finite")
    width = chances.shape[1]
    known = columns.is_known(np.arange(width))
    names = np.array(_column_names(test, columns, width))
    best = chances.argmax(1)
    rows = instance_rows(test).with_columns(
        pl.lit(run).alias("run_id"),
        pl.lit("none").alias("phase"),
        pl.lit(PLAIN).alias("view"),
        pl.lit("test").alias("split"),
        pl.Series("predicted", names[best].tolist(), dtype=pl.String),
        pl.Series("probability", chances[np.arange(len(best)), best]),
        pl.Series("p_unknown", chances[:, ~known].sum(1)),
        pl.Series("nearest", names[known][chances[:, known].argmax(1)].tolist(), dtype=pl.String),
    )
    rows = rows.unique("sample_id", keep="first", maintain_order=True)
    if known.all():
        rows = rows.with_columns(pl.lit(None, pl.Float64).alias("p_unknown"))
    predictions = PREDICTIONS.conform(
        rows.with_columns(rank=pl.lit(1)).select(column.name for column in PREDICTIONS.columns)
    )
    scores = rows.drop("predicted").with_columns(
        pl.lit(P_UNKNOWN.score_id).alias("score_id"),
        pl.lit(P_UNKNOWN.name).alias("score"),
        (pl.col("role") == "novel").alias("novel"),
        pl.col("p_unknown").alias("value"),
        pl.col("nearest").alias("predicted"),
    )
    scores = scores.select(column.name for column in SCORES.columns).drop_nulls("value")
    return {PREDICTIONS.name: predictions, SCORES.name: SCORES.conform(scores)}


def _column_names(test: TestFile, columns: Columns, width: int) -> list[str]:
    """What each column of posted lines stands for; discovered ones are `unknown_0`, ..."""
    unknown, known = columns.unknown_column(width), columns.is_known(np.arange(width))
    names = [class_text(test, column) if known[column] else UNKNOWN for column in range(width)]
    discovered = [column for column in np.flatnonzero(~known) if column != unknown]
    for number, column in enumerate(discovered):
        names[column] = f"{UNKNOWN}_{number}"
    return names


def _session(state: SessionState, test: str, run: str | None) -> dict[str, Any]:
    return {
        "run_id": run,
        "owner": state.owner,
        "agent": state.detector,
        "protocol": state.protocol,
        "domain": state.domain,
        "red_light": RED_LIGHT in state.hints,
        "hints": " ".join(state.hints),
        "threshold": state.threshold,
        "tests": len(state.tests),
        "completed": test in state.finished,
        "opened": None if state.opened == NO_TIME else state.opened,
        "terminated": None if state.terminated == NO_TIME else state.terminated,
        "state": "terminated" if state.terminated else "open",
    }


def _rounds(events: Sequence[Event]) -> pl.DataFrame:
    kind, facts = pl.col("kind"), ("attempt", "round", "kind", "type", "lines", "ids")
    rows = [
        (
            *(event.attempt, event.round, event.kind, event.type),
            *(len(event.detail.get("rows", ())), event.detail.get("count", 0)),
        )
        for event in events
        if event.round is not None
    ]
    types = pl.col("type").filter(kind == "posted").unique().sort()
    return (
        pl.DataFrame(rows, facts, orient="row")
        .group_by("attempt", "round", maintain_order=True)
        .agg(
            (kind == "served").sum().alias("served"),
            types.str.join(" ").alias("posted"),
            pl.col("lines").sum().alias("result_lines"),
            pl.col("ids").sum().alias("feedback_ids"),
        )
    )


def _feedback(events: Sequence[Event]) -> pl.DataFrame:
    asked = [event for event in events if event.kind == "feedback"]
    rows = [(event.round, event.type, event.detail["count"]) for event in asked]
    return pl.DataFrame(rows, ("round", "type", "ids"), orient="row").with_row_index("number")


def _lines(kind: str, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_row_index("position").select(
        pl.lit(kind).alias("type"),
        "position",
        "round",
        "instance_id",
        pl.col("values").alias("numbers"),
        pl.col("cells").list.join(",").alias("text"),
    )
