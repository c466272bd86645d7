"""How well features tell classes apart, before any predictor: two scores of one feature table.

Enters: vectors (N, D) and their labels. Leaves: the share of samples whose nearest other sample by
cosine has their label (and what chance would give), and the AUROC of cosine similarity as a sign of
"same class".
"""

from typing import NamedTuple

import numpy as np
import polars as pl

# The pairs of more samples would not fit into memory; a fixed draw stands for them.
MOST_SAMPLES = 4000


class Separation(NamedTuple):
    samples: int
    classes: int
    chance: float
    nearest_neighbour: float
    same_class_auroc: float


def separation(vectors: np.ndarray, labels: pl.Series, seed: int = 0) -> Separation | None:
    """None unless two classes have two samples each; samples of smaller classes are left out."""
    from sklearn.metrics import roc_auc_score

    counted = pl.len().over("label") > 1
    rows = pl.DataFrame({"label": labels}).with_row_index().filter(counted)
    if rows["label"].n_unique() < 2:
        return None
    if rows.height > MOST_SAMPLES:
        picks = np.random.default_rng(seed).choice(rows.height, MOST_SAMPLES, replace=False)
        rows = rows[np.sort(picks)].filter(counted)
    codes = rows["label"].rank("dense").to_numpy()
    values = vectors[rows["index"].to_numpy()].astype(np.float64)
    values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
    similar = values @ values.T
    same = codes[:, None] == codes[None, :]
    pairs = np.triu_indices(len(codes), 1)
    np.fill_diagonal(similar, -np.inf)
    nearest = codes[similar.argmax(1)] == codes
    return Separation(
        samples=len(codes),
        classes=rows["label"].n_unique(),
        chance=float((same.sum(1) - 1).mean() / (len(codes) - 1)),
        nearest_neighbour=float(nearest.mean()),
        same_class_auroc=float(roc_auc_score(same[pairs], similar[pairs])),
    )
