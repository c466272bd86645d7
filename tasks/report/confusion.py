"""Which known classes are taken for which: drawn row by row as shares, the worst pairs as a table.

Enters: `predictions` of the first rank, or counts of (target, predicted). Leaves: a section.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from schemas.tables import PLAIN
from tasks.report import plots
from tasks.report.blocks import Html, counted, figure, folded, paragraph, table
from tasks.report.leaderboard import in_order
from tasks.report.page import Section
from tasks.report.reading import Tables
from tasks.report.runs import with_names

MOST_LABELS = 40
MOST_PAIRS = 15
MOST_FIGURES = 6
OTHERS = "(others)"
_RUN = ["protocol", "split", "run"]


def confusion(read: Tables) -> list[Section]:
    """Of each protocol the run that tells its known classes apart best, all seeds together."""
    rows, splits, runs = (read.scan(name) for name in ("predictions", "splits", "runs"))
    if rows is None or splits is None or runs is None:
        return []
    known = splits.filter(role="known").select("protocol", "sample_id", "step")
    counts = read.collect(
        "predictions",
        rows.filter((pl.col("phase") != "before") & (pl.col("view") == PLAIN), rank=1)
        .join(runs.select("run_id", "protocol"), on="run_id")
        .join(known, on=["protocol", "sample_id", "step"], how="semi")
        .group_by("protocol", "split", "run_id", pl.col("class").alias("target"), "predicted")
        .agg(pl.len().cast(pl.Int64).alias("count")),
    )
    if counts.is_empty():
        return []
    counts = (
        with_names(read, counts).group_by(*_RUN, "target", "predicted").agg(pl.col("count").sum())
    )
    best = _most_accurate(counts)
    parts: list[Html] = [
        paragraph(
            "Known samples only. Of each protocol the model that classifies them best, all seeds "
            "together."
        )
    ]
    for protocol, split, run, accuracy in best.head(MOST_FIGURES).iter_rows():
        run_counts = counts.filter(protocol=protocol, split=split, run=run)
        caption = f"Protocol {protocol}, split {split}, {run}: accuracy {accuracy:.1%}"
        parts += confused(run_counts.select("target", "predicted", "count"), caption)
    if best.height > MOST_FIGURES:
        parts.append(paragraph(f"Drawn are {MOST_FIGURES} of {best.height} protocols."))
    return [Section("Confusion of known classes", parts)]


def _most_accurate(counts: pl.DataFrame) -> pl.DataFrame:
    """protocol, split, run, accuracy: one row a protocol, of the test split if there is one."""
    order = {split: number for number, split in enumerate(in_order(set(counts["split"])))}
    right = pl.col("count").filter(pl.col("target") == pl.col("predicted")).sum()
    return (
        counts.group_by(_RUN)
        .agg((right / pl.col("count").sum()).alias("accuracy"))
        .sort("protocol", pl.col("split").replace_strict(order), -pl.col("accuracy"), "run")
        .group_by("protocol", maintain_order=True)
        .first()
        .select(*_RUN, "accuracy")
    )


def confused(counts: pl.DataFrame, caption: str, apart: Sequence[str] = ()) -> list[Html]:
    """Figure and table of `counts`: target, predicted, count.

    Of more than `MOST_LABELS` true classes those with the most wrong predictions are drawn.
    Predictions that are no true class share one column, but for those in `apart`.
    """
    totals = pl.col("count").sum().over("target").alias("of")
    wrong = counts.with_columns(totals).filter(pl.col("target") != pl.col("predicted"))
    targets = sorted(set(counts["target"]))
    if len(targets) > MOST_LABELS:
        worst = wrong.group_by("target").agg(pl.col("count").sum())
        worst = worst.sort(["count", "target"], descending=[True, False]).head(MOST_LABELS)
        caption = f"{caption}; the {worst.height} of {len(targets):,} classes with most mistakes"
        targets = sorted(worst["target"]) or targets[:MOST_LABELS]
    parts = [figure(_drawn(counts, targets, apart), caption)]
    if wrong.height:
        pairs = (
            wrong.sort(["count", "target", "predicted"], descending=[True, False, False])
            .head(MOST_PAIRS)
            .with_columns((pl.col("count") / pl.col("of")).alias("share"))
        )
        title = f"The most frequent of {counted(wrong.height, 'confusion')}"
        mistakes = pairs.select("target", "predicted", "count", "share")
        parts.append(folded(title, table(mistakes, names={"share": "share of the class"})))
    return parts


def _drawn(counts: pl.DataFrame, targets: list[str], apart: Sequence[str]) -> bytes:
    """Rows are true classes, columns predicted ones."""
    inside = pl.col("predicted").is_in([*targets, *apart])
    shown = (
        counts.filter(pl.col("target").is_in(targets))
        .with_columns(
            pl.when(inside).then("predicted").otherwise(pl.lit(OTHERS)).alias("predicted")
        )
        .group_by("target", "predicted")
        .agg(pl.col("count").sum())
    )
    names = set(shown["predicted"])
    columns = targets + [name for name in (*apart, OTHERS) if name in names and name not in targets]
    at = {name: number for number, name in enumerate(columns)}
    matrix = np.zeros((len(targets), len(columns)))
    places = shown.select(pl.col("target", "predicted").replace_strict(at)).to_numpy()
    matrix[places[:, 0], places[:, 1]] = shown["count"].to_numpy()
    matrix /= np.maximum(matrix.sum(1, keepdims=True), 1)
    matrix[matrix == 0] = np.nan
    return plots.confusion_matrix(matrix, targets, columns)
