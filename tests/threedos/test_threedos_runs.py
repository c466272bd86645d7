"""What is asked of the models is checked before they are trained, and decides their runs."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from schemas.errors import ConfigError, SourceError
from schemas.runs import RunFacts
from schemas.threedos import Config, ShapeSettings
from storage.pieces import Part
from tasks.evaluation.runs import run_id
from tasks.threedos import methods, networks, training
from tasks.threedos.clouds import load_clouds
from tasks.threedos.methods.base import SMALL
from tasks.threedos.methods.cross_entropy import CrossEntropy
from tasks.threedos.methods.setups import Setup
from tasks.threedos.networks.dgcnn import Dgcnn
from tasks.threedos.runs import (
    RunPlan,
    plan_runs,
    plan_training,
    run_waves,
    scan_splits,
    trainable,
)
from tasks.threedos.splits import named_by_label
from tasks.threedos.tracks import Track, built_in_tracks

TRACKS = {track.name: track for track in built_in_tracks()}
MN = [TRACKS["MN1"], TRACKS["MN2"]]
KEYS = {name: {"fit_key": f"rows of {name}", "data_key": "all"} for name in TRACKS}


def plan(tracks: list[Track] = MN, **choices: Any) -> RunPlan:
    values = {"models": ["cross_entropy"], "device": "cpu", **choices}
    return plan_runs(Config(source={"modelnet40": Path("x")}, **values), tracks)


def setup(model: str, track: str = "MN1", **choices: Any) -> Setup:
    network = "dgcnn" if methods.find(model).uses_network else None
    made = plan([TRACKS[track]], models={model: choices.pop("own", {})}, **choices)
    return made.setup(model, network, TRACKS[track])


def runs(**choices: Any) -> dict[tuple[str | None, str, int | None], RunFacts]:
    waves = run_waves(plan(**choices), MN, KEYS)
    return {(f.protocol, f.model, f.seed): f for wave in waves for f in wave}


def ids(**choices: Any) -> dict[tuple[str | None, str, int | None], str]:
    return {place: run_id(facts) for place, facts in runs(**choices).items()}


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("model", ["cross_entropy", "flow", "outlier_exposure"])
def test_a_setting_for_all_models_reaches_those_that_have_it(model: str) -> None:
    assert setup(model).model.smoothing == 0
    changed = setup(model, "SR1", train={"smoothing": "0.2", "epochs": 3}, own={"epochs": "4"})
    assert (changed.model.smoothing, changed.model.epochs) == (0.2, 4)
    assert changed.model.augmentation == "rw"


def test_a_setting_for_all_models_leaves_those_without_it_alone() -> None:
    made = plan(models=["vae", "cross_entropy"], train={"smoothing": 0.2})
    assert "smoothing" not in made.models["vae"]
    assert made.models["cross_entropy"] == {"smoothing": 0.2}


def test_what_the_user_sets_wins_over_what_the_track_asks_for() -> None:
    assert setup("cross_entropy", "SR1").model.augmentation == "rw"
    assert setup("cross_entropy", "SR1", train={"augmentation": "st"}).model.augmentation == "st"
    assert setup("vae", "SR1").model.augmentation == "none"


@pytest.mark.parametrize(
    "track, scans, points",
    [("SN1", [], 1024), ("SR2", ["test"], 1024), ("SR13", ["train", "valid", "test"], 2048)],
)
def test_scans_are_seen_whole_with_the_paper_s_settings(
    track: str, scans: list[str], points: int
) -> None:
    assert scan_splits(TRACKS[track]) == scans
    settings = setup("cross_entropy", track, preset="paper").model
    assert (settings.points, settings.scan_points) == (points, 2048)
    small = setup("cross_entropy", track).model
    assert (small.points, small.scan_points) == (256, None)
    assert setup("cross_entropy", track, preset="paper", train={"points": 64}).model.points == 64


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"models": ["cross_entrop"]}, "no model of point clouds 'cross_entrop'; there are: arpl"),
        ({"networks": ["dgcn"]}, "no point network 'dgcn'"),
        ({"networks": []}, "models need a network"),
        ({"scores": ["mls", "mps"]}, "no score 'mps'"),
        ({"models": ["supcon"], "scores": ["mls"]}, "score mls fits none of the models supcon"),
        ({"predictors": ["ann"]}, "predictor ann does not fit"),
        ({"preset": "tiny"}, "no preset 'tiny'"),
        ({"models": {"cross_entropy": {"epoch": 3}}}, "cross_entropy: .*epoch is not a setting"),
        ({"models": {"cross_entropy": {"epochs": 0}}}, "cross_entropy: .*epochs"),
        ({"networks": {"dgcnn": {"k": "many"}}}, "dgcnn: .*k: "),
        ({"train": {"margin": 1}}, r"train.margin is a setting of none of the models \(cross_en"),
        ({"models": [], "train": {"epochs": 1}}, "none is chosen"),
        (
            {"models": {"outlier_exposure": {"hidden": 8}}},
            "models.outlier_exposure.hidden is 8, expected 256 as cross_entropy has",
        ),
    ],
)
def test_a_wrong_choice_is_one_sentence_before_any_work(
    choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        plan(**choices)
    assert "\n" not in str(error.value)


def test_models_need_shapes() -> None:
    with pytest.raises(ConfigError, match="name sources of shapes"):
        plan_runs(Config(lists=Path("x"), models=["cross_entropy"]), MN)


@pytest.mark.parametrize("points", [1, 129])
def test_more_points_than_a_cloud_has_are_refused(points: int) -> None:
    with pytest.raises(ValidationError, match="expected 2 to 128"):
        Config(
            source={"modelnet40": Path("x")},
            shapes=ShapeSettings(points=128, candidates=512),
            points=(64, points),
        )


def test_a_setting_means_one_thing() -> None:
    """No method has a setting of the name that training or the run's facts use already."""
    for name in methods.names():
        fields = methods.find(name).configuration.model_fields
        assert not {"network", "scan_splits"} & fields.keys()
        for field in training.TrainingSettings.model_fields:
            assert fields[field].annotation == (
                training.TrainingSettings.model_fields[field].annotation
            )


