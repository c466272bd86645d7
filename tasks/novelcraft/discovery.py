"""Category discovery (GCD): labelled and unlabelled frames in, a cluster per frame out.

Three steps, usable apart: `fine_tune` a DINO transformer by contrast of two views, `embed` frames
with it, `semi_supervised_kmeans` on any feature matrix (these, VGG's or an autoencoder's).
`discovery_accuracy` is the Hungarian accuracy over all unlabelled rows, and the same match
restricted to classes that were labelled and to new ones (docs/novelcraft.md, rule 12).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import polars as pl
from pydantic import Field, model_validator

from schemas.errors import ConfigError
from tasks.learning.devices import choose_device, seeded, to_device
from tasks.learning.samples import NOVEL, Rows, Samples
from tasks.learning.trainer import (
    Batch,
    Losses,
    Trainable,
    TrainingSettings,
    compute_in_batches,
    train,
)
from tasks.learning.training import Progress

if TYPE_CHECKING:
    import torch

    from tasks.features.vit import VisionTransformer

log = logging.getLogger(__name__)

# The release normalises by CIFAR's values, not ImageNet's, and keeps the item bar.
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2023, 0.1994, 0.2010)
GREY = (0.299, 0.587, 0.114)


class Configuration(TrainingSettings):
    image_size: int = Field(224, ge=1, description="Side that frames are resized to.")
    patch: int = Field(16, ge=1, description="Side of a patch of the transformer.")
    width: int = Field(768, ge=1, description="Number of features.")
    depth: int = Field(12, ge=1, description="Blocks of the transformer.")
    heads: int = Field(12, ge=1, description="Attention heads of a block.")
    weights: Path | None = Field(
        None, exclude=True, description="DINO backbone file; none = random weights."
    )
    trained_blocks: int | None = Field(
        1,
        ge=0,
        description="Last blocks that are trained, with the norm; none = the whole network.",
    )
    head_hidden: int = Field(2048, ge=1, description="Units of the head's hidden layers.")
    head_bottleneck: int = Field(256, ge=1, description="Units before the head's last layer.")
    head_out: int = Field(65536, ge=1, description="Outputs of the head.")
    head_batch_norm: bool = Field(
        False, description="Batch normalisation in the head; without it random weights collapse."
    )
    supervised_weight: float = Field(0.35, ge=0, le=1, description="Share of the supervised loss.")
    temperature: float = Field(0.1, gt=0, description="Of both contrastive losses.")
    unlabelled_batch: int = Field(64, ge=2, description="Unlabelled frames in a step.")
    smallest_crop: float = Field(0.4, gt=0, le=1, description="Least area of a random crop.")
    final_factor: float = Field(
        0.01, ge=0, le=1, description="Factor that the rate falls to, by a cosine over all steps."
    )
    order: Literal["shuffled", "balanced"] = Field(
        "balanced", description="Each frame once an epoch, or classes equally often."
    )
    epochs: int = Field(200, ge=1, description="Passes over the labelled frames.")
    batch_size: int = Field(64, ge=2, description="Labelled frames in a step.")
    optimizer: Literal["sgd"] = Field("sgd", description="Rule of the steps.")
    learning_rate: float = Field(0.1, gt=0, description="Size of the steps.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Must be 0.")

    @model_validator(mode="after")
    def _plain_descent(self) -> Self:
        # The cosine is a factor on the loss, which equals one on the rate only without these.
        if self.momentum or self.weight_decay:
            raise ValueError("category discovery trains without momentum and weight decay")
        return self


PRESETS: Mapping[str, Configuration] = {
    "paper": Configuration(precision="float32"),
    "small": Configuration(
        image_size=48,
        patch=8,
        width=64,
        depth=2,
        heads=4,
        trained_blocks=None,
        head_hidden=256,
        head_bottleneck=64,
        head_out=256,
        head_batch_norm=True,
        epochs=10,
        batch_size=32,
        unlabelled_batch=32,
    ),
}


def new_backbone(settings: Configuration, *, seed: int) -> tuple[VisionTransformer, str]:
    """The transformer before fine-tuning, and where its weights come from."""
    from tasks.features.vit import VisionTransformer, load_weights

    with seeded([seed, 0], "cpu"):
        backbone = VisionTransformer(
            image_size=settings.image_size,
            patch=settings.patch,
            width=settings.width,
            depth=settings.depth,
            heads=settings.heads,
        )
    if settings.weights is None:
        origin = f"random, seed {seed}"
        log.warning("the transformer starts from random weights; set `weights` to a DINO file")
    else:
        origin = load_weights(backbone, settings.weights)
        log.info("the transformer starts from %s", origin)
    return backbone.eval(), origin


def fine_tune(
    backbone: VisionTransformer,
    labelled: Samples,
    unlabelled: Samples,
    settings: Configuration,
    *,
    seed: int = 0,
    device: str = "auto",
    checkpoints: Path | None = None,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Train `backbone` in place; returns the losses of each epoch.

    An epoch draws as many labelled frames as there are, class-balanced with replacement, and adds
    random unlabelled ones to each batch; labels of `unlabelled` are not looked at.
    """
    if len(labelled) < 2 or len(unlabelled) < 2:
        raise ConfigError(
            f"category discovery has {len(labelled)} labelled and {len(unlabelled)} unlabelled "
            "frames; it needs at least 2 of each"
        )
    if labelled.labels is None or (labelled.labels == NOVEL).any():
        raise ConfigError("category discovery: every labelled frame needs the number of its class")
    steps = settings.epochs * math.ceil(len(labelled) / settings.batch_size)
    history = train(
        Contrast(backbone, settings, unlabelled, steps, seed=seed),
        labelled,
        seed=seed,
        device=device,
        work=checkpoints,
        identity=unlabelled.fingerprint(),
        progress=progress,
    )
    return history.select("epoch", pl.col("contrast").alias("loss"), "unsupervised", "supervised")


