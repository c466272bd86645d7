"""Samples by class and split, as a table and drawn for each protocol."""

from collections.abc import Mapping

import polars as pl

from schemas.tables import SPLIT_NAMES
from tasks import plots
from tasks.report.blocks import figure, folded, paragraph, table
from tasks.report.page import Section
from tasks.report.reading import Tables

PROTOCOLS = ("protocol", "track")
MOST_BARS = 60
MOST_FIGURES = 12
FIGURES_IN_VIEW = 3


def balance(read: Tables, class_names: Mapping[str, str]) -> list[Section]:
    there = set(read.columns("splits"))
    rows = read.scan("splits")
    if rows is None or not read.rows("splits") or not {"class", "split"} <= there:
        return []
    used = pl.col("split").is_not_null()
    if "kept" in there:
        used &= pl.col("kept")
    where = pl.when(used).then("split").otherwise(pl.lit("unused")).alias("split")
    extra = [name for name in (*PROTOCOLS, "role") if name in there]
    grouped = (
        rows.with_columns(
            where, pl.col(extra).fill_null("none"), pl.col("class").replace(class_names)
        )
        .group_by(*extra, "class", "split")
        .agg(pl.len().cast(pl.Int64).alias("count"))
    )
    counts = read.collect("splits", grouped)
    present = set(counts["split"])
    columns = [name for name in (*SPLIT_NAMES, "unused") if name in present]
    wide = _wide(counts, [*extra, "class"], columns)
    summary = (
        wide.group_by(extra or pl.lit("all").alias("samples"))
        .agg(pl.col("class").n_unique().cast(pl.Int64).alias("classes"), pl.col(columns).sum())
        .sort(extra or pl.first())
    )
    unused = "; unused ones are filtered or in no split" if "unused" in present else ""
    parts = [table(summary, f"Samples by split{unused}")]
    colours = dict(zip(SPLIT_NAMES, plots.COLOURS, strict=False)) | {"unused": plots.GREY}
    by = next((name for name in PROTOCOLS if name in there), None)
    protocols = wide.partition_by(by, maintain_order=True) if by else [wide]
    figures = []
    for part in protocols[:MOST_FIGURES]:
        classes = part.group_by("class").agg(pl.col(columns).sum()).sort("class")
        draw = plots.stacked_bars if classes.height <= MOST_BARS else plots.ranked_sizes
        name = f", {by} {part[by][0]}" if by else ""
        caption = f"Samples by class and split{name}; classes: {classes.height:,}"
        figures.append(figure(draw(classes, "Samples", colours), caption))
    parts += figures[:FIGURES_IN_VIEW]
    if rest := figures[FIGURES_IN_VIEW:]:
        parts.append(folded(f"{len(rest)} more", *rest))
    if len(protocols) > MOST_FIGURES:
        parts.append(
            paragraph(f"Drawn are the first {MOST_FIGURES} of {len(protocols)} protocols.")
        )
    return [Section("Classes and splits", parts)]


def _wide(counts: pl.DataFrame, index: list[str], columns: list[str]) -> pl.DataFrame:
    """One row per `index`, one column per value of `split`; 0 where there is none."""
    return (
        counts.group_by(index)
        .agg(pl.col("count").filter(pl.col("split") == name).sum().alias(name) for name in columns)
        .sort(index)
    )
