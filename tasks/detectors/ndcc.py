"""NDCC: a classifier whose features are Gaussian per class; score = least squared Mahalanobis
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from tasks.detectors.base import Detector
from tasks.detectors.vgg_classifier import (
    CLASSIFIER_GIVES,
    SMALL_NETWORK,
    VggSettings,
    build,
    new_network,
    preprocessor,
)
from tasks.learning.loop import TrainingSettings, in_batches, train
from tasks.learning.samples import Samples
from tasks.learning.training import Progress
from tasks.scores.base import Head, Outputs

if TYPE_CHECKING:
    import torch

    from tasks.features.vgg import Vgg


class Configuration(VggSettings, TrainingSettings):
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


class Ndcc(Detector):
    name: ClassVar[str] = "ndcc"
    needs: ClassVar[tuple[str, ...]] = ("images",)
    gives: ClassVar[frozenset[str]] = CLASSIFIER_GIVES
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
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
    network: Vgg
    sigma: torch.Tensor
    delta: torch.Tensor

    def _fit(
        self,
        train_samples: Samples,
        valid: Samples | None,
        *,
        seed: int,
        checkpoints: Path | None,
        progress: Progress | None,
    ) -> pl.DataFrame:
        import torch
        from torch import nn
        from torch.nn import functional

        settings = self.settings
        network, origin = new_network(settings, train_samples.labels, seed=seed, device=self.device)
        # Held by the network so that checkpoints keep them.
        network.sigma = nn.Parameter(torch.ones(1, device=self.device))
        network.delta = nn.Parameter(torch.zeros(settings.hidden, device=self.device))
        prepare = preprocessor(settings)
        last = network.classifier[6]

        def batch_loss(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            features = self._on_sphere(network, prepare(images))
            variance = (network.sigma + network.delta) ** 2
            means = (last.weight * variance)[labels]
            logits = last(features).float()
            entropy = functional.cross_entropy(logits, labels)
            distance = ((features - means) ** 2 / variance.detach()).sum(1).mean() / 2
            spread = ((features.detach() - means) ** 2 / variance).sum(1).mean() / 2
            likelihood = variance.log().sum() / 2 + spread
            loss = entropy + settings.consistency * (distance + settings.likelihood * likelihood)
            return {
                "loss": loss,
                "cross_entropy": entropy,
                "distance": distance,
                "accuracy": (logits.argmax(1) == labels).float().mean(),
            }

        head = {id(last.weight), id(last.bias), id(network.sigma), id(network.delta)}
        groups = [
            {"params": [p for p in network.parameters() if id(p) not in head]},
            {"params": list(last.parameters()), "lr": settings.classifier_rate, "weight_decay": 0},
            {"params": [network.sigma], "lr": settings.sigma_rate, "weight_decay": 0},
            {"params": [network.delta], "lr": settings.delta_rate, "weight_decay": 0},
        ]
        history = train(
            network,
            batch_loss,
            train_samples,
            settings,
            seed=seed,
            device=self.device,
            groups=groups,
            valid=valid,
            train_mode=settings.train_mode,
            checkpoint=checkpoints / "network.safetensors" if checkpoints else None,
            progress=progress,
        )
        self.network = network
        self.record = {"initial_weights": origin}
        return history

    def _on_sphere(self, network: Vgg, images: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional

        return self.settings.radius * functional.normalize(network.embed(images).float())

    def _outputs(self, samples: Samples) -> Outputs:
        """Features are those on the sphere."""
        prepare = preprocessor(self.settings)

        def compute(images: torch.Tensor) -> dict[str, torch.Tensor]:
            features = self._on_sphere(self.network, prepare(images))
            return {"features": features, "logits": self.network.classifier[6](features)}

        found = in_batches(compute, samples.images(), self.device)
        means, variance = self.gaussians()
        features = found["features"].astype(np.float64)
        distances = [((features - mean) ** 2 / variance).sum(1) for mean in means]
        return Outputs(found["logits"], found["features"], np.min(distances, 0))

    def head(self) -> Head | None:
        return Head.of(self.network.classifier[6])

    def gaussians(self) -> tuple[np.ndarray, np.ndarray]:
        """Means (classes, features) and the shared variances (features), as used in scoring."""
        state = {name: value.detach().cpu().double() for name, value in self.state().items()}
        deviation = (state["sigma"] + state["delta"]).numpy()
        if self.settings.scatter == "released":
            deviation = np.ones_like(deviation)
        return state["classifier.6.weight"].numpy() * deviation**2, deviation**2

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return dict(self.network.state_dict())

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        from torch import nn

        self.network = build(self.settings, len(state["classifier.6.bias"]))
        self.network.sigma = nn.Parameter(state["sigma"])
        self.network.delta = nn.Parameter(state["delta"])
        self.network.load_state_dict(state)
        self.network.to(self.device).eval()
