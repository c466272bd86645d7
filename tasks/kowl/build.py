"""The stages that turn Kinetics lists into KOWL-718's tables: read, unify, cut into increments.

Enters: list files of each release. Leaves: listings, clips, labels, label changes, increments,
classes, and the clips that are in no increment with the reason (KOWL-718 sections 3 and 4).
"""

import re
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

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
    Release,
    UnifySettings,
)
from storage.pieces import Part
from storage.raw import RawSource, open_raw
from tasks.increments import assign_increments
from tasks.kowl.lists import KEY, SPLIT_SPELLINGS, read_list
from tasks.kowl.policies import KINETICS
from tasks.kowl.unify import unify, validate_as_test
from tasks.stage import Produced, Reject, Shard, stage

# kinetics600_train.csv.gz, kinetics-600_val.csv, kinetics700_2020/validate.csv, ...
LIST_NAME = re.compile(
    r"kinetics[-_]?(?P<release>\w+?)[-_/](?P<split>train|validate|validation|val|test)"
    r"(?:[-_]\w*|\d*)\.csv(\.gz)?"
)


class IncrementChoice(IncrementSettings):
    """The protocol, and what counts as test."""

    validate_as_test: bool = False


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
    found = [
        release.model_copy(update={"files": {s: tuple(n) for s, n in files[release.name].items()}})
        for release in KINETICS
        if release.name in files
    ]
    if not found:
        raise SourceError(
            f"no lists of {', '.join(release.name for release in KINETICS)} in {source.root}; "
            "expected names such as kinetics600_train.csv.gz, or declare releases in --config"
        )
    for name in sorted(files.keys() - {release.name for release in found}):
        some = next(iter(files[name].values()))[0]
        print(f"{some} is not read: declare its release {name} in --config", file=sys.stderr)
    return found


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
        found = read_list(
            source.read(file.name, limit=1 << 30),
            name=file.name,
            release=about["release"],
            split=about["split"],
        )
        day = pl.lit(about["snapshot_date"]).cast(pl.String).str.to_date().alias("snapshot_date")
        rows.append(LISTINGS.conform(found.rows.with_columns(day)))
        rejects += [Reject(*row) for row in found.rejects.iter_rows()]
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
    found = unify(once, shard.about, settings)
    tables = {"clips": found.clips, "labels": found.labels, "label_changes": found.label_changes}
    return Produced(tables, found.clips.height)


def plan_increments(clips: tuple[Part, ...], releases: Sequence[Release]) -> list[Shard]:
    """One shard: the unified table, and the releases from oldest to newest."""
    return [Shard("all", parts=clips, about=[release.name for release in releases])]


@stage(writes=(INCREMENTS, CLASSES, UNASSIGNED), version=1)
def cut_increments(shard: Shard, settings: IncrementChoice) -> Produced:
    """Put every labelled clip into its increment."""
    clips = shard.read("clips")
    if settings.validate_as_test:
        clips = validate_as_test(clips)
    protocol = IncrementSettings(**settings.model_dump(exclude={"validate_as_test"}))
    found = assign_increments(clips, protocol, releases=shard.about)
    increments = found.increments.select(INCREMENTS.polars_schema.names())
    tables = {"increments": increments, "classes": found.classes, "unassigned": found.unassigned}
    return Produced(tables, increments.height)
