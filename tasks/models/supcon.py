"""Supervised contrastive learning over two views (3DOS rule 11): features only, no classes.

Loss = -mean over anchors of log(sum_pos / (sum_pos + sum_neg)), sums of exp(cos / tau) over the
other samples of the same label and those of other labels: the sum is inside the logarithm, unlike
Khosla's L_out. 3DOS's score is the cosine of the projection to the nearest training one. The
activation is leaky on every network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.learning.trainer import Losses
from tasks.models.clouds import CloudModel, CloudSettings
from tasks.networks.heads import SLOPE, HeadSettings, cosines, embedding

if TYPE_CHECKING:
    import torch
    from torch import nn


class Configuration(HeadSettings, CloudSettings):
    """Sizes of the projector, and the loss."""

    temperature: float = Field(0.1, gt=0)
    """tau."""


class SupCon(CloudModel):
    name: ClassVar[str] = "supcon"
    version: ClassVar[int] = 2
    views: ClassVar[int] = 2
    configuration: ClassVar[type[Configuration]] = Configuration
    gives: ClassVar[frozenset[str]] = frozenset({"features"})
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # The schedule is made for 2,000 epochs; the documented command trains 250 of them.
        "paper": {
            "optimizer": "sgd",
            "learning_rate": 0.05,
            "final_rate": 0.0,
            "schedule_epochs": 2000,
            "warmup_epochs": 100,
            "warmup_rate": 1e-5,
        },
        "small": {"hidden": 256, "features": 256, "dropout": 0.0},
    }

    def build(self) -> dict[str, nn.Module]:
        return {"embedding": embedding(self.network.width, self.settings, SLOPE, bias=True)}

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        g = self.cloud_outputs(clouds)["features"].float()
        return {"loss": contrastive(g, labels, self.settings.temperature)}


def contrastive(g: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Every anchor needs another sample of its label; two views give it one."""
    import torch

    similar = cosines(g, g) / temperature
    alone = torch.eye(len(g), dtype=torch.bool, device=g.device)
    others = similar.masked_fill(alone, -torch.inf)
    same_label = others.masked_fill(labels[:, None] != labels[None], -torch.inf)
    return (others.logsumexp(1) - same_label.logsumexp(1)).mean()
