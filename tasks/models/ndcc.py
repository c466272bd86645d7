"""NDCC: a classifier whose features are Gaussian per class; novelty = least squared Mahalanobis
distance (NovelCraft 5.1, Cheng and Vasconcelos 2021).

v = VGG features on the sphere of radius r; sigma_j = sigma + delta_j, shared by all classes;
mean of class y = W_y * sigma^2, so that W is the linear classifier of these Gaussians.
Loss = CE + lambda * (MD + gamma * NLL):
  MD  = half the squared Mahalanobis distance to the own class, sigma held;
  NLL = sum log sigma + the same half distance, v held.
The public code keeps sigma and delta outside the saved state, so its evaluation ran with sigma = 1
and delta = 0: `scatter = released`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from schemas.config import Settings
from tasks.learning.devices import to_host
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, Losses, make_optimizer
from tasks.models.vgg_classifier import SMALL_NETWORK, VggClassifier, VggSettings
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch
    from torch import nn


class Configuration(VggSettings):
    epochs: int = Field(30, ge=1, description="Passes over the training samples.")
    batch_size: int = Field(64, ge=1, description="Samples per step.")
    optimizer: Literal["adam", "sgd"] = Field("sgd", description="Rule of the steps.")
    learning_rate: float = Field(1e-4, gt=0, description="Size of the steps of the embedding.")
    classifier_rate: float = Field(1e-2, gt=0, description="The same for the last layer.")
    sigma_rate: float = Field(1e-2, gt=0, description="The same for sigma.")
    delta_rate: float = Field(1e-4, gt=0, description="The same for delta.")
    weight_decay: float = Field(5e-4, ge=0, description="L2 penalty on the embedding only.")
    milestones: tuple[int, ...] = Field((25, 28, 30), description="Epochs after which rates drop.")
    radius: float = Field(16.0, gt=0, description="Length of every feature vector.")
    consistency: float = Field(0.2, ge=0, description="lambda, weight of the Gaussian terms.")
    likelihood: float = Field(1 / 4096, ge=0, description="gamma, weight of NLL among them.")
    train_mode: bool = Field(
        False, description="Dropout and batch statistics in training; the paper has neither."
    )
    scatter: Literal["trained", "released"] = Field(
        "trained", description="Deviations used in scoring; released = 1, as the public code."
    )


class Ndcc(VggClassifier):
    name: ClassVar[str] = "ndcc"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"precision": "float32"},
        "small": dict(
            **SMALL_NETWORK,
            epochs=10,
            batch_size=32,
            learning_rate=1e-2,
            milestones=(8,),
            likelihood=1 / 128,
            train_mode=True,
        ),
    }

    def build(self) -> dict[str, nn.Module]:
        import torch
        from torch import nn

        scatter = {"sigma": torch.ones(1), "delta": torch.zeros(self.settings.hidden)}
        return {**super().build(), "scatter": nn.ParameterDict(scatter)}

    def classify(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and features on the sphere."""
        from torch.nn import functional

        embedded = self.layers["vgg"].embed(inputs).float()
        features = self.settings.radius * functional.normalize(embedded)
        return self.last_layer(features), features

    def losses(self, batch: Batch) -> Losses:
        from torch.nn import functional

        settings, labels = self.settings, batch.labels
        logits, features = self.classify(self.inputs(batch))
        variance = self._deviation() ** 2
        means = (self.last_layer.weight * variance)[labels]
        logits = logits.float()
        entropy = functional.cross_entropy(logits, labels)
        distance = ((features - means) ** 2 / variance.detach()).sum(1).mean() / 2
        spread = ((features.detach() - means) ** 2 / variance).sum(1).mean() / 2
        likelihood = variance.log().sum() / 2 + spread
        return {
            "loss": entropy + settings.consistency * (distance + settings.likelihood * likelihood),
            "cross_entropy": entropy,
            "distance": distance,
            "accuracy": (logits.argmax(1) == labels).float().mean(),
        }

    def _deviation(self) -> torch.Tensor:
        return self.layers["scatter"]["sigma"] + self.layers["scatter"]["delta"]

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        settings, scatter = self.settings, self.layers["scatter"]
        last = list(self.last_layer.parameters())
        rest = [p for p in self.layers["vgg"].parameters() if all(p is not one for one in last)]
        groups = [
            {"params": rest},
            {"params": last, "lr": settings.classifier_rate, "weight_decay": 0},
            {"params": [scatter["sigma"]], "lr": settings.sigma_rate, "weight_decay": 0},
            {"params": [scatter["delta"]], "lr": settings.delta_rate, "weight_decay": 0},
        ]
        return {"main": make_optimizer(groups, settings)}

    def set_training(self, training: bool) -> None:
        super().set_training(training and self.settings.train_mode)

    def _outputs(self, samples: Samples) -> Outputs:
        outputs = super()._outputs(samples)
        assert outputs.features is not None
        means, variance = self.gaussians()
        features = outputs.features.astype(np.float64)
        distances = [((features - mean) ** 2 / variance).sum(1) for mean in means]
        return replace(outputs, novelty=np.min(distances, 0))

    def gaussians(self) -> tuple[np.ndarray, np.ndarray]:
        """Means (classes, features) and the shared variances (features), as used in scoring."""
        scatter = self.layers["scatter"]
        weight, sigma, delta = (
            to_host(value).astype(np.float64)
            for value in (self.last_layer.weight, scatter["sigma"], scatter["delta"])
        )
        deviation = sigma + delta
        if self.settings.scatter == "released":
            deviation = np.ones_like(deviation)
        return weight * deviation**2, deviation**2
