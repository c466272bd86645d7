"""Runs of the trivial baseline: which trials have one, at which side, and the published numbers."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from schemas.config import Settings
from schemas.semantic import Config, PictureSettings, TrialSettings
from storage.raw import open_raw
from tasks.engine.stage import Build
from tasks.evaluation import model_runs
from tasks.evaluation.model_runs import PlannedRun, make_runs, plan_facts, plan_models
from tasks.evaluation.protocols import key_protocols, protocol_keys
from tasks.evaluation.stages import chosen_scores, measure_runs
from tasks.semantic.ingest import plan_image_shards, read_images
from tasks.semantic.offers import all_trials, offers_of, with_own_models
from tasks.semantic.sources import Listing, list_images
from tasks.semantic.trials import (
    declared_subsets,
    make_trial,
    plan_keys,
    plan_trials,
    resolve_subsets,
)
from tests.models.test_pixel_gaussian import PARTS, TOLERANCE, published
from tests.shared import shared_path


class Planned:
    """Runs of the baseline, with all that comes before them."""

    def __init__(
        self, build: Build, listings: list[Listing], how: PictureSettings, **choice: object
    ) -> None:
        self.config = with_own_models(Config(source={"mine": Path("raw")}, **choice))
        build.run(read_images, plan_image_shards(listings), how)
        subsets = resolve_subsets(declared_subsets(None), build.read("images"))
        build.run(make_trial, plan_trials(subsets, build.table("images")), TrialSettings())
        parts = build.table("splits"), build.table("samples")
        build.run(key_protocols, plan_keys(subsets, TrialSettings(), *parts), Settings())
        trials = all_trials(build, subsets)
        self.parts = {trial.protocol: trial.parts for trial in trials}
        offers = offers_of(self.config, trials, build.read("splits"))
        models = plan_models("semantic", self.config, offers)
        self.runs = plan_facts("semantic", self.config, models, protocol_keys(build))

    def parts_of(self, run: PlannedRun) -> tuple:
        return self.parts[run.run.offer.protocol]


def write_classes(raw: Path, counts: dict[tuple[str, str], int]) -> None:
    rng = np.random.default_rng(0)
    for (class_, split), number in counts.items():
        for place in range(number):
            path = raw / split / class_ / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(path)


def test_trials_without_training_images_are_left_out(tmp_path, capsys):
    """Two classes, one with a single training image: holding out the other leaves no Gaussian."""
    raw = tmp_path / "raw"
    counts = {("many", "train"): 9, ("many", "test"): 2, ("one", "train"): 1, ("one", "test"): 2}
    write_classes(raw, counts)
    with Build("semantic", tmp_path / "lake", workers=1) as build:
        listings = [list_images("mine", open_raw(raw))]
        planned = Planned(build, listings, PictureSettings(keep=("mine",)), seeds=(0, 1))
        make_runs(build, planned.runs, planned.parts_of, planned.config)
        outputs = build.read("outputs")
    facts = [run.facts for run in planned.runs]
    assert [(f.protocol, f.settings, f.changed, f.seed) for f in facts] == [
        ("mine/one", {"side": 2}, {}, 0), ("mine/one", {"side": 2}, {}, 1),
    ]  # fmt: skip
    first, second = (outputs.filter(run_id=run.mark.run_id) for run in planned.runs)
    assert first.height == second.height == 4
    assert first["novelty"].to_list() != second["novelty"].to_list()
    assert "mine/many: no baseline" in capsys.readouterr().err


def test_many_samples_are_passed_in_shares(tmp_path, monkeypatch):
    """Shares have the same rows as one pass."""
    raw = tmp_path / "raw"
    write_classes(raw, {(c, s): 8 for c in "ab" for s in ("train", "test")})
    listings = [list_images("mine", open_raw(raw))]
    rows, parts = [], []
    for number, limit in enumerate((50_000, 9)):
        monkeypatch.setattr(model_runs, "SAMPLES_PER_PASS", limit)
        with Build("semantic", tmp_path / f"lake{number}", workers=1) as build:
            planned = Planned(build, listings, PictureSettings(keep=("mine",)))
            passed = make_runs(build, planned.runs, planned.parts_of, planned.config)
            rows.append(build.read("outputs").sort("run_id", "sample_id"))
        parts.append({len(run.outputs) for run in passed})
    assert rows[0].equals(rows[1]) and rows[0].height == 2 * 16
    assert parts == [{1}, {3}]


def test_a_named_baseline_is_made_of_the_named_trials(tmp_path):
    raw = tmp_path / "raw"
    write_classes(raw, {(c, s): 6 for c in "abc" for s in ("train", "test")})
    listings = [list_images("mine", open_raw(raw))]
    how = PictureSettings(keep=("mine",))

    def planned(**choice: object) -> list[tuple]:
        with Build("semantic", tmp_path / "lake", workers=1) as build:
            runs = Planned(build, listings, how, **choice).runs
        return [(run.facts.protocol, run.facts.changed) for run in runs]

    every = planned(protocols=("a",))
    assert every == [("mine/a", {}), ("mine/b", {}), ("mine/c", {})]
    named = {"trivial_baseline": False, "protocols": ("mine/a",)}
    one = planned(models={"pixel_gaussian": {"side": 1}}, **named)
    assert one == [("mine/a", {"side": 1})]
    assert planned(trivial_baseline=False) == []


@pytest.mark.slow
def test_all_of_real_cifar10_through_the_stages(tmp_path: Path):
    with Build("semantic", tmp_path / "lake", workers=2) as build:
        listings = [
            list_images(
                f"cifar10.{part}",
                open_raw(shared_path(f"images/cifar10/cifar10_jpeg_{name}.zip")),
            )
            for part, name in PARTS.items()
        ]
        planned = Planned(build, listings, PictureSettings())
        passed = make_runs(build, planned.runs, planned.parts_of, planned.config)
        measure_runs(build, passed, chosen_scores({"own": {}}), lambda _: ("semantic",))
        metrics = build.read("metrics")
    assert {run.facts.settings["side"] for run in planned.runs} == {32}
    assert metrics.filter(metric="skew")["value"].unique().to_list() == [0.1]
    found = {
        protocol.removeprefix("cifar10/"): 100 * value
        for protocol, value in metrics.filter(metric="average_precision")
        .select("protocol", "value")
        .iter_rows()
    }
    expected = published()
    assert set(found) == set(expected) and len(found) == 10
    assert max(abs(found[name] - expected[name]) for name in expected) < TOLERANCE
    assert abs(sum(found.values()) / 10 - 10.97) < 0.005
