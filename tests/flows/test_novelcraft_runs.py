"""Runs of NovelCraft through the flow: every table of the spine, what stays, what is made anew."""

import shutil

import polars as pl
import pytest

from schemas.errors import RunsFailed
from schemas.novelcraft import Config
from storage.tables import current_version
from tasks.evaluation.stages import EvaluationSettings
from tasks.novelcraft.windows import PROTOCOLS
from tasks.sample.novelcraft import write_novelcraft
from tests.flows.test_novelcraft import made


class FewDraws(EvaluationSettings):
    draws: int = 5


EPISODES = {"normal": 3, "fence": 2, "item_tnt": 1, "tree_easy": 3}
TINY = {
    "scale": 0.25, "layers": [4, "M", 8, "M"], "width": 1, "hidden": 8, "pool": 2, "epochs": 1,
    "cpu_threads": 1,
}  # fmt: skip
MODELS = {
    "colour_rarity": {},
    "vgg_classifier": TINY,
    "odin": {},
    "symbolic_mlp": {"context": 2, "epochs": 1, "cpu_threads": 1},
    "multimodal": {"visual": "colour_rarity", "context": 2},
}
SCORES = {"own": {}, "msp": {}, "nearest": {}, "react": {}}


def run(root, **options) -> None:
    from flows.novelcraft import build

    build(Config(source=root / "raw", lake=root / "lake", **({"scores": SCORES} | options)))


def table(root, name: str) -> pl.DataFrame:
    return current_version(root / "lake", "novelcraft", name).read()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("novelcraft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.novelcraft.publish_report", lambda *_: None)
        patch.setattr("tasks.evaluation.stages.EvaluationSettings", FewDraws)
        write_novelcraft(root / "raw", episodes=EPISODES, bad_records=False)
        run(root, models=MODELS)
        yield root


