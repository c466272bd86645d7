"""The official targets.csv in, (frame_id, novel_fraction, novel_pixels) and rejected rows out.

`novel_percent` of the file is a fraction 0..1 of the full 256x256 image (item bar included), hence
always a whole number of pixels. `label_drift` compares two versions frame by frame: labels were
replaced in place once (2022-04-13 to 2022-06-02), so a table must say which version it holds.
"""

from pathlib import Path

import polars as pl

from schemas.errors import SourceError
from schemas.table import REJECTED

HEADER = "id,novel_percent"
PIXELS = 256 * 256
MAX_BYTES = 256 * 1024**2
NOVEL_FROM = 0.01  # a frame shows its novelty from this fraction on, inclusive

TARGETS = pl.Schema({"frame_id": pl.String, "novel_fraction": pl.Float64, "novel_pixels": pl.Int32})

_FRAME_ID = r"^[A-Za-z0-9_]+/(0|[1-9][0-9]*)/(0|[1-9][0-9]*)$"


def read_targets(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Good rows sorted by frame_id, and (record, rule, message) of each bad one; none vanishes."""
    lines = _lines(path)
    fields = pl.col("line").str.split(",")
    rows = (
        pl.DataFrame({"line": lines[1:]}, schema={"line": pl.String})
        .with_row_index("number", offset=2)
        .with_columns(
            fields.list.len().alias("fields"),
            fields.list.get(0).alias("frame_id"),
            fields.list.get(1, null_on_oob=True)
            .cast(pl.Float64, strict=False)
            .alias("novel_fraction"),
        )
        .with_columns((pl.col("novel_fraction") * PIXELS).alias("pixels"))
    )
    rules = {
        "two_fields": pl.col("fields") == 2,
        "frame_id_form": pl.col("frame_id").str.contains(_FRAME_ID),
        "fraction_number": pl.col("novel_fraction").is_finite().fill_null(False),
        "fraction_range": pl.col("novel_fraction").is_between(0, 1),
        "whole_pixels": pl.col("pixels") == pl.col("pixels").round(),
        "unique_frame_id": pl.col("frame_id").is_first_distinct(),
    }
    expected = {
        "two_fields": f"two fields, {HEADER}",
        "frame_id_form": "an id of the form class/episode/frame, integers without leading zero",
        "fraction_number": "a finite number",
        "fraction_range": "a fraction from 0 to 1",
        "whole_pixels": f"a multiple of 1/{PIXELS} (was the file rounded?)",
        "unique_frame_id": "each id once",
    }
    rows = rows.with_columns(
        pl.coalesce(pl.when(~holds).then(pl.lit(rule)) for rule, holds in rules.items()).alias(
            "rule"
        )
    )
    rejected = rows.filter(pl.col("rule").is_not_null()).select(
        pl.when(pl.col("frame_id").str.contains(_FRAME_ID))
        .then(pl.col("frame_id"))
        .otherwise(pl.format("line {}", "number"))
        .alias("record"),
        "rule",
        pl.format(
            "line {} of {} reads '{}', expected {}",
            "number",
            pl.lit(path.name),
            pl.col("line").str.slice(0, 80),
            pl.col("rule").replace_strict(expected, return_dtype=pl.String),
        ).alias("message"),
    )
    good = rows.filter(pl.col("rule").is_null()).select(
        "frame_id", "novel_fraction", pl.col("pixels").alias("novel_pixels")
    )
    return good.cast(TARGETS).sort("frame_id"), rejected.cast(REJECTED)


def label_drift(
    old: pl.DataFrame, new: pl.DataFrame, novel_from: float = NOVEL_FROM
) -> pl.DataFrame:
    """Every frame of either version: change is same, changed, added or removed.

    `crossed` says that the frame went over the `novel_from` line, in either direction; it is false
    for frames that only one version has.
    """
    versions = [
        version.select("frame_id", pl.col("novel_fraction").alias(name))
        for name, version in (("old_fraction", old), ("new_fraction", new))
    ]
    before, after = pl.col("old_fraction"), pl.col("new_fraction")
    return (
        versions[0]
        .join(versions[1], on="frame_id", how="full", coalesce=True)
        .select(
            "frame_id",
            pl.col("frame_id").str.split("/").list.first().alias("class"),
            "old_fraction",
            "new_fraction",
            pl.when(before.is_null())
            .then(pl.lit("added"))
            .when(after.is_null())
            .then(pl.lit("removed"))
            .when(before != after)
            .then(pl.lit("changed"))
            .otherwise(pl.lit("same"))
            .alias("change"),
            ((before >= novel_from) != (after >= novel_from)).fill_null(False).alias("crossed"),
        )
        .sort("frame_id")
    )


def drift_by_class(drift: pl.DataFrame) -> pl.DataFrame:
    """Frame counts of `label_drift` per class: frames, changed, crossed, added, removed."""
    change = pl.col("change")
    return (
        drift.group_by("class")
        .agg(
            pl.len().alias("frames"),
            *((change == kind).sum().alias(kind) for kind in ("changed", "added", "removed")),
            pl.col("crossed").sum(),
        )
        .select("class", "frames", "changed", "crossed", "added", "removed")
        .sort("class")
    )


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise SourceError(f"targets file {path} is missing; expected a CSV with header {HEADER}")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SourceError(f"targets file {path} has {size} bytes, expected at most {MAX_BYTES}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"targets file {path} is not UTF-8 text ({error})") from error
    lines = text.split("\n")  # not splitlines: only a line feed ends a CSV row
    if lines[-1] == "":
        lines.pop()
    if not lines or lines[0] != HEADER:
        header = lines[0][:80] if lines else "nothing"
        raise SourceError(f"targets file {path} begins with {header!r}, expected header {HEADER!r}")
    return lines
