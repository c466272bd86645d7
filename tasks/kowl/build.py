"""The stages that turn Kinetics lists into KOWL-718's tables: read, unify, cut into increments.

Enters: list files of each release. Leaves: listings, clips, labels, label changes, samples, splits,
increments, classes, and the clips that are in no increment with the reason (KOWL-718 sections 3
and 4). Lists say `validate`; from the increments on the split is called `valid`.
"""

import logging
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl

from schemas.config import Settings
from schemas.errors import SourceError
from schemas.increments import IncrementSettings
from schemas.kowl import (
    CLASSES,
    CLIPS,
    INCREMENTS,
    LABEL_CHANGES,
    LABELS,
    LISTINGS,
    UNASSIGNED,
    UNLISTED_VIDEOS,
    USABLE,
    VIDEOS,
    IncrementChoice,
    Release,
    UnifySettings,
)
from schemas.tables import SAMPLES, SPLITS
from storage.pieces import Part
from storage.raw import RawSource, open_raw
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.kowl.increments import assign_increments
from tasks.kowl.lists import KEY, SPLIT_SPELLINGS, read_list
from tasks.kowl.policies import KINETICS
from tasks.kowl.unify import unify, validate_as_test

log = logging.getLogger(__name__)

# kinetics600_train.csv.gz, kinetics-600_val.csv, kinetics700_2020/validate.csv, ...
LIST_NAME = re.compile(
    r"kinetics[-_]?(?P<release>\w+?)[-_/](?P<split>train|validate|validation|val|test)"
    r"(?:[-_]\w*|\d*)\.csv(\.gz)?"
)


def find_releases(source: RawSource, declared: Sequence[Release]) -> list[Release]:
    """The declared releases, else those of Kinetics whose lists are found by name; oldest first."""
    if declared:
        return sorted(declared, key=lambda release: release.order)
    files: dict[str, dict[str, list[str]]] = {}
    for file in source.files(digests=False):
        match = LIST_NAME.fullmatch(file.name)
        if match:
            split = SPLIT_SPELLINGS[match["split"]]
            files.setdefault(f"kinetics{match['release']}", {}).setdefault(split, []).append(
                file.name
            )
    releases = [
        release.model_copy(update={"files": {s: tuple(n) for s, n in files[release.name].items()}})
        for release in KINETICS
        if release.name in files
    ]
    if not releases:
        raise SourceError(
            f"no lists of {', '.join(release.name for release in KINETICS)} in {source.root}; "
            "expected names such as kinetics600_train.csv.gz, or declare releases in --config"
        )
    for name in sorted(files.keys() - {release.name for release in releases}):
        some = next(iter(files[name].values()))[0]
        log.warning(f"{some} is not read: declare its release {name} in --config")
    return releases


def plan_lists(
    source: RawSource, releases: Sequence[Release], snapshot_date: date | None = None
) -> list[Shard]:
    """One shard per release and split, so that a changed list costs its own reading.

    `snapshot_date` is that of releases which declare none.
    """
    files = {file.name: file for file in source.files()}
    shards = []
    for release in releases:
        for split, names in sorted(release.files.items()):
            missing = [name for name in names if name not in files]
            if missing:
                raise SourceError(f"release {release.name}: {source.root} has no file {missing[0]}")
            taken = release.snapshot_date or snapshot_date
            day = taken.isoformat() if taken else None
            shards.append(
                Shard(
                    f"{release.name}/{split}",
                    files=tuple(files[name] for name in names),
                    source=source.root,
                    about={"release": release.name, "split": split, "snapshot_date": day},
                )
            )
    return shards


@stage(writes=(LISTINGS,), version=1)
def read_lists(shard: Shard, settings: Settings) -> Produced:
    """Read the list of one split of one release."""
    source = open_raw(Path(shard.source or ""))
    about = shard.about
    rows, rejects = [LISTINGS.empty()], []
    for file in shard.files:
        parsed = read_list(
            source.read(file.name, limit=1 << 30),
            name=file.name,
            release=about["release"],
            split=about["split"],
        )
        day = pl.lit(about["snapshot_date"]).cast(pl.String).str.to_date().alias("snapshot_date")
        rows.append(LISTINGS.conform(parsed.rows.with_columns(day)))
        rejects += [Reject(*row) for row in parsed.rejects.iter_rows()]
    listed = pl.concat(rows)
    return Produced({"listings": listed}, listed.height + len(rejects), rejects)


def plan_unify(listings: tuple[Part, ...], releases: Sequence[Release]) -> list[Shard]:
    """One shard: all lists, and the releases from oldest to newest."""
    return [Shard("all", parts=listings, about=[release.name for release in releases])]


