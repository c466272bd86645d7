"""Pictures of a trial as models take them: `images` uint8 (N, H, W, 3), decoded when asked for.

With a `side`, pictures of another size are cut to that square by Pillow's bicubic filter.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from schemas.runs import RunFacts
from storage.pieces import Part
from tasks.engine.stage import Shard
from tasks.evaluation.passing import LOADER
from tasks.learning.pictures import Pictures
from tasks.learning.samples import NOVEL, Samples
from tasks.models.base import Model
from tasks.semantic.pictures import cut_square

LOADER_VERSION = 1


def load(shard: Shard, facts: RunFacts, split: str, model: Model) -> Samples:
    """The pictures of a split in the order of their ids."""
    trial = shard.read("splits").filter(protocol=facts.protocol).sort("sample_id")
    trained = trial.filter(split="train").select("label", "class").unique().sort("label")
    rows = trial.filter(split=split)
    places = {label: place for place, label in enumerate(trained["label"])}
    labels = rows["label"].replace_strict(places, default=NOVEL, return_dtype=pl.Int64)
    arrays = {}
    if not model.embeds:
        files = [part.path for part in shard.parts if part.table == "pictures"]
        arrays["images"] = read_pictures(files, rows["sample_id"], side_of(facts))
    return Samples(
        rows["sample_id"].to_list(),
        labels.to_numpy().astype(np.int64),
        arrays,
        classes=trained["class"].to_list(),
    )


def side_of(facts: RunFacts) -> int | None:
    """The one side of all pictures, in trials that have one."""
    side: int | None = facts.settings.get(LOADER, {}).get("side")
    return side


def ids_of(part: Part) -> pl.Series:
    """Pictures of a part."""
    return part.read(["sample_id"])["sample_id"]


def load_part(part: Part, ids: Sequence[str], facts: RunFacts) -> Samples:
    """Pictures of a part, without labels."""
    return Samples(ids, None, {"images": read_pictures([part.path], ids, side_of(facts))})


def read_pictures(
    files: Iterable[Path], ids: Sequence[str] | pl.Series, side: int | None = None
) -> Pictures:
    """Those pictures of files of PICTURES, in that order."""
    return Pictures(list(files), ids, cut=None if side is None else partial(_square, side=side))


def _square(pixels: np.ndarray, side: int) -> np.ndarray:
    """The middle square of a picture at that side."""
    from PIL import Image

    if pixels.shape[:2] == (side, side):
        return pixels
    return np.asarray(cut_square(Image.fromarray(pixels), side, "BICUBIC"))
