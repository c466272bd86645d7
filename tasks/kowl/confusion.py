"""Ordered confusion counts: what a predictor ranked first, second, ... for samples of each label.

In: probabilities (N, C) with the text of their C labels, and target labels as text; the two are
aligned by text, never by index (spec kowl 0.4). Out: sparse frames of `COUNTS`; rank 1 is the most
likely label. A counts frame may have more columns (split, group, ...): every function treats each
combination of them as a matrix of its own. Rules: KOWL-718 section 4, spec kowl 1 "Evaluator".

Ties in probability go to the earlier column, at every rank.
"""

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
import polars as pl

from schemas.errors import ConfigError, NoveltyError

UNKNOWN = "unknown"
KNOWN = "known"
COUNTS = {"rank": pl.Int32, "target": pl.String, "predicted": pl.String, "count": pl.Int64}

Reduction = Literal["raw", "classification", "detection", "recognition"]
REDUCTIONS: tuple[Reduction, ...] = ("raw", "classification", "detection", "recognition")
Reading = Literal["inclusive", "before"]
READINGS: tuple[Reading, ...] = ("inclusive", "before")

# Rows at a time: a block of 719 float32 probabilities stays in the cache.
_BLOCK = 2048


def top_k(probabilities: np.ndarray, k: int) -> np.ndarray:
    """Columns of the k largest values of each row, int32 (N, min(k, C)), largest first."""
    rows, columns = probabilities.shape
    k = min(k, columns)
    ranked = np.empty((rows, k), np.int32)
    for start in range(0, rows, _BLOCK):
        block = np.array(probabilities[start : start + _BLOCK])
        row = np.arange(len(block))
        for rank in range(k):
            best = block.argmax(1)
            # argmax finds a NaN before any number.
            if rank == 0 and np.isnan(block[row, best]).any():
                raise NoveltyError(
                    f"probabilities of rows {start} to {start + len(block) - 1} are not all "
                    "numbers; the predictor diverged, lower its learning rate"
                )
            ranked[start : start + len(block), rank] = best
            block[row, best] = -np.inf
    return ranked


