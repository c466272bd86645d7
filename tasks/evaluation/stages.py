"""Scores of what models put out, and metrics of the scores: the same two stages in every benchmark.

Enters: `outputs` of a run, the `splits` of its protocol and, where the model has one, its head.
Leaves: `scores` per sample, then `metrics` with intervals and `curves`, by named convention.

A score is fitted on training rows and made for valid and test rows. Where samples come in steps
(increments, rounds) it is fitted for each step on the training rows of the steps before. A view
that was passed over training rows too is fitted on them, any other on those of `plain`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError, NoveltyError
from schemas.manifest import RunMark
from schemas.runs import RunFacts
from schemas.tables import (
    ALL_STEPS,
    CURVES,
    METRICS,
    PLAIN,
    RUNS,
    SCORE_SETTINGS,
    SCORES,
)
from storage.layout import content_key
from storage.parquet import filled_columns
from storage.pieces import Part, Piece
from tasks import models
from tasks import scores as score_files
from tasks.engine.plugins import ALL
from tasks.engine.stage import Build, Produced, Reject, Shard, stage
from tasks.engine.threads import one_torch_thread
from tasks.evaluation.conventions import find_convention
from tasks.evaluation.intervals import intervals
from tasks.evaluation.metrics import curves, evaluate
from tasks.evaluation.protocols import FITTED
from tasks.evaluation.runs import ID_DIGITS, as_json, run_id, run_row

log = logging.getLogger(__name__)

HEAD = "head.safetensors"
CURVE_POINTS = 1000
EVALUATED = ("valid", "test")
GROUP = ("score_id", "score", "split", "view", "phase", "step")


# ---------------------------------------------------------------- plans


@dataclass(frozen=True)
class PassedRun:
    """A run whose outputs are there: what the scores of it are planned from.

    `splits` are the parts with the rows of its protocol, `samples` those that tell sequences.
    """

    facts: RunFacts
    mark: RunMark
    outputs: tuple[Part, ...]
    splits: tuple[Part, ...]
    samples: tuple[Part, ...] = ()
    head: Part | None = None
    phase: str = "none"
    view: str = PLAIN
    """Where views are passed apart, each is a `PassedRun` of its own."""
    reference: bool = True
    """Whether training rows are there to fit scores on; an imported run may have none."""
    foreign_logits: bool = False
    """Whether logits are of other classes than the protocol's: none may be compared with labels."""

    def about(self) -> dict[str, Any]:
        """What its rows of `scores` and `metrics` say of it."""
        return {
            "run_id": self.mark.run_id,
            "protocol": self.facts.protocol,
            "model": self.facts.model,
            "seed": self.facts.seed,
            "phase": self.phase,
            **({"foreign_logits": True} if self.foreign_logits else {}),
        }

    def place_of_view(self) -> tuple[str, ...]:
        """What the view adds to the names of its shards."""
        return () if self.view == PLAIN else (self.view,)

    def gives(self) -> frozenset[str]:
        """What a score may ask of it."""
        filled = set().union(*(filled_columns(part.path) for part in self.outputs))
        columns = filled & {"logits", "features", "novelty"}
        fitted_on = {"train", "valid"} if self.reference else set()
        return frozenset(columns | fitted_on | ({"head"} if self.head else set()))


class ScoreChoice(Settings):
    """One score with all its settings."""

    name: str
    version: int
    settings: dict[str, Any]

    @property
    def score_id(self) -> str:
        return content_key(self.model_dump(mode="json"))[:ID_DIGITS]


def chosen_scores(
    choice: Mapping[str, Mapping[str, Any]], preset: str | None = None
) -> list[ScoreChoice]:
    """Scores with their resolved settings; a wrong name or setting is refused."""
    for name in sorted(choice.keys() - set(score_files.names())):
        if name in models.names():
            raise ConfigError(f"{name} is no score but a model: ask for it with --models {name}")
    return [
        ScoreChoice(
            name=name,
            version=kind.version,
            settings=kind.resolve(preset, changes).model_dump(mode="json"),
        )
        for name, changes in score_files.selection(choice).items()
        for kind in (score_files.find(name),)
    ]


def plan_score_settings(choices: Sequence[ScoreChoice]) -> list[Shard]:
    return [
        Shard(f"{choice.name}-{choice.score_id}", about=choice.model_dump(mode="json"))
        for choice in choices
    ]


