"""Plans and stages of the runs: what is asked for, what is keyed, what is trained and passed."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image
from pydantic import ValidationError

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from schemas.runs import RunFacts
from schemas.semantic import Config
from schemas.table import Table
from schemas.tables import PLAIN, SPLITS, TRAINING
from storage.filehash import sha256_file
from storage.pieces import Part
from tasks.engine.stage import Shard
from tasks.evaluation.runs import run_id
from tasks.semantic import models, presets
from tasks.semantic.detection import (
    DeviceSettings,
    average_evaluations,
    pass_odin,
    pass_pictures,
    train_network,
)
from tasks.semantic.detection_plan import (
    Run,
    Trial,
    check_choice,
    chosen_models,
    chosen_trials,
    network_for,
    picture_sides,
    plan_averages,
    plan_networks,
    plan_odin,
    trainable,
)
from tasks.semantic.models.base import NetworkModel
from tasks.semantic.models.odin import Odin
from tasks.semantic.models.rotation import Rotation
from tasks.semantic.trials import Subset

SETS = [
    Subset(name="pets", dataset="cifar10", members={"cat": "cat", "dog": "dog", "frog": "frog"}),
    Subset(name="cars", dataset="imagenet", members={"n1": "Model T", "n2": "cab"}),
]
GOOD = [("train", 0), ("train", 1), ("test", 0), ("test", None)]


def config(**choice: Any) -> Config:
    return Config(**{"source": {"cifar10.train": Path("raw")}, "trivial_baseline": False} | choice)


def part(path: Path, table: Table, frame: pl.DataFrame, shard: str = "x") -> Part:
    path.parent.mkdir(parents=True, exist_ok=True)
    table.conform(frame).write_parquet(path)
    return stored(path, table.name, frame.height, shard)


def stored(path: Path, table: str, rows: int = 0, shard: str = "x") -> Part:
    """The file as a part of some piece."""
    size = path.stat().st_size
    return Part(path, sha256_file(path), rows, size, table, shard, "semantic/s/k")


def split_rows(protocol: str, rows) -> pl.DataFrame:
    frame = pl.DataFrame(
        [
            (protocol, f"i/{n}", 0, str(label), label, split,
             "novel" if label is None else "known", None)
            for n, (split, label) in enumerate(rows)
        ],
        schema=SPLITS.polars_schema,
        orient="row",
    )  # fmt: skip
    return SPLITS.conform(frame)


def trial(member: str, subset: Subset = SETS[0], key: str = "all", side: int = 32) -> Trial:
    there = Part(Path("none"), "0" * 64, 1, 1, "splits", f"{subset.name}/{member}", "semantic/s/k")
    protocol = f"{subset.name}/{member}"
    return Trial(protocol, subset, member, "fit", key, there, (), (side, side))


def planned(tmp_path: Path | None = None, key: str = "all", **choice: Any) -> list[Run]:
    trials = [trial(name, key=key) for name in ("cat", "dog")]
    splits = pl.concat([split_rows(one.protocol, GOOD) for one in trials])
    return plan_networks(config(**choice), trials, splits)


def ids(runs: list[Run]) -> dict[tuple, str]:
    return {(r.facts.protocol, r.facts.model, r.facts.seed): r.mark.run_id for r in runs}


# ---------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"models": "spin"}, r"no model of semantic 'spin'; there are: centre_mask, classifier"),
        ({"scores": "mps"}, r"no score 'mps'; there are: .*msp"),
        ({"scores": {"energy": {"heat": 1}}}, r"energy: .*heat is not a setting"),
        ({"models": {"rotation": {"speed": 1}}}, r"rotation: .*speed is not a setting"),
        ({"models": {"rotation": {"epochs": 0}}}, r"rotation: .*epochs: .*greater than"),
        ({"models": {"rotation": {"odin": {"x": 1}}}}, r"rotation: .*odin.x is not a setting"),
        ({"models": {"classifier": {"auxiliary_weight": 1}}}, r"classifier: .*auxiliary_weight is"),
        (
            {"models": {"classifier": {"network_name": "stl"}}},
            r"choose the network with --networks",
        ),
        ({"models": {"odin": {"epsilon": -1}}}, r"odin: .*epsilon"),
        ({"train": {"auxiliary_weight": 1}}, r"train.auxiliary_weight: none of the models clas"),
        ({"networks": "vgg"}, r"no network 'vgg'; there are: auto, cifar, stl, imagenet"),
        ({"networks": {"cifar": {"wide": 3}}}, r"wide is not a setting"),
        ({"networks": {"auto": {"width": 3}}}, r"networks.auto has no settings"),
        ({"preset": "tiny"}, r"no preset 'tiny', only paper, small"),
        ({"predictors": "ann"}, r"semantic has no predictors"),
        ({"scores": "own"}, r"score own needs novelty, which none of the models classifier puts"),
        ({"protocols": ("birds/gull",)}, r"'birds/gull' is of no subset that is built"),
        ({"protocols": ("cars/cab",), "subsets": ("pets",)}, r"'cars/cab' is of no subset"),
        ({"subsets": ("dgos",)}, r"subsets: 'dgos' is unknown; there are pets, cars, cifar10"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_before_anything_is_read(choice, said):
    with pytest.raises(ConfigError, match=said) as error:
        check_choice(config(**{"models": "classifier"} | choice), SETS)
    assert "\n" not in str(error.value)


def test_what_is_right_is_let_pass():
    right = {"epochs": "3", "odin": {"epsilon": "0.1"}, "milestones": "2,5"}
    check_choice(config(models={"rotation": right, "odin": {}}, scores="msp,own"), SETS)
    check_choice(config(models="all", networks={"stl": {"width": 8}}, train={"cpc": {}}), SETS)
    check_choice(Config(source={"own": Path("raw")}, scores="own"), SETS)


@pytest.mark.parametrize("name", ["a/b", "", ".train"])
def test_a_source_has_a_plain_name(name):
    with pytest.raises(ValidationError, match=r"expected a NAME or NAME\.PART without /"):
        Config(source={name: Path("raw")})


def test_seeds_count_once_and_are_not_negative():
    assert config(seeds=(2, 0, 2)).seeds == (2, 0)
    for wrong in ((), (0, -1)):
        with pytest.raises(ValidationError, match="seeds"):
            config(seeds=wrong)


def test_odin_brings_a_network_and_the_baseline_comes_by_itself():
    assert set(chosen_models(config(models="odin"))) == {"odin", "classifier"}
    assert set(chosen_models(config(models="odin,rotation"))) == {"odin", "rotation"}
    assert set(chosen_models(config(trivial_baseline=True))) == {"pixel_gaussian"}
    assert set(chosen_models(config(models="all"))) == set(models.names())


def test_a_setting_for_all_goes_to_those_that_have_it_and_the_own_one_wins():
    train = {"epochs": 3, "auxiliary_weight": 2.0, "odin": {"temperature": 10}}
    own = {"rotation": {"epochs": 4, "odin": {"epsilon": 0.5}}, "classifier": {}, "odin": {}}
    asked = chosen_models(config(models=own, train=train))
    assert asked["classifier"] == {"epochs": 3, "odin": {"temperature": 10}}
    assert asked["rotation"] == {
        "epochs": 4,
        "auxiliary_weight": 2.0,
        "odin": {"temperature": 10, "epsilon": 0.5},
    }
    assert asked["odin"] == {}


def test_trials_by_member_by_subset_or_by_both():
    trials = [trial(m, s) for s in SETS for m in s.members.values()]

    def names(*wanted):
        return [one.protocol for one in chosen_trials(wanted, trials)]

    assert len(names()) == 5
    assert names("cars") == ["cars/Model T", "cars/cab"]
    assert names("dog", "cars/cab") == ["pets/dog", "cars/cab"]
    with pytest.raises(ConfigError, match=r"no trial 'gull'; there are pets/cat, pets/dog"):
        names("gull")


@pytest.mark.parametrize(
    ("rows", "fits"),
    [
        (GOOD, True),
        ([("train", 0), ("test", 0), ("test", None)], False),
        ([*GOOD[:2], ("test", None)], False),
        (GOOD[:3], False),
        ([*GOOD, ("test", 2)], False),
        ([("train", 0), ("train", 2), *GOOD[2:]], False),
    ],
    ids=["good", "one_class", "no_known", "no_novel", "untrained_class", "gap"],
)
def test_trials_that_cannot_be_trained_are_left_out_with_a_sentence(rows, fits, capsys):
    splits = pl.concat([split_rows("pets/cat", GOOD), split_rows("pets/dog", rows)])
    found = trainable([trial("cat"), trial("dog")], splits)
    assert [one.member for one in found] == (["cat", "dog"] if fits else ["cat"])
    assert ("pets/dog: no network" in capsys.readouterr().err) == (not fits)


def test_no_trial_at_all_is_an_error():
    with pytest.raises(SourceError, match="no trial has pictures enough"):
        trainable([trial("dog")], split_rows("pets/dog", GOOD[:2]))


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("side", "network"), [(32, "cifar"), (48, "cifar"), (64, "stl"), (96, "stl"), (256, "imagenet")]
)
def test_the_network_goes_by_the_side_of_the_pictures(side, network):
    assert network_for("auto", side) == network
    assert network_for("stl", side) == "stl"


def test_only_pictures_in_a_trial_say_how_large_they_are(tmp_path):
    path = tmp_path / "p.parquet"
    sizes = {"sample_id": ["a", "b", "c"], "width": [32, 40, 999], "height": [36, 30, 2]}
    pl.DataFrame(sizes).write_parquet(path)
    there = [stored(path, "pictures", 3, "cifar10/0")]
    assert picture_sides(there, pl.Series(["a", "b"])) == (30, 40)


def test_one_run_per_trial_network_model_and_seed():
    runs = planned(models="classifier,rotation", networks="auto,stl", seeds=(0, 7))
    assert [(r.facts.protocol, r.facts.network, r.facts.model, r.facts.seed) for r in runs] == [
        (f"pets/{member}", network, model, seed)
        for member in ("cat", "dog")
        for network in ("cifar", "stl")
        for model in ("classifier", "rotation")
        for seed in (0, 7)
    ]
    assert len({r.mark.run_id for r in runs}) == 16
    one = runs[0].facts
    assert one.settings["epochs"] == 7 and one.settings["threads"] == 1 and one.changed == {}
    assert one.preset == "small" and one.versions.keys() == {"model", "network", "trainer", "odin"}
    assert "auxiliary_weight" not in one.settings
    assert runs[2].facts.settings["auxiliary_weight"] == 0.5
    shard = runs[0].shard()
    assert shard.name == runs[0].mark.run_id == shard.depends["run"]
    assert "tasks." not in str(shard.about)


def test_a_setting_changes_the_runs_of_its_model_alone():
    every = {"models": "classifier,centre_mask,rotation"}
    before = ids(planned(**every))

    def changed(**choice):
        after = ids(planned(**every | choice))
        return {model for (_, model, _), key in after.items() if key not in before.values()}

    assert changed() == set()
    assert changed(train={"auxiliary_weight": 2.0}) == {"rotation"}
    assert changed(train={"mask": {"side": 0.4}}) == {"centre_mask"}
    assert changed(train={"epochs": 3}) == {"classifier", "centre_mask", "rotation"}
    assert changed(networks={"cifar": {"width": 8}}) == {"classifier", "centre_mask", "rotation"}
    own = {"classifier": {}, "centre_mask": {}, "rotation": {"learning_rate": 0.3}}
    assert changed(models=own) == {"rotation"}
    assert changed(networks="cifar", device="cpu", scores="msp") == set()
    # What is asked for and is the preset's own value is the same run.
    assert changed(train={"epochs": 7}) == set()


def test_versions_and_presets_change_the_runs_that_they_are_of(monkeypatch):
    every = {"models": "classifier,rotation"}
    before = ids(planned(**every))

    def changed():
        return {key[1] for key, run in ids(planned(**every)).items() if before[key] != run}

    with monkeypatch.context() as patched:
        patched.setattr(Rotation, "version", 2)
        assert changed() == {"rotation"}
    with monkeypatch.context() as patched:
        patched.setattr("tasks.semantic.training.TRAINER_VERSION", 2)
        assert changed() == {"classifier", "rotation"}
    with monkeypatch.context() as patched:
        patched.setitem(presets.SMALL, "learning_rate", 0.0123)
        assert changed() == {"classifier", "rotation"}
    with monkeypatch.context() as patched:
        patched.setitem(presets.SMALL_OF["stl"], "learning_rate", 0.0123)
        assert changed() == set()
    assert not set(ids(planned(key="other rows", **every)).values()) & set(before.values())


def test_what_differs_from_the_preset_is_told():
    (run, _) = planned(
        models={"rotation": {"epochs": 9, "odin": {"space": "normalised"}}},
        networks={"cifar": {"width": 8}},
    )
    assert run.facts.changed == {
        "epochs": 9, "network": {"width": 8}, "odin": {"space": "normalised"},
    }  # fmt: skip
    preset = planned(models="rotation")[0].facts.settings
    same = {name: value for name, value in preset.items() if name not in run.facts.changed}
    assert same.items() <= run.facts.settings.items()
    (paper, _) = planned(models="cpc", networks="stl", preset="paper")
    assert paper.facts.settings["epochs"] == 200 and paper.facts.changed == {}
    assert paper.facts.settings["network"]["stem_stride"] == 2
    assert paper.facts.settings["auxiliary_weight"] == 10.0


def test_odin_goes_over_each_network_from_its_settings():
    own = {"models": {"classifier": {}, "rotation": {}, "odin": {}}}
    networks = planned(**own)
    odins = plan_odin(config(**own), networks)
    assert [run.facts.base_runs for run in odins] == [(n.mark.run_id,) for n in networks]
    assert {run.facts.model for run in odins} == {"odin"}
    assert all(run.facts.network == "cifar" for run in odins)
    assert odins[0].facts.settings == networks[0].facts.settings["odin"] | {"threads": 1}
    assert plan_odin(config(models="classifier"), networks) == []
    # Its own setting leaves the networks alone.
    own["models"]["odin"] = {"epsilon": 0.01}
    assert ids(planned(**own)) == ids(networks)
    moved = plan_odin(config(**own), networks)
    assert moved[0].facts.settings["epsilon"] == 0.01 and moved[0].facts.changed
    assert not set(ids(moved).values()) & set(ids(odins).values())


# ---------------------------------------------------------------- stages


def test_the_papers_number_is_the_mean_over_the_scored_epochs(tmp_path):
    measures = {"ap_msp": (0.2, 0.4), "ap_odin": (0.5, 0.6), "loss": (3, 2, 1),
                "test_accuracy": (0.9, 0.7)}  # fmt: skip
    rows = [
        ("r", epoch, measure, value)
        for measure, values in measures.items()
        for epoch, value in enumerate(values, 1)
    ]
    training = pl.DataFrame(rows, schema=TRAINING.polars_schema, orient="row")
    splits = split_rows("pets/cat", [*GOOD, ("test", 1), ("test", None)])
    parts = (
        part(tmp_path / "splits.parquet", SPLITS, splits),
        part(tmp_path / "training.parquet", TRAINING, training),
    )

    class Trained:
        manifest = type("Manifest", (), {"key": "k"})

        def part(self, table: str) -> Part:
            return next(one for one in parts if one.table == table)

    own = config(models="classifier,odin")
    networks = planned(models="classifier")[:1]
    odins = plan_odin(own, networks)
    shards = plan_averages(networks, odins, {networks[0].mark.run_id: Trained()})
    found = []
    for shard in shards:
        shard = Shard(shard.name, parts=parts, about=shard.about)
        found.append(average_evaluations(shard, Settings()).tables["metrics"])
    table = pl.concat(found)
    columns = ("run_id", "score", "metric", pl.col("value").round(9), "n", "low", "high")
    assert table.select(*columns).rows() == [
        (networks[0].mark.run_id, "msp", "average_precision_last_epochs", 0.3, 4, None, None),
        (networks[0].mark.run_id, "msp", "acc_last_epochs", 0.8, 2, None, None),
        (odins[0].mark.run_id, "own", "average_precision_last_epochs", 0.55, 4, None, None),
    ]
    # With other settings than those in training the run of ODIN has no such number.
    other = plan_odin(config(models={"classifier": {}, "odin": {"epsilon": 1}}), networks)
    assert len(plan_averages(networks, other, {networks[0].mark.run_id: Trained()})) == 1


def written(tmp_path: Path, protocol: str) -> Trial:
    """A trial with pictures: two classes in train, a third in test, anomalies in valid too."""
    import io

    rng = np.random.default_rng(0)
    rows = [("train", n % 2) for n in range(12)]
    rows += [(split, n % 2 if n < 4 else None) for split in ("valid", "test") for n in range(6)]
    splits = split_rows(protocol, rows)
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
    pictures.write_parquet(tmp_path / "pictures.parquet")
    kept = stored(tmp_path / "pictures.parquet", "pictures", count)
    return Trial(
        protocol, SETS[0], "cat", "fit", "all",
        part(tmp_path / "splits.parquet", SPLITS, splits, protocol), (kept,), (8, 8),
    )  # fmt: skip


def test_a_run_is_trained_passed_and_looked_at_again(tmp_path):
    own = config(
        models="classifier,odin",
        train={"epochs": 1, "batch_size": 8, "network": {"width": 4}},
        device="cpu",
        seeds=(3,),
    )
    one = written(tmp_path, "pets/cat")
    splits = one.splits.read()
    (network,) = plan_networks(own, [one], splits)
    (odin,) = plan_odin(own, [network])
    work = tmp_path / "work"
    shard = network.shard()
    shard = Shard(shard.name, parts=shard.parts, about=shard.about, work=work)
    trained = train_network(shard, DeviceSettings(device="cpu"))
    (row,) = trained.tables["runs"].iter_rows(named=True)
    assert (row["run_id"], row["model"], row["device"]) == (
        network.mark.run_id,
        "classifier",
        "cpu",
    )
    assert row["data_key"] == "all" and row["seed"] == 3
    assert set(trained.tables["training"]["measure"]) >= {"loss", "ap_msp", "ap_odin"}
    assert sorted(trained.files) == ["head.safetensors", "model.safetensors"]

    path = trained.files["model.safetensors"]
    model = stored(path, path.name)
    passed = pass_pictures(network.pass_shard(model), DeviceSettings(device="cpu")).tables
    outputs = passed["outputs"]
    assert outputs["sample_id"].sort().to_list() == splits["sample_id"].sort().to_list()
    assert set(outputs["view"]) == {PLAIN} and outputs["novelty"].null_count() == outputs.height
    assert set(outputs["logits"].list.len()) == {2} and set(outputs["predicted"]) <= {"0", "1"}
    tested = splits.filter(pl.col("split") != "train")
    assert passed["predictions"].height == tested.height

    again = pass_odin(odin.pass_shard(model), DeviceSettings(device="cpu")).tables
    found = again["outputs"]
    assert found["sample_id"].sort().to_list() == tested["sample_id"].sort().to_list()
    assert found["novelty"].null_count() == 0 and found["logits"].null_count() == found.height
    same = found.join(outputs, on="sample_id")
    assert (same["predicted"] == same["predicted_right"]).all()
    (row,) = again["runs"].iter_rows(named=True)
    assert row["base_runs"] == [network.mark.run_id] and row["model"] == "odin"
    facts = RunFacts.model_validate(odin.facts.model_dump())
    assert run_id(facts) == row["run_id"]


def test_the_device_is_in_no_key():
    (run, _) = planned(models="classifier")
    keys = {
        train_network.key("semantic", run.shard(), DeviceSettings(device=device))
        for device in ("cpu", "cuda", "auto")
    }
    assert len(keys) == 1


def test_every_network_model_has_both_presets():
    for name in models.names():
        kind = models.find(name)
        assert kind.version >= 1 and kind.resolve("small") is not None
        if issubclass(kind, NetworkModel):
            small, paper = kind.resolve("small", {}, "stl"), kind.resolve("paper", {}, "stl")
            assert small.network.width < paper.network.width
    assert Odin.gives == {"novelty"}
