"""The open-world evaluation as stages: predictors led through the increments (KOWL-718 section 4).

Enters: features, increments and, for the ablation, AVA-Kinetics lists. Leaves: `clip_groups`,
`measures`, `confusion` and `feedback`. One shard is one run of a predictor with one amount of
feedback and one seed; a killed run goes on at the increment it had reached. Clips under a visual
transform are evaluated as splits of their own (`test+rotation`) and never learned from.
"""

import io
import re
import sys
from pathlib import Path
from tempfile import mkdtemp

import polars as pl

from schemas.config import Settings
from schemas.errors import SourceError
from schemas.kowl import (
    CLIP_GROUPS,
    CONFUSION,
    FEEDBACK,
    MEASURES,
    PLAIN,
    EvaluationChoice,
    FeatureSettings,
    features_table,
)
from storage.checkpoints import read_checkpoint, write_checkpoint
from storage.pieces import Part
from storage.raw import RawSource, open_raw
from tasks.detection import use_threads
from tasks.kowl.ava import ava_groups, groups_of_clips, read_ava_rows, read_ava_vocabulary
from tasks.kowl.evaluator import (
    TRAIN,
    EvaluationSettings,
    Features,
    OpenWorldRun,
    Step,
)
from tasks.predictors import find_predictor
from tasks.stage import Produced, Shard, stage

RUN = "run.safetensors"
AVA_LIST = re.compile(r"ava[^/]*\.csv(\.gz)?", re.IGNORECASE)
AVA_ACTIONS = re.compile(r"ava_action_list[^/]*\.pbtxt", re.IGNORECASE)
LIST_BYTES = 1 << 30


class RunSettings(Settings):
    """What all runs of an evaluation share."""

    extractor: str
    preset: str
    top_k: int
    experience_limit: int | None
    experience_per_label: int | None
    device: str
    threads: int


def run_settings(choice: EvaluationChoice, features: FeatureSettings) -> RunSettings:
    shared = choice.model_dump(exclude={"predictors", "feedback", "seeds"})
    network = features.model_dump(include={"extractor", "device", "threads"})
    return RunSettings(**shared, **network)


# ---------------------------------------------------------------- what AVA says of a clip


def plan_groups(source: RawSource, increments: tuple[Part, ...]) -> list[Shard]:
    """One shard: the AVA lists, and the action list last."""
    files = source.files()
    lists = [file for file in files if AVA_LIST.fullmatch(file.name)]
    actions = [file for file in files if AVA_ACTIONS.fullmatch(file.name)]
    if not lists or len(actions) != 1:
        raise SourceError(
            f"{source.root}: {len(lists)} AVA-Kinetics lists and {len(actions)} action lists; "
            "expected some ava_*.csv[.gz] and one ava_action_list*.pbtxt"
        )
    return [Shard("all", files=(*lists, *actions), parts=increments, source=source.root)]


@stage(writes=(CLIP_GROUPS,), version=1)
def group_clips(shard: Shard, settings: Settings) -> Produced:
    """Put each clip of the increments into the groups of the AVA key frames inside it."""
    source = open_raw(Path(shard.source or ""))
    *lists, actions = shard.files
    vocabulary = read_ava_vocabulary(source.read(actions.name, limit=LIST_BYTES).decode())
    rows = pl.concat(read_ava_rows(source.read(file.name, limit=LIST_BYTES)) for file in lists)
    groups = groups_of_clips(ava_groups(rows, vocabulary), shard.read("increments"))
    return Produced({"clip_groups": groups}, groups.height)


# ---------------------------------------------------------------- runs


def plan_runs(
    choice: EvaluationChoice,
    features: tuple[Part, ...],
    increments: tuple[Part, ...],
    groups: tuple[Part, ...] = (),
) -> list[Shard]:
    """One shard for each predictor, amount of feedback and seed."""
    return [
        Shard(
            f"{predictor}[feedback={feedback:g},seed={seed}]",
            parts=features + increments + groups,
            about={"predictor": predictor, "feedback": feedback, "seed": seed},
        )
        for predictor in choice.predictors
        for feedback in choice.feedback
        for seed in choice.seeds
    ]


