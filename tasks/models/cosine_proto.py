"""Cosine prototypes: cross entropy of s * cos(g, prototype) (3DOS rule 11: CosFace, m = 0).

Logits are the cosines, so 3DOS's score, the largest cosine, is MLS of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.learning.trainer import Losses
from tasks.models.clouds import CloudModel, CloudSettings
from tasks.networks.heads import SMALL, HeadSettings, cosines, embedding, prototypes

if TYPE_CHECKING:
    import torch
    from torch import nn


class Configuration(HeadSettings, CloudSettings):
    """Sizes of the head, and the loss."""

    scale: float = Field(30.0, gt=0)
    """s, factor of the cosines."""


class CosineProto(CloudModel):
    name: ClassVar[str] = "cosine_proto"
    version: ClassVar[int] = 2
    configuration: ClassVar[type[Configuration]] = Configuration
    gives: ClassVar[frozenset[str]] = frozenset({"logits", "features"})
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": SMALL,
    }

    def build(self) -> dict[str, nn.Module]:
        inside, slope = self.network.width, self.network.slope
        return {
            "embedding": embedding(inside, self.settings, slope, bias=True),
            "prototypes": prototypes(self.classes, self.settings),
        }

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        from torch.nn import functional

        logits = self.logits(self.cloud_outputs(clouds)["features"]).float()
        loss = functional.cross_entropy(self.settings.scale * logits, labels)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return cosines(g, self.layers["prototypes"]["weight"])