# ---------------------------------------------------------------- runs


def test_every_model_network_and_seed_is_a_run_and_bases_come_first() -> None:
    made = plan(models="all", networks="all", seeds=(0, 1))
    first, second = run_waves(made, MN, KEYS)
    assert {facts.model for facts in second} == {"outlier_exposure"}
    by_id = {run_id(facts): facts for facts in first}
    assert len(by_id) == len(first) == 2 * 2 * (6 * 3 + 1)
    for facts in second:
        base = by_id[facts.base_runs[0]]
        assert (base.model, base.protocol, base.network, base.seed) == (
            "cross_entropy",
            facts.protocol,
            facts.network,
            facts.seed,
        )
    assert {facts.network for facts in first if facts.model == "vae"} == {"none"}


def test_all_settings_are_in_the_facts() -> None:
    for facts in runs(models="all", train={"epochs": 7, "checkpoint_every": 3}).values():
        fields = methods.find(facts.model).configuration.model_fields
        of_run = {"scan_splits", *(["network"] if facts.network != "none" else [])}
        assert facts.settings.keys() - of_run == fields.keys() - {"checkpoint_every"}
        assert facts.changed == ({"epochs": 7})
        assert facts.versions.keys() >= {"model", "trainer"}


def test_a_setting_changes_the_runs_of_its_model_alone() -> None:
    both = {"models": ["cross_entropy", "supcon"]}
    before = ids(**both)
    after = ids(models={"cross_entropy": {"epochs": 61}, "supcon": {}})
    for place, run in after.items():
        assert (run != before[place]) == (place[1] == "cross_entropy")
    assert ids(**both, train={"checkpoint_every": 1}) == before
    assert not set(ids(**both, networks={"dgcnn": {"k": 9}}).values()) & set(before.values())


