"""The stages around the tracks: official lists to `members`, members and shapes to `splits`.

Enters: a folder of lists, the shapes that were read. Leaves: MEMBERS and SPLITS (3DOS section 3).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from schemas.threedos import MEMBERS, SPLITS, ListSettings, TrackSettings
from storage.pieces import Part
from storage.raw import RawSource, open_raw
from tasks.stage import Produced, Reject, Shard, stage
from tasks.threedos.lists import DATASETS, find_lists, read_lists
from tasks.threedos.tracks import Track, build_possible


def plan_members(source: RawSource, settings: ListSettings) -> list[Shard]:
    """One shard: every official list in the folder, and that of missing models if it is named."""
    files = {file.name: file for file in source.files()}
    named = [*find_lists(files).values(), settings.missing_models]
    wanted = sorted({name for name in named if name in files})
    return [Shard("all", files=tuple(files[name] for name in wanted), source=source.root)]


@stage(writes=(MEMBERS,), version=1)
def read_members(shard: Shard, settings: ListSettings) -> Produced:
    """Read the official lists: every shape, its class and its official split."""
    found = read_lists(open_raw(Path(shard.source or "")), settings)
    members = found.members.select(MEMBERS.polars_schema.names())
    rejects = [Reject(*row) for row in found.rejects.iter_rows()]
    return Produced({"members": members}, members.height + len(rejects), rejects)


def plan_splits(parts: tuple[Part, ...], tracks: Sequence[Track]) -> list[Shard]:
    """One shard per track, so that a new track costs its own rows only."""
    return [Shard(track.name, parts=parts, about=track.model_dump(mode="json")) for track in tracks]


@stage(writes=(SPLITS,), version=1)
def split_track(shard: Shard, settings: TrackSettings) -> Produced:
    """Put the shapes of one track into train, valid and test, known or unknown."""
    track = Track.model_validate(shard.about)
    splits, reasons = build_possible(all_members(shard), [track], settings)
    for name, reason in reasons.items():
        print(f"  track {name} left out: {reason}", file=sys.stderr)
    return Produced({"splits": splits}, splits.height)


def all_members(shard: Shard) -> pl.DataFrame:
    """Listed shapes, and those read of data sets whose lists do not name them.

    The rows of ScanObjectNN's h5 files cannot be matched with its lists: where they were read they
    take the lists' place.
    """
    columns = ["source", "shape_id", "class", "split"]
    tables = {part.table for part in shard.parts}
    listed = read = pl.DataFrame(schema=dict.fromkeys([*columns, "class_name"], pl.String))
    if "members" in tables:
        listed = shard.read("members").select([*columns, "class_name"])
    if "shapes" in tables:
        read = shard.read("shapes", columns).with_columns(pl.col("source").replace(DATASETS))
        read = read.with_columns(pl.lit(None, pl.String).alias("class_name"))
    new = read.join(listed, on="shape_id", how="anti")
    replaced = new["source"].unique().implode()
    return pl.concat([listed.filter(~pl.col("source").is_in(replaced)), new.select(listed.columns)])
