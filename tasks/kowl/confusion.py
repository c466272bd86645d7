"""Ordered confusion counts: what a predictor ranked first, second, ... for samples of each label.

In: probabilities (N, C) with the text of their C labels, and target labels as text; the two are
aligned by text, never by index (docs/kowl.md, rule 9). Out: sparse frames of `COUNTS`; rank 1 is
the most likely label. A counts frame may have more columns (split, subset, ...): every function
treats each combination of them as a matrix of its own. Rules: KOWL-718 section 4, docs/kowl.md 6 to
11.

Ties in probability go to the earlier column, at every rank.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Literal, cast

import numpy as np
import polars as pl

from schemas.errors import ConfigError, NoveltyError
from tasks.predictors.base import KNOWN, UNKNOWN

COUNTS = {"rank": pl.Int32, "target": pl.String, "predicted": pl.String, "count": pl.Int64}
MEASURES = {"metric": pl.String, "value": pl.Float64, "n": pl.Int64}

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
    if targets.null_count():
        raise ConfigError("confusion: a target has no label; leave unlabelled samples out")
    samples, ranks = ranked.shape
    texts = pl.Series(list(labels), dtype=pl.String)
    names = pl.concat([targets.cast(pl.String), texts]).unique().sort()
    sample = np.tile(np.arange(samples), ranks)
    return _collected(
        None if by is None else by[sample],
        np.repeat(np.arange(1, ranks + 1), samples),
        _codes(targets, names)[sample],
        _codes(texts, names)[ranked.T.ravel()],
        np.ones(samples * ranks, np.int64),
        names,
    )


def add(*matrices: pl.DataFrame) -> pl.DataFrame:
    """The sum over the union of labels; all must have the same columns."""
    return _relabelled(pl.concat(matrices), lambda names: names)


def reduce(counts: pl.DataFrame, known: Collection[str], reduction: Reduction) -> pl.DataFrame:
    """Labels merged; unknown are all that are not in `known`, the predictor's own ones included.

    classification: unknowns become `unknown`; detection: also the rest becomes `known`;
    recognition: knowns become `known`, unknowns stay apart; raw: nothing is merged.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction {reduction!r} is unknown; expected one of {REDUCTIONS}")
    reserved = sorted({UNKNOWN, KNOWN} & set(known))
    if reserved:
        raise ConfigError(f"known labels may not be called {reserved}; rename them")
    if reduction == "raw":
        return counts

    def merged(names: pl.Series) -> pl.Series:
        is_known = names.is_in(pl.Series(sorted(known), dtype=pl.String).implode())
        inside = names if reduction == "classification" else pl.lit(KNOWN)
        outside = names if reduction == "recognition" else pl.lit(UNKNOWN)
        return pl.select(pl.when(is_known).then(inside).otherwise(outside)).to_series()

    return _relabelled(counts, merged)


def _codes(texts: pl.Series, names: pl.Series) -> np.ndarray:
    """The place of each text among `names`, which are sorted and hold all of them."""
    return texts.cast(pl.Enum(names)).to_physical().to_numpy().astype(np.int64)


def _relabelled(counts: pl.DataFrame, rename: Callable[[pl.Series], pl.Series]) -> pl.DataFrame:
    old = pl.concat([counts["target"], counts["predicted"]]).unique().sort()
    new = rename(old)
    names = new.unique().sort()
    place = _codes(new, names)
    extra = [name for name in counts.columns if name not in COUNTS]
    return _collected(
        counts.select(extra) if extra else None,
        counts["rank"].to_numpy(),
        place[_codes(counts["target"], old)],
        place[_codes(counts["predicted"], old)],
        counts["count"].to_numpy(),
        names,
    )


