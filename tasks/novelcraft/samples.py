"""What NovelCraft's models learn from and are shown: pictures, symbolic sequences, pairs of scores.

Enters: the parts of a run's shard. Leaves: `Samples` of one split of the run's protocol. The
modality of the model says which loader is its own. Labels number the normal classes that have
training frames; a novel sample has none. Pictures are those that pass the 1 % filter; the symbolic
task takes whole episodes, and a frame is novel if its game is (NovelCraft 5.1, 5.2).
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from schemas.runs import RunFacts
from storage.pieces import Part
from tasks.engine.stage import Shard
from tasks.learning.pictures import Pictures
from tasks.learning.samples import NOVEL, Samples
from tasks.models.base import Model
from tasks.models.multimodal import paired_scores
from tasks.novelcraft.symbols import symbol_sequences

LOADER_VERSION = 1
"""Raised when the same rows give models other numbers to see."""

MODALITY_OF = {
    "visual": "image",
    "symbolic": "states",
    "symbolic_all": "states",
    "fused": "runs",
}
"""What the samples of a protocol are."""

TABLES_OF = {"image": ("images",), "states": ("frames", "inventory"), "runs": ()}
"""Tables with what a model sees, by its modality."""


def load(shard: Shard, facts: RunFacts, split: str, model: Model) -> Samples:
    """Samples of a split in the form that the model needs."""
    rows = split_rows(shard, str(facts.protocol), split)
    if model.modality == "image":
        return pictures(shard, rows, shown=not model.embeds)
    if model.modality == "states":
        return _sequences(shard, rows, model.settings.context)
    if split == "train":
        # What the two models were trained on would look too normal.
        valid = split_rows(shard, str(facts.protocol), "valid")
        rows = valid.filter(pl.col("role") == "known")
    return _pairs(shard, rows, facts.base_runs)


def split_rows(shard: Shard, protocol: str, split: str) -> pl.DataFrame:
    """Rows of `splits`, in the order of the samples' ids."""
    condition = (pl.col("protocol") == protocol) & (pl.col("split") == split)
    return shard.read("splits").filter(condition).sort("sample_id")


def pictures(shard: Shard, rows: pl.DataFrame, shown: bool = True) -> Samples:
    """The frames of these rows as pictures; those that are not `shown` have only labels."""
    trained = split_rows(shard, "visual", "train").drop_nulls("label").unique("label").sort("label")
    numbers = {label: number for number, label in enumerate(trained["label"])}
    labels = rows["label"].replace_strict(numbers, default=NOVEL, return_dtype=pl.Int64)
    arrays = {}
    if shown:
        parts = [part for part in shard.parts if part.table == "images"]
        arrays["images"] = _pictures(parts, rows["sample_id"])
    return Samples(
        rows["sample_id"].to_list(),
        labels.to_numpy(),
        arrays,
        classes=trained["class"].to_list(),
    )


def ids_of(part: Part) -> pl.Series:
    """Frames of a part of `images`."""
    return part.read(["frame_id"])["frame_id"]


def load_part(part: Part, ids: Sequence[str], facts: RunFacts) -> Samples:
    """Frames of a part as pictures, without labels."""
    return Samples(ids, None, {"images": _pictures([part], ids)})


def _pictures(parts: Sequence[Part], ids: Sequence[str] | pl.Series) -> Pictures:
    return Pictures([part.path for part in parts], ids, ("frame_id", "png"))


def _sequences(shard: Shard, rows: pl.DataFrame, context: int) -> Samples:
    role_of = rows.select(pl.col("sample_id").alias("frame_id"), "role")
    frames = shard.read("frames").join(role_of, on="frame_id")
    sequences = symbol_sequences(frames.drop("role"), shard.read("inventory"))
    roles = pl.DataFrame({"frame_id": sequences.ids}, schema={"frame_id": pl.String}).join(
        role_of, on="frame_id", maintain_order="left"
    )
    novel = (roles["role"] == "novel").to_numpy()
    return sequences.samples(context, np.where(novel, NOVEL, 0).astype(np.int64))


def _pairs(shard: Shard, rows: pl.DataFrame, runs: tuple[str, ...]) -> Samples:
    """The novelty of each frame in the two runs."""
    outputs = shard.read("outputs").select(
        "run_id", pl.col("sample_id").alias("frame_id"), pl.col("novelty").alias("score")
    )
    visual, symbolic = (outputs.filter(pl.col("run_id") == run).drop("run_id") for run in runs)
    visual = rows.select(pl.col("sample_id").alias("frame_id")).join(
        visual, on="frame_id", maintain_order="left"
    )
    labels = np.where(rows["role"] == "novel", NOVEL, 0).astype(np.int64)
    return paired_scores(visual, symbolic, labels)
