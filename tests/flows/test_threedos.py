"""The 3DOS flow end to end on sample shapes: clouds, tracks, a network, scores."""

import json
import shutil

import numpy as np
import polars as pl
import pytest

from schemas.errors import ConfigError
from schemas.threedos import Config, ShapeSettings
from storage.tables import current_version
from tasks.sample.threedos import write_threedos
from tests.shared import shared_path

SMALL = ShapeSettings(points=128, candidates=512)
# Of each kind one: on logits, on features of training, with the head and validation.
SCORES = ("msp", "nearest", "react")


def table(lake, name: str) -> pl.DataFrame:
    return current_version(lake, "threedos", name).read()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    from flows.threedos import build

    root = tmp_path_factory.mktemp("threedos")
    raw = root / "raw"
    write_threedos(raw, train=8, test=4, scans_train=4, scans_test=2, models=4)
    config = Config(
        source={kind: raw / kind for kind in ("modelnet40", "scanobjectnn", "shapenet")},
        lake=root / "lake",
        shapes=SMALL,
        models={"cross_entropy": {}},
        protocols=("MN1", "SR1"),
        train={"epochs": 2},
        points=(64,),
        scores={name: {} for name in SCORES},
    )
    build(config)
    return root, config


def test_every_shape_has_a_cloud_and_every_bad_one_a_reason(built):
    lake = built[0] / "lake"
    shapes, clouds = table(lake, "shapes"), table(lake, "point_clouds")
    assert shapes["sample_id"].to_list() == clouds["sample_id"].to_list()
    assert clouds.schema["points"].shape == (3 * 128,)
    quarantine = table(lake, "quarantine")
    assert {"empty_file", "index_out_of_range", "non_finite_vertex", "other_synset"} <= set(
        quarantine["rule"]
    )


def test_every_sample_has_the_digest_of_its_cloud(built):
    lake = built[0] / "lake"
    samples, shapes = table(lake, "samples"), table(lake, "shapes")
    assert samples["sample_id"].to_list() == shapes["sample_id"].to_list()
    assert samples["class"].to_list() == shapes["class"].to_list()
    assert set(samples["modality"]) == {"cloud"} and samples["digest"].null_count() == 0
    assert samples["digest"].n_unique() == table(lake, "point_clouds")["points"].n_unique()


def test_every_track_has_its_roles(built):
    splits, protocols = table(built[0] / "lake", "splits"), table(built[0] / "lake", "protocols")
    tracks = {"MN1", "MN2", "SN1", "SN2", "SN3", "SR1", "SR2", "SR12", "SR13", "SR23"}
    assert set(splits["protocol"]) == set(protocols["protocol"]) == tracks
    for (track,), rows in splits.group_by("protocol"):
        assert set(rows.filter(split="test")["role"]) == {"known", "novel"}, track
        assert set(rows.filter(split="train")["role"]) == {"known"}, track
        train, test = (set(rows.filter(split=s)["sample_id"]) for s in ("train", "test"))
        assert not train & test, track
        known = rows.filter(role="known")
        assert known["class"].n_unique() == known["label"].n_unique(), track


def test_one_pass_gives_every_score_in_every_view(built):
    lake = built[0] / "lake"
    outputs, scores, runs = (table(lake, name) for name in ("outputs", "scores", "runs"))
    assert set(outputs["view"]) == set(scores["view"]) == {"plain", "points_64"}
    assert set(scores["score"]) == set(SCORES)
    assert set(runs["protocol"]) == {"MN1", "SR1"} and set(runs["network"]) == {"dgcnn"}
    settings = json.loads(runs["settings"][0])
    assert settings["epochs"] == 2 and settings["network"]["k"] == 16
    assert json.loads(runs["changed"][0]) == {"epochs": 2}
    assert table(lake, "training").group_by("run_id", "measure").len()["len"].to_list() == [2] * 6
    splits = table(lake, "splits").filter(pl.col("split") != "train")
    predictions = table(lake, "predictions")
    for run, protocol in runs.select("run_id", "protocol").iter_rows():
        wanted = splits.filter(protocol=protocol).select("sample_id", "split", "class")
        for view in ("plain", "points_64"):
            rows = predictions.filter(run_id=run, view=view)
            assert rows.select(wanted.columns).sort("sample_id").equals(wanted.sort("sample_id"))
            scored = scores.filter(run_id=run, view=view, score="msp")
            assert scored.select(wanted.columns).sort("sample_id").equals(wanted.sort("sample_id"))
    assert set(predictions["predicted"]) <= set(splits.filter(role="known")["class"])


def test_each_unknown_set_is_evaluated_apart(built):
    metrics = table(built[0] / "lake", "metrics")
    assert set(metrics["convention"]) == {"threedos", "threedos-first-threshold", "openood"}
    assert {"auroc", "fpr95", "acc"} <= set(metrics["metric"])
    auroc = metrics.filter(
        metric="auroc", convention="threedos", score="msp", view="plain", split="test"
    )
    assert auroc.select("protocol", "subset").sort("protocol", "subset").rows() == [
        ("MN1", "all"),
        ("SR1", "SR2"),
        ("SR1", "SR3"),
        ("SR1", "all"),
    ]
    assert auroc["value"].is_between(0, 1).all()
    assert (auroc["low"] <= auroc["value"]).all() and (auroc["value"] <= auroc["high"]).all()


