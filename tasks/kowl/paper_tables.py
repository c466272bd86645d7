"""The paper's Tables 1 and 2 beside ours, with the reason for each difference.

Enters: counts per increment and split (`count_increments`), the classes and the sizes of the lists
that were read. Leaves: one frame for each of the two tables.
"""

from collections.abc import Mapping
from typing import cast

import polars as pl

RELEASES = ("kinetics400", "kinetics600", "kinetics700_2020")
STEPS = 5
INCREMENTS = 1 + STEPS * (len(RELEASES) - 1)
LEAST_CLASSES = 700
"""Fewer are a part of Kinetics, which nobody compares with the paper."""
NOVEL_CLASSES = (0, 46, 46, 46, 46, 43, 17, 17, 17, 17, 14)
KNOWN_CLASSES = tuple(409 + sum(NOVEL_CLASSES[:n]) for n in range(INCREMENTS))
# Split -> (known, novel) samples of each increment from 0.
TABLE_2: dict[str, tuple[tuple[int, int], ...]] = {
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
# Rows of the lists that the authors had, and how many of K600's had no features.
LISTED = {
    ("kinetics400", "train"): 219_782,
    ("kinetics400", "validate"): 18_035,
    ("kinetics400", "test"): 35_357,
    ("kinetics600", "train"): 371_354,
    ("kinetics600", "validate"): 28_318,
    ("kinetics600", "test"): 56_618,
    ("kinetics700_2020", "train"): 544_823,
    ("kinetics700_2020", "validate"): 34_178,
    ("kinetics700_2020", "test"): 67_722,
}
WITHOUT_FEATURES = {"validate": 13_626, "test": 25_521}
# The paper and the lists call our split `valid` so.
LISTED_AS = {"valid": "validate"}
Sizes = Mapping[tuple[str, str], int]


def beside_paper(
    counts: pl.DataFrame, classes: pl.DataFrame, listed: Sizes
) -> dict[str, pl.DataFrame] | None:
    """Both tables by name, or None where releases and increments are not those of the paper.

    `listed`: rows of the list of each (release, split).
    """
    releases = {release for release, _ in listed}
    largest = counts.select((pl.col("known_classes") + pl.col("novel_classes")).max()).item()
    alike = releases == set(RELEASES) and counts["increment"].n_unique() == INCREMENTS
    if not alike or largest < LEAST_CLASSES:
        return None
    ours = {
        (LISTED_AS.get(split, split), increment): (known_classes, novel_classes, known, novel)
        for increment, split, known_classes, novel_classes, known, novel in counts.select(
            *("increment", "split", "known_classes", "novel_classes"),
            *("known_samples", "novel_samples"),
        ).iter_rows()
    }
    general = _options(counts, classes)
    table_1 = []
    for split in ("train", "test"):
        # From increment 1 on Table 1 adds validation to test.
        for n in range(INCREMENTS):
            parts = ("validate", "test") if split == "test" and n else (split,)
            paper = [sum(TABLE_2[part][n][role] for part in parts) for role in (0, 1)]
            reason = _reason(parts, n, listed)
            if (split, n) == ("test", 0):
                paper[1] = 0
                reason += "; Table 1 leaves out the novel sample of Table 2"
            mine = _added([ours[part, n] for part in parts if (part, n) in ours])
            printed = (KNOWN_CLASSES[n], NOVEL_CLASSES[n])
            table_1.append((split, n, mine, (*printed, *paper), reason))
    table_2 = []
    for split, rows in TABLE_2.items():
        for n, samples in enumerate(rows):
            printed = (KNOWN_CLASSES[n], NOVEL_CLASSES[n] or int(split != "train"))
            if not any(samples):
                printed = (0, 0)
            mine = ours.get((split, n), (0, 0, 0, 0))
            table_2.append((split, n, mine, (*printed, *samples), _reason((split,), n, listed)))
    return {
        "Table 1": _frame(table_1, general),
        "Table 2": _frame(table_2, general),
    }


def _added(parts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Samples added up; the classes of an increment are the same in all its splits."""
    if not parts:
        return 0, 0, 0, 0
    return (*parts[0][:2], sum(part[2] for part in parts), sum(part[3] for part in parts))


def _options(counts: pl.DataFrame, classes: pl.DataFrame) -> str | None:
    """What was chosen otherwise than Table 1 shows it, so that no increment can agree."""
    per_increment = dict(counts.select("increment", "novel_classes").unique().iter_rows())
    if [per_increment[n] for n in range(INCREMENTS)] != list(NOVEL_CLASSES):
        return "other classes per increment: group size, renames or lists are not those of Table 1"
    first, last = (
        cast(float, classes.filter(pl.col("increment_introduced") == n)["train_samples"].mean())
        for n in (1, STEPS)
    )
    if first > last:
        return "novel classes come most frequent first, in Table 1 least frequent first"
    return None


def _reason(splits: tuple[str, ...], increment: int, listed: Sizes) -> str:
    """What is known of the lists behind these samples."""
    release = RELEASES[-(-increment // STEPS)]
    reasons = []
    for split in splits:
        mine, theirs = listed.get((release, split), 0), LISTED[release, split]
        if (release, split) == ("kinetics700_2020", "test"):
            continue
        if mine != theirs:
            reasons.append(f"{split} list of {mine:,} clips, theirs {theirs:,}")
        if increment == 0:
            lost = theirs - sum(TABLE_2[split][0])
            reasons.append(f"{lost:,} of theirs had no features and were dropped")
        elif release == "kinetics600" and split != "train":
            lost = WITHOUT_FEATURES[split]
            reasons.append(f"{lost:,} of their {split} clips had no features and were dropped")
    if splits == ("test",) and release == "kinetics700_2020":
        return "the test list has no labels"
    if increment and listed["kinetics400", "train"] < LISTED["kinetics400", "train"]:
        reasons.append("clips that our K400 list lacks count as new")
    if increment and (release == "kinetics700_2020" or splits == ("train",)):
        reasons.append("they dropped clips without features")
    return "; ".join(reasons)


def _frame(rows: list[tuple], general: str | None) -> pl.DataFrame:
    lines = []
    for split, increment, mine, paper, reason in rows:
        total = sum(paper[2:])
        more = round((sum(mine[2:]) / total - 1) * 100, 1) if total else None
        classes = [] if mine[:2] == paper[:2] or not sum(mine[2:]) else _classes(split, increment)
        if general and increment:
            why = "; ".join([general, reason])
        elif mine[2:] != paper[2:]:
            why = "; ".join([reason, *classes])
        else:
            why = "; ".join(classes) or "equal"
        pairs = [value for pair in zip(mine, paper, strict=True) for value in pair]
        lines.append((split, increment, *pairs, more, why))
    names = ("known_classes", "novel_classes", "known_samples", "novel_samples")
    columns = [column for name in names for column in (name, f"paper_{name}")]
    return pl.DataFrame(
        lines,
        schema={
            "split": pl.String,
            "increment": pl.Int32,
            **dict.fromkeys(columns, pl.Int64),
            "ours_more_percent": pl.Float64,
            "reason": pl.String,
        },
        orient="row",
    )


def _classes(split: str, increment: int) -> list[str]:
    if increment == 0 and split != "train":
        return ["the paper counts a label that train lacks as a novel class"]
    return []