def test_a_changed_preset_or_version_changes_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids(models=["cross_entropy", "vae"])

    def changed() -> set[str]:
        now = ids(models=["cross_entropy", "vae"])
        return {place[1] for place in now if now[place] != before[place]}

    assert changed() == set()
    with monkeypatch.context() as patch:
        patch.setitem(SMALL, "epochs", 61)
        assert changed() == {"cross_entropy", "vae"}
    with monkeypatch.context() as patch:
        small = {**CrossEntropy.presets["small"], "dropout": 0.3}
        patch.setattr(CrossEntropy, "presets", {**CrossEntropy.presets, "small": small})
        assert changed() == {"cross_entropy"}
    for kind in (CrossEntropy, Dgcnn):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "version", 2)
            assert changed() == {"cross_entropy"}
    with monkeypatch.context() as patch:
        patch.setattr("tasks.threedos.runs.TRAINER_VERSION", 2)
        assert changed() == {"cross_entropy", "vae"}
    assert changed() == set()


def test_a_changed_base_changes_what_starts_from_it() -> None:
    before = ids(models=["outlier_exposure"])
    after = ids(models={"outlier_exposure": {}, "cross_entropy": {"epochs": 61}})
    assert all(after[place] != before[place] for place in before)


def test_what_starts_from_a_failed_run_fails_with_the_reason() -> None:
    first, second = run_waves(plan(models=["outlier_exposure"]), MN, KEYS)
    parts: dict[str, tuple[Part, ...]] = {track.name: () for track in MN}
    shards, lost = plan_training(first, parts, KEYS, [])
    assert len(shards) == 2 and not lost
    assert [shard.depends for shard in shards] == [{"run": run_id(facts)} for facts in first]
    shards, lost = plan_training(second, parts, KEYS, [])
    assert not shards and {reason for _, reason in lost} == {
        f"run {run_id(facts)}, which it starts from, failed" for facts in first
    }


# ---------------------------------------------------------------- rows


def splits() -> pl.DataFrame:
    rows = [
        ("MN1", "a", "train", "known", 0),
        ("MN1", "b", "train", "known", 1),
        ("MN1", "c", "test", "known", 0),
        ("MN1", "d", "test", "novel", None),
        ("MN2", "d", "train", "known", 0),
        ("MN2", "e", "train", "known", 1),
        ("MN2", "f", "test", "known", 1),
    ]
    return pl.DataFrame(rows, ["protocol", "sample_id", "split", "role", "label"], orient="row")


def test_tracks_without_clouds_are_left_out_or_named() -> None:
    clouds = pl.Series(list("abcdef"))
    assert [track.name for track in trainable(MN, splits(), clouds)] == ["MN1"]
    with pytest.raises(SourceError, match=r"MN2 cannot be trained on: .* no unknown test shapes"):
        trainable(MN, splits(), clouds, ["MN2"])
    with pytest.raises(SourceError, match=r"MN1 cannot be trained on: .* no two labels"):
        trainable(MN, splits(), pl.Series(list("acd")))


def test_a_known_shape_has_the_class_of_its_label() -> None:
    rows = splits().filter(protocol="MN1")
    rows = pl.concat([rows, rows[:1].with_columns(sample_id=pl.lit("g"))])
    named = named_by_label(rows.with_columns(pl.Series("class", ["x", "y", "z", "w", "q"])))
    assert named["class"].to_list() == ["q+x", "y", "q+x", "w", "q+x"]
    assert named["sample_id"].to_list() == list("abcdg")


def test_points_that_come_again_are_not_drawn() -> None:
    """A scan of 2 points in a table of 4 fills it by starting again."""
    points = np.arange(24, dtype=np.float32).reshape(2, 12)
    clouds = pl.DataFrame({"sample_id": ["a", "b"], "normalisation": "unit_cube", "count": [2, 1]})
    clouds = clouds.with_columns(pl.Series("points", points, dtype=pl.Array(pl.Float32, 12)))
    shapes = pl.DataFrame({"sample_id": ["a", "b"], "source": "scanobjectnn"})
    rows = splits().filter(protocol="MN1").with_columns(pl.lit("x").alias("class"))
    loaded = load_clouds(rows, shapes, clouds, {0: "x", 1: "x"}, "train")
    assert loaded.normalisation == "unit_cube"
    assert np.array_equal(loaded.clouds, points.reshape(2, 4, 3)[:, :2])
    assert load_clouds(rows, shapes, clouds, {0: "x"}, "valid").clouds.shape[0] == 0


def test_names_are_those_of_the_files() -> None:
    assert networks.names() == ("dgcnn", "pointnet2", "pointnext")
    assert len(methods.names()) == 8