class Contrast(Trainable):
    """A transformer with a head, trained so that two views of a frame are alike, and classes are.

    To each batch of labelled frames come random ones of `unlabelled`. The rate falls as a factor on
    the loss, by a cosine over `steps`.
    """

    name: ClassVar[str] = "discovery"

    def __init__(
        self,
        backbone: VisionTransformer,
        settings: Configuration,
        unlabelled: Samples,
        steps: int,
        *,
        seed: int,
    ) -> None:
        import torch
        from torch import nn

        from tasks.features.vit import DinoHead

        self.settings, self.unlabelled, self.steps = settings, unlabelled, steps
        backbone.train_last(settings.trained_blocks)
        with seeded([seed, 1], "cpu"):
            head = DinoHead(
                settings.width,
                hidden=settings.head_hidden,
                bottleneck=settings.head_bottleneck,
                out=settings.head_out,
                batch_norm=settings.head_batch_norm,
            )
        self.layers = nn.ModuleDict({"backbone": backbone, "head": head})
        self.layers.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def losses(self, batch: Batch) -> Losses:
        import torch
        from torch.nn import functional

        settings, layers = self.settings, self.layers
        images, numbers = batch.array("images"), batch.samples.labels
        assert numbers is not None
        rows = torch.randperm(len(self.unlabelled))[: settings.unlabelled_batch].numpy()
        others = Batch(self.unlabelled, rows, batch.device).array("images")
        both = resized(torch.cat([images, others]), settings.image_size)
        first, second = (
            functional.normalize(
                layers["head"](layers["backbone"](random_views(both, settings.smallest_crop))),
                dim=1,
            )
            for _ in range(2)
        )
        unsupervised = view_contrast(first, second, settings.temperature)
        labels = torch.from_numpy(numbers[batch.rows])
        supervised = class_contrast(first[: len(images)], labels, settings.temperature)
        share = settings.supervised_weight
        loss = (1 - share) * unsupervised + share * supervised
        cosine = (1 + torch.cos(math.pi * layers.steps / self.steps)) / 2
        layers.steps += 1
        factor = settings.final_factor + (1 - settings.final_factor) * cosine
        return {
            "loss": factor * loss,
            "contrast": loss,
            "unsupervised": unsupervised,
            "supervised": supervised,
        }


def view_contrast(first: torch.Tensor, second: torch.Tensor, temperature: float) -> torch.Tensor:
    """Each image against its other view; the denominator is the other images of the first view."""
    same = (first * second).sum(1) / temperature
    others = _similarities(first, temperature).logsumexp(1)
    return (others - same).mean()


