"""The SAIL-ON metrics of one test, corrected, and the program metrics M1 to M6 over many tests.

In: P(world changed) of N rows, class probabilities (N, C), the places of their columns (`Columns`),
novel flags and labels. Out: dicts under the published names with None for "no value"; `long_form`
puts them beside those of `metrics_upstream.py`. Shares keep upstream's 5 decimals, so that a
difference between the two forms is a repair. Repairs, by the numbers of docs/condda.md, rule 14:

1. m_num is None, not 1, where novelty is never detected.
2. The first novel row is the first row after novelty, not the last before it.
3. Detection on the last row is a correct detection (Is CDT).
4. m_ndp thresholds the detection (or the per-row novelty the agent posted), never a class column.
5. A label that is no known column (negative, or K) is right if the unknown or a discovered column
   is chosen; each known label is right in its own column.
6. Ties in probability go to the earlier column.
7. One comparison, p >= threshold, everywhere; m_nrp takes the agent's last rows, as the docs say;
   rolling windows and asymptotic steps have the round size of the test, not 100.
And: no value is None, where upstream has -1, 0 (for 0/0), NaN, N + 1 or the whole test's value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from schemas.errors import ConfigError, RecordError
from tasks.condda.metrics_upstream import (
    ASYMPTOTIC_START_ROUND,
    NDP_NAMES,
    THRESHOLDS,
    TOP,
    Mode,
    checked_detection,
    checked_flags,
    checked_labels,
    checked_probabilities,
    confusion_counts,
    first_row,
    label_ranks,
    require_same_rows,
    rolling_accuracy,
)

Metric = dict[str, float | None]
Place = Literal["first", "after_known", "last", "none"]
Condition = Literal["system", "given"]

ASYMPTOTIC_ROWS = 100
LONG_FORM = {
    "form": pl.String,
    "metric": pl.String,
    "name": pl.String,
    "value": pl.Float64,
}


@dataclass(frozen=True)
class Columns:
    """Where the columns of a (N, 1 + K + D) result stand; CONDDA rule 3 says it per domain.

    first: unknown, K known, D discovered, so known labels are 1..K (images, the CONDDA docs);
    after_known: K known, unknown, D discovered; last: K known, D discovered, unknown; none: no
    unknown column. In these three known labels are 0..K-1. Any other label is a novel class.
    """

    known: int
    unknown: Place

    def __post_init__(self) -> None:
        if self.known < 1:
            raise ConfigError(f"columns: {self.known} known classes; expected 1 or more")
        if self.unknown not in ("first", "after_known", "last", "none"):
            raise ConfigError(
                f"columns: unknown column {self.unknown!r}; expected first, after_known, last, none"
            )

    def is_known(self, labels: NDArray) -> NDArray[np.bool_]:
        """Whether a label, or a column number, is that of a known class."""
        first = int(self.unknown == "first")
        return (labels >= first) & (labels < first + self.known)

    def unknown_column(self, width: int) -> int | None:
        """The number of the unknown column among `width`."""
        self.discovered(width)
        places = {"first": 0, "after_known": self.known, "last": width - 1, "none": None}
        return places[self.unknown]

    def discovered(self, width: int) -> int:
        """How many of `width` columns are discovered classes."""
        extra = width - self.known - int(self.unknown != "none")
        if extra < 0:
            raise RecordError(
                "columns",
                f"a result of {width} columns cannot hold {self.known} known classes with unknown "
                f"column {self.unknown!r}; post every column or mend the number of known classes",
            )
        return extra

    def right_columns(self, probabilities: NDArray, labels: NDArray) -> NDArray[np.int64]:
        """The column that would be right: the label's own, or the likeliest that is not known.

        -1 for a novel row where there is no unknown and no discovered column.
        """
        width = probabilities.shape[1]
        self.discovered(width)
        novel = np.flatnonzero(~self.is_known(np.arange(width)))
        if novel.size == 0:
            return np.where(self.is_known(labels), labels, -1)
        likeliest = novel[probabilities[:, novel].argmax(1)]
        return np.where(self.is_known(labels), labels, likeliest)


def evaluate(
    detection: ArrayLike,
    classification: ArrayLike,
    novel: ArrayLike,
    labels: ArrayLike,
    columns: Columns,
    round_size: int,
    ndp_input: ArrayLike | None = None,
) -> dict[str, Metric]:
    """All eight metrics of one test; `ndp_input` is the per-row novelty, if the agent posted it."""
    ndp = detection if ndp_input is None else ndp_input
    stats = m_num_stats(detection, novel)
    return {
        "m_num": m_num(detection, novel),
        "m_num_stats": stats,
        "m_ndp": m_ndp(ndp, novel, "full"),
        "m_ndp_pre": m_ndp(ndp, novel, "pre"),
        "m_ndp_post": m_ndp(ndp, novel, "post"),
        "m_acc": m_acc(novel, classification, labels, columns, round_size),
        "m_acc_failed": m_ndp_failed_reaction(detection, novel, classification, labels, columns),
        "m_is_cdt_and_is_early": m_is_cdt_and_is_early(stats["GT_indx"], stats["P_indx_0.5"]),
    }


def m_num(p: ArrayLike, y: ArrayLike) -> Metric:
    """Novel rows up to and with the first detected one; None if none is (repair 1)."""
    detected, truth = checked_detection(p, y)
    return {f"{t}": _index(detected[truth] >= t) for t in THRESHOLDS}


def m_num_stats(p: ArrayLike, y: ArrayLike) -> Metric:
    """First novel and first detected row, counted from 1; None if there is none."""
    detected, truth = checked_detection(p, y)
    found: Metric = {"GT_indx": _index(truth)}
    return found | {f"P_indx_{t}": _index(detected >= t) for t in THRESHOLDS}


def m_ndp(p: ArrayLike, y: ArrayLike, mode: Mode = "full") -> Metric:
    """Per-row detection at p >= threshold (repair 7); a share of nothing is None, a count 0."""
    return _ndp(*checked_detection(p, y), mode)


def _ndp(detected: NDArray[np.float64], truth: NDArray[np.bool_], mode: Mode) -> Metric:
    part = _part(truth, mode)
    counts = confusion_counts(detected[part, None] >= np.array(THRESHOLDS), truth[part])
    found: Metric = {}
    for threshold, (tp, fp, tn, fn) in zip(THRESHOLDS, counts.T.tolist(), strict=True):
        shares = (
            _share(tp + tn, tp + fp + tn + fn),
            _share(tp, tp + fp),
            _share(tp, tp + fn),
            _share(2 * tp, 2 * tp + fp + fn),
        )
        values = zip(NDP_NAMES, (*shares, tp, fp, tn, fn), strict=True)
        found |= {f"{name}_{threshold}": value for name, value in values}
    return found


def m_acc(
    y: ArrayLike,
    P: ArrayLike,
    c: ArrayLike,
    columns: Columns,
    round_size: int,
    asymptotic_start_round: int = ASYMPTOTIC_START_ROUND,
    asymptotic_rows: int = ASYMPTOTIC_ROWS,
) -> Metric:
    """Top-1 and top-3 accuracy of all rows, before and from novelty (repairs 2, 5, 6, 7).

    One name more than upstream: post_asymptotic_topk, the last `asymptotic_rows` rows (or as many
    as there are) from novelty on, which the docs ask for in M3, M4 and M6.
    """
    if min(round_size, asymptotic_start_round, asymptotic_rows) < 1:
        raise ConfigError("m_acc: round size, first round and rows of the end must be 1 or more")
    ranks = _ranks(P, c, columns)
    truth = checked_flags(y, len(ranks))
    post = ranks[_part(truth, "post")]
    parts = {"pre_": ranks[_part(truth, "pre")], "post_": post}
    for last in range(asymptotic_start_round * round_size, len(ranks), round_size):
        parts[f"asymptotic_{last}_"] = ranks[-last:]
    found: Metric = {}
    for k in TOP:
        found[f"full_top{k}"] = _accuracy(ranks, k)
        found[f"post_asymptotic_top{k}"] = _accuracy(post[-asymptotic_rows:], k)
        for prefix, part in parts.items():
            mean, deviation = rolling_accuracy(part < k, round_size)
            found[f"{prefix}top{k}"] = _accuracy(part, k)
            found[f"{prefix}mean_top{k}"] = _number(mean)
            found[f"{prefix}std_top{k}"] = _number(deviation)
    return found


def m_ndp_failed_reaction(
    p: ArrayLike, y: ArrayLike, P: ArrayLike, c: ArrayLike, columns: Columns
) -> Metric:
    """m_ndp of the rows that are wrong; the same names where none is (counts 0, shares None)."""
    detected, truth = checked_detection(p, y)
    ranks = _ranks(P, c, columns)
    require_same_rows(len(ranks), truth.size)
    found: Metric = {}
    for k in TOP:
        wrong = ranks >= k
        part = _ndp(detected[wrong], truth[wrong], "full")
        found |= {f"top{k}_{name}": value for name, value in part.items()}
    return found


def m_is_cdt_and_is_early(gt_index: float | None, p_index: float | None) -> Metric:
    """Detected at or after novelty, the last row included (repair 3); detected before it.

    A test without novelty has no CDT (None), and any detection in it is early.
    """
    if gt_index is None:
        return {"Is CDT": None, "Is Early": p_index is not None}
    return {
        "Is CDT": p_index is not None and p_index >= gt_index,
        "Is Early": p_index is not None and p_index < gt_index,
    }


def m_false_alarm(stats: Metric, nuisance: bool) -> Metric:
    """Of a test without novelty: whether there was an alarm, under `unchanged` or `nuisance`."""
    if stats["GT_indx"] is not None:
        return {}
    return {"nuisance" if nuisance else "unchanged": stats["P_indx_0.5"] is not None}


def m_nrp(agent_acc: Metric, baseline_acc: Metric) -> Metric:
    """100 * agent's end of the test / baseline before novelty; None if either is missing or 0/0."""
    return {f"M_nrp_post_top{k}": _percent([_nrp(agent_acc, baseline_acc, k)]) for k in TOP}


