"""The page of all reports: a card for each, and the best detector of each protocol."""

import html
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from schemas.errors import LakeError
from storage.tables import current_versions
from tasks.report.blocks import Html, paragraph, run_name, table, text
from tasks.report.built import tiles
from tasks.report.leaderboard import ranked, results, seeds_text
from tasks.report.page import INDEX, document
from tasks.report.reading import Tables, names

MOST_PROTOCOLS = 12


def index(lake: Path, reports: Sequence[Path]) -> str:
    """`reports` are the pages beside it; one whose benchmark has no tables any more is left out."""
    cards, best = [], []
    for path in sorted(reports):
        versions = current_versions(lake, path.stem)
        if path.stem == INDEX or not versions:
            continue
        read = Tables(lake, path.stem, versions)
        title, about = names(path.stem)
        facts = " · ".join(f"<b>{text(value)}</b> {text(name)}" for value, name in tiles(read))
        cards.append(
            f'<li><h2><a href="{html.escape(path.name)}">{text(title)}</a></h2>'
            f"<p>{text(about)}</p><p>{facts}</p></li>"
        )
        best += _best(read, title)
    body = f'<ul class="cards">{"".join(cards)}</ul>'
    if best:
        said = paragraph(
            "The best detector of each protocol by the protocol's first metric, mean ± standard "
            "deviation over seeds, on the test split where there is one."
        )
        body += f'<section id="best"><h2>Best detectors</h2>{said}{"".join(best)}</section>'
    return document("Reports", f"<header><h1>Reports</h1></header><main>{body}</main>")


def _best(read: Tables, title: str) -> list[Html]:
    try:
        metrics = results(read)
    except LakeError as error:
        # One benchmark's damage must not keep another's report from being written.
        return [paragraph(f"{title}: {error}")]
    if metrics is None:
        return []
    tested = pl.col("split") == "test"
    where = ["protocol", "split"]
    chosen = ranked(_families(metrics)).with_columns(
        run_name().alias("run"),
        pl.len().over(where).cast(pl.Int64).alias("of_runs"),
        (pl.len().over(*where, "mean") - 1).alias("tied"),
    )
    chosen = chosen.filter(tested | ~tested.any().over("protocol")).filter(pl.col("place") == 0)
    metric = pl.col("metric").str.replace_all("_", " ")
    value = pl.struct("mean", "deviation", found=pl.lit(1), runs=pl.lit(1))
    tied = pl.format("{} (and {} as good)", "run", "tied")
    shown = chosen.head(MOST_PROTOCOLS).select(
        "protocol",
        "split",
        pl.when(pl.col("tied") > 0).then(tied).otherwise("run").alias("best_detector"),
        "of_runs",
        pl.format("{} ({})", metric, "convention").alias("metric"),
        value.map_elements(seeds_text, return_dtype=pl.String).alias("value"),
        "seeds",
    )
    more = f"; the first {MOST_PROTOCOLS} of {chosen.height} protocols"
    caption = title + (more if chosen.height > MOST_PROTOCOLS else "")
    return [table(shown, caption, right=("value",))]


def _families(metrics: pl.DataFrame) -> pl.DataFrame:
    """Protocols `family/member` become one: for each seed the mean over all members.

    A run that lacks some of the members is left out, as its mean would be over easier ones.
    """
    named = metrics.with_columns(pl.col("protocol").str.splitn("/", 2).alias("name"))
    family = pl.col("name").struct.field("field_0")
    single = pl.col("name").struct.field("field_1").is_null()
    many = named.filter(~single).with_columns(family.alias("family"))
    if many.is_empty():
        return metrics
    run = ["family", "detector", "backbone", "seed", "split", "convention", "metric"]
    members = pl.col("protocol").n_unique().over("family").alias("members")
    means = (
        many.with_columns(members)
        .group_by(*run, "members", maintain_order=True)
        .agg(pl.col("value").mean(), pl.col("n").sum(), pl.len().alias("there"))
        .filter(pl.col("there") == pl.col("members"))
        .with_columns(
            pl.format("{} (mean of {})", "family", "members").alias("protocol"),
        )
    )
    kept = ["protocol", *run[1:], "value", "n"]
    return pl.concat([named.filter(single).select(kept), means.select(kept)])
