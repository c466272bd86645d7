"""A training step of the picture classifiers: channels last in memory against channels first.

    python -m benchmarks.channels_last

Steps of both kinds take turns in one process on one thread, in CPU seconds. `first` is how
version 2 of the networks computed: channels first, new tensors filled as torch's deterministic
mode does, pictures normalised before they are made smaller. Printed beside the ratio: how far the
losses of the first step are apart.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

from tasks.learning.devices import seeded
from tasks.learning.trainer import Batch, _Task, _Training, make_fabric
from tasks.models import pictures
from tasks.networks.wide_resnet import WideResNet
from tasks.operations import gpu_check

BATCH = 64
CASES = (
    ("classifier", "cifar"),
    ("classifier", "stl"),
    ("classifier", "imagenet"),
    ("rotation", "cifar"),
    ("cpc", "cifar"),
    ("centre_mask", "stl"),
)


def normalised_first(
    images: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, shrink: int = 1
) -> torch.Tensor:
    first = images.permute(0, 3, 1, 2).float().contiguous()
    scaled = (first - mean[None, :, None, None]) / deviation[None, :, None, None]
    return functional.avg_pool2d(scaled, shrink) if shrink > 1 else scaled


def trunk_first(self: Any, inputs: torch.Tensor, task: int, groups: int) -> torch.Tensor:
    hidden = self._pooled_stem(self._convolved(self.layers["stem"], inputs.contiguous()))
    for group in self.layers["groups"][:groups]:
        for block in group:
            hidden = self._through(block, hidden, task)
    return hidden


def stepper(name: str, network: str, last: bool) -> Callable[[], float]:
    """Takes a training step when called; gives its loss."""
    kind: Any = pictures.PictureClassifier
    with patch.object(kind, "channels_last", last):
        model: Any = gpu_check.made(name, network, "small", batch_size=BATCH, cpu_threads=1)
        samples = gpu_check.samples_for(model, BATCH)
        model.prepare(device="cpu")
        model.classes, model.record = gpu_check.CLASSES, model.survey(samples)
        with seeded([1], "cpu"):
            model._make_layers()
    task = _Task(model, samples, 1, "cpu", None, None, "", None)
    training = _Training(task, make_fabric("cpu", model.settings))
    model.set_training(True)
    rows = [np.arange(stream.batch_size) % BATCH for stream in model.streams()]
    batches = [Batch(samples, some, torch.device("cpu")) for some in rows]

    def step() -> float:
        with ExitStack() as stack, seeded([1], "cpu", 1):
            if not last:
                torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
                stack.enter_context(patch.object(pictures, "normalised", normalised_first))
                stack.enter_context(patch.object(WideResNet, "trunk", trunk_first))
            return float(model.step(batches, training.optimizers, "plain")["loss"].detach())

    return step


def compare(name: str, network: str, rounds: int) -> str:
    first, last = stepper(name, network, False), stepper(name, network, True)
    losses = first(), last()
    seconds = np.zeros(2)
    for _ in range(rounds):
        for place, step in enumerate((first, last)):
            started = time.process_time()
            step()
            seconds[place] += time.process_time() - started
    apart = abs(losses[0] - losses[1]) / abs(losses[0])
    before, after = seconds / rounds * 1000
    return (
        f"{name:12} {network:9} first {before:7.1f} ms, last {after:7.1f} ms, "
        f"{before / after:.2f}x, loss of the first step within {apart:.0e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, network in CASES:
        print(compare(name, network, rounds), flush=True)


if __name__ == "__main__":
    main()
