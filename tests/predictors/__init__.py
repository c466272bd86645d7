"""Tests of tasks.predictors; here a world of Gaussian labels that lie in different directions."""

import numpy as np
import polars as pl

from tasks.predictors.base import Examples

WIDTH = 32


def samples(labels: str, count: int, seed: int) -> tuple[np.ndarray, pl.Series]:
    """`count` samples of each one-letter label: features (N, WIDTH) float32 and labels."""
    places = np.random.default_rng(0).normal(size=(26, WIDTH))
    places *= 6 / np.linalg.norm(places, axis=1, keepdims=True)
    draws = np.random.default_rng([seed, count])
    names = np.repeat(list(labels), count)
    means = places[[ord(name) - ord("a") for name in names]]
    order = draws.permutation(len(names))
    features = means + draws.normal(size=means.shape) * 0.6
    return features[order].astype(np.float32), pl.Series(names[order])


def examples(labels: str, count: int, seed: int) -> Examples:
    return Examples(*samples(labels, count, seed))


def named(predictor, features: np.ndarray) -> np.ndarray:
    """The most likely label of each row."""
    labels, probabilities = predictor.predict(features)
    return np.array(labels)[probabilities.argmax(1)]
