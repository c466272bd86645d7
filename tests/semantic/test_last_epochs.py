"""A run is trained, passed, and its last epochs are measured on test."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score

from schemas.runs import RunFacts
from schemas.tables import PLAIN, SPLITS
from storage.pieces import Part
from tasks.engine.stage import Shard
from tasks.evaluation.model_runs import (
    PlannedRun,
    pass_samples,
    plan_facts,
    plan_models,
    train_model,
)
from tasks.evaluation.passing import DeviceSettings, model_of
from tasks.learning.training import BASE, MODEL
from tasks.models.pixel_gaussian import PixelGaussian
from tasks.semantic.last_epochs import measure_epochs
from tasks.semantic.offers import Trial, offers_of
from tasks.semantic.samples import load
from tests.semantic.test_offers import SETS, config, split_rows, stored

CPU = DeviceSettings(device="cpu")
PROTOCOL = "pets/cat"


@pytest.fixture(scope="module")
def trial(tmp_path_factory) -> Trial:
    """Two classes in train, a third in test, anomalies in valid too."""
    folder = tmp_path_factory.mktemp("trial")
    rng = np.random.default_rng(0)
    rows = [("train", n % 2) for n in range(12)]
    rows += [(split, n % 2 if n < 4 else None) for split in ("valid", "test") for n in range(6)]
    splits = split_rows(PROTOCOL, rows)
    data = []
    for label in splits["label"].fill_null(2):
        pixels = np.clip(rng.normal(60 + 60 * label, 30, (8, 8, 3)), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        data.append(buffer.getvalue())
    count = splits.height
    pictures = pl.DataFrame(
        {"sample_id": splits["sample_id"], "width": [8] * count, "height": [8] * count}
    ).with_columns(pl.Series("data", data), pl.lit("png").alias("encoding"))
    pictures.write_parquet(folder / "pictures.parquet")
    SPLITS.conform(splits).write_parquet(folder / "splits.parquet")
    kept = stored(folder / "splits.parquet", "splits", count, PROTOCOL)
    there = (stored(folder / "pictures.parquet", "pictures", count),)
    return Trial(PROTOCOL, SETS[0], "cat", kept, there, (8, 8))


def shard_of(run: PlannedRun, *parts: Part, about: Any = None, work: Path | None = None) -> Shard:
    facts = run.facts.model_dump(mode="json")
    return Shard(run.name, parts=parts, about=about or facts, run=run.mark, work=work)


def files_of(made: Any, *names: str) -> list[Part]:
    return [stored(made.files[name], name) for name in names or sorted(made.files)]


def test_pictures_are_loaded_by_split(trial):
    facts = RunFacts(benchmark="semantic", protocol=PROTOCOL, model="classifier", fit_key="x")
    shard = Shard("s", parts=trial.parts)
    model = PixelGaussian("small")
    train, valid, test = (load(shard, facts, s, model) for s in ("train", "valid", "test"))
    assert [len(one) for one in (train, valid, test)] == [12, 6, 6]
    assert train.ids == sorted(train.ids) and train.classes == ["0", "1"]
    assert test.labels.tolist().count(-1) == 2 and set(train.labels) == {0, 1}
    images = test.images()
    assert images.shape == (6, 8, 8, 3) and images[:].dtype == np.uint8
    assert np.array_equal(images[[4, 1]], images[:][[4, 1]])
    assert np.array_equal(images[2], images[:][2])


def test_a_run_is_trained_passed_and_its_epochs_are_measured(trial, tmp_path):
    own = config(
        models="classifier,odin",
        train={"epochs": 3, "batch_size": 8, "evaluations": 2},
        networks={"cifar": {"width": 4}},
        device="cpu",
        seeds=(3,),
    )
    splits = trial.splits.read()
    models = plan_models("semantic", own, offers_of(own, [trial], splits))
    keys = {PROTOCOL: {"fit_key": "fit", "data_key": "all"}}
    network, odin = plan_facts("semantic", own, models, keys)

    trained = train_model(shard_of(network, *trial.parts, work=tmp_path / "network"), CPU)
    (row,) = trained.tables["runs"].iter_rows(named=True)
    assert (row["run_id"], row["model"], row["device"]) == (
        network.mark.run_id,
        "classifier",
        "cpu",
    )
    assert row["fit_key"] == "fit" and row["seed"] == 3
    # Training does not see test.
    assert set(trained.tables["training"]["measure"]) == {"rate", "loss", "accuracy"}
    assert sorted(trained.files) == [
        "epoch-0002.safetensors", "epoch-0003.safetensors", "head.safetensors", MODEL,
    ]  # fmt: skip

    about = {"facts": network.facts.model_dump(mode="json"), "view": PLAIN, "view_settings": {}}
    shard = shard_of(network, *trial.parts, *files_of(trained, MODEL), about=about)
    passed = pass_samples(shard, CPU).tables
    outputs = passed["outputs"]
    assert outputs["sample_id"].sort().to_list() == splits["sample_id"].sort().to_list()
    assert outputs["novelty"].null_count() == outputs.height
    tested = splits.filter(pl.col("split") != "train")
    assert passed["predictions"].height == tested.height

    epochs = files_of(trained, "epoch-0002.safetensors", "epoch-0003.safetensors")
    about = {"facts": about["facts"], "score": "msp", "score_id": "m"}
    about["measures"] = {"ap_msp": "average_precision", "test_accuracy": "acc"}
    shard = shard_of(network, *trial.parts, *epochs, about=about)
    measured = measure_epochs(shard, CPU).tables
    rows = measured["training"]
    assert sorted(rows.select("epoch", "measure").iter_rows()) == [
        (epoch, measure) for epoch in (2, 3) for measure in ("ap_msp", "test_accuracy")
    ]
    assert set(rows["run_id"]) == {network.mark.run_id}
    metrics = {row["metric"]: row for row in measured["metrics"].iter_rows(named=True)}
    assert metrics.keys() == {"average_precision_last_epochs", "acc_last_epochs"}
    for metric, measure, count in (
        ("average_precision_last_epochs", "ap_msp", 6),
        ("acc_last_epochs", "test_accuracy", 4),
    ):
        row = metrics[metric]
        assert row["value"] == pytest.approx(rows.filter(measure=measure)["value"].mean())
        assert (row["n"], row["low"], row["high"]) == (count, None, None)
    # The last epoch is the fitted model.
    last = outputs.join(splits.filter(split="test"), on="sample_id")
    logits = np.array(last["logits"].to_list(), np.float64)
    odds = np.exp(logits - logits.max(1, keepdims=True))
    novel = (last["role"] == "novel").to_numpy()
    wanted = average_precision_score(novel, -odds.max(1) / odds.sum(1))
    assert rows.filter(epoch=3, measure="ap_msp")["value"].item() == pytest.approx(wanted)

    (base,) = files_of(trained, MODEL)
    below = replace(base, table=BASE)
    over = train_model(shard_of(odin, *trial.parts, below, work=tmp_path / "odin"), CPU)
    (row,) = over.tables["runs"].iter_rows(named=True)
    assert row["base_runs"] == [network.mark.run_id] and row["network"] == "cifar"
    about = {"facts": odin.facts.model_dump(mode="json"), "view": PLAIN, "view_settings": {}}
    (fitted,) = files_of(over, MODEL)
    shard = shard_of(odin, *trial.parts, below, fitted, about=about)
    found = pass_samples(shard, CPU).tables["outputs"]
    assert found["sample_id"].sort().to_list() == tested["sample_id"].sort().to_list()
    assert found["novelty"].null_count() == 0 and found["logits"].null_count() == found.height
    same = found.join(outputs, on="sample_id")
    assert (same["predicted"] == same["predicted_right"]).all()

    about = {"facts": about["facts"], "score": "own", "score_id": "o"}
    about["measures"] = {"ap_odin": "average_precision"}
    shard = shard_of(odin, *trial.parts, below, fitted, *epochs, about=about)
    rows = measure_epochs(shard, CPU).tables["training"].sort("epoch")
    assert rows["epoch"].to_list() == [2, 3] and set(rows["measure"]) == {"ap_odin"}
    last = found.join(splits.filter(split="test"), on="sample_id")
    wanted = average_precision_score((last["role"] == "novel").to_numpy(), last["novelty"])
    assert rows["value"][1] == pytest.approx(wanted)
    assert model_of(odin.facts).settings.base == "classifier"