def _collected(
    by: pl.DataFrame | None,
    rank: np.ndarray,
    target: np.ndarray,
    predicted: np.ndarray,
    weight: np.ndarray,
    names: pl.Series,
) -> pl.DataFrame:
    """Equal cells summed, sorted by all columns. One integer key a cell: text is slow to sort."""
    groups, group = _groups(by)
    ranks, labels = int(rank.max(initial=0)) + 1, len(names)
    key = ((group * ranks + rank) * labels + target) * labels + predicted
    # A stable sort is quick where the rows are in order but for some merged labels.
    order = np.argsort(key, kind="stable")
    key = key[order]
    start = np.flatnonzero(np.diff(key, prepend=-1))
    summed = np.add.reduceat(weight[order], start) if len(start) else weight[:0]
    cells, last = np.divmod(key[start], max(labels, 1))
    cells, middle = np.divmod(cells, max(labels, 1))
    number, first = np.divmod(cells, ranks)
    counts = pl.DataFrame(
        {
            "rank": first,
            "target": names.gather(middle),
            "predicted": names.gather(last),
            "count": summed,
        },
        schema_overrides=COUNTS,
    )
    return counts if groups is None else groups[number].hstack(counts)


def _groups(by: pl.DataFrame | None) -> tuple[pl.DataFrame | None, np.ndarray | int]:
    """The distinct rows of `by`, sorted, and the number of each row among them."""
    if by is None:
        return None, 0
    groups = by.unique().sort(by.columns, nulls_last=False)
    placed = by.join(
        groups.with_row_index("__group"),
        on=by.columns,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    return groups, placed["__group"].to_numpy().astype(np.int64)


def measure(counts: pl.DataFrame, ranks: int | None = None) -> pl.DataFrame:
    """The other columns of `counts`, then metric, value, n; one block per matrix.

    - accuracy: trace / n;
    - mcc: R_k, 0 where a denominator is 0 (all targets, or all predictions, alike);
    - nmi: mutual information / mean of the two entropies; 1 where both are 0, since targets and
      predictions then split the samples in the same way, namely not at all (as scikit-learn);
    - top_K_accuracy with K = `ranks` (default: the last rank there is) if above 1: right within
      the first K. Only for counts that are not reduced: merged labels can hit one sample twice.
    """
    extra = [name for name in counts.columns if name not in COUNTS]
    if counts.is_empty():
        return pl.DataFrame(schema={**counts.select(extra).schema, **MEASURES})
    groups, group = _groups(counts.select(extra) if extra else None)
    size = 1 if groups is None else groups.height
    group = np.broadcast_to(group, counts.height)
    weight = counts["count"].to_numpy().astype(np.float64)
    within = np.bincount(group, weight * (counts["target"] == counts["predicted"]).to_numpy(), size)
    top = (counts["rank"] == 1).to_numpy()
    first, group, weight = counts.filter(top), group[top], weight[top]
    names = pl.concat([first["target"], first["predicted"]]).unique().sort()
    target, predicted = _codes(first["target"], names), _codes(first["predicted"], names)
    shape = size, len(names)
    true, guess = (
        np.bincount(group * shape[1] + side, weight, size * shape[1]).reshape(shape)
        for side in (target, predicted)
    )
    n = true.sum(1)
    hits = np.bincount(group, weight * (target == predicted), size)
    measures = {"accuracy": hits / n}
    bottom = np.sqrt((n**2 - (guess**2).sum(1)) * (n**2 - (true**2).sum(1)))
    measures["mcc"] = np.where(
        bottom > 0, (hits * n - (true * guess).sum(1)) / np.where(bottom > 0, bottom, 1), 0.0
    )
    ratio = weight * n[group] / (true[group, target] * guess[group, predicted])
    information = np.bincount(group, weight / n[group] * np.log(ratio), size)
    entropy = (_entropy(true, n) + _entropy(guess, n)) / 2
    measures["nmi"] = np.where(
        entropy > 0, np.clip(information / np.where(entropy > 0, entropy, 1), 0, 1), 1.0
    )
    ranks = ranks or cast(int, counts["rank"].max())
    if ranks > 1:
        measures[f"top_{ranks}_accuracy"] = within / n
    blocks = []
    for metric, value in measures.items():
        values = pl.DataFrame(
            {"metric": [metric] * size, "value": value, "n": n.astype(np.int64)}, schema=MEASURES
        )
        blocks.append(values if groups is None else groups.hstack(values))
    return pl.concat(blocks).sort(*extra, "metric")


def _entropy(margin: np.ndarray, n: np.ndarray) -> np.ndarray:
    """In nats, exactly 0 where one label has all."""
    share = margin / n[:, None]
    return -(share * np.log(np.where(share > 0, share, 1))).sum(1)


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
