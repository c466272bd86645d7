"""Points and their one protocol: a and b are known, c is novel."""

import io
from pathlib import Path

import polars as pl

from schemas.config import Settings
from schemas.tables import SAMPLES, SPLITS
from schemas.toy import POINTS
from storage.layout import content_key
from storage.raw import open_raw
from tasks.engine.stage import Produced, Reject, Shard, stage

KNOWN = ("a", "b")


@stage(writes=(SAMPLES, POINTS), version=1)
def read_points(shard: Shard, settings: Settings) -> Produced:
    """Lines of the file as samples; a line without numbers is refused."""
    (file,) = shard.files
    rows = pl.read_csv(
        io.BytesIO(open_raw(Path(shard.source or "")).read(file.name)), infer_schema=False
    )
    numbers = rows.with_columns(pl.col("x", "y").cast(pl.Float64, strict=False))
    good = numbers.drop_nulls(["x", "y"])
    bad = numbers.join(good, on="sample_id", how="anti")["sample_id"]
    samples = good.select(
        "sample_id",
        "class",
        pl.lit(None, pl.String).alias("sequence"),
        pl.lit(None, pl.Int32).alias("position"),
        pl.lit(file.name).alias("source"),
        pl.Series("digest", [content_key(row) for row in good.select("x", "y").rows()]),
        pl.lit("features").alias("modality"),
    )
    rejects = [Reject(name, "no_number", "x or y is no number") for name in bad]
    points = good.select("sample_id", "x", "y")
    return Produced({"samples": samples, "points": points}, rows.height, rejects)


@stage(writes=(SPLITS,), version=1)
def split_points(shard: Shard, settings: Settings) -> Produced:
    """Known points by the split of the file; novel ones are for tests."""
    (file,) = shard.files
    rows = pl.read_csv(
        io.BytesIO(open_raw(Path(shard.source or "")).read(file.name)), infer_schema=False
    )
    known = pl.col("class").is_in(KNOWN)
    rows = rows.join(shard.read("points"), on="sample_id", how="semi")
    rows = rows.filter(known | (pl.col("split") == "test")).select(
        pl.lit("plane").alias("protocol"),
        "sample_id",
        pl.lit(0).alias("step"),
        "class",
        pl.col("class")
        .replace_strict({name: number for number, name in enumerate(KNOWN)}, default=None)
        .cast(pl.Int32)
        .alias("label"),
        "split",
        pl.when(known).then(pl.lit("known")).otherwise(pl.lit("novel")).alias("role"),
        pl.lit(None, pl.String).alias("subset"),
    )
    return Produced({"splits": rows}, rows.height)
