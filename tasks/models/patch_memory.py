"""Memory of patches: novelty = distance of an image's strangest patches to those seen in training.

PatchCore (Roth et al., CVPR 2022) on EfficientNet-Lite0 instead of WideResNet-50, whose weights
come with no package. Images enter; each becomes a grid of locally averaged mid-level features
(3.1). Training keeps a part of them that covers all: a greedy k-centre choice in a random
projection (3.2), or one at random. What it chooses from is bounded, so that a training takes the
same memory with any number of images; the paper chooses from all patches. An image scores by its
patches farthest from the memory (3.3), weighed by the memories around (the paper names no number; 9
is anomalib's). No labels are used and nothing is trained. `small` differs where it helped on
validation frames of the project's own drawn sample, not of the real NovelCraft: the third stage
alone, whose grid of 8 pixels fits small objects, and the farthest 1 % of the patches, the share
from which NovelCraft calls a frame novel.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.learning.devices import seeded, to_device, to_host
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, compute_in_batches
from tasks.models.base import Fitting, Model
from tasks.models.frames import FrameSettings
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch
    from torch import nn

PROJECTED = 128
# Distances held at once.
LARGEST = 1 << 22
# Memories chosen before it is asked whether a point is left.
ASKED_EVERY = 64


class Configuration(FrameSettings):
    layers: tuple[int, ...] = Field(
        (3, 5), min_length=1, description="Stages of the network (1 to 7) that describe a patch."
    )
    average: int = Field(3, ge=1, description="Side of the square of cells averaged; odd.")
    scale: float = Field(1.0, gt=0, description="Factor of both sides of an image.")
    candidates: int | None = Field(
        1_000_000, ge=1, description="Training patches drawn at random to choose from; none: all."
    )
    choice: Literal["k_centre", "random"] = Field(
        "k_centre",
        description="Which candidates are remembered: each next one the farthest from those "
        "before, or drawn.",
    )
    coreset: float = Field(0.01, gt=0, le=1, description="Share of the candidates remembered.")
    share: float = Field(
        0.0, ge=0, le=1, description="Share of an image's patches that counts; 0: the farthest one."
    )
    neighbours: int = Field(
        0, ge=0, description="Memories that re-weight the score (equation 7); 0: not re-weighted."
    )
    batch_size: int = Field(4, ge=1, description="Images at once.")


class PatchMemory(Model):
    name: ClassVar[str] = "patch_memory"
    modality: ClassVar[str] = "image"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"neighbours": 9},
        "small": {"layers": (3,), "candidates": 60_000, "coreset": 0.05, "share": 0.01},
    }
    memory: torch.Tensor

    @classmethod
    def weights_files(cls, settings: Any) -> dict[str, Path]:
        from tasks.features.efficientnet_weights import weights_file

        return {"efficientnet_lite0": weights_file()}

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        from tasks.features.efficientnet import weights_record

        self.record = {"weights": weights_record()}
        candidates, patches = self._candidates(train, fitting.seed)
        size = max(1, round(len(candidates) * self.settings.coreset))
        with seeded([fitting.seed, 1], self.device):
            choose = k_centre if self.settings.choice == "k_centre" else random_rows
            rows, radius = choose(candidates, size)
        self.memory = candidates[rows]
        return pl.DataFrame(
            {
                "patches": [patches],
                "candidates": [len(candidates)],
                "memories": [len(rows)],
                "radius": [radius],
            }
        )

    def _candidates(self, samples: Samples, seed: int) -> tuple[torch.Tensor, int]:
        """Features (rows, d) of the patches drawn, in order, and how many patches there were."""

        network = self._network()
        first = to_device(samples.images()[:1], self.device)
        grid = self._patches(network, first).shape[1]
        patches = len(samples) * grid
        draws = min(self.settings.candidates or patches, patches)
        drawn = np.random.default_rng(seed).choice(patches, draws, replace=False, shuffle=False)
        drawn.sort()

        def compute(batch: Batch) -> dict[str, torch.Tensor]:
            described = self._patches(network, batch.array("images")).flatten(0, 1)
            start = int(batch.rows[0]) * grid
            low, high = np.searchsorted(drawn, (start, start + len(described)))
            rows = to_device(drawn[low:high] - start, self.device)
            return {"patches": described[rows]}

        size = self.settings.batch_size
        candidates = compute_in_batches(compute, samples, self.device, size)["patches"]
        return to_device(candidates, self.device), patches

    def _patches(self, network: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """uint8 (N, H, W, 3) to (N, patches, d)."""
        from tasks.features.efficientnet import patch_maps

        settings = self.settings
        return patch_maps(
            network,
            images,
            layers=settings.layers,
            average=settings.average,
            rows=settings.item_bar_rows,
            scale=settings.scale,
        ).flatten(1, 2)

    def _network(self) -> nn.Module:
        from tasks.features.efficientnet import load_efficientnet, weights_record

        fitted_on, installed = self.record.get("weights"), weights_record()
        if fitted_on != installed:
            raise ConfigError(
                f"model {self.name} was fitted on the weights {fitted_on}, but {installed} are "
                "installed; install those or fit it again"
            )
        return load_efficientnet(self.device)

    def _outputs(self, samples: Samples) -> Outputs:
        network = self._network()
        memory = self.memory.to(self.device)

        def compute(batch: Batch) -> dict[str, torch.Tensor]:
            patches = self._patches(network, batch.array("images"))
            share, neighbours = self.settings.share, self.settings.neighbours
            return {"novelty": strangeness(patches, memory, share, neighbours)}

        size = self.settings.batch_size
        novelty = compute_in_batches(compute, samples, self.device, size)["novelty"]
        return Outputs(novelty=novelty.astype(np.float64))

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {"memory": self.memory}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.memory = state["memory"]


def k_centre(points: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """Rows of `points` (n, d) such that each next one is the farthest from all before, measured in
    a random projection; and the distance of the farthest point left. Ends early if none is left."""
    import torch

    if points.shape[1] > PROJECTED:
        projection = torch.randn(points.shape[1], PROJECTED, device=points.device)
        points = points @ (projection / PROJECTED**0.5)
    norms = points.square().sum(1)
    row = torch.randint(len(points), (1,), device=points.device)
    squared = torch.full_like(norms, torch.inf)
    rows: list[torch.Tensor] = []
    left = []
    for number in range(1, count + 1):
        rows.append(row)
        other = points[row][0]
        squared = torch.minimum(squared, norms + norms[row] - 2 * (points @ other))
        # Rounding may leave a point at a distance from itself.
        squared[row] = 0
        row = squared.argmax(0, keepdim=True)
        left.append(squared[row])
        if number % ASKED_EVERY == 0 or number == count:
            # Not at every step: the program would wait for the device each time.
            none_left = np.flatnonzero(to_host(torch.cat(left)) <= 0)
            if none_left.size:
                rows = rows[: none_left[0] + 1]
                break
    return torch.cat(rows), float(to_host(squared[row].clamp(min=0).sqrt())[0])


def random_rows(points: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """Rows of `points` (n, d) drawn, in order; and the distance of the farthest point left."""
    import torch

    rows = torch.randperm(len(points), device=points.device)[:count].sort().values
    return rows, float(nearest(points, points[rows])[0].max())


def nearest(points: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance of each of the points (n, d) to the memory (m, d), and the row it is nearest to."""
    import torch

    norms = memory.square().sum(1)
    minima = [
        torch.addmm(norms, part, memory.T, alpha=-2).min(1)
        for part in points.split(max(1, LARGEST // len(memory)))
    ]
    squared = points.square().sum(1) + torch.cat([part.values for part in minima])
    return squared.clamp(min=0).sqrt(), torch.cat([part.indices for part in minima])


def strangeness(
    patches: torch.Tensor, memory: torch.Tensor, share: float, neighbours: int
) -> torch.Tensor:
    """Scores (N,) of images with patches (N, p, d): mean distance of the farthest `share` of them.

    With `neighbours` it is multiplied by 1 - exp(s) / sum(exp(t)), where s and t are the distances
    of the farthest patch to its nearest memory and to the memories around that one (equation 7).
    """
    import torch

    images, count, width = patches.shape
    distances, rows = nearest(patches.reshape(-1, width), memory)
    distances, rows = distances.view(images, count), rows.view(images, count)
    scores = distances.topk(max(1, round(count * share)), dim=1).values.mean(1)
    # A memory alone would weigh everything by 0.
    if min(neighbours, len(memory)) < 2:
        return scores
    farthest = distances.argmax(1, keepdim=True)
    patch = patches.take_along_dim(farthest[:, :, None], 1)
    anchors = memory[rows.take_along_dim(farthest, 1)[:, 0]]
    around = torch.cdist(anchors, memory).topk(min(neighbours, len(memory)), largest=False).indices
    others = (memory[around] - patch).square().sum(2).sqrt()
    largest = distances.take_along_dim(farthest, 1)
    return scores * (1 - (largest[:, 0] - others.logsumexp(1)).exp())
