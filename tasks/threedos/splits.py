"""The stages around the tracks: official lists to `members`, members and shapes to `splits`.

Enters: a folder of lists, the shapes that were read. Leaves: `members` and `splits` (3DOS section
3). In `splits` a known shape has the name of its label as class, so that what a model predicts and
what is true are the same text.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from schemas.tables import SPLITS
from schemas.threedos import MEMBERS, ListSettings, TrackSettings
from storage.filehash import sha256_file
from storage.pieces import Part
from storage.raw import RawSource, open_raw
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.threedos.lists import (
    DATASETS,
    LISTED,
    find_lists,
    listed_datasets,
    missing_file,
    read_lists,
)
from tasks.threedos.tracks import Track, build_possible

log = logging.getLogger(__name__)

H5_ROW = r"^scanobjectnn/(training|test)/\d{5}$"


def plan_members(
    lists: RawSource | None, sources: Mapping[str, RawSource], settings: ListSettings
) -> list[Shard]:
    """One shard for the folder of lists, and one for each source that brings lists of its own.

    A data set that the folder lists is not listed again. The json files of sncore repeat what its
    h5 files say, so they count only in a folder of lists.
    """
    shards, datasets = [], set()
    if lists is not None:
        shards.append(_list_shard("all", lists, LISTED, settings))
        datasets = listed_datasets(find_lists(file.name for file in shards[0].files))
    for name, source in sorted(sources.items()):
        dataset = DATASETS.get(name, name)
        if name == "sncore" or dataset not in LISTED or dataset in datasets:
            continue
        shard = _list_shard(name, source, (dataset,), settings)
        if listed_datasets(find_lists((file.name for file in shard.files), (dataset,))):
            datasets.add(dataset)
            shards.append(shard)
    return shards


def _list_shard(
    name: str, source: RawSource, datasets: Sequence[str], settings: ListSettings
) -> Shard:
    """The official lists of those data sets, and that of missing models if it is named."""
    files = {file.name: file for file in source.files()}
    lists = find_lists(files, datasets)
    names = set(lists.values())
    outside = None
    if settings.missing_models and "shapenet" in listed_datasets(lists):
        path = missing_file(source, settings.missing_models)
        outside = path and sha256_file(path)
        names |= set() if path else {settings.missing_models}
    return Shard(
        name,
        files=tuple(files[file] for file in sorted(names)),
        source=source.root,
        about={"datasets": list(datasets), "missing_models": outside},
    )


@stage(writes=(MEMBERS,), version=2)
def read_members(shard: Shard, settings: ListSettings) -> Produced:
    """Read the official lists: every shape, its class and its official split."""
    lists = read_lists(open_raw(Path(shard.source or "")), settings, shard.about["datasets"])
    members = lists.members.select(MEMBERS.polars_schema.names())
    rejects = [Reject(*row) for row in lists.rejects.iter_rows()]
    return Produced({"members": members}, members.height + len(rejects), rejects)


def plan_splits(parts: tuple[Part, ...], tracks: Sequence[Track]) -> list[Shard]:
    """One shard per track, so that a new track costs its own rows only."""
    return [Shard(track.name, parts=parts, about=track.model_dump(mode="json")) for track in tracks]


@stage(writes=(SPLITS,), version=3)
def split_track(shard: Shard, settings: TrackSettings) -> Produced:
    """Put the shapes of one track into train, valid and test, known or novel."""
    track = Track.model_validate(shard.about)
    splits, reasons = build_possible(all_members(shard), [track], settings)
    for name, reason in reasons.items():
        log.warning(f"  track {name} left out: {reason}")
    return Produced({"splits": named_by_label(splits)}, splits.height)


def named_by_label(splits: pl.DataFrame) -> pl.DataFrame:
    """Rows of one track where the class of known shapes is all training classes of their label.

    A label without training shapes keeps the classes of its shapes.
    """
    names = (
        splits.filter(split="train", role="known")
        .group_by("label")
        .agg(pl.col("class").unique().sort().str.join("+").alias("name"))
    )
    rows = splits.join(names, on="label", how="left", maintain_order="left")
    return rows.with_columns(pl.coalesce("name", "class").alias("class")).drop("name")


def all_members(shard: Shard) -> pl.DataFrame:
    """Listed shapes, and those read of data sets whose lists do not name them.

    The rows of ScanObjectNN's h5 files cannot be matched with its lists: where they were read they
    take the lists' place.
    """
    columns = ["source", "sample_id", "class", "split"]
    tables = {part.table for part in shard.parts}
    listed = read = pl.DataFrame(schema=dict.fromkeys([*columns, "class_name"], pl.String))
    if "members" in tables:
        listed = shard.read("members").select([*columns, "class_name"])
    if "shapes" in tables:
        read = shard.read("shapes", columns).with_columns(pl.col("source").replace(DATASETS))
        read = read.with_columns(pl.lit(None, pl.String).alias("class_name"))
    new = read.join(listed, on="sample_id", how="anti")
    if new["sample_id"].str.contains(H5_ROW).any():
        listed = listed.filter(pl.col("source") != "scanobjectnn")
    return pl.concat([listed, new.select(listed.columns)])
