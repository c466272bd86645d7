"""Runs of the open-world evaluation side by side: for the leaderboard, and their confusions.

Enters: the tables measures and confusion. Leaves: rows in the form of the shared metrics table, and
a section.
"""

import polars as pl

from tasks.kowl.evaluation_report import METRICS
from tasks.report import Html, Read, Section, confused, paragraph


def results(read: Read) -> pl.DataFrame | None:
    """All increments together after the last one, in the form of the shared metrics table."""
    plain = (pl.col("grouping") == "all") & ~pl.col("split").str.contains("+", literal=True)
    wanted = (
        plain
        & (pl.col("scope") == "cumulative")
        & (pl.col("known_set") == "novel_to_evaluator")
        & pl.col("metric").is_in(list(METRICS))
        & (pl.col("split") != "train")
    )
    measures = read("measures", None, wanted)
    if measures is None or measures.is_empty():
        return None
    percent = (pl.col("feedback") * 100).round(1).cast(pl.Int64).cast(pl.String)
    percent = percent.str.pad_start(3)  # so that names stand in the order of their numbers
    return measures.filter(pl.col("increment") == pl.col("increment").max()).select(
        pl.concat_str(pl.lit("feedback "), percent, pl.lit(" %")).alias("protocol"),
        pl.col("predictor").alias("detector"),
        pl.col("extractor").alias("backbone"),
        "seed",
        "split",
        pl.lit("all increments, after feedback").alias("convention"),
        pl.concat_str("reduction", "metric", separator=" ").alias("metric"),
        "value",
        "n",
    )


def confusions(read: Read) -> Section | None:
    """Of each predictor the first guesses at held-out clips of all increments, after feedback."""
    wanted = (
        (pl.col("rank") == 1)
        & (pl.col("grouping") == "all")
        & (pl.col("phase") == "post_feedback")
        & pl.col("split").is_in(["test", "validate"])
    )
    columns = ["extractor", "predictor", "feedback", "split", "target", "predicted", "count"]
    rows = read("confusion", columns, wanted)
    if rows is None or rows.is_empty():
        return None
    split = rows.group_by("split").agg(pl.col("count").sum()).sort("count", "split")["split"][-1]
    guess = pl.col("predicted").str.replace(r"^unknown_\d+$", "unknown")
    counts = (
        rows.filter((pl.col("split") == split) & (pl.col("feedback") == pl.col("feedback").max()))
        .with_columns(guess)
        .group_by("extractor", "predictor", "target", "predicted")
        .agg(pl.col("count").sum())
    )
    percent = f"{100 * rows['feedback'].max():g} %"
    parts: list[Html] = [
        paragraph(
            f"Most probable label of each clip of the split {split}, all increments and seeds "
            f"together, with feedback {percent}. What a predictor discovered itself counts as "
            "unknown."
        )
    ]
    keys = ["extractor", "predictor"]
    for (extractor, predictor), own in sorted(
        counts.partition_by(keys, as_dict=True, include_key=False).items()
    ):
        right = own.filter(pl.col("target") == pl.col("predicted"))["count"].sum()
        share = right / own["count"].sum()
        parts += confused(own, f"{predictor} · {extractor}: {share:.1%} right", ("unknown",))
    return Section("Confusion of labels", parts)
