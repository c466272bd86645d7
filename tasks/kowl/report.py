"""What only KOWL-718 shows: the increments beside the paper's Tables 1 and 2, and label changes.

Enters: the tables increments, classes, listings, label_changes; the other `*_report.py` here
have the rest. Leaves: report sections.
"""

import polars as pl

from tasks.kowl import evaluation_report, results_report, videos_report
from tasks.kowl.increments import Increments, count_increments
from tasks.kowl.paper_tables import beside_paper
from tasks.report import Html, Read, Section, figure, heading, paragraph, table
from tasks.report.plots import stacked_bars

COLOURS = {"known": "#4c8dd6", "novel": "#e08a3c"}

BESIDE_PAPER = (
    "Sample numbers cannot agree exactly: the authors' lists and the names of the clips without "
    "features are not public. Table 1 prints training as Table 2 does, and from increment 1 on "
    "validation and test added up as test."
)


def sections(read: Read) -> list[Section]:
    """Increments, label changes, videos and the evaluation, where the lake has them."""
    candidates = [
        *_increments(read),
        _label_changes(read),
        videos_report.section(read),
        *evaluation_report.sections(read),
        *results_report.confusions(read),
    ]
    return [section for section in candidates if section is not None]


def _increments(read: Read) -> list[Section]:
    """One section for each protocol."""
    columns = ["protocol", "sample_id", "label", "split", "increment", "role"]
    increments, classes = read("increments", columns), read("classes")
    if increments is None or classes is None:
        return []
    return [
        Section(f"Increments{name}", _of_protocol(part, classes, read))
        for name, part in evaluation_report.by_protocol(increments)
    ]


def _of_protocol(increments: pl.DataFrame, classes: pl.DataFrame, read: Read) -> list[Html]:
    classes = classes.filter(pl.col("protocol") == increments["protocol"][0])
    counts = count_increments(Increments(increments, classes, pl.DataFrame()))
    train = counts.filter(pl.col("split") == "train").sort("increment")
    bars = train.select(
        pl.col("increment").cast(pl.String),
        pl.col("known_samples").alias("known"),
        pl.col("novel_samples").alias("novel"),
    )
    parts: list[Html] = [
        paragraph(
            f"{increments.height:,} clips of {classes.height:,} classes in "
            f"{train.height} increments; increment 0 is the first release."
        ),
        figure(stacked_bars(bars, "Training clips", COLOURS), "Known and novel clips by increment"),
        table(counts.sort("split", "increment"), "Classes and clips of each increment and split"),
    ]
    beside = beside_paper(counts, classes, _list_sizes(read))
    if beside is not None:
        parts += [heading("Beside the paper"), paragraph(BESIDE_PAPER)]
        for name, rows in beside.items():
            parts += _with_notes(rows, f"{name} of the paper and ours")
    return parts


def _with_notes(rows: pl.DataFrame, caption: str) -> list[Html]:
    """Reasons are long and repeat: each stands once below the table, under its number."""
    notes = rows.select("reason").unique(maintain_order=True).with_row_index("note", 1)
    shown = rows.join(notes, on="reason", maintain_order="left").drop("reason")
    percent = pl.col("ours_more_percent").cast(pl.String).fill_null("")
    names = {name: name.removesuffix("_samples").replace("_", " ") for name in shown.columns}
    return [
        table(shown.with_columns(percent), caption, names=names, right=["ours_more_percent"]),
        table(notes, f"Why they differ: the notes of {caption.split(' of ')[0]}"),
    ]


def _list_sizes(read: Read) -> dict[tuple[str, str], int]:
    listings = read("listings", ["release", "split"])
    if listings is None:
        return {}
    sizes = listings.group_by("release", "split").len()
    return {(release, split): rows for release, split, rows in sizes.iter_rows()}


def _label_changes(read: Read) -> Section | None:
    changes = read("label_changes")
    if changes is None or changes.is_empty():
        return None
    top = changes.sort("clips", descending=True).head(20)
    note = paragraph("The same clip under another label in a later release; the 20 most frequent.")
    return Section("Label changes", [note, table(top)])
