"""How a list changed between two snapshots: Kinetics lists shrink and change without notice.

In: rows of two reads of a list, or of a whole release (`tasks.kowl.lists.ROWS`). Out: one row per
change of a clip (added, removed, relabelled, moved to another split) and the counts.
"""

import re
from pathlib import Path
from typing import NamedTuple

import polars as pl

from schemas.errors import SourceError
from schemas.kowl import LIST_SPLITS, Split
from tasks.kowl.lists import KEY, SPLIT_SPELLINGS, read_list

LIST_FILE = re.compile(r"(?:train|val|test)[^/]*\.csv(\.gz)?$", re.IGNORECASE)
CHANGES = ("added", "removed", "relabelled", "moved")


class Drift(NamedTuple):
    """`rows`: key, change, label_before/_after, split_before/_after. A clip may change twice.

    `summary`: one row with clips before, after, unchanged and one count per change.
    """

    rows: pl.DataFrame
    summary: pl.DataFrame


def compare_snapshots(before: pl.DataFrame, after: pl.DataFrame) -> Drift:
    """Both must hold each clip once, as `read_list` and `read_release` give them."""
    sides = [
        rows.select(
            *KEY,
            pl.lit(True).alias(f"in_{side}"),
            pl.col("label").alias(f"label_{side}"),
            pl.col("split").alias(f"split_{side}"),
        )
        for side, rows in (("before", before), ("after", after))
    ]
    both = sides[0].join(sides[1], on=KEY, how="full", coalesce=True, validate="1:1")
    in_both = pl.col("in_before") & pl.col("in_after")
    conditions = (
        pl.col("in_before").is_null(),
        pl.col("in_after").is_null(),
        in_both & pl.col("label_before").ne_missing(pl.col("label_after")),
        in_both & pl.col("split_before").ne_missing(pl.col("split_after")),
    )
    kind = pl.Enum(CHANGES)
    rows = pl.concat(
        both.filter(condition).with_columns(pl.lit(change, kind).alias("change"))
        for change, condition in zip(CHANGES, conditions, strict=True)
    ).sort(*KEY, "change")
    changed = pl.any_horizontal(condition.fill_null(False) for condition in conditions)
    return Drift(
        rows=rows.select(
            *KEY,
            pl.col("change").cast(pl.String),
            "label_before",
            "label_after",
            "split_before",
            "split_after",
        ),
        summary=both.select(
            pl.lit(before.height).alias("before"),
            pl.lit(after.height).alias("after"),
            (~changed).sum().alias("unchanged"),
            *(
                condition.fill_null(False).sum().alias(change)
                for change, condition in zip(CHANGES, conditions, strict=True)
            ),
        ).cast(pl.Int64),
    )


def compare_lists(before: Path, after: Path, split: Split | None = None) -> Drift:
    """Two files of one list, or two folders with the lists of one release: there clips can move.

    Without a split column the split is read off the file's name.
    """
    return compare_snapshots(*(_rows(path, split) for path in (before, after)))


def _rows(path: Path, split: Split | None) -> pl.DataFrame:
    if not path.is_dir():
        return _read(path, split)
    files = [file for file in sorted(path.iterdir()) if LIST_FILE.search(file.name)]
    if not files:
        raise SourceError(f"{path} has no list; expected files such as train.csv or val.csv.gz")
    rank = pl.col("split").cast(pl.Enum(LIST_SPLITS))
    rows = pl.concat(_read(file, split) for file in files).sort(*KEY, rank)
    return rows.unique(KEY, keep="first", maintain_order=True)


def _read(path: Path, split: Split | None) -> pl.DataFrame:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot read the list {path}: {error.strerror}") from error
    spelled = [word for word in SPLIT_SPELLINGS if word in path.name.lower().split(".")[0]]
    list_split = split or (SPLIT_SPELLINGS[max(spelled, key=len)] if spelled else None)
    return read_list(data, name=path.name, release="snapshot", split=list_split).rows
