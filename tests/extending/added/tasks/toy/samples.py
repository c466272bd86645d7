"""Points as models take them."""

import numpy as np
import polars as pl

from schemas.runs import RunFacts
from tasks.engine.stage import Shard
from tasks.learning.samples import NOVEL, Samples
from tasks.models.base import Model
from tasks.toy.points import KNOWN

LOADER_VERSION = 1


def load(shard: Shard, facts: RunFacts, split: str, model: Model) -> Samples:
    """The points of a split."""
    rows = shard.read("splits").filter(pl.col("split") == split).sort("sample_id")
    points = rows.join(shard.read("points"), on="sample_id", maintain_order="left")
    features = points.select("x", "y").to_numpy().astype(np.float32)
    labels = points["label"].fill_null(NOVEL).to_numpy().astype(np.int64)
    return Samples(points["sample_id"].to_list(), labels, {"features": features}, KNOWN)
