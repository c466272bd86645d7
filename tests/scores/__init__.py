"""Tests of tasks.scores and of neighbours; here outputs of a small network of torch's layers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from tasks.scores import find
from tasks.scores.base import Head, Outputs, Reference

CLASSES, WIDTH = 18, 32


@dataclass
class World:
    layers: nn.Sequential
    reference: Reference
    test: Outputs

    @property
    def head(self) -> Head:
        assert self.reference.head is not None
        return self.reference.head


def make_world(
    seed: int = 0, rows: int = 200, slope: float = 0.2, *, learnt: bool = False
) -> World:
    """Features round class centres, test features wider; BatchNorm with real statistics.

    Weights are random; `learnt` ones point to the centres, by and large.
    """
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    norm, linear = nn.BatchNorm1d(WIDTH, eps=0.01), nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, linear.weight, linear.bias):
            tensor.normal_(0.2, 1, generator=generator)
        norm.running_mean.normal_(generator=generator)
        norm.running_var.uniform_(0.5, 2, generator=generator)
    layers = nn.Sequential(norm, nn.LeakyReLU(slope), nn.Dropout(0.5), linear).eval()
    centres = random.normal(0, 2, (CLASSES, WIDTH))
    if learnt:
        with torch.no_grad():
            towards = layers[:2](torch.from_numpy(centres).float())
            linear.weight.mul_(0.05).add_(0.05 * towards)
            linear.bias.copy_(-0.025 * towards.square().sum(1))

    def outputs(count: int, spread: float) -> tuple[Outputs, np.ndarray]:
        labels = np.concatenate([np.arange(CLASSES), random.integers(0, CLASSES, count - CLASSES)])
        features = centres[labels] + random.normal(0, spread, (count, WIDTH))
        features = features.astype(np.float32)
        with torch.no_grad():
            logits = layers(torch.from_numpy(features)).numpy()
        return Outputs(logits, features), labels.astype(np.int64)

    train, labels = outputs(rows * 2, 1)
    valid, valid_labels = outputs(rows, 1)
    test, _ = outputs(rows, 2)
    head = Head.of(linear, norm, slope)
    return World(layers, Reference(train, labels, valid, head, valid_labels), test)


def plain_head(
    weight: list[list[float]], slope: float = 1.0, bias: list[float] | None = None
) -> Head:
    return Head(torch.tensor(weight), torch.tensor(bias or [0.0] * len(weight)), slope=slope)


def scored(
    name: str, outputs: Outputs, reference: Reference | None = None, **given: object
) -> np.ndarray:
    kind = find(name)
    score = kind(kind.configuration(**given))
    if reference is not None:
        score.fit(reference)
    return score.score(outputs)
