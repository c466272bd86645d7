"""Plans of the runs: what is asked for, which trials there are for it, what is keyed."""

import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pydantic import ValidationError

from schemas.errors import ConfigError, SourceError
from schemas.semantic import Config
from schemas.tables import SPLITS
from storage.filehash import sha256_file
from storage.pieces import Part
from tasks.engine.stage import Shard
from tasks.evaluation.model_runs import (
    PlannedRun,
    choose_models,
    plan_facts,
    plan_models,
    train_model,
)
from tasks.evaluation.passing import DeviceSettings
from tasks.models.pictures import PictureClassifier
from tasks.models.rotation import Rotation
from tasks.networks.stl import Stl
from tasks.semantic.offers import (
    Trial,
    check_choice,
    chosen_trials,
    network_for,
    offers_of,
    picture_sides,
    trainable,
    with_own_models,
)
from tasks.semantic.trials import Subset

SETS = [
    Subset(name="pets", dataset="cifar10", members={"cat": "cat", "dog": "dog", "frog": "frog"}),
    Subset(name="cars", dataset="imagenet", members={"n1": "Model T", "n2": "cab"}),
]
GOOD = [("train", 0), ("train", 1), ("test", 0), ("test", None)]


def config(**choice: Any) -> Config:
    return Config(**{"source": {"cifar10.train": Path("raw")}, "trivial_baseline": False} | choice)


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


def trial(member: str, subset: Subset = SETS[0], side: int = 32) -> Trial:
    protocol = f"{subset.name}/{member}"
    there = Part(Path("none"), "0" * 64, 1, 1, "splits", protocol, "semantic/s/k")
    return Trial(protocol, subset, member, there, (), (side, side))


def planned(
    fit_key: str = "fit", data_key: str = "all", side: int = 32, **choice: Any
) -> list[PlannedRun]:
    trials = [trial(name, side=side) for name in ("cat", "dog")]
    splits = pl.concat([split_rows(one.protocol, GOOD) for one in trials])
    asked = with_own_models(config(**choice))
    runs = plan_models("semantic", asked, offers_of(asked, trials, splits))
    keys = {one.protocol: {"fit_key": fit_key, "data_key": data_key} for one in trials}
    return plan_facts("semantic", asked, runs, keys)


def ids(runs: list[PlannedRun]) -> dict[tuple, str]:
    return {
        (r.facts.protocol, r.facts.model, r.facts.seed, *(b.facts.model for b in r.bases)): (
            r.mark.run_id
        )
        for r in runs
    }


def of_model(name: str, runs: list[PlannedRun]) -> list[PlannedRun]:
    return [run for run in runs if run.facts.model == name]


# ---------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"models": "spin"}, r"no model 'spin'; there are: .*centre_mask, classifier"),
        ({"scores": "mps"}, r"no score 'mps'; there are: .*msp"),
        ({"scores": "odin"}, r"odin is no score but a model: ask for it with --models odin"),
        ({"scores": {"energy": {"heat": 1}}}, r"energy: .*heat is not a setting"),
        ({"models": {"rotation": {"speed": 1}}}, r"rotation: .*speed is not a setting"),
        ({"models": {"rotation": {"epochs": 0}}}, r"rotation: .*epochs: .*greater than"),
        ({"models": {"cpc": {"cpc": {"x": 1}}}}, r"cpc: .*cpc.x is not a setting"),
        ({"models": {"classifier": {"auxiliary_weight": 1}}}, r"classifier: .*auxiliary_weight is"),
        ({"models": {"classifier": {"network": "stl"}}}, r"classifier: .*network is not a setting"),
        ({"models": {"odin": {"base": "pixel_gaussian"}}}, r"odin: base is pixel_gaussian, expec"),
        ({"models": {"odin": {"epsilon": -1}}}, r"odin: .*epsilon"),
        ({"train": {"auxiliary_weight": 1}}, r"train.auxiliary_weight: none of the models clas"),
        ({"networks": "vgg"}, r"no network 'vgg'; there are: auto, cifar, imagenet, stl"),
        ({"networks": {"cifar": {"wide": 3}}}, r"wide is not a setting"),
        ({"networks": {"auto": {"width": 3}}}, r"networks.auto has no settings"),
        ({"preset": "tiny"}, r"has no preset 'tiny'; there are: paper, small"),
        ({"predictors": "ann"}, r"semantic has no predictors"),
        ({"scores": "own"}, r"score own fits none of the models classifier: it needs novelty"),
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
    right = {"epochs": "3", "auxiliary_weight": "none", "milestones": "2,5"}
    odin = {"epsilon": "0.1"}
    check_choice(config(models={"rotation": right, "odin": odin}, scores="msp,own"), SETS)
    every = {"models": "classifier,cpc,odin", "train": {"cpc": {}}}
    check_choice(config(**every, networks={"stl": {"width": 8}}), SETS)
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
    def asked(**choice: Any) -> set[str]:
        return set(with_own_models(config(**choice)).models)

    assert asked(models="odin") == {"odin", "classifier"}
    assert asked(models="odin", trivial_baseline=True) == {"odin", "classifier", "pixel_gaussian"}
    assert asked(models="odin,rotation") == {"odin", "rotation"}
    assert asked(models={"odin": {"base": "rotation"}}) == {"odin"}
    assert asked(trivial_baseline=True) == {"pixel_gaussian"}


