"""ROC and precision-recall curves of the best runs of each protocol."""

from typing import Any

import polars as pl

from tasks import plots
from tasks.evaluation.conventions import CONVENTIONS
from tasks.report.blocks import figure, folded, paragraph, run_name
from tasks.report.leaderboard import GENERAL_CONVENTIONS, in_order, ranked, results
from tasks.report.page import Section
from tasks.report.reading import Tables

MOST_RUNS = 8
MOST_OPEN = 4
MOST_FIGURES = 12
_SET = ["protocol", "split", "convention"]
_RUN = ["protocol", "split", "detector", "backbone"]


def curves(read: Tables) -> list[Section]:
    rows = read.scan("curves")
    if rows is None or not read.rows("curves"):
        return []
    keys = read.collect("curves", rows.select(*_SET, "detector", "backbone").unique())
    sets = _sets(keys)
    runs = _best(read, keys)
    lines = _styles(runs)
    parts, rest = [], []
    if runs.height < keys.select(_RUN).n_unique():
        parts.append(paragraph(f"Drawn are the {MOST_RUNS} best runs of each protocol and split."))
    shown = 0
    for split, protocol, names in sets[:MOST_FIGURES]:
        one_set = (pl.col("protocol") == protocol) & (pl.col("split") == split)
        chosen = rows.filter(one_set & (pl.col("convention") == names[0]))
        points = read.collect("curves", _thinned(chosen, runs.lazy()))
        caption = f"Protocol {protocol}, split {split}, convention {', '.join(names)}"
        first = split == sets[0][0] and _is_general(names) == _is_general(sets[0][2])
        open_ = first and shown < MOST_OPEN
        shown += open_
        (parts if open_ else rest).append(figure(plots.roc_and_pr(points, lines), caption))
    if rest:
        parts.append(folded("Other protocols, splits and conventions", *rest))
    if len(sets) > MOST_FIGURES:
        parts.append(
            paragraph(
                f"Drawn are {MOST_FIGURES} of {len(sets)} sets of curves; all points are in the "
                "table `curves`."
            )
        )
    return [Section("ROC and precision-recall curves", parts)]


def _thinned(rows: pl.LazyFrame, runs: pl.LazyFrame) -> pl.LazyFrame:
    """run, seed, curve, x, y of the runs: points evenly along each curve, with its last one.

    A curve may have a point for each sample; here most of them are left behind before they are read
    into memory, as none of them would be seen.
    """
    curve = [*_RUN, "seed", "curve"]
    wanted = rows.join(runs, on=_RUN, maintain_order="left")
    last = rows.group_by(curve).agg(pl.col("point").max().alias("last"))
    every = pl.col("last") // plots.MOST_CURVE_POINTS + 1
    drawn = (pl.col("point") % every == 0) | (pl.col("point") == pl.col("last"))
    return (
        wanted.join(last, on=curve, maintain_order="left")
        .filter(drawn)
        .select("run", "seed", "curve", "x", "y")
    )


def _sets(keys: pl.DataFrame) -> list[tuple[str, str, list[str]]]:
    """Split, protocol and the conventions that share its curves; the test split first."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for protocol, split, name in keys.select(_SET).unique().rows():
        alike.setdefault((protocol, split, *_curve_rules(name)), []).append(name)
    order = in_order(set(keys["split"]))
    found = [(key[1], key[0], sorted(names)) for key, names in alike.items()]
    return sorted(found, key=lambda one: (order.index(one[0]), _is_general(one[2]), one[1], one[2]))


def _is_general(conventions: list[str]) -> bool:
    return GENERAL_CONVENTIONS.issuperset(conventions)


def _curve_rules(name: str) -> tuple[Any, ...]:
    """Conventions that agree in these draw the same curves."""
    rule = CONVENTIONS.get(name)
    return (rule.positive, rule.score_direction, rule.normal_share) if rule else (name,)


def _best(read: Tables, keys: pl.DataFrame) -> pl.DataFrame:
    """The runs to draw, with their names; those without metrics come after those with."""
    runs = keys.select(_RUN).unique()
    metrics = results(read)
    if metrics is not None:
        runs = runs.join(ranked(metrics).select(*_RUN, "place"), on=_RUN, how="left")
    else:
        runs = runs.with_columns(pl.lit(None, pl.Int64).alias("place"))
    return (
        runs.sort("protocol", "split", "place", "detector", "backbone", nulls_last=True)
        .group_by("protocol", "split", maintain_order=True)
        .head(MOST_RUNS)
        .select(*_RUN, run_name().alias("run"))
    )


def _styles(runs: pl.DataFrame) -> dict[str, tuple[str, str]]:
    """Colour and dash of each run, the same in every figure."""
    colours, dashes = plots.COLOURS, plots.DASHES
    return {
        run: (colours[number % len(colours)], dashes[number // len(colours) % len(dashes)])
        for number, run in enumerate(sorted(set(runs["run"])))
    }
