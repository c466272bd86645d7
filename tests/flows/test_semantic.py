"""The semantic-anomalies flow end to end on sample data."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from safetensors.torch import save_file
from sklearn.metrics import average_precision_score

from flows.cli import main
from schemas.errors import ConfigError, LakeError, RunsFailed, SourceError
from schemas.semantic import Config, PictureSettings
from storage.tables import current_version
from tasks import scores
from tasks.sample.semantic import write_semantic
from tests.features.test_resnet import cifar_shape, random_state

SIZES = {"cifar_train": 10, "cifar_test": 4, "stl_train": 4, "stl_test": 2, "imagenet_train": 5}
# A network gives every score but a novelty of its own.
SCORES = len(scores.names()) - 1


def table(lake: Path, name: str) -> pl.DataFrame:
    return current_version(lake, "semantic", name).read()


def key(lake: Path, name: str) -> str:
    return current_version(lake, "semantic", name).manifest.key


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    from flows.semantic import build

    root = tmp_path_factory.mktemp("semantic")
    write_semantic(root / "raw", imagenet_val=3, **SIZES)
    config = Config(
        source={kind: root / "raw" / kind for kind in ("cifar10", "stl10", "imagenet")},
        lake=root / "lake",
        pictures=PictureSettings(side=64),
        subsets=("cifar10", "fungus"),
        models={"classifier": {}, "rotation": {}, "odin": {}},
        train={"epochs": 2, "evaluations": 2},
        protocols=("cifar10/cat",),
    )
    build.fn(config)
    return root, config


def made_of(capsys) -> dict[str, int]:
    """Shards that each stage made since the last look."""
    said = re.findall(r"(\w+): (\d+) of \d+ shards made", capsys.readouterr().err)
    total: Counter[str] = Counter()
    for name, made in said:
        total[name] += int(made)
    return total


def test_weights_of_other_classes_are_refused_before_anything_is_trained(tmp_path, capsys):
    """The trials have nine known classes, the file is for ten; no run of the build begins."""
    write_semantic(tmp_path / "raw", imagenet_val=3, **SIZES)
    save_file(random_state(cifar_shape(20, width=4, classes=10)), tmp_path / "ten.safetensors")
    words = [
        *("build", "semantic", "--source", f"cifar10={tmp_path}/raw/cifar10"),
        *("--models", "pixel_gaussian,pretrained", "--subsets", "cifar10"),
        *("--models.pretrained.weights", f"{tmp_path}/ten.safetensors", "--lake", f"{tmp_path}/l"),
    ]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert "train_model" not in printed and "Traceback" not in printed
    assert (
        f"model pretrained: weights file {tmp_path}/ten.safetensors is for 10 classes, protocol "
        "cifar10/airplane has 9 known ones; name a file or protocols with the same classes\n"
    ) in printed
    assert table(tmp_path / "l", "splits")["protocol"].n_unique() == 10, "tables are published"


def test_samples_and_splits_of_every_member(built):
    lake = built[0] / "lake"
    splits, protocols, samples = (table(lake, n) for n in ("splits", "protocols", "samples"))
    definitions = [json.loads(text) for text in protocols["definition"]]
    subsets = [one["subset"] for one in definitions]
    counts = {name: subsets.count(name) for name in sorted(set(subsets))}
    assert counts == {"cifar10": 10, "fungus": 6}
    assert set(splits["protocol"]) == set(protocols["protocol"])
    assert {f"{one['subset']}/{one['held_out']}" for one in definitions} == set(splits["protocol"])
    assert splits.join(samples, on="sample_id", how="anti").is_empty()
    images = table(lake, "images")
    assert set(images["sample_id"]) == set(samples["sample_id"])
    assert set(samples["modality"]) == {"image"} and samples["digest"].null_count() == 0
    one = splits.filter(protocol="fungus/bolete", role="novel")
    assert one["class"].unique().to_list() == ["n13054560"] and one.height == 3
    assert one["split"].unique().to_list() == ["test"]
    names = images.filter(dataset="imagenet").select("class", "class_name").unique()
    assert ("n13054560", "bolete") in names.rows()


def test_runs_of_every_model(built):
    runs = table(built[0] / "lake", "runs")
    counts = dict(runs.group_by("model").len().iter_rows())
    assert counts == {"pixel_gaussian": 16, "classifier": 1, "rotation": 1, "odin": 2}
    networks = runs.filter(pl.col("model").is_in(["classifier", "rotation"]))
    assert set(runs.filter(model="odin")["base_runs"].explode()) == set(networks["run_id"])
    assert set(runs["state"]) == {"done"} and set(networks["preset"]) == {"small"}
    for settings, changed in networks.select("settings", "changed").iter_rows():
        assert json.loads(changed) == {"epochs": 2}  # two evaluations are the preset's
        assert json.loads(settings)["cpu_threads"] == 1


def test_metrics_are_those_of_the_scores(built):
    scores, metrics = (table(built[0] / "lake", name) for name in ("scores", "metrics"))
    found = metrics.filter(metric="average_precision", convention="semantic")
    assert dict(found.group_by("model").len().iter_rows()) == {
        "pixel_gaussian": 16, "classifier": SCORES, "rotation": SCORES, "odin": 2,
    }  # fmt: skip
    assert (found["low"] <= found["value"]).all() and (found["value"] <= found["high"]).all()
    for row in found.sample(8, seed=0).to_dicts():
        own = scores.filter(run_id=row["run_id"], score_id=row["score_id"])
        plain = average_precision_score(own["novel"].to_numpy(), own["value"].to_numpy())
        assert row["value"] == pytest.approx(plain)
    skew = metrics.filter(metric="skew", protocol="cifar10/cat")["value"].unique().to_list()
    assert skew == [pytest.approx(0.1)]
    common = metrics.filter(convention="openood")
    assert {"auroc", "fpr95"} <= set(common["metric"])
    assert set(common["protocol"]) == set(table(built[0] / "lake", "splits")["protocol"])
    described = table(built[0] / "lake", "score_settings")
    assert set(metrics["score_id"]) <= set(described["score_id"])


def test_outputs_and_predictions_of_the_networks(built):
    lake = built[0] / "lake"
    outputs, runs, splits = (table(lake, name) for name in ("outputs", "runs", "splits"))
    own = splits.filter(protocol="cifar10/cat").sort("sample_id")
    tested = own.filter(split="test")
    for run, model in runs.select("run_id", "model").iter_rows():
        rows = outputs.filter(run_id=run).sort("sample_id")
        if model in ("classifier", "rotation"):
            assert rows["sample_id"].equals(own["sample_id"])
            assert set(rows["logits"].list.len()) == {9}
            predictions = table(lake, "predictions").filter(run_id=run)
            assert predictions["sample_id"].sort().equals(tested["sample_id"])
        elif model == "odin":
            assert rows["sample_id"].equals(tested["sample_id"])
            scores = table(lake, "scores").filter(run_id=run, score="own").sort("sample_id")
            assert scores["value"].equals(rows["novelty"].rename("value"))
            assert scores["predicted"].equals(rows["predicted"])


def test_the_last_epoch_scored_what_the_final_network_scores(built):
    """Two ways to one number: from the kept epoch, and from the stored outputs."""
    lake = built[0] / "lake"
    training, metrics, runs = (table(lake, name) for name in ("training", "metrics", "runs"))
    metrics = metrics.filter(convention="semantic")
    for model in ("classifier", "rotation"):
        network = runs.filter(model=model)["run_id"].item()
        odin = runs.filter(pl.col("base_runs").list.contains(network))["run_id"].item()
        for measure, run, score, metric in (
            ("ap_msp", network, "msp", "average_precision"),
            ("test_accuracy", network, "msp", "acc"),
            ("ap_odin", odin, "own", "average_precision"),
        ):
            epochs = training.filter(run_id=run, measure=measure).sort("epoch")["value"]
            chosen = metrics.filter(run_id=run, score=score)
            assert epochs.len() == 2
            assert chosen.filter(metric=metric)["value"].item() == pytest.approx(epochs[-1])
            mean = chosen.filter(metric=f"{metric}_last_epochs")
            assert mean["value"].item() == pytest.approx(epochs.mean())
            assert mean["low"].item() is None and mean["high"].item() is None
            assert mean["n"].item() == chosen.filter(metric=metric)["n"].item()


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"models": {"classifier": {}, "spin": {}}}, r"no model 'spin'; there are: .*centre_mask"),
        ({"models": {"rotation": {"spin": 1}}}, "spin is not a setting"),
        ({"predictors": {"ann": {}}}, "semantic has no predictors"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(built, choice, said):
    from flows.semantic import build

    root, config = built
    with pytest.raises(ConfigError, match=said):
        build.fn(config.model_copy(update=choice | {"lake": root / "untouched"}))
    assert not (root / "untouched").exists()


def test_the_report(built):
    page = (built[0] / "lake" / "reports" / "semantic.html").read_text()
    for title in (
        "Images",
        "Classes",
        "Trials",
        "Trivial baseline",
        "Networks beside the paper",
        "What the auxiliary task changed",
        "Every score of the networks",
        "Training of the networks",
        "Leaderboard",
    ):
        assert re.search(rf"<h2><a [^>]*>{title}</a></h2>", page), title
    for said in ("CMYK to RGB", "hen-of-the-woods", "11.170", "50,000", "38.06 ± 1.31"):
        assert said in page, said
    assert page.count("data:image/jpeg") == 26  # a strip of pictures for each class


def test_a_second_run_makes_nothing_and_a_new_image_little(built, capsys):
    from flows.semantic import build

    root, config = built
    names = ("images", "pictures", "splits", "runs", "training", "outputs", "scores", "metrics")
    before = {name: key(root / "lake", name) for name in names}
    capsys.readouterr()
    build.fn(config)
    made = made_of(capsys)
    assert len(made) == 10 and set(made.values()) == {0}
    assert before == {name: key(root / "lake", name) for name in before}

    # Test pictures: no model is fitted again, on their trials all is passed and measured anew.
    folder = root / "raw" / "imagenet" / "val" / "n13054560"
    new = folder / "ILSVRC2012_val_00049999.JPEG"
    shutil.copy(next(folder.glob("*.JPEG")), new)
    (batch,) = (root / "raw" / "cifar10").rglob("test_batch.bin")
    records = batch.read_bytes()
    batch.write_bytes(records + records[:3073])
    runs = table(root / "lake", "runs")
    try:
        build.fn(config)
        assert table(root / "lake", "runs").sort("run_id").equals(runs.sort("run_id"))
    finally:
        new.unlink()
        batch.write_bytes(records)
    made = made_of(capsys)
    assert made["read_images"] == 2 and made["make_trial"] == 16
    assert made["train_model"] == 0 and made["pass_samples"] == 20 and made["measure_epochs"] == 4
    assert made["score_outputs"] == made["evaluate_scores"] == 18 + 2 * SCORES

    # A picture of a class in no trial: no run is made anew.
    other = root / "raw" / "imagenet" / "val" / "n00000001" / "ILSVRC2012_val_00049998.JPEG"
    other.parent.mkdir()
    shutil.copy(next(folder.glob("*.JPEG")), other)
    try:
        build.fn(config.model_copy(update={"imagenet_classes": "all"}))
    finally:
        shutil.rmtree(other.parent)
    made = made_of(capsys)
    assert made["read_images"] == 1 and "n00000001" in set(table(root / "lake", "samples")["class"])
    assert {made[name] for name in ("train_model", "pass_samples", "measure_epochs")} == {0}
    assert made["score_outputs"] == made["evaluate_scores"] == 0


def test_other_models_stay_and_a_run_that_fails_stops_no_other(built, capsys):
    from flows.semantic import build

    root, config = built
    before = table(root / "lake", "runs")
    other = {
        "models": {"centre_mask": {"epochs": 1}, "classifier": {"learning_rate": 1e30}},
        "train": {"schedule": "steps"},
        "scores": {"energy": {"temperature": 2.0}},
        "trivial_baseline": False,
    }
    with pytest.raises(RunsFailed, match=r"1 shards of runs failed .*diverged in epoch 2"):
        build.fn(config.model_copy(update=other))
    assert made_of(capsys)["train_model"] == 2
    runs = table(root / "lake", "runs")
    assert before.join(runs, on=before.columns, how="anti", nulls_equal=True).is_empty()
    new = runs.join(before, on="run_id", how="anti").sort("model")
    assert new.select("model", "state").rows() == [
        ("centre_mask", "done"),
        ("classifier", "failed"),
    ]
    metrics = table(root / "lake", "metrics")
    assert {"centre_mask", "rotation", "odin"} <= set(metrics["model"])
    assert set(metrics.filter(model="centre_mask", convention="openood")["score"]) == {"energy"}
    assert table(root / "lake", "score_settings").filter(score="energy").height == 2


def test_a_subset_of_ones_own_without_the_baseline(built, tmp_path):
    from flows.semantic import build

    _, config = built
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "subsets:\n- {name: pets, dataset: cifar10, members: [dog, cat, horse]}\n"
        "- {name: two, dataset: imagenet, members: [bolete, earthstar]}\n"
    )
    own = {"lake": tmp_path / "lake", "subset_file": mine, "trivial_baseline": False}
    own |= {"models": {}, "train": {}, "protocols": (), "subsets": ("pets", "two")}
    build(config.model_copy(update=own))
    splits = table(tmp_path / "lake", "splits")
    assert splits["protocol"].unique().sort().to_list() == [
        "pets/cat", "pets/dog", "pets/horse", "two/bolete", "two/earthstar",
    ]  # fmt: skip
    labels = splits.filter(protocol="pets/cat", role="known")
    assert dict(labels.select("class", "label").unique().iter_rows()) == {"dog": 0, "horse": 1}
    with pytest.raises(LakeError, match="no table semantic/scores"):
        current_version(tmp_path / "lake", "semantic", "scores")


def test_an_empty_source_is_a_sentence(tmp_path):
    from flows.semantic import build

    (tmp_path / "raw").mkdir()
    with pytest.raises(SourceError, match=r"no image found in .*raw"):
        build(Config(source={"cifar10": tmp_path / "raw"}, lake=tmp_path / "lake"))
