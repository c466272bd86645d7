"""Models of point clouds: what they share beside the network below (3DOS rules 6, 7, 10 and 11).

Samples have the array `clouds`, float32 (N, P, 3), as long as the longest cloud. A step draws
`points` of each cloud anew and augments them. A pass takes the same places of every cloud, `votes`
times, normalises them again and averages: `about["normalisation"]` says how the clouds were
normalised, `about["points"]` how many places are taken where it is not `points`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.errors import ConfigError
from schemas.runs import Origin
from tasks import networks
from tasks.learning.compiling import compile_layers
from tasks.learning.devices import Precision, mixed, seeded, to_device
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, Losses, TrainingSettings
from tasks.models.base import Fitting, NetworkModel
from tasks.models.released_clouds import RELEASED, fill_released
from tasks.networks.augment import Augmentation, UpAxis, augment, draw_points, normalised
from tasks.networks.heads import initialise

if TYPE_CHECKING:
    import torch

    from tasks.scores.base import Outputs

SCORING_BATCH = 16


class CloudSettings(TrainingSettings):
    """How a model of clouds is trained; defaults are 3DOS's for DGCNN."""

    epochs: int = Field(250, ge=1)
    """Passes over the training shapes."""
    batch_size: int = Field(64, ge=2)
    """Shapes per step."""
    order: Literal["shuffled", "full", "balanced", "endless"] = "full"
    """Each shape once an epoch; in full batches, without the rest; by class; endless series."""
    points: int = Field(1024, ge=2)
    """Points drawn of each cloud."""
    scan_points: int | None = Field(2048, ge=2)
    """Points taken of scans: instead of `points` in training on them and in tests of them."""
    votes: int = Field(1, ge=1)
    """Draws of points over which the outputs of a trained model are averaged."""
    augmentation: Augmentation = "st"
    """Random changes: none, st (synthetic), rw (scans); tracks with scans have rw for st."""
    up: UpAxis = "y"
    """Axis of the rw turns; the raw OFF files of ModelNet40 have z up."""
    optimizer: Literal["adam", "sgd"] = "sgd"
    """Rule of the steps."""
    learning_rate: float = Field(0.1, gt=0)
    """Size of the first steps."""
    schedule: Literal["steps", "cosine", "one_cycle"] = "cosine"
    """Rate: lower after each milestone; a cosine; or one rise and fall over all steps."""
    final_rate: float = Field(1e-4, ge=0)
    """Size at the end of the cosine."""
    weight_decay: float = Field(1e-4, ge=0)
    """L2 penalty of the optimiser."""
    precision: Precision = "float32"
    """Arithmetic of trainings and passes; the release's is float32."""
    initial_weights: Literal["normal", "torch"] = "normal"
    """N(0, .02) as released, or what torch gives its layers."""
    weights: Path | None = Field(None, exclude=True)
    """A checkpoint (.pth) of the released code to use as it is; nothing is trained then."""


# For a CPU and few shapes. It was chosen on training shapes of ModelNet40 only; averaging four
# draws of 256 points raised AUROC of the nearest distance there by .01 to .04.
SMALL: dict[str, Any] = {
    "epochs": 60,
    "batch_size": 32,
    "order": "shuffled",
    "points": 256,
    "scan_points": None,
    "votes": 4,
    "optimizer": "adam",
    "learning_rate": 3e-3,
    "final_rate": 1e-5,
    "precision": "auto",
    "initial_weights": "torch",
}


