"""The SAIL-ON metrics of one test as the public evaluators compute them, their bugs included.

In: P(novel) of N rows, class probabilities (N, C), novel flags and labels. Out: dicts of numbers
under the published names (CONDDA rule 11). Use these to compare with published results; the bugs
(CONDDA rule 14) are mended in `metrics.py`. -1 stands for "no value" where upstream says so, NaN
for a rolling mean without a full window, or an accuracy of no rows.

In ties of the top-k sort the earlier column wins. Upstream takes numpy's unstable argsort, which
differs by version and processor (published transcript fixture: top-3 accuracy 0.91211 with numpy
1.22, 0.91016 with numpy 2.4 and here). On the activity fixture the two order the first three
differently in 2 of 332 rows and no published number changes.

Where upstream would open an interactive console, or accept NaN, a RecordError says what is wrong.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schemas.errors import ConfigError, RecordError

Metric = dict[str, float]
Mode = Literal["full", "pre", "post"]

THRESHOLDS = (0.175, 0.225, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TOP = (1, 3)
ROUND_SIZE = 100
ASYMPTOTIC_START_ROUND = 5
NDP_NAMES = ("accuracy", "precision", "recall", "f1_score", "TP", "FP", "TN", "FN")
NO_VALUE = -1
# Beyond every k: the number of columns would not do, it can be less than 3.
NO_RANK = np.iinfo(np.intp).max


def evaluate(
    detection: ArrayLike,
    classification: ArrayLike,
    novel: ArrayLike,
    labels: ArrayLike,
    ndp_input: ArrayLike | None = None,
    threshold: float = 0.5,
) -> dict[str, Metric]:
    """All eight metrics of one test; round size 100 whatever the test says, as both callers have.

    `ndp_input` is what m_ndp, m_ndp_pre and m_ndp_post threshold. None: the detection itself, as
    the server does and as the published expected numbers were made. LocalHarness takes a fixed
    classification column instead: pass `classification[:, j]` with j = 0 for images, 30 for
    activities, 49 for transcripts (its columns 1, 31 and 50 count the instance id).
    `threshold`, one of THRESHOLDS, is what detects for m_is_cdt_and_is_early.
    """
    detected, truth = checked_detection(detection, novel)
    ndp = detected if ndp_input is None else checked_detection(ndp_input, novel)[0]
    stats = m_num_stats(detected, truth)
    return {
        "m_num": m_num(detected, truth),
        "m_num_stats": stats,
        "m_ndp": m_ndp(ndp, truth, "full"),
        "m_ndp_pre": m_ndp(ndp, truth, "pre"),
        "m_ndp_post": m_ndp(ndp, truth, "post"),
        "m_acc": m_acc(truth, classification, labels),
        "m_acc_failed": m_ndp_failed_reaction(detected, truth, classification, labels),
        "m_is_cdt_and_is_early": m_is_cdt_and_is_early(
            int(stats["GT_indx"]), int(stats[f"P_indx_{threshold}"]), truth.size
        ),
    }


def m_num(p: ArrayLike, y: ArrayLike) -> Metric:
    """Novel rows until the first one with p >= threshold; 1, too, if there is none (bug 1)."""
    detected, truth = checked_detection(p, y)
    if not truth.any():
        return {f"{threshold}": NO_VALUE for threshold in THRESHOLDS}
    first = (detected[truth, None] >= np.array(THRESHOLDS)).argmax(0) + 1
    return {f"{t}": int(row) for t, row in zip(THRESHOLDS, first, strict=True)}


def m_num_stats(p: ArrayLike, y: ArrayLike) -> Metric:
    """First novel row and first row with p >= threshold, counted from 1; N + 1 if there is none."""
    detected, truth = checked_detection(p, y)
    found: Metric = {"GT_indx": first_row(truth)}
    for threshold in THRESHOLDS:
        found[f"P_indx_{threshold}"] = first_row(detected >= threshold)
    return found


def m_ndp(p: ArrayLike, y: ArrayLike, mode: Mode = "full") -> Metric:
    """Per-row detection at p > threshold (not >=, bug 7) over all rows, before or from novelty."""
    detected, truth = checked_detection(p, y)
    if mode not in ("full", "pre", "post"):
        raise ConfigError(f"m_ndp: mode {mode!r} is unknown; expected full, pre or post")
    start = int(truth.argmax())
    if mode == "post":
        if not truth.any():
            return {f"{name}_{t}": NO_VALUE for t in THRESHOLDS for name in NDP_NAMES}
        detected, truth = detected[start:], truth[start:]
    elif mode == "pre" and truth.any() and not truth.all():
        detected, truth = detected[:start], truth[:start]
    counts = confusion_counts(detected[:, None] > np.array(THRESHOLDS), truth)
    tp, fp, tn, fn = counts
    precision, recall = _or_zero(tp, tp + fp), _or_zero(tp, tp + fn)
    with np.errstate(invalid="ignore"):
        accuracy = (tp + tn) / (tp + tn + fp + fn)
    f1_score = _or_zero(2 * precision * recall, precision + recall)
    rates = [np.round(rate, 5) for rate in (accuracy, precision, recall, f1_score)]
    columns = zip(NDP_NAMES, [*rates, *counts], strict=True)
    return {
        f"{name}_{threshold}": value
        for name, values in columns
        for threshold, value in zip(THRESHOLDS, values.tolist(), strict=True)
    }


def m_acc(
    y: ArrayLike,
    P: ArrayLike,
    c: ArrayLike,
    round_size: int = ROUND_SIZE,
    asymptotic_start_round: int = ASYMPTOTIC_START_ROUND,
) -> Metric:
    """Top-1 and top-3 accuracy; the first novel row is counted before novelty, not after (bug 2).

    A part whose labels are all negative, and novelty that starts at the last row (nothing is left
    after it), have no upstream value: RecordError.
    """
    probabilities, labels = checked_classes(P, c)
    truth = checked_flags(y, len(labels))
    ranks = label_ranks(probabilities, labels)
    split = first_row(truth)
    found: Metric = {}

    def add(prefix: str, part: slice, rolling: bool = True) -> None:
        _refuse_unscorable(labels[part], prefix)
        for k in TOP:
            found[f"{prefix}top{k}"] = round(float((ranks[part] < k).mean()), 5)
            if rolling:
                mean, deviation = rolling_accuracy(ranks[part] < k, round_size)
                found[f"{prefix}mean_top{k}"] = mean
                found[f"{prefix}std_top{k}"] = deviation

    add("full_", slice(None), rolling=False)
    if truth.any():
        add("pre_", slice(split))
        add("post_", slice(split, None))
    else:
        add("pre_", slice(None), rolling=False)
        names = ("top", "mean_top", "std_top")
        found |= {f"post_{name}{k}": NO_VALUE for name in names for k in TOP}
    for last in range(asymptotic_start_round * round_size, len(labels), round_size):
        add(f"asymptotic_{last}_", slice(-last, None))
    return found


def m_ndp_failed_reaction(p: ArrayLike, y: ArrayLike, P: ArrayLike, c: ArrayLike) -> Metric:
    """m_ndp of the rows whose label is not in the top k; -1 without a threshold if there is none"""
    detected, truth = checked_detection(p, y)
    probabilities, labels = checked_classes(P, c)
    require_same_rows(len(labels), truth.size)
    _refuse_unscorable(labels, "")
    ranks = label_ranks(probabilities, labels)
    found: Metric = {}
    for k in TOP:
        wrong, nothing = ranks >= k, dict.fromkeys(NDP_NAMES, NO_VALUE)
        part = m_ndp(detected[wrong], truth[wrong]) if wrong.any() else nothing
        found |= {f"top{k}_{name}": value for name, value in part.items()}
    return found


def m_acc_round_wise(P: ArrayLike, c: ArrayLike, round_id: int) -> Metric:
    """Top-1 and top-3 accuracy of the rows handed in, which are to be those of round `round_id`."""
    probabilities, labels = checked_classes(P, c)
    _refuse_unscorable(labels, "")
    ranks = label_ranks(probabilities, labels)
    return {f"top{k}_accuracy_round_{round_id}": round(float((ranks < k).mean()), 5) for k in TOP}


def m_is_cdt_and_is_early(gt_index: int, p_index: int, rows: int) -> Metric:
    """From m_num_stats at 0.5; a detection on the last row is not counted (bug 3)."""
    return {"Is CDT": gt_index <= p_index < rows, "Is Early": p_index < gt_index}


def m_nrp(agent_acc: Metric, baseline_acc: Metric) -> Metric:
    """100 * agent after novelty / baseline before it, each a result of `m_acc`."""
    for k in TOP:
        if baseline_acc[f"pre_top{k}"] == 0:
            raise RecordError(
                "m_nrp",
                f"the baseline's top-{k} accuracy before novelty is 0, so m_nrp has no upstream "
                "value; use a baseline that is right at least once, or the corrected m_nrp",
            )
    return {
        f"M_nrp_post_top{k}": 100 * (agent_acc[f"post_top{k}"] / baseline_acc[f"pre_top{k}"])
        for k in TOP
    }


def label_ranks(probabilities: NDArray, labels: NDArray) -> NDArray[np.intp]:
    """Place of each row's label among its columns, 0 = most likely; NO_RANK if it has no column."""
    columns = probabilities.shape[1]
    inside = (labels >= 0) & (labels < columns)
    column = np.where(inside, labels, 0)
    value = np.take_along_axis(probabilities, column[:, None], axis=1)
    ahead = probabilities > value
    ahead |= (probabilities == value) & (np.arange(columns) < column[:, None])
    return np.where(inside, ahead.sum(1), NO_RANK)


