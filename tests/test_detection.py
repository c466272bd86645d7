"""Train, score, evaluate as stages: order, what one builds on, second run, crash."""

import os
import signal

import numpy as np
import polars as pl
import pytest

from schemas.config import Settings
from schemas.errors import ConfigError, NativeError, SourceError
from storage.pieces import Part
from tasks.detection import (
    EvaluateSettings,
    Loaded,
    TrainSettings,
    chosen_detectors,
    evaluate_scores,
    plan_evaluation,
    plan_scoring,
    plan_training,
    score_detector,
    train_detector,
    waves,
    weights_file,
)
from tasks.detectors.base import NOVEL, Samples
from tasks.stage import Build, Produced, Shard, stage
from tests.toy import READINGS

SMALL = {
    "item_bar_rows": 0,
    "scale": 1.0,
    "layers": (8, "M", 8, "M"),
    "width": 1.0,
    "hidden": 8,
    "pool": 2,
    "epochs": 2,
    "batch_size": 16,
}


def load(shard: Shard, split: str, detector) -> Loaded:
    """Two classes of coloured noise; in the test split also a third, novel one."""
    rng = np.random.default_rng({"train": 0, "valid": 1, "test": 2}[split])
    names = ("red", "green") if split == "train" else ("red", "green", "blue")
    rows = [(name, number) for name in names for number in range(12)]
    images = rng.integers(0, 60, (len(rows), 16, 16, 3), np.uint8)
    for row, (name, _) in enumerate(rows):
        images[row, ..., ("red", "green", "blue").index(name)] += 150
    labels = np.array([{"red": 0, "green": 1, "blue": NOVEL}[name] for name, _ in rows], np.int64)
    ids = [f"{split}/{name}/{number}" for name, number in rows]
    about = pl.DataFrame({"sample_id": ids, "class": [name for name, _ in rows]})
    about = about.with_columns((pl.col("class") == "blue").alias("novel"))
    return Loaded(Samples(ids, labels, {"images": images}), about, ("red", "green"), "colours")


def run(lake) -> Build:
    how = TrainSettings(threads=1, device="cpu")
    with Build("toy", lake) as build:
        trained, scored = [], []
        for wave in waves(chosen_detectors(["odin", "deep_ensemble"])):
            options = {"vgg_classifier": [SMALL], "deep_ensemble": [{"members": 3}]}
            shards = plan_training(
                wave, "tests.test_detection:load", lambda name: (), trained, options
            )
            fitted = build.run(train_detector, shards, how)
            trained += [*fitted]
            scored += build.run(score_detector, plan_scoring(shards, fitted), how)
        conventions = EvaluateSettings(conventions={"colours": ("openood", "semantic")})
        build.run(evaluate_scores, plan_evaluation(scored), conventions)
    return build


def test_detectors_are_trained_scored_and_evaluated_once(tmp_path):
    build = run(tmp_path)
    scores = build.versions["scores"].read()
    assert scores.group_by("detector", "split").len()["len"].to_list() == [36] * 6
    assert set(scores.filter(pl.col("detector") == "vgg_classifier")["predicted"]) <= {
        "red",
        "green",
    }
    metrics = build.versions["metrics"].read()
    assert set(metrics["convention"]) == {"openood", "semantic"}
    assert {"auroc", "acc", "oscr", "fpr95"} <= set(metrics["metric"])
    assert metrics["data_key"].str.len_chars().unique().to_list() == [32]
    training = build.versions["training"].read()
    assert training.filter(pl.col("detector") == "vgg_classifier")["epoch"].max() == 2
    ensemble = training.filter(pl.col("detector") == "deep_ensemble")
    assert ensemble.height == ensemble["measure"].n_unique() * 2
    assert {"member_1/loss", "member_2/loss"} <= set(ensemble["measure"])
    assert build.versions["quarantine"].manifest.rows == 0
    again = run(tmp_path)
    assert not any(piece.made_now for piece in again.pieces)


def test_what_a_detector_builds_on_comes_first():
    assert chosen_detectors(["odin"]) == ["odin", "vgg_classifier"]
    assert waves(["odin", "vgg_classifier", "multimodal", "symbolic_mlp"]) == [
        ["vgg_classifier", "symbolic_mlp"],
        ["odin"],
        ["multimodal"],
    ]
    with pytest.raises(ConfigError, match="no detector 'nonsense'"):
        chosen_detectors(["nonsense"])


def test_weights_count_by_content(tmp_path):
    path = tmp_path / "w.pth"
    path.write_bytes(b"one")
    first = weights_file(path)
    path.write_bytes(b"two")
    assert weights_file(path).digest != first.digest
    with pytest.raises(SourceError, match="does not exist"):
        weights_file(tmp_path / "none.pth")


@stage(writes=(READINGS,), alone=True)
def dies(shard: Shard, settings: Settings) -> Produced:
    """Ends like a crash in native code."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return Produced({}, 0)


def test_a_crash_in_training_is_a_sentence_and_not_the_end_of_the_process(tmp_path):
    with pytest.raises(NativeError, match="x: its process died"):
        with Build("toy", tmp_path) as build:
            build.run(dies, [Shard("x")], Settings())


def test_parts_can_be_any_file(tmp_path):
    part = Part(tmp_path / "m", "0" * 64, 0, 3, "model.safetensors", "s", "toy/train/k")
    assert part.as_input().piece == "toy/train/k"
