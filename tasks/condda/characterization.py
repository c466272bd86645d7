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

from collections import Counter
from collections.abc import Sequence

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
    chosen, width = posted.argmax(1), posted.shape[1]
    matched = match_clusters(chosen, truth, columns, width)
    rows = pl.DataFrame(
        {
            "label": truth,
            "chosen": chosen,
            "match": pl.Series([matched.get(label) for label in truth.tolist()], dtype=pl.Int64),
            "novel": ~columns.is_known(truth),
            "known": columns.is_known(chosen),
            "discovered": _is_discovered(chosen, columns, width),
        }
    ).with_row_index("row")
    measures: list[tuple[str, str, int | None, float | None]] = []
    for part, kept in (("all", rows), ("post", rows[start:])):
        values = (
            _agreement(kept) | _accuracy(kept) | {"column_stability": _stability(kept, round_size)}
        )
        measures += [(part, metric, None, value) for metric, value in values.items()]
    for label, column in matched.items():
        since = chosen[(truth == label).argmax() :]
        delay = None if column is None else int((since == column).argmax())
        measures.append(("all", "discovery_delay", label, delay))
    return pl.DataFrame(measures, schema=MEASURES, orient="row")


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
    padded = []
    for block in checked:
        width = block.shape[1]
        missing = np.zeros((len(block), clusters - columns.discovered(width)))
        end = width - 1 if columns.unknown == "last" else width
        padded.append(np.hstack([block[:, :end], missing, block[:, end:]]))
    return np.concatenate(padded)


def match_clusters(
    chosen: NDArray[np.int64], labels: NDArray[np.int64], columns: Columns, width: int
) -> dict[int, int | None]:
    """The discovered column of each novel class in order of label; None if it has none.

    A column without a single row of the class is no match.
    """
    from scipy.optimize import linear_sum_assignment

    classes = list(dict.fromkeys(labels[~columns.is_known(labels)].tolist()))
    clusters = list(dict.fromkeys(chosen[_is_discovered(chosen, columns, width)].tolist()))
    table = np.zeros((len(classes), len(clusters)), np.int64)
    for row, label in enumerate(classes):
        counts = Counter(chosen[labels == label].tolist())
        table[row] = [counts[column] for column in clusters]
    matched: dict[int, int | None] = dict.fromkeys(sorted(classes))
    for row, column in zip(*linear_sum_assignment(table, maximize=True), strict=True):
        if table[row, column]:
            matched[classes[row]] = clusters[column]
    return matched


def _accuracy(rows: pl.DataFrame) -> dict[str, float | None]:
    """How many of the rows are right, and what there is in them; null without rows."""
    label, chosen, novel = pl.col("label"), pl.col("chosen"), pl.col("novel")
    in_match = chosen.eq_missing(pl.col("match"))
    right = pl.when(novel)
    return rows.select(
        discovery_accuracy=in_match.filter(novel).mean(),
        full_accuracy=right.then(in_match).otherwise(chosen == label).mean(),
        k_plus_1_accuracy=right.then(~pl.col("known")).otherwise(chosen == label).mean(),
        clusters_used=chosen.filter("discovered").n_unique(),
        novel_classes=label.filter(novel).n_unique(),
        rows=pl.len(),
    ).row(0, named=True)


def _agreement(rows: pl.DataFrame) -> dict[str, float | None]:
    """How alike chosen columns and labels are."""
    from sklearn.metrics import (
        adjusted_rand_score,
        homogeneity_completeness_v_measure,
        normalized_mutual_info_score,
    )
    from sklearn.metrics.cluster import contingency_matrix

    labels, chosen = rows["label"].to_numpy(), rows["chosen"].to_numpy()
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


def _stability(rows: pl.DataFrame, round_size: int | None) -> float | None:
    """Share of neighbouring rounds in which most rows of a class are in the same column."""
    if round_size is None:
        return None
    most = (
        rows.filter("novel", "discovered")
        .group_by("label", round=pl.col("row") // round_size)
        .agg(pl.col("chosen").mode().min())
        .sort("label", "round")
    )
    before = pl.col("chosen").shift().over("label")
    return most.select((pl.col("chosen") == before).mean()).item()


def _is_discovered(chosen: NDArray, columns: Columns, width: int) -> NDArray[np.bool_]:
    unknown = columns.unknown_column(width)
    return ~columns.is_known(chosen) & (chosen != (-1 if unknown is None else unknown))
