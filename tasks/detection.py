"""What stages that train models share: names of files, threads, progress, weights.

`evaluate_scores` measures tables of an older form, for benchmarks that still write them.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import SourceError
from schemas.older_tables import CURVES, METRICS
from storage.filehash import sha256_file
from storage.pieces import Piece
from storage.raw import RawFile
from tasks.evaluation.conventions import find_convention
from tasks.evaluation.metrics import curves, evaluate
from tasks.stage import Produced, Shard, stage

MODEL = "model.safetensors"
BASE = "base.safetensors"
CURVE_POINTS = 1000


class EvaluateSettings(Settings):
    """Which conventions the metrics follow, by protocol."""

    conventions: dict[str, tuple[str, ...]] = Field({})


def weights_file(path: Path) -> RawFile:
    """A checkpoint file as an input of a shard."""
    if not path.is_file():
        raise SourceError(f"weights file {path} does not exist; name a checkpoint file")
    return RawFile(path.name, path.stat().st_size, sha256_file(path), str(path.absolute()))


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
