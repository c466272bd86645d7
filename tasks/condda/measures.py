"""Measures of completed tests: one at a time, and of each agent over all of its tests.

Enters: a test and its posted lines, by type. Leaves: the public server's metrics (CONDDA rule 11);
both forms of the metrics and the measures of discovered classes (rules 12 to 14); program metrics,
and the scoreboard, which has agents with and without the red light side by side. Tables, server and
command line all show these. Lines are brought into the order of the test by instance id; of several
for one instance the last counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import polars as pl

from schemas.condda import CHARACTERIZATION, SESSION_MEASURES, SESSIONS
from schemas.errors import NoveltyError
from storage.tables import current_version
from tasks.condda import metrics, metrics_upstream
from tasks.condda.characterization import characterize, pad_blocks
from tasks.condda.commands import ProtocolRefusal, refused
from tasks.condda.domains import MEASURED
from tasks.condda.metrics import Columns, Metric, Trial, program_metrics
from tasks.condda.metrics_upstream import THRESHOLDS
from tasks.condda.session import count_known, round_size
from tasks.condda.test_files import TestFile

DISCOVERED = ("nmi", "discovery_accuracy", "k_plus_1_accuracy", "column_stability", "clusters_used")
"""Measures of discovered classes on the scoreboard, of the rows after novelty."""
MEANS = ("post_top1", *DISCOVERED)
SIDES = ("system", "given")
"""Without and with the red light."""
Outcome = Literal["measured", "given_up", "open", "no_measures"]
"""A test that was begun is measured; or its session ended before it was completed, or goes on; or
it was completed with results that have no measures (policy `published`)."""
UNMEASURED = get_args(Outcome)[1:]
Group = tuple[str, str, str, str]
GROUP = ("owner", "agent", "protocol", "domain")


@dataclass(frozen=True)
class Begun:
    """A test that a session has begun; if it is measured, in corrected form."""

    owner: str
    """Of the token that opened the session; empty for an operator's, and without tokens."""
    agent: str
    protocol: str
    domain: str
    test: str
    red_light: bool
    outcome: Outcome
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    discovered: Metric = field(default_factory=dict)

    @property
    def group(self) -> Group:
        return self.owner, self.agent, self.protocol, self.domain


def begun_tests(
    sessions: pl.DataFrame, measures: pl.DataFrame, discovered: pl.DataFrame
) -> list[Begun]:
    """The tests of the tables sessions, session_measures and characterization, oldest first."""
    key = ["session_id", "test_id"]
    groups: dict[tuple, dict[str, Metric]] = {}
    shapes: dict[tuple, Metric] = {}
    corrected = measures.filter(form="corrected").select(*key, "metric", "name", "value")
    for session, test, metric, name, value in corrected.iter_rows():
        groups.setdefault((session, test), {}).setdefault(metric, {})[name] = value
    after = discovered.filter(pl.col("metric").is_in(DISCOVERED), part="post")
    for session, test, metric, value in after.select(*key, "metric", "value").iter_rows():
        shapes.setdefault((session, test), {})[f"post_{metric}"] = value
    # A session that has begun no test has a row without one.
    rows = sessions.filter(pl.col("test_id") != "").sort("opened", *key)
    state = pl.when("completed").then(pl.lit("no_measures")).when(state="terminated")
    rows = rows.with_columns(outcome=state.then(pl.lit("given_up")).otherwise(pl.lit("open")))
    about = rows.select(*GROUP, "red_light", "outcome", test="test_id")
    tests = []
    for place, row in zip(rows.select(key).rows(), about.iter_rows(named=True), strict=True):
        if place in groups:
            row["outcome"] = "measured"
        tests.append(Begun(**row, metrics=groups.get(place, {}), discovered=shapes.get(place, {})))
    return tests


def program_of(tests: Sequence[Begun], baseline: str) -> dict[Group, tuple[int, Metric]]:
    """Number of different tests and M1 to M6 of each owner's agents, by protocol and domain.

    The baseline is run by the operator: who has a token of an agent may give itself that name. Of
    several of its sessions, without the red light, the newest counts; a baseline that posts no
    detection is no agent, unless it was given the red light.
    """
    base = {
        (test.protocol, test.domain, test.test): test.metrics["m_acc"]
        for test in tests
        if baseline in (test.agent, test.agent.rpartition("-")[0])
        and not (test.owner or test.red_light)
        and test.metrics
    }
    trials: dict[Group, list[Trial]] = {}
    names: dict[Group, set[str]] = {}
    for test in tests:
        if "m_num_stats" in test.metrics or (test.metrics and test.red_light):
            condition = "given" if test.red_light else "system"
            against = base.get((test.protocol, test.domain, test.test))
            trial = Trial(test.metrics, condition, against)  # type: ignore[arg-type]
            trials.setdefault(test.group, []).append(trial)
            names.setdefault(test.group, set()).add(test.test)
    return {place: (len(names[place]), program_metrics(of)) for place, of in sorted(trials.items())}


