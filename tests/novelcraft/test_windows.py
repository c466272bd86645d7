"""Windows against the released symbolic results and against a plain loop."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.novelcraft import WINDOWS
from tasks.novelcraft.classes import episode_is_novel
from tasks.novelcraft.targets import read_targets
from tasks.novelcraft.windows import cut_windows, window_scores
from tests.shared import shared_path


def frames_of(lengths: list[int], novel_from: int = 0) -> pl.DataFrame:
    """Episodes of class fence; episode 0 begins with frame 1; frames are novel from a number on."""
    return pl.DataFrame(
        [
            ("fence", episode, frame, frame >= novel_from)
            for episode, length in enumerate(lengths)
            for frame in range(int(episode == 0), length + int(episode == 0))
        ],
        schema={"class": pl.String, "episode": pl.Int64, "frame": pl.Int64, "novel": pl.Boolean},
        orient="row",
    )


@pytest.mark.parametrize(("context", "windows", "novel"), [(2, 352, 260), (10, 295, 220)])
def test_released_windows(context: int, windows: int, novel: int) -> None:
    released = pl.read_csv(shared_path(f"novelcraft/scores/symbolic_windows_k{context}.csv"))
    targets, _ = read_targets(shared_path("novelcraft/labels/targets.csv"))
    part = pl.col("frame_id").str.split("/").list
    episodes = released["name"].str.replace(r"_\d+$", "").unique()
    frames = (
        targets.select(
            part.get(0).alias("class"),
            part.get(1).cast(pl.Int64).alias("episode"),
            part.get(2).alias("frame"),
        )
        .with_columns(episode_is_novel().alias("novel"))
        .filter(pl.format("{}/{}", "class", "episode").is_in(episodes.implode()))
    )
    found = cut_windows(frames, context, "non_overlapping")
    assert found.schema == WINDOWS.polars_schema
    assert found["episode_id"].n_unique() == 103
    assert (found.height, found["novel"].sum()) == (windows, novel)
    assert found.select("window_id", "novel").rows() == [
        (name, bool(truth)) for name, truth in released.select("name", "novel_true").iter_rows()
    ]


def test_k_5_window_count() -> None:
    """No released file for K = 5 at hand; the paper's table has 345 windows, 255 of them novel."""
    expected = pl.read_csv(shared_path("novelcraft/expected/table3_recomputed.csv")).filter(
        pl.col("context_k") == 5
    )
    released = pl.read_csv(shared_path("novelcraft/scores/symbolic_windows_k2.csv"))
    lengths = (
        read_targets(shared_path("novelcraft/labels/targets.csv"))[0]
        .with_columns(pl.col("frame_id").str.replace(r"/\d+$", "").alias("episode_id"))
        .filter(
            pl.col("episode_id").is_in(
                released["name"].str.replace(r"_\d+$", "").unique().implode()
            )
        )
        .group_by("episode_id")
        .len()
    )
    found = cut_windows(frames_of(lengths["len"].to_list()), 5, "non_overlapping")
    assert found.height == expected["windows"][0] == 345


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), max_size=6),
    st.integers(1, 12),
    st.sampled_from(["non_overlapping", "stride_1"]),
    st.integers(1, 12),
    st.integers(0, 60),
)
def test_windows_follow_the_rule(
    lengths: list[int], context: int, mode: str, length: int, novel_from: int
) -> None:
    expected = []
    for episode, frames in enumerate(lengths):
        scored = frames - (context - 1)
        if scored <= 0:
            continue
        if mode == "non_overlapping":
            starts = range(context - 1, frames, length)
        else:
            starts = range(context - 1, max(frames - length, context - 1) + 1)
        for index, start in enumerate(starts):
            stop = min(start + length, frames)
            first, last = (position + (episode == 0) for position in (start, stop - 1))
            expected.append(
                (
                    f"{mode}/{context}/fence/{episode}_{index}",
                    mode,
                    context,
                    f"fence/{episode}_{index}",
                    f"fence/{episode}",
                    "fence",
                    start,
                    stop,
                    f"fence/{episode}/{first}",
                    f"fence/{episode}/{last}",
                    last >= novel_from,
                )
            )
    frames = frames_of(lengths, novel_from)
    assert cut_windows(frames, context, mode, length).rows() == expected
    assert cut_windows(frames.reverse(), context, mode, length).rows() == expected
    if mode == "non_overlapping":
        assert len(expected) == sum(max(0, -(-(n - context + 1) // length)) for n in lengths)


def test_frames_are_ordered_as_numbers() -> None:
    frames = frames_of([0, 0, 12]).with_columns(pl.col("frame").cast(pl.String))
    found = cut_windows(frames, 1, "non_overlapping")
    assert found["last_frame_id"].to_list() == ["fence/2/9", "fence/2/11"]


def test_plus_episodes_have_their_own_windows() -> None:
    plain = frames_of([0, 12]).with_columns(pl.lit("").alias("subset"))
    frames = pl.concat([plain, plain.with_columns(subset=pl.lit("normal_1"))])
    found = cut_windows(frames, 1, "non_overlapping")
    assert found["window_id"].to_list() == [
        "fence/1_0",
        "fence/1_1",
        "fence/normal_1/1_0",
        "fence/normal_1/1_1",
    ]


@pytest.mark.parametrize(
    ("context", "mode", "length"),
    [(0, "stride_1", 10), (2, "stride_1", 0), (2, "overlapping", 10)],
)
def test_refused_settings(context: int, mode: str, length: int) -> None:
    with pytest.raises(ConfigError):
        cut_windows(frames_of([20]), context, mode, length)


def scored_frames(lengths: list[int], seed: int) -> pl.DataFrame:
    scores = np.random.default_rng(seed).random(sum(lengths))
    return pl.DataFrame(
        {
            "class": "fence",
            "episode": np.repeat(np.arange(len(lengths)), lengths),
            "frame": np.concatenate([np.arange(n) for n in lengths]),
            "novel": False,
            "score": scores,
        }
    ).with_columns(
        pl.format("fence/{}", "episode").alias("episode_id"), pl.col("frame").alias("position")
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from(["non_overlapping", "stride_1"]),
    st.integers(1, 10),
    st.integers(0, 99),
)
def test_window_scores_are_the_largest_of_their_frames(lengths, mode, context, seed):
    frames = scored_frames(lengths, seed)
    windows = cut_windows(frames, context, mode)
    found = window_scores(frames.sample(fraction=1, shuffle=True, seed=seed), windows)
    assert found.drop("score").equals(windows)
    for row in found.iter_rows(named=True):
        own = frames.filter(pl.col("episode_id") == row["episode_id"])["score"]
        assert row["score"] == own[row["start"] : row["stop"]].max()


def test_windows_without_scores_are_refused():
    frames = scored_frames([20, 20], 0)
    windows = cut_windows(frames, 2, "non_overlapping")
    with pytest.raises(ConfigError, match="2 windows have frames without a score, first 1 to 11"):
        window_scores(frames.filter(pl.col("episode") == 0), windows)
    with pytest.raises(ConfigError, match="episode fence/0 has 19 scores up to position 19"):
        window_scores(frames.filter((pl.col("episode") == 1) | (pl.col("frame") != 4)), windows)
