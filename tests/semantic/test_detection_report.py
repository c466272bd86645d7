"""Tables beside the paper's, means over seeds and members, and what is said of a difference."""

import re

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from schemas.older_tables import METRICS, TRAINING
from tasks.semantic.detection_report import (
    PAPER,
    changes,
    evaluations_of,
    measured,
    ranking,
    sections,
    sentences,
    with_average,
)
from tasks.semantic.training_report import curves_of
from tasks.semantic.trials import BUILT_IN, read_subsets
from tests.shared import shared_path

MEMBERS, SEEDS, TASKS = ("airplane", "cat"), (0, 1), ("none", "rotation")
NAMES = (
    ("msp", "average_precision"),
    ("msp", "acc"),
    ("msp", "skew"),
    ("odin", "average_precision"),
    ("msp", "average_precision_last_epochs"),
    ("msp", "acc_last_epochs"),
    ("odin", "average_precision_last_epochs"),
)


def metrics_of(value, subset: str = "cifar10", members=MEMBERS, seeds=SEEDS) -> pl.DataFrame:
    """`value(member, task, seed, detector, metric)` for every run."""
    rows = [
        {
            "benchmark": "semantic",
            "protocol": f"{subset}/{member}",
            "detector": detector,
            "backbone": f"cifar {task}",
            "seed": seed,
            "split": "test",
            "convention": "semantic",
            "metric": metric,
            "value": 0.1 if metric == "skew" else value(member, task, seed, detector, metric),
            "n": 100,
            "data_key": "x",
        }
        for member in members
        for task in TASKS
        for seed in seeds
        for detector, metric in NAMES
    ]
    return METRICS.conform(pl.DataFrame(rows))


def training_of(epochs: int = 4, scored: int = 2, trial: str = "cifar10/cat") -> pl.DataFrame:
    rows = [
        (task, f"{trial} cifar small", seed, epoch, measure, epoch / 10 + seed / 100)
        for task in TASKS
        for seed in SEEDS
        for epoch in range(1, epochs + 1)
        for measure in ("loss", "ap_msp", "ap_odin", "test_accuracy")
        if measure == "loss" or epoch > epochs - scored
    ]
    columns = ("detector", "variant", "seed", "epoch", "measure", "value")
    return TRAINING.conform(pl.DataFrame(rows, schema=columns, orient="row"))


def reader(**tables: pl.DataFrame):
    def read(table, columns=None, where=None):
        frame = tables.get(table)
        return frame if frame is None or where is None else frame.filter(where)

    return read


def page(**tables: pl.DataFrame) -> str:
    return "\n".join(str(part) for section in sections(reader(**tables)) for part in section.parts)


def points(member, task, seed, detector, metric) -> float:
    """none: 0.2 and 0.4 by member, 0.02 by seed; rotation 0.05 above on airplane, 0.01 on cat."""
    gain = {"airplane": 0.05, "cat": 0.01}[member] if task == "rotation" else 0
    base = 0.2 if member == "airplane" else 0.4
    final = 0.0 if metric.endswith("last_epochs") else 0.1
    return base + 0.02 * seed + gain + final


def test_the_average_is_over_members_and_its_deviation_over_seeds():
    runs = measured(metrics_of(points)).filter(
        score="msp", metric="average_precision_last_epochs", auxiliary="none"
    )
    found = {row["member"]: row for row in with_average(runs).iter_rows(named=True)}
    assert found["cat"]["mean"] == pytest.approx(41)
    assert found["cat"]["deviation"] == pytest.approx(np.std([40, 42], ddof=1))
    assert found["Average"]["mean"] == pytest.approx(31)
    # of the two means over members, 30 and 32, not of the four numbers
    assert found["Average"]["deviation"] == pytest.approx(np.std([30, 32], ddof=1))
    assert found["Average"]["seeds"] == 2


def test_one_seed_has_no_deviation():
    runs = measured(metrics_of(points, seeds=(3,))).filter(score="msp", metric="acc")
    assert with_average(runs)["deviation"].null_count() == with_average(runs).height


