"""The page of all reports: a card for each, the leaderboard, and the best run of each protocol."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from schemas.errors import LakeError
from storage.leaderboard import SOURCES
from storage.tables import current_versions
from tasks.evaluation.leaderboard import OPTIMISTIC, Board, boards, note, ranking, unranked
from tasks.report.blocks import Html, number_text, paragraph, table, text
from tasks.report.built import tiles
from tasks.report.leaderboard import CHOSEN, best, results
from tasks.report.page import INDEX, document
from tasks.report.reading import Tables, names

MOST_PROTOCOLS = 12
MOST_DETECTORS = 10
RANKED = (
    "Detectors by AUROC (convention `openood`) on the test split: a model with its network, score "
    "and what differs from its preset. Mean ± sample deviation over seeds (none where there are no "
    "two), below it the widest interval of its seeds (95 %, bootstrap); both are means over the "
    "protocols that all detectors have. A detector whose interval reaches 0.5 is marked: it may be "
    "chance. `novelty leaderboard` and the view `lake.leaderboard` have all of them, by every "
    "metric and protocol."
)


def index(lake: Path, reports: Sequence[Path]) -> str:
    """`reports` are the pages beside it; one whose benchmark has no tables any more is left out."""
    cards, ranks, bests = [], [], []
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
        ranks += _ranks(read, title)
        bests += _best(read, title)
    body = f'<ul class="cards">{"".join(cards)}</ul>'
    if ranks:
        notes = Html(paragraph(RANKED) + paragraph(OPTIMISTIC))
        body += f'<section id="leaderboard"><h2>Leaderboard</h2>{notes}{"".join(ranks)}</section>'
    if bests:
        notes = paragraph(
            "The best run of each protocol by the protocol's first metric, on the test split where "
            "there is one: mean ± standard deviation over seeds, or the value of one seed and its "
            "95 % interval."
        )
        notes = Html(notes + paragraph(CHOSEN))
        body += f'<section id="best"><h2>Best runs</h2>{notes}{"".join(bests)}</section>'
    return document("Reports", f"<header><h1>Reports</h1></header><main>{body}</main>")


def _ranks(read: Tables, title: str) -> list[Html]:
    """The first detectors of each board of a benchmark; damage is told by `_best`."""
    try:
        tables = {
            name: rows.select(pl.lit(read.benchmark).alias("benchmark"), pl.all())
            for name in SOURCES
            if (rows := read(name)) is not None
        }
    except LakeError:
        return []
    if "runs" not in tables or "run_id" not in tables.get("metrics", pl.DataFrame()).columns:
        return []
    leaderboards = boards(ranking(tables))
    ranks = [_ranked(board, title) for board in leaderboards[:MOST_PROTOCOLS]]
    return ranks + [paragraph(f"{one}.") for one in unranked(tables, leaderboards)]


def _ranked(board: Board, title: str) -> Html:
    cell = pl.struct("mean", "deviation", "low", "high")
    shown = board.rows.head(MOST_DETECTORS).select(
        *("rank", "detector", "preset"),
        cell.map_elements(_value, return_dtype=pl.String).alias("auroc"),
        *("protocols", "seeds", "samples"),
        note(),
    )
    caption = f"{title}: {board.scope}"
    if board.rows.height > MOST_DETECTORS:
        caption += f"; the first {MOST_DETECTORS}"
    ranks = table(shown, caption, names={"auroc": "AUROC"}, right=("auroc",))
    doubt = board.doubtful
    return Html(ranks + paragraph(f"{doubt[0].upper()}{doubt[1:]}.")) if doubt else ranks


def _value(cell: Mapping[str, float | None]) -> str:
    """Mean ± deviation above the interval, as far as there are any."""
    mean, deviation, low, high = (
        None if value is None else number_text(value) for value in cell.values()
    )
    shown = f"{mean} ± {deviation}" if deviation is not None else str(mean)
    return shown if low is None else f"{shown}\n[{low}, {high}]"


def _best(read: Tables, title: str) -> list[Html]:
    try:
        metrics = results(read)
    except LakeError as error:
        # One benchmark's damage must not keep another's report from being written.
        return [paragraph(f"{title}: {error}")]
    return [] if metrics is None else [best(metrics, title, MOST_PROTOCOLS)]
