"""Posted lines and ground truth of one test, into the public server's metrics (CONDDA rule 11).

Lines are brought into the order of the test by instance id; of several for one instance the last
counts. The metrics themselves are in `metrics_upstream.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import NoveltyError
from tasks.condda import metrics_upstream
from tasks.condda.metrics_upstream import THRESHOLDS
from tasks.condda.rules import ProtocolRefusal, refused
from tasks.condda.test_files import TestFile


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
        raise ProtocolRefusal(
            500,
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
