"""What is asked of a device before any work."""

import os
import subprocess
import sys

import pytest
import torch

from tasks.learning.devices import seeded
from tasks.learning.trainer import compute_in_batches, train
from tests.learning.test_trainer import SAMPLES, Small

PLANNED = """
import sys
from tasks.learning.devices import precision_on

print(precision_on("auto", True), precision_on("cpu", True), "torch" in sys.modules)
"""


def test_where_there_is_no_gpu_the_precision_is_known_without_torch():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    planned = subprocess.run(
        [sys.executable, "-c", PLANNED], capture_output=True, text=True, env=environment
    )
    assert planned.stdout.split() == ["float32", "float32", "False"], planned.stderr


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
