"""The KOWL flow end to end: on sample lists and on the real ones."""

import csv
import json
import shutil
from datetime import date

import polars as pl
import pytest

from flows.importing import import_file
from schemas.config import Settings, make_config
from schemas.errors import ConfigError, SourceError
from schemas.kowl import (
    Config,
    IncrementChoice,
    OpenWorldSettings,
    UnifySettings,
    VideoSettings,
)
from storage.raw import open_raw
from storage.tables import current_version
from tasks.engine.stage import Build
from tasks.evaluation.imports import Import
from tasks.kowl.build import (
    cut_increments,
    define_protocol,
    find_releases,
    plan_increments,
    plan_lists,
    plan_unify,
    read_lists,
    unify_releases,
)
from tasks.kowl.policies import KINETICS
from tasks.sample.kowl import write_kowl
from tests.models.test_clips import checkpoint
from tests.shared import shared_path


def table(lake, name: str) -> pl.DataFrame:
    return current_version(lake, "kowl", name).read()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    from flows.kowl import build

    root = tmp_path_factory.mktemp("kowl")
    write_kowl(root / "raw", videos_per_class=0)
    build(Config(lists=root / "raw" / "lists", lake=root / "lake"))
    return root


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
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
        models={"frame_backbone": {"crops": 1, "cpu_threads": 1}},
        predictors={"gmm_finch": {}},
        evaluation=OpenWorldSettings(feedback=(0, 1), threads=1),
    )
    build(config)
    return root, config


def shown(lake) -> pl.DataFrame:
    """Rows of the splits whose clips have features."""
    return table(lake, "splits").join(table(lake, "outputs"), on="sample_id")


def test_every_usable_video_has_features_and_every_increment_measures(evaluated):
    lake = evaluated[0] / "lake"
    videos, outputs = table(lake, "videos"), table(lake, "outputs")
    usable = videos.filter(pl.col("status").is_in(["ok", "frame_count_lie"]))
    assert outputs["sample_id"].to_list() == usable["sample_id"].to_list()
    samples = table(lake, "samples")
    assert samples["sample_id"].to_list() == table(lake, "clips")["sample_id"].to_list()
    seen = samples.drop_nulls("digest")
    assert seen["sample_id"].to_list() == usable["sample_id"].to_list()
    assert seen["digest"].to_list() == usable["sha256"].to_list()
    runs = table(lake, "runs")
    assert runs.group_by("model").len().sort("model").rows() == [
        ("frame_backbone", 2),  # the backbone, and the backbone on the protocol
        ("gmm_finch", 2),
    ]
    backbone = runs.filter(pl.col("protocol").is_null())["run_id"].item()
    assert set(outputs["run_id"]) == {backbone}
    assert set(runs.drop_nulls("protocol")["base_runs"].explode()) == {backbone}
    measures = table(lake, "measures")
    assert set(measures["step"]) == set(shown(lake)["step"])
    counts = table(lake, "confusion").filter((pl.col("rank") == 1) & (pl.col("grouping") == "all"))
    after = counts.filter(pl.col("phase") == "after")
    assert after["count"].sum() == 2 * shown(lake).height


def test_predictions_and_scores_have_a_row_for_each_clip_step_and_phase(evaluated):
    lake = evaluated[0] / "lake"
    tested = shown(lake).filter(pl.col("split") != "train")
    counts = {row[:2]: row[2] for row in tested.group_by("step", "split").len().rows()}
    later = {key: n for key, n in counts.items() if key[0] > 0}
    predictions = table(lake, "predictions")
    for (_, phase), part in predictions.group_by("run_id", "phase"):
        found = {row[:2]: row[2] for row in part.group_by("step", "split").len().rows()}
        assert found == (counts if phase == "after" else later)
    scores = table(lake, "scores")
    for (score, _), part in scores.group_by("score", "run_id"):
        found = {row[:2]: row[2] for row in part.group_by("step", "split").len().rows()}
        assert found == (later if score in ("own", "p_unknown") else counts), score
    assert {"own", "p_unknown", "nearest", "cosine", "mahalanobis"} <= set(scores["score"])
    assert set(scores["score_id"]) <= set(table(lake, "score_settings")["score_id"])


