"""Sub-centre ArcFace: K directions a class, an angular margin on the own one (3DOS rule 11).

Logits are, for each class, the largest cosine over its sub-centres; 3DOS's score is the cosine of g
to the nearest training g (`tasks.scores.cosine`).
"""

from __future__ import annotations

import math
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

    subcenters: int = Field(3, ge=1)
    """K, directions of each class."""
    scale: float = Field(30.0, gt=0)
    """s, factor of the cosines."""
    margin: float = Field(0.5, ge=0, lt=math.pi / 2)
    """m, radians added to the angle to the own class."""


class SubcenterArcFace(CloudModel):
    name: ClassVar[str] = "subcenter_arcface"
    version: ClassVar[int] = 2
    configuration: ClassVar[type[Configuration]] = Configuration
    gives: ClassVar[frozenset[str]] = frozenset({"logits", "features"})
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},  # tasks/threedos/runs.py has what differs by track
        "small": SMALL,
    }

    def build(self) -> dict[str, nn.Module]:
        inside, slope = self.network.width, self.network.slope
        return {
            "embedding": embedding(inside, self.settings, slope, bias=True),
            "prototypes": prototypes(self.classes * self.settings.subcenters, self.settings),
        }

    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        from torch.nn import functional

        logits = self.logits(self.cloud_outputs(clouds)["features"]).float()
        pushed = with_margin(logits, labels, self.settings.margin)
        loss = functional.cross_entropy(self.settings.scale * pushed, labels)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        similarities = cosines(g, self.layers["prototypes"]["weight"])
        return similarities.view(len(g), self.classes, -1).amax(2)


def with_margin(similarities: torch.Tensor, labels: torch.Tensor, margin: float) -> torch.Tensor:
    """Cosines with cos(angle + m) at the label; beyond angle pi - m, where that would rise again,
    cos(angle) - m sin(m) (ArcFace without `easy_margin`)."""
    import torch

    cosine = similarities.gather(1, labels[:, None])
    sine = (1 - cosine.square()).clamp(min=1e-6).sqrt()
    pushed = cosine * math.cos(margin) - sine * math.sin(margin)
    pushed = torch.where(cosine > -math.cos(margin), pushed, cosine - margin * math.sin(margin))
    return similarities.scatter(1, labels[:, None], pushed)