def scoreboard(tests: Sequence[Begun], baseline: str) -> list[dict[str, Any]]:
    """A row for each owner's agent, protocol and domain: how many tests were measured and how many
    not, program metrics, then means of what tests have without (`system`) and with (`given`) the
    red light."""
    rows = []
    programs = program_of(tests, baseline)
    for place in sorted({*programs, *(t.group for t in tests if t.outcome != "measured")}):
        of_agent = [test for test in tests if test.group == place]
        count, program = programs.get(place, (0, program_metrics([])))
        row: dict[str, Any] = dict(zip(GROUP, place, strict=True))
        row |= {"tests": count}
        row |= {name: sum(test.outcome == name for test in of_agent) for name in UNMEASURED}
        row |= program
        for side in SIDES:
            of_side = [t for t in of_agent if t.metrics and t.red_light == (side == "given")]
            values = {"post_top1": [t.metrics["m_acc"].get("post_top1") for t in of_side]}
            values |= {n: [t.discovered.get(f"post_{n}") for t in of_side] for n in DISCOVERED}
            for name, found in values.items():
                numbers = [value for value in found if value is not None]
                row[f"{name}_{side}"] = float(np.mean(numbers)) if numbers else None
        rows.append(row)
    return rows


def lake_scoreboard(lake: Path, baseline: str) -> list[pl.DataFrame]:
    """The scoreboard of a lake's sessions: program metrics, and both ways of detection."""
    names = (SESSIONS.name, SESSION_MEASURES.name, CHARACTERIZATION.name)
    tables = (current_version(lake, "condda", name).read() for name in names)
    rows = scoreboard(begun_tests(*tables), baseline)
    if not rows:
        return []
    board = pl.DataFrame(rows, infer_schema_length=None)
    group = GROUP if board["owner"].str.len_bytes().sum() else GROUP[1:]  # else without tokens
    board = board.select(*group, pl.exclude(GROUP))
    both = pl.concat(
        board.select(
            *(*group, pl.lit(name).alias("measure")),
            pl.col(f"{name}_system").cast(pl.Float64).alias("without red light"),
            pl.col(f"{name}_given").cast(pl.Float64).alias("with red light"),
        )
        for name in MEANS
    ).filter(~pl.all_horizontal(pl.col("^with.*$").is_null()))
    return [board.drop(f"{name}_{side}" for name in MEANS for side in SIDES), both]


def corrected_measures(test: TestFile, results: dict[str, pl.DataFrame]) -> dict[str, Metric]:
    """Corrected metrics of a test by group, and `characterization` with names such as post_nmi."""
    long, shape = measure_test(test, results)
    found: dict[str, Metric] = {}
    for metric, name, value in long.filter(form="corrected").drop("form").iter_rows():
        found.setdefault(metric, {})[name] = value
    if shape.height:
        found["characterization"] = {
            f"{part}_{metric}" + f"_{of}" * bool(of): value
            for part, metric, of, value in shape.iter_rows()
        }
    return found


