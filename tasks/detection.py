"""Train, score, evaluate: the three stages that every benchmark's detectors go through.

Enters: parts of tables and a loader that makes `Samples` of them. Leaves: `training` with the
fitted detector as a safetensors file, `scores` per sample, `metrics` and `curves` by convention.
"""

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from schemas.older_tables import CURVES, METRICS, SCORES, TRAINING
from storage.filehash import sha256_file
from storage.pieces import Part, Piece
from storage.raw import RawFile
from tasks.detectors import detector_names, find_detector, load_detector
from tasks.detectors.base import Detector, Samples
from tasks.evaluation.conventions import find_convention
from tasks.evaluation.metrics import curves, evaluate
from tasks.stage import Produced, Shard, stage

MODEL = "model.safetensors"
BASE = "base.safetensors"
CURVE_POINTS = 1000


class TrainSettings(Settings):
    """How detectors are trained."""

    preset: str = "small"
    """Named settings of the detector."""
    seed: int = 0
    """Seed of training."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    threads: int = 2
    """CPU threads of torch."""


class EvaluateSettings(Settings):
    """Which conventions the metrics follow, by protocol."""

    conventions: dict[str, tuple[str, ...]] = Field({})


@dataclass(frozen=True, eq=False)
class Loaded:
    """Samples of one split, what is known of each, and the names of the known classes."""

    samples: Samples
    about: pl.DataFrame  # sample_id, class, novel; rows as in samples
    known_classes: tuple[str, ...]
    protocol: str


Loader = Callable[[Shard, str, Detector], Loaded]


def chosen_detectors(names: Sequence[str]) -> list[str]:
    """The detectors asked for and those they build on; `all` is every one."""
    wanted = list(detector_names()) if "all" in names else list(names)
    for name in list(wanted):
        required = find_detector(name).requires
        if required and required not in wanted:
            wanted.append(required)
    return sorted(set(wanted))


def waves(names: Sequence[str]) -> list[list[str]]:
    """Detectors in an order in which what one builds on comes before it."""
    kinds = {name: find_detector(name) for name in names}
    fusing = [name for name, kind in kinds.items() if "symbolic" in kind.needs]
    building = [n for n, kind in kinds.items() if kind.requires and n not in fusing]
    first = [name for name in names if name not in (*fusing, *building)]
    return [wave for wave in (first, building, fusing) if wave]


def plan_training(
    names: Sequence[str],
    loader: str,
    data: Callable[[str], tuple[Part, ...]],
    trained: Sequence[Piece] = (),
    options: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    weights: Mapping[str, Path] | None = None,
) -> list[Shard]:
    """One shard for each detector and each set of `options` that changes its preset.

    `weights` are checkpoint files to start from; their content, not their path, counts in the key.
    """
    models = {piece.shard.partition("[")[0]: piece.file(MODEL) for piece in trained}
    shards = []
    for name in names:
        required = find_detector(name).requires
        base = (replace(models[required], table=BASE),) if required else ()
        start = (weights or {}).get(name)
        for changed in (options or {}).get(name, ({},)):
            said = ",".join(f"{key}={value}" for key, value in sorted(changed.items()))
            shards.append(
                Shard(
                    f"{name}[{said}]" if said else name,
                    files=(weights_file(start),) if start else (),
                    source=str(start.absolute().parent) if start else None,
                    parts=data(name) + base,
                    about={"detector": name, "loader": loader, "options": dict(changed)},
                )
            )
    return shards


def weights_file(path: Path) -> RawFile:
    """A checkpoint file as an input of a shard."""
    if not path.is_file():
        raise SourceError(f"weights file {path} does not exist; name a checkpoint file")
    return RawFile(path.name, path.stat().st_size, sha256_file(path), str(path.absolute()))


def plan_scoring(shards: Sequence[Shard], trained: Sequence[Piece]) -> list[Shard]:
    """The shards of training, each with the detector that came of it."""
    return [
        replace(shard, parts=(*shard.parts, piece.file(MODEL)))
        for shard, piece in zip(shards, trained, strict=True)
    ]


def _loader(shard: Shard) -> Loader:
    module, _, name = shard.about["loader"].partition(":")
    return getattr(importlib.import_module(module), name)


def _new_detector(shard: Shard, settings: TrainSettings) -> Detector:
    kind = find_detector(shard.about["detector"])
    if settings.preset not in kind.presets:
        there = ", ".join(kind.presets)
        raise ConfigError(f"detector {kind.name} has no preset {settings.preset!r}, only {there}")
    changed = kind.presets[settings.preset].model_dump() | shard.about["options"]
    if "cpu_threads" in changed:
        changed["cpu_threads"] = settings.threads
    if shard.files:
        changed["weights"] = Path(shard.source or "") / shard.files[0].name
    return kind(type(kind.presets[settings.preset]).model_validate(changed))


def _base(shard: Shard, settings: TrainSettings) -> Detector | None:
    found = [part for part in shard.parts if part.table == BASE]
    return load_detector(found[0].path, device=settings.device) if found else None


def _variant(shard: Shard, settings: TrainSettings) -> str:
    said = [f"{key}={value}" for key, value in sorted(shard.about["options"].items())]
    return ",".join([settings.preset, *said])


def use_threads(count: int) -> None:
    """Results of torch on a CPU depend on the number of threads, so it is a setting."""
    import torch

    torch.set_num_threads(count)


def print_epoch(title: str) -> Callable[[int, int, Mapping[str, float]], None]:
    """Progress of training: a line an epoch."""

    def say(epoch: int, epochs: int, row: Mapping[str, float]) -> None:
        measured = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
        print(f"  {title}: epoch {epoch}/{epochs}, {measured}", file=sys.stderr, flush=True)

    return say


def _long(history: pl.DataFrame) -> pl.DataFrame:
    """epoch, measure, value; of an ensemble, whose members count epochs alike, `member_0/loss`."""
    members = [name for name in ("member",) if name in history.columns]
    numbers = history.select("epoch", pl.selectors.numeric().exclude("epoch").cast(pl.Float64))
    rows = numbers.unpivot(index=["epoch", *members], variable_name="measure", value_name="value")
    if members:
        member = pl.col("member").cast(pl.Int64).cast(pl.String)
        measure = pl.concat_str(pl.lit("member_"), member, pl.lit("/"), "measure")
        rows = rows.with_columns(measure.alias("measure"))
    return rows.select("epoch", "measure", "value")


@stage(writes=(TRAINING,), version=2, tags=("gpu",), alone=True)
def train_detector(shard: Shard, settings: TrainSettings) -> Produced:
    """Fit one detector; a killed run goes on from its last checkpoint."""
    use_threads(settings.threads)
    detector = _new_detector(shard, settings)
    load = _loader(shard)
    train, valid = (load(shard, split, detector).samples for split in ("train", "valid"))
    work = shard.work or Path(tempfile.mkdtemp())
    history = detector.fit(
        train,
        valid,
        seed=settings.seed,
        device=settings.device,
        checkpoints=work,
        progress=print_epoch(shard.name),
        base=_base(shard, settings),
    )
    model = work / MODEL
    detector.save(model)
    if "epoch" not in history.columns:
        history = history.with_row_index("epoch")
    rows = _long(history).select(
        pl.lit(detector.name).alias("detector"),
        pl.lit(_variant(shard, settings)).alias("variant"),
        pl.lit(settings.seed).alias("seed"),
        "epoch",
        "measure",
        pl.when(pl.col("value").is_finite()).then(pl.col("value")).alias("value"),
    )
    return Produced({"training": rows}, rows.height, files={MODEL: model})


@stage(writes=(SCORES,), version=1, tags=("gpu",), alone=True)
def score_detector(shard: Shard, settings: TrainSettings) -> Produced:
    """Score the validation and test samples with a fitted detector."""
    use_threads(settings.threads)
    base = _base(shard, settings)
    detector = load_detector(shard.part(MODEL).path, device=settings.device, base=base)
    load = _loader(shard)
    rows = []
    for split in ("valid", "test"):
        loaded = load(shard, split, detector)
        if not len(loaded.samples):
            continue
        predicted = None
        if hasattr(detector, "outputs"):
            index = pl.Series(detector.outputs(loaded.samples)["predicted"])
            predicted = pl.Series(loaded.known_classes).gather(index)
        rows.append(
            loaded.about.select(
                pl.lit(loaded.protocol).alias("protocol"),
                pl.lit(detector.name).alias("detector"),
                pl.lit(_variant(shard, settings)).alias("backbone"),
                pl.lit(settings.seed).alias("seed"),
                pl.lit(split).alias("split"),
                "sample_id",
                "class",
                "novel",
                pl.Series("score", detector.score(loaded.samples)),
                pl.Series("predicted", predicted, pl.String)
                if predicted is not None
                else pl.lit(None, pl.String).alias("predicted"),
            )
        )
    scores = pl.concat([SCORES.conform(frame) for frame in rows])
    return Produced({"scores": scores}, scores.height)


def plan_evaluation(scored: Sequence[Piece]) -> list[Shard]:
    """One shard per scored detector."""
    return [
        Shard(
            f"{piece.manifest.stage}/{piece.shard}",
            parts=(piece.part("scores"),),
            about=piece.shard,
        )
        for piece in scored
    ]


@stage(writes=(METRICS, CURVES), version=1)
def evaluate_scores(shard: Shard, settings: EvaluateSettings) -> Produced:
    """Metrics and curves of one detector by every convention of its protocol."""
    (part,) = shard.parts
    benchmark = part.piece.split("/")[0]
    run = ("protocol", "detector", "backbone", "seed", "split")
    metrics, lines = [METRICS.empty()], [CURVES.empty()]
    for key, scores in part.read().group_by(run, maintain_order=True):
        names = [pl.lit(value).alias(name) for name, value in zip(run, key, strict=True)]
        for name in settings.conventions.get(str(key[0]), ()):
            convention = find_convention(name)
            predicted = scores["predicted"]
            classes = None if predicted.is_null().any() else (scores["class"], predicted)
            found = evaluate(scores["score"], scores["novel"], convention, classes=classes)
            metrics.append(
                METRICS.conform(
                    found.select(
                        pl.lit(benchmark).alias("benchmark"),
                        *names,
                        "convention",
                        "metric",
                        "value",
                        "n",
                        pl.lit(part.sha256[:32]).alias("data_key"),
                    )
                )
            )
            drawn = curves(scores["score"], scores["novel"], convention, points=CURVE_POINTS)
            lines.append(CURVES.conform(drawn.select(*names, *drawn.columns)))
    table = pl.concat(metrics)
    return Produced({"metrics": table, "curves": pl.concat(lines)}, table.height)