def test_every_score_has_metrics_by_increment(evaluated):
    metrics = table(evaluated[0] / "lake", "metrics").filter(convention="openood")
    whole = metrics.filter(step=-1, split="valid", metric="auroc")
    assert {"own", "p_unknown", "nearest", "cosine"} <= set(whole["score"])
    assert whole["value"].null_count() == 0 and (whole["n"] > 0).all()
    assert (whole["low"] <= whole["high"]).all()
    assert set(metrics["phase"]) == {"before"} and metrics["step"].n_unique() > 5
    assert {"auroc", "fpr95"} <= set(metrics["metric"])
    first = metrics.filter(step=0, metric="auroc")
    assert first["value"].null_count() == first.height  # nothing is novel yet


def test_accuracies_have_intervals(evaluated):
    metrics = table(evaluated[0] / "lake", "metrics").filter(score="none")
    accuracy = metrics.filter(pl.col("metric").str.ends_with("_accuracy"))
    assert accuracy.height and accuracy["low"].null_count() == 0 and (accuracy["n"] > 0).all()
    assert (accuracy["low"] <= accuracy["high"]).all()


def test_all_feedback_beats_none_after_the_last_increment(evaluated):
    lake = evaluated[0] / "lake"
    measures = table(lake, "measures").filter(
        (pl.col("step") == pl.col("step").max())
        & (pl.col("scope") == "cumulative")
        & (pl.col("metric") == "accuracy")
        & (pl.col("reduction") == "raw")
        & (pl.col("grouping") == "all")
        & (pl.col("split") == "valid")
    )
    runs = table(lake, "runs").with_columns(
        pl.col("settings").str.json_path_match("$.feedback").cast(pl.Float64).alias("feedback")
    )
    none, everything = measures.join(runs, on="run_id").sort("feedback")["value"]
    assert everything > none


def test_a_second_evaluation_does_nothing(evaluated, capsys):
    from flows.kowl import build

    build.fn(evaluated[1])
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(": 0 of" in line for line in lines if line.startswith("kowl/"))


def test_runs_of_other_commands_stay(evaluated, capsys):
    """Another predictor, then another protocol, then the lists alone: nothing leaves."""
    from flows.kowl import build

    root, config = evaluated
    lake = root / "lake"
    before = {name: table(lake, name) for name in ("runs", "predictions", "metrics", "measures")}
    evm = config.model_copy(
        update={"predictors": {"evm": {}}, "evaluation": OpenWorldSettings(feedback=(1,))}
    )
    build.fn(evm)
    assert "extract_features: 0 of" in capsys.readouterr().err
    runs = table(lake, "runs")
    assert runs.group_by("model").len().sort("model").rows() == [
        ("evm", 1),
        ("frame_backbone", 2),
        ("gmm_finch", 2),
    ]
    for name, rows in before.items():
        found = table(lake, name)
        kept = found.filter(pl.col("run_id").is_in(rows["run_id"].unique().implode()))
        assert kept.equals(rows) and found.height > rows.height, name
    outputs, samples = table(lake, "outputs"), table(lake, "samples")
    build.fn(Config(lists=config.lists, lake=lake, seed=3))
    build.fn(Config(lists=config.lists, lake=lake))
    assert table(lake, "runs").equals(runs) and table(lake, "outputs").equals(outputs)
    assert table(lake, "samples").equals(samples)
    assert table(lake, "splits")["protocol"].n_unique() == 2


def test_the_report_shows_runs_of_all_commands(evaluated):
    page = (evaluated[0] / "lake" / "reports" / "kowl.html").read_text()
    assert "gmm_finch" in page and "evm" in page


