"""What is asked of the networks is checked before they are trained, and reaches them."""

from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from schemas.errors import ConfigError, SourceError
from schemas.threedos import Config, DetectionChoice, ShapeSettings
from tasks.threedos.clouds import load_clouds
from tasks.threedos.detection import (
    check_names,
    plan_networks,
    trainable,
    training_choice,
    training_setup,
)
from tasks.threedos.tracks import built_in_tracks

TRACKS = [track for track in built_in_tracks() if track.name in ("MN1", "MN2")]


def about(method: str, network: str = "dgcnn", scans: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"method": method, "network": network, "augmentation": "rw", "scans": scans}


@pytest.mark.parametrize("method", ["cross_entropy", "flow", "outlier_exposure"])
def test_label_smoothing_reaches_the_loss(method: str) -> None:
    plain = training_choice(DetectionChoice())
    smooth = training_choice(DetectionChoice(label_smoothing=0.2, epochs=3))
    assert training_setup(about(method), plain)[1].method.smoothing == 0
    network, setup = training_setup(about(method), smooth)
    assert (network, setup.method.smoothing, setup.training.epochs) == ("dgcnn", 0.2, 3)
    assert setup.training.augmentation == "rw"


def test_label_smoothing_leaves_methods_without_cross_entropy_alone() -> None:
    smooth = training_choice(DetectionChoice(label_smoothing=0.2))
    network, setup = training_setup(about("vae", "none"), smooth)
    assert network is None and not hasattr(setup.method, "smoothing")


@pytest.mark.parametrize(
    "choice, message",
    [
        (DetectionChoice(networks=("dgcn",)), "no point network 'dgcn'"),
        (DetectionChoice(scores=("mls", "mps")), "mps"),
    ],
)
def test_names_are_checked_before_anything_is_made(choice: DetectionChoice, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_names(choice)


@pytest.mark.parametrize("points", [1, 129])
def test_more_points_than_a_cloud_has_are_refused(points: int) -> None:
    with pytest.raises(ValidationError, match="expected 2 to 128"):
        Config(
            source={"modelnet40": "x"},
            shapes=ShapeSettings(points=128, candidates=512),
            detection=DetectionChoice(points=(64, points)),
        )


def splits() -> pl.DataFrame:
    rows = [
        ("MN1", "a", "train", "known", 0),
        ("MN1", "b", "train", "known", 1),
        ("MN1", "c", "test", "known", 0),
        ("MN1", "d", "test", "unknown", None),
        ("MN2", "d", "train", "known", 0),
        ("MN2", "e", "train", "known", 1),
        ("MN2", "f", "test", "known", 1),
    ]
    return pl.DataFrame(rows, ["track", "sample_id", "split", "role", "label"], orient="row")


def test_tracks_without_clouds_are_left_out_or_named() -> None:
    clouds = pl.Series(list("abcdef"))
    assert [track.name for track in trainable(TRACKS, splits(), clouds)] == ["MN1"]
    with pytest.raises(SourceError, match=r"MN2 cannot be trained on: .* no unknown test shapes"):
        trainable(TRACKS, splits(), clouds, ["MN2"])
    with pytest.raises(SourceError, match=r"MN1 cannot be trained on: .* no two labels"):
        trainable(TRACKS, splits(), pl.Series(list("acd")))


@pytest.mark.parametrize(
    "track, scans, points",
    [("SN1", [], 1024), ("SR2", ["test"], 1024), ("SR13", ["train", "valid", "test"], 2048)],
)
def test_scans_are_seen_whole_with_the_paper_s_settings(
    track: str, scans: list[str], points: int
) -> None:
    chosen = [one for one in built_in_tracks() if one.name == track]
    choice = DetectionChoice(preset="paper")
    data: dict = {"splits": (), "shapes": (), "point_clouds": ()}
    (shard,) = plan_networks(["cross_entropy"], choice, chosen, data)
    assert shard.about["scans"] == scans
    assert training_setup(shard.about, training_choice(choice))[1].training.points == points
    small = training_choice(DetectionChoice())
    assert training_setup(shard.about, small)[1].training.points == 256


def test_points_that_come_again_are_not_drawn() -> None:
    """A scan of 2 points in a table of 4 fills it by starting again."""
    points = np.arange(24, dtype=np.float32).reshape(2, 12)
    clouds = pl.DataFrame({"sample_id": ["a", "b"], "normalisation": "unit_cube", "count": [2, 1]})
    clouds = clouds.with_columns(pl.Series("points", points, dtype=pl.Array(pl.Float32, 12)))
    shapes = pl.DataFrame({"sample_id": ["a", "b"], "source": "scanobjectnn"})
    rows = (
        splits().filter(track="MN1").with_columns(pl.lit("x").alias(n) for n in ("class", "group"))
    )
    found = load_clouds(rows, shapes, clouds, {0: "x", 1: "x"}, "train")
    assert found.normalisation == "unit_cube"
    assert np.array_equal(found.clouds, points.reshape(2, 4, 3)[:, :2])
    assert load_clouds(rows, shapes, clouds, {0: "x"}, "valid").clouds.shape[0] == 0
