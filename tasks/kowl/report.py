"""What only KOWL-718 shows: the increments beside the paper's Table 1, and label changes.

Enters: the tables increments, classes, label_changes; the other `*_report.py` here
have the rest. Leaves: report sections.
"""

import polars as pl

from tasks.increments import Increments, count_increments
from tasks.kowl import evaluation_report, results_report, videos_report
from tasks.plots import stacked_bars
from tasks.report import Html, Read, Section, figure, paragraph, table

COLOURS = {"known": "#4c8dd6", "novel": "#e08a3c"}

# Table 2 of the paper: split -> (known, novel) samples of each increment from 0.
PAPER_TABLE_2 = {
    "train": (
        *((218371, 0), (16082, 3163), (19148, 5513), (24661, 7730), (32391, 12298)),
        *((44687, 25538), (34287, 1870), (36112, 2415), (38527, 3331), (41855, 5273)),
        (47128, 10144),
    ),
    "validate": (
        *((18016, 0), (333, 75), (20, 72), (45, 68), (88, 75), (156, 124)),
        *((4892, 163), (4990, 208), (5197, 277), (5473, 411), (5883, 684)),
    ),
    "test": (
        *((35256, 1), (795, 104), (287, 160), (446, 198), (644, 297), (940, 488)),
        *((0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
    ),
}
PAPER_CLASSES = 718
WHY_DIFFERENT = (
    "The classes of each increment agree with the paper; sample numbers cannot agree exactly: its "
    "lists and blacklists are not public. Clips without features were dropped there (about half "
    "of K600's validation and test clips, mostly files missing from the mirror), the public K600 "
    "list is longer, and part of K400's training list is lost, so that some of its clips count as "
    "new in K600. K700-2020's test list has no labels. The paper's Table 1 prints training as "
    "Table 2 does, and from increment 1 on validation and test added up as test."
)


def sections(read: Read) -> list[Section]:
    """Increments, label changes, videos and the evaluation, where the lake has them."""
    found = [
        _increments(read),
        _label_changes(read),
        videos_report.section(read),
        *evaluation_report.sections(read),
        results_report.confusions(read),
    ]
    return [section for section in found if section is not None]


def results(read: Read) -> pl.DataFrame | None:
    """The evaluation in the form of the shared table of metrics, for the leaderboard."""
    return results_report.results(read)


def _increments(read: Read) -> Section | None:
    columns = ["sample_id", "label", "split", "increment", "role"]
    increments, classes = read("increments", columns), read("classes")
    if increments is None or classes is None:
        return None
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
    if classes.height == PAPER_CLASSES:
        parts += [
            paragraph(WHY_DIFFERENT),
            table(_beside_paper(counts), "Beside the paper's Tables 1 and 2"),
        ]
    return Section("Increments", parts)


def _beside_paper(counts: pl.DataFrame) -> pl.DataFrame:
    """Samples of each split and increment: ours, the paper's, and by how much ours are more."""
    paper = pl.DataFrame(
        [
            (split, increment, *samples)
            for split, rows in PAPER_TABLE_2.items()
            for increment, samples in enumerate(rows)
        ],
        schema={
            "split": pl.String,
            "increment": pl.Int32,
            "paper_known": pl.Int64,
            "paper_novel": pl.Int64,
        },
        orient="row",
    )
    ours = counts.select(
        "split",
        pl.col("increment").cast(pl.Int32),
        "known_classes",
        "novel_classes",
        "known_samples",
        "novel_samples",
    )
    both = paper.join(ours, on=["split", "increment"], how="left", maintain_order="left")
    more = pl.sum_horizontal("known_samples", "novel_samples") / pl.sum_horizontal(
        "paper_known", "paper_novel"
    )
    percent = pl.when(more.is_finite()).then((more - 1) * 100).round(1)
    return both.select(
        *("split", "increment", "known_classes", "novel_classes"),
        *("known_samples", "paper_known", "novel_samples", "paper_novel"),
        percent.alias("ours_more_percent"),
    )


def _label_changes(read: Read) -> Section | None:
    changes = read("label_changes")
    if changes is None or changes.is_empty():
        return None
    top = changes.sort("clips", descending=True).head(20)
    said = paragraph("The same clip under another label in a later release; the 20 most frequent.")
    return Section("Label changes", [said, table(top)])