def measure_test(
    test: TestFile, results: dict[str, pl.DataFrame]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Metrics in both forms, and characterization; empty where the results do not allow them.

    A CONDDA test is measured as one of K + 1 classes by its characterization, whose discovered
    columns count as unknown. A reaction baseline posts no detection: it has its accuracy alone.
    """
    kind = class_kind(test, results)
    clusters = CHARACTERIZATION.empty().drop("session_id", "test_id")
    if kind is None:
        return metrics.long_form({}, {}), clusters
    novel = (test.truth[test.domain.novel].to_numpy() != 0).astype(np.int64)
    chances = None
    if "detection" in results:
        chances = aligned(test, results["detection"], "detection")[:, 0]
    chosen, columns = posted_classes(test, results[kind], kind)
    upstream: dict[str, Any] = {}
    size = round_size(test.metadata, test.test_id)
    if kind == "characterization":
        found = characterize(chosen, test.labels, novel, columns, size)
        clusters = found.with_columns(pl.col("novel_class").cast(pl.String).fill_null("")).select(
            clusters.columns
        )
    else:
        with suppress(NoveltyError):  # the public code has no value for such a test
            if chances is None:
                upstream = {"m_acc": metrics_upstream.m_acc(novel, chosen, test.labels)}
            else:
                upstream = metrics_upstream.evaluate(chances, chosen, novel, test.labels)
    if chances is None:
        corrected = {"m_acc": metrics.m_acc(novel, chosen, test.labels, columns, size)}
    else:
        corrected = metrics.evaluate(chances, chosen, novel, test.labels, columns, size)
        corrected["m_false_alarm"] = metrics.m_false_alarm(
            corrected["m_num_stats"], bool(test.disturbed.any())
        )
    return metrics.long_form(upstream, corrected), clusters


def class_kind(test: TestFile, results: Mapping[str, pl.DataFrame]) -> str | None:
    """The type of results that tells classes, first that of the protocol; None where none was
    posted."""
    kinds = sorted(MEASURED.values(), key=lambda kind: kind != MEASURED.get(test.protocol))
    return next((kind for kind in kinds if kind in results), None)


def posted_classes(test: TestFile, results: pl.DataFrame, kind: str) -> tuple[np.ndarray, Columns]:
    """Vectors of a test's instances, and which of their columns are which classes.

    Lines of characterization become as wide as the widest: what was discovered later had
    probability 0 before, and stands before an unknown column that is the last.
    """
    known, widths = count_known(test), results["values"].list.len()
    columns = Columns(known, "none" if widths.max() == known else test.domain.unknown)
    if kind == "characterization":
        runs = results.with_columns(run=pl.col("values").list.len().rle_id())
        blocks = [matrix(run["values"], kind) for run in runs.partition_by("run")]
        wide = pad_blocks(blocks, columns).tolist()
        results = results.with_columns(values=pl.Series(wide, dtype=pl.List(pl.Float64)))
    return aligned(test, results, kind), columns


def evaluate_test(
    test: TestFile,
    detection: pl.DataFrame,
    classification: pl.DataFrame,
    baseline: pl.DataFrame | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics of a whole test; `baseline` is the classification of a baseline session."""
    novel = test.truth[test.domain.novel].to_numpy()
    chances = aligned(test, detection, "detection")[:, 0]
    classes = aligned(test, classification, "classification")
    with measurable():
        metrics = metrics_upstream.evaluate(
            chances, classes, novel, test.labels, threshold=_threshold(test)
        )
        if baseline is not None:
            base = metrics_upstream.m_acc(
                novel, aligned(test, baseline, "classification"), test.labels
            )
            metrics["m_nrp"] = metrics_upstream.m_nrp(metrics["m_acc"], base)
    return metrics


@contextmanager
def measurable() -> Iterator[None]:
    """Results that have no measures refuse the request with the sentence that says why."""
    try:
        yield
    except NoveltyError as error:
        if isinstance(error, ProtocolRefusal):
            raise
        raise refused("InvalidResults", str(error)) from error


def _threshold(test: TestFile) -> float:
    """The test's own where the public code has a row for it, else the domain's."""
    given = test.metadata.get("threshold")
    return given if given in THRESHOLDS else 0.3 if test.domain.name == "transcripts" else 0.5


def round_accuracy(test: TestFile, classification: pl.DataFrame, number: int) -> dict[str, Any]:
    """Accuracy over the instances that were posted for one round."""
    posted = classification.filter(pl.col("round") == number)
    rows = np.array(test.rows(posted["instance_id"].to_list()), dtype=np.int64)
    if not len(rows) or (rows < 0).any():
        raise refused("result_file_not_found", f"no classification of this test for round {number}")
    with measurable():
        return metrics_upstream.m_acc_round_wise(
            matrix(posted["values"], "classification"), test.labels[rows], number
        )


def aligned(test: TestFile, results: pl.DataFrame, kind: str) -> np.ndarray:
    """Values of each instance of the test, float64 (N, C), in the test's order."""
    if results.is_empty():
        raise refused("result_file_not_found", f"no {kind} was posted for test {test.test_id}")
    last = results.unique("instance_id", keep="last", maintain_order=True)
    wanted = pl.DataFrame({"instance_id": pl.Series(test.names, dtype=pl.String)})
    found = wanted.join(last, on="instance_id", how="left", maintain_order="left")
    lacking = found["round"].null_count()
    if lacking:
        raise refused(
            "IncompleteResults",
            f"{kind} lacks {lacking} of the {len(test.ids)} instances of test {test.test_id}",
        )
    return matrix(found["values"], kind)


def matrix(values: pl.Series, kind: str) -> np.ndarray:
    """Lists of numbers as a matrix; all must be numbers and of one length."""
    widths = values.list.len().unique().to_list()
    if len(widths) != 1 or widths[0] in (None, 0):
        raise refused("InvalidResults", f"lines of {kind} are not numbers, or differ in length")
    return values.list.to_array(widths[0]).to_numpy().reshape(len(values), widths[0])
