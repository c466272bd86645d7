"""The open-world evaluation as stages: predictors led through the increments (KOWL-718 section 4).

Enters: `outputs` of a frozen backbone, `splits` and, for the ablation, AVA-Kinetics lists. Leaves:
`clip_groups`; of each run of a predictor its row of `runs`, `predictions`, `scores`, `measures`,
`confusion` and `feedback`. One shard is one run: a predictor with all its settings, one amount of
feedback and one seed. A killed run goes on at the increment it had reached. Clips under a visual
transform are a view of their own and never learned from.

The backbone on the protocol, with nothing fitted, is a run as well: scores of `tasks.scores` are
made of its features (`frozen_run`).
"""

import io
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import SourceError
from schemas.kowl import CLIP_GROUPS, CONFUSION, FEEDBACK, MEASURES, Config
from schemas.manifest import RunMark
from schemas.runs import RunFacts
from schemas.tables import (
    ALL_STEPS,
    METRICS,
    NO_SCORE,
    OUTPUTS,
    PLAIN,
    PREDICTIONS,
    RUNS,
    SCORES,
)
from storage.checkpoints import read_checkpoint, write_checkpoint
from storage.pieces import Part
from storage.raw import RawSource, open_raw
from tasks.engine.plugins import Resolved
from tasks.engine.stage import Produced, Shard, stage
from tasks.evaluation.embeddings import read_features
from tasks.evaluation.runs import config_id, run_id, run_mark, run_row
from tasks.evaluation.stages import EVALUATED, PassedRun, with_sequences
from tasks.kowl.accuracy import GROUP, MEASURED, accuracy_intervals, judged
from tasks.kowl.ava import ava_groups, groups_of_clips, read_ava_rows, read_ava_vocabulary
from tasks.kowl.evaluator import (
    ALL,
    TRAIN,
    VERSION,
    EvaluationSettings,
    Features,
    OpenWorldRun,
    Step,
)
from tasks.kowl.features import features_name
from tasks.learning.devices import use_threads, with_arithmetic
from tasks.learning.memory import DEFAULT, use_memory
from tasks.predictors import find_predictor

log = logging.getLogger(__name__)

RUN = "run.safetensors"
AVA_LIST = re.compile(r"ava[^/]*\.csv(\.gz)?", re.IGNORECASE)
AVA_ACTIONS = re.compile(r"ava_action_list[^/]*\.pbtxt", re.IGNORECASE)
LIST_BYTES = 1 << 30
LED = ("feedback", "top_k", "experience_limit", "experience_per_label")
"""Settings of the evaluator that stand among those of a run."""
FEATURES = "features"
"""Where a run's settings have the configuration of the frozen model whose features it is given."""


class RunSettings(Settings):
    """What is no fact of a run: how much of its predictions is kept, and where it runs."""

    predicted_ranks: int = 1
    draws: int = Field(1000, ge=1)
    """Bootstrap draws behind an interval of an accuracy."""
    device: str = Field("auto", exclude=True)
    memory: float = Field(DEFAULT, exclude=True)


# ---------------------------------------------------------------- what AVA says of a clip


def plan_groups(source: RawSource, clips: tuple[Part, ...]) -> list[Shard]:
    """One shard: the AVA lists, and the action list last."""
    files = source.files()
    lists = [file for file in files if AVA_LIST.fullmatch(file.name)]
    actions = [file for file in files if AVA_ACTIONS.fullmatch(file.name)]
    if not lists or len(actions) != 1:
        raise SourceError(
            f"{source.root}: {len(lists)} AVA-Kinetics lists and {len(actions)} action lists; "
            "expected some ava_*.csv[.gz] and one ava_action_list*.pbtxt"
        )
    return [Shard("all", files=(*lists, *actions), parts=clips, source=source.root)]


