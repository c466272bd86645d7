"""The paper's numbers: means over the last epochs, as single evaluations waver.

Enters: models as their last epochs left them (files beside the fitted model), the pictures of test.
Leaves: in `training` what each of these epochs measures on test, in `metrics` the means. Training
itself never sees test.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from schemas.runs import RunFacts
from schemas.semantic import LAST_EPOCHS, ODIN_MEASURES, TEST_MEASURES
from schemas.tables import METRICS, PLAIN, TRAINING
from storage.pieces import Part, Piece
from tasks import models
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.evaluation.conventions import SEMANTIC
from tasks.evaluation.metrics import evaluate
from tasks.evaluation.model_runs import PlannedRun, fitted_model, train_model
from tasks.evaluation.passing import DeviceSettings
from tasks.evaluation.stages import ScoreChoice, chosen_scores
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.training import BASE, MODEL
from tasks.models.base import Model
from tasks.semantic.samples import load

CONVENTION = "semantic"
KEPT = re.compile(r"epoch-(\d+)\.safetensors")


def described_scores() -> list[ScoreChoice]:
    """The scores that are measured over the last epochs: msp, and the novelty of ODIN itself."""
    return chosen_scores({"msp": {}, "own": {}})


def plan_epochs(
    build: Build, planned: Sequence[PlannedRun], parts: Mapping[str, tuple[Part, ...]]
) -> list[Shard]:
    """One shard for each run whose epochs were kept, and for each run over such a one."""
    fitted = {
        piece.manifest.run.run_id: piece
        for piece in build.pieces
        if piece.manifest.stage == train_model.name and piece.manifest.run is not None
    }
    msp, odin = described_scores()
    shards = []
    for run in planned:
        if run.mark.run_id not in fitted:
            continue
        piece = fitted[run.mark.run_id]
        score, measures, epoch_files = msp, TEST_MEASURES, kept_epochs(piece)
        if run.bases:
            base = fitted[run.bases[0].mark.run_id]
            score, measures, epoch_files = odin, ODIN_MEASURES, kept_epochs(base)
            epoch_files = (
                (piece.file(MODEL), replace(base.file(MODEL), table=BASE), *epoch_files)
                if epoch_files
                else ()
            )
        if not epoch_files:
            continue
        shards.append(
            Shard(
                f"{run.name}/epochs",
                parts=(*parts[run.run.offer.protocol], *epoch_files),
                about={
                    "facts": run.facts.model_dump(mode="json"),
                    "score": score.name,
                    "score_id": score.score_id,
                    "measures": measures,
                },
                depends={"run": run.mark.run_id, "rows": run.mark.data_key},
                run=run.mark,
            )
        )
    return shards


def kept_epochs(piece: Piece) -> tuple[Part, ...]:
    """Files of the model as its last epochs left it."""
    return tuple(piece.file(file.file) for file in piece.manifest.files if KEPT.match(file.file))


@stage(writes=(METRICS, TRAINING), version=1, tags=("gpu",), apart=True)
def measure_epochs(shard: Shard, settings: DeviceSettings) -> Produced:
    """What each kept epoch of a run measures on test, and the means of that."""
    about = shard.about
    facts = RunFacts.model_validate(about["facts"])
    rows, count, known = [], 0, 0
    for epoch, model in _models_by_epoch(shard, settings):
        test = load(shard, facts, "test", model)
        rows += [(epoch, name, value) for name, value in measured(model, test).items()]
        assert test.labels is not None
        count, known = len(test), int((test.labels != NOVEL).sum())
    run_id = pl.lit(shard.run.run_id).alias("run_id") if shard.run else pl.lit(None)
    frame = pl.DataFrame(rows, schema=["epoch", "measure", "value"], orient="row").sort("epoch")
    place = {
        "protocol": facts.protocol,
        "model": facts.model,
        "seed": facts.seed,
        "score": about["score"],
        "score_id": about["score_id"],
        "split": "test",
        "view": PLAIN,
        "phase": "none",
        "step": 0,
        "subset": "all",
        "convention": CONVENTION,
        "low": None,
        "high": None,
    }
    means = frame.group_by("measure", maintain_order=True).agg(pl.col("value").mean())
    metric = pl.col("measure").replace_strict(about["measures"])
    metrics = means.select(
        run_id,
        *(pl.lit(value).alias(name) for name, value in place.items()),
        (metric + LAST_EPOCHS).alias("metric"),
        "value",
        pl.when(metric == "acc").then(known).otherwise(count).alias("n"),
    )
    tables = {
        METRICS.name: METRICS.conform(metrics),
        TRAINING.name: TRAINING.conform(frame.select(run_id, pl.all())),
    }
    return Produced(tables, metrics.height)


def _models_by_epoch(shard: Shard, settings: DeviceSettings) -> Iterator[tuple[int, Model]]:
    """The run's model, or what it builds on, as each kept epoch left it."""
    names = [part.table for part in shard.parts]
    top_model = fitted_model(shard, settings) if MODEL in names else None
    for name in names:
        match = KEPT.match(name)
        if match is None:
            continue
        if top_model is None:
            yield int(match[1]), fitted_model(shard, settings, name)
        else:
            top_model.bases = (models.load_model(shard.part(name).path, device=settings.device),)
            yield int(match[1]), top_model


def measured(model: Model, test: Samples) -> dict[str, float]:
    """test_accuracy (known classes) and ap_msp of a classifier; ap_odin of a model over one."""
    assert test.labels is not None
    outputs, novel = model.outputs(test), test.labels == NOVEL
    if outputs.logits is None:
        assert outputs.novelty is not None
        return {"ap_odin": average_precision(outputs.novelty, novel)}
    logits = outputs.logits.astype(np.float64)
    odds = np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    right = (logits.argmax(1) == test.labels)[~novel]
    return {"test_accuracy": float(right.mean()), "ap_msp": average_precision(-1 / odds, novel)}


def average_precision(scores: np.ndarray, novel: np.ndarray) -> float:
    values = evaluate(scores, novel, SEMANTIC)
    return float(values.filter(metric="average_precision")["value"].item())
