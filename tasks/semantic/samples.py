"""Pictures of a trial as models take them: `images` uint8 (N, H, W, 3), decoded when asked for."""

import numpy as np
import polars as pl

from schemas.runs import RunFacts
from tasks.engine.stage import Shard
from tasks.evaluation.model_runs import LOADER
from tasks.learning.samples import NOVEL, Samples
from tasks.models.base import Model
from tasks.semantic.cache import PictureCache

LOADER_VERSION = 1


def load(shard: Shard, facts: RunFacts, split: str, model: Model) -> Samples:
    """The pictures of a split in the order of their ids."""
    trial = shard.read("splits").filter(protocol=facts.protocol).sort("sample_id")
    trained = trial.filter(split="train").select("label", "class").unique().sort("label")
    rows = trial.filter(split=split)
    places = {label: place for place, label in enumerate(trained["label"])}
    labels = rows["label"].replace_strict(places, default=NOVEL, return_dtype=pl.Int64)
    side = facts.settings.get(LOADER, {}).get("side")
    files = [part.path for part in shard.parts if part.table == "pictures"]
    return Samples(
        rows["sample_id"].to_list(),
        labels.to_numpy().astype(np.int64),
        {"images": PictureCache.read(files, rows["sample_id"], side)},
        classes=trained["class"].to_list(),
    )