@stage(writes=(CLIP_GROUPS,), version=2)
def group_clips(shard: Shard, settings: Settings) -> Produced:
    """Put each clip into the groups of the AVA key frames inside it."""
    source = open_raw(Path(shard.source or ""))
    *lists, actions = shard.files
    vocabulary = read_ava_vocabulary(source.read(actions.name, limit=LIST_BYTES).decode())
    rows = pl.concat(read_ava_rows(source.read(file.name, limit=LIST_BYTES)) for file in lists)
    groups = groups_of_clips(ava_groups(rows, vocabulary), shard.read("clips"))
    return Produced({"clip_groups": groups}, groups.height)


# ---------------------------------------------------------------- runs


def protocol_inputs(
    outputs: Sequence[Part], splits: Sequence[Part], protocol: str
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The parts of the outputs and splits that have clips of the protocol.

    None of both where the first increment has no train clip with features: nothing can be fitted.
    """
    of_protocol = tuple(part for part in splits if part.shard == protocol)
    rows = pl.concat([part.read(["sample_id", "step", "split"]) for part in of_protocol])
    first = rows.filter(pl.col("step") == 0, pl.col("split") == TRAIN)
    ids = [
        part.read(["sample_id"]).with_columns(pl.lit(number).alias("part"))
        for number, part in enumerate(outputs)
    ]
    # One join of all parts: one for each would cost the square of their number.
    part_rows = pl.concat(ids).join(rows, on="sample_id", how="semi") if ids else rows.clear()
    if part_rows.join(first, on="sample_id", how="semi").is_empty():
        return (), ()
    return tuple(outputs[number] for number in part_rows["part"].unique().sort()), of_protocol


def frozen_run(
    backbone: RunFacts,
    protocol: str,
    keys: dict[str, str],
    outputs: tuple[Part, ...],
    splits: tuple[Part, ...],
    samples: tuple[Part, ...],
    phase: str,
) -> PassedRun:
    """The backbone on one protocol: what scores are made of; `phase` is that of its scores."""
    facts = backbone.model_copy(
        update={
            "protocol": protocol,
            "base_runs": (run_id(backbone),),
            "fit_key": keys["fit_key"],
        }
    )
    mark = run_mark(facts, keys["data_key"])
    return PassedRun(facts, mark, outputs, splits, samples, phase=phase, foreign_logits=True)


def predictor_facts(
    config: Config, predictors: dict[str, Resolved], frozen: PassedRun, fit_key: str
) -> list[RunFacts]:
    """One run for each predictor, amount of feedback and seed."""
    led = config.evaluation
    shared = led.model_dump(include={"top_k", "experience_limit", "experience_per_label"})
    settings = {
        name: with_arithmetic(one.settings, config.device) for name, one in predictors.items()
    }
    return [
        RunFacts(
            benchmark="kowl",
            protocol=frozen.facts.protocol,
            model=name,
            network=features_name(frozen.facts),
            preset=config.preset if one.kind.presets else "none",
            settings={
                **settings[name].model_dump(mode="json"),
                **shared,
                "feedback": feedback,
                "threads": led.threads,
                FEATURES: config_id(frozen.facts),
            },
            changed=one.changed,
            seed=seed,
            base_runs=frozen.facts.base_runs,
            versions={**one.kind.versions(one.settings), "evaluator": VERSION},
            precision=getattr(settings[name], "precision", "float32"),
            fit_key=fit_key,
        )
        for name, one in predictors.items()
        for feedback in led.feedback
        for seed in config.seeds
    ]


def plan_runs(
    facts: Sequence[RunFacts], frozen: PassedRun, groups: tuple[Part, ...] = ()
) -> list[Shard]:
    """One shard for each run. It depends on all clips with features, their views and subsets."""
    views = pl.concat([part.read(["view"]) for part in frozen.outputs])["view"].unique().sort()
    shards = []
    for one in facts:
        mark = RunMark(run_id=run_id(one), protocol=one.protocol, data_key=frozen.mark.data_key)
        depends: dict[str, Any] = {
            "run": mark.run_id,
            "rows": mark.data_key,
            "views": views.to_list(),
            "groups": [part.sha256 for part in groups],
        }
        shards.append(
            Shard(
                mark.run_id,
                parts=frozen.outputs + frozen.splits + frozen.samples + groups,
                about=one.model_dump(mode="json"),
                depends=depends,
                run=mark,
                threads=one.settings["threads"],
            )
        )
    return shards


def led_runs(facts: Sequence[RunFacts], frozen: PassedRun) -> list[PassedRun]:
    """The runs of predictors as the shared stage of metrics takes them."""
    return [
        replace(
            frozen,
            facts=one,
            mark=run_mark(one, frozen.mark.data_key),
            outputs=(),
            foreign_logits=False,
        )
        for one in facts
    ]


@stage(
    writes=(RUNS, PREDICTIONS, SCORES, METRICS, MEASURES, CONFUSION, FEEDBACK),
    version=3,
    tags=("gpu",),
    apart=True,
)
def evaluate_predictor(shard: Shard, settings: RunSettings) -> Produced:
    """Lead one predictor through all increments, before and after feedback."""
    facts = RunFacts.model_validate(shard.about)
    use_threads(facts.settings["threads"])
    use_memory(settings.memory, shard.work)
    features, splits = _presented(shard, str(facts.protocol))
    groups = _groups(shard, splits)
    work = shard.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    saved = work / RUN
    if saved.exists():
        run = OpenWorldRun.resume(saved, features, splits, groups, device=settings.device)
    else:
        how = EvaluationSettings(
            seed=facts.seed or 0,
            predicted_ranks=settings.predicted_ranks,
            **{name: facts.settings[name] for name in LED},
        )
        kind = find_predictor(facts.model)
        not_its_own = {*LED, "threads", FEATURES}
        options = {key: value for key, value in facts.settings.items() if key not in not_its_own}
        run = OpenWorldRun(
            kind(kind.resolve(None, options), device=settings.device), features, splits, how, groups
        )
    while run.done < len(run.steps):
        step = run.step()
        # The step first: a run saved without it would go on and never count it.
        _write_step(work, run.done - 1, step)
        run.save(saved)
        name = f"{facts.model} {run.settings.feedback:g} {shard.name}"
        log.info(f"  {name}: increment {step.step} {_accuracies(step)}")
    roles = splits.select("sample_id", "step", (pl.col("role") == "novel").alias("novel"))
    tables = {}
    for table in (PREDICTIONS, SCORES, MEASURES, CONFUSION, FEEDBACK):
        # One after the other: confusion has as many rows as all ranks of all predictions.
        rows = pl.concat(
            pl.read_parquet(read_checkpoint(_step_file(work, number, table.name)))
            for number in range(run.done)
        ).with_columns(pl.lit(shard.name).alias("run_id"))
        if table is SCORES:
            rows = rows.join(roles, on=["sample_id", "step"])
        tables[table.name] = table.conform(rows)
        del rows
    tables[RUNS.name] = run_row(facts, device=run.predictor.device)
    right = judged(tables[PREDICTIONS.name], splits, tables[FEEDBACK.name])
    bounds = accuracy_intervals(with_sequences(right, shard), groups, settings.draws)
    tables[METRICS.name] = metric_rows(facts, tables[MEASURES.name], bounds)
    return Produced(tables, 1)


def metric_rows(facts: RunFacts, measures: pl.DataFrame, bounds: pl.DataFrame) -> pl.DataFrame:
    """The reduced measures of valid and test clips in the form of the shared table.

    `bounds` are the intervals of the accuracies. The convention says by which set of labels a clip
    counts as known; step -1 is all increments together, after feedback; a subset is one of AVA's.
    """
    whole = (pl.col("scope") == "cumulative") & (pl.col("step") == pl.col("step").max())
    alone = pl.col("scope") == "increment"
    subset = pl.concat_str("grouping", pl.lit(" "), "subset")
    rows = measures.filter(
        pl.col("split").is_in(EVALUATED), pl.col("known_set") != "none", whole | alone
    ).with_columns(pl.when(whole).then(ALL_STEPS).otherwise("step").cast(pl.Int32).alias("step"))
    bounds = bounds.with_columns(pl.lit("accuracy").alias("metric"))
    keys = [*GROUP, *MEASURED, "metric"]
    rows = rows.join(bounds, on=keys, how="left", maintain_order="left").select(
        pl.lit(facts.protocol).alias("protocol"),
        "run_id",
        pl.lit(facts.model).alias("model"),
        pl.lit(NO_SCORE).alias("score_id"),
        pl.lit(NO_SCORE).alias("score"),
        pl.lit(facts.seed, pl.Int32).alias("seed"),
        "split",
        "view",
        "phase",
        "step",
        pl.when(pl.col("grouping") == ALL).then(pl.lit(ALL)).otherwise(subset).alias("subset"),
        pl.concat_str(pl.lit("kowl-"), "known_set").alias("convention"),
        pl.concat_str("reduction", pl.lit("_"), "metric").alias("metric"),
        "value",
        "low",
        "high",
        "n",
    )
    return METRICS.conform(rows)


def _presented(shard: Shard, protocol: str) -> tuple[Features, pl.DataFrame]:
    """The features, and the protocol's rows of the clips that have some."""
    rows = shard.read(OUTPUTS.name, ["sample_id", "view"])
    plain = rows.filter(pl.col("view") == PLAIN).select("sample_id")
    splits = (
        shard.read("splits", ["protocol", "sample_id", "step", "class", "split", "role"])
        .filter(pl.col("protocol") == protocol)
        .select("sample_id", pl.col("class").alias("label"), "split", "step", "role")
        .join(plain, on="sample_id", how="semi")
        .sort("sample_id")
    )
    if splits.is_empty():
        raise SourceError(NO_CLIP)
    rows = rows.join(splits, on="sample_id", how="semi", maintain_order="left")
    parts = [part for part in shard.parts if part.table == OUTPUTS.name]
    vectors, _ = read_features(parts, rows, ("sample_id", "view"))
    return Features(rows["sample_id"], vectors, rows["view"]), splits


NO_CLIP = (
    "no train clip of the first increment has features; look at the states in the table videos"
)


def _groups(shard: Shard, splits: pl.DataFrame) -> pl.DataFrame | None:
    if not any(part.table == CLIP_GROUPS.name for part in shard.parts):
        return None
    shown = pl.col("sample_id").is_in(splits["sample_id"].implode())
    return shard.read(CLIP_GROUPS.name).filter(shown)


STEP_TABLES = (PREDICTIONS.name, SCORES.name, MEASURES.name, CONFUSION.name, FEEDBACK.name)


def _step_file(work: Path, number: int, table: str) -> Path:
    return work / f"{number:04}_{table}.parquet"


def _write_step(work: Path, number: int, step: Step) -> None:
    frames = (step.predictions, step.novelty, step.measures, step.counts, step.feedback)
    for name, frame in zip(STEP_TABLES, frames, strict=True):
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        write_checkpoint(_step_file(work, number, name), buffer.getvalue())


def _accuracies(step: Step) -> str:
    """The accuracies of an increment, for the log."""
    accuracies = step.measures.filter(
        (pl.col("metric") == "accuracy")
        & (pl.col("reduction") == "classification")
        & (pl.col("known_set") == "novel_to_evaluator")
        & (pl.col("scope") == "increment")
        & (pl.col("grouping") == "all")
        & (pl.col("view") == PLAIN)
    ).sort("phase", "split", descending=[True, False])
    return ", ".join(
        f"{phase} {split} {value:.3f}"
        for phase, split, value in accuracies.select("phase", "split", "value").iter_rows()
        if value is not None
    )