def plan_scores(
    runs: Sequence[PassedRun],
    choices: Sequence[ScoreChoice],
    selection: Mapping[str, Any] | None = None,
) -> list[Shard]:
    """One shard for each run and each score that the run gives enough for.

    `selection` is the user's choice: a score in it by name that fits no run is refused.
    """
    shards, fitting = [], set()
    for run in runs:
        available = run.gives()
        for choice in choices:
            if not fits(choice.name, available, run.foreign_logits):
                continue
            fitting.add(choice.name)
            shards.append(
                Shard(
                    "/".join(
                        (run.mark.run_id, f"{choice.name}-{choice.score_id}", *run.place_of_view())
                    ),
                    parts=(*run.outputs, *run.splits, *((run.head,) if run.head else ())),
                    about={**run.about(), "score": choice.model_dump(mode="json")},
                    depends={
                        "outputs": sorted({part.piece for part in run.outputs}),
                        "rows": run.mark.data_key,
                    },
                    run=run.mark,
                )
            )
    for name in selection or {}:
        if runs and name != "all" and name not in fitting:
            needs = ", ".join(sorted(score_files.find(name).needs))
            raise ConfigError(
                f"score {name} fits none of the runs: it needs {needs}; `novelty scores` tells "
                "where each one fits"
            )
    return shards


def fits(score: str, available: frozenset[str], foreign_logits: bool = False) -> bool:
    """Whether a score finds all that it needs.

    Foreign logits are of other classes than the protocol's. No score fits them that learns which
    logits the training samples of each class have.
    """
    needs = score_files.find(score).needs
    return needs <= available and not (foreign_logits and {"logits", "train"} <= needs)


def check_scores(
    names: Iterable[str], outputs: Mapping[str, frozenset[str]], foreign_logits: bool = False
) -> None:
    """A score named by the user must fit one of the models; `outputs` is what each puts out."""
    for name in names:
        if name == ALL or not outputs:
            continue
        if not any(fits(name, g | {"train", "valid"}, foreign_logits) for g in outputs.values()):
            why = " of the protocol's own classes" if foreign_logits else ""
            raise ConfigError(
                f"score {name} fits none of the models {', '.join(outputs)}: it needs "
                f"{', '.join(sorted(score_files.find(name).needs))}{why}"
            )


def measure_runs(
    build: Build,
    runs: Sequence[PassedRun],
    choices: Sequence[ScoreChoice],
    conventions: Callable[[str], Sequence[str]],
    *,
    selection: Mapping[str, Any] | None = None,
    scored: Sequence[Piece] = (),
    described: Sequence[ScoreChoice] = (),
) -> None:
    """Scores of all runs, then metrics of them, each protocol by its conventions.

    `scored` are pieces of scores that other stages made, `described` what those scores are.
    """
    record_failures(build)
    failed = {mark.run_id for failure in build.failures if (mark := failure.shard.run)}
    runs = [run for run in runs if run.mark.run_id not in failed]
    by_id = {choice.score_id: choice for choice in (*choices, *described)}
    build.run(describe_scores, plan_score_settings(list(by_id.values())), Settings())
    pieces = [*score_runs(build, plan_scores(runs, choices, selection)), *scored]
    build.run(evaluate_scores, plan_evaluation(runs, pieces, conventions), EvaluationSettings())


def score_runs(build: Build, shards: Sequence[Shard]) -> list[Piece]:
    """The pieces of scores; a score with a defect is noted and stops no other."""
    return [piece for _, piece in build.run_each(score_outputs, shards, Settings())]


def plan_evaluation(
    runs: Sequence[PassedRun],
    scored: Sequence[Piece],
    conventions: Sequence[str] | Callable[[str], Sequence[str]],
) -> list[Shard]:
    """One shard for each piece of scores; its name is that of the piece."""

    def rules(run: PassedRun) -> list[str]:
        return list(conventions(str(run.facts.protocol)) if callable(conventions) else conventions)

    by_id = {run.mark.run_id: run for run in runs}
    return [
        Shard(
            piece.shard,
            parts=(piece.part(SCORES.name), *run.splits, *run.samples),
            about={**run.about(), "conventions": rules(run)},
            depends={"scores": piece.manifest.key, "rows": run.mark.data_key},
            run=run.mark,
        )
        for piece in scored
        if piece.manifest.run is not None
        for run in (by_id[piece.manifest.run.run_id],)
    ]


# ---------------------------------------------------------------- runs without training