def test_a_wrong_plug_in_or_setting_is_said_before_any_work(evaluated, tmp_path):
    from flows.kowl import build

    config = evaluated[1].model_copy(update={"lake": tmp_path / "lake"})
    for changed, said in (
        ({"predictors": {"svm": {}}}, "no predictor 'svm'"),
        ({"predictors": {"evm": {"tail": 3}}}, "evm: .*tail is not a setting"),
        ({"predictors": {"evm": {}}, "train": {"epochs": 3}}, "no predictor"),
        ({"scores": {"nearst": {}}}, "no score 'nearst'"),
        ({"scores": {"energy": {}}}, "energy fits none of the models frame_backbone, gmm_finch"),
        ({"models": {"resnet": {}}}, "no model 'resnet'"),
        ({"models": {"frame_backbone": {"frames": 2}}}, "frames is not a setting"),
        ({"models": {"x3d": {}}}, "x3d needs its weights"),
        ({"preset": "large"}, "no preset 'large'"),
    ):
        with pytest.raises(ConfigError, match=said):
            build.fn(config.model_copy(update=changed))
    assert not (tmp_path / "lake").exists()
    with pytest.raises(
        ConfigError, match="make the protocol kowl-least_frequent_first-ceil-5-seed0"
    ):
        build.fn(config.model_copy(update={"protocols": ("kowl-other",)}))


def test_an_added_video_is_all_that_is_read(tmp_path):
    """It joins the rows of its protocol, so that runs of it are made again; its features alone."""
    from flows import kowl

    raw = tmp_path / "raw"
    write_kowl(raw, clips_per_class=4, videos_per_class=1)
    folders = sorted((raw / "videos").iterdir())
    for folder in folders[10:]:
        shutil.rmtree(folder)
    files = [file for folder in folders[:10] for file in folder.iterdir()]
    later = max(files, key=lambda file: file.stat().st_size)  # a whole video
    data = later.read_bytes()
    later.unlink()
    config = Config(
        lists=raw / "lists",
        videos=raw / "videos",
        lake=tmp_path / "lake",
        models={"frame_backbone": {"crops": 1, "cpu_threads": 1}},
        scores={"nearest": {}},
    )
    kowl.build.fn(config)
    before = {name: table(tmp_path / "lake", name) for name in ("outputs", "protocols", "runs")}
    later.write_bytes(data)
    kowl.build.fn(config)
    after = {name: table(tmp_path / "lake", name) for name in before}
    assert after["outputs"].height == before["outputs"].height + 1
    kept = after["outputs"].join(before["outputs"], on="sample_id", how="semi")
    assert kept.equals(before["outputs"])
    assert after["protocols"]["data_key"].item() != before["protocols"]["data_key"].item()
    backbone = pl.col("protocol").is_null()
    assert after["runs"].filter(backbone).equals(before["runs"].filter(backbone))


def test_videos_are_decoded_once_in_groups_that_fit_into_the_buffer(tmp_path, capsys, monkeypatch):
    """Bytes are those of a build that keeps no frames and decodes everything twice."""
    from flows import kowl
    from tasks.kowl import videos

    monkeypatch.setattr(videos, "CLIPS_PER_SHARD", 100)
    monkeypatch.setattr(Build, "at_once", lambda build: 1)
    raw = tmp_path / "raw"
    write_kowl(raw, clips_per_class=4, videos_per_class=1)
    for folder in sorted((raw / "videos").iterdir())[8:]:
        shutil.rmtree(folder)
    versions, again = [], []
    for buffer in (0.001, 0.0):
        lake = tmp_path / f"lake{buffer}"
        config = Config(
            lists=raw / "lists",
            videos=raw / "videos",
            lake=lake,
            models={"frame_backbone": {"crops": 1, "cpu_threads": 1}},
            scores={"nearest": {}},
            validation=VideoSettings(buffer=buffer),
        )
        kowl.build.fn(config)
        lines = capsys.readouterr().err.splitlines()
        again.append([line for line in lines if "decoded a second time" in line])
        made = [line for line in lines if "kowl/validate_videos:" in line]
        assert (len(made) > 1) == (buffer > 0), made
        assert not (lake / ".novelty" / "work" / "kowl" / "frames").exists()
        versions.append([current_version(lake, "kowl", n) for n in ("videos", "outputs", "runs")])
    assert len(again[0]) > 1 and not again[1]
    assert all(", 0 decoded a second time" in line for line in again[0]), again[0]
    parts = [[version.manifest.parts for version in some] for some in versions]
    assert parts[0] == parts[1]


