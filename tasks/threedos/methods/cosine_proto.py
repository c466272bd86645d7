"""Cosine prototypes: cross entropy of s * cos(g, prototype) (rule 11: CosFace, m = 0).

Logits are the cosines, so 3DOS's score, the largest cosine, is MLS of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.threedos.methods.base import Losses, Method, TrainingSettings
from tasks.threedos.networks.heads import SMALL, HeadSettings, cosines, embedding, prototypes

if TYPE_CHECKING:
    import torch
    from torch import nn


class Configuration(HeadSettings, TrainingSettings):
    """Sizes of the head, and the loss."""

    scale: float = Field(30.0, gt=0)
    """s, factor of the cosines."""


class CosineProto(Method):
    name: ClassVar[str] = "cosine_proto"
    configuration: ClassVar[type[TrainingSettings]] = Configuration
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

    def losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        from torch.nn import functional

        found = self.logits(self.outputs(clouds)["features"]).float()
        loss = functional.cross_entropy(self.settings.scale * found, labels)
        return {"loss": loss, "accuracy": (found.argmax(1) == labels).float().mean()}

    def outputs(self, clouds: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"features": self.layers["embedding"](self.network.encode(clouds))}

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return cosines(g, self.layers["prototypes"].weight)
