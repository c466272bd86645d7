"""Open-set tracks: which shapes are known or unknown, in train, valid or test, and their labels.

In: members (source, sample_id, class, split; `class_name` if there is one), from the lists or from
the table of ingested shapes, and tracks: the built-in ones of `tracks.yaml` or a user's YAML of the
same form. Out: rows of the table `splits`, one per track and shape, under the shape's own class.
Rules 2 to 4 of docs/threedos.md say which sets, labels and splits of a source serve which role.

Where validation is a share of train, the shapes are put in the order of their ids first, so the
order of the rows does not matter. For the rows of ScanObjectNN's h5 that is the order of the file,
so the membership is the released one; objects known from the text lists have no such order.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
from pydantic import BeforeValidator, Field, model_validator

from schemas.config import Settings, make_config, read_config_file
from schemas.errors import ConfigError, SourceError
from schemas.tables import SPLITS
from schemas.threedos import TrackSettings
from tasks.threedos.lists import DATASETS
from tasks.threedos.lists import SPLITS as SPLIT_SPELLINGS

BUILT_IN = Path(__file__).with_name("tracks.yaml")
Split = Literal["train", "valid", "test", "all"]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _classes(items: Any) -> Any:
    """Each item is a class, or a list of classes that share a label."""
    if not isinstance(items, list | tuple) or not items:
        raise ValueError("expected a list of classes")
    groups = [item if isinstance(item, list | tuple) else [item] for item in items]
    for name in (name for group in groups for name in group):
        if not isinstance(name, str):
            # PyYAML reads 02747177 as an octal number and `no` as false.
            raise ValueError(f"class {name!r} is no text; put the class's name in quotes")
    return groups


ClassLists = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_classes)]
Sources = dict[str, Annotated[tuple[Split, ...], BeforeValidator(_listed)]]


class Validation(Settings):
    """Validation taken out of train, as scikit-learn's train_test_split draws it."""

    share: float = Field(gt=0, lt=1)
    """Share of the training shapes, rounded down."""
    seed: int = Field(ge=0)
    """Its random_state."""


class ClassGroup(Settings):
    """Classes that count as one: a label if they are known."""

    set: str
    """Set they come from, the `subset` of their rows."""
    classes: tuple[str, ...]
    """Names, or synset ids."""


class _Roles(Settings):
    name: str = Field(pattern=r"^[A-Za-z0-9][\w.+-]*$")
    """Name used in every table."""
    description: str = ""
    """What it is for."""
    train: Sources = Field(min_length=1)
    """Source to its splits that known training shapes come from; `all` is every shape of it."""
    valid: Sources = Field(default={})
    """The same for validation."""
    validation: Validation | None = None
    """Validation as a share of train instead."""
    test: Sources = Field(min_length=1)
    """The same for known test shapes."""
    unknown_test: Sources = Field(default={})
    """The same for unknown test shapes; those of `test` if not given."""

    @model_validator(mode="after")
    def _apart(self) -> "_Roles":
        if self.valid and self.validation:
            # Not a ValueError: pydantic would add all of the track to the sentence.
            raise ConfigError(f"track {self.name}: give valid or validation, not both")
        roles = {"train": self.train, "valid": self.valid, "test": self.test}
        used: dict[tuple[str, str], str] = {}
        for role, sources in roles.items():
            for source, splits in sources.items():
                for split in ("train", "valid", "test") if "all" in splits else splits:
                    other = used.setdefault((source, split), role)
                    if other != role:
                        raise ConfigError(
                            f"track {self.name}: {split} of {source} serves both {other} and "
                            f"{role}; leave it in one"
                        )
        return self


class Track(_Roles):
    """A track whose sets are resolved; the label of a known class is its group's place."""

    known: tuple[ClassGroup, ...]
    """Known classes in the order of their labels."""
    unknown: tuple[ClassGroup, ...]
    """Unknown classes."""

    @model_validator(mode="after")
    def _disjoint(self) -> "Track":
        seen: dict[str, str] = {}
        for role, groups in (("known", self.known), ("unknown", self.unknown)):
            for name in (name for group in groups for name in group.classes):
                if name in seen:
                    both = "known and unknown" if seen[name] != role else f"twice among {role}"
                    raise ConfigError(
                        f"track {self.name}: class {name} is {both}; leave it in one place"
                    )
                seen[name] = role
        return self

    @property
    def sources(self) -> set[str]:
        return {*self.train, *self.valid, *self.test, *self.unknown_test}


class _Declared(_Roles):
    known: ClassLists
    unknown: ClassLists


class _TrackFile(Settings):
    sets: dict[str, ClassLists] = Field(default={})
    merged: dict[str, str] = Field(default={})
    tracks: tuple[dict[str, Any], ...] = Field(min_length=1)


def built_in_tracks() -> tuple[Track, ...]:
    """The tracks of `tracks.yaml`."""
    return _resolved(_built_in(), _built_in().sets)


