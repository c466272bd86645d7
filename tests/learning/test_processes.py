"""Several processes share one training: the same weights but for the order of sums."""

import numpy as np
import polars as pl
import torch
from torch import nn
from torch.nn import functional

from tasks.learning.devices import seeded
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, Losses, Trainable, TrainingSettings, train


class Line(Trainable):
    name = "line"

    def __init__(self, processes: int) -> None:
        self.settings = TrainingSettings(
            epochs=2, batch_size=8, learning_rate=0.05, processes=processes, optimizer="sgd"
        )
        with seeded([3], "cpu"):
            self.layers = nn.ModuleDict({"line": nn.Linear(6, 3)})

    def losses(self, batch: Batch) -> Losses:
        logits = self.layers["line"](batch.array("features"))
        return {"loss": functional.cross_entropy(logits, batch.labels)}


def test_two_processes_train_what_one_does():
    draws = np.random.default_rng(0)
    labels = draws.integers(0, 3, 32)
    features = draws.normal(size=(32, 6)).astype(np.float32)
    samples = Samples([str(row) for row in range(32)], labels, {"features": features})
    one, two = Line(1), Line(2)
    histories = [train(line, samples, seed=1, device="cpu") for line in (one, two)]
    # A batch of eight is two halves of four: their mean gradient is that of the batch, but for
    # rounding.
    torch.testing.assert_close(
        one.layers["line"].weight, two.layers["line"].weight, rtol=1e-5, atol=1e-6
    )
    losses = pl.concat(history.select("loss") for history in histories)["loss"].to_numpy()
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-6)
    moved = (one.layers["line"].weight - Line(1).layers["line"].weight).abs().max()
    assert moved > 1e-3
