"""The trivial baseline (Appendix D): one full-covariance Gaussian over the pixels of each channel.

Enters: TRIALS and PICTURES of one subset, seeds. Leaves: SCORES of the test images of every trial.
x = (pixel + U(0, 1)) / 256; the score is minus the sum of the three log densities. It is no
mixture, whatever the paper calls it.

Sums and products over all training images are taken once; those of a trial are what is left without
its held-out member, so ten trials cost little more than one. The noise of an image goes by the seed
and its id. A covariance needs more images than pixels: pictures are shrunk by halves until there
are twice as many, and `backbone` tells the side.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from schemas.older_tables import SCORES
from schemas.semantic import GaussianSettings
from storage.pieces import Part
from tasks.semantic.cache import PictureCache
from tasks.semantic.trials import Subset, parts_of
from tasks.stage import Produced, Shard, stage

if TYPE_CHECKING:
    from tasks.detection import EvaluateSettings

NAME = "channel_gaussian"
CHUNK = 2048
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


def plan_baseline(
    subsets: Sequence[Subset],
    seeds: Sequence[int],
    trials: Sequence[Part],
    pictures: Sequence[Part],
) -> list[Shard]:
    """One shard per subset: its trials share what they are fitted to."""
    return [
        Shard(
            subset.name,
            parts=tuple(p for p in trials if p.shard.partition("/")[0] == subset.name)
            + parts_of(subset.dataset, pictures),
            about={"subset": subset.name, "seeds": list(seeds)},
        )
        for subset in subsets
    ]


def evaluation(subsets: Sequence[Subset]) -> "EvaluateSettings":
    """The paper's convention for every trial."""
    from tasks.detection import EvaluateSettings  # loads torch, which scoring does not need

    names = [f"{subset.name}/{name}" for subset in subsets for name in subset.members.values()]
    return EvaluateSettings(conventions=dict.fromkeys(names, ("semantic",)))


@stage(writes=(SCORES,), version=1, alone=True)
def score_baseline(shard: Shard, settings: GaussianSettings) -> Produced:
    """Score the test images of every trial of a subset with the trivial baseline."""
    from threadpoolctl import threadpool_limits

    trials = _scorable(shard.read("trials").sort("trial", "split", "image_id"))
    files = [part.path for part in shard.parts if part.table == "pictures"]
    scores = SCORES.empty()
    if not trials.is_empty():
        pictures = _pictures_of(trials, files, settings.side)
        with threadpool_limits(1):  # the last digits of a product depend on the number of threads
            frames = [
                frame
                for seed in shard.about["seeds"]
                for frame in _score_seed(shard.about["subset"], trials, *pictures, seed)
            ]
        scores = pl.concat([scores, *frames])
    return Produced({"scores": scores}, scores.height)


def _scorable(trials: pl.DataFrame) -> pl.DataFrame:
    """The trials that have a Gaussian (of one image there is no covariance) and a test image."""
    train, test = ((pl.col("split") == name).sum().over("trial") for name in ("train", "test"))
    ready = (train >= 2) & (test >= 1)
    if names := trials.filter(~ready)["trial"].unique().sort().to_list():
        print(
            f"  {', '.join(names)}: no baseline, as less than 2 training images or no test image "
            "are there",
            file=sys.stderr,
        )
    return trials.filter(ready)


def _pictures_of(
    trials: pl.DataFrame, files: Sequence[Path], side: int
) -> tuple["_Pictures", "_Pictures"]:
    """The training and the test images of all trials, shrunk as far as the smallest trial needs."""
    in_train = pl.col("split") == "train"
    ids = [
        trials.filter(chosen)["image_id"].unique().sort()
        for chosen in (in_train, pl.col("split") == "test")
    ]
    train, test = (PictureCache.read(files, chosen) for chosen in ids)
    fewest = trials.filter(in_train).group_by("trial").len()["len"].to_numpy().min()
    side = shrunk_side(min(side, *train.size()), int(fewest))
    return _Pictures(ids[0], small_pictures(train, side)), _Pictures(
        ids[1], small_pictures(test, side)
    )


@dataclass(frozen=True)
class _Pictures:
    ids: pl.Series
    pixels: Bytes


