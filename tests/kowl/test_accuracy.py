"""Intervals of accuracies: of the same shares as the measures, drawn by video."""

import polars as pl
import pytest

from tasks.kowl.accuracy import accuracy_intervals, judged
from tasks.kowl.evaluation import evaluate_predictor
from tests.kowl.test_evaluation import SETTINGS, Held, presented, shard


@pytest.fixture(scope="module", params=[0.0, 0.5])
def run(request, tmp_path_factory):
    """A run with some or no feedback: its tables and its splits."""
    outputs, splits = presented()
    clips = splits.frame.select("sample_id").sort("sample_id")
    video = (pl.int_range(pl.len()) // 2).cast(pl.String)
    samples = Held("samples", clips.with_columns(video.alias("sequence")))
    groups = clips.with_columns(
        pl.lit("people").alias("grouping"),
        (pl.int_range(pl.len()) % 3).cast(pl.String).alias("subset"),
    )
    given = (outputs, splits, samples, Held("clip_groups", groups))
    made = evaluate_predictor(
        shard(given, tmp_path_factory.mktemp("run"), feedback=request.param), SETTINGS
    )
    return made.tables, splits.frame.rename({"class": "label"})


def test_what_is_judged_right_is_what_is_measured(run):
    tables, splits = run
    right = judged(tables["predictions"], splits, tables["feedback"])
    place = ["split", "view", "phase", "step"]
    shares = right.group_by(place).agg(pl.col("^.*/.*$").mean(), pl.len().alias("count"))
    shares = shares.unpivot(index=[*place, "count"], variable_name="judgement")
    measures = tables["measures"].filter(
        pl.col("scope") == "increment",
        pl.col("grouping") == "all",
        pl.col("known_set") != "none",
        pl.col("metric") == "accuracy",
        pl.col("split") != "train",
    )
    judgement = pl.concat_str("known_set", pl.lit("/"), "reduction")
    both = measures.with_columns(judgement.alias("judgement")).join(
        shares, on=[*place, "judgement"]
    )
    assert both.height == measures.height == shares.height > 50
    assert both["value"].to_list() == pytest.approx(both["value_right"].to_list())
    assert both["n"].to_list() == both["count"].to_list()


def test_every_accuracy_has_an_interval_and_nothing_else(run):
    metrics = run[0]["metrics"]
    accuracy = pl.col("metric").str.ends_with("_accuracy")
    with_bounds, without = metrics.filter(accuracy), metrics.filter(~accuracy)
    assert set(without["low"]) == set(without["high"]) == {None}
    assert with_bounds.null_count().select("low", "high").row(0) == (0, 0)
    assert (with_bounds["low"] <= with_bounds["high"]).all()
    inside = with_bounds["value"].is_between(with_bounds["low"] - 1e-9, with_bounds["high"] + 1e-9)
    assert inside.mean() > 0.98
    whole = with_bounds.filter(pl.col("step") == -1)
    assert set(whole["subset"]) == {"all", "people 0", "people 1", "people 2"}
    assert (whole["high"] - whole["low"]).max() > 0.01


def test_clips_of_one_video_are_drawn_together(run):
    tables, splits = run
    right = judged(tables["predictions"], splits, tables["feedback"])

    def widths(sequence: pl.Expr) -> pl.Series:
        rows = right.with_columns(sequence.cast(pl.String).alias("sequence"))
        found = accuracy_intervals(rows, None, 200).filter(pl.col("step") == -1)
        return found["high"] - found["low"]

    assert (widths(pl.col("sample_id")) > 0).any()
    # One video is in every draw, so that nothing changes.
    assert (widths(pl.lit("one video")) == 0).all()
