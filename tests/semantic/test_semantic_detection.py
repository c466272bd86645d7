"""Plans and stages of the networks: what is asked for, what is trained, what is scored."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from pydantic import ValidationError

from schemas.errors import ConfigError, SourceError
from schemas.older_tables import TRAINING
from schemas.semantic import OUTPUTS, TRIALS, Config, DetectionChoice, OdinChoice
from schemas.table import Table
from storage.pieces import Part
from tasks import scores
from tasks.detection import MODEL
from tasks.scores.base import Head, Outputs, Reference
from tasks.semantic import presets
from tasks.semantic.models import NAMES
from tasks.semantic.detection import (
    AverageSettings,
    ScoreChoice,
    average_evaluations,
    score_choice,
    score_outputs,
    train_network,
    training_choice,
)
from tasks.semantic.detection_plan import (
    check_choice,
    chosen_tasks,
    chosen_trials,
    network_for,
    plan_networks,
    setup_for,
    trainable,
)
from tasks.semantic.trials import Subset
from tasks.stage import Shard

SETS = [
    Subset(name="pets", dataset="cifar10", members={"cat": "cat", "dog": "dog", "frog": "frog"}),
    Subset(name="cars", dataset="imagenet", members={"n1": "Model T", "n2": "cab"}),
]


def part(path: Path, table: Table, frame: pl.DataFrame, shard: str = "x") -> Part:
    path.parent.mkdir(parents=True, exist_ok=True)
    table.conform(frame).write_parquet(path)
    return Part(path, f"{path.name:0<64}", frame.height, 1, table.name, shard, "semantic/s/k")


def pictures(path: Path, side: int) -> Part:
    pl.DataFrame({"width": [side], "height": [side]}).write_parquet(path)
    return Part(path, "0" * 64, 1, 1, "pictures", "cifar10/0", "semantic/s/k")


# ---------------------------------------------------------------- what is asked for


def test_tasks_in_order_and_none_first():
    assert chosen_tasks(DetectionChoice(auxiliary=("rotation", "none", "cpc"))) == [
        "none", "cpc", "rotation",
    ]  # fmt: skip
    assert set(chosen_tasks(DetectionChoice(auxiliary=("all",)))) == set(NAMES)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"auxiliary": ("spin",)}, r"no auxiliary task 'spin'; there are: centre_mask, cpc"),
        ({"scores": ("mps",)}, r"no post-hoc score 'mps'; there are: .*msp"),
        ({"subsets": ("birds",)}, r"'birds' is unknown; there are pets, cars, cifar10"),
        ({"subsets": ("cars",)}, r"'cars' is not among the subsets pets; .*--subsets"),
        ({"seeds": ()}, r"detection.seeds is empty"),
    ],
    ids=["auxiliary", "score", "subset", "subset_not_built", "seeds"],
)
def test_wrong_names_are_known_before_anything_is_read(choice, said):
    asked = DetectionChoice(**({"auxiliary": ("none",)} | choice))
    with pytest.raises(ConfigError, match=said):
        check_choice(asked, ("pets",), SETS, ["cifar10.train", "cifar10.test"])


def test_without_networks_only_the_subsets_are_checked():
    check_choice(DetectionChoice(scores=("mps",)), ("pets", "cifar10"), SETS, ["cifar10.train"])
    with pytest.raises(ConfigError, match=r"subsets: 'dgos' is unknown; there are pets, cars, own"):
        check_choice(DetectionChoice(), ("dgos",), SETS, ["own"])


@pytest.mark.parametrize("name", ["a/b", "", ".train"])
def test_a_source_has_a_plain_name(name):
    with pytest.raises(ValidationError, match=r"expected a NAME or NAME\.PART without /"):
        Config(source={name: Path("raw")})


def test_a_seed_counts_once():
    assert DetectionChoice(seeds=(2, 0, 2)).seeds == (2, 0)


@pytest.mark.parametrize(
    "wrong", [{"preset": "tiny"}, {"network": "vgg"}, {"epochs": 0}, {"seeds": (0, -1)}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DetectionChoice(**wrong)


def test_trials_by_member_or_by_subset_and_member():
    def names(**choice):
        return [(s.name, m) for s, m in chosen_trials(DetectionChoice(**choice), SETS)]

    assert len(names()) == 5
    assert names(subsets=("cars",)) == [("cars", "Model T"), ("cars", "cab")]
    assert names(trials=("dog", "cars/cab")) == [("pets", "dog"), ("cars", "cab")]
    with pytest.raises(ConfigError, match=r"no trial 'cab'; there are pets/cat, pets/dog"):
        names(subsets=("pets",), trials=("cab",))
    with pytest.raises(ConfigError, match="birds has no trials; there are pets, cars"):
        names(subsets=("birds",))


def trial_rows(subset: str, trial: str, rows) -> pl.DataFrame:
    return TRIALS.conform(
        pl.DataFrame(
            [
                (subset, trial, split, f"i/{n}", str(label), label,
                 "anomaly" if label is None else "normal")
                for n, (split, label) in enumerate(rows)
            ],
            schema=[c.name for c in TRIALS.columns],
            orient="row",
        )
    )  # fmt: skip


GOOD = [("train", 0), ("train", 1), ("test", 0), ("test", None)]


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
    ids=["good", "one_class", "no_normal", "no_anomaly", "untrained_class", "gap"],
)
def test_trials_that_cannot_be_trained_are_left_out_with_a_sentence(rows, fits, capsys):
    frame = pl.concat([trial_rows("pets", "cat", GOOD), trial_rows("pets", "dog", rows)])
    found = trainable([(SETS[0], "cat"), (SETS[0], "dog")], frame)
    assert [member for _, member in found] == (["cat", "dog"] if fits else ["cat"])
    assert ("pets/dog: no network" in capsys.readouterr().err) == (not fits)


def test_no_trial_at_all_is_an_error():
    with pytest.raises(SourceError, match="no trial has pictures enough"):
        trainable([(SETS[0], "dog")], trial_rows("pets", "dog", GOOD[:2]))


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("side", "network"), [(32, "cifar"), (48, "cifar"), (64, "stl"), (96, "stl"), (256, "imagenet")]
)
def test_the_network_goes_by_the_side_of_the_pictures(side, network, tmp_path):
    there = [pictures(tmp_path / "p.parquet", side)]
    assert network_for(DetectionChoice(), there) == network
    assert network_for(DetectionChoice(network="stl"), there) == "stl"


def planned(tmp_path: Path, **choice) -> list[Shard]:
    trials = [
        part(tmp_path / f"{name}.parquet", TRIALS, trial_rows("pets", name, GOOD), f"pets/{name}")
        for name in ("cat", "dog")
    ]
    asked = DetectionChoice(**choice)
    pairs = [(SETS[0], "cat"), (SETS[0], "dog")]
    stored = [pictures(tmp_path / "p.parquet", 32)]
    return plan_networks(chosen_tasks(asked), asked, pairs, trials, stored)


def test_one_shard_per_trial_task_and_seed(tmp_path):
    shards = planned(tmp_path, auxiliary=("none", "rotation"), seeds=(0, 7))
    assert [shard.name for shard in shards] == [
        f"pets/{member}/{task}/{seed}"
        for member in ("cat", "dog")
        for task in ("none", "rotation")
        for seed in (0, 7)
    ]
    assert [p.shard for p in shards[-1].parts] == ["pets/dog", "cifar10/0"]


def test_the_weight_of_the_second_task_costs_only_networks_that_have_one(tmp_path):
    def keys(**choice):
        asked = DetectionChoice(auxiliary=("none", "centre_mask", "rotation"), **choice)
        shards = planned(tmp_path, auxiliary=asked.auxiliary, seeds=(0,), **choice)
        how = training_choice(asked)
        return {shard.name: train_network.key("semantic", shard, how) for shard in shards}

    before, after = keys(), keys(auxiliary_weight=2.0)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"pets/cat/rotation/0", "pets/dog/rotation/0"}
    fewer = keys(epochs=3)
    assert all(before[name] != fewer[name] for name in before)


def test_a_choice_changes_the_preset_and_nothing_else():
    preset = setup_for("cifar", "rotation", DetectionChoice())
    asked = DetectionChoice(
        epochs=7, evaluations=3, auxiliary_weight=2.5, odin=OdinChoice(space="normalised")
    )
    found = setup_for("cifar", "rotation", asked)
    assert (found.epochs, found.evaluations, found.auxiliary_weight) == (7, 3, 2.5)
    assert found.odin == preset.odin.model_copy(update={"space": "normalised"})
    changed = {"epochs", "evaluations", "auxiliary_weight", "odin"}
    assert found.model_dump(exclude=changed) == preset.model_dump(exclude=changed)
    paper = setup_for("stl", "none", DetectionChoice(preset="paper"))
    assert paper.epochs == 200 and paper.network_name == "stl"


def test_a_changed_preset_is_a_changed_key(tmp_path, monkeypatch):
    def keys():
        shards = planned(tmp_path, auxiliary=("none",), seeds=(0,))
        how = training_choice(DetectionChoice())
        return [train_network.key("semantic", shard, how) for shard in shards]

    before = keys()
    assert keys() == before
    monkeypatch.setitem(presets.SMALL, "learning_rate", 0.0123)
    assert not set(keys()) & set(before)


# ---------------------------------------------------------------- stages

ABOUT = {"subset": "pets", "trial": "cat", "network": "cifar", "auxiliary": "none", "seed": 3}


def test_the_papers_number_is_the_mean_over_the_scored_epochs(tmp_path):
    measures = {"ap_msp": (None, 0.2, 0.4), "ap_odin": (None, 0.5, 0.6), "loss": (3, 2, 1),
                "test_accuracy": (None, 0.9, 0.7)}  # fmt: skip
    rows = [
        ("none", "v", 3, epoch, measure, value)
        for measure, values in measures.items()
        for epoch, value in enumerate(values, 1)
    ]
    frame = pl.DataFrame(rows, schema=[c.name for c in TRAINING.columns], orient="row")
    trials = trial_rows("pets", "cat", [*GOOD, ("test", 1), ("test", None)])
    parts = (
        part(tmp_path / "trials.parquet", TRIALS, trials),
        part(tmp_path / "training.parquet", TRAINING, frame),
    )
    made = average_evaluations(Shard("s", parts=parts, about=ABOUT), AverageSettings())
    found = made.tables["metrics"]
    assert found.select("detector", "metric", pl.col("value").round(9), "n").rows() == [
        ("msp", "average_precision_last_epochs", 0.3, 4),
        ("odin", "average_precision_last_epochs", 0.55, 4),
        ("msp", "acc_last_epochs", 0.8, 2),
    ]
    assert set(found["protocol"]) == {"pets/cat"} and set(found["backbone"]) == {"cifar none"}


CLASSES, WIDTH = ("cat", "dog", "frog"), 5


def cached(head: Head, *, valid: bool) -> pl.DataFrame:
    """Outputs of random features; anomalies of valid have huge ones."""
    rng = np.random.default_rng(0)
    frames = []
    for split, count in {"train": 60, "valid": 20 if valid else 0, "test": 30}.items():
        if not count:
            continue
        labels = np.arange(count) % 3
        features = rng.normal(size=(count, WIDTH)).astype(np.float32) + np.eye(3, WIDTH)[labels] * 3
        anomaly = (split != "train") & (np.arange(count) % 5 == 4)
        features[anomaly] *= 100 if split == "valid" else 0.1
        features = features.astype(np.float32)
        logits = head(torch.from_numpy(features)).numpy()
        about = {
            key: [ABOUT[key]] * count for key in ("network", "auxiliary", "seed", "subset", "trial")
        }
        frames.append(
            pl.DataFrame(
                about
                | {
                    "split": [split] * count,
                    "sample_id": [f"{split}/{n:02}" for n in range(count)],
                    "class": [CLASSES[label] for label in labels],
                    "label": [
                        None if odd else int(label)
                        for label, odd in zip(labels, anomaly, strict=True)
                    ],
                    "logits": logits.tolist(),
                    "features": features.tolist(),
                    "odin": rng.normal(size=count),
                }
            )
        )
    return pl.concat(frames)


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """(outputs, head, `score(valid, scores)`) with a network that is only its head."""
    generator = torch.Generator().manual_seed(1)
    head = Head(torch.randn(3, WIDTH, generator=generator), torch.zeros(3), None, 0.0)

    class Loaded:
        def head(self) -> Head:
            return head

    monkeypatch.setattr("tasks.semantic.training.load", lambda path, device="auto": Loaded())

    def score(valid: bool, scores: tuple[str, ...]) -> tuple[pl.DataFrame, pl.DataFrame]:
        outputs = cached(head, valid=valid)
        model = Part(tmp_path / "none", "0" * 64, 0, 1, MODEL, "x", "semantic/s/k")
        parts = (part(tmp_path / "outputs.parquet", OUTPUTS, outputs), model)
        made = score_outputs(
            Shard("s", parts=parts, about=ABOUT), ScoreChoice(scores=scores, threads=1)
        )
        return outputs, made.tables["scores"]

    return head, score


def test_scores_that_need_validation_pictures_say_when_there_are_none(capsys):
    without = trial_rows("pets", "cat", GOOD)
    assert score_choice(DetectionChoice(), without).scores == scores.names()
    assert "react: no validation pictures, so training pictures" in capsys.readouterr().err
    assert score_choice(DetectionChoice(scores=("msp",)), without).scores == ("msp",)
    there = trial_rows("pets", "cat", [*GOOD, ("valid", 0)])
    assert score_choice(DetectionChoice(), there).scores == scores.names()
    assert score_choice(DetectionChoice(scores=("react",)), there).scores == ("react",)
    assert not capsys.readouterr().err


def test_without_validation_pictures_training_pictures_take_their_place(scored):
    head, score = scored
    outputs, found = score(False, scores.names())
    assert set(found["detector"]) == set(scores.names())
    train, test = (
        outputs.filter(split=name)["features"].list.to_array(WIDTH).to_numpy()
        for name in ("train", "test")
    )
    plain = scores.find("react")()
    plain.fit(Reference(valid=Outputs(None, train), head=head))
    assert np.allclose(found.filter(detector="react")["score"], plain.score(Outputs(None, test)))


def test_every_score_comes_from_the_cached_outputs(scored):
    _, score = scored
    outputs, found = score(True, scores.names())
    test = outputs.filter(split="test")
    assert set(found["detector"]) == set(scores.names())
    assert found.height == len(scores.names()) * test.height
    msp = found.filter(detector="msp").sort("sample_id")
    logits = test["logits"].list.to_array(3).to_numpy().astype(np.float64)
    soft = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.allclose(msp["score"], -soft.max(1))
    assert msp["predicted"].to_list() == [CLASSES[k] for k in logits.argmax(1)]
    assert msp["novel"].to_list() == test["label"].is_null().to_list()
    assert msp["class"].to_list() == test["class"].to_list()
    assert msp["protocol"].unique().to_list() == ["pets/cat"]
    assert msp["backbone"].unique().to_list() == ["cifar none"]
    assert msp["seed"].unique().to_list() == [3]


def test_odin_is_the_one_with_the_input_step(scored):
    _, score = scored
    outputs, found = score(False, ("odin",))
    assert found["score"].to_list() == outputs.filter(split="test")["odin"].to_list()


def test_scores_learn_nothing_of_the_anomalies_in_valid(scored):
    head, score = scored
    outputs, found = score(True, ("react",))
    kept = outputs.filter(split="valid").drop_nulls("label")
    features = {
        name: rows["features"].list.to_array(WIDTH).to_numpy()
        for name, rows in (("valid", kept), ("test", outputs.filter(split="test")))
    }
    plain = scores.find("react")()
    plain.fit(Reference(valid=Outputs(None, features["valid"]), head=head))
    assert np.allclose(found["score"], plain.score(Outputs(None, features["test"])))
    bent = np.concatenate([features["valid"], features["valid"] * 100])
    plain.fit(Reference(valid=Outputs(None, bent), head=head))
    assert not np.allclose(found["score"], plain.score(Outputs(None, features["test"])))