def test_changes_are_paired_by_member_and_seed():
    found = changes(measured(metrics_of(points)))
    row = found.filter(column="msp").row(0, named=True)
    assert (row["pairs"], row["members"], row["gained"]) == (4, 2, 2)
    assert row["mean"] == pytest.approx(3) and row["deviation"] == pytest.approx(4 / 3**0.5)
    interval = ttest_1samp([5, 5, 1, 1], 0).confidence_interval(0.95)
    assert (row["low"], row["high"]) == (
        pytest.approx(interval.low),
        pytest.approx(interval.high),
    )
    assert row["low"] < 0 and row["verdict"] == "no clear change"
    assert found["column"].to_list() == ["msp", "odin", "accuracy"]


@pytest.mark.parametrize(
    ("gain", "wobble", "seeds", "verdict"),
    [
        (0.03, 0.001, (0, 1), "better"),
        (-0.03, 0.001, (0, 1), "worse"),
        (0.03, 0.2, (0, 1), "no clear change"),
        (0.0, 0.0, (0, 1), "no clear change"),
        (0.03, 0.0, (0,), "too few pairs to say"),
    ],
)
def test_the_verdict(gain, wobble, seeds, verdict):
    def value(member, task, seed, detector, metric):
        sign = 1 if (seed + (member == "cat")) % 2 else -1
        return 0.4 + (gain + sign * wobble if task == "rotation" else 0)

    found = changes(measured(metrics_of(value, seeds=seeds)))
    assert set(found["verdict"]) == {verdict}
    (said,) = sentences(found)
    assert verdict in said and f"{len(seeds) * 2} pairs" in said and "cifar10" in said
    assert f"{100 * gain:+.2f} points" in said


@settings(deadline=None)
@given(st.lists(st.floats(-0.3, 0.3), min_size=6, max_size=6))
def test_the_verdict_is_that_of_the_t_test(gains):
    members = ("airplane", "cat", "dog")

    def value(member, task, seed, detector, metric):
        return 0.5 + (gains[members.index(member) * 2 + seed] if task == "rotation" else 0)

    row = changes(measured(metrics_of(value, members=members))).row(0, named=True)
    exact = 100 * ((0.5 + np.array(gains)) - 0.5)
    if exact.std() > 1e-9:
        p = ttest_1samp(exact, 0).pvalue
        if abs(p - 0.05) > 1e-6:
            said = row["verdict"] in ("better", "worse")
            assert said == (p < 0.05)
            assert row["verdict"] != ("worse" if exact.mean() > 0 else "better")


def test_the_table_has_the_papers_numbers_beside_ours():
    found = page(metrics=metrics_of(points), training=training_of())
    text = re.sub(r"<[^>]+>", "|", found)
    for said in ("21.00 ± 1.41", "43.30 ± 1.13", "48.23 ± 1.90", "96.00 ± 0.16", "46.87 ± 2.10"):
        assert said in text, said
    rows = re.findall(r"<tr><td>(airplane|cat|Average|paper)</td>", found)
    assert rows[:5] == ["airplane", "paper", "cat", "paper", "Average"]
    # the paper's average is over ten members, ours over two: it must not stand beside ours
    assert "34.92" not in text
    assert "last 2 epochs" in text and "final networks alone" in text
    # final networks are 0.1 better in this data
    assert "31.00 ± 1.41" in text


def test_all_members_have_the_papers_average_beside_them():
    members = next(s for s in pl.read_csv(PAPER).partition_by("subset") if s["subset"][0] == "dog")
    names = [name for name in members["member"].unique(maintain_order=True) if name != "Average"]

    def value(*_):
        return 0.25

    found = page(
        metrics=metrics_of(value, subset="dog", members=names),
        training=training_of(trial="dog/basset hound"),
    )
    average = pl.read_csv(PAPER).filter(
        subset="dog", member="Average", experiment="rotation", auxiliary="none", score="msp"
    )
    assert f"{average['mean'][0]:.2f} ± {average['deviation'][0]:.2f}" in found


def test_one_scored_epoch_needs_no_second_table():
    found = page(metrics=metrics_of(points), training=training_of(scored=1))
    assert "final networks alone" not in found and "after its last epoch" in found


def test_a_subset_of_ones_own_has_no_column_of_the_paper():
    found = page(metrics=metrics_of(points, subset="mine"), training=training_of(trial="mine/cat"))
    assert "<td>paper</td>" not in found and ">MSP</th>" in found and "<td>Average</td>" in found


