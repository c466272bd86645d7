"""What only KOWL-718 shows: the increments beside the paper's Table 1, label changes, video states.

Enters: the tables increments, classes, label_changes, videos, listings. Leaves: report sections.
"""

import polars as pl

from tasks.increments import Increments, count_increments
from tasks.kowl.videos import link_rot
from tasks.plots import stacked_bars
from tasks.report import Html, Read, Section, figure, paragraph, table

COLOURS = {"known": "#4c8dd6", "novel": "#e08a3c"}

# Table 1 of the paper: increment -> (train known, train novel, test known, test novel) samples.
PAPER_TABLE_1 = {
    0: (218371, 0, 35256, 0),
    1: (16082, 3163, 1128, 179),
    2: (19148, 5513, 307, 232),
    3: (24661, 7730, 491, 266),
    4: (32391, 12298, 732, 372),
    5: (44687, 25538, 1096, 612),
    6: (34287, 1870, 4892, 163),
    7: (36112, 2415, 4990, 208),
    8: (38527, 3331, 5197, 277),
    9: (41855, 5273, 5473, 411),
    10: (47128, 10144, 5883, 684),
}
PAPER_CLASSES = 718
WHY_DIFFERENT = (
    "The classes of each increment agree with the paper; sample numbers cannot agree exactly: its "
    "lists and blacklists are not public. Clips without features were dropped there (about half "
    "of K600's validation and test clips, mostly files missing from the mirror), the public K600 "
    "list is longer, and part of K400's training list is lost, so that some of its clips count as "
    "new in K600. As test of K700-2020 the paper takes its validation clips."
)


def sections(read: Read) -> list[Section]:
    """Increments, label changes and videos, where the lake has them."""
    found = [_increments(read), _label_changes(read), _videos(read)]
    return [section for section in found if section is not None]


def _increments(read: Read) -> Section | None:
    increments, classes = read("increments"), read("classes")
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
            table(_beside_paper(counts), "Beside the paper's Table 1"),
        ]
    return Section("Increments", parts)


def _beside_paper(counts: pl.DataFrame) -> pl.DataFrame:
    paper = pl.DataFrame(
        [(number, *row) for number, row in PAPER_TABLE_1.items()],
        schema=[
            "increment",
            "paper train known",
            "paper train novel",
            "paper test known",
            "paper test novel",
        ],
        orient="row",
    )
    ours = counts.select("increment", "split", "known_samples", "novel_samples")
    result = paper.select("increment")
    for split in ("train", "test"):
        own = ours.filter(pl.col("split") == split)
        if split == "test":
            # The last release has no labelled test clips; the paper scores its validation clips.
            rest = ours.filter(
                (pl.col("split") == "validate")
                & ~pl.col("increment").is_in(own["increment"].to_list())
            )
            own = pl.concat([own, rest])
        own = own.select(
            pl.col("increment").cast(pl.Int64),
            pl.col("known_samples").alias(f"{split} known"),
            pl.col("novel_samples").alias(f"{split} novel"),
        )
        theirs = paper.select("increment", f"paper {split} known", f"paper {split} novel")
        result = result.join(own, on="increment", how="left").join(theirs, on="increment")
    return result.sort("increment")


def _label_changes(read: Read) -> Section | None:
    changes = read("label_changes")
    if changes is None or changes.is_empty():
        return None
    top = changes.sort("clips", descending=True).head(20)
    said = paragraph("The same clip under another label in a later release; the 20 most frequent.")
    return Section("Label changes", [said, table(top)])


def _videos(read: Read) -> Section | None:
    videos, listings = read("videos"), read("listings")
    if videos is None or listings is None:
        return None
    states = videos.group_by("status").len("clips").sort("clips", descending=True)
    rot = link_rot(listings, videos, by=("release", "split"))
    examples = videos.filter(~pl.col("status").is_in(["ok", "missing"])).select(
        "sample_id", "status", "frames", "header_frames", "message"
    )
    return Section(
        "Videos",
        [
            paragraph("Every file was decoded to its end; a header is never believed."),
            table(states, "Clips by state"),
            table(rot, "Link rot by release and split"),
            table(examples.sort("status", "sample_id").head(20), "Some that are not plainly ok"),
        ],
    )
