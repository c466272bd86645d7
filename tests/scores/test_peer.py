"""Scores equal those of pytorch-ood 0.4.0 on the same cached outputs; skipped where it is absent.

It is no dependency of ours: `make test-all` installs it, with torchvision, into a folder of its own
(requirements-peers.lock). docs/scores.md has the map between both and what differs.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import fmin
from scipy.special import expit
from scipy.stats import exponweib

from tasks.models.odin import OdinSettings
from tasks.models.odin import odin as odin_step
from tasks.scores import find
from tasks.scores.base import Outputs
from tests.scores import CLASSES, WIDTH, World, make_world

if importlib.util.find_spec("pytorch_ood") is None:
    pytest.skip("pytorch-ood is not installed; make test-all does so", allow_module_level=True)

TOLERANCE = 1e-5
Peer = Callable[["Case"], torch.Tensor]


def _stubbed(name: str) -> None:
    """pytorch_ood's torchvision does not load beside a CPU torch without two names."""
    try:
        importlib.import_module(name)
    except RuntimeError:
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == name]:
            del sys.modules[loaded]
        for missing in ("nms", "qnms"):
            torch.library.define(
                f"{name}::{missing}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            )


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    _stubbed("torchvision")
    return importlib.import_module("pytorch_ood.detector")


class Case:
    """What pytorch-ood's detectors take, of one precision."""

    def __init__(self, peer: ModuleType, world: World, dtype: torch.dtype) -> None:
        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(dtype)

        reference = world.reference
        self.peer, self.dtype, self.layers = peer, dtype, world.layers.to(dtype)
        self.linear, self.activated = self.layers[-1], self.layers[:2]
        self.logits, self.g = tensor(world.test.logits), tensor(world.test.features)
        self.train, self.valid = tensor(reference.train.features), tensor(reference.valid.features)
        self.train_logits = tensor(reference.train.logits)
        self.valid_logits = tensor(reference.valid.logits)
        self.labels = torch.from_numpy(reference.train_labels)
        self.valid_labels = torch.from_numpy(reference.valid_labels)
        with torch.no_grad():
            self.z, self.trained = self.activated(self.g), self.activated(self.train)

    def features(self, detector: object) -> torch.Tensor:
        """By a detector of g."""
        return detector.fit_features(self.train, self.labels).predict_features(self.g)

    def inputs(self, detector: object) -> torch.Tensor:
        """By a detector of z, the input of the last Linear."""
        return detector.fit_features(self.trained, self.labels).predict_features(self.z)

    def maps(self, kind: str, **given: object) -> torch.Tensor:
        """By a detector of feature maps, of one pixel."""
        head = torch.nn.Sequential(torch.nn.Flatten(), self.linear)
        detector = getattr(self.peer, kind)(None, head, **given)
        return detector.predict_feature_maps(self.z[:, :, None, None])


def gradnorm(case: Case) -> torch.Tensor:
    detector = case.peer.GradNorm(case.linear, param_filter=lambda p: p == "weight")
    return CLASSES * detector(case.z)


def react(case: Case) -> torch.Tensor:
    detector = case.peer.ReAct(lambda x: x, case.layers, percentile=0.9)
    valid = detector.fit_feature_maps(case.valid, torch.zeros(len(case.valid)))
    return valid.predict_feature_maps(case.g)


def knn(case: Case, k: int, normalize: bool) -> torch.Tensor:
    return case.features(case.peer.KNN(None, k=k, normalize=normalize, algorithm="brute"))


def odin(case: Case) -> torch.Tensor:
    detector = case.peer.ODIN(torch.nn.Identity(), eps=0.0, temperature=1000.0)
    return detector.predict(case.logits.clone())


def vim(case: Case) -> torch.Tensor:
    weight, bias = case.linear.weight, case.linear.bias
    return case.inputs(case.peer.ViM(None, WIDTH // 2, weight, bias))


def dice(case: Case) -> torch.Tensor:
    weight, bias = case.linear.weight, case.linear.bias
    return case.inputs(case.peer.DICE(None, weight, bias, p=0.9))


def she(case: Case) -> torch.Tensor:
    """Of classes that the network gets right now and then; their detector refuses others."""
    return case.inputs(case.peer.SHE(None, case.linear))


def temperature(case: Case) -> torch.Tensor:
    """Their steps are a hundredth of Newton's, 50 a fit: until T stays."""
    detector = case.peer.TemperatureScaling(None)
    detector.t = torch.nn.Parameter(torch.ones((), dtype=case.dtype))
    before = 0.0
    for _ in range(100):
        detector.fit_logits(case.valid_logits, case.valid_labels)
        if abs(detector.t.item() - before) < 1e-9:
            break
        before = detector.t.item()
    return detector.predict_logits(case.logits)


def openmax(case: Case) -> torch.Tensor:
    """Their Weibull fit stops at 1e-4; here it goes on."""
    module = importlib.import_module("pytorch_ood.detector.openmax.libnotmr")

    def fit(values: list, **given: object) -> tuple:
        def longer(function: Callable, start: np.ndarray, args: tuple, disp: int) -> np.ndarray:
            best = start
            for _ in range(4):
                best = fmin(function, best, args, 1e-12, 1e-15, 10_000, 10_000, disp=disp)
            return best

        return exponweib.fit(values, **given, optimizer=longer)

    known, module.exponweib = module.exponweib, SimpleNamespace(fit=fit, cdf=exponweib.cdf)
    try:
        detector = case.peer.OpenMax(None, tailsize=20, alpha=10)
        detector.fit_logits(case.train_logits, case.labels)
    finally:
        module.exponweib = known
    return detector.predict_logits(case.logits)


def gmm(case: Case) -> torch.Tensor:
    return case.features(case.peer.GMM(None, reg=1e-12))


def kl_matching(case: Case) -> torch.Tensor:
    return case.peer.KLMatching(None).fit_logits(case.valid_logits).predict_logits(case.logits)


PEERS: dict[str, Peer] = {
    "msp": lambda case: case.peer.MaxSoftmax(None).predict_logits(case.logits),
    "mls": lambda case: case.peer.MaxLogit(None).predict_logits(case.logits),
    "energy": lambda case: case.peer.EnergyBased(None).predict_logits(case.logits),
    "entropy": lambda case: case.peer.Entropy(None).predict_logits(case.logits) / CLASSES,
    "odin_without_step": odin,
    "gradnorm": gradnorm,
    "react": react,
    "nearest": lambda case: knn(case, 1, False),
    "cosine": lambda case: knn(case, 1, True).square() / 4 - 1,
    "knn": lambda case: knn(case, 50, True),
    "knn plain": lambda case: knn(case, 7, False),
    "mahalanobis": lambda case: case.features(case.peer.Mahalanobis(None)),
    "mahalanobis mean": lambda c: 2 * len(c.train) * c.features(c.peer.Mahalanobis(None)),
    "rmd": lambda case: case.features(case.peer.RMD(None)),
    "rmd mean": lambda case: len(case.train) * case.features(case.peer.RMD(None)),
    "vim": vim,
    "dice": dice,
    "ash s": lambda case: case.maps("ASH", variant="ash-s", percentile=0.9),
    "ash b": lambda case: case.maps("ASH", variant="ash-b", percentile=0.9),
    "ash p": lambda case: case.maps("ASH", variant="ash-p", percentile=0.6),
    "scale": lambda case: case.maps("SCALE", percentile=0.85),
    "she": she,
    "gen": lambda case: CLASSES * case.peer.GEN(None).predict_logits(case.logits),
    "gen few": lambda case: 5 * case.peer.GEN(None, 0.5, 5).predict_logits(case.logits),
    "kl_matching": kl_matching,
    "nnguide": lambda case: case.inputs(case.peer.NNGuide(None, case.linear)),
    "fdbd": lambda case: case.inputs(case.peer.fDBD(None, case.linear)),
    "openmax": openmax,
    "temperature": temperature,
    "gmm": gmm,
}
"""Novelty by pytorch-ood in our units; a second word tells settings apart."""

SETTINGS: dict[str, dict[str, object]] = {
    "knn": {"k": 50},
    "knn plain": {"k": 7, "normalise": False},
    "mahalanobis": {"covariance": "sum"},
    "mahalanobis mean": {"ridge": 1e-12},
    "rmd": {"covariance": "sum"},
    "rmd mean": {"ridge": 1e-12},
    "ash b": {"variant": "b", "percentile": 90},
    "ash p": {"variant": "p"},
    "gen few": {"gamma": 0.5, "largest": 5},
    "openmax": {"only_right": False},
    "gmm": {"covariance": "full", "ridge": 1e-12},
}
SOFT = {"entropy", "gen", "gen few"}
"""With softer logits: pytorch-ood clips probabilities at 1e-7, we do not."""
LEARNT = {"she", "openmax", "temperature"}
"""With a network that gets most of its training samples right."""
DOUBLE = {"rmd", "rmd mean", "vim", "temperature"}
"""Differences of large numbers, and a search: float32 loses the digits that are compared."""
OURS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "openmax": expit,
    "temperature": lambda novelty: -expit(-novelty),
}
"""Increasing maps of our values; the probability of the unknown, the largest probability."""


@pytest.fixture
def world(name: str) -> World:
    """A ReLU for those that shape activations, whose sums we take of positive values."""
    slope = 0.0 if name.split()[0] in ("ash", "scale") else 0.2
    world = make_world(seed=3, rows=1000, slope=slope, learnt=name in LEARNT)
    if name not in SOFT:
        return world
    softer = replace(world.test, logits=world.test.logits / 8)
    assert torch.from_numpy(softer.logits).softmax(1).min() > 1e-7
    return replace(world, test=softer)


def peer_scores(peer: ModuleType, name: str, world: World, dtype: torch.dtype) -> np.ndarray:
    """With float64 also what pytorch-ood itself makes float32 of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor.to(dtype))
        torch.set_default_dtype(dtype)
        try:
            return PEERS[name](Case(peer, world, dtype)).detach().double().numpy()
        finally:
            torch.set_default_dtype(torch.float32)
            world.layers.to(torch.float32)


def own_scores(name: str, world: World) -> np.ndarray:
    kind = find(name.split()[0])
    score = kind(kind.configuration(**SETTINGS.get(name, {})))
    score.fit(world.reference)
    return OURS.get(name, np.asarray)(score.score(world.test))


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.abs(ours - theirs) / np.abs(theirs)).max())


@pytest.mark.parametrize("name", PEERS)
def test_values_agree(
    peer: ModuleType, world: World, name: str, record_property: Callable[[str, object], None]
) -> None:
    theirs = peer_scores(peer, name, world, torch.float64 if name in DOUBLE else torch.float32)
    ours = own_scores(name, world)
    record_property("relative_difference", difference(ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in PEERS if name != "temperature"])
def test_ranks_agree(peer: ModuleType, world: World, name: str) -> None:
    """With float64 on both sides: in float32 pytorch-ood's own rounding swaps and ties samples.

    Without `temperature`, where its search ends a little beside the best T.
    """
    theirs = peer_scores(peer, name, world, torch.float64)
    ours = own_scores(name, world)
    assert np.array_equal(np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable"))


@pytest.mark.parametrize("name", ["energy"])
def test_the_comparison_can_fail(peer: ModuleType, world: World, name: str) -> None:
    theirs = peer_scores(peer, name, world, torch.float32)
    wrong = replace(world, test=Outputs(world.test.logits * np.float32(1.0001)))
    assert difference(own_scores(name, wrong), theirs) > TOLERANCE


def test_odin_with_its_step_agrees(peer: ModuleType) -> None:
    """The model `odin` on the same network, input step included, in units of normalised pixels."""
    torch.manual_seed(3)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5)
    ).double()
    pictures, std = torch.randn(64, 3, 8, 8).double(), torch.tensor([63.0, 62.1, 66.7])
    for space, divided in (("normalised", [1.0] * 3), ("pixel1", (std / 255).tolist())):
        settings = OdinSettings(temperature=1000, epsilon=0.05, space=space)
        _, _, ours = odin_step(lambda x: (layers(x), x), pictures, std.double(), settings)
        theirs = peer.ODIN(layers, eps=0.05, temperature=1000.0, norm_std=divided).predict(pictures)
        assert difference(ours.numpy(), theirs.detach().numpy()) <= TOLERANCE
        still = -(layers(pictures) / 1000).softmax(1).amax(1).detach().numpy()
        assert difference(still, theirs.detach().numpy()) > TOLERANCE
