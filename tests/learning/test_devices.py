"""What is asked of a device before any work."""

import os
import subprocess
import sys

import pytest
import torch

from schemas.errors import ConfigError
from tasks.learning.devices import arithmetic, seeded
from tasks.learning.trainer import compute_in_batches, train
from tests.learning.test_trainer import SAMPLES, Small

PLANNED = """
import sys
from tasks.learning.devices import arithmetic

names = [arithmetic(name, device) for name in ("auto", "float16") for device in ("auto", "cpu")]
print(*names, "torch" in sys.modules)
"""


def test_where_there_is_no_gpu_the_precision_is_known_without_torch():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    planned = subprocess.run(
        [sys.executable, "-c", PLANNED], capture_output=True, text=True, env=environment
    )
    assert planned.stdout.split() == ["float32", "float32", "float16", "float16", "False"], (
        planned.stderr
    )


def switches() -> list[bool]:
    return [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]


@pytest.fixture
def allowed():
    """As torch or a user has it: TF32 in convolutions, and in products of matrices too."""
    before = switches()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_float32_is_float32_in_trainings_and_passes(allowed):
    seen = []

    class Watching(Small):
        def losses(self, batch):
            seen.append(switches())
            return super().losses(batch)

    def compute(batch):
        seen.append(switches())
        return {"x": batch.array("images").float()}

    train(Watching(epochs=1), SAMPLES, seed=1, device="cpu")
    trained = len(seen)
    compute_in_batches(compute, SAMPLES, "cpu")
    assert len(seen) > trained > 0 and not any(map(any, seen))
    assert switches() == [True, True]


def test_the_switches_of_a_user_come_back_after_an_error(allowed):
    with pytest.raises(KeyError), seeded([1], "cpu"):
        assert switches() == [False, False]
        raise KeyError
    assert switches() == [True, True]


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_cpu_has_no_tf32(device, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="precision tf32: a CPU has none; use float32"):
        arithmetic("tf32", device)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_cpu_computes_in_16_bits_where_that_is_named(precision):
    types = []

    class Watching(Small):
        def losses(self, batch):
            losses = super().losses(batch)
            types.append(self.layers(batch.array("images").permute(0, 3, 1, 2).float()).dtype)
            return losses

    small = Watching(epochs=4, precision=precision)
    history = train(small, SAMPLES, seed=1, device="cpu")
    assert set(types) == {getattr(torch, precision)}
    assert history["loss"][-1] < history["loss"][0]
    assert {value.dtype for value in small.layers.parameters()} == {torch.float32}
