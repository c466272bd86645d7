"""What NovelCraft's detectors learn from and score: pictures, symbolic sequences, pairs of scores.

Enters: the parts of a detection shard. Leaves: `Loaded` samples of one split. Labels are indices of
the normal classes; frames of other classes are novel. Pictures are those that pass the 1 % filter;
the symbolic task takes whole episodes, and a frame is novel if its game is (NovelCraft 5.1, 5.2).
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import ConfigError
from schemas.novelcraft import DetectorChoice
from storage.parquet import read_parquet
from storage.pieces import Part
from tasks.detection import EvaluateSettings, Loaded, TrainSettings
from tasks.detectors import find_detector
from tasks.detectors.base import NOVEL, Detector, Samples
from tasks.detectors.multimodal import paired_scores
from tasks.novelcraft.classes import NORMAL
from tasks.novelcraft.symbols import symbol_sequences
from tasks.stage import Build, Shard

LOADER = "tasks.novelcraft.samples:load"


EVALUATION = EvaluateSettings(
    conventions={
        "visual": ("novelcraft-2022", "novelcraft-tmlr"),
        "fused": ("novelcraft-2022",),
        "symbolic_windows": ("novelcraft-symbolic",),
    }
)


def train_settings(choice: DetectorChoice) -> TrainSettings:
    names = ("preset", "seed", "device", "threads")
    return TrainSettings(**{name: getattr(choice, name) for name in names})


def options_of(choice: DetectorChoice) -> dict[str, list[dict[str, Any]]]:
    """What differs from the presets: orders of the symbolic model, what is fused with it."""
    return {
        "symbolic_mlp": [{"order": order} for order in choice.orders],
        "multimodal": [{"visual": choice.fused_visual}],
    }


def weights_of(choice: DetectorChoice) -> dict[str, Path]:
    """Checkpoint files that networks start from."""
    path = choice.vgg_weights
    return {} if path is None else {"vgg_classifier": path, "ndcc": path}


def data_of(build: Build) -> Callable[[str], tuple[Part, ...]]:
    """The parts that the loader reads for a detector."""

    def parts(detector: str) -> tuple[Part, ...]:
        needs = find_detector(detector).needs
        if "images" in needs:
            tables = ("splits", "images")
        elif "counts" in needs:
            tables = ("splits", "frames", "inventory", "windows")
        else:
            tables = ("scores",)
        return tuple(part for table in tables for part in build.table(table))

    return parts


def load(shard: Shard, split: str, detector: Detector) -> Loaded:
    """Samples of a split in the form that the detector needs."""
    if "images" in detector.needs:
        return load_pictures(shard, split)
    if "counts" in detector.needs:
        return _sequences(shard, split, detector)
    return _pairs(shard, split, detector)


def _about(rows: pl.DataFrame) -> tuple[pl.DataFrame, np.ndarray]:
    about = rows.select(
        pl.col("frame_id").alias("sample_id"), "class", (pl.col("role") != "normal").alias("novel")
    )
    index = {name: number for number, name in enumerate(NORMAL)}
    label = pl.col("class").replace_strict(index, default=NOVEL, return_dtype=pl.Int64)
    return about, about.select(label).to_series().to_numpy()


def load_pictures(shard: Shard, split: str) -> Loaded:
    """Frames of a split that pass the filter, as pictures; for training, of normal classes only."""
    rows = shard.read("splits").filter(pl.col("kept") & (pl.col("split") == split))
    if split == "train":
        rows = rows.filter(pl.col("role") == "normal")
    rows = rows.sort("frame_id")
    about, labels = _about(rows)
    parts = tuple(part for part in shard.parts if part.table == "images")
    images = decode_pictures(parts, tuple(rows["frame_id"]))
    return Loaded(
        Samples(rows["frame_id"].to_list(), labels, {"images": images}), about, NORMAL, "visual"
    )


@lru_cache(maxsize=3)
def decode_pictures(parts: tuple[Part, ...], frame_ids: tuple[str, ...]) -> np.ndarray:
    """RGB pictures (N, H, W, 3) in the order of the ids; kept for the next detector of a build."""
    import cv2

    row_of = {frame_id: row for row, frame_id in enumerate(frame_ids)}
    images: np.ndarray | None = None
    for part in parts:
        rows = read_parquet([part.path], ["frame_id", "png"])
        for frame_id, png in rows.filter(pl.col("frame_id").is_in(list(frame_ids))).iter_rows():
            picture = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR_RGB)
            if images is None:
                images = np.zeros((len(frame_ids), *picture.shape), np.uint8)
            images[row_of[frame_id]] = picture
    return np.zeros((0, 1, 1, 3), np.uint8) if images is None else images


def _sequences(shard: Shard, split: str, detector: Detector) -> Loaded:
    splits = shard.read("splits").filter(pl.col("split") == split)
    if split == "train":
        splits = splits.filter(pl.col("role") == "normal")
    frames = shard.read("frames").join(splits.select("frame_id", "role"), on="frame_id")
    changed = (
        shard.read("windows", ["episode_id", "novel"])
        .group_by("episode_id")
        .agg(pl.col("novel").any())
    )
    sequences = symbol_sequences(frames.drop("role"), shard.read("inventory"))
    about = (
        pl.DataFrame({"frame_id": sequences.ids})
        .join(
            frames.select("frame_id", "class", "episode_id"), on="frame_id", maintain_order="left"
        )
        .join(changed, on="episode_id", how="left", maintain_order="left")
        .select(pl.col("frame_id").alias("sample_id"), "class", pl.col("novel").fill_null(False))
    )
    labels = np.where(about["novel"].to_numpy(), NOVEL, 0).astype(np.int64)
    samples = sequences.samples(detector.settings.order, labels)
    return Loaded(samples, about, NORMAL, "symbolic")


def _pairs(shard: Shard, split: str, detector: Detector) -> Loaded:
    """Frames that a visual and a symbolic detector scored; normal validation ones calibrate."""
    scores = shard.read("scores").filter(
        pl.col("split") == ("valid" if split == "train" else split)
    )
    found = []
    for name in (detector.settings.visual, detector.settings.symbolic):
        rows = scores.filter(pl.col("detector") == name)
        first = rows["backbone"].unique().sort().head(1)
        found.append(rows.filter(pl.col("backbone").is_in(first)).rename({"sample_id": "frame_id"}))
    visual, symbolic = found
    if visual.is_empty() or symbolic.is_empty():
        raise ConfigError(
            f"detector {detector.name} needs scores of {detector.settings.visual} and "
            f"{detector.settings.symbolic}; ask for these detectors too"
        )
    if split == "train":
        visual = visual.filter(~pl.col("novel"))
    visual = visual.join(
        symbolic.select("frame_id"), on="frame_id", how="semi", maintain_order="left"
    )
    labels = np.where(visual["novel"].to_numpy(), NOVEL, 0).astype(np.int64)
    samples = paired_scores(visual, symbolic, labels)
    about = visual.select(pl.col("frame_id").alias("sample_id"), "class", "novel")
    return Loaded(samples, about, NORMAL, "fused")
