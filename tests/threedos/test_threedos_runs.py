"""What is asked of the models is checked before they are trained, and decides their runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from schemas.runs import RunFacts
from schemas.threedos import Config, ShapeSettings
from tasks import models
from tasks.engine.stage import Failure, Shard
from tasks.evaluation.model_runs import ModelRun, PlannedRun, make_runs, plan_facts
from tasks.evaluation.passing import model_of
from tasks.evaluation.runs import run_id
from tasks.learning.samples import Samples
from tasks.models.clouds import SMALL
from tasks.models.cross_entropy import CrossEntropy
from tasks.networks.dgcnn import Dgcnn
from tasks.threedos.runs import (
    density_views,
    plan_runs,
    scan_splits,
    settings_of_track,
    trainable,
)
from tasks.threedos.samples import load, points_seen
from tasks.threedos.splits import named_by_label
from tasks.threedos.tracks import Track, built_in_tracks
from tests.models import test_released_checkpoints as released

TRACKS = {track.name: track for track in built_in_tracks()}
MN = [TRACKS["MN1"], TRACKS["MN2"]]
KEYS = {name: {"fit_key": f"rows of {name}", "data_key": "all"} for name in TRACKS}


def configured(**choices: Any) -> Config:
    values = {"models": ["cross_entropy"], "device": "cpu", **choices}
    return Config(source={"modelnet40": Path("x")}, **values)


def plan(tracks: Sequence[Track] = MN, **choices: Any) -> list[ModelRun]:
    return plan_runs(configured(**choices), tracks)


def settings_of(model: str, track: str = "MN1", **choices: Any) -> Any:
    runs = plan([TRACKS[track]], models={model: choices.pop("own", {})}, **choices)
    return next(run.settings for run in runs if run.kind.name == model)


def planned(**choices: Any) -> list[PlannedRun]:
    config = configured(**choices)
    return plan_facts("threedos", config, plan_runs(config, MN), KEYS)


def runs(**choices: Any) -> dict[tuple[str | None, str, int | None], RunFacts]:
    made = [run.facts for run in planned(**choices)]
    return {(facts.protocol, facts.model, facts.seed): facts for facts in made}


def ids(**choices: Any) -> dict[tuple[str | None, str, int | None], str]:
    return {place: run_id(facts) for place, facts in runs(**choices).items()}


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("model", ["cross_entropy", "flow", "outlier_exposure"])
def test_a_setting_for_all_models_reaches_those_that_have_it(model: str) -> None:
    assert settings_of(model).smoothing == 0
    train = {"smoothing": "0.2", "epochs": 3}
    changed = settings_of(model, "SR1", train=train, own={"epochs": "4"})
    assert (changed.smoothing, changed.epochs) == (0.2, 4)
    assert changed.augmentation == "rw"


def test_a_model_of_clouds_needs_none_of_the_fields_of_the_others() -> None:
    kind, facts = (
        models.find("vae"),
        SimpleNamespace(settings={"loader": {"scan_splits": ["train"]}}),
    )
    assert settings_of_track(TRACKS["SR1"], "paper", kind, Settings()) == {}
    assert points_seen(Shard("a", about={}), facts, "train", Settings()) is None  # type: ignore[arg-type]


def test_a_preset_counts_where_a_model_or_its_network_has_one() -> None:
    plain = planned(models=["cross_entropy"], preset="paper")[0]
    assert plain.facts.preset == "paper"
    run = plain.run
    without = type("Without", (run.kind,), {"presets": {}})
    bare = replace(run, kind=without, shape=None, network=None)
    assert bare.preset("paper") == "none"


def test_a_setting_for_all_models_leaves_those_without_it_alone() -> None:
    made = {run.kind.name: run for run in plan(MN[:1], models="all", train={"smoothing": 0.2})}
    assert made["vae"].changed == {} and made["cross_entropy"].changed == {"smoothing": 0.2}


def test_a_setting_for_all_models_reaches_what_another_starts_from() -> None:
    made = {run.kind.name: run for run in plan(MN[:1], models=["outlier_exposure"], seeds=(3,))}
    assert made["cross_entropy"].settings.epochs == 60
    train = {"epochs": 2}
    made = {run.kind.name: run for run in plan(MN[:1], models=["outlier_exposure"], train=train)}
    assert made["outlier_exposure"].bases == (made["cross_entropy"],)
    assert {run.settings.epochs for run in made.values()} == {2}


def test_what_the_user_sets_wins_over_what_the_track_asks_for() -> None:
    assert settings_of("cross_entropy", "SR1").augmentation == "rw"
    assert settings_of("cross_entropy", "SR1", train={"augmentation": "st"}).augmentation == "st"
    assert settings_of("vae", "SR1").augmentation == "none"


@pytest.mark.parametrize(
    "track, epochs, rates",
    [("SN2", 500, (0.1, 1e-4)), ("SR1", 250, (0.1, 1e-4)), ("SR13", 250, (1e-3, 1e-5))],
)
def test_sub_arc_face_is_trained_by_track_as_released(
    track: str, epochs: int, rates: tuple[float, float]
) -> None:
    settings = settings_of("subcenter_arcface", track, preset="paper")
    assert (settings.epochs, settings.learning_rate, settings.final_rate) == (epochs, *rates)
    assert settings.optimizer == ("adam" if track == "SR13" else "sgd")
    assert settings_of("subcenter_arcface", track).epochs == 60
    assert settings_of("cosine_proto", track, preset="paper").optimizer == "sgd"
    other = settings_of("subcenter_arcface", track, preset="paper", networks=["pointnet2"])
    assert (other.epochs, other.optimizer, other.learning_rate) == (epochs, "adam", 1e-3)
    assert settings_of("subcenter_arcface", track, preset="paper", own={"epochs": 3}).epochs == 3


@pytest.mark.parametrize("preset, order", [("paper", "full"), ("small", "shuffled")])
def test_the_release_learns_from_full_batches(preset: str, order: str) -> None:
    assert settings_of("cross_entropy", "SN1", preset=preset).order == order
    assert settings_of("vae", "SN1", preset=preset).order == "shuffled"


def test_the_release_learns_in_float32() -> None:
    for model in ("cross_entropy", "vae"):
        assert settings_of(model, preset="paper").precision == "float32"
        assert settings_of(model, device="cpu").precision == "float32"
        assert models.find(model).resolve("small", network="dgcnn").precision == "auto"


@pytest.mark.parametrize(
    "track, scans, points",
    [("SN1", [], 1024), ("SR2", ["test"], 1024), ("SR13", ["train", "valid", "test"], 2048)],
)
def test_scans_are_seen_whole_with_the_paper_s_settings(
    track: str, scans: list[str], points: int
) -> None:
    assert scan_splits(TRACKS[track]) == scans
    settings = settings_of("cross_entropy", track, preset="paper")
    assert (settings.points, settings.scan_points) == (points, 2048)
    small = settings_of("cross_entropy", track)
    assert (small.points, small.scan_points) == (256, None)
    changed = settings_of("cross_entropy", track, preset="paper", train={"points": 64})
    assert changed.points == 64


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"models": ["cross_entrop"]}, "no model 'cross_entrop'; there are: arpl"),
        ({"networks": ["dgcn"]}, "no network 'dgcn'"),
        ({"networks": []}, "model cross_entropy needs a network: name one of dgcnn, pointnet2"),
        ({"scores": ["mls", "mps"]}, "no score 'mps'"),
        ({"models": ["supcon"], "scores": ["mls"]}, "score mls fits none of the models supcon"),
        ({"predictors": ["ann"]}, "predictor ann does not fit"),
        ({"preset": "tiny"}, "no preset 'tiny'"),
        ({"models": {"cross_entropy": {"epoch": 3}}}, "cross_entropy: .*epoch is not a setting"),
        ({"models": {"cross_entropy": {"epochs": 0}}}, "cross_entropy: .*epochs"),
        ({"networks": {"dgcnn": {"k": "many"}}}, "dgcnn: .*k: "),
        ({"train": {"margin": 1}}, "train.margin: none of the models cross_entropy has it"),
        ({"models": [], "train": {"epochs": 1}}, "train.epochs: there is no model"),
        (
            {"densities": (64, 128), "train": {"points": 32}},
            "train sets points or scan_points, and so does densities",
        ),
        (
            {"densities": (64,), "models": {"vae": {"scan_points": 32}}},
            "models.vae sets points or scan_points, and so does densities",
        ),
        (
            {"models": {"outlier_exposure": {"hidden": 8}}},
            "outlier_exposure builds on one run of cross_entropy with hidden 8 .*, found 0 among 1",
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


@pytest.mark.parametrize("name", ["points", "densities"])
@pytest.mark.parametrize(
    "points, message", [(1, "expected 2 to 128"), (129, "expected 2 to 128"), (64, "stands twice")]
)
def test_more_points_than_a_cloud_has_are_refused(name: str, points: int, message: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name}\b.*{message}|{message} in {name}"):
        Config(
            source={"modelnet40": Path("x")},
            shapes=ShapeSettings(points=128, candidates=512),
            **{name: (64, points)},
        )


# ---------------------------------------------------------------- runs


def test_every_model_network_and_seed_is_a_run_and_bases_come_first() -> None:
    made = planned(models="all", networks="all", seeds=(0, 1))
    assert len({run.mark.run_id for run in made}) == len(made) == 2 * 2 * (7 * 3 + 2)
    frozen = {run.facts.model: run.facts.base_runs for run in made if run.embedding}
    assert list(frozen) == ["view_backbone"] and len(frozen["view_backbone"]) == 1
    made = [run for run in made if not run.embedding]
    seen: dict[str, RunFacts] = {}
    for run in made:
        for base in run.facts.base_runs:
            assert (seen[base].model, run.facts.model) == ("cross_entropy", "outlier_exposure")
            for name in ("protocol", "network", "seed"):
                assert getattr(seen[base], name) == getattr(run.facts, name)
        seen[run.mark.run_id] = run.facts
    assert sum(len(facts.base_runs) for facts in seen.values()) == 2 * 2 * 3
    assert {facts.network for facts in seen.values() if facts.model == "vae"} == {"none"}


def test_all_settings_are_in_the_facts() -> None:
    unkept = {"checkpoint_every", "checkpoint_seconds", "weights"}
    for facts in runs(models="all", train={"epochs": 7, "checkpoint_every": 3}).values():
        fields = models.find(facts.model).configuration.model_fields
        of_run = {"loader", *(["network"] if facts.network != "none" else [])}
        assert facts.settings.keys() - of_run == fields.keys() - unkept
        assert facts.settings["loader"] == {"scan_splits": []}
        assert facts.changed == {"epochs": 7}
        assert facts.versions.keys() >= {"model", "loader", "trainer"}


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
        patch.setattr("tasks.evaluation.model_runs.TRAINER_VERSION", 2)
        assert changed() == {"cross_entropy", "vae"}
    with monkeypatch.context() as patch:
        patch.setattr("tasks.threedos.samples.LOADER_VERSION", 2)
        assert changed() == {"cross_entropy", "vae"}
    assert changed() == set()


def test_a_changed_base_changes_what_starts_from_it() -> None:
    before = ids(models=["outlier_exposure"])
    after = ids(models={"outlier_exposure": {}, "cross_entropy": {"epochs": 61}})
    assert all(after[place] != before[place] for place in before)


class FailingBuild:
    """A build in which every training fails."""

    def __init__(self) -> None:
        self.dry, self.failures, self.pieces = None, [], []

    def run_each(self, stage: Any, shards: list[Shard], settings: Any) -> list[Any]:
        self.failures += [Failure(shard, stage.name, "diverged") for shard in shards]
        return []

    def run(self, stage: Any, shards: list[Shard], settings: Any) -> None:
        self.recorded = shards

    def table(self, name: str) -> tuple[()]:
        return ()


def test_what_starts_from_a_failed_run_fails_with_the_reason() -> None:
    choices = {"models": ["outlier_exposure"], "networks": ["dgcnn"]}
    made, build = planned(**choices), FailingBuild()
    assert make_runs(build, made, lambda run: (), configured(**choices)) == []  # type: ignore[arg-type]
    names = {run.facts.protocol: run.name for run in made if not run.bases}
    reasons = {(f.shard.run.protocol, f.reason) for f in build.failures if f.shard.run}
    lost = {(track, f"it builds on {name}, which failed") for track, name in names.items()}
    assert reasons == lost | {(track, "diverged") for track in names}
    assert len(build.recorded) == len(made) == 4


def test_a_run_is_trained_and_tested_at_each_density() -> None:
    sweep = {"models": ["outlier_exposure", "vae"], "densities": (64, 512)}
    made = planned(**sweep)
    assert len({run.mark.run_id for run in made}) == len(made) == 2 * 2 * 3
    shard = Shard("a", about={})
    for run in made:
        points = run.run.settings.points
        assert run.facts.changed == {"points": points, "scan_points": points}
        for split in ("train", "test"):
            assert points_seen(shard, run.facts, split, run.run.settings) == points
        for base in run.bases:
            assert base.run.settings.points == points
    assert {run.run.settings.points for run in made} == {64, 512}
    one = {run.mark.run_id for run in planned(**{**sweep, "densities": (512,)})}
    assert one < {run.mark.run_id for run in made}


def test_smoothing_preset_and_density_make_runs_of_their_own() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"train": {"smoothing": 0.1}},
        {"preset": "paper"},
        {"densities": (512,)},
    ]
    made = [set(ids(**choices).values()) for choices in variants]
    assert len(set.union(*made)) == sum(len(some) for some in made) == 4 * 2


def test_a_released_file_is_checked_before_any_work_and_decides_its_run(tmp_path: Path) -> None:
    path = tmp_path / "model_last.pth"

    def facts(**choices: Any) -> RunFacts:
        own = {**released.SIZES, "weights": path}
        sizes = {"dgcnn": {"k": 4, "widths": released.WIDTHS, "fused": released.FUSED}}
        choices = {"models": {"cross_entropy": own}, "networks": sizes, **choices}
        config = configured(**choices)
        (run,) = plan_facts("threedos", config, plan_runs(config, MN[:1]), KEYS)
        return run.facts

    with pytest.raises(SourceError, match="does not exist"):
        facts()
    released.save(path, "cross_entropy", classes=18)
    with pytest.raises(SourceError, match="is for 18 classes, the track has 5 known ones"):
        facts()
    released.save(path, "cross_entropy", classes=5)
    made = facts()
    assert made.origin == "frozen" and made.changed["weights"] == made.weights["weights"][:8]
    with pytest.raises(ConfigError, match="weights is one training, but there are 2 seeds"):
        facts(seeds=(1, 41))
    with pytest.raises(SourceError, match="does not fit cross_entropy on dgcnn"):
        facts(networks=["dgcnn"])
    released.save(path, "cosine_proto", classes=5)
    with pytest.raises(SourceError, match="does not fit cross_entropy on dgcnn"):
        facts()
    assert run_id(made) != run_id(made.model_copy(update={"weights": {}}))
    assert {run.facts.origin for run in planned()} == {"trained"}


def test_each_density_is_a_view() -> None:
    views = density_views((64, 512))
    assert [view.name for view in views] == ["plain", "points_64", "points_512"]
    assert [dict(view.settings) for view in views] == [{}, {"points": 64}, {"points": 512}]


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


class Rows(NamedTuple):
    """A table as a part of a shard has it."""

    table: str
    rows: pl.DataFrame
    shard: str = "MN1"

    def read(self, columns: Sequence[str] | None = None) -> pl.DataFrame:
        return self.rows.select(columns or pl.all())


def shard_of(about: dict[str, Any] | None = None) -> Shard:
    """Shapes of MN1 with two, one, four and four points; an unlearnt class has the fifth."""
    points = np.arange(60, dtype=np.float32).reshape(5, 12)
    clouds = pl.DataFrame({"sample_id": list("abcde"), "normalisation": "unit_cube"})
    clouds = clouds.with_columns(
        pl.Series("count", [2, 1, 4, 4, 4]),
        pl.Series("points", points, dtype=pl.Array(pl.Float32, 12)),
    )
    mesh = pl.col("sample_id") == "c"
    unlearnt = splits()[2:3].with_columns(sample_id=pl.lit("e"), label=pl.lit(2, pl.Int64))
    rows = pl.concat([splits(), unlearnt])
    labels = pl.col("label").replace_strict({0: 4, 1: 7, 2: 9}, default=None)
    names = pl.col("label").replace_strict({0: "x", 1: "y"}, default="z", return_dtype=pl.String)
    rows = rows.with_columns(labels, names.alias("class"))
    parts: Any = (
        Rows("splits", rows),
        Rows("point_clouds", clouds.filter(~mesh), "scanobjectnn/0"),
        Rows("point_clouds", clouds.filter(mesh), "modelnet40/0"),
    )
    return Shard("MN1", parts=parts, about=about or {})


def loaded(split: str, about: dict[str, Any] | None = None, **changes: Any) -> Samples:
    """As a track with scans in its test split would have it."""
    facts = planned(train=changes)[0].facts
    settings = {**facts.settings, "loader": {"scan_splits": ["test"]}}
    facts = facts.model_copy(update={"settings": settings})
    return load(shard_of(about), facts, split, model_of(facts))


def test_clouds_are_upright_and_points_that_come_again_are_not_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scan of 2 points in a table of 4 fills it by starting again."""
    with pytest.raises(SourceError, match="2 training shapes have a cloud, too few to train on"):
        loaded("train")
    monkeypatch.setattr("tasks.threedos.samples.require_training", lambda *_: None)
    train, test = loaded("train"), loaded("test")
    points = np.arange(60, dtype=np.float32).reshape(5, 4, 3)
    assert (train.ids, test.ids) == (["a", "b"], ["c", "d"])
    assert np.array_equal(train.array("clouds"), points[:2, :2])
    turned = np.stack([points[2, :, 0], points[2, :, 2], -points[2, :, 1]], -1)
    assert np.array_equal(test.array("clouds"), [turned, points[3]])
    # Labels count the trained classes; one of a class without training shapes is left out.
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1], [0, -1])
    assert list(train.classes) == list(test.classes) == ["x", "y"]
    assert len(loaded("valid")) == 0


def test_a_pass_sees_the_points_of_its_view_or_all_of_a_scan() -> None:
    assert loaded("test").about == {"normalisation": "unit_cube", "points": 256}
    assert loaded("test", scan_points=2048).about["points"] == 2048
    assert loaded("valid", scan_points=2048).about["points"] == 256
    density = {"view": "points_64", "view_settings": {"points": 64}}
    assert loaded("test", density, scan_points=2048).about["points"] == 64