def read_tracks(path: Path) -> tuple[Track, ...]:
    """The tracks of a user's YAML: one track, or `tracks:` and maybe `sets:` of its own."""
    values = read_config_file(path)
    if "merged" in values:
        raise ConfigError(f"{path}: merged is not for users; write [class, class] for one label")
    if "tracks" not in values:
        sets = values.pop("sets", {})
        values = {"sets": sets, "tracks": [values]}
    try:
        file = make_config(_TrackFile, values)
        again = sorted(file.sets.keys() & _built_in().sets.keys())
        if again:
            raise ConfigError(f"set {again[0]} is built in; give yours another name")
        return _resolved(file, {**_built_in().sets, **file.sets})
    except ConfigError as error:
        raise ConfigError(f"tracks of {path}: {error}") from None


def choose_tracks(names: Sequence[str], declared: Sequence[Track]) -> tuple[Track, ...]:
    """The tracks of those names; all if none is named."""
    tracks = {track.name: track for track in declared}
    for name in names:
        if name not in tracks:
            raise ConfigError(f"no track is called {name}; {_nearest(name, tracks)}")
    return tuple(tracks[name] for name in names) if names else tuple(declared)


def build_splits(
    members: pl.DataFrame, tracks: Sequence[Track], settings: TrackSettings
) -> pl.DataFrame:
    """Rows of every track; one whose shapes are not there is a SourceError."""
    names = [track.name for track in tracks]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two tracks are called {name}; rename one")
    members = _checked(members)
    parts = [_track_rows(members, track, settings) for track in tracks]
    return pl.concat([SPLITS.empty(), *parts]).sort(SPLITS.key)


def build_possible(
    members: pl.DataFrame, tracks: Sequence[Track], settings: TrackSettings
) -> tuple[pl.DataFrame, dict[str, str]]:
    """`build_splits` of the tracks whose shapes are there, and why the others were left out."""
    parts, reasons = [build_splits(members, [], settings)], {}
    for track in tracks:
        try:
            parts.append(build_splits(members, [track], settings))
        except SourceError as error:
            reasons[track.name] = str(error)
    return pl.concat(parts).sort(SPLITS.key), reasons


def count_splits(splits: pl.DataFrame) -> pl.DataFrame:
    """Shapes, classes and labels of each track, split, role and set of classes."""
    return (
        splits.group_by("protocol", "split", "role", "subset")
        .agg(
            pl.len().alias("shapes"),
            pl.col("class").n_unique().alias("classes"),
            pl.col("label").drop_nulls().n_unique().alias("labels"),
        )
        .sort("protocol", "split", "role", "subset")
    )


def empty_labels(splits: pl.DataFrame, tracks: Sequence[Track]) -> pl.DataFrame:
    """Labels (protocol, split, label, classes) that have no shape in train or in test."""
    labels = pl.DataFrame(
        [
            (track.name, split, label, " + ".join(group.classes))
            for track in tracks
            for label, group in enumerate(track.known)
            for split in ("train", "test")
        ],
        {"protocol": pl.String, "split": pl.String, "label": pl.Int32, "classes": pl.String},
        orient="row",
    )
    return labels.join(splits, on=["protocol", "split", "label"], how="anti", maintain_order="left")


# ---------------------------------------------------------------- declarations


@cache
def _built_in() -> _TrackFile:
    return make_config(_TrackFile, read_config_file(BUILT_IN))


def _resolved(file: _TrackFile, sets: Mapping[str, tuple]) -> tuple[Track, ...]:
    """Declared tracks with the classes of the sets they name."""
    tracks = []
    for values in file.tracks:
        declared = make_config(_Declared, values)
        groups = {
            role: [group for item in items for group in _groups(item, sets, role)]
            for role, items in (("known", declared.known), ("unknown", declared.unknown))
        }
        tracks.append(make_config(Track, {**declared.model_dump(), **groups}))
    return tuple(tracks)


def _groups(item: tuple[str, ...], sets: Mapping[str, tuple], role: str) -> list[dict[str, Any]]:
    if len(item) == 1 and item[0] in sets:
        return [{"set": item[0], "classes": classes} for classes in sets[item[0]]]
    return [{"set": role, "classes": item}]


def _nearest(name: str, among: Collection[str]) -> str:
    near = get_close_matches(name, sorted(among), n=3, cutoff=0.5)
    return f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(sorted(among))[:300]}"


# ---------------------------------------------------------------- rows


def _checked(members: pl.DataFrame) -> pl.DataFrame:
    """Members under the names of data sets, each shape once."""
    if "class_name" not in members.columns:
        members = members.with_columns(pl.lit(None, pl.String).alias("class_name"))
    members = members.select(
        pl.col("source").replace(DATASETS),
        "sample_id",
        "class",
        "class_name",
        pl.col("split").str.to_lowercase().replace(SPLIT_SPELLINGS),
    )
    # A ShapeNet model that stands under two synsets would be in train and in test.
    model = (
        pl.when(source="shapenet")
        .then(pl.col("sample_id").str.split("/").list.last())
        .otherwise("sample_id")
    )
    again = members.filter(pl.struct("source", model.alias("model")).is_duplicated())
    if again.height:
        raise SourceError(
            f"members: {again.height} rows name a shape more than once, such as "
            f"{', '.join(again['sample_id'].sort()[:2])}; take ShapeNet's models from all.csv"
        )
    return members


