"""Scores equal those of pytorch-ood 0.4.0 on the same cached outputs; skipped where it is absent.

It is no dependency of ours: `make test-all` installs it, with torchvision, into a folder of its own
(requirements-peers.lock). Known factors: its GradNorm is ours / C, its entropy our mean times C,
its Mahalanobis ours / (2 N), its normalised KNN squared is 2 - 2 cos.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from tasks.scores import find
from tasks.scores.base import Outputs
from tests.scores import CLASSES, World, make_world

if importlib.util.find_spec("pytorch_ood") is None:
    pytest.skip("pytorch-ood is not installed; make test-all does so", allow_module_level=True)

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    """pytorch_ood.detector; its torchvision does not load beside a CPU torch without two names."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            )
    return importlib.import_module("pytorch_ood.detector")


@pytest.fixture
def world(name: str) -> World:
    """For entropy with softer logits: pytorch-ood clips probabilities at 1e-7, we do not."""
    world = make_world(seed=3, rows=1000)
    if name != "entropy":
        return world
    softer = replace(world.test, logits=world.test.logits / 8)
    assert torch.from_numpy(softer.logits).softmax(1).min() > 1e-7
    return replace(world, test=softer)


def peer_scores(peer: ModuleType, name: str, world: World, dtype: torch.dtype) -> np.ndarray:
    """Novelty by pytorch-ood in our units."""
    logits = torch.from_numpy(world.test.logits).to(dtype)
    g = torch.from_numpy(world.test.features).to(dtype)
    train = torch.from_numpy(world.reference.train.features).to(dtype)
    labels = torch.from_numpy(world.reference.train_labels)
    layers = world.layers.to(dtype)

    def gradnorm() -> torch.Tensor:
        with torch.no_grad():
            z = layers[:2](g)
        return CLASSES * peer.GradNorm(layers[-1], param_filter=lambda p: p == "weight")(z)

    def react() -> torch.Tensor:
        valid = torch.from_numpy(world.reference.valid.features).to(dtype)
        detector = peer.ReAct(lambda x: x, layers, percentile=0.9)
        return detector.fit_feature_maps(valid, torch.zeros(len(valid))).predict_feature_maps(g)

    def knn(normalize: bool) -> torch.Tensor:
        detector = peer.KNN(None, k=1, normalize=normalize, algorithm="brute")
        return detector.fit_features(train, labels).predict_features(g)

    def mahalanobis() -> torch.Tensor:
        detector = peer.Mahalanobis(None).fit_features(train, labels)
        return 2 * len(train) * detector.predict_features(g)

    def odin() -> torch.Tensor:
        return peer.ODIN(torch.nn.Identity(), eps=0.0, temperature=1000.0).predict(logits.clone())

    known: dict[str, Callable[[], torch.Tensor]] = {
        "msp": lambda: peer.MaxSoftmax(None).predict_logits(logits),
        "mls": lambda: peer.MaxLogit(None).predict_logits(logits),
        "energy": lambda: peer.EnergyBased(None).predict_logits(logits),
        "entropy": lambda: peer.Entropy(None).predict_logits(logits) / CLASSES,
        "odin": odin,
        "gradnorm": gradnorm,
        "react": react,
        "nearest": lambda: knn(False),
        "cosine": lambda: knn(True).square() / 4 - 1,
        "mahalanobis": mahalanobis,
    }
    try:
        return known[name]().detach().double().numpy()
    finally:
        world.layers.float()


def own_scores(name: str, world: World) -> np.ndarray:
    kind = find(name)
    score = kind(kind.configuration(ridge=1e-12)) if name == "mahalanobis" else kind()
    score.fit(world.reference)
    return score.score(world.test)


NAMES = (
    *("msp", "mls", "energy", "entropy", "odin", "gradnorm", "react", "nearest", "cosine"),
    "mahalanobis",
)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.abs(ours - theirs) / np.abs(theirs)).max())


@pytest.mark.parametrize("name", NAMES)
def test_values_agree(
    peer: ModuleType, world: World, name: str, record_property: Callable[[str, object], None]
) -> None:
    theirs = peer_scores(peer, name, world, torch.float32)
    ours = own_scores(name, world)
    record_property("relative_difference", difference(ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_ranks_agree(peer: ModuleType, world: World, name: str) -> None:
    """With float64 on both sides: in float32 pytorch-ood's own rounding swaps and ties samples.

    Without Mahalanobis, which pytorch-ood has in float32 only.
    """
    theirs = peer_scores(peer, name, world, torch.float64)
    ours = own_scores(name, world)
    assert np.array_equal(np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable"))


@pytest.mark.parametrize("name", ["energy"])
def test_the_comparison_can_fail(peer: ModuleType, world: World, name: str) -> None:
    theirs = peer_scores(peer, name, world, torch.float32)
    wrong = replace(world, test=Outputs(world.test.logits * np.float32(1.0001)))
    assert difference(own_scores(name, wrong), theirs) > TOLERANCE
