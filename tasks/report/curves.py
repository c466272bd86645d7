"""ROC and precision-recall curves of the best runs of each protocol."""

from typing import Any

import polars as pl

from tasks.evaluation.conventions import CONVENTIONS
from tasks.report import plots
from tasks.report.blocks import Html, figure, folded, paragraph
from tasks.report.leaderboard import GENERAL_CONVENTIONS, in_order, ranked, results, styles, whole
from tasks.report.page import Section
from tasks.report.reading import Tables
from tasks.report.runs import with_names

MOST_RUNS = 8
MOST_OPEN = 4
MOST_FIGURES = 12
_RUN = ["protocol", "split", "run"]
_LINE = ["protocol", "split", "run_id", "score_id", "view", "phase", "step", "subset"]


def curves(read: Tables) -> list[Section]:
    rows = read.scan("curves")
    if rows is None or not read.rows("curves") or "run_id" not in read.columns("curves"):
        return []
    kinds = rows.select(*_LINE, "score", "convention").unique()
    keys = with_names(read, whole(read.collect("curves", kinds)))
    sets = _sets(keys)
    runs = _best(read, keys)
    lines = styles(runs["run"])
    parts: list[Html] = []
    rest: list[Html] = []
    if runs.height < keys.select(_RUN).n_unique():
        parts.append(paragraph(f"Drawn are the {MOST_RUNS} best runs of each protocol and split."))
    shown = 0
    for split, protocol, names in sets[:MOST_FIGURES]:
        drawn = keys.filter(protocol=protocol, split=split, convention=names[0])
        points = read.collect("curves", _thinned(rows, drawn.join(runs, on=_RUN), names[0]))
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


def _thinned(rows: pl.LazyFrame, drawn: pl.DataFrame, convention: str) -> pl.LazyFrame:
    """run, seed, curve, x, y of the keys `drawn`: points evenly along each curve, and its last.

    A curve may have a point for each sample; here most of them are left behind before they are read
    into memory, as none of them would be seen.
    """
    curve = [*_LINE, "curve"]
    points = rows.filter(pl.col("convention") == convention).join(
        drawn.lazy().select(*_LINE, "run"), on=_LINE, maintain_order="left"
    )
    last = points.group_by(curve).agg(pl.col("point").max().alias("last"))
    every = pl.col("last") // plots.MOST_CURVE_POINTS + 1
    kept = (pl.col("point") % every == 0) | (pl.col("point") == pl.col("last"))
    return (
        points.join(last, on=curve, maintain_order="left")
        .filter(kept)
        .select("run", pl.col("run_id").alias("seed"), "curve", "x", "y")
    )


def _sets(keys: pl.DataFrame) -> list[tuple[str, str, list[str]]]:
    """Split, protocol and the conventions that share its curves; the test split first."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for protocol, split, name in keys.select("protocol", "split", "convention").unique().rows():
        alike.setdefault((protocol, split, *_curve_rules(name)), []).append(name)
    order = in_order(set(keys["split"]))
    sets = [(key[1], key[0], sorted(names)) for key, names in alike.items()]
    return sorted(sets, key=lambda one: (order.index(one[0]), _is_general(one[2]), one[1], one[2]))


def _is_general(conventions: list[str]) -> bool:
    return GENERAL_CONVENTIONS.issuperset(conventions)


def _curve_rules(name: str) -> tuple[Any, ...]:
    """Conventions that agree in these draw the same curves."""
    rule = CONVENTIONS.get(name)
    return (rule.positive, rule.score_direction, rule.normal_share) if rule else (name,)


def _best(read: Tables, keys: pl.DataFrame) -> pl.DataFrame:
    """protocol, split, run of those to draw; those without metrics come after those with."""
    runs = keys.select(_RUN).unique()
    metrics = results(read)
    place = pl.DataFrame(schema=dict.fromkeys(_RUN, pl.String) | {"place": pl.Int64})
    if metrics is not None:
        place = ranked(whole(metrics)).select(*_RUN, "place")
    return (
        runs.join(place, on=_RUN, how="left")
        .sort("protocol", "split", "place", "run", nulls_last=True)
        .group_by("protocol", "split", maintain_order=True)
        .head(MOST_RUNS)
        .select(_RUN)
    )
