"""Train a model and pass the samples of its protocol through it: the runs of NovelCraft.

Enters: the rows of a protocol and what its samples look like. Leaves: `runs` and `training` with
the fitted model and its head as files, `outputs` and `predictions` of each sample. Scores and
metrics are made of these by the stages that all benchmarks share (tasks/evaluation/stages.py).
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PLAIN, PREDICTIONS, RUNS, TRAINING
from storage.pieces import Part, Piece
from tasks.detectors import find_detector, load_detector
from tasks.detectors.base import Detector
from tasks.detectors.symbolic_mlp import window_scores
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.evaluation.runs import run_id, run_row
from tasks.evaluation.stages import EVALUATED, HEAD, PassedRun, prediction_rows
from tasks.learning.devices import use_threads
from tasks.learning.training import BASE, MODEL, EpochLines, weights_file
from tasks.novelcraft.runs import PlannedRun, weights_path
from tasks.novelcraft.samples import TABLES_OF, load
from tasks.novelcraft.windows import EVALUATED_MODE
from tasks.scores.base import Outputs


class DeviceSettings(Settings):
    """Where models run; not part of any key."""

    device: str = Field("auto", exclude=True)
    """`auto`, `cpu` or `cuda`."""


# ---------------------------------------------------------------- plans


def plan_training(
    build: Build,
    runs: Sequence[PlannedRun],
    fitted: Mapping[str, Piece],
    passed: Mapping[str, Piece],
) -> list[Shard]:
    """One shard for each run; pieces of the runs that it builds on are given by run_id."""
    return [
        Shard(
            run.name,
            files=(weights_file(path),) if path else (),
            source=str(path.absolute().parent) if path else None,
            parts=_data(build, run) + _base_parts(run, fitted, passed),
            about=run.facts.model_dump(mode="json"),
            depends={"run": run.mark.run_id},
            run=run.mark,
        )
        for run in runs
        for path in (weights_path(run.choice),)
    ]


def unmade_shard(run: PlannedRun) -> Shard:
    """What is told of a run that could not even be planned."""
    return Shard(run.name, about=run.facts.model_dump(mode="json"), run=run.mark)


def plan_passes(trained: Sequence[tuple[Shard, Piece]]) -> list[Shard]:
    """The shards of training, each with the model that came of it; test rows count too."""
    return [
        replace(
            shard,
            files=(),
            source=None,
            parts=(*shard.parts, piece.file(MODEL)),
            depends={**shard.depends, "rows": shard.run.data_key, "view": PLAIN},
        )
        for shard, piece in trained
        if shard.run is not None
    ]


def plan_window_passes(
    build: Build, runs: Sequence[PlannedRun], passed: Mapping[str, Piece]
) -> list[Shard]:
    """One shard for each run that is measured by windows."""
    tables = build.table("splits") + build.table("windows") + build.table("frames")
    return [
        Shard(
            run.name,
            parts=(*tables, passed[base.mark.run_id].part("outputs")),
            about=run.facts.model_dump(mode="json"),
            depends={"run": run.mark.run_id, "rows": run.mark.data_key, "view": PLAIN},
            run=run.mark,
        )
        for run in runs
        for base in run.bases
    ]


def passed_run(build: Build, run: PlannedRun, outputs: Piece, fitted: Piece | None) -> PassedRun:
    """What the scores of a run are planned from."""
    heads = [HEAD for file in (fitted.manifest.files if fitted else ()) if file.file == HEAD]
    return PassedRun(
        run.facts,
        run.mark,
        (outputs.part("outputs"),),
        build.table("splits"),
        build.table("samples"),
        fitted.file(HEAD) if fitted and heads else None,
    )


def _data(build: Build, run: PlannedRun) -> tuple[Part, ...]:
    tables = ("splits", *TABLES_OF[run.choice.kind.modality])
    return tuple(part for table in tables for part in build.table(table))


def _base_parts(
    run: PlannedRun, fitted: Mapping[str, Piece], passed: Mapping[str, Piece]
) -> tuple[Part, ...]:
    parts = []
    wanted = run.choice.kind.bases(run.choice.settings)
    for base, asked in zip(run.bases, wanted, strict=True):
        if asked.reads == "model":
            parts.append(replace(fitted[base.mark.run_id].file(MODEL), table=BASE))
        else:
            parts.append(passed[base.mark.run_id].part("outputs"))
    return tuple(parts)


# ---------------------------------------------------------------- training


@stage(writes=(RUNS, TRAINING), version=1, tags=("gpu",), alone=True)
def train_model(shard: Shard, settings: DeviceSettings) -> Produced:
    """Fit one model; a killed run goes on from its last checkpoint."""
    facts = RunFacts.model_validate(shard.about)
    kind = find_detector(facts.model)
    weights = _weights(shard)
    given = weights if "weights" in kind.configuration.model_fields else {}
    detector = kind(kind.resolve(None, {**facts.settings, **given}))
    _use_threads_of(detector)
    train, valid = (load(shard, facts, split, detector) for split in ("train", "valid"))
    base = _base(shard, settings)
    if base is not None and weights:
        base.settings = base.settings.model_copy(update=weights)
    work = shard.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    history = detector.fit(
        train,
        valid,
        seed=facts.seed or 0,
        device=settings.device,
        checkpoints=work,
        progress=EpochLines(facts.model),
        base=base,
    )
    files = {MODEL: work / MODEL}
    detector.save(files[MODEL])
    head = detector.head()
    if head is not None:
        files[HEAD] = work / HEAD
        head.save(files[HEAD])
    if "epoch" not in history.columns:
        history = history.with_row_index("epoch")
    training = long_history(history).select(
        pl.lit(run_id(facts)).alias("run_id"),
        "epoch",
        "measure",
        pl.when(pl.col("value").is_finite()).then(pl.col("value")).alias("value"),
    )
    tables = {"runs": run_row(facts, device=detector.device), "training": training}
    return Produced(tables, 1, files=files)


def _weights(shard: Shard) -> dict[str, Path]:
    if not shard.files:
        return {}
    return {"weights": Path(shard.source or "") / shard.files[0].name}


def _use_threads_of(detector: Detector) -> None:
    """Those without a network take no threads of torch."""
    if hasattr(detector.settings, "cpu_threads"):
        use_threads(detector.settings.cpu_threads)


def _base(shard: Shard, settings: DeviceSettings) -> Detector | None:
    found = [part for part in shard.parts if part.table == BASE]
    return load_detector(found[0].path, device=settings.device) if found else None


def long_history(history: pl.DataFrame) -> pl.DataFrame:
    """epoch, measure, value; of an ensemble, whose members count epochs alike, `member_0/loss`."""
    members = [name for name in ("member",) if name in history.columns]
    numbers = history.select("epoch", pl.selectors.numeric().exclude("epoch").cast(pl.Float64))
    rows = numbers.unpivot(index=["epoch", *members], variable_name="measure", value_name="value")
    if members:
        member = pl.col("member").cast(pl.Int64).cast(pl.String)
        measure = pl.concat_str(pl.lit("member_"), member, pl.lit("/"), "measure")
        rows = rows.with_columns(measure.alias("measure"))
    return rows.select("epoch", "measure", "value")


# ---------------------------------------------------------------- passes


@stage(writes=(OUTPUTS, PREDICTIONS), version=1, tags=("gpu",), alone=True)
def pass_samples(shard: Shard, settings: DeviceSettings) -> Produced:
    """What a fitted model puts out for each sample of its protocol.

    Training samples are passed where scores can learn from them: from logits or features.
    """
    facts = RunFacts.model_validate(shard.about)
    base = _base(shard, settings)
    detector = load_detector(shard.part(MODEL).path, device=settings.device, base=base)
    _use_threads_of(detector)
    splits = shard.read("splits").filter(pl.col("protocol") == facts.protocol)
    classes = dict(
        splits.filter(split="train")
        .drop_nulls("label")
        .select("label", "class")
        .unique()
        .iter_rows()
    )
    frames = [OUTPUTS.empty()]
    shown = EVALUATED if detector.gives == {"novelty"} else ("train", *EVALUATED)
    for split in shown:
        samples = load(shard, facts, split, detector)
        if len(samples):
            frames.append(output_rows(facts, samples.ids, detector.outputs(samples), classes))
    outputs = pl.concat(frames)
    tables = {"outputs": outputs}
    if "logits" in detector.gives:
        rows = outputs.drop("run_id", "predicted").join(splits, on="sample_id")
        tables["predictions"] = prediction_rows(facts, rows, classes)
    return Produced(tables, outputs.height)


def output_rows(
    facts: RunFacts, ids: Sequence[str], outputs: Outputs, classes: Mapping[int, str]
) -> pl.DataFrame:
    """Rows of the table `outputs`; `classes` are the names of the labels."""

    def matrix(name: str) -> pl.Series:
        array: np.ndarray | None = getattr(outputs, name)
        kind = pl.List(pl.Float32)
        if array is None:
            return pl.Series(name, [None] * len(ids), kind)
        return pl.Series(name, array.astype(np.float32)).cast(kind)

    best = None if outputs.logits is None else outputs.logits.argmax(1)
    names = [None] * len(ids) if best is None else [classes[int(label)] for label in best]
    return OUTPUTS.conform(
        pl.DataFrame({"sample_id": list(ids)}, schema={"sample_id": pl.String}).with_columns(
            pl.lit(run_id(facts)).alias("run_id"),
            pl.lit(PLAIN).alias("view"),
            matrix("logits"),
            matrix("features"),
            pl.Series("novelty", outputs.novelty, pl.Float64),
            pl.Series("predicted", names, pl.String),
        )
    )


@stage(writes=(OUTPUTS, RUNS), version=1)
def pass_windows(shard: Shard, settings: Settings) -> Produced:
    """Give each window of the run's order the largest novelty of its frames."""
    facts = RunFacts.model_validate(shard.about)
    frames = shard.read("frames", ["frame_id", "episode_id", "position"])
    novelty = shard.read("outputs").select("sample_id", pl.col("novelty").alias("score"))
    scored = novelty.join(frames, left_on="sample_id", right_on="frame_id")
    splits = shard.read("splits").filter(
        (pl.col("protocol") == facts.protocol) & pl.col("split").is_in(EVALUATED)
    )
    windows = (
        shard.read("windows")
        .filter((pl.col("mode") == EVALUATED_MODE) & (pl.col("context") == facts.settings["order"]))
        .join(splits.select("sample_id"), on="sample_id", how="semi")
    )
    largest = window_scores(scored, windows)["score"].to_numpy()
    outputs = output_rows(facts, windows["sample_id"].to_list(), Outputs(novelty=largest), {})
    return Produced({"outputs": outputs, "runs": run_row(facts)}, outputs.height)
