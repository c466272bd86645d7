"""Small pictures that a model can tell apart in seconds, and settings to match."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.config import Settings
from tasks.features.images import ITEM_BAR_ROWS
from tasks.learning.samples import NOVEL, Samples
from tasks.models.base import Fitting, Model

COLOURS = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200]], np.float64)
SIDE = 64

# What differs from the preset `small`, so that 64 x 64 pictures train in a second or two.
TINY_TRAINING = {"batch_size": 8, "milestones": ()}
TINY_NETWORK = {
    **TINY_TRAINING,
    "scale": 0.5,
    "layers": (8, "M", 16, "M", 16, "M"),
    "width": 1.0,
    "hidden": 16,
    "pool": 2,
    "epochs": 20,
}
TINY_AUTOENCODER = {**TINY_TRAINING, "width": 0.125, "code": 8, "hidden": 16, "epochs": 6}
TINY = {
    "vgg_classifier": TINY_NETWORK,
    "ndcc": TINY_NETWORK,
    "deep_ensemble": {"members": 2},
    "autoencoder_full": {**TINY_AUTOENCODER, "scale": 0.5},
    "autoencoder_patch": {**TINY_AUTOENCODER, "scale": 1.0, "patches_per_image": 2},
    "pixel_gaussian": {"side": 4},
}


def tiny(kind: type, **changes: object) -> Settings:
    """The preset `small` of a model class, smaller still and on one thread."""
    every = {"cpu_threads": 1, "item_bar_rows": ITEM_BAR_ROWS, "base": "vgg_classifier"}
    fitting = {n: v for n, v in every.items() if n in kind.configuration.model_fields}
    return kind.resolve("small", {**fitting, **TINY.get(kind.name, {}), **changes})


def fit(
    model: Model,
    train: Samples,
    valid: Samples | None = None,
    *,
    seed: int = 0,
    base: Model | None = None,
    work: Path | None = None,
    progress: Any = None,
) -> pl.DataFrame:
    """Fitted on the CPU; returns the history."""
    fitting = Fitting(seed=seed, device="cpu", work=work, progress=progress)
    return model.fit(train, valid, fitting, () if base is None else (base,))


def novelty(model: Model, samples: Samples) -> np.ndarray:
    values = model.outputs(samples).novelty
    assert values is not None
    return values


def pictures(labels: np.ndarray, seed: int) -> np.ndarray:
    """Known: one coloured block on a dim ground. Novel: black and white chequers."""
    draws = np.random.default_rng(seed)
    images = np.full((len(labels), SIDE, SIDE, 3), 70.0)
    rows, columns = np.indices((SIDE, SIDE)) // 4
    chequers = (rows + columns) % 2 * 255
    for image, label in zip(images, labels, strict=True):
        if label == NOVEL:
            image[2:38, 4:60] = chequers[2:38, 4:60, None]
        else:
            top, left = draws.integers(2, [20, 40])
            image[top : top + 20, left : left + 20] = COLOURS[label]
    # Without noise it is left to rounding which of many equal pixels is a maximum.
    return (images + draws.normal(0, 6, images.shape)).clip(0, 255).astype(np.uint8)


def numbers(labels: np.ndarray, seed: int) -> np.ndarray:
    """One score each, larger for novel samples."""
    return np.random.default_rng(seed).normal(np.where(labels == NOVEL, 3, 0), 1)


ARRAYS = {
    "visual": numbers,
    "symbolic": lambda labels, seed: numbers(labels, seed + 100),
    "images": pictures,
}


NEEDS = {"image": ("images",), "runs": ("visual", "symbolic")}
"""Arrays that a model reads, by modality."""


def samples(needs: tuple[str, ...], known: int, novel: int, seed: int) -> Samples:
    labels = np.r_[np.arange(known) % len(COLOURS), np.full(novel, NOVEL)].astype(np.int64)
    ids = [f"{seed}/{row}" for row in range(len(labels))]
    return Samples(ids, labels, {name: ARRAYS[name](labels, seed) for name in needs})