@dataclass(frozen=True)
class Trial:
    """One test of the program metrics: `evaluate` of the agent and `m_acc` of the baseline."""

    agent: Mapping[str, Metric]
    condition: Condition
    baseline_acc: Metric | None = None

    def __post_init__(self) -> None:
        if self.condition not in ("system", "given"):
            raise ConfigError(f"trial: condition {self.condition!r}; expected system or given")


def program_metrics(trials: Sequence[Trial], k: Literal[1, 3] = 1) -> Metric:
    """M1 to M6 (docs/condda.md, rule 12) with top-k accuracy as the task performance; None is N/A.

    M1, M2, M2.1 take system-detection trials: with a red light the answer is given. M1: mean rows
    from novelty to detection over the correctly detected; M2: percent of trials with novelty that
    are; M2.1: percent of trials detected early; no_cdt: percent of trials with novelty in which
    nothing was detected, which M1 says nothing of; false_alarms, nuisance_alarms: percent with an
    alarm of the trials without novelty, as they are and with known classes shown otherwise. M3 and
    M4 are NRP (a ratio) under system and under given detection: the docs do not say which is which,
    this is the order in which they name the conditions. M5 (OPTI), M6_docs and M6_balanced (APTI
    without and with the agent in the denominator) take all trials that have a baseline. A trial
    whose ratio has no value (no rows, or a denominator of 0) is left out of that mean.
    """
    system = [trial for trial in trials if trial.condition == "system"]
    flags = [trial.agent["m_is_cdt_and_is_early"] for trial in system]
    # Both have a number where the change was correctly detected.
    detected = [
        cast(dict[str, float], trial.agent["m_num_stats"])
        for trial, flag in zip(system, flags, strict=True)
        if flag["Is CDT"]
    ]
    changing = [flag for flag in flags if flag["Is CDT"] is not None]
    alarms = [trial.agent.get("m_false_alarm", {}) for trial in system]
    pairs = [(t.agent["m_acc"], t.baseline_acc, t.condition) for t in trials if t.baseline_acc]
    end, post = f"post_asymptotic_top{k}", f"post_top{k}"
    return {
        "M1": _mean([stats["P_indx_0.5"] - stats["GT_indx"] for stats in detected]),
        "M2": _percent([flag["Is CDT"] for flag in flags]),
        "M2.1": _percent([flag["Is Early"] for flag in flags]),
        "no_cdt": _percent([not (flag["Is CDT"] or flag["Is Early"]) for flag in changing]),
        "false_alarms": _percent([alarm.get("unchanged") for alarm in alarms]),
        "nuisance_alarms": _percent([alarm.get("nuisance") for alarm in alarms]),
        "M3": _mean([_nrp(agent, base, k) for agent, base, kind in pairs if kind == "system"]),
        "M4": _mean([_nrp(agent, base, k) for agent, base, kind in pairs if kind == "given"]),
        "M5": _mean([_balanced(agent[post], base[post]) for agent, base, _ in pairs]),
        "M6_docs": _mean([_ratio(agent[end], base[end]) for agent, base, _ in pairs]),
        "M6_balanced": _mean([_balanced(agent[end], base[end]) for agent, base, _ in pairs]),
    }


