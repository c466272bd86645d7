"""Subsets of classes and their trials: each member held out, or other sets novel (rules 1-3, 17).

Enters: the table IMAGES, subsets: the built-in ones of `subsets.yaml`, a user's YAML of the same
form, and one of all classes for each data set. Leaves: SPLITS; the protocol of a trial is
`<subset>/<held-out member>`.

The label of a member is its place in the subset; labels above the held-out one move down by one.
Images of the held-out member are novel in test (and valid), and are not in train at all. A
`KnownSet` holds out nothing: its trials are `known-<set>/<novel set>`.
"""

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
from pydantic import BeforeValidator, Field

from schemas.config import Settings, make_config, read_config_file
from schemas.errors import ConfigError, SourceError
from schemas.semantic import TrialSettings
from schemas.tables import SPLITS
from storage.pieces import Part
from tasks.engine.stage import Produced, Shard, stage
from tasks.evaluation.protocols import plan_protocols
from tasks.semantic.records import CIFAR_CLASSES, STL_CLASSES

log = logging.getLogger(__name__)

BUILT_IN = Path(__file__).with_name("subsets.yaml")
CLASS_ORDER = {"cifar10": CIFAR_CLASSES, "stl10": STL_CLASSES}
KNOWN = "known-"
"""Before the name of a set whose classes are all known: that of its trials."""
PAPER_VALIDATION = r"(^|/)data_batch_5(\.bin)?$"


def _members(value: Any) -> Any:
    """A list of classes, or class: name lines."""
    if isinstance(value, list | tuple):
        value = {item: item for item in value} if len(set(map(str, value))) == len(value) else None
    if not isinstance(value, dict):
        raise ValueError("expected a list of different classes, or `class: name` lines")
    for word in (*value, *value.values()):
        if not isinstance(word, str):
            raise ValueError(f"member {word!r} is no text; put it in quotes")  # YAML's `no`, 007
    if len(set(value.values())) < len(value):
        raise ValueError("two members have the same name")
    return value


class Subset(Settings):
    """Classes of one data set that are held out in turn."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.+-]*$")
    """Name used in every table."""
    description: str = ""
    """What it is."""
    dataset: str
    """Data set that its images come from."""
    partial: bool = False
    """Members without images are left out; else they are an error."""
    members: Annotated[dict[str, str], BeforeValidator(_members)] = Field(min_length=2)
    """Class (or wnid) to the name used for the trial, in the order of the labels."""

    @property
    def trials(self) -> tuple[str, ...]:
        """What is novel in turn."""
        return tuple(self.members.values())

    def datasets(self, trial: str) -> tuple[str, ...]:
        """Data sets that the pictures of a trial come from."""
        return (self.dataset,)


class KnownSet(Subset):
    """Classes that are all known, beside data sets that are novel as a whole in turn."""

    novel: tuple[str, ...]
    """Those data sets."""

    @property
    def trials(self) -> tuple[str, ...]:
        return self.novel

    def datasets(self, trial: str) -> tuple[str, ...]:
        return self.dataset, trial


class _SubsetFile(Settings):
    subsets: tuple[Subset, ...]


def read_subsets(path: Path) -> tuple[Subset, ...]:
    """The subsets that a YAML file declares."""
    try:
        return make_config(_SubsetFile, read_config_file(path)).subsets
    except ConfigError as error:
        raise ConfigError(f"subsets of {path}: {error}") from None


def declared_subsets(path: Path | None) -> tuple[Subset, ...]:
    """Built-in subsets and those of a user's file, which take the place of one of the same name."""
    by_name = {subset.name: subset for subset in read_subsets(BUILT_IN)}
    if path is not None:
        by_name |= {subset.name: subset for subset in read_subsets(path)}
    return tuple(by_name.values())


def imagenet_names(declared: Sequence[Subset]) -> dict[str, str]:
    """Members of ImageNet's subsets with the names that the subsets give them."""
    return {
        member: name
        for subset in declared
        if subset.dataset == "imagenet"
        for member, name in subset.members.items()
    }