def record_failures(build: Build) -> None:
    """Say in `runs` which runs failed; a run that only lacks a score did not."""
    recorded = {p.shard for p in build.pieces if p.manifest.stage == record_failure.name}
    shards: dict[str, Shard] = {}
    for failure in build.failures:
        mark, about = failure.shard.run, failure.shard.about
        if mark is None or failure.stage == score_outputs.name or mark.run_id in recorded:
            continue
        record = {"facts": about.get("facts", about), "reason": failure.reason}
        shards.setdefault(mark.run_id, Shard(mark.run_id, about=record, run=mark))
    build.run(record_failure, list(shards.values()), Settings())


@stage(writes=(RUNS,), version=1)
def record_failure(shard: Shard, settings: Settings) -> Produced:
    """Say in `runs` that a run failed, and why."""
    facts = RunFacts.model_validate(shard.about["facts"])
    return Produced({RUNS.name: run_row(facts, failed=shard.about["reason"])}, 1)


def plan_records(runs: Sequence[PassedRun]) -> list[Shard]:
    """One shard for each run that no training stage records."""
    return [
        Shard(
            run.mark.run_id,
            parts=run.outputs,
            about=run.facts.model_dump(mode="json"),
            depends={"run": run.mark.run_id, "outputs": sorted({p.piece for p in run.outputs})},
            run=run.mark,
        )
        for run in runs
    ]


@stage(writes=(RUNS,), version=1)
def record_run(shard: Shard, settings: Settings) -> Produced:
    """The row of a run that only uses what is there, such as a frozen backbone."""
    return Produced({RUNS.name: run_row(RunFacts.model_validate(shard.about))}, 1)


# ---------------------------------------------------------------- scores


@stage(writes=(SCORE_SETTINGS,), version=1)
def describe_scores(shard: Shard, settings: Settings) -> Produced:
    """Say what a score_id stands for."""
    choice = ScoreChoice.model_validate(shard.about)
    row = (choice.score_id, choice.name, choice.version, as_json(choice.settings))
    table = pl.DataFrame([row], schema=SCORE_SETTINGS.polars_schema, orient="row")
    return Produced({SCORE_SETTINGS.name: table}, 1)


@stage(writes=(SCORES,), version=2)
def score_outputs(shard: Shard, settings: Settings) -> Produced:
    """One score of one run, for every valid and test row of its protocol.

    Where the rows do not suffice for the score, its reason stands in quarantine.
    """
    from tasks.scores.base import Head

    one_torch_thread()
    choice = ScoreChoice.model_validate(shard.about["score"])
    heads = [Head.load(part.path) for part in shard.parts if part.table == HEAD]
    rows = run_rows(shard)
    try:
        table = scored_rows(shard.about, choice, rows, heads[0] if heads else None)
    except NoveltyError as error:
        record = f"{choice.name} of {shard.about['run_id']}"
        log.warning(f"  {shard.name}: left out: {error}")
        return Produced({}, 1, [Reject(record, "score", str(error))])
    return Produced({SCORES.name: table}, table.height)


def scored_rows(
    about: Mapping[str, Any], choice: ScoreChoice, rows: pl.DataFrame, head: Any
) -> pl.DataFrame:
    """Rows of `scores`; the score is fitted for each view and step on what it may learn from."""
    kind = score_files.find(choice.name)
    rows, classes = numbered_labels(rows)
    with_train = set(rows.filter(split="train")["view"])
    fitted: tuple[tuple[str, int], Any] | None = None
    frames = [SCORES.empty()]
    for view, step, group in evaluated_groups(rows):
        fit_view = view if view in with_train else PLAIN
        learnable = (
            (pl.col("view") == fit_view)
            & (pl.col("step") < max(step, 1))
            & pl.col("split").is_in(FITTED)
        )
        count = rows.select(learnable.sum()).item()
        if fitted is None or fitted[0] != (fit_view, count):
            score = kind(kind.resolve(None, choice.settings))
            what = f"{choice.name} of {about['run_id']}"
            score.fit(_reference(rows, learnable, kind.needs, head, what))
            fitted = ((fit_view, count), score)
        score = fitted[1]
        outputs = arrays(group)
        class_outputs = replace(outputs, logits=None) if about.get("foreign_logits") else outputs
        labels = score.labels_of(class_outputs)
        predicted = group["predicted"]  # what the model says, unless the score names a class
        if labels is not None and classes:
            predicted = pl.Series([classes[int(label)] for label in labels], dtype=pl.String)
        frames.append(
            SCORES.conform(
                group.select(
                    pl.lit(about["run_id"]).alias("run_id"),
                    pl.lit(choice.score_id).alias("score_id"),
                    pl.lit(choice.name).alias("score"),
                    "sample_id",
                    pl.lit(view).alias("view"),
                    pl.lit(about["phase"]).alias("phase"),
                    pl.lit(step).alias("step"),
                    "split",
                    "class",
                    (pl.col("role") == "novel").alias("novel"),
                ).with_columns(
                    pl.Series("value", score.score(outputs)), predicted.alias("predicted")
                )
            )
        )
    return pl.concat(frames)


