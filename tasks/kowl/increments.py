"""The open-world-learning protocol of KOWL-718: a labelled table becomes increments.

In: any table with sample_id, label, split and, optionally, release; other columns are carried.
Out: `Increments`. Rules: KOWL-718 section 4 as released (docs/kowl.md, rules 4 and 5):
- increment 0 is the first release; its train labels are known;
- a later release has `increments` steps. Its novel labels are those of its train samples, ordered
  by train count and cut into groups, one a step; the other splits follow the train groups;
- known labels with more samples in a split than steps are folded over all steps, rarer ones go
  wholly to the first step;
- labels introduced at step i with fewer samples than steps left stay there, the others are folded
  over step i (novel) and the later steps (known);
- labels absent from train are folded over all steps as novel or, with fewer samples than steps,
  are in no increment and reported.
N samples folded over n steps: step j gets ceil((N - j) / n). Samples are dealt out in the order of
(label, md5("{seed}/{sample_id}")), so neither row order nor machine matters.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import polars as pl

from schemas.errors import ConfigError, SourceError
from schemas.increments import IncrementSettings

TRAIN = "train"


class Increments(NamedTuple):
    """`increments`: the columns of the input, increment, role (known | novel), sorted by sample_id.

    `classes`: label, increment_introduced, train_samples (of its pool).
    `unassigned`: sample_id, label, split, reason for samples in no increment.
    """

    increments: pl.DataFrame
    classes: pl.DataFrame
    unassigned: pl.DataFrame


def assign_increments(
    samples: pl.DataFrame,
    settings: IncrementSettings | None = None,
    *,
    releases: Sequence[str] | None = None,
    known_labels: Collection[str] | None = None,
) -> Increments:
    """Each sample in exactly one increment, or in `unassigned`.

    With `releases` (oldest first) the column `release` is used and the first is increment 0.
    Without, the table is one pool: `known_labels` (default: the first of increments + 1 groups) are
    introduced at increment 0 and folded like any other group.
    """
    settings = settings or IncrementSettings()
    _check(samples, releases, known_labels)
    core = ["sample_id", "label", "split"] + (["release"] if releases is not None else [])
    labelled = samples.select(core).filter(pl.col("label").is_not_null())
    count = settings.increments
    if releases is None:
        if known_labels is None:
            groups = _groups(_train_counts(labelled), count + 1, settings)
        else:
            counts = _train_counts(labelled)
            initial = pl.col("label").is_in(list(known_labels))
            groups = pl.concat(
                [
                    counts.filter(initial).with_columns(pl.lit(0, pl.Int32).alias("step")),
                    _groups(counts.filter(~initial), count, settings).with_columns(
                        pl.col("step") + 1
                    ),
                ]
            )
        parts = [_cut(_with_draw(labelled, settings.seed), groups, [], count + 1)]
        classes = groups.rename({"step": "increment_introduced"})
    else:
        is_first = pl.col("release") == releases[0]
        first = labelled.filter(is_first)
        drawn = _with_draw(labelled.filter(~is_first), settings.seed)
        parts = [first.with_columns(pl.lit(0, pl.Int32).alias("increment"))]
        classes = _train_counts(first).with_columns(
            pl.lit(0, pl.Int32).alias("increment_introduced")
        )
        later = [[name] for name in releases[1:]]
        if settings.pooling == "one_pool" and later:
            later = [list(releases[1:])]
        for i, names in enumerate(later):
            pool = drawn.filter(pl.col("release").is_in(names))
            known = classes["label"].to_list()
            novel = _train_counts(pool).filter(~pl.col("label").is_in(known))
            groups = _groups(novel, count, settings)
            start = 1 + i * count
            part = _cut(pool, groups, known, count)
            parts.append(part.with_columns(pl.col("increment") + start))
            introduced = (pl.col("step") + start).alias("increment_introduced")
            classes = pl.concat([classes, groups.select("label", "train_samples", introduced)])
    assigned = pl.concat(parts)
    # A label of increment 0's train part is known from the start.
    before = (pl.col("increment_introduced") < pl.col("increment")) | (
        pl.col("increment_introduced") == 0
    )
    placed = (
        assigned.filter(pl.col("increment").is_not_null())
        .join(classes.select("label", "increment_introduced"), on="label", how="left")
        .select(
            "sample_id",
            "increment",
            pl.when(before).then(pl.lit("known")).otherwise(pl.lit("novel")).alias("role"),
        )
    )
    left_out = pl.concat(
        [
            samples.filter(pl.col("label").is_null())
            .select("sample_id", "label", "split")
            .with_columns(pl.lit("unlabelled").alias("reason")),
            assigned.filter(pl.col("increment").is_null())
            .select("sample_id", "label", "split")
            .with_columns(pl.lit("label_not_in_train_and_too_rare_to_fold").alias("reason")),
        ]
    )
    return Increments(
        increments=samples.join(placed, on="sample_id").sort("sample_id"),
        classes=classes.select("label", "increment_introduced", "train_samples").sort(
            "increment_introduced", "label"
        ),
        unassigned=left_out.sort("sample_id"),
    )


def count_increments(result: Increments) -> pl.DataFrame:
    """The form of the paper's Table 1: classes and samples per increment and split."""
    introduced = pl.col("increment_introduced")
    classes = (
        result.increments.select("increment")
        .unique()
        .join(result.classes, how="cross")
        .group_by("increment")
        .agg(
            ((introduced < pl.col("increment")) | (introduced == 0))
            .sum()
            .cast(pl.Int64)
            .alias("known_classes"),
            ((introduced == pl.col("increment")) & (introduced > 0))
            .sum()
            .cast(pl.Int64)
            .alias("novel_classes"),
        )
    )
    return (
        result.increments.group_by("increment", "split")
        .agg(
            (pl.col("role") == role).sum().cast(pl.Int64).alias(f"{role}_samples")
            for role in ("known", "novel")
        )
        .join(classes, on="increment", how="left")
        .select(
            "increment", "split", "known_classes", "novel_classes", "known_samples", "novel_samples"
        )
        .sort("increment", "split")
    )


