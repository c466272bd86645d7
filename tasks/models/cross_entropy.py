"""Cross entropy, with smoothed labels on request (3DOS "CE", "CE_ls"): logits and features g.

MSP, MLS, ODIN, Energy, GradNorm, ReAct and CE(L2) are scores of its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.learning.trainer import Losses
from tasks.models.base import CLASSIFIER
from tasks.models.clouds import CloudModel, CloudSettings
from tasks.networks.heads import SMALL, HeadSettings, classifier, embedding

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tasks.scores.base import Head


class Configuration(HeadSettings, CloudSettings):
    """Sizes of the head, and the loss."""

    smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of a label that is spread over the other classes; the paper has .1, CE_ls .2."""


class CrossEntropy(CloudModel):
    name: ClassVar[str] = "cross_entropy"
    configuration: ClassVar[type[Configuration]] = Configuration
    gives: ClassVar[frozenset[str]] = CLASSIFIER
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": SMALL,
    }

    def build(self) -> dict[str, nn.Module]:
        slope = self.network.slope
        return {
            "embedding": embedding(self.network.width, self.settings, slope),
            "classifier": classifier(self.classes, self.settings, slope),
        }

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        logits = self.logits(self.cloud_outputs(clouds)["features"]).float()
        loss = smoothed_cross_entropy(logits, labels, self.settings.smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return self.layers["classifier"](g)

    def head(self) -> Head:
        from tasks.scores.base import Head

        norm, activation, _, linear = self.layers["classifier"]
        return Head.of(linear, norm, activation.negative_slope)


def smoothed_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> torch.Tensor:
    """Targets 1 - e for the label, e / (C - 1) for each other class; torch's own has e / C."""
    from torch.nn import functional

    classes = logits.shape[1]
    if smoothing == 0 or classes == 1:
        return functional.cross_entropy(logits, labels)
    logs = logits.log_softmax(1)
    label_logs = logs.gather(1, labels[:, None]).squeeze(1)
    others = (logs.sum(1) - label_logs) / (classes - 1)
    return -((1 - smoothing) * label_logs + smoothing * others).mean()
