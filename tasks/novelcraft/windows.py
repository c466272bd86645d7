"""Frames in, windows of the symbolic task out: runs of up to ten scored frames of one episode.

A K-th order model needs K - 1 earlier frames, so windows begin at position K - 1 of the episode.
The paper slides windows by one frame (`stride_1`); the released results cut the episode into chunks
that do not overlap, the last one shorter (`non_overlapping`): ceil((n - (K - 1)) / 10) of them.
Positions count from 0 in frame order, whatever the frame numbers (episode 0 begins with frame 1).
"""

from collections.abc import Sequence
from typing import Literal

import polars as pl

from schemas.config import Settings
from schemas.errors import ConfigError
from schemas.novelcraft import WINDOWS, WindowSettings
from schemas.older_tables import SCORES
from storage.pieces import Part, Piece
from tasks.detectors.symbolic_mlp import window_scores
from tasks.novelcraft.classes import FIRST_NOVEL_EPISODE, episode_id_of
from tasks.stage import Produced, Shard, stage

LENGTH = 10

Mode = Literal["non_overlapping", "stride_1"]


def cut_windows(
    frames: pl.DataFrame, context: int, mode: Mode, length: int = LENGTH
) -> pl.DataFrame:
    """`frames` has class, (subset,) episode, frame and novel; start is inclusive, stop exclusive.

    A window is novel if a frame in it is. `stride_1` gives an episode with fewer scored frames than
    `length` one short window; an episode with fewer than `context` frames has none in either mode.
    Rows are in order of class, subset, episode (numeric if the column is), start.
    """
    if context < 1 or length < 1:
        raise ConfigError(f"context {context} and length {length} must both be 1 or more")
    if mode not in ("non_overlapping", "stride_1"):
        raise ConfigError(f"window mode is {mode!r}, expected non_overlapping or stride_1")
    place = [name for name in ("class", "subset", "episode") if name in frames.columns]
    ordered = frames.select(
        *place, pl.col("frame").cast(pl.Int64), pl.col("novel").cast(pl.Boolean)
    ).sort(*place, "frame")
    scored = pl.col("frames") - (context - 1)
    if mode == "non_overlapping":
        step, count = length, (scored + length - 1) // length
    else:
        step, count = 1, (scored - length + 1).clip(lower_bound=1)
    first_row = pl.col("first_row")
    windows = (
        ordered.group_by(place, maintain_order=True)
        .agg(pl.len().cast(pl.Int64).alias("frames"))
        .with_columns((pl.col("frames").cum_sum() - pl.col("frames")).alias("first_row"))
        .filter(scored > 0)
        .with_columns(pl.int_ranges(0, count).alias("index"))
        .explode("index")
        .with_columns((pl.col("index") * step + context - 1).alias("start"))
        .with_columns(pl.min_horizontal(pl.col("start") + length, "frames").alias("stop"))
        .with_columns(episode_id_of(ordered))
    )
    # Row numbers in `ordered`; novel_before[i] = novel frames in rows 0..i-1.
    begin = windows.select(first_row + pl.col("start")).to_series()
    end = windows.select(first_row + pl.col("stop")).to_series()
    number = ordered["frame"]
    novel_before = pl.concat(
        [pl.Series([0], dtype=pl.Int64), ordered["novel"].cast(pl.Int64).cum_sum()]
    )
    windows = windows.with_columns(
        number.gather(begin).alias("first_frame"),
        number.gather(end - 1).alias("last_frame"),
        (novel_before.gather(end) > novel_before.gather(begin)).alias("novel"),
        pl.format("{}_{}", "episode_id", "index").alias("window_id"),
        pl.lit(context, pl.Int32).alias("context"),
        pl.lit(mode).alias("mode"),
    )
    return (
        windows.with_columns(
            pl.format("{}/{}", "episode_id", "first_frame").alias("first_frame_id"),
            pl.format("{}/{}", "episode_id", "last_frame").alias("last_frame_id"),
        )
        .select(WINDOWS.polars_schema.names())
        .cast(dict(WINDOWS.polars_schema))
    )


@stage(writes=(WINDOWS,), version=1)
def cut_all_windows(shard: Shard, settings: WindowSettings) -> Produced:
    """Cut the windows of the symbolic task, in every mode and context asked for."""
    frames = shard.read("frames", ["frame_id", "class", "subset", "episode", "frame"])
    splits = shard.read("splits", ["frame_id", "role", "kept"])
    changed = pl.col("role").is_in(["novel_valid", "novel_test"])
    # In folders where the change came midway, earlier episodes never show it.
    midway = pl.col("class").is_in(list(FIRST_NOVEL_EPISODE))
    shown = pl.col("kept").any().over("class", "subset", "episode")
    novel = (changed & (~midway | shown)).fill_null(False).alias("novel")
    frames = frames.join(splits, on="frame_id", how="left").with_columns(novel)
    windows = pl.concat(
        cut_windows(frames, context, mode, settings.length)
        for mode in ("non_overlapping", "stride_1")
        for context in settings.contexts
    )
    return Produced({"windows": windows}, windows.height)


def plan_window_scores(scored: Sequence[Piece], tables: tuple[Part, ...]) -> list[Shard]:
    """One shard for each symbolic detector that scored frames."""
    return [
        Shard(piece.shard, parts=(piece.part("scores"), *tables), about=piece.manifest.settings)
        for piece in scored
        if piece.shard.startswith("symbolic_mlp")
    ]


@stage(writes=(SCORES,), version=1)
def score_windows(shard: Shard, settings: Settings) -> Produced:
    """Give each window the largest score of its frames."""
    frames = shard.read("frames", ["frame_id", "episode_id", "position"])
    scores = shard.read("scores").join(
        frames, left_on="sample_id", right_on="frame_id", maintain_order="left"
    )
    order = int(scores["backbone"].str.extract(r"order=(\d+)").cast(pl.Int32).fill_null(5)[0])
    windows = shard.read("windows").filter(
        (pl.col("context") == order)
        & (pl.col("mode") == "non_overlapping")
        & pl.col("episode_id").is_in(scores["episode_id"].unique().to_list())
    )
    run = ["detector", "backbone", "seed"]
    split = scores.select("episode_id", "split", *run).unique()
    scored = window_scores(scores, windows).join(split, on="episode_id", maintain_order="left")
    rows = scored.select(
        pl.lit("symbolic_windows").alias("protocol"),
        *run,
        "split",
        pl.col("window_id").alias("sample_id"),
        "class",
        "novel",
        "score",
        pl.lit(None, pl.String).alias("predicted"),
    )
    return Produced({"scores": rows}, rows.height)
