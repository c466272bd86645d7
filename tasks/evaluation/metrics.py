"""Scores and truth in, detection metrics in long format out, under one named Convention.

`evaluate` gives (metric, convention, value, n, threshold); `curves` the ROC and precision-recall
points behind them; `detection_delay` the frames lost before an episode is flagged. A value is null
where the metric has none: one class is missing, or only a trivial point meets the target (the "-"
of NovelCraft's tables: everything flagged, or sklearn's end point with recall 0, precision 1).
Rules: NovelCraft tables 2 and 3, 3DOS and OpenOOD metrics, Semantic Anomalies' average precision.

Thresholds are in the direction of the scores handed in. With `positive="novel"` and novelty scores
a sample is flagged at score >= threshold; with `positive="known"` it is accepted at <= threshold.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from schemas.errors import ConfigError
from tasks.evaluation.conventions import Convention

METRICS: dict[str, Any] = {
    "metric": pl.String,
    "convention": pl.String,
    "value": pl.Float64,
    "n": pl.Int64,
    "threshold": pl.Float64,
}
CURVES: dict[str, Any] = {
    "convention": pl.String,
    "curve": pl.String,
    "point": pl.Int32,
    "x": pl.Float64,
    "y": pl.Float64,
    "threshold": pl.Float64,
}

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Classes = tuple[ArrayLike | pl.Series, ArrayLike | pl.Series]
"""True and predicted class of each sample."""
Measurement = tuple[float | None, float | None]  # value, threshold

UNDEFINED: Measurement = (None, None)


def evaluate(
    scores: ArrayLike,
    novel: ArrayLike,
    convention: Convention,
    weights: ArrayLike | None = None,
    classes: Classes | None = None,
) -> pl.DataFrame:
    """All metrics that the convention defines. Explicit `weights` replace its normal_share rule.

    `skew` is the weighted share of the positive class: the average precision of a random detector.
    `classes` = (true, predicted) of every sample adds acc (known samples only) and oscr (area under
    known-accepted-and-correct over unknown-accepted); what stands there for novel rows is ignored.
    """
    samples = _samples(scores, novel, convention, weights)
    n = samples.rank.size
    names = _metric_names(convention)
    both = samples.positive.any() and not samples.positive.all()
    results = _detection(samples, convention) if both else [UNDEFINED] * len(names)
    rows = [(name, *result, n) for name, result in zip(names, results, strict=True)]
    rows.append(("skew", _share(samples.weight, samples.positive), None, n))
    if classes is not None:
        known = samples.positive == (convention.positive == "known")
        novelty = samples.rank if convention.positive == "novel" else -samples.rank
        true, predicted = (_column(values, "classes", n) for values in classes)
        correct = known & (true == predicted)
        acc = _share(samples.weight[known], correct[known]) if known.any() else None
        oscr = _oscr(novelty, known, correct, samples.weight) if both else None
        rows += [("acc", acc, None, int(known.sum())), ("oscr", oscr, None, n)]
    return pl.DataFrame(
        [(name, convention.name, value, n, threshold) for name, value, threshold, n in rows],
        schema=METRICS,
        orient="row",
    )


def curves(
    scores: ArrayLike,
    novel: ArrayLike,
    convention: Convention,
    weights: ArrayLike | None = None,
    points: int | None = None,
) -> pl.DataFrame:
    """roc: x = FPR, y = TPR; pr: x = recall, y = precision. No rows if one class is missing.

    The threshold is null at the two artificial ends (nothing flagged). `points` keeps at most so
    many of each curve, evenly by index, ends included; `point` stays the index in the full curve.
    """
    if points is not None and points < 2:
        raise ConfigError(f"curve points is {points}, expected 2 or more (or none for all)")
    samples = _samples(scores, novel, convention, weights)
    if samples.positive.all() or not samples.positive.any():
        return pl.DataFrame(schema=CURVES)
    fpr, tpr, roc_thresholds = _roc(samples, convention)
    precision, recall, pr_thresholds = _precision_recall(samples)
    frames = []
    for name, x, y, threshold in (
        ("roc", fpr, tpr, roc_thresholds),
        ("pr", recall, precision, np.append(pr_thresholds, np.inf)),
    ):
        keep = np.arange(x.size)
        if points is not None and points < x.size:
            keep = np.linspace(0, x.size - 1, points).round().astype(np.int64)
        frame = pl.DataFrame(
            {"point": keep, "x": x[keep], "y": y[keep], "threshold": threshold[keep]}
        )
        frames.append(
            frame.select(
                pl.lit(convention.name).alias("convention"),
                pl.lit(name).alias("curve"),
                "point",
                "x",
                "y",
                pl.when(pl.col("threshold").is_finite()).then(pl.col("threshold") * samples.sign),
            )
        )
    return pl.concat(frames).cast(pl.Schema(CURVES))


def detection_delay(frames: pl.DataFrame, threshold: float) -> float | None:
    """Frames with a score below `threshold` before the first at or above it, in novel episodes.

    `frames` has class, episode, frame (integer), score. Mean over the episodes of a class, then
    over the classes; an episode that is never flagged counts all its frames. No frames: no value.
    """
    flagged = pl.col("score") >= threshold
    means = (
        frames.sort("class", "episode", "frame")
        .group_by("class", "episode", maintain_order=True)
        .agg((flagged.cum_sum() == 0).sum().alias("delay"))
        .group_by("class", maintain_order=True)
        .agg(pl.col("delay").mean())["delay"]
    )
    return cast(float | None, means.mean())


@dataclass(frozen=True)
class _Samples:
    """`rank` is larger for the positive class; sign * rank is the score that was handed in."""

    rank: Floats
    positive: Flags
    weight: Floats
    sign: float


def _samples(
    scores: ArrayLike, novel: ArrayLike, convention: Convention, weights: ArrayLike | None
) -> _Samples:
    try:
        score = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scores are not numbers ({error})") from error
    if score.ndim != 1 or score.size == 0:
        raise ConfigError(
            f"scores have shape {score.shape}, expected a list of one or more numbers"
        )
    bad = np.flatnonzero(~np.isfinite(score))
    if bad.size:
        raise ConfigError(
            f"{bad.size} of {score.size} scores are not finite, the first is {score[bad[0]]} at "
            f"row {bad[0]}; expected finite scores: mend the detector or leave those samples out"
        )
    truth = _column(novel, "novel", score.size)
    if truth.dtype != np.bool_ and not (truth.dtype.kind in "iuf" and np.isin(truth, (0, 1)).all()):
        raise ConfigError("novel holds values other than true/false or 0/1; label every sample")
    truth = truth.astype(np.bool_)
    n_novel, n_known = int(truth.sum()), int((~truth).sum())
    if weights is not None:
        weight = _column(weights, "weights", score.size).astype(np.float64)
        if not np.isfinite(weight).all() or (weight < 0).any():
            raise ConfigError("weights are not all finite and zero or more")
        if any(side.any() and weight[side].sum() == 0 for side in (truth, ~truth)):
            raise ConfigError("weights of the novel or of the known samples are all zero")
    else:
        weight = np.ones(score.size)
        if convention.normal_share is not None and n_novel and n_known:
            share = convention.normal_share
            weight[~truth] = share / (1 - share) * n_novel / n_known
    novel_positive = convention.positive == "novel"
    sign = 1.0 if novel_positive == (convention.score_direction == "higher_is_novel") else -1.0
    return _Samples(sign * score, truth if novel_positive else ~truth, weight, sign)


def _column(values: ArrayLike, name: str, length: int) -> NDArray:
    column = np.asarray(values)
    if column.shape != (length,):
        raise ConfigError(f"{name} has shape {column.shape}, expected ({length},) as the scores")
    return column


def _metric_names(convention: Convention) -> list[str]:
    names = ["auroc", "aupr", "aupr_in", "aupr_out", "average_precision"]
    tpr = f"tpr{100 * convention.tpr_target:g}"
    if convention.fpr_rule is not None:
        names.append(f"fpr{100 * convention.tpr_target:g}")
    if convention.ppv_target is not None:
        ppv = f"ppv{100 * convention.ppv_target:g}"
        names += [f"tnr_at_{tpr}", f"ppv_at_{tpr}", f"tnr_at_{ppv}", f"tpr_at_{ppv}"]
    return names


def _detection(samples: _Samples, convention: Convention) -> list[Measurement]:
    """Values in the order of `_metric_names`; both classes are present."""
    fpr, tpr, roc_thresholds = _roc(samples, convention)
    precision, recall, pr_thresholds = _precision_recall(samples)
    other = replace(samples, rank=-samples.rank, positive=~samples.positive)
    areas = {
        rule: (area(precision, recall), area(*_precision_recall(other)[:2]))
        for rule, area in (
            ("trapezoid", lambda p, r: _area(r, p)),
            ("average_precision", lambda p, r: float(-np.sum(np.diff(r) * p[:-1]))),
        )
    }
    ours, theirs = areas[convention.pr_area]
    inside, outside = (ours, theirs) if convention.inside == convention.positive else (theirs, ours)
    step_wise = areas["average_precision"][0]
    values = (_area(fpr, tpr), ours, inside, outside, step_wise)
    results: list[Measurement] = [(value, None) for value in values]

    at = int(np.argmax(tpr >= convention.tpr_target))
    threshold = float(samples.sign * roc_thresholds[at])
    if convention.fpr_rule == "interpolated":
        # On a plateau at exactly the target np.interp takes the right end, as 3DOS does.
        results.append((float(np.interp(convention.tpr_target, tpr, fpr)), None))
    elif convention.fpr_rule == "first_threshold":
        results.append((float(fpr[at]), threshold))
    if convention.ppv_target is None:
        return results

    if tpr[at] == 1 and fpr[at] == 1:
        results += [UNDEFINED, UNDEFINED]
    else:
        ppv = precision[np.searchsorted(pr_thresholds, roc_thresholds[at])]
        results += [(float(1 - fpr[at]), threshold), (float(ppv), threshold)]

    # The last point of the curve is sklearn's artificial one, the first flags everything.
    meets = np.flatnonzero(precision[:-1] >= convention.ppv_target)
    if not (meets > 0).any():
        return [*results, UNDEFINED, UNDEFINED]
    lowest = convention.ppv_rule == "lowest_threshold"
    at = meets[0] if lowest else meets[np.argmin(precision[meets])]
    # TNR is read from the ROC curve at the next threshold it still has: with collinear points
    # dropped this is not always the TNR at `threshold` (table 3, K=10: 56.00 for a true 53.33).
    on_roc = np.flatnonzero(roc_thresholds >= pr_thresholds[at])[-1]
    threshold = float(samples.sign * pr_thresholds[at])
    return [*results, (float(1 - fpr[on_roc]), threshold), (float(recall[at]), threshold)]


def _weights_up_to(samples: _Samples) -> tuple[Floats, Floats, Floats]:
    """Weight of negative and of positive samples up to each distinct rank, highest first.

    Here and below as in scikit-learn, to the last bit, without a second of imports.
    """
    kept = samples.weight != 0
    rank, positive, weight = samples.rank[kept], samples.positive[kept], samples.weight[kept]
    order = rank.size - 1 - np.argsort(rank[::-1], kind="stable")[::-1]  # ties in their own order
    rank, positive, weight = rank[order], positive[order], weight[order]
    last = np.append(np.flatnonzero(np.diff(rank)), rank.size - 1)
    return np.cumsum(~positive * weight)[last], np.cumsum(positive * weight)[last], rank[last]


def _roc(samples: _Samples, convention: Convention) -> tuple[Floats, Floats, Floats]:
    """False and true positive rate at each threshold, from the point where nothing is flagged."""
    fps, tps, thresholds = _weights_up_to(samples)
    if convention.roc_drop_intermediate and fps.size > 2:
        corners = (np.diff(fps, 2) != 0) | (np.diff(tps, 2) != 0)
        kept = np.concatenate([[True], corners, [True]])
        fps, tps, thresholds = fps[kept], tps[kept], thresholds[kept]
    fpr, tpr = (np.append(0.0, sums) / sums[-1] for sums in (fps, tps))
    return fpr, tpr, np.append(np.inf, thresholds)


def _precision_recall(samples: _Samples) -> tuple[Floats, Floats, Floats]:
    """Precision and recall, and thresholds of all but the last point, at recall 0."""
    fps, tps, thresholds = _weights_up_to(samples)
    precision, recall = tps / (tps + fps), tps / tps[-1]
    return np.append(precision[::-1], 1.0), np.append(recall[::-1], 0.0), thresholds[::-1]


def _area(x: Floats, y: Floats) -> float:
    """Area under a curve by trapezoids; `x` grows or shrinks all the way."""
    area = float((np.diff(x) * (y[1:] + y[:-1]) / 2.0).sum())
    return -area if x[0] > x[-1] else area


def _share(weight: Floats, selected: Flags) -> float:
    return float(weight[selected].sum() / weight.sum())


def _oscr(novelty: Floats, known: Flags, correct: Flags, weight: Floats) -> float:
    _, group = np.unique(novelty, return_inverse=True)

    def accepted(selected: Flags, among: Flags) -> Floats:
        share = np.bincount(group, weights=weight * selected).cumsum() / weight[among].sum()
        return np.concatenate([[0.0], share])

    return _area(accepted(~known, ~known), accepted(correct, known))
