"""Frames in, windows of the symbolic task out: runs of up to ten scored frames of one episode.

A K-th order model needs K - 1 earlier frames, so windows begin at position K - 1 of the episode.
The paper slides windows by one frame (`stride_1`); the released results cut the episode into chunks
that do not overlap, the last one shorter (`non_overlapping`): ceil((n - (K - 1)) / 10) of them.
Positions count from 0 in frame order, whatever the frame numbers (episode 0 begins with frame 1).
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import polars as pl

from schemas.errors import ConfigError
from schemas.novelcraft import WINDOWS, WindowSettings
from schemas.tables import SAMPLES, SPLITS
from storage.layout import content_key
from tasks.engine.stage import Produced, Shard, stage
from tasks.novelcraft.classes import episode_id_of
from tasks.novelcraft.splits import changed_games, shared_rows

LENGTH = 10
FRAMES_PROTOCOL = "symbolic"

Mode = Literal["non_overlapping", "stride_1"]
PROTOCOLS: Mapping[str, Mode] = {
    "symbolic_windows": "stride_1",
    "symbolic_windows_non_overlapping": "non_overlapping",
}
"""Protocols of windows of the episodes of `symbolic`, and how each is cut."""


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
            pl.format("{}/{}/{}", "mode", "context", "window_id").alias("sample_id"),
            pl.format("{}/{}", "episode_id", "first_frame").alias("first_frame_id"),
            pl.format("{}/{}", "episode_id", "last_frame").alias("last_frame_id"),
        )
        .select(WINDOWS.polars_schema.names())
        .cast(WINDOWS.polars_schema)
    )


@stage(writes=(WINDOWS, SAMPLES, SPLITS), version=3)
def cut_all_windows(shard: Shard, settings: WindowSettings) -> Produced:
    """Cut the windows of the symbolic task, in every mode and context asked for."""
    frames = shard.read("frames", ["frame_id", "episode_id", "class", "subset", "episode", "frame"])
    roles = shard.read("frame_roles")
    novel = changed_games(roles)
    frames = frames.join(novel, on="episode_id", how="left", maintain_order="left")
    windows = pl.concat(
        cut_windows(frames, context, mode, settings.length)
        for mode in ("non_overlapping", "stride_1")
        for context in settings.contexts
    )
    used = shard.read("splits").filter(pl.col("protocol") == FRAMES_PROTOCOL)["sample_id"]
    split = roles.filter(pl.col("frame_id").is_in(used.to_list())).select("episode_id", "split")
    evaluated = windows.join(split.unique(), on="episode_id", maintain_order="left")
    tables = {
        "windows": windows,
        "samples": window_samples(windows, shard.read("samples")),
        "splits": pl.concat(
            shared_rows(name, evaluated.filter(pl.col("mode") == mode), ())
            for name, mode in PROTOCOLS.items()
        ),
    }
    return Produced(tables, windows.height)


def window_samples(windows: pl.DataFrame, frames: pl.DataFrame) -> pl.DataFrame:
    """Windows as samples; the digest is of the frames in it and of those that predict the first."""
    ordered = frames.sort("sequence", "position")
    digests = {
        sequence: part["digest"].to_list()
        for (sequence,), part in ordered.group_by("sequence", maintain_order=True)
    }
    seen = [
        content_key(digests[episode][max(0, start - context) : stop])
        for episode, context, start, stop in windows.select(
            "episode_id", "context", "start", "stop"
        ).iter_rows()
    ]
    return SAMPLES.conform(
        windows.select(
            "sample_id",
            "class",
            pl.col("episode_id").alias("sequence"),
            pl.col("start").alias("position"),
            pl.lit(None, pl.String).alias("source"),
            pl.Series("digest", seen, pl.String),
            pl.lit("states").alias("modality"),
        )
    )


def window_definitions(settings: WindowSettings) -> dict[str, dict[str, Any]]:
    """What the protocols of windows are made by."""
    rule = settings.model_dump(mode="json")
    return {name: {"mode": mode, **rule} for name, mode in PROTOCOLS.items()}


def window_scores(frames: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """`windows` (episode_id, start, stop, ...) with a column score: the largest of its frames.

    `frames` has episode_id, position (0, 1, ... in each episode) and score.
    """
    ordered = frames.select("episode_id", "position", "score").sort("episode_id", "position")
    episodes = ordered.group_by("episode_id", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("frames"),
        pl.col("position").max().alias("last"),
        pl.col("position").n_unique().alias("distinct"),
    )
    whole = (pl.col("last") + 1 == pl.col("frames")) & (pl.col("distinct") == pl.col("frames"))
    broken = episodes.filter(~whole)
    if broken.height:
        raise ConfigError(
            f"episode {broken['episode_id'][0]} has {broken['frames'][0]} scores up to position "
            f"{broken['last'][0]}; window scores need every frame of an episode once"
        )
    placed = windows.select("episode_id", "start", "stop").join(
        episodes.with_columns((pl.col("frames").cum_sum() - pl.col("frames")).alias("first")),
        on="episode_id",
        how="left",
        maintain_order="left",
    )
    fits = pl.col("start").is_between(0, pl.col("stop") - 1) & (pl.col("stop") <= pl.col("frames"))
    missing = placed.filter(~fits.fill_null(False))
    if missing.height:
        episode, start, stop, *_ = missing.row(0)
        raise ConfigError(
            f"{missing.height} windows have frames without a score, first {start} to {stop} of "
            f"episode {episode}; score whole episodes with the tables the windows were cut from"
        )
    begin, end = (
        placed.select(pl.col("first") + pl.col(side)).to_series().to_numpy()
        for side in ("start", "stop")
    )
    # The extra value lets a window end at the last frame; every second result is between windows.
    scores = np.append(ordered["score"].to_numpy(), -np.inf)
    largest = np.maximum.reduceat(scores, np.column_stack([begin, end]).ravel())[::2]
    return windows.with_columns(pl.Series("score", largest, pl.Float64))