def class_contrast(
    embeddings: torch.Tensor, labels: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Each image against the mean of the others of its class; one alone in its class is left out.

    (The release divides the sum over the others of a class by its size, not by one less.)
    `labels` are on the CPU, which must know how many have a pair.
    """
    alike = labels[:, None] == labels
    alike.fill_diagonal_(False)
    paired = alike.any(1).nonzero()[:, 0]
    alike = to_device(alike[paired].numpy(), embeddings.device)
    similar = _similarities(embeddings, temperature)[to_device(paired.numpy(), embeddings.device)]
    losses = similar.logsumexp(1) - similar.masked_fill(~alike, 0).sum(1) / alike.sum(1)
    return losses.sum() / max(len(losses), 1)


def _similarities(embeddings: torch.Tensor, temperature: float) -> torch.Tensor:
    """Dot products with -inf on the diagonal: nothing is compared with itself."""
    import torch

    diagonal = torch.eye(len(embeddings), dtype=torch.bool, device=embeddings.device)
    return (embeddings @ embeddings.T / temperature).masked_fill(diagonal, -torch.inf)


def resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 (N, H, W, 3) to floats (N, 3, size, size) in [0, 1]."""
    from torch.nn import functional

    unit = images.permute(0, 3, 1, 2).contiguous().float() / 255
    return functional.interpolate(
        unit, size=(size, size), mode="bicubic", align_corners=False, antialias=True
    ).clamp(0, 1)


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean, deviation = (_constant(v, images).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
    return (images - mean) / deviation


def _constant(values: Any, images: torch.Tensor) -> torch.Tensor:
    """Beside the images, in their type."""
    return to_device(np.array(values, np.float32), images.device).to(images.dtype)


def random_views(images: torch.Tensor, smallest_crop: float) -> torch.Tensor:
    """DINO's global views of square images in [0, 1], normalised: crop, flip, colours, grey, blur,
    solarise, all drawn per image from torch's random state, which the caller seeds."""
    import torch
    from torch.nn import functional

    count, size = len(images), images.shape[3]

    def uniform(low: float, high: float, device: Any = images.device) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, device=device)

    def happens(probability: float, device: Any = images.device) -> torch.Tensor:
        return torch.rand(count, device=device) < probability

    area, ratio = (
        uniform(smallest_crop, 1),
        uniform(math.log(3 / 4), math.log(4 / 3)).exp(),
    )
    wide, high = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    place = torch.zeros(count, 2, 3, device=images.device)
    place[:, 0, 0] = torch.where(happens(0.5), -wide, wide)
    place[:, 1, 1] = high
    place[:, 0, 2] = (1 - wide) * uniform(-1, 1)
    place[:, 1, 2] = (1 - high) * uniform(-1, 1)
    grid = functional.affine_grid(place, [count, 3, size, size], align_corners=False)
    views = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)

    jitter = happens(0.8).float()
    brightness, contrast = (1 + jitter * uniform(-0.4, 0.4) for _ in range(2))
    saturation = torch.where(happens(0.2), 0, 1 + jitter * uniform(-0.2, 0.2))
    turn = jitter * uniform(-0.1, 0.1)
    views = _recoloured(views, brightness, contrast, saturation, turn)

    # Drawn by the program, which must know the reach of the blur.
    blurred = happens(0.5, "cpu")
    solarised = ~blurred & happens(0.2, "cpu")
    blurred |= happens(0.1, "cpu")
    # DINO's radii are in pixels of 224.
    views = _blurred(views, torch.where(blurred, uniform(0.1, 2.0, "cpu"), 1e-3) * size / 224)
    flipped = to_device(solarised.numpy(), images.device)[:, None, None, None] & (views >= 0.5)
    return normalised(torch.where(flipped, 1 - views, views))


def _recoloured(
    images: torch.Tensor,
    brightness: torch.Tensor,
    contrast: torch.Tensor,
    saturation: torch.Tensor,
    turn: torch.Tensor,
) -> torch.Tensor:
    """One factor per image; `turn` rotates the hue about the grey axis, 1 = all the way round."""
    import torch

    images = (images * brightness[:, None, None, None]).clamp(0, 1)
    grey = _constant(GREY, images)
    mean = torch.einsum("nchw,c->nhw", images, grey).mean((1, 2))[:, None, None, None]
    images = mean + contrast[:, None, None, None] * (images - mean)
    angle = 2 * math.pi * turn[:, None, None]
    cross = _constant([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], images) / math.sqrt(3)
    eye, ones = torch.eye(3, device=images.device), images.new_ones(3, 3)
    rotate = angle.cos() * eye + (1 - angle.cos()) / 3 * ones + angle.sin() * cross
    vivid = saturation[:, None, None]
    matrix = rotate @ (vivid * eye + (1 - vivid) * grey.expand(3, 3))
    return torch.einsum("nchw,ndc->ndhw", images, matrix).clamp(0, 1)


