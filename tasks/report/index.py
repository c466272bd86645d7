"""The page of all reports: a card for each, and the best run of each protocol."""

import html
from collections.abc import Sequence
from pathlib import Path

from schemas.errors import LakeError
from storage.tables import current_versions
from tasks.report.blocks import Html, paragraph, text
from tasks.report.built import tiles
from tasks.report.leaderboard import CHOSEN, best, results
from tasks.report.page import INDEX, document
from tasks.report.reading import Tables, names

MOST_PROTOCOLS = 12


def index(lake: Path, reports: Sequence[Path]) -> str:
    """`reports` are the pages beside it; one whose benchmark has no tables any more is left out."""
    cards, boards = [], []
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
        boards += _board(read, title)
    body = f'<ul class="cards">{"".join(cards)}</ul>'
    if boards:
        said = paragraph(
            "The best run of each protocol by the protocol's first metric, on the test split where "
            "there is one: mean ± standard deviation over seeds, or the value of one seed and its "
            "95 % interval."
        )
        said = Html(said + paragraph(CHOSEN))
        body += f'<section id="best"><h2>Best runs</h2>{said}{"".join(boards)}</section>'
    return document("Reports", f"<header><h1>Reports</h1></header><main>{body}</main>")


def _board(read: Tables, title: str) -> list[Html]:
    try:
        metrics = results(read)
    except LakeError as error:
        # One benchmark's damage must not keep another's report from being written.
        return [paragraph(f"{title}: {error}")]
    return [] if metrics is None else [best(metrics, title, MOST_PROTOCOLS)]