def _score_seed(
    subset: str, trials: pl.DataFrame, train: _Pictures, test: _Pictures, seed: int
) -> Iterator[pl.DataFrame]:
    side = train.pixels.shape[1]
    points = noisy(test.pixels, test.ids, seed)
    total = Sums.of(train.pixels, train.ids, seed)
    for (trial,), rows in trials.group_by("trial", maintain_order=True):
        normal = rows.filter(pl.col("split") == "train")["image_id"]
        held = ~train.ids.is_in(normal.implode())
        without = Sums.of(train.pixels[held.to_numpy()], train.ids.filter(held), seed)
        density = negative_log_density(points, total.minus(without))
        novelty = pl.DataFrame({"image_id": test.ids, "score": density})
        own = rows.filter(pl.col("split") == "test")
        yield SCORES.conform(
            own.join(novelty, on="image_id", maintain_order="left").select(
                pl.lit(f"{subset}/{trial}").alias("protocol"),
                pl.lit(NAME).alias("detector"),
                pl.lit(f"{side}x{side}").alias("backbone"),
                pl.lit(seed).alias("seed"),
                "split",
                pl.col("image_id").alias("sample_id"),
                "class",
                (pl.col("role") == "anomaly").alias("novel"),
                "score",
                pl.lit(None, pl.String).alias("predicted"),
            )
        )


# ---------------------------------------------------------------- pixels


def shrunk_side(side: int, images: int) -> int:
    """The side, halved until there are twice as many images as pixels."""
    while side > 1 and 2 * side * side > images:
        side //= 2
    return side


def small_pictures(cache: PictureCache, side: int) -> Bytes:
    """(N, side, side, 3), larger pictures shrunk by the mean of areas."""
    import cv2

    out = np.empty((len(cache), side, side, 3), np.uint8)
    for start in range(0, len(cache), CHUNK):
        rows = range(start, min(start + CHUNK, len(cache)))
        pixels = cache.decode(rows)
        if pixels.shape[1:3] == (side, side):
            out[start : rows.stop] = pixels
        else:
            for row, picture in zip(rows, pixels, strict=True):
                out[row] = cv2.resize(picture, (side, side), interpolation=cv2.INTER_AREA)
    return out


def noisy(pixels: Bytes, image_ids: pl.Series, seed: int) -> Floats:
    """(3, N, side * side): (pixel + U(0, 1)) / 256; an image's noise depends on its id alone."""
    out = np.empty((3, len(pixels), pixels.shape[1] * pixels.shape[2]))
    for row, (picture, image_id) in enumerate(zip(pixels, image_ids, strict=True)):
        own = int.from_bytes(hashlib.sha256(image_id.encode()).digest()[:8])
        noise = np.random.default_rng([seed, own]).random(picture.shape)
        out[:, row] = (picture + noise).transpose(2, 0, 1).reshape(3, -1)
    return out / 256


# ---------------------------------------------------------------- Gaussians


@dataclass(frozen=True)
class Sums:
    """Number of images, their sum (3, d) and their products (3, d, d)."""

    count: int
    sum: Floats
    products: Floats

    @classmethod
    def of(cls, pixels: Bytes, image_ids: pl.Series, seed: int) -> "Sums":
        width = pixels.shape[1] * pixels.shape[2]
        total, products = np.zeros((3, width)), np.zeros((3, width, width))
        for start in range(0, len(pixels), CHUNK):
            rows = slice(start, start + CHUNK)
            points = noisy(pixels[rows], image_ids[rows], seed)
            total += points.sum(axis=1)
            products += points.transpose(0, 2, 1) @ points
        return cls(len(pixels), total, products)

    def minus(self, other: "Sums") -> "Sums":
        return Sums(self.count - other.count, self.sum - other.sum, self.products - other.products)


def negative_log_density(points: Floats, fitted: Sums) -> Floats:
    """Of each point, summed over the channels; the constant d/2 log 2 pi is kept."""
    from scipy.linalg import cholesky, solve_triangular

    width = points.shape[2]
    total = np.full(points.shape[1], 1.5 * width * np.log(2 * np.pi))
    for channel, part in enumerate(points):
        mean = fitted.sum[channel] / fitted.count
        covariance = fitted.products[channel] / fitted.count - np.outer(mean, mean)
        root = cholesky(covariance, lower=True)
        white = solve_triangular(root, (part - mean).T, lower=True)
        total += 0.5 * np.einsum("dn,dn->n", white, white) + np.log(np.diag(root)).sum()
    return total
