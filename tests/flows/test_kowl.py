"""The KOWL flow end to end: on sample lists through Prefect, on the real lists without it."""

import csv
import shutil
from datetime import date

import polars as pl
import pytest

from schemas.config import Settings, make_config
from schemas.errors import ConfigError, SourceError
from schemas.kowl import Config, EvaluationChoice, FeatureSettings, UnifySettings
from storage.raw import open_raw
from storage.tables import current_version
from tasks.kowl.build import (
    IncrementChoice,
    cut_increments,
    find_releases,
    plan_increments,
    plan_lists,
    plan_unify,
    read_lists,
    unify_releases,
)
from tasks.sample.kowl import write_kowl
from tasks.stage import Build
from tests.shared import shared_path


def table(lake, name: str) -> pl.DataFrame:
    return current_version(lake, "kowl", name).read()


@pytest.fixture(scope="module")
def built(tmp_path_factory, prefect_api):
    from flows.kowl import build

    root = tmp_path_factory.mktemp("kowl")
    write_kowl(root / "raw", videos_per_class=0)
    build(Config(lists=root / "raw" / "lists", lake=root / "lake"))
    return root


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, prefect_api):
    """Videos, features of one frame, one predictor with no and with all feedback."""
    from flows.kowl import build

    root = tmp_path_factory.mktemp("kowl_videos")
    write_kowl(root / "raw", clips_per_class=8, videos_per_class=3)
    for folder in sorted((root / "raw" / "videos").iterdir())[::2]:
        shutil.rmtree(folder)  # link rot of every second class, for speed
    config = Config(
        lists=root / "raw" / "lists",
        videos=root / "raw" / "videos",
        lake=root / "lake",
        features=FeatureSettings(extractor="efficientnet", frames=1, threads=1),
        evaluation=EvaluationChoice(predictors=("gmm_finch",), preset="small", feedback=(0, 1)),
    )
    build(config)
    return root, config


def test_every_usable_video_has_features_and_every_increment_measures(evaluated):
    lake = evaluated[0] / "lake"
    videos, features = table(lake, "videos"), table(lake, "features_efficientnet")
    usable = videos.filter(pl.col("status").is_in(["ok", "frame_count_lie"]))
    assert features["sample_id"].to_list() == usable["sample_id"].to_list()
    measures = table(lake, "measures")
    shown = table(lake, "increments").join(features, on="sample_id")
    assert set(measures["increment"]) == set(shown["increment"])
    assert sorted(set(measures["feedback"])) == [0, 1]
    counts = table(lake, "confusion").filter((pl.col("rank") == 1) & (pl.col("grouping") == "all"))
    after = counts.filter((pl.col("phase") == "post_feedback") & (pl.col("feedback") == 1))
    assert after["count"].sum() == shown.height


def test_all_feedback_beats_none_after_the_last_increment(evaluated):
    measures = table(evaluated[0] / "lake", "measures").filter(
        (pl.col("increment") == pl.col("increment").max())
        & (pl.col("scope") == "cumulative")
        & (pl.col("metric") == "accuracy")
        & (pl.col("reduction") == "raw")
        & (pl.col("grouping") == "all")
        & (pl.col("split") == "validate")
    )
    none, everything = measures.sort("feedback")["value"]
    assert everything > none


def test_a_second_evaluation_does_nothing(evaluated, capsys):
    from flows.kowl import build

    build(evaluated[1])
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(": 0 of" in line for line in lines if line.startswith("kowl/"))


def test_protocol_tests_are_made_of_the_lake(evaluated, tmp_path):
    from schemas.condda import TestSettings
    from tasks.condda.build import plan_tests, read_features
    from tasks.condda.from_lake import tests_of_lake

    settings = TestSettings(
        tests=2, rows=12, round_size=4, novelty_mix=0.3, splits=("train", "validate", "test")
    )
    made = tests_of_lake(evaluated[0] / "lake", "kowl", tmp_path, settings)
    source = open_raw(tmp_path)
    assert made.height == len(plan_tests(source)) == 2
    files = {file.name: file for file in source.files()}
    test = made["test_id"][0]
    training, features = read_features(tmp_path, files[f"features/{test}.npz"], "first")
    assert features.values.shape == (12, 1280)
    assert len(training.known) == made["known_classes"][0]
    assert set(training.labels) <= set(range(len(training.known)))


def test_report_shows_the_evaluation(evaluated):
    page = (evaluated[0] / "lake" / "reports" / "kowl.html").read_text()
    assert "Predictors over the increments" in page and "Do features separate" in page


def test_every_clip_is_in_one_increment_or_says_why(built):
    clips, increments, left = (
        table(built / "lake", n) for n in ("clips", "increments", "unassigned")
    )
    assert sorted([*increments["sample_id"], *left["sample_id"]]) == clips["sample_id"].to_list()
    assert increments["increment"].unique().sort().to_list() == list(range(11))
    introduced = dict(
        table(built / "lake", "classes").select("label", "increment_introduced").iter_rows()
    )
    novel = increments.filter((pl.col("role") == "novel") & (pl.col("split") == "train"))
    assert all(introduced[row["label"]] == row["increment"] for row in novel.iter_rows(named=True))