def rolling_accuracy(correct: NDArray[np.bool_], window: int) -> tuple[float, float]:
    """Mean and deviation (ddof 1) of the rolling mean; NaN where there are too few windows.

    Sums run over an array as long as the rows, with 0 where no window ends: so does pandas, and
    another order of addition would change the last digit of the published numbers.
    """
    windows = len(correct) - window + 1
    if windows < 1:
        return float("nan"), float("nan")
    total = np.concatenate([[0], np.cumsum(correct)])
    means = np.zeros(len(correct))
    means[window - 1 :] = (total[window:] - total[:-window]) / window
    mean = means.sum() / windows
    if windows == 1:
        return float(mean), float("nan")
    squares = (mean - means) ** 2
    squares[: window - 1] = 0
    return float(mean), float(np.sqrt(squares.sum() / (windows - 1)))


def confusion_counts(flagged: NDArray[np.bool_], novel: NDArray[np.bool_]) -> NDArray[np.int64]:
    """TP, FP, TN, FN of each column of `flagged`, shape (4, columns)."""
    hits = flagged[novel].sum(0)
    false = flagged[~novel].sum(0)
    return np.stack([hits, false, (~novel).sum() - false, novel.sum() - hits])


def first_row(flags: NDArray[np.bool_]) -> int:
    """The first set row, counted from 1; N + 1 if there is none."""
    return int(flags.argmax()) + 1 if flags.any() else flags.size + 1


