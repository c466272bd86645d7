"""How far a metric could be off by the choice of samples: 95 % bootstrap intervals.

`intervals` takes what `evaluate` takes and gives (metric, low, high), a row for every metric of
`evaluate` in its order. Known and novel samples are drawn apart, with replacement, as many as there
are. With `sequences` whole sequences are drawn: those with a novel sample and those without apart.

A draw is a count for every sample. Its metrics are those that `evaluate` gives for the samples
repeated by their counts (`resampled` gives them for counts of one's own), but sklearn is not asked:
samples are sorted once and a block of draws is worked on at a time. Three rules of `evaluate` hang
on the last bit of a sum (a target just reached, precisions alike, collinear points of the ROC
curve), so sums are made in the order in which sklearn makes them, one sample after the other.

The same input gives the same bits on the same machine. The order of rows does not matter: rows are
sorted by score, truth, weight and correctness, named sequences by name. Names of sequences do
matter, since they say which of them a random number means. The first draws of a longer run are the
draws of a shorter one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from schemas.errors import ConfigError
from tasks.evaluation.conventions import Convention
from tasks.evaluation.metrics import Classes, evaluate

INTERVALS = {"metric": pl.String, "low": pl.Float64, "high": pl.Float64}
PERCENTILES = (2.5, 97.5)
BLOCK = 2**17  # numbers in one array of a block; about a dozen such arrays live at a time

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


def intervals(
    scores: ArrayLike,
    novel: ArrayLike,
    convention: Convention,
    *,
    weights: ArrayLike | None = None,
    classes: Classes | None = None,
    sequences: Sequence[str | None] | None = None,
    seed: int,
    draws: int = 1000,
) -> pl.DataFrame:
    """2.5 % and 97.5 % percentiles of every metric over the draws in which it has a value.

    Null where the metric has no value for the samples themselves, or none in more than half of the
    draws. A sample whose sequence is None is a sequence by itself. Where only one sample (or
    sequence) of a kind exists it is in every draw, so the interval shows nothing of its chance.
    """
    if draws < 1:
        raise ConfigError(f"draws is {draws}, expected 1 or more")
    frame = evaluate(scores, novel, convention, weights, classes)
    rows = _rows(scores, novel, convention, weights, classes)
    units = _units(rows.order, sequences)
    values = np.concatenate(
        [_values(rows, counts, convention) for counts in _draws(rows.novel, units, seed, draws)]
    )
    bounds: list[tuple[str, float | None, float | None]] = []
    for metric, value, column in zip(frame["metric"], frame["value"], values.T, strict=True):
        defined = column[~np.isnan(column)]
        if value is None or 2 * defined.size < draws:
            bounds.append((metric, None, None))
        else:
            low, high = np.percentile(defined, PERCENTILES)
            bounds.append((metric, float(low), float(high)))
    return pl.DataFrame(bounds, schema=INTERVALS, orient="row")


def share_intervals(
    hits: ArrayLike,
    novel: ArrayLike,
    *,
    sequences: Sequence[str | None] | None = None,
    seed: int,
    draws: int = 1000,
) -> Floats:
    """2.5 % and 97.5 % percentiles of the share of hits in each column of `hits` (N, M): (M, 2).

    Samples are drawn as by `intervals`.
    """
    table, truth = np.asarray(hits, dtype=np.float64), np.asarray(novel).astype(np.bool_)
    order = np.lexsort((*table.T, truth))
    units = _units(order, sequences)
    sums = np.zeros((int(units.max()) + 1, table.shape[1] + 1))
    np.add.at(sums, units, np.column_stack([table, np.ones(len(table))])[order])
    has_novel = np.zeros(len(sums), dtype=np.bool_)
    has_novel[units[truth[order]]] = True
    totals = np.concatenate(
        [counts @ sums for counts in _draws(has_novel, np.arange(len(sums)), seed, draws)]
    )
    shares = totals[:, :-1] / totals[:, -1:]
    bounds: Floats = np.percentile(shares, PERCENTILES, axis=0).T
    return bounds


def resampled(
    scores: ArrayLike,
    novel: ArrayLike,
    convention: Convention,
    counts: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    classes: Classes | None = None,
) -> pl.DataFrame:
    """Metrics of given draws: `counts` has a row a draw and a column a sample; so has the result.

    Its columns are the metrics. Null: `evaluate` would give null for the repeated samples, or
    refuse them since all weights of a class are zero.
    """
    frame = evaluate(scores, novel, convention, weights, classes)
    rows = _rows(scores, novel, convention, weights, classes)
    table = np.asarray(counts, dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != rows.order.size:
        raise ConfigError(f"counts have shape {table.shape}, expected (draws, {rows.order.size})")
    values = _values(rows, table[:, rows.order], convention)
    return pl.DataFrame(dict(zip(frame["metric"], values.T, strict=True))).fill_nan(None)


@dataclass(frozen=True)
class _Rows:
    """Samples from the most to the least positive score.

    `order` are their places in the input; `ends` the last place of every distinct score; `correct`
    the known samples whose class is right, none without classes; `weight` none if not given.
    """

    order: Integers
    novel: Flags
    positive: Flags
    ends: Integers
    weight: Floats | None
    correct: Flags | None


def _rows(
    scores: ArrayLike,
    novel: ArrayLike,
    convention: Convention,
    weights: ArrayLike | None,
    classes: Classes | None,
) -> _Rows:
    """The input has been accepted by `evaluate`."""
    score = np.asarray(scores, dtype=np.float64)
    truth = np.asarray(novel).astype(np.bool_)
    weight = None if weights is None else np.asarray(weights).astype(np.float64)
    correct = None
    if classes is not None:
        true, predicted = (np.asarray(values) for values in classes)
        correct = ~truth & (true == predicted)
    novel_positive = convention.positive == "novel"
    higher_is_positive = novel_positive == (convention.score_direction == "higher_is_novel")
    falling = -score if higher_is_positive else score
    keys = [key for key in (correct, weight, truth, falling) if key is not None]
    order = np.lexsort(keys)
    falling, truth = falling[order], truth[order]
    return _Rows(
        order=order,
        novel=truth,
        positive=truth if novel_positive else ~truth,
        ends=np.flatnonzero(np.append(falling[1:] != falling[:-1], True)),
        weight=None if weight is None else weight[order],
        correct=None if correct is None else correct[order],
    )


def _units(order: Integers, sequences: Sequence[str | None] | None) -> Integers:
    """The number of the unit that every row is drawn with: named sequences first, by name.

    `order` are the places of the rows among the sequences.
    """
    size = order.size
    if sequences is None:
        return np.arange(size)
    names = list(sequences)
    if len(names) != size:
        raise ConfigError(f"sequences has {len(names)} values, expected {size} as the scores")
    number = {name: at for at, name in enumerate(sorted({n for n in names if n is not None}))}
    units = np.empty(size, dtype=np.int64)
    singles = len(number)
    for row, place in enumerate(order):
        name = names[place]
        if name is None:
            units[row] = singles
            singles += 1
        else:
            units[row] = number[name]
    return units


def _draws(novel: Flags, units: Integers, seed: int, draws: int) -> Iterator[Integers]:
    """Blocks of counts (a row a draw, a column a row of the samples).

    Each of the two strata has a generator of its own that goes on from block to block, so that the
    size of the blocks does not matter.
    """
    size = int(units.max()) + 1
    has_novel = np.zeros(size, dtype=np.bool_)
    has_novel[units[novel]] = True
    strata = [
        (np.random.default_rng([seed, number]), np.flatnonzero(members))
        for number, members in enumerate((~has_novel, has_novel))
        if members.any()
    ]
    alone = size == units.size and bool((units == np.arange(size)).all())
    most = max(1, BLOCK // units.size)
    for start in range(0, draws, most):
        height = min(most, draws - start)
        draw_units = np.concatenate(
            [
                members[generator.integers(0, members.size, (height, members.size))]
                for generator, members in strata
            ],
            axis=1,
        )
        draw_units += size * np.arange(height)[:, None]
        counts = np.bincount(draw_units.ravel(), minlength=height * size).reshape(height, size)
        yield counts if alone else counts[:, units]


@dataclass(frozen=True)
class _Block:
    """Weights of a block of draws (rows) at the distinct scores (columns), most positive first.

    `positive`, `negative` and `correct` (none without classes) are the weights at a score; `tps`
    and `fps` the sums of the first two up to a score, with the same last bits as sklearn's.
    """

    positive: Floats
    negative: Floats
    tps: Floats
    fps: Floats
    correct: Floats | None

    def part(self, draws: Flags) -> "_Block":
        if draws.all():
            return self
        correct = None if self.correct is None else self.correct[draws]
        return _Block(
            positive=self.positive[draws],
            negative=self.negative[draws],
            tps=self.tps[draws],
            fps=self.fps[draws],
            correct=correct,
        )


def _values(rows: _Rows, counts: Integers, convention: Convention) -> Floats:
    """A row a draw, a column a metric in the order of `evaluate`; NaN where there is no value."""
    block = _block(rows, counts, convention)
    positive, negative = block.tps[:, -1], block.fps[:, -1]
    both = (positive > 0) & (negative > 0)
    whole = block.part(both)
    detection = [*_areas(whole, convention), *_operating_points(whole, convention)]
    with np.errstate(invalid="ignore"):
        shares = [positive / (positive + negative)]
        if block.correct is not None:
            known = positive if convention.positive == "known" else negative
            shares.append(block.correct.sum(axis=1) / known)
    oscr = [] if whole.correct is None else [_oscr(whole.correct, whole, convention)]

    def spread(column: Floats) -> Floats:
        full = np.full(both.size, np.nan)
        full[both] = column
        return full

    columns = [*map(spread, detection), *shares, *map(spread, oscr)]
    values: Floats = np.stack(columns, axis=1)
    if rows.weight is not None:
        for side, weight in ((rows.positive, positive), (~rows.positive, negative)):
            values[(weight == 0) & (counts[:, side] > 0).any(axis=1)] = np.nan  # refused
    return values


def _block(rows: _Rows, counts: Integers, convention: Convention) -> _Block:
    if rows.weight is not None:
        return _weighted_block(rows, rows.weight, counts)
    positive, negative = (
        _sums(counts, side, rows.ends) for side in (rows.positive, ~rows.positive)
    )
    correct = None if rows.correct is None else _steps(_sums(counts, rows.correct, rows.ends))
    tps, fps = positive.astype(np.float64), negative.astype(np.float64)
    share = convention.normal_share
    if share is None:
        return _Block(_steps(tps), _steps(fps), tps, fps, correct)
    known, unknown = (
        (positive, negative) if convention.positive == "known" else (negative, positive)
    )
    weight = np.ones(counts.shape[0])
    both = (known[:, -1] > 0) & (unknown[:, -1] > 0)
    weight[both] = share / (1 - share) * unknown[both, -1] / known[both, -1]
    sums, steps = _repeated_sums(known, weight), _steps(known) * weight[:, None]
    if correct is not None:
        correct = correct * weight[:, None]
    if convention.positive == "known":
        return _Block(steps, _steps(fps), sums, fps, correct)
    return _Block(_steps(tps), steps, tps, sums, correct)


def _sums(counts: Integers, selected: Flags, ends: Integers) -> Integers:
    sums: Integers = (counts * selected).cumsum(axis=1)
    return sums if ends.size == selected.size else sums[:, ends]


def _steps(sums: NDArray) -> Floats:
    steps = np.empty(sums.shape)
    steps[:, 0] = sums[:, 0]
    np.subtract(sums[:, 1:], sums[:, :-1], out=steps[:, 1:])
    return steps


def _repeated_sums(counts: Integers, weight: Floats) -> Floats:
    """The weight added up so many times. A product may differ from this sum in its last bit."""
    sums = np.empty(counts.shape)
    for value in np.unique(weight):
        same = weight == value
        times = counts[same]
        sums[same] = np.append(0.0, np.full(times.max(), value).cumsum())[times]
    return sums


def _weighted_block(rows: _Rows, weight: Floats, counts: Integers) -> _Block:
    """Weights differ from sample to sample, so each draw is written out in full and summed."""
    starts = np.append(0, rows.ends[:-1] + 1)
    masses = [weight * side for side in (rows.positive, ~rows.positive)]
    positive, negative = (np.add.reduceat(counts * mass, starts, axis=1) for mass in masses)
    sums = np.empty((2, *positive.shape))
    for draw, times in enumerate(counts):
        ends = times.cumsum()[rows.ends]
        for side, mass in enumerate(masses):
            sums[side, draw] = np.append(0.0, np.repeat(mass, times).cumsum())[ends]
    correct = None
    if rows.correct is not None:
        correct = np.add.reduceat(counts * (weight * rows.correct), starts, axis=1)
    return _Block(positive, negative, sums[0], sums[1], correct)


def _areas(block: _Block, convention: Convention) -> list[Floats]:
    """auroc, aupr, aupr_in, aupr_out, average_precision. Both classes are in every draw."""
    positive, negative = block.tps[:, -1], block.fps[:, -1]
    above = np.einsum("ij,ij->i", block.negative, block.tps)
    level = np.einsum("ij,ij->i", block.negative, block.positive)
    auroc = (above - level / 2) / positive / negative
    step_wise, trapezoid = _precision_areas(block.positive, block.tps, block.fps)
    turned = block.negative[:, ::-1], block.positive[:, ::-1]
    others = _precision_areas(turned[0], turned[0].cumsum(axis=1), turned[1].cumsum(axis=1))
    if convention.pr_area == "trapezoid":
        ours, theirs = trapezoid, others[1]
    else:
        ours, theirs = step_wise, others[0]
    inside, outside = (ours, theirs) if convention.inside == convention.positive else (theirs, ours)
    return [auroc, ours, inside, outside, step_wise]


def _precision_areas(steps: Floats, tps: Floats, fps: Floats) -> tuple[Floats, Floats]:
    """Step-wise and by trapezoids. Precision is 1 before the first sample, as sklearn's end is."""
    precision = _precision(tps, fps, 1.0)
    total = tps[:, -1]
    step_wise = np.einsum("ij,ij->i", steps, precision)
    before = steps[:, 0] + np.einsum("ij,ij->i", steps[:, 1:], precision[:, :-1])
    return step_wise / total, (step_wise + before) / 2 / total