def test_bad_lines_are_quarantined(built):
    quarantine = table(built / "lake", "quarantine")
    assert quarantine.height == 7
    assert set(quarantine["stage"]) == {"read_lists"}


def test_other_orders_and_seeds_change_only_the_increments(built, capsys):
    from flows.kowl import build

    before = table(built / "lake", "increments")
    build(Config(lists=built / "raw" / "lists", lake=built / "lake", seed=3))
    lines = capsys.readouterr().err
    assert "read_lists: 0 of" in lines and "unify_releases: 0 of" in lines
    after = table(built / "lake", "increments")
    assert not after.equals(before)
    sizes = ["increment", "split", "role"]
    assert after.group_by(sizes).len().sort(sizes).equals(before.group_by(sizes).len().sort(sizes))


def test_report_shows_the_increments(built):
    page = (built / "lake" / "reports" / "kowl.html").read_text()
    assert "in 11 increments" in page and "Label changes" in page
    assert "Beside the paper" not in page  # only for the full set


def test_no_lists_is_said(tmp_path):
    (tmp_path / "x.csv").write_text("x")
    with pytest.raises(SourceError, match="no lists of kinetics400"):
        find_releases(open_raw(tmp_path), ())


@pytest.mark.parametrize(
    ("file", "release", "split"),
    [
        ("kinetics600_train.csv.gz", "kinetics600", "train"),
        ("kinetics400_train_partial.csv", "kinetics400", "train"),
        ("kinetics600_train07.csv", "kinetics600", "train"),
        ("kinetics-700_2020_val.csv", "kinetics700_2020", "validate"),
        ("kinetics_400_validation.csv.gz", "kinetics400", "validate"),
        ("kinetics700_2020/validate.csv", "kinetics700_2020", "validate"),
    ],
)
def test_lists_are_found_by_their_usual_names(tmp_path, file, release, split):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("x")
    (found,) = find_releases(open_raw(tmp_path), ())
    assert found.name == release and found.files == {split: (file,)}


def test_a_list_of_an_unknown_release_is_said(tmp_path, capsys):
    for name in ("kinetics400_train.csv", "kinetics700_2019_val.csv", "old/kinetics400_val.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (found,) = find_releases(open_raw(tmp_path), ())
    assert found.files == {"train": ("kinetics400_train.csv",)}
    said = capsys.readouterr().err
    assert "kinetics700_2019_val.csv is not read: declare its release kinetics700_2019" in said


def test_the_day_of_a_list_is_recorded(tmp_path):
    (tmp_path / "kinetics400_train.csv").write_text(
        "label,youtube_id,time_start,time_end\nluge,aaaaaaaaaaa,0,10\n"
    )
    source = open_raw(tmp_path)
    (found,) = find_releases(source, ())
    declared = found.model_copy(update={"snapshot_date": date(2018, 1, 2)})
    for release, day in ((found, date(2021, 3, 31)), (declared, date(2018, 1, 2))):
        (shard,) = plan_lists(source, [release], date(2021, 3, 31))
        rows = read_lists(shard, Settings()).tables["listings"]
        assert rows["snapshot_date"].to_list() == [day]


def test_releases_that_stand_twice_are_refused():
    twice = [{"name": "a", "order": n, "files": {}} for n in (0, 1)]
    with pytest.raises(ConfigError, match="two releases have one name"):
        make_config(Config, {"lists": ".", "releases": twice})


@pytest.mark.slow
@pytest.mark.parametrize("order", ["least_frequent_first", "most_frequent_first"])
def test_real_lists_give_the_expected_increments(tmp_path, order):
    lists = shared_path("kinetics")
    with Build("kowl", tmp_path) as build:
        source = open_raw(lists)
        releases = find_releases(source, ())
        build.run(read_lists, plan_lists(source, releases), Settings())
        build.run(unify_releases, plan_unify(build.table("listings"), releases), UnifySettings())
        clips = plan_increments(build.table("clips"), releases)
        build.run(cut_increments, clips, IncrementChoice(novel_class_order=order))
    assert build.versions["clips"].manifest.rows == 869_006
    increments = build.versions["increments"].read(["increment", "split", "role"])
    counted = {
        (row["increment"], row["split"], row["role"]): row["len"]
        for row in increments.group_by("increment", "split", "role").len().iter_rows(named=True)
    }
    with (lists / "expected" / "kowl_increments_from_reachable_lists.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["novel_class_order"] == order]
    assert rows
    for row in rows:
        for role in ("known", "novel"):
            expected = int(row[f"{role}_samples"])
            key = (int(row["increment"]), row["split"], role)
            assert counted.get(key, 0) == expected, (row, role)