@stage(writes=(CLIPS, LABELS, LABEL_CHANGES), version=1)
def unify_releases(shard: Shard, settings: UnifySettings) -> Produced:
    """Join the releases to one row per clip, with one label and one split each.

    A clip that a release lists in two splits keeps the first of train, validate, test.
    """
    columns = ["release", "split", *KEY, "label"]
    rank = pl.col("split").replace_strict({"train": 0, "validate": 1, "test": 2})
    listed = shard.read("listings", columns).sort("release", *KEY, rank)
    once = listed.unique(["release", *KEY], keep="first", maintain_order=True)
    union = unify(once, shard.about, settings)
    tables = {"clips": union.clips, "labels": union.labels, "label_changes": union.label_changes}
    return Produced(tables, union.clips.height)


def define_protocol(
    choice: IncrementChoice, unified: UnifySettings, releases: Sequence[Release]
) -> tuple[str, dict[str, Any]]:
    """Name and definition of the increments; all that decides them is in both."""
    names = [release.name for release in releases]
    rules = unified.model_dump(mode="json")
    unusual: dict[str, Any] = {}
    if names != [release.name for release in KINETICS]:
        unusual["releases"] = names
    if unified != UnifySettings():
        unusual["unify"] = rules
    definition = {**choice.model_dump(mode="json"), "releases": names, "unify": rules}
    return choice.name(unusual), definition


def plan_increments(
    clips: tuple[Part, ...], releases: Sequence[Release], protocol: str
) -> list[Shard]:
    """One shard: the unified table, and the releases from oldest to newest."""
    names = [release.name for release in releases]
    return [Shard(protocol, parts=clips, about={"protocol": protocol, "releases": names})]


@stage(writes=(SPLITS, INCREMENTS, CLASSES, UNASSIGNED), version=2)
def cut_increments(shard: Shard, settings: IncrementChoice) -> Produced:
    """Put every labelled clip into its increment."""
    clips = shard.read("clips")
    if settings.validate_as_test:
        clips = validate_as_test(clips)
    rules = IncrementSettings(**settings.model_dump(exclude={"validate_as_test"}))
    assignment = assign_increments(clips, rules, releases=shard.about["releases"])
    protocol = pl.lit(shard.about["protocol"]).alias("protocol")
    split = pl.col("split").replace("validate", "valid")
    increments = assignment.increments.with_columns(protocol, split)
    tables = {
        "splits": _splits(increments, assignment.classes),
        "increments": increments.select(INCREMENTS.polars_schema.names()),
        "classes": assignment.classes.with_columns(protocol),
        "unassigned": assignment.unassigned.with_columns(protocol, split),
    }
    return Produced(tables, increments.height)


def _splits(increments: pl.DataFrame, classes: pl.DataFrame) -> pl.DataFrame:
    """Labels count through the classes of training by increment of release, then by name."""
    numbers = classes.sort("increment_introduced", "label").select(
        "label", pl.int_range(pl.len(), dtype=pl.Int32).alias("number")
    )
    return increments.join(numbers, on="label", how="left").select(
        "protocol",
        "sample_id",
        pl.col("increment").alias("step"),
        pl.col("label").alias("class"),
        pl.col("number").alias("label"),
        "split",
        "role",
        pl.lit(None, pl.String).alias("subset"),
    )


def plan_samples(clips: tuple[Part, ...], videos: tuple[Part, ...]) -> list[Shard]:
    """One shard: the clips, and what is known of videos."""
    return [Shard("all", parts=clips + videos)]


@stage(writes=(SAMPLES,), version=1)
def list_samples(shard: Shard, settings: Settings) -> Produced:
    """Every clip, and every other video that features can be taken of.

    A sample without a usable video has no digest: no model sees anything of it.
    """
    usable = pl.col("status").is_in(USABLE)
    columns = ["file", "sha256", "status"]
    clips = shard.read("clips", ["sample_id", "youtube_id", "label"])
    others = pl.DataFrame(schema=SAMPLES.polars_schema)
    files = pl.DataFrame(schema=dict.fromkeys(["sample_id", *columns], pl.String))
    if any(part.table == VIDEOS.name for part in shard.parts):
        files = shard.read(VIDEOS.name, ["sample_id", *columns])
    if any(part.table == UNLISTED_VIDEOS.name for part in shard.parts):
        unlisted = shard.read(UNLISTED_VIDEOS.name, ["label", *columns]).filter(usable)
        videos = unlisted.with_columns(pl.lit(None, pl.String).alias("youtube_id"))
        others = videos.select(pl.col("file").alias("sample_id"), *_sample_columns())
    listed = clips.join(files.filter(usable), on="sample_id", how="left")
    samples = pl.concat([listed.select("sample_id", *_sample_columns()), others])
    return Produced({SAMPLES.name: samples.sort("sample_id")}, samples.height)


def _sample_columns() -> list[pl.Expr]:
    return [
        pl.col("label").alias("class"),
        pl.col("youtube_id").alias("sequence"),
        pl.lit(None, pl.Int32).alias("position"),
        pl.col("file").alias("source"),
        pl.col("sha256").alias("digest"),
        pl.lit("clip").alias("modality"),
    ]
