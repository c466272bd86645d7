"""The semantic-anomalies flow end to end on sample data, through Prefect."""

import re
import shutil
from pathlib import Path

import polars as pl
import pytest
from sklearn.metrics import average_precision_score

from schemas.errors import ConfigError, LakeError, SourceError
from schemas.semantic import Config, DetectionChoice, PictureSettings
from storage.tables import current_version
from tasks import scores
from tasks.sample.semantic import write_semantic

# Post-hoc scores, the paper's ODIN in the place of the one of that name.
SCORES = len(scores.names())
SIZES = {"cifar_train": 10, "cifar_test": 4, "stl_train": 4, "stl_test": 2, "imagenet_train": 5}


def table(lake: Path, name: str) -> pl.DataFrame:
    return current_version(lake, "semantic", name).read()


def key(lake: Path, name: str) -> str:
    return current_version(lake, "semantic", name).manifest.key


@pytest.fixture(scope="module")
def built(tmp_path_factory, prefect_api):
    from flows.semantic import build

    root = tmp_path_factory.mktemp("semantic")
    write_semantic(root / "raw", imagenet_val=3, **SIZES)
    demo = Config.demo(root / "raw")
    config = demo.model_copy(
        update={
            "lake": root / "lake",
            "pictures": PictureSettings(side=64),
            "seeds": (0, 1),
            "detection": demo.detection.model_copy(update={"seeds": (0,)}),
        }
    )
    build(config)
    return root, config


def test_trials_of_every_member(built):
    trials = table(built[0] / "lake", "trials")
    counts = trials.group_by("subset").agg(pl.col("trial").n_unique()).sort("subset").rows()
    assert counts == [("cifar10", 10), ("fungus", 6), ("stl10", 10)]
    images = table(built[0] / "lake", "images")
    assert trials.join(images, on="sample_id", how="anti").is_empty()
    one = trials.filter(subset="fungus", trial="bolete", role="anomaly")
    assert one["class"].unique().to_list() == ["n13054560"] and one.height == 3
    assert one["split"].unique().to_list() == ["test"]
    names = images.filter(dataset="imagenet").select("class", "class_name").unique()
    assert ("n13054560", "bolete") in names.rows()


def test_metrics_are_those_of_the_scores(built):
    scores, metrics = (table(built[0] / "lake", name) for name in ("scores", "metrics"))
    found = metrics.filter(metric="average_precision", convention="semantic")
    baseline = found.filter(detector="channel_gaussian")
    networks = found.filter(pl.col("detector") != "channel_gaussian")
    assert baseline.height == (10 + 10 + 6) * 2 and networks.height == 2 * SCORES
    run = ["protocol", "detector", "backbone", "seed"]
    for row in pl.concat([baseline.sample(5, seed=0), networks.sample(5, seed=0)]).to_dicts():
        own = scores.filter(**{name: row[name] for name in run})
        plain = average_precision_score(own["novel"].to_numpy(), own["score"].to_numpy())
        assert row["value"] == pytest.approx(plain)
    skew = metrics.filter(metric="skew", protocol="cifar10/cat")["value"].unique().to_list()
    assert skew == [pytest.approx(0.1)]


def test_networks_with_and_without_the_second_task(built):
    lake = built[0] / "lake"
    outputs, trials = table(lake, "outputs"), table(lake, "trials")
    for (task, network), own in outputs.group_by("auxiliary", "network"):
        assert task in ("none", "rotation") and network == "cifar"
        one = trials.filter(subset="cifar10", trial="cat").select("split", "sample_id", "label")
        assert own.select("split", "sample_id", "label").sort(pl.all()).equals(one.sort(pl.all()))
        assert set(own["logits"].list.len()) == {9}
    assert not outputs.filter(auxiliary="none")["logits"].equals(
        outputs.filter(auxiliary="rotation")["logits"]
    )
    assert (
        table(lake, "scores")
        .filter(detector="odin")["score"]
        .sort()
        .equals(outputs.filter(split="test")["odin"].sort())
    )