def test_a_setting_for_all_goes_to_those_that_have_it_and_the_own_one_wins():
    train = {"epochs": 3, "auxiliary_weight": 2.0, "cpc": {"patch": 10}}
    own = {"cpc": {"epochs": 4, "cpc": {"layers": 2}}, "classifier": {}, "odin": {}}
    trials = [trial("cat")]
    made = config(models=own, train=train)
    asked = choose_models("semantic", made, offers_of(made, trials, split_rows("pets/cat", GOOD)))
    assert asked["classifier"] == {"epochs": 3}
    assert asked["cpc"] == {
        "epochs": 4,
        "auxiliary_weight": 2.0,
        "cpc": {"patch": 10, "layers": 2},
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
    found = [(r.facts.protocol, r.facts.network, r.facts.model, r.facts.seed) for r in runs]
    assert sorted(found) == [
        (f"pets/{member}", network, model, seed)
        for member in ("cat", "dog")
        for network in ("cifar", "stl")
        for model in ("classifier", "rotation")
        for seed in (0, 7)
    ]
    assert len({r.mark.run_id for r in runs}) == 16
    one = of_model("classifier", runs)[0].facts
    assert one.settings["epochs"] == 7 and one.settings["cpu_threads"] == 1 and one.changed == {}
    assert one.preset == "small" and one.versions.keys() == {
        "model", "network", "trainer", "loader",
    }  # fmt: skip
    assert "auxiliary_weight" not in one.settings
    weights = {
        run.facts.network: run.facts.settings["auxiliary_weight"]
        for run in of_model("rotation", runs)
    }
    assert weights == {"cifar": 0.5, "stl": 1.0}


def test_a_model_that_cannot_learn_from_the_pictures_is_refused_before_training(capsys):
    wrong = r"model cpc on pets/cat: a picture of 32 pixels has no two rows of patches of 64"
    with pytest.raises(ConfigError, match=wrong):
        planned(models="classifier,cpc", preset="paper")
    found = {run.facts.model for run in planned(models="all", preset="paper")}
    assert "light_classifier" in found and "cpc" not in found
    assert "pets/dog: no cpc, as a picture of 32 pixels" in capsys.readouterr().err
    assert of_model("cpc", planned(models="cpc"))  # the small one has smaller patches


def test_a_new_test_picture_trains_nothing_again():
    """Training sees train and valid alone; only what is measured of test is made anew."""
    choice = {"models": "classifier,odin", "protocols": ("cat",)}
    before, after = planned(**choice), planned(data_key="more test pictures", **choice)
    assert ids(before) == ids(after)

    def keys(runs: list[PlannedRun]) -> list[str]:
        shards = [
            Shard(
                run.name,
                about=run.facts.model_dump(mode="json"),
                depends={"run": run.mark.run_id},
                run=run.mark,
            )
            for run in runs
        ]
        return [train_model.key("semantic", shard, DeviceSettings()) for shard in shards]

    assert keys(before) == keys(after)
    assert not set(ids(planned(fit_key="other rows", **choice)).values()) & set(
        ids(before).values()
    )


def test_a_setting_changes_the_runs_of_its_model_alone():
    every = {"models": "classifier,centre_mask,rotation"}
    before = ids(planned(**every))

    def changed(**choice: Any) -> set[str]:
        after = ids(planned(**every | choice))
        return {key[1] for key, run in after.items() if run not in before.values()}

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

    def changed() -> set[str]:
        return {key[1] for key, run in ids(planned(**every)).items() if before[key] != run}

    with monkeypatch.context() as patched:
        patched.setattr(Rotation, "version", 2)
        assert changed() == {"rotation"}
    with monkeypatch.context() as patched:
        patched.setattr("tasks.evaluation.model_runs.TRAINER_VERSION", 99)
        assert changed() == {"classifier", "rotation"}
    with monkeypatch.context() as patched:
        patched.setattr("tasks.semantic.samples.LOADER_VERSION", 99)
        assert changed() == {"classifier", "rotation"}
    with monkeypatch.context() as patched:
        patched.setitem(PictureClassifier.presets["small"], "learning_rate", 0.0123)
        assert changed() == {"classifier"}  # that of models with a task is a copy
    with monkeypatch.context() as patched:
        patched.setitem(Stl.trained["small"], "learning_rate", 0.0123)
        assert changed() == set()


def test_what_differs_from_the_preset_is_told():
    (run, _) = planned(models={"rotation": {"epochs": 9}}, networks={"cifar": {"width": 8}})
    assert run.facts.changed == {"epochs": 9, "network": {"width": 8}}
    preset = planned(models="rotation")[0].facts.settings
    same = {name: value for name, value in preset.items() if name not in run.facts.changed}
    assert same.items() <= run.facts.settings.items()
    (paper, _) = planned(models="cpc", networks="stl", preset="paper", side=96)
    assert paper.facts.settings["epochs"] == 200 and paper.facts.changed == {}
    assert paper.facts.settings["network"]["stem_stride"] == 2
    assert paper.facts.settings["auxiliary_weight"] == 10.0


def test_odin_goes_over_each_network():
    own: dict[str, Any] = {"models": {"classifier": {}, "rotation": {}, "odin": {}}}
    runs = planned(**own, networks="cifar,imagenet", side=256)
    odins = of_model("odin", runs)
    bases = [run for run in runs if run.facts.model != "odin"]
    assert sorted(run.facts.base_runs for run in odins) == sorted((b.mark.run_id,) for b in bases)
    for run in odins:
        (base,) = run.bases
        assert (run.facts.network, run.facts.seed) == (base.facts.network, base.facts.seed)
        space = {"cifar": "pixel255", "imagenet": "pixel1"}[run.facts.network]
        assert run.facts.settings["space"] == space and run.facts.settings["epsilon"] == 5e-5
    # Its own setting leaves the networks alone.
    own["models"]["odin"] = {"epsilon": 0.01}
    moved = planned(**own, networks="cifar,imagenet", side=256)
    assert [r.mark for r in moved if r.facts.model != "odin"] == [b.mark for b in bases]
    assert of_model("odin", moved)[0].facts.changed["epsilon"] == 0.01
    assert not {r.mark.run_id for r in of_model("odin", moved)} & {r.mark.run_id for r in odins}


def test_the_arithmetic_is_settled_in_the_plan_and_keyed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CXX", sys.executable)  # a compiler is asked for, and never called

    def run(**train: Any) -> PlannedRun:
        return planned(models={"classifier": {}}, train=train, device="cpu")[0]

    plain = run()
    assert plain.facts.precision == plain.facts.settings["precision"] == "float32"
    assert run(precision="float32").mark == plain.mark and not run(precision="auto").facts.changed
    others = [run(precision="bfloat16"), run(precision="float16"), run(compile=True)]
    assert [one.facts.precision for one in others] == ["bfloat16", "float16", "float32"]
    assert len({one.mark.run_id for one in (plain, *others)}) == 4
    with pytest.raises(ConfigError, match="a CPU has none"):
        run(precision="tf32")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no no-such-compiler on this machine"):
        run(compile=True)