def _blurred(images: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Gaussian blur with a deviation in pixels per image; `sigma` is on the CPU."""
    import torch
    from torch.nn import functional

    count, channels, height, width = images.shape
    reach = min(max(1, math.ceil(3 * float(sigma.max()))), height - 1, width - 1)
    sigma = to_device(sigma.numpy(), images.device)
    offsets = torch.arange(-reach, reach + 1, device=images.device)
    kernel = torch.softmax(-(offsets**2) / (2 * sigma[:, None] ** 2), 1)
    kernel = kernel.repeat_interleave(channels, 0)[:, None, None]
    flat = images.reshape(1, count * channels, height, width)
    for side, padding in (
        (kernel, (reach, reach, 0, 0)),
        (kernel.transpose(2, 3), (0, 0, reach, reach)),
    ):
        padded = functional.pad(flat, padding, mode="reflect")
        flat = functional.conv2d(padded, side, groups=count * channels)
    return flat.view_as(images)


def embed(
    backbone: VisionTransformer,
    images: Rows,
    settings: Configuration,
    *,
    device: str = "auto",
) -> np.ndarray:
    """uint8 (N, H, W, 3) to float32 (N, width): the features that are clustered."""
    device = choose_device(device)
    backbone.to(device).eval()

    def compute(batch: Batch) -> dict[str, torch.Tensor]:
        frames = resized(batch.array("images"), settings.image_size)
        return {"features": backbone(normalised(frames))}

    return compute_in_batches(compute, Samples.unnamed(images=images), device)["features"]


@dataclass(frozen=True, eq=False)
class Clusters:
    """Cluster j < len(classes) is that of labelled class classes[j]; the others are new.

    `inertias` are the sums of squared distances of the winning run, one per iteration and the last.
    """

    centers: np.ndarray
    classes: np.ndarray
    labelled: np.ndarray
    unlabelled: np.ndarray
    inertias: np.ndarray

    @property
    def inertia(self) -> float:
        return float(self.inertias[-1])

    def predict(self, features: np.ndarray) -> np.ndarray:
        """The nearest centre of each row; labelled rows are never re-assigned, so not for them."""
        return _distances(features.astype(np.float64), self.centers).argmin(1)


def semi_supervised_kmeans(
    labelled: np.ndarray,
    classes: np.ndarray,
    unlabelled: np.ndarray,
    clusters: int,
    *,
    seed: int = 0,
    runs: int = 10,
    iterations: int = 300,
    tolerance: float = 1e-4,
) -> Clusters:
    """k-means in which labelled rows stay in the cluster of their class.

    Centres begin at the class means, the new ones by k-means++ among the unlabelled rows; the run
    with the least inertia wins. `tolerance` is relative to the mean variance of the features.
    """
    labelled, unlabelled = (features.astype(np.float64) for features in (labelled, unlabelled))
    _check_features(labelled, classes, unlabelled)
    names, codes = np.unique(classes, return_inverse=True)
    new = clusters - len(names)
    if new < 0 or new > len(unlabelled):
        raise ConfigError(
            f"{clusters} clusters asked for, expected {len(names)} (the labelled classes) to "
            f"{len(names) + len(unlabelled)} (each unlabelled row one of its own)"
        )
    # Far from the origin the distances below would lose digits.
    everything = np.concatenate([labelled, unlabelled])
    middle = everything.mean(0)
    labelled, unlabelled = labelled - middle, unlabelled - middle
    smallest_move = tolerance * everything.var(0).mean()
    sums = np.zeros((clusters, labelled.shape[1]))
    np.add.at(sums, codes, labelled)
    sizes = np.bincount(codes, minlength=clusters).astype(np.float64)
    fixed = sums[: len(names)] / sizes[: len(names), None]

    best: tuple[list[float], np.ndarray, np.ndarray] | None = None
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        centers = np.concatenate([fixed, _far_rows(fixed, unlabelled, new, rng)])
        inertias: list[float] = []
        for _ in range(iterations):
            nearest, inertia = _assign(centers, labelled, codes, unlabelled)
            inertias.append(inertia)
            members = nearest == np.arange(clusters)[:, None]
            total = sizes + members.sum(1)
            moved = (sums + members @ unlabelled) / np.maximum(total, 1)[:, None]
            moved[total == 0] = centers[total == 0]
            move = ((moved - centers) ** 2).sum()
            centers = moved
            if move <= smallest_move:
                break
        nearest, inertia = _assign(centers, labelled, codes, unlabelled)
        inertias.append(inertia)
        if best is None or inertia < best[0][-1]:
            best = inertias, centers, nearest
    assert best is not None
    inertias, centers, nearest = best
    return Clusters(centers + middle, names, codes, nearest, np.array(inertias))


def _check_features(labelled: np.ndarray, classes: np.ndarray, unlabelled: np.ndarray) -> None:
    shapes = [features.shape for features in (labelled, unlabelled)]
    if (
        any(len(shape) != 2 or not shape[0] for shape in shapes)
        or shapes[0][1] != shapes[1][1]
        or len(classes) != len(labelled)
    ):
        raise ConfigError(
            f"features are {shapes[0]} labelled (with {len(classes)} classes) and {shapes[1]} "
            "unlabelled, expected rows of equal width in both and one class per labelled row"
        )
    if not (np.isfinite(labelled).all() and np.isfinite(unlabelled).all()):
        raise ConfigError("features to cluster are not all finite; look for a diverged network")


def _distances(rows: np.ndarray, centers: np.ndarray) -> np.ndarray:
    squared = (rows**2).sum(1)[:, None] + (centers**2).sum(1) - 2 * rows @ centers.T
    return np.maximum(squared, 0)


def _assign(
    centers: np.ndarray, labelled: np.ndarray, codes: np.ndarray, unlabelled: np.ndarray
) -> tuple[np.ndarray, float]:
    distances = _distances(unlabelled, centers)
    nearest = distances.argmin(1)
    inertia = distances[np.arange(len(nearest)), nearest].sum()
    return nearest, float(inertia + ((labelled - centers[codes]) ** 2).sum())


def _far_rows(
    centers: np.ndarray, rows: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """k-means++: rows drawn by squared distance to the nearest centre, the best of a few draws."""
    closest = _distances(rows, centers).min(1)
    picks = np.empty((count, rows.shape[1]))
    trials = 2 + int(math.log(max(count, 1)))
    for number in range(count):
        total = closest.sum()
        drawn = rng.choice(len(rows), trials, p=closest / total if total > 0 else None)
        left = np.minimum(closest, _distances(rows[drawn], rows))
        winner = left.sum(1).argmin()
        picks[number], closest = rows[drawn[winner]], left[winner]
    return picks


@dataclass(frozen=True, eq=False)
class DiscoveryAccuracy:
    """Shares of rows whose cluster is matched with their class; None where there are no rows.

    `confusion` counts rows by cluster and true class, `matched` is the class of each cluster.
    """

    all: float
    labelled: float | None
    new: float | None
    confusion: np.ndarray
    matched: np.ndarray


def discovery_accuracy(
    true: np.ndarray, clusters: np.ndarray, known: Collection[int]
) -> DiscoveryAccuracy:
    """One match of clusters with classes, the best over all rows, serves all three numbers."""
    from scipy.optimize import linear_sum_assignment

    if len(true) != len(clusters) or not len(true):
        raise ConfigError(
            f"{len(true)} true classes and {len(clusters)} clusters, expected equally many"
        )
    size = int(max(true.max(), clusters.max())) + 1
    confusion = np.bincount(clusters * size + true, minlength=size**2).reshape(size, size)
    _, matched = linear_sum_assignment(confusion, maximize=True)
    right = np.zeros(size, np.int64)
    right[matched] = confusion[np.arange(size), matched]
    rows = confusion.sum(0)
    is_known = np.isin(np.arange(size), list(known))

    def share(classes: np.ndarray) -> float | None:
        total = rows[classes].sum()
        return float(right[classes].sum() / total) if total else None

    return DiscoveryAccuracy(
        float(right.sum() / rows.sum()), share(is_known), share(~is_known), confusion, matched
    )
