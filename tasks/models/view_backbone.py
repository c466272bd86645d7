"""A frozen picture network on views of a cloud, and a linear head: the model `backbone` for shapes.

A cloud is shown from fixed directions as shaded pictures (tasks/features/shape_views.py), which
pass together and without other clouds; the features of a cloud are the largest over its views, or
their mean. Networks, head and training are those of the model `backbone`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.learning.devices import to_device
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, TrainingSettings, compute_in_batches
from tasks.models.backbone import Backbone, PictureSettings, embed_pictures
from tasks.models.clouds import check_clouds, vote_places
from tasks.networks.augment import normalised

if TYPE_CHECKING:
    import torch


class Configuration(PictureSettings, TrainingSettings):
    shown: float | None = Field(
        1, gt=0, le=1, description="Share of a view that is shown; none: the network's own."
    )
    views: int = Field(6, ge=1, description="Directions around the up axis, evenly spread.")
    elevation: float = Field(
        30, ge=-90, le=90, description="Degrees that viewers stand above the middle of the shape."
    )
    pooling: Literal["max", "mean"] = Field(
        "max", description="How the features of the views become those of the shape."
    )
    spread: float = Field(
        1, gt=0, description="Width of the gaps between points that are filled, by their number."
    )
    points: int | None = Field(
        None, ge=2, description="Points of each cloud that are shown; none: all that are stored."
    )
    embedding_batch: int = Field(1, ge=1, description="Clouds per pass of the network.")
    epochs: int = Field(20, ge=1, description="Passes over the training samples.")
    batch_size: int = Field(128, ge=1, description="Samples per step.")
    learning_rate: float = Field(1e-3, gt=0, description="Size of the first steps.")
    weight_decay: float = Field(1e-2, ge=0, description="L2 penalty of the optimiser.")


class ViewBackbone(Backbone):
    name: ClassVar[str] = "view_backbone"
    modality: ClassVar[str] = "cloud"
    configuration: ClassVar[type[Settings]] = Configuration
    embeds: ClassVar[tuple[str, ...]] = (
        *("side", "shown", "mean", "deviation", "views", "elevation", "pooling", "spread"),
        *("points", "embedding_batch", "cpu_threads"),
    )

    def pictures(self, clouds: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """uint8 (N, views, side, side, 3) of clouds (N, P, 3)."""
        from tasks.features.shape_views import shape_pictures

        side = self.settings.side or self.frozen.side
        pixels = round(side / (self.settings.shown or self.frozen.shown))
        return shape_pictures(normalised(clouds), turns, pixels, self.settings.spread)

    def turns(self) -> torch.Tensor:
        """The directions, on the device."""
        from tasks.features.shape_views import directions

        turns = directions(self.settings.views, self.settings.elevation)
        return to_device(turns.numpy(), self.device)

    def embed(self, samples: Samples) -> np.ndarray:
        check_clouds(samples)
        stored = samples.array("clouds").shape[1]
        if not stored:
            raise ConfigError(f"model {self.name}: clouds without points cannot be shown")
        count = samples.about.get("points") or self.settings.points or stored
        (places,) = (to_device(vote, self.device) for vote in vote_places(stored, count, 1))
        network, turns = self.frozen, self.turns()

        def compute(batch: Batch) -> dict[str, torch.Tensor]:
            pictures = self.pictures(batch.array("clouds")[:, places], turns)
            vectors = embed_pictures(network, pictures.flatten(0, 1), self.settings)
            views = vectors.view(*pictures.shape[:2], vectors.shape[1])
            pooled = views.mean(1) if self.settings.pooling == "mean" else views.amax(1)
            return {"features": pooled}

        batch = self.settings.embedding_batch
        return compute_in_batches(compute, samples, self.device, batch)["features"]
