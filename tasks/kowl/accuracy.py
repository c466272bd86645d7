"""Intervals of the accuracies of a predictor: how far they could be off by the choice of videos.

Enters: first predictions, feedback and splits of one run. Leaves: 95 % bootstrap intervals of the
reduced accuracies, drawn as all intervals are (`tasks.evaluation.intervals`): whole videos, those
with a novel clip and those without apart. MCC and NMI are no shares of clips, top-k accuracies need
more than the first prediction, and a reaction time hangs on the order of the clips; they have none.
"""

from collections.abc import Mapping

import polars as pl

from schemas.tables import ALL_STEPS, NO_SCORE, PLAIN
from tasks.evaluation.intervals import share_intervals
from tasks.evaluation.stages import seed_of
from tasks.kowl.evaluator import ALL, NO_SUBSET, POST, TRAIN

GROUP = ("split", "view", "phase", "step", "grouping", "subset")
MEASURED = ("known_set", "reduction")


def accuracy_intervals(rows: pl.DataFrame, groups: pl.DataFrame | None, draws: int) -> pl.DataFrame:
    """`GROUP`, `MEASURED`, low and high of rows that `judged` gave, with their `sequence`.

    Step -1 is all increments together, after feedback. `groups` are the subsets of plain clips.
    """
    whole = rows.filter(pl.col("phase") == POST)
    every = pl.concat([rows, whole.with_columns(pl.lit(ALL_STEPS, pl.Int32).alias("step"))])
    parts = [every.with_columns(grouping=pl.lit(ALL), subset=pl.lit(NO_SUBSET))]
    if groups is not None:
        plain = every.filter(pl.col("view") == PLAIN)
        parts.append(plain.join(groups, on="sample_id").select(parts[0].columns))
    judgements = [name for name in rows.columns if "/" in name]
    intervals = []
    for key, part in pl.concat(parts).group_by(GROUP, maintain_order=True):
        bounds = share_intervals(
            part.select(judgements).to_numpy(),
            part["novel"],
            sequences=part["sequence"].to_list(),
            seed=seed_of(NO_SCORE),
            draws=draws,
        )
        for name, (low, high) in zip(judgements, bounds, strict=True):
            intervals.append((*key, *name.split("/"), float(low), float(high)))
    kinds = {name: every.schema.get(name, pl.String()) for name in (*GROUP, *MEASURED)}
    bounds_of = {"low": pl.Float64(), "high": pl.Float64()}
    return pl.DataFrame(intervals, schema={**kinds, **bounds_of}, orient="row")


def judged(predictions: pl.DataFrame, splits: pl.DataFrame, feedback: pl.DataFrame) -> pl.DataFrame:
    """First predictions, novel or not, and whether each is right: columns `known_set/reduction`."""
    labels = splits.select("sample_id", "label")
    train = splits.filter(pl.col("split") == TRAIN)
    known_since = {
        "novel_to_predictor": _first_steps(feedback.join(labels, on="sample_id")),
        "novel_to_evaluator": _first_steps(train),
    }
    roles = splits.select("sample_id", (pl.col("role") == "novel").alias("novel"))
    first = predictions.filter(pl.col("rank") == 1).join(roles, on="sample_id")
    return first.select(
        *("sample_id", "split", "view", "phase", "step", "novel"),
        *(
            right.alias(f"{known_set}/{reduction}")
            for known_set, since in known_since.items()
            for reduction, right in _right(since).items()
        ),
    )


def _first_steps(rows: pl.DataFrame) -> dict[str, int]:
    """The step at which a label first came."""
    return dict(rows.group_by("label").agg(pl.col("step").min()).iter_rows())


def _right(since: Mapping[str, int]) -> dict[str, pl.Expr]:
    """By reduction; a label is known from the feedback of its step on."""

    def known(name: str) -> pl.Expr:
        step = pl.col(name).replace_strict(since, default=None, return_dtype=pl.Int32)
        last = pl.col("step") - (pl.col("phase") != POST).cast(pl.Int32)
        return (step <= last).fill_null(False)

    same = pl.col("class") == pl.col("predicted")
    inside = known("class") & known("predicted")
    outside = ~known("class") & ~known("predicted")
    return {
        "classification": (inside & same) | outside,
        "detection": inside | outside,
        "recognition": inside | (outside & same),
    }
