"""A frozen backbone on benchmarks with pictures: features made once, then heads and scores."""

import re

import polars as pl
import pytest

from schemas import novelcraft, semantic
from storage.tables import current_version
from tasks.sample.novelcraft import write_novelcraft
from tasks.sample.semantic import write_semantic
from tests.flows.test_novelcraft_runs import FewDraws
from tests.flows.test_semantic import SIZES

MODELS = {"backbone": {"side": 32, "epochs": 2, "embedding_batch": 4}}
SCORES = {"msp": {}, "nearest": {}}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for flow in ("novelcraft", "semantic"):
        monkeypatch.setattr(f"flows.{flow}.publish_report", lambda *_: None)
    monkeypatch.setattr("tasks.evaluation.stages.EvaluationSettings", FewDraws)


def made(capsys, stage: str) -> int:
    """Shards that a stage made since the last look."""
    said = re.findall(rf"{stage}: (\d+) of \d+ shards made", capsys.readouterr().err)
    return sum(map(int, said))


def test_one_pass_of_semantic_pictures_serves_every_trial_and_seed(tmp_path, capsys):
    from flows.semantic import build

    write_semantic(tmp_path / "raw", imagenet_val=3, **SIZES)
    config = semantic.Config(
        source={"cifar10": tmp_path / "raw" / "cifar10"},
        lake=tmp_path / "lake",
        protocols=("cat", "dog"),
        models=MODELS,
        scores=SCORES,
        trivial_baseline=False,
    )
    build.fn(config)
    assert made(capsys, "embed_samples") == 6  # one for each file of pictures

    def table(name: str) -> pl.DataFrame:
        return current_version(tmp_path / "lake", "semantic", name).read()

    runs = table("runs")
    (frozen,) = runs.filter(origin="frozen").to_dicts()
    assert (frozen["protocol"], frozen["seed"]) == (None, None)
    heads = runs.filter(origin="trained")
    assert heads["base_runs"].to_list() == [[frozen["run_id"]]] * 2
    outputs = table("outputs")
    features = outputs.filter(run_id=frozen["run_id"])
    assert features["sample_id"].sort().equals(table("samples")["sample_id"].sort())
    for run_id, protocol in heads.select("run_id", "protocol").iter_rows():
        both = outputs.filter(run_id=run_id).join(features, on="sample_id")
        assert both["features"].equals(both["features_right"], check_names=False)
        assert set(both["logits"].list.len()) == {9}
        assert both.height == table("splits").filter(protocol=protocol).height
    found = table("metrics").filter(metric="auroc", convention="openood", split="test")
    assert set(found.select("protocol", "score").rows()) == {
        (protocol, score) for protocol in ("cifar10/cat", "cifar10/dog") for score in SCORES
    }

    build.fn(config.model_copy(update={"seeds": (0, 1), "protocols": ("cat", "dog", "ship")}))
    again = capsys.readouterr().err
    assert "embed_samples: 0 of 6 shards made" in again
    assert "train_model: 4 of 6 shards made" in again


def test_novelcraft_frames(tmp_path, capsys):
    from flows.novelcraft import build

    episodes = {"normal": 3, "fence": 2, "item_tnt": 1, "tree_easy": 3}
    write_novelcraft(tmp_path / "raw", episodes=episodes, bad_records=False)
    config = novelcraft.Config(
        source=tmp_path / "raw",
        lake=tmp_path / "lake",
        protocols=("visual",),
        models=MODELS,
        scores=SCORES,
    )
    build.fn(config)
    assert made(capsys, "embed_samples") > 0

    def table(name: str) -> pl.DataFrame:
        return current_version(tmp_path / "lake", "novelcraft", name).read()

    (frozen,) = table("runs").filter(origin="frozen").to_dicts()
    assert '"item_bar_rows": 22' in frozen["settings"]
    visual = table("splits").filter(protocol="visual")["sample_id"].sort()
    rows = table("outputs").filter(run_id=frozen["run_id"])
    assert rows["sample_id"].sort().equals(visual)
    assert set(rows["features"].list.len()) == {1280}
    found = table("metrics").filter(metric="auroc", convention="openood", split="test")
    assert set(found["score"]) == set(SCORES)
