"""The trivial baseline: the density it claims, and the published numbers on real CIFAR-10."""

import csv
import io
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image
from scipy.stats import multivariate_normal
from sklearn.metrics import average_precision_score

from schemas.config import Settings
from schemas.semantic import Config, PictureSettings, TrialSettings
from storage.raw import open_raw
from tasks.engine.stage import Build
from tasks.evaluation.protocols import key_protocols, protocol_keys
from tasks.evaluation.stages import (
    EvaluationSettings,
    chosen_scores,
    evaluate_scores,
    plan_evaluation,
    plan_scores,
    score_outputs,
)
from tasks.semantic.detection import fit_gaussian
from tasks.semantic.detection_plan import Run, all_trials, plan_gaussians
from tasks.semantic.ingest import plan_image_shards, read_images
from tasks.semantic.models.pixel_gaussian import (
    Sums,
    negative_log_density,
    noisy,
    shrunk_side,
)
from tasks.semantic.sources import Listing, list_images
from tasks.semantic.trials import (
    declared_subsets,
    make_trial,
    plan_keys,
    plan_trials,
    resolve_subsets,
)
from tests.shared import shared_path

PARTS = {"train": "train_first1000", "test": "test"}
# One draw of noise moves an AP by 0.004 (standard deviation over seeds); the file has two digits.
TOLERANCE = 0.012


def some(count: int, side: int, seed: int = 0) -> tuple[np.ndarray, pl.Series]:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)
    return pixels, pl.Series([f"{seed}/{number}" for number in range(count)])


def test_the_density_is_that_of_three_gaussians():
    train, known = some(200, 3)
    test, ids = some(7, 3, seed=1)
    fitted, points = noisy(train, known, 5), noisy(test, ids, 5)
    ours = negative_log_density(points, Sums.of(train, known, 5))
    plain = -sum(
        multivariate_normal(part.mean(0), np.cov(part.T, bias=True)).logpdf(points[channel])
        for channel, part in enumerate(fitted)
    )
    assert np.allclose(ours, plain, rtol=1e-9)


def test_noise_goes_by_image_and_seed():
    pixels, ids = some(6, 2)
    whole = noisy(pixels, ids, 3)
    assert np.array_equal(whole[:, 4:], noisy(pixels[4:], ids[4:], 3))
    assert not np.array_equal(whole, noisy(pixels, ids, 4))
    noise = whole * 256 % 1
    assert len(np.unique(noise)) == noise.size  # no two pixels share theirs
    back = np.floor(whole * 256).reshape(3, 6, 2, 2).transpose(1, 2, 3, 0)
    assert np.array_equal(back, pixels)


@pytest.mark.parametrize(
    ("side", "images", "expected"), [(32, 9000, 32), (32, 2048, 32), (32, 2047, 16), (32, 3, 1)]
)
def test_pictures_shrink_until_there_are_images_enough(side, images, expected):
    assert shrunk_side(side, images) == expected


def planned(
    build: Build, listings: list[Listing], how: PictureSettings, **choice: object
) -> list[Run]:
    """Runs of the baseline, with all that comes before them."""
    config = Config(source={"mine": Path("raw")}, **choice)
    build.run(read_images, plan_image_shards(listings), how)
    subsets = resolve_subsets(declared_subsets(None), build.read("images"))
    build.run(make_trial, plan_trials(subsets, build.table("images")), TrialSettings())
    parts = build.table("splits"), build.table("samples")
    build.run(key_protocols, plan_keys(subsets, TrialSettings(), *parts), Settings())
    trials = all_trials(build, subsets, protocol_keys(build))
    return plan_gaussians(config, trials, build.read("splits"))


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
        runs = planned(build, listings, PictureSettings(keep=("mine",)), seeds=(0, 1))
        made = [fit_gaussian(run.pass_shard(), Settings()).tables for run in runs]
    facts = [run.facts for run in runs]
    assert [(f.protocol, f.settings, f.seed) for f in facts] == [
        ("mine/one", {"side": 2}, 0), ("mine/one", {"side": 2}, 1),
    ]  # fmt: skip
    assert [len(tables["outputs"]) for tables in made] == [4, 4]
    assert made[0]["outputs"]["novelty"].to_list() != made[1]["outputs"]["novelty"].to_list()
    assert "mine/many: no baseline" in capsys.readouterr().err


def test_a_named_baseline_is_made_of_the_named_trials(tmp_path):
    raw = tmp_path / "raw"
    write_classes(raw, {(c, s): 6 for c in "abc" for s in ("train", "test")})
    listings = [list_images("mine", open_raw(raw))]
    how = PictureSettings(keep=("mine",))
    with Build("semantic", tmp_path / "lake", workers=1) as build:
        every = planned(build, listings, how, protocols=("a",))
    with Build("semantic", tmp_path / "lake", workers=1) as build:
        named = {"trivial_baseline": False, "protocols": ("mine/a",)}
        one = planned(build, listings, how, models={"pixel_gaussian": {"side": 1}}, **named)
    with Build("semantic", tmp_path / "lake", workers=1) as build:
        assert planned(build, listings, how, trivial_baseline=False) == []
    assert [run.facts.protocol for run in every] == ["mine/a", "mine/b", "mine/c"]
    assert [(run.facts.protocol, run.facts.changed) for run in one] == [("mine/a", {"side": 1})]


def published() -> dict[str, float]:
    with shared_path("images/expected/trivial_baseline_computed.csv").open(newline="") as file:
        return {
            row["held_out"]: float(row["average_precision"])
            for row in csv.DictReader(file)
            if row["train_images"].startswith("train_first1000")
        }


def real(part: str) -> tuple[np.ndarray, pl.DataFrame]:
    path = shared_path(f"images/cifar10/cifar10_jpeg_{PARTS[part]}.zip")
    with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        read = [np.asarray(Image.open(io.BytesIO(archive.read(n))).convert("RGB")) for n in names]
    frame = pl.DataFrame({"sample_id": [f"cifar10/{name.removesuffix('.jpg')}" for name in names]})
    return np.stack(read), frame.with_columns(
        pl.col("sample_id").str.split("/").list.get(2).alias("class")
    )


def test_one_class_of_real_cifar10():
    held = "horse"
    train, known = real("train")
    test, rows = real("test")
    normal = (known["class"] != held).to_numpy()
    fitted = Sums.of(train[normal], known.filter(pl.col("class") != held)["sample_id"], 0)
    scores = negative_log_density(noisy(test, rows["sample_id"], 0), fitted)
    found = 100 * average_precision_score((rows["class"] == held).to_numpy(), scores)
    assert abs(found - published()[held]) < TOLERANCE


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
        runs = planned(build, listings, PictureSettings())
        fitted = build.run(fit_gaussian, [run.pass_shard() for run in runs], Settings())
        passed = [run.passed(piece) for run, piece in zip(runs, fitted, strict=True)]
        shards = plan_scores(passed, chosen_scores({"own": {}}))
        scored = build.run(score_outputs, shards, Settings())
        evaluated = plan_evaluation(passed, scored, ("semantic",))
        build.run(evaluate_scores, evaluated, EvaluationSettings(draws=0))
        metrics = build.read("metrics")
    assert {run.facts.settings["side"] for run in runs} == {32}
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