def _check(
    samples: pl.DataFrame, releases: Sequence[str] | None, known_labels: Collection[str] | None
) -> None:
    needed = ["sample_id", "label", "split"] + (["release"] if releases is not None else [])
    missing = [name for name in needed if name not in samples.columns]
    taken = [name for name in ("increment", "role") if name in samples.columns]
    if missing or taken:
        raise ConfigError(
            f"increments: table lacks {missing} and already has {taken}; expected {needed}"
        )
    if releases is not None and known_labels is not None:
        raise ConfigError("increments: give releases or known_labels, not both")
    if releases is not None:
        unknown = set(samples["release"].unique()) - set(releases)
        if unknown or not releases or len(set(releases)) != len(releases):
            raise ConfigError(
                f"increments: releases are {list(releases)}, the table also has "
                f"{sorted(map(str, unknown))}; name each release once"
            )
    if known_labels is not None:
        trained = samples.filter(pl.col("split") == TRAIN)["label"]
        absent = sorted(set(known_labels) - set(trained.unique()))
        if absent:
            raise ConfigError(f"increments: known labels {absent[:5]} have no train sample")
    bad = samples.filter(
        pl.any_horizontal(pl.col("sample_id", "split").is_null())
        | pl.col("sample_id").is_duplicated()
    )
    if bad.height:
        raise SourceError(
            f"increments: {bad.height} samples have no id, no split or an id used twice, the first "
            f"is {bad['sample_id'][0]}; each sample must stand once"
        )


def _train_counts(samples: pl.DataFrame) -> pl.DataFrame:
    return (
        samples.filter(pl.col("split") == TRAIN)
        .group_by("label")
        .agg(pl.len().cast(pl.Int64).alias("train_samples"))
    )


def _groups(counts: pl.DataFrame, steps: int, settings: IncrementSettings) -> pl.DataFrame:
    """`counts` with the step at which each label is introduced; ties in count go by label."""
    descending = settings.novel_class_order == "most_frequent_first"
    size = counts.height // steps
    if settings.group_size == "ceil":
        size = -(-counts.height // steps)
    # Fewer labels than steps, rounded down, is 0: all are remainder, which the last step takes.
    step = pl.int_range(pl.len()) // size if size else pl.lit(steps - 1)
    return counts.sort("train_samples", "label", descending=[descending, False]).with_columns(
        pl.min_horizontal(step, steps - 1).cast(pl.Int32).alias("step")
    )


def _cut(
    pool: pl.DataFrame, groups: pl.DataFrame, known: Collection[str], steps: int
) -> pl.DataFrame:
    """`pool` (with `draw`) with `increment` from 0, null where a label is in no increment."""
    size, step = pl.col("size"), pl.col("step")
    is_known = pl.col("label").is_in(list(known))
    plan = (
        pool.group_by("split", "label")
        .agg(pl.len().cast(pl.Int32).alias("size"))
        .join(groups.select("label", "step"), on="label", how="left")
        .with_columns(
            # Labels of one batch are folded together; -1 known, -2 absent from train.
            pl.when(is_known).then(-1).otherwise(step.fill_null(-2)).alias("batch"),
            step.fill_null(0).alias("step"),
            pl.when(is_known)
            .then(pl.when(size > steps).then(steps).otherwise(1))
            .when(step.is_not_null())
            .then(pl.when(size >= steps - step).then(steps - step).otherwise(1))
            .when(size >= steps)
            .then(steps)
            .alias("folds"),
        )
    )
    # Labels that are not folded must not shift the dealing of those that are.
    batch = ["split", "batch", pl.col("folds") > 1]
    return (
        pool.join(plan, on=["split", "label"])
        .sort("label", "draw", "sample_id")
        .with_columns(
            (step + pl.int_range(pl.len()).over(batch) % pl.col("folds"))
            .cast(pl.Int32)
            .alias("increment")
        )
        .select(pl.exclude("draw", "size", "step", "batch", "folds"))
    )


def _with_draw(samples: pl.DataFrame, seed: int) -> pl.DataFrame:
    """A column `draw`: the last 8 bytes, little-endian, of md5("{seed}/{sample_id}")."""
    import duckdb

    with duckdb.connect() as connection:
        connection.register("samples", samples.select("sample_id"))
        draws = connection.sql(
            "SELECT sample_id, md5_number_lower($1 || '/' || sample_id) AS draw FROM samples",
            params=[str(seed)],
        ).pl()
    return samples.join(draws, on="sample_id", validate="1:1")
