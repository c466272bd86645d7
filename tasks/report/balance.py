"""Samples by class, split and role, as a table and drawn for each protocol."""

from collections.abc import Mapping

import polars as pl

from schemas.tables import SPLIT_NAMES
from tasks.report import plots
from tasks.report.blocks import figure, folded, paragraph, table
from tasks.report.page import Section
from tasks.report.reading import Tables

MOST_BARS = 60
MOST_FIGURES = 12
FIGURES_IN_VIEW = 3


def balance(read: Tables, class_names: Mapping[str, str]) -> list[Section]:
    rows = read.scan("splits")
    if rows is None or not read.rows("splits") or "step" not in read.columns("splits"):
        return []
    grouped = rows.group_by("protocol", "role", pl.col("class")).agg(
        pl.col("sample_id").filter(split=name).n_unique().cast(pl.Int64).alias(name)
        for name in SPLIT_NAMES
    )
    counts = _named(read.collect("splits", grouped), class_names)
    columns = [name for name in SPLIT_NAMES if counts[name].sum()]
    summary = (
        counts.group_by("protocol", "role")
        .agg(pl.col("class").n_unique().cast(pl.Int64).alias("classes"), pl.col(columns).sum())
        .sort("protocol", "role")
    )
    parts = [table(summary, "Samples by split")]
    colours = dict(zip(SPLIT_NAMES, plots.COLOURS, strict=False))
    protocols = counts.sort("protocol").partition_by("protocol", maintain_order=True)
    figures = []
    for part in protocols[:MOST_FIGURES]:
        classes = part.group_by("class").agg(pl.col(columns).sum()).sort("class")
        draw = plots.stacked_bars if classes.height <= MOST_BARS else plots.ranked_sizes
        caption = (
            f"Samples by class and split, protocol {part['protocol'][0]}; "
            f"classes: {classes.height:,}"
        )
        figures.append(figure(draw(classes, "Samples", colours), caption))
    parts += figures[:FIGURES_IN_VIEW]
    if rest := figures[FIGURES_IN_VIEW:]:
        parts.append(folded(f"{len(rest)} more", *rest))
    if len(protocols) > MOST_FIGURES:
        parts.append(
            paragraph(f"Drawn are the first {MOST_FIGURES} of {len(protocols)} protocols.")
        )
    return [Section("Classes and splits", parts)]


def _named(counts: pl.DataFrame, class_names: Mapping[str, str]) -> pl.DataFrame:
    """Ids of classes by their names; a label of several classes has a `+` between them."""
    ids = counts["class"].unique().to_list()
    names = {one: "+".join(class_names.get(part, part) for part in one.split("+")) for one in ids}
    return counts.with_columns(pl.col("class").replace(names))