def test_report_has_pictures_and_tables(built):
    page = (built[0] / "lake" / "reports" / "threedos.html").read_text()
    for title in ("Open-set tracks", "Beside the paper", "Density of points"):
        assert title in page
    bars = page[page.index("Samples by split") :].partition("<section")[0]
    assert "telephone" in bars and "04401088" not in bars, "synsets have names there"


def made(capsys) -> dict[str, int]:
    """Shards made by each stage of the builds since the last call."""
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("threedos/")]
    return {x[9 : x.index(":")]: int(x.split(": ")[1].split(" ")[0]) for x in lines}


def test_a_second_run_does_nothing_and_an_unused_mesh_costs_one_shard(built, capsys):
    from flows.threedos import build

    root, config = built
    build(config)
    assert set(made(capsys).values()) == {0}
    runs = table(root / "lake", "runs")
    cars = root / "raw" / "modelnet40" / "car" / "train"
    shutil.copy(next(cars.glob("car_0*.off")), cars / "car_0999.off")
    build(config)
    shards = made(capsys)
    assert shards.pop("sample_shapes") == 1
    fitted = ("train_model", "pass_samples", "score_outputs", "evaluate_scores")
    assert [shards[name] for name in fitted] == [0] * 4
    assert "modelnet40/car_0999" in set(table(root / "lake", "samples")["sample_id"])
    assert table(root / "lake", "runs").equals(runs)


def test_a_later_command_keeps_the_runs_of_the_first(built, capsys):
    from flows.threedos import build

    root, config = built
    before = table(root / "lake", "metrics")
    changes = {"models": {"supcon": {"epochs": 1}}, "train": {}, "points": ()}
    build(config.model_copy(update={**changes, "protocols": ("MN1",), "scores": {"cosine": {}}}))
    assert made(capsys)["train_model"] == 1
    metrics, runs = table(root / "lake", "metrics"), table(root / "lake", "runs")
    assert sorted(runs["model"]) == ["cross_entropy", "cross_entropy", "supcon"]
    assert metrics.filter(model="cross_entropy").equals(before)
    assert set(metrics.filter(model="supcon")["score"]) == {"cosine"}
    assert (
        not table(root / "lake", "predictions")
        .filter(pl.col("run_id").is_in(runs.filter(model="supcon")["run_id"].implode()))
        .height
    )


def test_one_pass_of_views_serves_every_seed_and_each_density_has_its_own(built, capsys):
    from flows.threedos import build

    root, config = built
    shown = {"view_backbone": {"side": 32, "views": 1, "epochs": 2}}
    changes = {"models": shown, "train": {}, "protocols": ("MN1",), "scores": {"nearest": {}}}
    build(config.model_copy(update=changes))
    assert made(capsys)["embed_samples"] == 2  # of one part of meshes, for two densities
    runs = table(root / "lake", "runs").filter(model="view_backbone")
    (frozen,) = runs.filter(origin="frozen").to_dicts()
    (head,) = runs.filter(origin="trained").to_dicts()
    assert (frozen["protocol"], head["base_runs"]) == (None, [frozen["run_id"]])
    outputs = table(root / "lake", "outputs").select("run_id", "view", "sample_id", "features")
    features = outputs.filter(run_id=frozen["run_id"])
    on_head = outputs.filter(run_id=head["run_id"])
    both = on_head.join(features, on=["sample_id", "view"])
    assert both.height == on_head.height > 0
    assert both["features"].equals(both["features_right"], check_names=False)
    plain, sparse = (features.filter(view=view) for view in ("plain", "points_64"))
    assert plain["sample_id"].equals(sparse["sample_id"])
    assert not plain["features"].equals(sparse["features"])
    aurocs = table(root / "lake", "metrics").filter(run_id=head["run_id"], metric="auroc")
    assert set(aurocs["view"]) == {"plain", "points_64"}

    build(config.model_copy(update={**changes, "seeds": (0, 1)}))
    shards = made(capsys)
    assert (shards["embed_samples"], shards["train_model"]) == (0, 1)


def test_a_wrong_setting_is_said_before_any_work(tmp_path):
    from flows.threedos import build

    wrong = Config(
        source={"modelnet40": tmp_path}, lake=tmp_path / "lake", models={"supcon": {"margin": 1}}
    )
    with pytest.raises(ConfigError, match=r"supcon: .*margin is not a setting"):
        build.fn(wrong)
    with pytest.raises(ConfigError, match="no track is called MN7"):
        build.fn(wrong.model_copy(update={"models": {}, "protocols": ("MN7",)}))
    assert not (tmp_path / "lake").exists()