def test_scores_are_ranked_by_their_mean_over_tasks():
    def value(member, task, seed, detector, metric):
        return {"msp": 0.3, "odin": 0.4}[detector] + (0.05 if task == "rotation" else 0)

    found = ranking(measured(metrics_of(value)))
    assert found["score"].to_list() == ["odin", "msp"]
    assert found["none"].to_list() == ["40.00 ± 0.00", "30.00 ± 0.00"]
    assert found["over all tasks"].to_list() == [pytest.approx(42.5), pytest.approx(32.5)]


def test_the_final_networks_may_lack_the_papers_scores():
    """Of other post-hoc scores alone there is no second table, and no error."""
    metrics = metrics_of(points)
    last = pl.col("metric").str.ends_with("_last_epochs") | (pl.col("metric") == "skew")
    found = page(metrics=metrics.filter(last), training=training_of())
    assert "21.00 ± 1.41" in found and "final networks alone" not in found


def test_evaluations_in_words():
    assert evaluations_of(training_of(scored=1)) == "1"
    assert evaluations_of(training_of(scored=3)) == "3"
    both = pl.concat([training_of(scored=1), training_of(scored=2, trial="cifar10/dog")])
    assert evaluations_of(both) == "1 to 2"


def test_curves_are_means_over_members_with_a_band_over_seeds():
    rows = pl.concat([training_of(), training_of(trial="cifar10/Model T")])
    found = curves_of(rows).filter(auxiliary="none", measure="loss", epoch=2).row(0, named=True)
    assert found["subset"] == "cifar10"
    assert (found["mean"], found["low"], found["high"]) == (
        pytest.approx(0.205),
        pytest.approx(0.2),
        pytest.approx(0.21),
    )


def test_figures_and_sections_are_there_and_the_baseline_is_not_a_network():
    metrics = metrics_of(points)
    baseline = metrics.with_columns(detector=pl.lit("channel_gaussian"), backbone=pl.lit("32 x 32"))
    training = training_of()
    titles = [s.title for s in sections(reader(metrics=metrics, training=training))]
    assert titles == [
        "Networks beside the paper",
        "What the auxiliary task changed",
        "Every score of the networks",
        "Training of the networks",
    ]
    assert sections(reader(metrics=baseline, training=training)) == []
    assert sections(reader(metrics=metrics)) == []
    both = page(metrics=pl.concat([metrics, baseline]), training=training)
    assert both == page(metrics=metrics, training=training) and "<svg" in both


def test_none_alone_has_a_table_and_nothing_that_changed():
    metrics = metrics_of(points).filter(pl.col("backbone") == "cifar none")
    found = sections(reader(metrics=metrics, training=training_of()))
    assert "What the auxiliary task changed" not in [section.title for section in found]
    assert "43.30 ± 1.13" in "".join(found[0].parts)


def test_the_papers_members_are_those_of_the_subsets():
    paper = pl.read_csv(PAPER).filter(pl.col("member") != "Average")
    for subset in read_subsets(BUILT_IN):
        own = paper.filter(subset=subset.name)
        assert set(own["member"]) == set(subset.members.values()), subset.name
        assert set(own["experiment"]) == {"rotation", "cpc"}


def test_the_papers_averages_are_the_means_of_its_members():
    paper = pl.read_csv(PAPER).filter(pl.col("experiment") != "centre_mask")
    key = ["experiment", "subset", "auxiliary", "score"]
    means = paper.filter(pl.col("member") != "Average").group_by(key).agg(pl.col("mean").mean())
    both = paper.filter(member="Average").join(means, on=key)
    assert both.height == 72
    assert (both["mean"] - both["mean_right"]).abs().max() < 0.06


def test_the_papers_numbers_are_those_of_the_shared_file():
    shared = pl.read_csv(shared_path("images/expected/paper_results.csv"))
    ours = pl.read_csv(PAPER)
    theirs = shared.select(
        "experiment",
        pl.col("dataset").alias("subset"),
        pl.col("anomaly").alias("member"),
        pl.when(pl.col("model") == "classification-only")
        .then(pl.lit("none"))
        .otherwise("experiment")
        .alias("auxiliary"),
        pl.col("score").str.to_lowercase(),
        "mean",
        pl.col("std").alias("deviation"),
    )
    assert theirs.join(ours, on=theirs.columns, how="anti", nulls_equal=True).is_empty()
    assert ours.height == theirs.height + 4  # the control's two numbers, with and without