@pytest.mark.slow
def test_every_predictor_and_score_runs_on_every_model(tmp_path):
    from flows import kowl

    raw = tmp_path / "raw"
    write_kowl(raw, clips_per_class=8, videos_per_class=3)
    for folder in sorted((raw / "videos").iterdir())[5:]:
        shutil.rmtree(folder)
    weights = checkpoint("x3d", tmp_path / "x3d.pyth")
    one = {"crops": 1, "cpu_threads": 1}
    config = Config(
        lists=raw / "lists",
        videos=raw / "videos",
        lake=tmp_path / "lake",
        models={"frame_backbone": one, "x3d": {**one, "weights": str(weights)}},
        scores={"nearest": {}, "energy": {}},
        predictors={"gmm_finch": {}},
        evaluation=OpenWorldSettings(feedback=(1,), threads=1),
    )
    kowl.build.fn(config)
    outputs, runs = table(tmp_path / "lake", "outputs"), table(tmp_path / "lake", "runs")
    frozen = dict(runs.filter(pl.col("protocol").is_null()).select("run_id", "model").iter_rows())
    assert sorted(frozen.values()) == ["frame_backbone", "x3d"]
    widths = outputs.with_columns(pl.col("features").list.len()).group_by("run_id").agg("features")
    assert {frozen[run]: set(found) for run, found in widths.iter_rows()} == {
        "frame_backbone": {1280},
        "x3d": {2048},
    }
    led = runs.filter(model="gmm_finch")
    assert sorted(led["network"]) == ["frame_backbone", "x3d"]
    assert {frozen[run] for run in led["base_runs"].explode()} == set(frozen.values())
    scored = table(tmp_path / "lake", "scores").join(runs, on="run_id")
    assert set(scored.select("score", "model", "network").unique().rows()) == {
        ("nearest", "frame_backbone", "none"),
        ("nearest", "x3d", "none"),
        ("energy", "x3d", "none"),
        *((score, "gmm_finch", name) for score in ("own", "p_unknown") for name in frozen.values()),
    }
    other = {"x3d": {**one, "weights": str(weights), "preprocessing": "spread"}}
    kowl.build.fn(config.model_copy(update={"models": other}))
    both, led = (
        table(tmp_path / "lake", "outputs"),
        table(tmp_path / "lake", "runs").filter(model="gmm_finch"),
    )
    assert both.join(outputs, on=["run_id", "sample_id", "view"], how="semi").equals(outputs)
    assert both["run_id"].n_unique() == 3 and led["config_id"].n_unique() == 3
    assert sorted(led["network"]) == ["frame_backbone", "x3d", "x3d spread"]


def test_an_imported_run_is_of_the_phase_of_those_built_here(evaluated, tmp_path):
    """A query on `phase = 'before'` has its scores and metrics too, with the same numbers."""
    shutil.copytree(evaluated[0] / "lake", tmp_path / "lake", symlinks=True)
    lake = tmp_path / "lake"
    runs = table(lake, "runs").drop_nulls("protocol").filter(model="frame_backbone")
    run, protocol = runs["run_id"].item(), runs["protocol"].item()
    outputs = shown(lake).select("sample_id", "features").unique("sample_id")
    outputs.write_parquet(tmp_path / "mine.parquet")
    file = tmp_path / "mine.parquet"
    imported = import_file(lake, Import("outputs", file, "kowl", protocol, "mine"))
    for name in ("scores", "metrics", "curves"):
        before = table(lake, name).filter(phase="before")
        ours, theirs = (before.filter(run_id=one) for one in (run, imported))
        assert theirs.height and set(theirs["score"]) == set(ours["score"]), name
        assert table(lake, name).filter(run_id=imported).height == theirs.height
    columns = ["score_id", "split", "step", "subset", "convention", "metric", "value"]
    metrics = table(lake, "metrics").filter(phase="before").sort(columns[:-1])
    assert (
        metrics.filter(run_id=imported)
        .select(columns)
        .equals(metrics.filter(run_id=run).select(columns))
    )