@stage(writes=(MEASURES, CONFUSION, FEEDBACK), version=1, tags=("gpu",), alone=True)
def evaluate_predictor(shard: Shard, settings: RunSettings) -> Produced:
    """Lead one predictor through all increments, before and after feedback."""
    use_threads(settings.threads)
    about = shard.about
    features, increments = _presented(shard, settings.extractor)
    groups = _groups(shard, increments)
    work = shard.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    saved = work / RUN
    if saved.exists():
        run = OpenWorldRun.resume(saved, features, increments, groups, device=settings.device)
    else:
        how = EvaluationSettings(
            feedback=about["feedback"],
            seed=about["seed"],
            **settings.model_dump(
                include={"top_k", "experience_limit", "experience_per_label"}, exclude_none=True
            ),
        )
        predictor = find_predictor(about["predictor"])(settings.preset, device=settings.device)
        run = OpenWorldRun(predictor, features, increments, how, groups)
    while run.done < len(run.increments):
        step = run.step()
        # The step first: a run saved without it would go on and never count it.
        _write_step(work, run.done - 1, step)
        run.save(saved)
        print(f"  {shard.name}: increment {step.increment} {_said(step)}", file=sys.stderr)
    named = [
        pl.lit(settings.extractor).alias("extractor"),
        pl.lit(about["predictor"]).alias("predictor"),
        pl.lit(about["feedback"], pl.Float64).alias("feedback"),
        pl.lit(about["seed"], pl.Int32).alias("seed"),
    ]
    tables = {
        table.name: table.conform(
            pl.concat(
                pl.read_parquet(read_checkpoint(_step_file(work, number, table.name)))
                for number in range(run.done)
            ).select(*named, pl.all())
        )
        for table in (MEASURES, CONFUSION, FEEDBACK)
    }
    return Produced(tables, tables["measures"].height)


def _presented(shard: Shard, extractor: str) -> tuple[Features, pl.DataFrame]:
    """The features, and the increments of the clips that have some.

    A clip under a transform is a sample `clip+transform` of the split `split+transform`.
    """
    rows = shard.read(features_table(extractor).name)
    mark = (
        pl.when(pl.col("transform") == PLAIN)
        .then(pl.lit(""))
        .otherwise(pl.concat_str(pl.lit("+"), "transform"))
    )
    increments = (
        shard.read("increments", ["sample_id", "label", "split", "increment"])
        .join(rows.select("sample_id", mark.alias("mark")), on="sample_id")
        .filter((pl.col("mark") == "") | (pl.col("split") != TRAIN))
        .with_columns(
            pl.concat_str("sample_id", "mark").alias("sample_id"),
            pl.concat_str("split", "mark").alias("split"),
        )
        .drop("mark")
        .sort("sample_id")
    )
    if increments.is_empty():
        raise SourceError(
            "no clip of the increments has features; look at the states in the table videos"
        )
    ids = rows.select(pl.concat_str("sample_id", mark))["sample_id"]
    return Features(ids, rows["embedding"].to_numpy()), increments


def _groups(shard: Shard, increments: pl.DataFrame) -> pl.DataFrame | None:
    if not any(part.table == "clip_groups" for part in shard.parts):
        return None
    plain = pl.col("sample_id").is_in(increments["sample_id"].implode())
    return shard.read("clip_groups").filter(plain)


def _step_file(work: Path, number: int, table: str) -> Path:
    return work / f"{number:04}_{table}.parquet"


def _write_step(work: Path, number: int, step: Step) -> None:
    frames = {"measures": step.measures, "confusion": step.counts, "feedback": step.feedback}
    for name, frame in frames.items():
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        write_checkpoint(_step_file(work, number, name), buffer.getvalue())


def _said(step: Step) -> str:
    """The accuracies of an increment, for the log."""
    chosen = step.measures.filter(
        (pl.col("metric") == "accuracy")
        & (pl.col("reduction") == "classification")
        & (pl.col("known_set") == "novel_to_evaluator")
        & (pl.col("scope") == "increment")
        & (pl.col("grouping") == "all")
        & ~pl.col("split").str.contains("+", literal=True)
    ).sort("phase", "split", descending=[True, False])
    return ", ".join(
        f"{phase.partition('_')[0]} {split} {value:.3f}"
        for phase, split, value in chosen.select("phase", "split", "value").iter_rows()
        if value is not None
    )
