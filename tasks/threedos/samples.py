"""Clouds of a track as samples: splits, shapes and point clouds in, array `clouds` out.

`about` says how the clouds were normalised and how many of their points a pass sees.
"""

from typing import Any, cast

import numpy as np
import polars as pl

from schemas.errors import SourceError
from schemas.runs import RunFacts
from tasks.engine.stage import Shard
from tasks.evaluation.passing import LOADER
from tasks.learning.samples import NOVEL, Samples
from tasks.models.base import Model
from tasks.threedos.sampling import Z_UP, upright

LOADER_VERSION = 1
"""Raised when the same rows give models other numbers to see."""


def load(shard: Shard, facts: RunFacts, split: str, model: Model) -> Samples:
    """The shapes of one split of a track that have a cloud, by id, as long as the longest one.

    A known shape whose label has no training shape is left out: nothing can be right about it.
    """
    splits, shapes = shard.read("splits"), shard.read("shapes", ["sample_id", "source"])
    rows = splits.filter(protocol=facts.protocol).join(shapes, on="sample_id")
    known = rows.filter(pl.col("label").is_not_null(), split="train")
    names = dict(known.select("label", "class").unique().sort("label").iter_rows())
    trained = pl.col("label").is_null() | pl.col("label").is_in(list(names))
    rows = rows.filter(trained, split=split).sort("sample_id")
    clouds = pl.concat(
        part.read(["sample_id", "normalisation", "count", "points"]).filter(
            pl.col("sample_id").is_in(rows["sample_id"].implode())
        )
        for part in shard.parts
        if part.table == "point_clouds"
    )
    rows = rows.join(clouds, on="sample_id", maintain_order="left")
    places = {label: place for place, label in enumerate(names)}
    labels = rows["label"].replace_strict(places, default=NOVEL, return_dtype=pl.Int64)
    array = cloud_array(rows)
    samples = Samples(
        rows["sample_id"].to_list(),
        labels.to_numpy().astype(np.int64),
        {"clouds": array},
        list(names.values()),
        {
            "normalisation": rows["normalisation"][0] if rows.height else "unit_sphere",
            "points": points_seen(shard, facts, split, model.settings) or array.shape[1],
        },
    )
    if split == "train":
        require_training(samples, str(facts.protocol))
    return samples


def cloud_array(rows: pl.DataFrame) -> np.ndarray:
    """float32 (N, P, 3) with y up."""
    width = rows.schema["points"].shape[0]  # type: ignore[attr-defined]
    # Beyond the longest cloud there are only points that come again.
    longest = rows["count"].max() or 1
    points = rows["points"].to_numpy().reshape(-1, width // 3, 3)[:, :longest].astype(np.float32)
    for source in Z_UP:
        turned = (rows["source"] == source).to_numpy()
        points[turned] = upright(points[turned], source)
    return points


def points_seen(shard: Shard, facts: RunFacts, split: str, settings: Any) -> int | None:
    """Points of a pass: those of the view; else as many as the model asks for, none: all."""
    density = shard.about.get("view_settings", {}).get("points")
    if density is not None:
        return int(density)
    scans = split in facts.settings[LOADER]["scan_splits"]
    of_scans = getattr(settings, "scan_points", None) if scans else None
    return of_scans or getattr(settings, "points", None)


def require_training(train: Samples, track: str) -> None:
    """A network needs two classes with two shapes each at the least."""
    counts = np.bincount(cast(np.ndarray, train.labels)) if len(train) else np.zeros(0, int)
    if (counts > 1).sum() < 2:
        raise SourceError(
            f"track {track}: {len(train)} training shapes have a cloud, too few to train on; name "
            "the sources of its shapes, or leave the track out with --protocols"
        )
