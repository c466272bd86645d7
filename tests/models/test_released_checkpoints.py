"""Checkpoints in the layout of the released code: read by name, used as they are, else refused."""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError, SourceError
from tasks import models
from tasks.models.base import Fitting
from tasks.models.clouds import CloudModel
from tasks.networks import dgcnn, pointnet2
from tests.models.test_clouds import shapes

WIDTHS, FUSED, HIDDEN, FEATURES = (4, 5, 6, 7), 9, 10, 8
SIZES = {"hidden": HIDDEN, "features": FEATURES}
NETWORKS: dict[str, Any] = {
    "dgcnn": dgcnn.Configuration(k=4, widths=WIDTHS, fused=FUSED),
    "pointnet2": pointnet2.Configuration(
        abstractions=(
            {"centers": 8, "scales": ({"radius": 0.4, "members": 4, "widths": (3, 4)},) * 2},
            {"centers": 4, "scales": ({"radius": 0.8, "members": 4, "widths": (5,)},)},
        ),
        last=(6, 9),
    ),
}


def norm(name: str, width: int, twice: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for one in (f"{name}.bns.0", f"{name}.bns.1") if twice else (name,):
        for value in ("weight", "bias", "running_mean", "running_var"):
            yield f"{one}.{value}", (width,)
        yield f"{one}.num_batches_tracked", ()


def encoder(network: str, name: str, twice: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the release's layers below the head."""
    if network == "pointnet2":
        for place, layers in (("0.mlps.0", (3, 3, 4)), ("0.mlps.1", (3, 3, 4))):
            yield from mlp(f"{name}.SA_modules.{place}", layers, twice)
        yield from mlp(f"{name}.SA_modules.1.mlps.0", (11, 5), twice)
        yield from mlp(f"{name}.SA_modules.2.mlps.0", (8, 6, 9), twice)
        return
    for number, (inside, outside) in enumerate(pairwise((3, *WIDTHS)), 1):
        convolution = f"{name}.conv{number}" if twice else f"{name}.conv{number}.0"
        yield f"{convolution}.weight", (outside, 2 * inside, 1, 1)
        yield from norm(f"{name}.bn{number}" if twice else f"{name}.conv{number}.1", outside, twice)
    yield f"{name}.conv5{'' if twice else '.0'}.weight", (FUSED, sum(WIDTHS), 1)
    yield from norm(f"{name}.bn5" if twice else f"{name}.conv5.1", FUSED, twice)


def mlp(name: str, widths: tuple[int, ...], twice: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for number, (inside, outside) in enumerate(pairwise(widths)):
        yield f"{name}.{3 * number}.weight", (outside, inside, 1, 1)
        yield from norm(f"{name}.{3 * number + 1}", outside, twice)


def layout(model: str, network: str, classes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of a whole file."""
    inside = 9 if network == "pointnet2" else 2 * FUSED
    first, last = (HIDDEN, inside), (FEATURES, HIDDEN)
    if model == "arpl":
        yield from encoder(network, "enco", True)
        yield "penultimate.l1.weight", first
        yield from norm("penultimate.bn", HIDDEN, True)
        yield "penultimate.l2.2.weight", last
        yield "penultimate.l2.2.bias", (FEATURES,)
        yield "head.points", (classes, FEATURES)
        yield "head.radius", (1,)
        yield "head.Dist.centers", (classes, FEATURES)
        return
    head = "head" if model == "supcon" else "penultimate"
    yield from encoder(network, "encoder" if model == "supcon" else "enco", False)
    yield f"{head}.0.weight", first
    yield from norm(f"{head}.1", HIDDEN, False)
    yield f"{head}.4.weight", last
    if model != "cross_entropy":
        yield f"{head}.4.bias", (FEATURES,)
    if model == "cross_entropy":
        yield from norm("head.0", FEATURES, False)
        yield "head.3.weight", (classes, FEATURES)
        yield "head.3.bias", (classes,)
    elif model != "supcon":
        yield "head.weight", ((3 if model == "subcenter_arcface" else 1) * classes, FEATURES)


def save(path: Path, model: str, network: str = "dgcnn", classes: int = 3) -> dict[str, Any]:
    """A file as the release's training writes it; its tensors."""
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.rand(shape, generator=generator) + 0.5 if shape else torch.tensor(7)
        for name, shape in layout(model, network, classes)
    }
    loaded = {
        "model": {f"module.{name}": value for name, value in state.items()},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
        "scaler": {},
        "args": argparse.Namespace(src="SN1", seed=1, grad_norm_clip=-1.0, exp_name=None),
        "config": {"optimizer": {"type": "sgd", "skip_wd": []}},
        "epoch": 250,
    }
    torch.save(loaded, path)
    return state


def made(model: str, path: Path, network: str = "dgcnn") -> CloudModel:
    kind = models.find(model)
    settings = kind.resolve(None, {**SIZES, "points": 48, "weights": path})
    return kind(settings, network, NETWORKS[network])


OURS = {
    "cross_entropy": ("classifier.3.weight", "head.3.weight"),
    "cosine_proto": ("prototypes.weight", "head.weight"),
    "subcenter_arcface": ("prototypes.weight", "head.weight"),
    "supcon": ("embedding.4.bias", "head.4.bias"),
    "arpl": ("reciprocal.points", "head.points"),
}
BELOW = {
    ("dgcnn", False): [
        ("edges.0.linear.weight", "conv1.0.weight"),
        ("edges.2.norm.running_var", "conv3.1.running_var"),
        ("fuse.linear.weight", "conv5.0.weight"),
    ],
    ("dgcnn", True): [
        ("edges.3.linear.weight", "conv4.weight"),
        ("edges.1.norm.bias", "bn2.bns.0.bias"),
        ("fuse.norm.weight", "bn5.bns.0.weight"),
    ],
    ("pointnet2", False): [
        ("abstractions.0.1.3.weight", "SA_modules.0.mlps.1.3.weight"),
        ("last.1.running_mean", "SA_modules.2.mlps.0.1.running_mean"),
    ],
    ("pointnet2", True): [
        ("abstractions.1.0.1.weight", "SA_modules.1.mlps.0.1.bns.0.weight"),
        ("last.4.bias", "SA_modules.2.mlps.0.4.bns.0.bias"),
    ],
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", OURS)
def test_a_released_file_is_used_as_it_is(name: str, network: str, tmp_path: Path) -> None:
    state = save(tmp_path / "model_last.pth", name, network)
    model = made(name, tmp_path / "model_last.pth", network)
    assert model.fit(shapes(), None, Fitting(0, "cpu")).is_empty()
    assert model.record["initial_weights"].startswith("model_last.pth sha256 ")
    layers = model.layers.state_dict()
    enco = "encoder" if name == "supcon" else "enco"
    pairs = [OURS[name]] + [
        (f"network.{ours}", f"{enco}.{theirs}") for ours, theirs in BELOW[network, name == "arpl"]
    ]
    for ours, theirs in pairs:
        assert torch.equal(layers[ours], state[theirs].view(layers[ours].shape)), ours
    if name == "arpl":
        assert torch.equal(layers["fake_norms.0.bias"], first_fake(state))
        last = state["penultimate.bn.bns.1.weight"]
        assert torch.equal(layers[f"fake_norms.{5 if network == 'dgcnn' else 7}.weight"], last)
    outputs = model.outputs(shapes())
    (tmp_path / "model_last.pth").unlink()
    model.save(tmp_path / "model.safetensors")
    again = models.load_model(tmp_path / "model.safetensors", device="cpu").outputs(shapes())
    assert np.array_equal(again.features, outputs.features)


def first_fake(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(value for name, value in state.items() if name.endswith("bns.1.bias"))


def test_another_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"

    def refused(name: str, message: str, network: str = "dgcnn") -> None:
        with pytest.raises((SourceError, ConfigError), match=message) as error:
            made(name, path, network).fit(shapes(), None, Fitting(0, "cpu"))
        assert "\n" not in str(error.value)

    refused("cross_entropy", "file.pth not found; name a .pth of 3D_OS's training")
    save(path, "cross_entropy", classes=5)
    refused("cross_entropy", "is for 5 classes, the track has 3 known ones")
    refused("cosine_proto", r"does not fit cosine_proto on dgcnn, .* missing: embedding.4.bias")
    refused("arpl", "does not fit arpl on dgcnn, .*`paper`.* missing: embedding.4.bias, fake_norms")
    save(path, "subcenter_arcface", classes=5)
    refused("subcenter_arcface", "is for 5 classes")
    save(path, "cross_entropy", "pointnet2")
    refused("cross_entropy", "missing: network.edges.0.linear.weight")
    save(path, "arpl")
    refused("cross_entropy", r"unexpected: embedding.1.bns.1.bias")
    torch.save({"model": {"module.weight": torch.zeros(2)}, "args": Carrier()}, path)
    refused("cross_entropy", "is not a plain torch state file")
    path.write_bytes(b"<html>")
    refused("cross_entropy", "is not a plain torch state file")


class Carrier:
    """What is refused, for it could run code."""


@pytest.mark.parametrize("name", ["flow", "outlier_exposure", "vae"])
def test_models_that_the_release_has_no_file_of_take_none(name: str, tmp_path: Path) -> None:
    kind = models.find(name)
    with pytest.raises(ConfigError, match=f"model {name} takes no weights; those that do are"):
        kind.weights_files(kind.resolve(None, {"weights": tmp_path / "file.pth"}))