def test_protocol_tests_are_made_of_the_lake(evaluated, tmp_path):
    from schemas.condda import TestSettings
    from tasks.condda.build import plan_tests, read_features
    from tasks.condda.from_lake import tests_of_lake

    settings = TestSettings(
        tests=2, rows=12, round_size=4, novelty_mix=0.3, splits=("train", "valid", "test")
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


def test_splits_say_what_the_increments_say(built):
    lake = built / "lake"
    increments, splits = table(lake, "increments"), table(lake, "splits")
    assert set(splits["split"]) == {"train", "valid", "test"}
    joined = increments.join(splits, on=["protocol", "sample_id", "split", "role"])
    assert joined.height == increments.height == splits.height
    assert (joined["increment"] == joined["step"]).all()
    assert (joined["label"] == joined["class"]).all()
    # Labels count through the train classes in the order of their release.
    classes = table(lake, "classes").sort("increment_introduced", "label")
    numbers = dict(splits.drop_nulls("label").select("class", "label").unique().iter_rows())
    assert [numbers[name] for name in classes["label"]] == list(range(classes.height))
    (protocol,) = table(lake, "protocols").iter_rows(named=True)
    assert protocol["protocol"] == "kowl-least_frequent_first-ceil-5-seed0"
    assert json.loads(protocol["definition"])["pooling"] == "per_release"
    assert protocol["samples"] == splits.height
    assert table(lake, "samples")["digest"].null_count() == table(lake, "samples").height


def test_another_definition_is_another_protocol(built, capsys):
    from flows.kowl import build

    lake = built / "lake"
    before = table(lake, "splits")
    build(Config(lists=built / "raw" / "lists", lake=lake, seed=3))
    lines = capsys.readouterr().err
    assert "read_lists: 0 of" in lines and "unify_releases: 0 of" in lines
    both = table(lake, "splits")
    after = both.filter(protocol="kowl-least_frequent_first-ceil-5-seed3").drop("protocol")
    assert both.filter(protocol=before["protocol"][0]).equals(before)
    assert not after.equals(before.drop("protocol"))
    sizes = ["step", "split", "role"]
    assert after.group_by(sizes).len().sort(sizes).equals(before.group_by(sizes).len().sort(sizes))


def test_the_name_of_a_protocol_sees_all_that_defines_it(tmp_path):
    (tmp_path / "kinetics400_train.csv").write_text("x")
    (release,) = find_releases(open_raw(tmp_path), ())
    usual = define_protocol(IncrementChoice(), UnifySettings(), KINETICS)[0]
    names = {
        usual,
        define_protocol(IncrementChoice(validate_as_test=True), UnifySettings(), KINETICS)[0],
        define_protocol(IncrementChoice(pooling="one_pool"), UnifySettings(), KINETICS)[0],
        define_protocol(IncrementChoice(), UnifySettings(renames=()), KINETICS)[0],
        define_protocol(IncrementChoice(), UnifySettings(), [release])[0],
    }
    assert len(names) == 5 and usual == "kowl-least_frequent_first-ceil-5-seed0"


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
        clips = plan_increments(build.table("clips"), releases, "real")
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
            split = row["split"].replace("validate", "valid")
            key = (int(row["increment"]), split, role)
            assert counted.get(key, 0) == expected, (row, role)