class CloudModel(NetworkModel):
    """Subclasses implement `build` and `cloud_losses`; those with classes give `logits` too.

    Presets are what differs from the settings that the network is trained with.
    """

    modality: ClassVar[str] = "cloud"
    uses_network: ClassVar[bool] = True
    configuration: ClassVar[type[CloudSettings]] = CloudSettings
    views: ClassVar[int] = 1
    """Augmented copies of each shape in a batch, one after the other."""
    torch_weights: ClassVar[frozenset[str]] = frozenset()
    """Layers that start with torch's weights whatever `initial_weights` says."""

    @classmethod
    def preset_values(cls, preset: str, network: str | None) -> dict[str, Any]:
        below = networks.find(network).training(preset) if network else {}
        return {**below, **(SMALL if preset == "small" else {}), **cls.presets[preset]}

    @classmethod
    def weights_files(cls, settings: Any) -> dict[str, Path]:
        files = super().weights_files(settings)
        if files and cls.name not in RELEASED:
            raise ConfigError(
                f"model {cls.name} takes no weights; those that do are {', '.join(RELEASED)}"
            )
        return files

    @classmethod
    def origin_of(cls, settings: Any) -> Origin:
        return "trained" if settings.weights is None else "frozen"

    @abstractmethod
    def cloud_losses(self, clouds: torch.Tensor, labels: torch.Tensor) -> Losses:
        """Scalars of clouds (B, P, 3), drawn and augmented, and labels (B,)."""

    def cloud_outputs(self, clouds: torch.Tensor) -> dict[str, torch.Tensor]:
        """`features`, the penultimate g, and `novelty` where the model has a score of its own."""
        return {"features": self.layers["embedding"](self.network.encode(clouds))}

    def logits(self, g: torch.Tensor) -> torch.Tensor | None:
        """Of features (N, D), one per class; none for a model without classes."""
        return None

    # ------------------------------------------------------------ fitting

    def survey(self, train: Samples) -> dict[str, Any]:
        """Nothing but a check that clouds and labels can be learnt from."""
        check_clouds(train)
        labels = train.labels
        if labels is None or len(labels) < 2:
            raise ConfigError(
                f"model {self.name} learns from at least two labelled shapes, found "
                f"{len(train) if labels is not None else 'no labels'}"
            )
        present = np.unique(labels)
        if len(present) != self.classes:
            raise ConfigError(
                f"labels are {present.tolist()}, expected 0 to {len(present) - 1} without gaps; "
                "train on known classes only and number them"
            )
        return {}

    def initialise(self) -> None:
        if self.settings.initial_weights == "normal":
            for name, layers in self.layers.items():
                if name not in self.torch_weights:
                    initialise(layers)

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        path = self.settings.weights
        if path is None:
            return super()._fit(train, valid, fitting)
        self.record = self.survey(train)
        with seeded([fitting.seed], self.device):
            self._make_layers()
        self.record["initial_weights"] = fill_released(self, path)
        self.layers.to(self.device).eval()
        compile_layers(self)
        return pl.DataFrame()

    def augmented(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Drawn and augmented clouds of a batch, one view after the other, and their labels."""
        import torch

        settings, clouds = self.settings, batch.array("clouds")
        # Turns are products of matrices: in bfloat16 they would move the points.
        with torch.autocast(clouds.device.type, enabled=False):
            views = [
                augment(draw_points(clouds, settings.points), settings.augmentation, up=settings.up)
                for _ in range(self.views)
            ]
        return torch.cat(views), batch.labels.repeat(self.views)

    def losses(self, batch: Batch) -> Losses:
        return self.cloud_losses(*self.augmented(batch))

    # ------------------------------------------------------------ use

    def scoring_batch(self) -> int:
        return SCORING_BATCH

    def _outputs(self, samples: Samples) -> Outputs:
        check_clouds(samples)
        return super()._outputs(samples)

    def compute(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        import torch

        clouds, about = batch.array("clouds"), batch.samples.about
        count = about.get("points") or self.settings.points
        normalisation = about.get("normalisation", "unit_sphere")
        with mixed(self.settings.precision, self.device):
            votes = [
                self.cloud_outputs(
                    normalised(clouds[:, to_device(places, clouds.device)], normalisation)
                )
                for places in vote_places(clouds.shape[1], count, self.settings.votes)
            ]
        mean = {name: torch.stack([v[name].float() for v in votes]).mean(0) for name in votes[0]}
        logits = self.logits(mean["features"])
        return mean if logits is None else {"logits": logits, **mean}


def check_clouds(samples: Samples) -> None:
    clouds = samples.array("clouds")
    if len(clouds.shape) != 3 or clouds.shape[2] != 3 or clouds.dtype != np.float32:
        raise ConfigError(
            f"clouds are {clouds.dtype} {clouds.shape}, expected float32 (shapes, points, 3)"
        )


def vote_places(points: int, count: int, votes: int) -> list[np.ndarray]:
    """Places of each vote, random ones (a stored cloud begins with its farthest points, which
    training does not prefer); no place serves twice before all have served."""
    count = min(count, points)
    apart = points // count
    rounds = [
        np.random.default_rng([0, number]).permutation(points)
        for number in range(math.ceil(votes / apart))
    ]
    starts = [(vote // apart, vote % apart * count) for vote in range(votes)]
    return [np.sort(rounds[number][start : start + count]) for number, start in starts]