def resolve_subsets(
    declared: Sequence[Subset],
    images: pl.DataFrame,
    choice: Sequence[str] = (),
    known: str | None = None,
    novel: Sequence[str] = (),
) -> list[Subset]:
    """The subsets that have images, members as classes of the table; ConfigError names mistakes.

    Each data set is also a subset of all its classes. That one is taken if it is chosen by name, or
    if nothing is chosen and no declared subset is of the same data set. `known` names a subset that
    is known as a whole, against the `novel` data sets; then only chosen subsets are held out too.
    """
    datasets = images["dataset"].unique().sort().to_list()
    by_name = {name: _all_classes(name, images) for name in datasets}
    by_name |= {subset.name: subset for subset in declared}
    if unknown := [name for name in choice if name not in by_name]:
        raise ConfigError(f"subset {unknown[0]!r} is unknown; there are {', '.join(by_name)}")
    declared_datasets = {subset.dataset for subset in declared}
    default = {subset.name for subset in declared if subset.dataset in datasets}
    default |= {name for name in datasets if name not in declared_datasets}
    if known is not None:
        if known not in by_name:
            raise ConfigError(f"known set {known!r} is unknown; there are {', '.join(by_name)}")
        if by_name[known].dataset in novel:
            raise ConfigError(f"{known} is of {by_name[known].dataset}, which cannot be novel too")
        subset = by_name[known].model_copy(update={"name": f"{KNOWN}{known}"})
        by_name[subset.name] = KnownSet.model_construct(**dict(subset), novel=tuple(novel))
        choice = [*choice, subset.name]
    subsets = []
    for name, subset in by_name.items():
        if name in (choice or default) and (resolved := _resolved(subset, images)) is not None:
            subsets.append(resolved)
    if not subsets:
        raise SourceError(
            "no subset has images of two members or more; name more sources, or declare a subset "
            "with --subset-file"
        )
    return subsets


def _all_classes(dataset: str, images: pl.DataFrame) -> Subset:
    classes = set(images.filter(pl.col("dataset") == dataset)["class"])
    order = [name for name in CLASS_ORDER.get(dataset, ()) if name in classes]
    order += sorted(classes - set(order))
    # Not validated: a data set of one class is no mistake, it only gives no trial.
    members = {name: name for name in order}
    return Subset.model_construct(name=dataset, dataset=dataset, members=members, partial=True)


def _resolved(subset: Subset, images: pl.DataFrame) -> Subset | None:
    rows = images.filter(pl.col("dataset") == subset.dataset)
    classes = set(rows["class"])
    by_name = dict(
        rows.select("class_name", "class").drop_nulls().unique().sort("class").iter_rows()
    )
    members: dict[str, str] = {}
    absent = []
    for member, name in subset.members.items():
        class_ = member if member in classes else by_name.get(member)
        if class_ is None:
            absent.append(member)
        else:
            members[class_] = name
    if absent and not subset.partial:
        close = get_close_matches(absent[0], [*classes, *by_name], 3)
        hint = f"; did you mean {' or '.join(close)}" if close else ""
        raise ConfigError(
            f"subset {subset.name}: {subset.dataset} has no image of {absent[0]!r}{hint}; name "
            "classes that are there, or set `partial: true`"
        )
    if absent and members:
        log.info(
            f"  subset {subset.name}: {len(absent)} of {len(subset.members)} members have no "
            f"images: {', '.join(absent)}"
        )
    return subset.model_copy(update={"members": members}) if len(members) > 1 else None


# ---------------------------------------------------------------- trials


