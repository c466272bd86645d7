"""First guesses of the open-world evaluation: which labels each predictor takes for which.

Enters: the tables confusion and runs. Leaves: sections, one for each protocol.
"""

from typing import cast

import polars as pl

from schemas.tables import PLAIN
from tasks.kowl.evaluation_report import by_protocol, predictor_runs
from tasks.report import Html, Read, Section, confused, paragraph


def confusions(read: Read) -> list[Section]:
    """Of each predictor the first guesses at held-out clips of all increments, after feedback."""
    condition = (
        (pl.col("rank") == 1)
        & (pl.col("grouping") == "all")
        & (pl.col("phase") == "after")
        & (pl.col("view") == PLAIN)
        & pl.col("split").is_in(["test", "valid"])
    )
    columns = ["run_id", "split", "target", "predicted", "count"]
    rows, runs = read("confusion", columns, condition), predictor_runs(read)
    if rows is None or rows.is_empty() or runs is None:
        return []
    return [
        Section(f"Confusion of labels{name}", _confusions(part))
        for name, part in by_protocol(rows.join(runs, on="run_id"))
    ]


def _confusions(rows: pl.DataFrame) -> list[Html]:
    split = rows.group_by("split").agg(pl.col("count").sum()).sort("count", "split")["split"][-1]
    guess = pl.col("predicted").str.replace(r"^unknown_\d+$", "unknown")
    counts = (
        rows.filter((pl.col("split") == split) & (pl.col("feedback") == pl.col("feedback").max()))
        .with_columns(guess)
        .group_by("extractor", "predictor", "target", "predicted")
        .agg(pl.col("count").sum())
    )
    percent = f"{100 * cast(float, rows['feedback'].max()):g} %"
    parts: list[Html] = [
        paragraph(
            f"Most probable label of each clip of the split {split}, all increments and seeds "
            f"together, with feedback {percent}. What a predictor discovered itself counts as "
            "unknown."
        )
    ]
    keys = ["extractor", "predictor"]
    for (extractor, predictor), part in sorted(
        counts.partition_by(keys, as_dict=True, include_key=False).items()
    ):
        right = part.filter(pl.col("target") == pl.col("predicted"))["count"].sum()
        share = cast(int, right) / part["count"].sum()
        parts += confused(part, f"{predictor} · {extractor}: {share:.1%} right", ("unknown",))
    return parts