def test_every_table_of_the_spine_is_written(built):
    runs = table(built, "runs")
    assert sorted(runs.select("protocol", "model").rows()) == [
        ("fused", "multimodal"),
        ("symbolic", "symbolic_mlp"),
        ("symbolic_all", "symbolic_mlp"),
        ("symbolic_windows", "symbolic_mlp"),
        ("symbolic_windows_non_overlapping", "symbolic_mlp"),
        ("visual", "colour_rarity"),
        ("visual", "odin"),
        ("visual", "vgg_classifier"),
    ]
    metrics = table(built, "metrics")
    for protocol in set(runs["protocol"]):
        assert {"auroc", "fpr95"} <= set(metrics.filter(protocol=protocol)["metric"]), protocol
    assert set(metrics.filter(model="vgg_classifier")["score"]) == set(SCORES)
    assert set(metrics.filter(model="odin")["score"]) == {"own"}
    named = dict(runs.select("run_id", "protocol").iter_rows())
    splits, samples = table(built, "splits"), table(built, "samples")
    assert set(splits["sample_id"]) <= set(samples["sample_id"])
    tested = splits.filter(pl.col("split") != "train")
    scores = table(built, "scores").filter(score="own")
    for (run_id,), part in scores.group_by("run_id"):
        rows = tested.filter(protocol=named[run_id])
        if mode := PROTOCOLS.get(named[run_id]):
            rows = rows.filter(pl.col("sample_id").str.starts_with(f"{mode}/2/"))
        assert sorted(part["sample_id"]) == sorted(rows["sample_id"])
    (classifier,) = runs.filter(model="vgg_classifier")["run_id"]
    predictions = table(built, "predictions")
    assert set(predictions["run_id"]) == {classifier}
    assert predictions.height == tested.filter(protocol="visual").height
    outputs = table(built, "outputs").filter(run_id=classifier)
    assert outputs.height == splits.filter(protocol="visual").height
    # ODIN names the classes of its base.
    (odin,) = runs.filter(model="odin")["run_id"]
    both = table(built, "outputs").filter(run_id=odin).join(outputs, on="sample_id")
    assert both.height == predictions.height
    assert both["predicted"].to_list() == both["predicted_right"].to_list()
    assert set(table(built, "training")["run_id"]) <= set(runs["run_id"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_window_has_the_largest_score_of_its_frames(built, protocol):
    runs = table(built, "runs").filter(model="symbolic_mlp")
    windowed = runs.filter(protocol=protocol).row(0, named=True)
    (base,) = windowed["base_runs"]
    assert base == runs.filter(protocol="symbolic")["run_id"].item()
    outputs = table(built, "outputs")
    frames = table(built, "frames").select("frame_id", "episode_id", "position")
    novelty = outputs.filter(run_id=base).join(frames, left_on="sample_id", right_on="frame_id")
    windows = table(built, "windows")
    for row in outputs.filter(run_id=windowed["run_id"]).iter_rows(named=True):
        window = windows.filter(sample_id=row["sample_id"]).row(0, named=True)
        inside = novelty.filter(
            (pl.col("episode_id") == window["episode_id"])
            & pl.col("position").is_between(window["start"], window["stop"] - 1)
        )
        assert row["novelty"] == inside["novelty"].max()


def test_fused_runs_say_what_they_fuse(built):
    runs = table(built, "runs")
    (bases,) = runs.filter(model="multimodal")["base_runs"]
    by_id = dict(runs.select("run_id", "model").iter_rows())
    assert [by_id[base] for base in bases] == ["colour_rarity", "symbolic_mlp"]


def test_other_models_keep_the_first_ones_and_an_unused_episode_fits_nothing(built, capsys):
    first = table(built, "metrics")
    run(built, models={"colour_rarity": {"bits": 3}}, scores={"own": {}})
    assert made(capsys)["train_model"] == 1
    runs, metrics = table(built, "runs"), table(built, "metrics")
    assert runs.height == 9 and runs.filter(model="colour_rarity").height == 2
    assert metrics.join(first, on=first.columns, nulls_equal=True).height == first.height
    # item_bedrock is in no protocol.
    shutil.copytree(built / "raw" / "item_tnt", built / "raw" / "item_bedrock")
    run(built, models=MODELS)
    counts = made(capsys)
    assert counts["train_model"] == counts["pass_samples"] == counts["score_outputs"] == 0
    assert table(built, "runs").height == 9
    assert "item_bedrock" in set(table(built, "samples")["class"])
    shutil.rmtree(built / "raw" / "item_bedrock")


def test_a_training_that_fails_is_recorded_and_takes_what_builds_on_it_along(built):
    # A rate without bounds ends in numbers that are none.
    wild = {**TINY, "learning_rate": 1e30, "optimizer": "sgd", "batch_norm": False}
    with pytest.raises(RunsFailed, match="2 shards of runs failed"):
        run(built, models={"vgg_classifier": wild, "odin": {}, "colour_rarity": {"bits": 2}})
    runs = table(built, "runs")
    failed = runs.filter(state="failed")
    assert sorted(failed["model"]) == ["odin", "vgg_classifier"]
    reasons = dict(failed.select("model", "reason").iter_rows())
    assert "diverged" in reasons["vgg_classifier"] and "builds on vgg_c" in reasons["odin"]
    assert runs.filter(model="colour_rarity", state="done").height == 3


def test_discovery_is_two_runs_with_clusters(built):
    run(built, discovery=True)
    runs = table(built, "runs").filter(pl.col("model").str.starts_with("discovery"))
    assert sorted(runs["model"]) == ["discovery_gcd", "discovery_plain"]
    clusters = table(built, "discovery")
    valid = table(built, "splits").filter(protocol="visual", split="valid")
    assert clusters.height == 2 * valid.height
    assert set(clusters["run_id"]) == set(runs["run_id"])
    metrics = table(built, "metrics").filter(convention="hungarian")
    assert set(metrics["metric"]) == {"accuracy_all", "accuracy_labelled", "accuracy_new"}
    assert set(metrics["score"]) == {"none"} and set(metrics["n"]) == {valid.height}
