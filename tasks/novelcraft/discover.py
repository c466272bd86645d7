"""Category discovery as a stage: cluster validation frames of known and new classes (GCD).

Enters: pictures of the training frames (labelled) and validation frames (unlabelled). Leaves: the
cluster of every unlabelled frame and the accuracy over all, labelled-class and new-class frames,
with features before (`plain`) and after contrastive fine-tuning (`gcd`). NovelCraft section 6.
"""

from pathlib import Path

import numpy as np
import polars as pl

from schemas.novelcraft import DISCOVERY, DetectorChoice
from schemas.older_tables import METRICS
from storage.pieces import Part
from tasks.detection import TrainSettings, print_epoch, use_threads, weights_file
from tasks.detectors.base import Samples
from tasks.novelcraft.classes import NORMAL, NOVEL_VALID
from tasks.novelcraft.discovery import (
    PRESETS,
    Configuration,
    discovery_accuracy,
    embed,
    fine_tune,
    new_backbone,
    semi_supervised_kmeans,
)
from tasks.novelcraft.samples import load_pictures, train_settings
from tasks.stage import Produced, Shard, stage

CLASSES = NORMAL + NOVEL_VALID


class DiscoverySettings(TrainSettings):
    """How categories are discovered."""

    clusters: int = len(CLASSES)
    """Number of clusters, known and new."""


def discovery_settings(choice: DetectorChoice) -> DiscoverySettings:
    return DiscoverySettings(**train_settings(choice).model_dump())


def plan_discovery(parts: tuple[Part, ...], weights: Path | None) -> list[Shard]:
    """One shard: all pictures, and the checkpoint to start from."""
    if weights is None:
        return [Shard("all", parts=parts)]
    folder = str(weights.absolute().parent)
    return [Shard("all", files=(weights_file(weights),), parts=parts, source=folder)]


def _configured(shard: Shard, settings: DiscoverySettings) -> Configuration:
    preset = PRESETS[settings.preset]
    if not shard.files:
        return preset
    weights = Path(shard.source or "") / shard.files[0].name
    return preset.model_copy(update={"weights": weights})


@stage(writes=(DISCOVERY, METRICS), version=1, tags=("gpu",), alone=True)
def discover_categories(shard: Shard, settings: DiscoverySettings) -> Produced:
    """Cluster frames of known and new classes, and measure how well the clusters fit."""
    use_threads(settings.threads)
    labelled, unlabelled = (load_pictures(shard, split) for split in ("train", "valid"))
    true = np.array([CLASSES.index(name) for name in unlabelled.about["class"]])
    configuration = _configured(shard, settings)
    backbone, _ = new_backbone(configuration, seed=settings.seed)
    rows, metrics = [], []
    for features in ("plain", "gcd"):
        if features == "gcd":
            fine_tune(
                backbone,
                labelled.samples,
                unlabelled.samples,
                configuration,
                seed=settings.seed,
                device=settings.device,
                checkpoints=shard.work,
                progress=print_epoch("discovery"),
            )

        def embedded(samples: Samples) -> np.ndarray:
            return embed(backbone, samples.images(), configuration, device=settings.device)

        clusters = semi_supervised_kmeans(
            embedded(labelled.samples),
            labelled.samples.labels,
            embedded(unlabelled.samples),
            settings.clusters,
            seed=settings.seed,
        )
        found = discovery_accuracy(true, clusters.unlabelled, range(len(NORMAL)))
        matched = [CLASSES[m] if m < len(CLASSES) else None for m in found.matched]
        rows.append(
            unlabelled.about.select(
                pl.lit(features).alias("features"),
                pl.lit(settings.preset).alias("preset"),
                pl.lit(settings.seed).alias("seed"),
                pl.col("sample_id").alias("frame_id"),
                "class",
                pl.Series("cluster", clusters.unlabelled),
                pl.Series("matched", [matched[c] for c in clusters.unlabelled], pl.String),
            )
        )
        values = {"all": found.all, "labelled": found.labelled, "new": found.new}
        run = ("novelcraft", "discovery", f"kmeans_{features}", settings.preset, settings.seed)
        key = shard.parts[0].sha256[:32]
        metrics += [
            (*run, "valid", "hungarian", f"accuracy_{name}", value, len(true), key)
            for name, value in values.items()
        ]
    table = pl.concat([DISCOVERY.conform(frame) for frame in rows])
    numbers = pl.DataFrame(metrics, schema=METRICS.polars_schema, orient="row")
    return Produced({"discovery": table, "metrics": numbers}, table.height)
