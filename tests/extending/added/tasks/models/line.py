"""A linear classifier of feature rows, trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, Losses
from tasks.models.base import NetworkModel

if TYPE_CHECKING:
    import torch
    from torch import nn


class Line(NetworkModel):
    name: ClassVar[str] = "line"
    modality: ClassVar[str] = "features"
    gives: ClassVar[frozenset[str]] = frozenset({"logits", "features"})
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"epochs": 100, "batch_size": 8, "learning_rate": 0.1},
        "small": {"epochs": 10, "batch_size": 8, "learning_rate": 0.1},
    }

    def survey(self, train: Samples) -> dict[str, Any]:
        return {"width": train.array("features").shape[1]}

    def build(self) -> dict[str, nn.Module]:
        from torch import nn

        return {"line": nn.Linear(self.record["width"], self.classes)}

    def losses(self, batch: Batch) -> Losses:
        from torch.nn import functional

        return {"loss": functional.cross_entropy(self.compute(batch)["logits"], batch.labels)}

    def compute(self, batch: Batch) -> dict[str, torch.Tensor]:
        rows = batch.array("features")
        return {"logits": self.layers["line"](rows), "features": rows}