def _precision(tps: Floats, fps: Floats, empty: float) -> Floats:
    flagged = tps + fps
    precision = np.full(tps.shape, empty)
    return np.divide(tps, flagged, out=precision, where=flagged > 0)


def _operating_points(block: _Block, convention: Convention) -> list[Floats]:
    """What stands after the areas: FPR at the target, then TNR and PPV, TNR and TPR.

    A score that is in no sample of a draw repeats the point before it and changes no value.
    """
    target, ppv_target = convention.tpr_target, convention.ppv_target
    if convention.fpr_rule is None and ppv_target is None:
        return []
    width = block.tps.shape[1]
    draw = np.arange(block.tps.shape[0])
    tpr, fpr = block.tps / block.tps[:, -1:], block.fps / block.fps[:, -1:]
    columns = []
    if convention.fpr_rule == "interpolated":
        columns.append(_interpolated(tpr, fpr, target))
        if ppv_target is None:
            return columns

    present = block.positive + block.negative > 0
    corners = _corners(block, present) if convention.roc_drop_intermediate else None
    at = _corner(corners, (tpr < target).sum(axis=1), width, "next")
    fpr_at, tpr_at = fpr[draw, at], tpr[draw, at]
    if convention.fpr_rule == "first_threshold":
        columns.append(fpr_at)
    if ppv_target is None:
        return columns

    precision = _precision(block.tps, block.fps, 0.0)
    everything = (tpr_at == 1) & (fpr_at == 1)
    columns += [np.where(everything, np.nan, value) for value in (1 - fpr_at, precision[draw, at])]

    meets = precision >= ppv_target
    # The last score of a draw flags everything: if no other point reaches the target, none counts.
    final = width - 1 - present[:, ::-1].argmax(axis=1)
    undefined = ~(meets & (np.arange(width) < final[:, None])).any(axis=1)
    if convention.ppv_rule == "lowest_threshold":
        at = width - 1 - meets[:, ::-1].argmax(axis=1)
    else:
        precision[~meets] = np.inf
        at = width - 1 - precision[:, ::-1].argmin(axis=1)
    on_roc = _corner(corners, at, width, "previous")
    values = (1 - fpr[draw, on_roc], tpr[draw, at])
    return [*columns, *(np.where(undefined, np.nan, value) for value in values)]


