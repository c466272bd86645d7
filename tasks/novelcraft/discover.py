"""Category discovery as a stage: cluster validation frames of known and new classes (GCD).

Enters: pictures of the training frames (labelled) and validation frames (unlabelled). Leaves: the
cluster of every unlabelled frame and the accuracy over all, labelled-class and new-class frames,
with features before (`discovery_plain`) and after contrastive fine-tuning (`discovery_gcd`); each
is a run. NovelCraft section 6.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import ConfigError
from schemas.novelcraft import DISCOVERY, Config
from schemas.runs import RunFacts
from schemas.tables import METRICS, NO_SCORE, PLAIN, RUNS, TRAINING
from storage.pieces import Part
from tasks.engine.stage import Produced, Shard, stage
from tasks.evaluation.model_runs import training_rows
from tasks.evaluation.passing import DeviceSettings
from tasks.evaluation.runs import run_id, run_mark, run_row
from tasks.learning.devices import use_threads, with_arithmetic
from tasks.learning.memory import use_memory
from tasks.learning.samples import Samples
from tasks.learning.trainer import TRAINER_VERSION
from tasks.learning.training import EpochLines, weights_file
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
from tasks.novelcraft.samples import LOADER_VERSION, pictures, split_rows

CLASSES = NORMAL + NOVEL_VALID
FINE_TUNED, NOT_TUNED = "discovery_gcd", "discovery_plain"
VERSION = 1
"""Raised when the same settings and frames give other clusters."""


def discovery_settings(config: Config) -> dict[str, Any]:
    """All settings of discovery, resolved; an unknown preset is refused."""
    if config.preset not in PRESETS:
        names = ", ".join(PRESETS)
        raise ConfigError(f"discovery has no preset {config.preset!r}; there are: {names}")
    settings = with_arithmetic(PRESETS[config.preset], config.device)
    return {**settings.model_dump(mode="json"), "clusters": len(CLASSES)}


def plan_discovery(
    config: Config, keys: Mapping[str, Mapping[str, str]], parts: tuple[Part, ...]
) -> list[Shard]:
    """Two runs for each seed: with the features as they are and fine-tuned ones."""
    path = config.dino_weights
    files = () if path is None else (weights_file(path),)
    weights = {"dino": files[0].digest} if files else {}
    settings, shards = discovery_settings(config), []
    for model in (NOT_TUNED, FINE_TUNED):
        for seed in config.seeds:
            facts = RunFacts(
                benchmark="novelcraft",
                protocol="visual",
                model=model,
                preset=config.preset,
                settings=settings,
                seed=seed,
                versions={"model": VERSION, "loader": LOADER_VERSION, "trainer": TRAINER_VERSION},
                weights=weights,
                precision=settings["precision"],
                fit_key=keys["visual"]["fit_key"],
            )
            mark = run_mark(facts, keys["visual"]["data_key"])
            shards.append(
                Shard(
                    f"{model}-{mark.run_id}",
                    files=files,
                    source=None if path is None else str(path.absolute().parent),
                    parts=parts,
                    about=facts.model_dump(mode="json"),
                    depends={"run": mark.run_id},
                    run=mark,
                    threads=facts.settings["cpu_threads"],
                )
            )
    return shards


def _configured(shard: Shard, settings: Mapping[str, Any]) -> Configuration:
    values = {name: value for name, value in settings.items() if name != "clusters"}
    for file in shard.files:
        values["weights"] = Path(shard.source or "") / file.name
    return Configuration.model_validate(values)


@stage(writes=(DISCOVERY, RUNS, TRAINING, METRICS), version=2, tags=("gpu",), apart=True)
def discover_categories(shard: Shard, settings: DeviceSettings) -> Produced:
    """Cluster frames of known and new classes, and measure how well the clusters fit."""
    facts = RunFacts.model_validate(shard.about)
    configuration = _configured(shard, facts.settings)
    use_threads(configuration.cpu_threads)
    use_memory(settings.memory, shard.work)
    rows = {split: split_rows(shard, "visual", split) for split in ("train", "valid")}
    labelled, unlabelled = (pictures(shard, part) for part in rows.values())
    names = rows["valid"]["class"].to_list()
    true = np.array([CLASSES.index(name) for name in names])
    seed = facts.seed or 0
    backbone, _ = new_backbone(configuration, seed=seed)
    training = TRAINING.empty()
    if facts.model == FINE_TUNED:
        history = fine_tune(
            backbone,
            labelled,
            unlabelled,
            configuration,
            seed=seed,
            device=settings.device,
            checkpoints=shard.work,
            progress=EpochLines("discovery"),
        )
        training = training_rows(facts, history)

    def embedded(samples: Samples) -> np.ndarray:
        return embed(backbone, samples.images(), configuration, device=settings.device)

    assert labelled.labels is not None
    clusters = semi_supervised_kmeans(
        embedded(labelled),
        labelled.labels,
        embedded(unlabelled),
        facts.settings["clusters"],
        seed=seed,
    )
    accuracy = discovery_accuracy(true, clusters.unlabelled, range(len(NORMAL)))
    matched = [CLASSES[m] if m < len(CLASSES) else None for m in accuracy.matched]
    table = rows["valid"].select(
        pl.lit(run_id(facts)).alias("run_id"),
        "sample_id",
        "class",
        pl.Series("cluster", clusters.unlabelled),
        pl.Series("matched", [matched[c] for c in clusters.unlabelled], pl.String),
    )
    values = {"all": accuracy.all, "labelled": accuracy.labelled, "new": accuracy.new}
    tables = {
        "discovery": table,
        "runs": run_row(facts),
        "training": training,
        "metrics": accuracy_rows(facts, values, len(true)),
    }
    return Produced(tables, table.height)


def accuracy_rows(facts: RunFacts, values: Mapping[str, float | None], n: int) -> pl.DataFrame:
    """The accuracies as rows of `metrics`; they are of clusters, so they have no score."""
    place = {
        "protocol": facts.protocol,
        "run_id": run_id(facts),
        "model": facts.model,
        "score_id": NO_SCORE,
        "score": NO_SCORE,
        "seed": facts.seed,
        "split": "valid",
        "view": PLAIN,
        "phase": "none",
        "step": 0,
        "subset": "all",
        "convention": "hungarian",
    }
    rows = [
        {**place, "metric": f"accuracy_{name}", "value": value, "low": None, "high": None, "n": n}
        for name, value in values.items()
    ]
    return pl.DataFrame(rows, schema=METRICS.polars_schema)