def checked_detection(p: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """P(novel) and novel flags as arrays of one length, in range."""
    detected = _within_unit(p, "detection", 1, "one number for each row")
    return detected, checked_flags(y, detected.size)


def checked_classes(P: ArrayLike, c: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities (N, C) and labels (N,), all below C; negative labels pass (bug 5)."""
    probabilities, labels = checked_probabilities(P), checked_labels(c)
    require_same_rows(len(probabilities), len(labels))
    if labels.max() >= probabilities.shape[1]:
        raise RecordError(
            "labels",
            f"label {labels.max()} has no column: classification has {probabilities.shape[1]}, "
            "numbered from 0; post a probability for every class",
        )
    return probabilities, labels


def checked_probabilities(P: ArrayLike) -> NDArray[np.float64]:
    """Class probabilities (N, C), neither of them 0, in range; rows need not sum to 1."""
    return _within_unit(P, "classification", 2, "rows of class probabilities")


def checked_labels(c: ArrayLike) -> NDArray[np.int64]:
    """Labels as whole numbers."""
    labels = _numbers(c, "labels")
    if labels.ndim != 1 or not (np.isfinite(labels) & (labels == np.floor(labels))).all():
        raise RecordError("labels", "labels are not a list of whole numbers; mend the ground truth")
    return labels.astype(np.int64)


def checked_flags(y: ArrayLike, rows: int) -> NDArray[np.bool_]:
    """Novel flags of `rows` rows."""
    flags = _numbers(y, "novel")
    if flags.ndim != 1 or not np.isin(flags, (0, 1)).all():
        raise RecordError("novel", "novel flags are not a list of 0 and 1; mend the ground truth")
    require_same_rows(rows, flags.size)
    return flags.astype(np.bool_)


def require_same_rows(posted: int, truth: int) -> None:
    """Results and ground truth have one row for each instance."""
    if posted != truth:
        raise RecordError(
            "rows",
            f"{posted} rows of results but {truth} of ground truth; post each row of the test once",
        )


def _refuse_unscorable(labels: NDArray, part: str) -> None:
    where = f"the {part.strip('_')} part of the test" if part else "the rows"
    if labels.size == 0:
        why = "is empty because novelty starts at the last row; upstream has no value here"
        raise RecordError("labels", f"{where} {why}, use the corrected metrics")
    if (labels < 0).all():
        cure = "use the corrected metrics, where the unknown column is right for them"
        raise RecordError(
            "labels", f"all labels of {where} are negative, which upstream refuses; {cure}"
        )


def _or_zero(numerator: NDArray, denominator: NDArray) -> NDArray[np.float64]:
    zeros = np.zeros(len(numerator))
    return np.divide(numerator, denominator, out=zeros, where=denominator != 0)


def _numbers(values: ArrayLike, name: str) -> NDArray[np.float64]:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RecordError(name, f"{name} holds something that is no number ({error})") from error


def _within_unit(
    given: ArrayLike, name: str, dimensions: int, expected: str
) -> NDArray[np.float64]:
    """Probabilities with so many dimensions, none of them 0."""
    values = _numbers(given, name)
    if values.ndim != dimensions or values.size == 0:
        raise RecordError(name, f"{name} has shape {values.shape}; expected {expected}")
    bad = ~((values >= 0) & (values <= 1))
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        raise RecordError(
            name,
            f"{name} of row {row} is {values[bad][0]}; expected probabilities between 0 and 1",
        )
    return values
