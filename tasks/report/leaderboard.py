"""Runs side by side: every metric of every convention, best detector first; curves ask it too.

Enters: rows of METRICS (schemas/tables.py). A benchmark that measures in another form gives them by
`results(read)` in its own report module. Leaves: a section, and the ranking behind it.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import polars as pl

from tasks.evaluation.conventions import CONVENTIONS
from tasks.report.blocks import folded, number_text, paragraph, table
from tasks.report.page import Section
from tasks.report.reading import Tables, module

METRIC_ORDER = (
    *("auroc", "aupr", "aupr_in", "aupr_out", "average_precision", "acc", "oscr"),
    *("classification accuracy", "detected % (M2)"),
)
LOWER_IS_BETTER = re.compile(r"^(fpr|fnr|fp|fn|false|detection_delay|delay|error|loss)", re.I)
NOT_RANKED = frozenset({"skew"})
# Elsewhere the first in METRIC_ORDER decides.
FIRST_METRIC = {"semantic": "average_precision"}
GENERAL_CONVENTIONS = frozenset({"openood"})  # after those of the benchmark's own paper
MOST_NAMED = 4
RUN = ("protocol", "detector", "backbone", "split")


def results(read: Tables) -> pl.DataFrame | None:
    """Metrics of all runs in the shared form, or None where there are none."""
    if "convention" in read.columns("metrics"):
        found = read("metrics")
    else:
        own = module(f"tasks.{read.benchmark}.report")
        found = own.results(read) if hasattr(own, "results") else None
    return None if found is None or found.is_empty() else found


def ranked(metrics: pl.DataFrame) -> pl.DataFrame:
    """Runs of each protocol and split by their first metric, best first; `place` counts from 0.

    Columns: protocol, split, detector, backbone, convention, metric, mean, deviation, seeds, place.
    """
    where = ["protocol", "split"]
    rated = metrics.filter(~pl.col("metric").is_in(list(NOT_RANKED)))
    kinds = rated.select(*where, "convention", "metric").unique().rows()
    first = pl.DataFrame(
        list({kind[:2]: kind for kind in sorted(kinds, key=_priority, reverse=True)}.values()),
        schema=dict.fromkeys([*where, "convention", "metric"], pl.String),
        orient="row",
    )
    value = pl.col("value")
    # In table order, as the last digit of a mean depends on the order of its terms.
    means = (
        rated.join(first, on=[*where, "convention", "metric"], maintain_order="left")
        .group_by(*RUN, "convention", "metric", maintain_order=True)
        .agg(
            value.mean().alias("mean"),
            value.std().alias("deviation"),
            pl.col("seed").n_unique().cast(pl.Int64).alias("seeds"),
        )
    )
    lower = pl.col("metric").str.contains(f"(?i){LOWER_IS_BETTER.pattern}")
    better = pl.when(lower).then("mean").otherwise(-pl.col("mean"))
    return means.sort(*where, better, "detector", "backbone", nulls_last=True).with_columns(
        pl.int_range(pl.len()).over(where).alias("place")
    )


def _priority(kind: tuple[str, ...]) -> tuple[Any, ...]:
    """Order of (..., convention, metric) in tables; the first one ranks."""
    *_, convention, metric = kind
    place = METRIC_ORDER.index(metric) if metric in METRIC_ORDER else len(METRIC_ORDER)
    first = FIRST_METRIC.get(convention) == metric
    general = convention in GENERAL_CONVENTIONS
    return (general, convention, metric in NOT_RANKED, not first, place, metric)


def in_order(splits: Collection[str]) -> list[str]:
    """The test split first."""
    order = ("test", "valid", "train")
    return sorted(splits, key=lambda s: (order.index(s) if s in order else len(order), s))


def leaderboard(read: Tables) -> list[Section]:
    metrics = results(read)
    if metrics is None:
        return []
    run = list(RUN)
    value = pl.col("value")
    # In table order, as the last digit of a mean depends on the order of its terms.
    cells = metrics.group_by(*run, "convention", "metric", maintain_order=True).agg(
        value.mean().alias("mean"),
        value.std().alias("deviation"),
        value.count().alias("found"),
        pl.len().alias("runs"),
    )
    rows = metrics.group_by(run).agg(
        pl.col("seed").n_unique().cast(pl.Int64).alias("seeds"),
        pl.col("n").max().alias("samples"),
        pl.col("convention").unique().sort().alias("conventions"),
    )
    parts = [
        paragraph(
            "Mean ± standard deviation over seeds. Of each protocol the best detector is marked, "
            "where they differ. A dash: the convention calls the number infeasible, or there "
            "is no such metric."
        )
    ]
    for split in in_order(set(rows["split"])):
        here = rows.filter(pl.col("split") == split)
        # Runs that follow other conventions have other columns: they get a table of their own.
        for conventions in sorted({tuple(names) for names in here["conventions"].to_list()}):
            chosen = here.filter(pl.col("conventions") == pl.lit(list(conventions)))
            shown, groups, marked = _board(chosen, cells)
            names = {c: c.partition("/")[2].replace("_", " ") for c in shown.columns if "/" in c}
            caption = f"Split {split}, {_protocols(chosen)}"
            parts.append(table(shown, caption, groups, marked, names, names))
    used = [CONVENTIONS[name] for name in sorted(set(metrics["convention"])) if name in CONVENTIONS]
    if used:
        dumped = [convention.model_dump(mode="json") for convention in used]
        frame = pl.DataFrame({"rule": list(dumped[0])[1:]}).with_columns(
            pl.Series(one["name"], [_rule(v) for v in list(one.values())[1:]]) for one in dumped
        )
        parts.append(folded("What the conventions mean", table(frame)))
    return [Section("Leaderboard", parts)]


def _protocols(rows: pl.DataFrame) -> str:
    names = sorted(set(rows["protocol"]))
    if len(names) > MOST_NAMED:
        return f"{len(names)} protocols"
    return f"protocol{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _rule(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)


def _board(
    rows: pl.DataFrame, cells: pl.DataFrame
) -> tuple[pl.DataFrame, list[tuple[str, int]], set[tuple[int, str]]]:
    """One row per run, best first within its protocol; header groups; cells of the best."""
    run = list(RUN)
    cells = cells.join(rows.select(run), on=run, how="semi")
    columns = sorted(cells.select("convention", "metric").unique().rows(), key=_priority)
    counts = Counter(convention for convention, _ in columns)
    groups = [("", 5), *counts.items()]
    named = [f"{convention}/{metric}" for convention, metric in columns]
    spread = cells.with_columns(pl.concat_str("convention", "metric", separator="/").alias("to"))
    means = rows.join(
        spread.group_by(run).agg(
            pl.col("mean").filter(pl.col("to") == name).first().alias(name) for name in named
        ),
        on=run,
    )
    first = named[0]
    best_first = not LOWER_IS_BETTER.match(columns[0][1])
    means = means.sort(
        "protocol", first, "detector", "backbone",
        descending=[False, best_first, False, False], nulls_last=True,
    )  # fmt: skip
    texts = spread.with_columns(
        pl.struct("mean", "deviation", "found", "runs")
        .map_elements(seeds_text, return_dtype=pl.String)
        .alias("text")
    )
    shown = means.select(*run, "seeds", "samples").join(
        texts.group_by(run).agg(
            pl.col("text").filter(pl.col("to") == name).first().alias(name) for name in named
        ),
        on=run,
        how="left",
        maintain_order="left",
    )
    marked = set()
    for (_, metric), name in zip(columns, named, strict=True):
        if metric in NOT_RANKED:
            continue
        seen = pl.col(name).round(3)  # what looks the same is marked the same
        best = seen.min() if LOWER_IS_BETTER.match(metric) else seen.max()
        several = seen.drop_nulls().n_unique() > 1
        hits = means.select(((seen == best) & several).over("protocol")).to_series()
        marked |= {(row, name) for row in hits.fill_null(False).arg_true().to_list()}
    return (
        shown.select("detector", "backbone", "protocol", "seeds", "samples", *named),
        groups,
        marked,
    )


def seeds_text(cell: Mapping[str, Any]) -> str | None:
    """`mean ± deviation`, and of how many runs there is a number if not of all."""
    if cell["mean"] is None:
        return None
    shown = number_text(cell["mean"])
    if cell["deviation"] is not None:
        odd = cell["mean"] and not 0.001 <= abs(cell["mean"]) < 1000
        deviation = cell["deviation"]
        # With as many digits as the mean, so that columns stay readable.
        shown += f" ± {number_text(deviation) if odd else f'{deviation:.3f}'}"
    return shown if cell["found"] == cell["runs"] else f"{shown} ({cell['found']}/{cell['runs']})"
