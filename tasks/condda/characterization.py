"""How well a CONDDA agent told the novel classes apart: from its characterization to measures.

In: probabilities (N, 1 + K + D), or one block for each round (later blocks may have more discovered
columns), true labels and novel flags. Out: a frame of `MEASURES`, one row for each part of the test
(`all` rows, `post`: from the first novel flag on), metric and, where it is per class, novel class;
value is null where there is none. Upstream has no such evaluation (CONDDA rule 13); the choice of
measures is ours:

- nmi, ari, homogeneity, completeness: labels against chosen columns, all rows of the part;
- purity: each chosen column's commonest label / rows (as upstream's cluster feedback);
- discovery_accuracy: rows of novel classes in the discovered column matched to their class;
- full_accuracy: that, and known rows in their own column, / all rows;
- k_plus_1_accuracy: as full_accuracy, but unknown or any discovered column is right for any novel
  class. It collapses choices, not probabilities: vectors need not sum to 1;
- clusters_used, novel_classes, rows: how many there are in the part;
- column_stability (where rounds are known): whether classes are consistently identified. Of all
  pairs of neighbouring rounds in which rows of a novel class went into discovered columns, the
  share in which most went into the same column; null if there is no such pair;
- discovery_delay (per novel class, part `all`): rows from its first sample to the first row at or
  after it that went into its matched column; null if it has none.

The matching (Hungarian, most rows of novel classes right) is made once, over the whole test. Which
of several equally good ones is taken depends on the order in which columns and classes come first
in the test, never on column numbers. Ties in probability go to the earlier column.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from schemas.errors import RecordError
from tasks.condda.metrics import Columns
from tasks.condda.metrics_upstream import (
    checked_flags,
    checked_labels,
    checked_probabilities,
    first_row,
    require_same_rows,
)

MEASURES = {
    "part": pl.String,
    "metric": pl.String,
    "novel_class": pl.Int64,
    "value": pl.Float64,
}
NOT_MATCHED = -1


def characterize(
    probabilities: NDArray | Sequence[NDArray],
    labels: ArrayLike,
    novel: ArrayLike,
    columns: Columns,
    round_size: int | None = None,
) -> pl.DataFrame:
    """Measures of one test; `columns` says which labels are known and where the columns stand."""
    posted = pad_blocks(probabilities, columns)
    truth = checked_labels(labels)
    require_same_rows(len(posted), len(truth))
    start = first_row(checked_flags(novel, len(posted))) - 1
    chosen = posted.argmax(1)
    matched = match_clusters(chosen, truth, columns, posted.shape[1])
    rows: list[tuple[str, str, int | None, float | None]] = []
    for part, kept in (("all", slice(None)), ("post", slice(start, None))):
        found = _measures(chosen[kept], truth[kept], columns, posted.shape[1], matched)
        rounds = None if round_size is None else np.arange(len(truth))[kept] // round_size
        found["column_stability"] = _stability(
            chosen[kept], truth[kept], rounds, columns, posted.shape[1]
        )
        rows += [(part, metric, None, value) for metric, value in found.items()]
    rows += [
        ("all", "discovery_delay", label, _delay(chosen, truth, label, column))
        for label, column in matched.items()
    ]
    return pl.DataFrame(rows, schema=MEASURES, orient="row")


def pad_blocks(blocks: NDArray | Sequence[NDArray], columns: Columns) -> NDArray[np.float64]:
    """One matrix as wide as the widest block; discovered columns a block lacks are 0.

    Columns stay in the order they were posted in: where the unknown column is last, the zeros go
    before it.
    """
    if isinstance(blocks, np.ndarray):
        blocks = [blocks]
    if len(blocks) == 0:
        raise RecordError("characterization", "there is no block of characterization to measure")
    checked = [checked_probabilities(block) for block in blocks]
    clusters = max(columns.discovered(block.shape[1]) for block in checked)
    return np.concatenate([_padded(block, columns, clusters) for block in checked])


def match_clusters(
    chosen: NDArray[np.int64], labels: NDArray[np.int64], columns: Columns, width: int
) -> dict[int, int | None]:
    """The discovered column of each novel class in order of label; None if it has none.

    A column without a single row of the class is no match.
    """
    from scipy.optimize import linear_sum_assignment

    is_novel = ~columns.is_known(labels)
    classes = _by_first_use(labels[is_novel])
    clusters = _by_first_use(chosen[_is_discovered(chosen, columns, width)])
    inside = is_novel & np.isin(chosen, clusters)
    table = np.zeros((classes.size, clusters.size), np.int64)
    np.add.at(table, (_place(labels[inside], classes), _place(chosen[inside], clusters)), 1)
    matched: dict[int, int | None] = dict.fromkeys(sorted(classes.tolist()))
    for row, column in zip(*linear_sum_assignment(table, maximize=True), strict=True):
        if table[row, column]:
            matched[int(classes[row])] = int(clusters[column])
    return matched


def _measures(
    chosen: NDArray[np.int64],
    labels: NDArray[np.int64],
    columns: Columns,
    width: int,
    matched: dict[int, int | None],
) -> dict[str, float | None]:
    """Every measure of one part that is not per class; null without rows."""
    is_novel = ~columns.is_known(labels)
    discovered = _is_discovered(chosen, columns, width)
    own = chosen == labels
    in_match = is_novel & (chosen == _matched_column(labels, matched))
    not_known = ~columns.is_known(chosen)
    found = _agreement(chosen, labels)
    found["discovery_accuracy"] = _share(in_match[is_novel])
    found["full_accuracy"] = _share(np.where(is_novel, in_match, own))
    found["k_plus_1_accuracy"] = _share(np.where(is_novel, not_known, own))
    found["clusters_used"] = np.unique(chosen[discovered]).size
    found["novel_classes"] = np.unique(labels[is_novel]).size
    found["rows"] = labels.size
    return found


def _agreement(chosen: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, float | None]:
    from sklearn.metrics import (
        adjusted_rand_score,
        homogeneity_completeness_v_measure,
        normalized_mutual_info_score,
    )
    from sklearn.metrics.cluster import contingency_matrix

    if labels.size == 0:
        return dict.fromkeys(("nmi", "ari", "homogeneity", "completeness", "purity"))
    homogeneity, completeness, _ = homogeneity_completeness_v_measure(labels, chosen)
    counts = contingency_matrix(labels, chosen)
    return {
        "nmi": float(normalized_mutual_info_score(labels, chosen)),
        "ari": float(adjusted_rand_score(labels, chosen)),
        "homogeneity": float(homogeneity),
        "completeness": float(completeness),
        "purity": float(counts.max(0).sum() / labels.size),
    }


def _stability(
    chosen: NDArray[np.int64],
    labels: NDArray[np.int64],
    rounds: NDArray[np.int64] | None,
    columns: Columns,
    width: int,
) -> float | None:
    if rounds is None:
        return None
    kept = ~columns.is_known(labels) & _is_discovered(chosen, columns, width)
    same = []
    for label in np.unique(labels[kept]):
        mine = kept & (labels == label)
        most = [np.bincount(chosen[mine & (rounds == r)]).argmax() for r in np.unique(rounds[mine])]
        same += [before == after for before, after in pairwise(most)]
    return float(np.mean(same)) if same else None


def _delay(
    chosen: NDArray[np.int64], labels: NDArray[np.int64], label: int, column: int | None
) -> int | None:
    if column is None:
        return None
    start = int((labels == label).argmax())
    return int((chosen[start:] == column).argmax())


def _padded(block: NDArray[np.float64], columns: Columns, clusters: int) -> NDArray[np.float64]:
    width = block.shape[1]
    missing = np.zeros((len(block), clusters - columns.discovered(width)))
    end = width - 1 if columns.unknown == "last" else width
    return np.hstack([block[:, :end], missing, block[:, end:]])


def _is_discovered(chosen: NDArray, columns: Columns, width: int) -> NDArray[np.bool_]:
    unknown = columns.unknown_column(width)
    return ~columns.is_known(chosen) & (chosen != (-1 if unknown is None else unknown))


def _matched_column(labels: NDArray[np.int64], matched: dict[int, int | None]) -> NDArray[np.int64]:
    """The matched column of each row's class; -1 for known classes and classes without one."""
    pairs = [(label, column) for label, column in matched.items() if column is not None]
    result = np.full(labels.size, NOT_MATCHED)
    for label, column in pairs:
        result[labels == label] = column
    return result


def _by_first_use(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The distinct values in the order in which they first occur."""
    distinct, first = np.unique(values, return_index=True)
    return distinct[np.argsort(first)]


def _place(values: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.intp]:
    order = np.argsort(among)
    return order[np.searchsorted(among, values, sorter=order)]


def _share(right: NDArray[np.bool_]) -> float | None:
    return float(right.mean()) if right.size else None