def parts_of(datasets: Sequence[str], parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of some data sets: shards are named after their sources."""
    return tuple(
        part for part in parts if part.shard.partition("/")[0].partition(".")[0] in datasets
    )


def plan_trials(subsets: Sequence[Subset], images: Sequence[Part]) -> list[Shard]:
    """One shard per subset and what is novel."""
    return [
        Shard(
            protocol_of(subset, name),
            parts=parts_of(subset.datasets(name), images),
            about={
                "members": list(subset.members.items()),
                "novel" if isinstance(subset, KnownSet) else "held": name,
            },
        )
        for subset in subsets
        for name in subset.trials
    ]


def protocol_of(subset: Subset, member: str) -> str:
    """The protocol in which this member, or this data set, is novel."""
    return f"{subset.name}/{member}"


def plan_keys(
    subsets: Sequence[Subset],
    settings: TrialSettings,
    splits: Sequence[Part],
    samples: Sequence[Part],
) -> list[Shard]:
    """Shards of `key_protocols`: each trial with its definition and the samples of its sets."""
    by_name = {part.shard: part for part in splits}
    shards = []
    for subset in subsets:
        for name in subset.trials:
            definition = {
                "subset": subset.name,
                "held_out": name,
                "dataset": subset.dataset,
                "members": subset.members,
                "splits": settings.model_dump(mode="json"),
            }
            if isinstance(subset, KnownSet):
                definition["novel"] = name
            protocol = protocol_of(subset, name)
            parts = parts_of(subset.datasets(name), samples)
            shards += plan_protocols([by_name[protocol]], parts, {protocol: definition})
    return shards


def trials_of(protocols: pl.DataFrame) -> pl.DataFrame:
    """protocol, subset, member (the one that is held out), by the definitions of the protocols."""
    definition = pl.col("definition").str
    return protocols.select(
        "protocol",
        definition.json_path_match("$.subset").alias("subset"),
        definition.json_path_match("$.held_out").alias("member"),
    )


@stage(writes=(SPLITS,), version=2)
def make_trial(shard: Shard, settings: TrialSettings) -> Produced:
    """Hold out one member of a subset: splits, labels and roles of all its images."""
    images = shard.read("images", ["sample_id", "dataset", "class", "split", "file"])
    members, about = dict(shard.about["members"]), shard.about
    if "novel" in about:
        novel = pl.col("dataset") == about["novel"]
        rows = all_known(images.filter(~novel), members, images.filter(novel), settings)
    else:
        rows = hold_out(images, members, about["held"], settings)
    rows = rows.select(
        pl.lit(shard.name).alias("protocol"),
        pl.all(),
        pl.lit(0, pl.Int32).alias("step"),
        pl.lit(None, pl.String).alias("subset"),
    )
    return Produced({"splits": rows}, rows.height)


def hold_out(
    images: pl.DataFrame, members: Mapping[str, str], held: str, settings: TrialSettings
) -> pl.DataFrame:
    """One trial: sample_id, split, class, label, role."""
    known = [class_ for class_, name in members.items() if name != held]
    if len(known) != len(members) - 1:
        raise ValueError(f"{held!r} is no member")
    return _labelled(images, members, known, settings)


def all_known(
    images: pl.DataFrame, members: Mapping[str, str], novel: pl.DataFrame, settings: TrialSettings
) -> pl.DataFrame:
    """A trial of known images against a novel data set.

    Of the novel one the test images are used, else the valid ones, else those without a split.
    """
    splits = [split for split in ("test", "valid") if split in set(novel["split"])]
    novel_rows = novel.filter(pl.col("split") == splits[0] if splits else pl.col("split").is_null())
    rows = novel_rows.select(
        "sample_id",
        pl.lit("test").alias("split"),
        "class",
        pl.lit(None, pl.Int32).alias("label"),
        pl.lit("novel").alias("role"),
    )
    return pl.concat([_labelled(images, members, list(members), settings), rows])


def _labelled(
    images: pl.DataFrame, members: Mapping[str, str], known: list[str], settings: TrialSettings
) -> pl.DataFrame:
    rows = images.filter(pl.col("class").is_in(list(members)))
    rows = with_splits(rows, settings)
    label = pl.col("class").replace_strict(
        known, range(len(known)), default=None, return_dtype=pl.Int32
    )
    role = pl.when(label.is_null()).then(pl.lit("novel")).otherwise(pl.lit("known"))
    return rows.select(
        "sample_id", "split", "class", label.alias("label"), role.alias("role")
    ).filter((pl.col("split") != "train") | (pl.col("role") == "known"))


def with_splits(images: pl.DataFrame, settings: TrialSettings) -> pl.DataFrame:
    """Test drawn where no image has a split, then validation taken out of train.

    Draws go by the order of the ids, so they do not depend on the order of the rows. Where some
    images have a split, those without one are in no trial.
    """
    rows = images.sort("sample_id")
    if rows["split"].is_null().all():
        test = _drawn(rows, settings.test_share, settings.seed)
        split = pl.when(pl.lit(test)).then(pl.lit("test")).otherwise(pl.lit("train"))
        rows = rows.with_columns(split.alias("split"))
    rows = rows.drop_nulls("split")
    if settings.validation == "none":
        return rows
    in_batch = pl.col("file").str.contains(PAPER_VALIDATION)
    train = pl.col("split") == "train"
    if rows.select((train & in_batch).any()).item():
        valid = train & in_batch
    else:
        candidates = rows.filter(train)
        valid_rows = candidates.filter(
            pl.lit(_drawn(candidates, settings.validation_share, settings.seed))
        )
        valid = pl.col("sample_id").is_in(valid_rows["sample_id"].implode())
    split = pl.when(valid).then(pl.lit("valid")).otherwise(pl.col("split"))
    return rows.with_columns(split.alias("split"))


def _drawn(rows: pl.DataFrame, share: float, seed: int) -> pl.Series:
    """True for that share of each class (rounded), at random; rows are in the order of ids."""
    place = pl.Series(np.random.default_rng([seed, 0x5E3A]).permutation(rows.height))
    rank = place.alias("place").to_frame().with_columns(rows["class"])
    return rank.select(
        pl.col("place").rank("ordinal").over("class")
        <= (share * pl.len().over("class")).round(0, mode="half_away_from_zero")
    ).to_series()