def _reference(
    rows: pl.DataFrame, learnable: pl.Expr, needs: frozenset[str], head: Any, what: str
) -> Any:
    """What a score may learn from, as far as it needs it; the rows are not kept."""
    from tasks.scores.base import Reference

    train_rows = rows.filter(learnable, pl.col("split") == "train")
    valid_rows = rows.filter(learnable, pl.col("split") == "valid", pl.col("role") == "known")
    if valid_rows.is_empty():
        if "valid" in needs:
            log.info(f"  {what}: training rows stand in for validation")
        valid_rows = train_rows
    return Reference(
        _outputs_of(train_rows, needs & {"train", "head"}),
        _labels(train_rows, needs & {"train"}),
        _outputs_of(valid_rows, needs & {"valid"}),
        head if "head" in needs else None,
        _labels(valid_rows, needs & {"valid"}),
    )


def _outputs_of(rows: pl.DataFrame, needed: Iterable[str]) -> Any:
    return arrays(rows) if needed and rows.height else None


def _labels(rows: pl.DataFrame, needed: Iterable[str]) -> np.ndarray | None:
    labels = rows["label"]
    if not needed or not len(labels) or labels.null_count():
        return None
    return labels.to_numpy().astype(np.int64)


def numbered_labels(rows: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, str]]:
    """Labels counted as logits count them, only those with training rows; and the class of each."""
    train = rows.filter(pl.col("split") == "train").drop_nulls("label")
    names = train.group_by("label").agg(pl.col("class").min()).sort("label")
    places = {label: place for place, label in enumerate(names["label"])}
    numbered = pl.col("label").replace_strict(places, default=None, return_dtype=pl.Int32)
    return rows.with_columns(numbered), dict(enumerate(names["class"]))


def run_rows(shard: Shard) -> pl.DataFrame:
    """Outputs of a run beside what the protocol says of each sample, in the order of the ids."""
    protocol = shard.about["protocol"]
    outputs = shard.read("outputs").drop("run_id")
    splits = shard.read("splits").filter(pl.col("protocol") == protocol)
    # Features are copied once, not by the join and by the sort.
    rows = outputs.select("sample_id", "view").with_row_index("place").join(splits, on="sample_id")
    rows = rows.sort("view", "step", "sample_id")
    return outputs[rows["place"]].hstack(rows.drop("place", "sample_id", "view"))


def evaluated_groups(rows: pl.DataFrame) -> Iterator[tuple[str, int, pl.DataFrame]]:
    """Valid and test rows by view and step."""
    evaluated_rows = rows.filter(pl.col("split").is_in(EVALUATED))
    for (view, step), part in evaluated_rows.group_by("view", "step", maintain_order=True):
        yield str(view), int(step), part


def arrays(rows: pl.DataFrame) -> Any:
    """`Outputs` of these rows; what one of the rows lacks is left out."""
    from tasks.scores.base import Outputs

    def matrix(name: str) -> np.ndarray | None:
        column = rows[name]
        if not len(column) or column.null_count():
            return None
        return column.list.to_array(column.list.len()[0]).to_numpy()

    scores = rows["novelty"]
    novelty = None if scores.null_count() else scores.to_numpy()
    return Outputs(matrix("logits"), matrix("features"), novelty)


# ---------------------------------------------------------------- metrics


class EvaluationSettings(Settings):
    """How intervals are made."""

    draws: int = Field(1000, ge=0)
    """Bootstrap draws behind an interval; 0: none."""