def long_form(
    upstream: Mapping[str, Mapping[str, float]], corrected: Mapping[str, Metric]
) -> pl.DataFrame:
    """Both forms as rows (form, metric, name, value); flags are 0 or 1, None and NaN are null."""
    rows = [
        (form, metric, name, None if value is None else _number(float(value)))
        for form, result in (("upstream", upstream), ("corrected", corrected))
        for metric, values in result.items()
        for name, value in values.items()
    ]
    return pl.DataFrame(rows, schema=LONG_FORM, orient="row")


def _ranks(P: ArrayLike, c: ArrayLike, columns: Columns) -> NDArray[np.intp]:
    """Place of the right column in each row, 0 = chosen."""
    probabilities, labels = checked_probabilities(P), checked_labels(c)
    require_same_rows(len(probabilities), len(labels))
    return label_ranks(probabilities, columns.right_columns(probabilities, labels))


def _part(truth: NDArray[np.bool_], mode: Mode) -> slice:
    """Rows before the first novel one (all if there is none), or from it on (none if so)."""
    if mode not in ("full", "pre", "post"):
        raise ConfigError(f"m_ndp: mode {mode!r} is unknown; expected full, pre or post")
    start = first_row(truth) - 1
    return {"full": slice(None), "pre": slice(start), "post": slice(start, None)}[mode]


def _index(flags: NDArray[np.bool_]) -> int | None:
    return first_row(flags) if flags.any() else None


def _accuracy(ranks: NDArray[np.intp], k: int) -> float | None:
    return _share(int((ranks < k).sum()), ranks.size)


def _share(count: int, total: int) -> float | None:
    return round(count / total, 5) if total else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _balanced(agent: float | None, baseline: float | None) -> float | None:
    return None if agent is None or baseline is None else _ratio(agent, agent + baseline)


def _nrp(agent_acc: Metric, baseline_acc: Metric, k: int) -> float | None:
    return _ratio(agent_acc[f"post_asymptotic_top{k}"], baseline_acc[f"pre_top{k}"])


def _percent(values: Sequence[float | None]) -> float | None:
    mean = _mean(values)
    return None if mean is None else 100 * mean


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
