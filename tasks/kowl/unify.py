"""Releases of Kinetics become one table of clips (KOWL-718 section 3, docs/kowl.md 1 to 3).

In: list rows of all releases (`tasks.kowl.lists.ROWS`). Out: `Unified` = the outer join on
(youtube_id, time_start, time_end), with one label and one split chosen by named rules, and what
each release said in a long table.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import polars as pl

from schemas.errors import ConfigError, SourceError
from schemas.kowl import Rename, UnifySettings
from tasks.kowl.lists import KEY
from tasks.kowl.policies import RENAMES


class Unified(NamedTuple):
    """`clips`: sample_id, youtube_id, time_start, time_end, label, label_release, split, release.

    `listings`: sample_id, release, label, split, one row per clip and release that lists it.
    `labels`: release, label, clips. `label_changes`: clips labelled otherwise in two releases.
    """

    clips: pl.DataFrame
    listings: pl.DataFrame
    labels: pl.DataFrame
    label_changes: pl.DataFrame


def sample_id() -> pl.Expr:
    """The uid of KOWL-718: `{youtube_id}_{start:06}_{end:06}`."""
    youtube_id, *times = (pl.col(name) for name in KEY)
    padded = [time.cast(pl.String).str.zfill(6) for time in times]
    return pl.concat_str(youtube_id, *padded, separator="_").alias("sample_id")


def unify(
    rows: pl.DataFrame, order: Sequence[str], settings: UnifySettings | None = None
) -> Unified:
    """One row per clip; `order` names the releases from oldest to newest."""
    settings = settings or UnifySettings()
    unknown = set(rows["release"].unique()) - set(order)
    if unknown or len(set(order)) != len(order):
        raise ConfigError(
            f"unify: order of releases is {list(order)}, rows come also from {sorted(unknown)}; "
            "name each release once"
        )
    tables = RENAMES | settings.rename_tables
    missing = [name for name in settings.renames if name not in tables]
    if missing:
        raise ConfigError(f"unify: no rename table {missing}; there are {sorted(tables)}")
    rank = pl.Enum(list(order))
    listed = rows.select(sample_id(), *KEY, pl.col("release").cast(rank), "label", "split").sort(
        "sample_id", "release"
    )
    newest = pl.col("sample_id").ne_missing(pl.col("sample_id").shift(-1))
    oldest = pl.col("sample_id").ne_missing(pl.col("sample_id").shift(1))
    twice = listed.filter(~oldest & (pl.col("release") == pl.col("release").shift(1)))
    if twice.height:
        first = twice.row(0, named=True)
        raise SourceError(
            f"unify: {twice.height} clips stand twice in one release, the first is "
            f"{first['sample_id']} in {first['release']}; read releases with read_release"
        )
    owners = listed.filter(oldest if settings.split_rule == "first_come" else newest)
    labelled = listed.filter(pl.col("label").is_not_null())
    labels = labelled.filter(newest if settings.label_rule == "recent_first" else oldest).select(
        "sample_id", "label", label_release="release"
    )
    clips = owners.drop("label").join(
        labels, on="sample_id", how="left", maintain_order="left", validate="1:1"
    )
    for name in settings.renames:
        clips = clips.with_columns(_renamed(tables[name]))
    listed = listed.with_columns(pl.col("release").cast(pl.String))
    return Unified(
        clips=clips.select(
            "sample_id",
            *KEY,
            "label",
            pl.col("label_release").cast(pl.String),
            "split",
            pl.col("release").cast(pl.String),
        ),
        listings=listed.select("sample_id", "release", "label", "split"),
        labels=labelled.group_by("release", "label")
        .agg(pl.len().alias("clips"))
        .sort("release", "label")
        .with_columns(pl.col("release").cast(pl.String)),
        label_changes=_label_changes(labelled, order),
    )


def validate_as_test(clips: pl.DataFrame) -> pl.DataFrame:
    """As KOWL-718 uses K700-2020: validate is the test of a release without labelled test clips."""
    labelled_test = (pl.col("split") == "test") & pl.col("label").is_not_null()
    return clips.with_columns(
        pl.when((pl.col("split") == "validate") & ~labelled_test.any().over("release"))
        .then(pl.lit("test"))
        .otherwise("split")
        .alias("split")
    )


def _renamed(table: Sequence[Rename]) -> pl.Expr:
    label = pl.col("label")
    for release in dict.fromkeys(rename.release for rename in table):
        mapping = {r.old: r.new for r in table if r.release == release}
        renamed = label.replace(mapping)
        if release is not None:
            here = pl.col("label_release").cast(pl.String) == release
            renamed = pl.when(here).then(renamed).otherwise(label)
        label = renamed
    return label.alias("label")


def _label_changes(labelled: pl.DataFrame, order: Sequence[str]) -> pl.DataFrame:
    by_release = {
        name: labelled.filter(pl.col("release") == name).select("sample_id", "label")
        for name in order
    }
    return pl.concat(
        by_release[older]
        .join(by_release[newer], on="sample_id", suffix="_newer")
        .filter(pl.col("label") != pl.col("label_newer"))
        .group_by(label_older="label", label_newer="label_newer")
        .agg(pl.len().alias("clips"))
        .sort("clips", "label_older", "label_newer", descending=[True, False, False])
        .select(
            pl.lit(older).alias("older"),
            pl.lit(newer).alias("newer"),
            "label_older",
            "label_newer",
            "clips",
        )
        for older, newer in combinations(order, 2)
    )