@stage(writes=(METRICS, CURVES), version=1)
def evaluate_scores(shard: Shard, settings: EvaluationSettings) -> Produced:
    """Metrics, intervals and curves of one score of a run, by every convention asked for."""
    about = shard.about
    rows = shard.read(SCORES.name)
    splits = shard.read("splits").filter(pl.col("protocol") == about["protocol"])
    rows = rows.join(splits.select("sample_id", "step", "subset"), on=["sample_id", "step"])
    rows = with_sequences(rows, shard)
    metrics, lines = [METRICS.empty()], [CURVES.empty()]
    for group, subset, part in measured_groups(rows):
        place = {**_place(about), **group, "subset": subset}
        for name in about["conventions"]:
            values, points = measure(part, name, settings.draws, seed_of(group["score_id"]))
            keys = [pl.lit(value).alias(key) for key, value in place.items()]
            metrics.append(METRICS.conform(values.select(*keys, pl.all())))
            lines.append(CURVES.conform(points.select(*keys, pl.all())))
    table = pl.concat(metrics)
    return Produced({METRICS.name: table, CURVES.name: pl.concat(lines)}, table.height)


def _place(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: about[name] for name in ("protocol", "run_id", "model", "seed")}


def with_sequences(rows: pl.DataFrame, shard: Shard) -> pl.DataFrame:
    """Rows with the sequence that each sample belongs to, null where no part tells."""
    parts = [part for part in shard.parts if part.table == "samples"]
    if not parts:
        return rows.with_columns(pl.lit(None, pl.String).alias("sequence"))
    in_rows = pl.col("sample_id").is_in(rows["sample_id"].unique().implode())
    known = pl.concat(part.read(["sample_id", "sequence"]).filter(in_rows) for part in parts)
    return rows.join(known, on="sample_id", how="left", maintain_order="left")


def measured_groups(rows: pl.DataFrame) -> Iterator[tuple[dict[str, Any], str, pl.DataFrame]]:
    """Rows that a number is made of: each score, split, view, phase and step, and all steps.

    Where novel samples are of several subsets, each subset against all known ones too.
    """
    frames = [rows]
    if rows["step"].n_unique() > 1:
        frames.append(rows.with_columns(pl.lit(ALL_STEPS, pl.Int32).alias("step")))
    for frame in frames:
        for key, part in frame.group_by(GROUP, maintain_order=True):
            group = dict(zip(GROUP, key, strict=True))
            yield group, "all", part
            subsets = part.filter("novel")["subset"].drop_nulls().unique().sort().to_list()
            for subset in subsets if len(subsets) > 1 else ():
                yield group, subset, part.filter(~pl.col("novel") | (pl.col("subset") == subset))


def measure(
    rows: pl.DataFrame, convention: str, draws: int, seed: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(metrics with intervals, curves) of rows with value, novel, class, predicted, sequence."""
    rule = find_convention(convention)
    predicted = rows["predicted"]
    classes = None if predicted.is_null().any() else (rows["class"], predicted)
    metrics = evaluate(rows["value"], rows["novel"], rule, classes=classes)
    bounds = pl.lit(None, pl.Float64).alias("low"), pl.lit(None, pl.Float64).alias("high")
    if draws:
        sequences = None if rows["sequence"].is_null().all() else rows["sequence"].to_list()
        lows_and_highs = intervals(
            rows["value"],
            rows["novel"],
            rule,
            classes=classes,
            sequences=sequences,
            seed=seed,
            draws=draws,
        )
        metrics = metrics.join(lows_and_highs, on="metric", how="left", maintain_order="left")
        bounds = pl.col("low"), pl.col("high")
    metrics = metrics.select("convention", "metric", "value", *bounds, "n")
    return metrics, curves(rows["value"], rows["novel"], rule, points=CURVE_POINTS)


def seed_of(score_id: str) -> int:
    """Draws of a score's intervals are the same in every run."""
    return int(content_key(["intervals", score_id])[:8], 16)


def prediction_rows(
    facts: RunFacts, rows: pl.DataFrame, classes: Mapping[int, str], *, phase: str = "none"
) -> pl.DataFrame:
    """`predictions` of valid and test rows (as `run_rows` gives them) out of their logits."""
    evaluated_rows = rows.filter(pl.col("split").is_in(EVALUATED))
    logits = arrays(evaluated_rows).logits
    if logits is None:
        return pl.DataFrame()
    odds = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    best = logits.argmax(1)
    probability = odds[np.arange(len(best)), best] / odds.sum(1)
    return evaluated_rows.select(
        pl.lit(run_id(facts)).alias("run_id"),
        pl.lit(phase).alias("phase"),
        "step",
        "sample_id",
        "view",
        pl.lit(1).alias("rank"),
        "split",
        "class",
    ).with_columns(
        pl.Series("predicted", [classes[int(label)] for label in best], pl.String),
        pl.Series("probability", probability),
        pl.lit(None, pl.Float64).alias("p_unknown"),
    )