def count(
    targets: pl.Series,
    ranked: np.ndarray,
    labels: Sequence[str],
    by: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Counts of (rank, target, predicted), after the columns of `by`, which has a row per target.

    `ranked` holds column numbers of `labels`, as `top_k` gives them.
    """
    if len(targets) != len(ranked) or (by is not None and by.height != len(ranked)):
        raise ConfigError(
            f"confusion: {len(targets)} targets, {len(ranked)} predictions"
            + (f" and {by.height} groups" if by is not None else "")
            + "; each sample must have one of each"
        )
    if len(set(labels)) != len(labels):
        raise ConfigError("confusion: a label stands twice among the predictor's labels")
    samples, ranks = ranked.shape
    extra = [] if by is None else by.columns
    frame = pl.DataFrame({"target": targets.cast(pl.String)})
    if frame["target"].null_count():
        raise ConfigError("confusion: a target has no label; leave unlabelled samples out")
    if by is not None:
        frame = frame.hstack(by)
    # Text becomes numbers once, so that the counting itself moves integers only.
    names = frame["target"].unique().sort()
    frame = frame.with_columns(pl.col("target").cast(pl.Enum(names)).to_physical())
    per_rank = [
        frame.with_columns(
            pl.lit(rank + 1, pl.Int32).alias("rank"),
            pl.Series("predicted", np.ascontiguousarray(ranked[:, rank])),
        )
        for rank in range(ranks)
    ]
    key = [*extra, "rank", "target", "predicted"]
    if not per_rank or not samples:
        return frame.select(extra).clear().hstack(pl.DataFrame(schema=COUNTS))
    counted = pl.concat(per_rank).group_by(key).agg(pl.len().cast(pl.Int64).alias("count"))
    texts = pl.Series(list(labels), dtype=pl.String)
    return counted.with_columns(
        names.gather(counted["target"]).alias("target"),
        texts.gather(counted["predicted"]).alias("predicted"),
    ).sort(key)


def add(*matrices: pl.DataFrame) -> pl.DataFrame:
    """The sum over the union of labels; all must have the same columns."""
    key = [name for name in matrices[0].columns if name != "count"]
    return pl.concat(matrices).group_by(key).agg(pl.col("count").sum()).sort(key)


def reduce(counts: pl.DataFrame, known: Collection[str], reduction: Reduction) -> pl.DataFrame:
    """Labels merged; unknown are all that are not in `known`, the predictor's own ones included.

    classification: unknowns become `unknown`; detection: also the rest becomes `known`;
    recognition: knowns become `known`, unknowns stay apart; raw: nothing is merged.
    """
    if reduction == "raw":
        return counts
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction {reduction!r} is unknown; expected one of {REDUCTIONS}")
    reserved = sorted({UNKNOWN, KNOWN} & set(known))
    if reserved:
        raise ConfigError(f"known labels may not be called {reserved}; rename them")
    names = pl.Series(sorted(known), dtype=pl.String).implode()

    def merged(column: str) -> pl.Expr:
        value = pl.col(column)
        inside = pl.lit(KNOWN) if reduction != "classification" else value
        outside = pl.lit(UNKNOWN) if reduction != "recognition" else value
        return pl.when(value.is_in(names)).then(inside).otherwise(outside).alias(column)

    return add(counts.with_columns(merged("target"), merged("predicted")))


def measure(counts: pl.DataFrame) -> pl.DataFrame:
    """The other columns of `counts`, then metric, value, n; one block per matrix.

    - accuracy: trace / n;
    - mcc: R_k, 0 where a denominator is 0 (all targets, or all predictions, alike);
    - nmi: mutual information / mean of the two entropies; 1 where both are 0, since targets and
      predictions then split the samples in the same way, namely not at all (as scikit-learn);
    - top_K_accuracy, if there are ranks 2 to K: right within the first K. Only right for counts
      that are not reduced: merged labels can hit one sample twice.
    """
    extra = [name for name in counts.columns if name not in COUNTS]
    if counts.is_empty():
        return counts.select(extra).with_columns(
            pl.lit("").alias("metric"),
            pl.lit(None, pl.Float64).alias("value"),
            pl.lit(0, pl.Int64).alias("n"),
        )
    # A constant column lets counts without further columns pass the same grouping.
    matrix = [*extra, "__one"]
    counts = counts.with_columns(pl.lit(0, pl.Int8).alias("__one"))
    first = counts.filter(pl.col("rank") == 1)
    right = pl.col("target") == pl.col("predicted")
    number = pl.col("count").cast(pl.Float64)

    def margin(side: str) -> pl.DataFrame:
        return first.group_by(*matrix, pl.col(side).alias("label")).agg(number.sum().alias(side))

    targets, predictions = margin("target"), margin("predicted")
    both = (
        targets.join(predictions, on=[*matrix, "label"], how="full", coalesce=True)
        .with_columns(pl.col("target", "predicted").fill_null(0.0))
        .group_by(matrix)
        .agg(
            pl.col("target").sum().alias("n"),
            (pl.col("target") * pl.col("predicted")).sum().alias("tp"),
            (pl.col("target") ** 2).sum().alias("tt"),
            (pl.col("predicted") ** 2).sum().alias("pp"),
            _entropy("target").alias("ht"),
            _entropy("predicted").alias("hp"),
        )
    )
    information = (
        first.rename({"target": "t", "predicted": "p"})
        .join(targets.rename({"label": "t"}), on=[*matrix, "t"])
        .join(predictions.rename({"label": "p"}), on=[*matrix, "p"])
        .group_by(matrix)
        .agg(
            _information().alias("mi"),
            number.filter(pl.col("t") == pl.col("p")).sum().alias("right"),
        )
    )
    n, hits = pl.col("n"), pl.col("right")
    bottom = (n**2 - pl.col("pp")).sqrt() * (n**2 - pl.col("tt")).sqrt()
    mean = (pl.col("ht") + pl.col("hp")) / 2
    table = both.join(information, on=matrix).select(
        *matrix,
        n.cast(pl.Int64),
        (hits / n).alias("accuracy"),
        pl.when(bottom > 0).then((hits * n - pl.col("tp")) / bottom).otherwise(0.0).alias("mcc"),
        pl.when(mean > 0)
        .then((pl.col("mi") / mean).clip(0.0, 1.0))
        .otherwise(1.0)
        .alias("nmi"),
    )
    metrics = ["accuracy", "mcc", "nmi"]
    ranks = int(counts["rank"].max())  # type: ignore[arg-type]
    if ranks > 1:
        within = counts.group_by(matrix).agg(number.filter(right).sum().alias("within"))
        name = f"top_{ranks}_accuracy"
        table = table.join(within, on=matrix).with_columns((pl.col("within") / n).alias(name))
        metrics.append(name)
    return (
        table.unpivot(metrics, index=[*matrix, "n"], variable_name="metric", value_name="value")
        .select(*extra, "metric", "value", "n")
        .sort(*extra, "metric")
    )


def _entropy(column: str) -> pl.Expr:
    """In nats; a label that no sample has adds nothing. Exactly 0 for one label."""
    share = pl.col(column) / pl.col(column).sum()
    return -pl.when(share > 0).then(share * share.log()).otherwise(0.0).sum()


def _information() -> pl.Expr:
    number = pl.col("count").cast(pl.Float64)
    ratio = number * number.sum() / (pl.col("target") * pl.col("predicted"))
    return (number / number.sum() * ratio.log()).sum()


def reaction_time(
    novel: np.ndarray, flagged: np.ndarray, reading: Reading = "inclusive"
) -> float | None:
    """Novelty reaction time of one increment's samples in order (paper eq. 1): 0 best, 1 worst.

    2 / ((z + 1 - a) / (d - a) + r / m): a the first novel sample, d the first sample at or after it
    that is predicted unknown (whatever it is), z the last sample, r the novel samples, m those
    among them from a to d (`inclusive`, Fig. 5) or until just before d (`before`, the text).
    0 if d = a, 1 if novelty is never detected, None if no sample is novel.
    """
    if reading not in READINGS:
        raise ConfigError(f"reaction time: reading {reading!r}; expected one of {READINGS}")
    if novel.shape != flagged.shape or novel.ndim != 1:
        raise ConfigError(f"reaction time: {novel.shape} novel, {flagged.shape} flagged samples")
    if not novel.any():
        return None
    first = int(novel.argmax())
    after = flagged[first:]
    if not after.any():
        return 1.0
    delay = int(after.argmax())
    if delay == 0:
        return 0.0
    seen = int(novel[first : first + delay + (reading == "inclusive")].sum())
    return 2 / (len(after) / delay + int(novel.sum()) / seen)