def _track_rows(members: pl.DataFrame, track: Track, settings: TrackSettings) -> pl.DataFrame:
    absent = sorted(track.sources - set(members["source"].unique()))
    if absent:
        raise SourceError(
            f"track {track.name} needs {', '.join(absent)}, of which no list and no shape is there"
        )
    classes = _class_table(members, track, settings)
    cast = members.join(classes, on=["source", "class"], maintain_order="left")
    known, unknown = cast.filter(role="known"), cast.filter(role="novel")
    train = _of(known, track.train)
    valid = _of(known, track.valid)
    if track.validation:
        train, valid = _held_out(train, track.name, track.validation)
    test = _of(known, track.test)
    others = _of(unknown, track.unknown_test or track.test)
    for rows, what in ((train, "known train"), (test, "known test"), (others, "unknown test")):
        if rows.is_empty():
            raise SourceError(
                f"track {track.name} has no {what} shape; add shapes of its classes or leave it out"
            )
    return pl.concat(
        SPLITS.conform(
            rows.select(
                pl.lit(track.name).alias("protocol"),
                pl.lit(0).alias("step"),
                pl.lit(split).alias("split"),
                "sample_id",
                "class",
                "label",
                "role",
                "subset",
            )
        )
        for rows, split in ((train, "train"), (valid, "valid"), (test, "test"), (others, "test"))
    )


def _class_table(members: pl.DataFrame, track: Track, settings: TrackSettings) -> pl.DataFrame:
    """(source, class) of the track's sources to role, label and set."""
    classes = members.filter(pl.col("source").is_in(list(track.sources)))
    classes = classes.select("source", "class", "class_name").unique()
    roles = pl.DataFrame(
        [
            (name, role, label if role == "known" else None, group.set)
            for role, groups in (("known", track.known), ("novel", track.unknown))
            for label, group in enumerate(groups)
            for name in group.classes
        ],
        {"name": pl.String, "role": pl.String, "label": pl.Int32, "subset": pl.String},
        orient="row",
    )
    _refuse_unheard(roles["name"].to_list(), classes, track)
    if settings.cellphones == "merged":
        for part, whole in _built_in().merged.items():
            if part not in roles["name"]:
                added = roles.filter(name=whole).with_columns(pl.lit(part).alias("name"))
                roles = pl.concat([roles, added])
    table = pl.concat(
        classes.join(roles, left_on=column, right_on="name").select(
            "source", "class", "role", "label", "subset"
        )
        for column in ("class", "class_name")
    ).unique()
    twice = table.filter(pl.struct("source", "class").is_duplicated()).sort("source", "class")
    if twice.height:
        raise ConfigError(
            f"track {track.name}: class {twice['class'][0]} of {twice['source'][0]} is named by "
            "its id and by its name in two places; leave it in one"
        )
    return table


def _refuse_unheard(names: list[str], classes: pl.DataFrame, track: Track) -> None:
    """A class of a built-in set may have no shape yet; any other must be in the sources."""
    heard = {*classes["class"], *classes["class_name"].drop_nulls()}
    sets = _built_in().sets
    official = {name for groups in sets.values() for group in groups for name in group}
    for name in names:
        if name not in heard | official:
            raise ConfigError(
                f"track {track.name}: no class is called {name} in "
                f"{', '.join(sorted(track.sources))}; {_nearest(name, heard | sets.keys())}"
            )


def _of(rows: pl.DataFrame, sources: Mapping[str, tuple[str, ...]]) -> pl.DataFrame:
    condition = pl.lit(False)
    for source, splits in sources.items():
        inside = pl.lit("all" in splits) | pl.col("split").is_in(list(splits)).fill_null(False)
        condition = condition | ((pl.col("source") == source) & inside)
    return rows.filter(condition)


def _held_out(
    rows: pl.DataFrame, track: str, validation: Validation
) -> tuple[pl.DataFrame, pl.DataFrame]:
    rows = rows.sort("sample_id")
    # Exact, since 0.1 * 30 is more than 3 in floating point and 0.29 * 100 less than 29.
    count = int(Fraction(str(validation.share)) * rows.height)
    if not 0 < count < rows.height:
        raise SourceError(
            f"track {track}: {validation.share:g} of {rows.height} training shapes is {count}; "
            "add shapes or change the share"
        )
    # Its train_test_split, without a second of imports for each process.
    drawn = np.random.RandomState(validation.seed).permutation(rows.height)
    return rows[np.sort(drawn[count:])], rows[np.sort(drawn[:count])]
