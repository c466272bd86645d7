"""Compiled layers: graphs are made, bits stay the same, what cannot be compiled is a sentence."""

import logging
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from schemas.errors import ConfigError, TrainingError
from tasks import models
from tasks.learning import compiling
from tasks.learning.trainer import train
from tasks.operations import gpu_check
from tests.learning.test_trainer import SAMPLES, VALID, Killed, Small, run


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """No graph of another test; one thread; no notes of torch for the log of the test."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


def take_backend(monkeypatch: Any, backend: Any) -> None:
    """Graphs are traced in earnest, then computed by this instead of by compiled C++."""
    monkeypatch.setenv("CXX", sys.executable)  # a compiler is asked for, and never called
    make = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: make(*a, **k, backend=backend))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_trainings_and_measures_run_graphs_of_the_same_bits(monkeypatch):
    take_backend(monkeypatch, "eager")
    plain, history = run(valid=VALID)
    assert not graphs()
    compiled, again = run(valid=VALID, compile=True)
    # Batches of 44 pictures are of seven and eight; learning and measuring are graphs apart.
    assert graphs() >= 3
    assert compiled == plain and again.equals(history)


def test_a_shape_too_many_is_an_error_and_not_the_uncompiled_way(monkeypatch):
    take_backend(monkeypatch, "eager")
    monkeypatch.setattr(compiling, "GRAPHS", 1)
    with pytest.raises(
        TrainingError, match=r"model small: torch\.compile failed .*; leave out comp"
    ):
        run(compile=True)


def test_a_graph_that_does_not_compile_is_a_sentence(monkeypatch):
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    take_backend(monkeypatch, broken)
    with pytest.raises(TrainingError, match=r"no such kernel.*; leave out compile") as error:
        run(compile=True)
    assert "\n" not in str(error.value)


def test_where_there_is_no_compiler_it_is_a_sentence(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no no-such-compiler on this machine; install"):
        train(Small(compile=True), SAMPLES, seed=1, device="cpu")
    assert not graphs()


# ---------------------------------------------------------------- models


def fitted(name: str, network: str | None, **changes: Any) -> Any:
    changes = {"precision": "float32", "cpu_threads": 1, **changes}
    model = gpu_check.made(name, network, "small", **changes)
    samples = gpu_check.samples_for(model, 6)
    gpu_check.fit(model, samples, "small", "cpu")
    return model, samples


KINDS = sorted({name for name, _, _ in gpu_check.choices(("small",))})
COMPILED = [name for name in KINDS if "compile" in models.find(name).configuration.model_fields]
FEW = ("symbolic_mlp",)


def test_the_models_that_train_can_be_compiled():
    assert {"cross_entropy", "classifier", "cpc", "ndcc", "vae", *FEW} <= set(COMPILED)


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in COMPILED],
)
def test_a_model_is_compiled_for_training_and_after_loading(name, tmp_path, monkeypatch):
    take_backend(monkeypatch, "eager")
    kind = models.find(name)
    network = {"cloud": "dgcnn", "image": "cifar"}.get(kind.modality) if kind.uses_network else None
    plain, samples = fitted(name, network)
    assert not graphs()
    model, _ = fitted(name, network, compile=True)
    trained = graphs()
    assert trained
    assert model.fingerprint() == plain.fingerprint()
    model.save(tmp_path / "model")
    loaded = models.load_model(tmp_path / "model", device="cpu", bases=model.bases)
    outputs, expected = loaded.outputs(samples), plain.outputs(samples)
    assert graphs() > trained
    for part in ("logits", "features", "novelty"):
        left, right = getattr(outputs, part), getattr(expected, part)
        assert left is right is None or np.array_equal(left, right)


@pytest.mark.slow
def test_compiled_cpp_trains_to_the_same_bits_each_time_and_from_a_checkpoint(tmp_path):
    changes = {"epochs": 2, "checkpoint_every": 1, "compile": True}
    first, history = run(valid=VALID, **changes)
    assert graphs() and counters["inductor"]
    with pytest.raises(Killed):
        run(valid=VALID, work=tmp_path, kill_after=1, **changes)
    torch._dynamo.reset()
    again, resumed = run(valid=VALID, work=tmp_path, **changes)
    assert again == first and resumed.equals(history)
    plain, _ = run(valid=VALID, epochs=2, checkpoint_every=1)
    near = [
        np.allclose(
            np.frombuffer(first[name], np.float32), np.frombuffer(plain[name], np.float32), atol=0.1
        )
        for name in plain
        if "num_batches" not in name
    ]
    assert all(near)
