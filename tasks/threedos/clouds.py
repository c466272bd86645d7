"""Clouds of a track as arrays: splits and point clouds in, (N, P, 3) with labels out."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import polars as pl

from schemas.errors import SourceError
from schemas.threedos import Normalisation

# Raw meshes of ModelNet40 stand on the xy plane; everything else has y up.
Z_UP = ("modelnet40",)


class TrackClouds(NamedTuple):
    """Rows of one split. `labels` are places among the labels that training has; -1 if novel.

    `rows` are those of the table `splits`.
    """

    clouds: np.ndarray
    labels: np.ndarray
    rows: pl.DataFrame
    normalisation: Normalisation = "unit_sphere"


def upright(points: np.ndarray, source: str) -> np.ndarray:
    """Points (..., 3) with y up."""
    if source not in Z_UP:
        return points
    x, y, z = np.moveaxis(points, -1, 0)
    return np.stack([x, z, -y], -1)


def label_names(splits: pl.DataFrame) -> dict[int, str]:
    """Labels that have training shapes, in order, with the names of their classes."""
    known = splits.filter((pl.col("split") == "train") & pl.col("label").is_not_null())
    return dict(known.select("label", "class").unique().sort("label").iter_rows())


def load_clouds(
    splits: pl.DataFrame,
    shapes: pl.DataFrame,
    clouds: pl.DataFrame,
    names: Mapping[int, str],
    split: str,
) -> TrackClouds:
    """The shapes of one split of one track that have a cloud, by id, as long as the longest one.

    A known shape whose label has no training shape is left out: nothing can be right about it.
    """
    trained = pl.col("label").is_null() | pl.col("label").is_in(list(names))
    rows = (
        splits.filter((pl.col("split") == split) & trained)
        .sort("sample_id")
        .join(shapes.select("sample_id", "source"), on="sample_id", maintain_order="left")
        .join(clouds.select("sample_id", "count", "points"), on="sample_id", maintain_order="left")
    )
    width = clouds.schema["points"].shape[0]
    # Beyond the longest cloud there are only points that come again.
    longest = rows["count"].max() or 1
    points = rows["points"].to_numpy().reshape(-1, width // 3, 3)[:, :longest].astype(np.float32)
    for source in Z_UP:
        turned = (rows["source"] == source).to_numpy()
        points[turned] = upright(points[turned], source)
    place = {label: number for number, label in enumerate(names)}
    return TrackClouds(
        points,
        rows["label"]
        .replace_strict(place, default=-1, return_dtype=pl.Int64)
        .to_numpy()
        .astype(np.int64),
        rows.select(splits.columns),
        clouds["normalisation"][0] if clouds.height else "unit_sphere",
    )


def require_training(train: TrackClouds, track: str) -> None:
    """A network needs two classes with two shapes each at the least."""
    counts = np.bincount(train.labels) if len(train.labels) else np.zeros(0, int)
    if (counts > 1).sum() < 2:
        raise SourceError(
            f"track {track}: {len(train.labels)} training shapes have a cloud, too few to train "
            "on; name the sources of its shapes, or leave the track out with --protocols"
        )