def test_nothing_named_is_said():
    with pytest.raises(ValueError, match="name a source"):
        Config()


def test_a_track_of_ones_own(tmp_path):
    from flows.threedos import build

    raw = tmp_path / "raw"
    write_threedos(raw, train=6, test=3, scans_train=1, scans_test=1, models=1, bad_records=False)
    tracks = tmp_path / "mine.yaml"
    tracks.write_text(
        "tracks:\n"
        "  - name: MINE\n"
        "    known: [chair, [desk, table]]\n"
        "    unknown: [car]\n"
        "    train: {modelnet40: train}\n"
        "    test: {modelnet40: test}\n"
    )
    config = Config(
        source={"modelnet40": raw / "modelnet40"},
        lake=tmp_path / "lake",
        shapes=SMALL,
        track_file=tracks,
        tracks=("MINE",),
    )
    build(config)
    splits = table(tmp_path / "lake", "splits")
    labels = dict(splits.filter(role="known").select("class", "label").unique().iter_rows())
    assert labels == {"chair": 0, "desk+table": 1}
    with pytest.raises(ConfigError, match="no track is called NONE"):
        build(config.model_copy(update={"tracks": ("NONE",)}))


def test_lists_alone_give_the_official_counts(tmp_path):
    """The 63 models that ShapeNet v2 lacks are named by a list, as the paper's totals need it."""
    from flows.threedos import build
    from schemas.threedos import ListSettings

    lists = tmp_path / "lists"
    shutil.copytree(shared_path("shapes/lists"), lists)
    shutil.copy(shared_path("shapes/expected/shapenet_missing63.csv"), lists)
    config = Config(
        lists=lists,
        lake=tmp_path / "lake",
        listing=ListSettings(missing_models="shapenet_missing63.csv"),
    )
    build(config)
    splits = table(tmp_path / "lake", "splits")
    counts = {
        (track, split, role): rows.height
        for (track, split, role), rows in splits.group_by("protocol", "split", "role")
    }
    from tasks.threedos.report import OFFICIAL

    for track, (train, valid, known, unknown) in OFFICIAL.items():
        assert counts[track, "train", "known"] == train, track
        assert counts[track, "valid", "known"] == valid, track
        assert counts[track, "test", "known"] == known, track
        assert counts[track, "test", "novel"] == unknown, track


def test_a_source_brings_its_own_lists(tmp_path):
    """modelnet40_normal_resampled holds its official lists; no other folder need be named."""
    from flows.threedos import build

    rng = np.random.default_rng(0)
    root = tmp_path / "modelnet40_normal_resampled"
    names = {"train": [], "test": []}
    for kind in ("chair", "sofa", "bed", "toilet"):
        (root / kind).mkdir(parents=True)
        for number, split in enumerate(("train",) * 6 + ("test",) * 2, 1):
            names[split].append(f"{kind}_{number:04d}")
            np.savetxt(root / kind / f"{names[split][-1]}.txt", rng.random((20, 6)), delimiter=",")
    for split, listed in names.items():
        (root / f"modelnet40_{split}.txt").write_text("\n".join(listed))
    np.savetxt(root / "chair" / "chair_0099.txt", rng.random((20, 6)), delimiter=",")
    config = Config(
        source={"modelnet40_resampled": root}, lake=tmp_path / "lake", shapes=SMALL, tracks=("MN1",)
    )
    build(config)
    splits = table(tmp_path / "lake", "splits")
    counts = {
        key: rows.height for key, rows in splits.group_by("split", "role", maintain_order=True)
    }
    # 12 known training shapes, of which int(10 %) are for validation.
    assert counts["train", "known"] + counts["valid", "known"] == 12
    assert (counts["test", "known"], counts["test", "novel"]) == (4, 4)


def test_an_unlisted_mesh_does_not_push_the_listed_ones_out(tmp_path):
    from flows.threedos import build

    raw = tmp_path / "raw"
    write_threedos(raw, train=6, test=3, scans_train=1, scans_test=1, models=1, bad_records=False)
    meshes = sorted((raw / "modelnet40").rglob("*.off"))
    lists = tmp_path / "lists"
    lists.mkdir()
    for split in ("train", "test"):
        listed = [path.stem for path in meshes if path.parent.name == split]
        (lists / f"modelnet40_{split}.txt").write_text("\n".join(listed))
    config = Config(
        source={"modelnet40": raw / "modelnet40"},
        lists=lists,
        lake=tmp_path / "lake",
        shapes=SMALL,
        tracks=("MN1",),
    )
    build(config)
    before = table(tmp_path / "lake", "splits")
    chair = next(path for path in meshes if path.parts[-3:-1] == ("chair", "test"))
    shutil.copy(chair, chair.with_name("chair_9999.off"))
    build(config)
    after = table(tmp_path / "lake", "splits")
    new = after.filter(sample_id="modelnet40/chair_9999")
    assert new.select("split", "role", "label").rows() == [("test", "known", 0)]
    assert after.height == before.height + 1