def _interpolated(tpr: Floats, fpr: Floats, target: float) -> Floats:
    """np.interp of every draw, from the last point at or below the target to the next one."""
    draw = np.arange(tpr.shape[0])
    after = (tpr <= target).sum(axis=1)
    inner = np.minimum(after, tpr.shape[1] - 1)
    x0, y0 = (np.where(after > 0, rate[draw, after - 1], 0.0) for rate in (tpr, fpr))
    x1, y1 = tpr[draw, inner], fpr[draw, inner]
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (y1 - y0) / (x1 - x0) * (target - x0) + y0
    return np.where(after == tpr.shape[1], y0, between)


def _corners(block: _Block, present: Flags) -> Integers:
    """Points that stay on the ROC curve when sklearn drops collinear ones, as flat places.

    Only points with samples (`present`) count. A point is dropped where both sums go on by the
    step that led to it.
    """
    flat = np.flatnonzero(present)
    stays = np.ones(flat.size, dtype=np.bool_)
    fps, tps = (np.diff(sums.ravel()[flat]) for sums in (block.fps, block.tps))
    stays[1:-1] = (fps[1:] != fps[:-1]) | (tps[1:] != tps[:-1])
    ends = present.sum(axis=1).cumsum()
    stays[ends - 1] = True
    stays[ends[:-1]] = True
    return flat[stays]


def _corner(corners: Integers | None, at: Integers, width: int, side: str) -> Integers:
    """The nearest corner at or after (`next`), or at or before (`previous`), a place of each draw.

    The first and the last point of a draw are corners, so there always is one.
    """
    if corners is None:
        return at
    base = width * np.arange(at.size)
    if side == "next":
        index = np.searchsorted(corners, base + at)
    else:
        index = np.searchsorted(corners, base + at, "right") - 1
    nearest: Integers = corners[index] - base
    return nearest


def _oscr(correct: Floats, block: _Block, convention: Convention) -> Floats:
    """Known and correct over unknown accepted; a tie counts half."""
    accepted = correct.cumsum(axis=1) - correct / 2
    if convention.positive == "known":
        unknown, known = block.negative, block.tps[:, -1]
    else:
        unknown, known = block.positive, block.fps[:, -1]
        accepted = correct.sum(axis=1)[:, None] - accepted
    area: Floats = np.einsum("ij,ij->i", unknown, accepted) / known / unknown.sum(axis=1)
    return area