def test_the_last_epoch_scored_what_the_final_network_scores(built):
    """Two ways to one number: inside training, and from the cached outputs."""
    lake = built[0] / "lake"
    training, metrics = table(lake, "training"), table(lake, "metrics")
    assert set(training["variant"]) == {"cifar10/cat cifar small"}
    names = {"ap_msp": ("msp", "average_precision"), "ap_odin": ("odin", "average_precision"),
             "test_accuracy": ("msp", "acc")}  # fmt: skip
    for task in ("none", "rotation"):
        for measure, (detector, metric) in names.items():
            epochs = training.filter(detector=task, measure=measure).sort("epoch")["value"]
            chosen = metrics.filter(detector=detector, backbone=f"cifar {task}")
            assert epochs.len() == 2 and epochs.null_count() == 0
            assert chosen.filter(metric=metric)["value"].item() == pytest.approx(epochs[-1])
            mean = chosen.filter(metric=f"{metric}_last_epochs")
            assert mean["value"].item() == pytest.approx(epochs.mean())
            assert mean["n"].item() == chosen.filter(metric=metric)["n"].item()


def test_a_wrong_name_is_said_before_any_work(built):
    from flows.semantic import build

    root, config = built
    asked = config.detection.model_copy(update={"auxiliary": ("none", "spin")})
    with pytest.raises(ConfigError, match="no auxiliary task 'spin'; there are: centre_mask, cpc"):
        build(config.model_copy(update={"detection": asked, "lake": root / "untouched"}))
    assert not list((root / "untouched").rglob("*.parquet"))


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
    names = ("images", "pictures", "trials", "training", "outputs", "scores", "metrics")
    before = {name: key(root / "lake", name) for name in names}
    capsys.readouterr()
    build(config)
    said = re.findall(r"(\w+): (\d+) of \d+ shards made", capsys.readouterr().err)
    assert len(said) == 8 and all(made == "0" for _, made in said)
    assert before == {name: key(root / "lake", name) for name in before}

    folder = root / "raw" / "imagenet" / "val" / "n13054560"
    new = folder / "ILSVRC2012_val_00049999.JPEG"
    shutil.copy(next(folder.glob("*.JPEG")), new)
    try:
        build(config)
    finally:
        new.unlink()
    said = dict(re.findall(r"(\w+): (\d+) of \d+ shards made", capsys.readouterr().err))
    assert said["read_images"] == "1" and said["make_trial"] == "6"
    assert said["score_baseline"] == "1" and said["train_network"] == "0"


def test_a_subset_of_ones_own_without_the_baseline(built, tmp_path):
    from flows.semantic import build

    _, config = built
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "subsets:\n- {name: pets, dataset: cifar10, members: [dog, cat, horse]}\n"
        "- {name: two, dataset: imagenet, members: [bolete, earthstar]}\n"
    )
    own = {"lake": tmp_path / "lake", "subset_file": mine, "trivial_baseline": False}
    own["detection"] = DetectionChoice()
    build(config.model_copy(update=own | {"subsets": ("pets", "two")}))
    trials = table(tmp_path / "lake", "trials")
    assert trials.select("subset", "trial").unique().sort("subset", "trial").rows() == [
        ("pets", "cat"), ("pets", "dog"), ("pets", "horse"),
        ("two", "bolete"), ("two", "earthstar"),
    ]  # fmt: skip
    labels = trials.filter(subset="pets", trial="cat", role="normal")
    assert dict(labels.select("class", "label").unique().iter_rows()) == {"dog": 0, "horse": 1}
    with pytest.raises(LakeError, match="no table semantic/scores"):
        current_version(tmp_path / "lake", "semantic", "scores")


def test_an_empty_source_is_a_sentence(tmp_path, prefect_api):
    from flows.semantic import build

    (tmp_path / "raw").mkdir()
    with pytest.raises(SourceError, match=r"no image found in .*raw"):
        build(Config(source={"cifar10": tmp_path / "raw"}, lake=tmp_path / "lake"))
