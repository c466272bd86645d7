"""Clouds of a track as samples: splits and point clouds in, array `clouds` out.

`about` says how the clouds were normalised and how many of their points a pass sees.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import polars as pl

from schemas.errors import SourceError
from schemas.runs import RunFacts
from storage.pieces import Part
from tasks.engine.stage import Shard
from tasks.evaluation.passing import LOADER
from tasks.learning.samples import NOVEL, Samples
from tasks.models.base import Model
from tasks.threedos.sampling import Z_UP, upright

CLOUDS = "point_clouds"
LOADER_VERSION = 1
"""Raised when the same rows give models other numbers to see."""


def load(shard: Shard, facts: RunFacts, split: str, model: Model) -> Samples:
    """The shapes of one split of a track that have a cloud, by id, as long as the longest one.

    A known shape whose label has no training shape is left out: nothing can be right about it.
    """
    # A model that embeds gets features of what has a cloud.
    with_cloud = shard.read("outputs" if model.embeds else CLOUDS, ["sample_id"]).unique()
    rows = shard.read("splits").filter(protocol=facts.protocol)
    rows = rows.join(with_cloud, on="sample_id", how="semi")
    known = rows.filter(pl.col("label").is_not_null(), split="train")
    names = dict(known.select("label", "class").unique().sort("label").iter_rows())
    trained = pl.col("label").is_null() | pl.col("label").is_in(list(names))
    rows = rows.filter(trained, split=split).sort("sample_id")
    places = {label: place for place, label in enumerate(names)}
    labels = rows["label"].replace_strict(places, default=NOVEL, return_dtype=pl.Int64)
    ids, arrays, about = rows["sample_id"].to_list(), {}, {}
    if not model.embeds:
        parts = [part for part in shard.parts if part.table == CLOUDS]
        clouds = pl.concat(cloud_rows(part, ids) for part in parts).sort("sample_id")
        # Beyond the longest cloud there are only points that come again.
        array = cloud_array(clouds)[:, : clouds["count"].max() or 1]
        arrays["clouds"] = array
        about = {
            "normalisation": clouds["normalisation"][0] if clouds.height else "unit_sphere",
            "points": points_seen(shard, facts, split, model.settings) or array.shape[1],
        }
    samples = Samples(ids, labels.to_numpy().astype(np.int64), arrays, list(names.values()), about)
    if split == "train":
        require_training(samples, str(facts.protocol))
    return samples


def ids_of(part: Part) -> pl.Series:
    """Shapes of a part of `point_clouds`."""
    return part.read(["sample_id"])["sample_id"]


def load_part(part: Part, ids: Sequence[str], facts: RunFacts) -> Samples:
    """Clouds of a part as they are stored, without labels."""
    rows = cloud_rows(part, ids).sort("sample_id")
    return Samples(rows["sample_id"].to_list(), None, {"clouds": cloud_array(rows)})


def cloud_rows(part: Part, ids: Sequence[str]) -> pl.DataFrame:
    """Those of a part, with the source that it is of."""
    rows = part.read(["sample_id", "normalisation", "count", "points"])
    source = part.shard.partition("/")[0]
    return rows.filter(pl.col("sample_id").is_in(list(ids))).with_columns(source=pl.lit(source))


def cloud_array(rows: pl.DataFrame) -> np.ndarray:
    """float32 (N, P, 3) with y up."""
    width = rows.schema["points"].shape[0]  # type: ignore[attr-defined]
    points = rows["points"].to_numpy().reshape(-1, width // 3, 3).astype(np.float32)
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
