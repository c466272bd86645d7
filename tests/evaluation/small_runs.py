"""A benchmark of numbers on the spine: samples in two classes and a novel one, made-up models.

`build_small` is the order of any benchmark: samples, splits, protocols, runs, outputs, scores,
metrics. The raw source is a CSV file of sample_id, class, split, feature.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import nn

from schemas.config import Settings
from schemas.errors import TrainingError
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PREDICTIONS, RUNS, SAMPLES, SPLITS, TRAINING
from storage.layout import content_key
from storage.raw import open_raw
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.evaluation.protocols import key_protocols, plan_protocols, protocol_keys
from tasks.evaluation.runs import run_id, run_mark, run_row
from tasks.evaluation.stages import (
    HEAD,
    EvaluationSettings,
    PassedRun,
    chosen_scores,
    describe_scores,
    evaluate_scores,
    plan_evaluation,
    plan_score_settings,
    plan_scores,
    prediction_rows,
    record_failures,
    score_runs,
)
from tasks.scores.base import Head

PROTOCOLS = {"first": ("a", "b"), "second": ("b", "c")}
MADE: list[str] = []
"""Names of fits that really ran, in this process."""
MENDED: list[str] = []
"""Anything here, and a negative slope no longer diverges."""


def write_raw(path: Path, rows: int = 30, seed: int = 0, extra: Sequence[str] = ()) -> None:
    draws = np.random.default_rng(seed)
    lines = ["sample_id,class,split,feature"]
    for number in range(3 * rows):
        name = "abc"[number % 3]
        split = ("train", "valid", "test")[number // 3 % 3]
        value = "abc".index(name) + draws.normal(0, 0.2)
        lines.append(f"s{number:03d},{name},{split},{value:.4f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, *extra]) + "\n")


@stage(writes=(SAMPLES,), version=1)
def read_samples(shard: Shard, settings: Settings) -> Produced:
    """Rows of the raw file as samples."""
    (file,) = shard.files
    rows = _raw(shard)
    samples = rows.select(
        "sample_id",
        "class",
        pl.lit(None, pl.String).alias("sequence"),
        pl.lit(None, pl.Int32).alias("position"),
        pl.lit(file.name).alias("source"),
        pl.col("feature").map_elements(content_key, return_dtype=pl.String).alias("digest"),
        pl.lit("features").alias("modality"),
    )
    return Produced({"samples": samples}, samples.height)


def _raw(shard: Shard) -> pl.DataFrame:
    data = open_raw(Path(shard.source or "")).read(shard.files[0].name)
    return pl.read_csv(data)


@stage(writes=(SPLITS,), version=1)
def split_samples(shard: Shard, settings: Settings) -> Produced:
    """One protocol: two classes are known, the third is novel; class d is in none."""
    name, known = shard.about["protocol"], shard.about["known"]
    rows = _raw(shard).filter(pl.col("class").is_in(["a", "b", "c"]))
    is_known = pl.col("class").is_in(known)
    rows = rows.filter(is_known | (pl.col("split") == "test")).select(
        pl.lit(name).alias("protocol"),
        "sample_id",
        pl.lit(0).alias("step"),
        "class",
        pl.col("class")
        .replace_strict({c: i for i, c in enumerate(known)}, default=None)
        .cast(pl.Int32)
        .alias("label"),
        "split",
        pl.when(is_known).then(pl.lit("known")).otherwise(pl.lit("novel")).alias("role"),
        pl.lit(None, pl.String).alias("subset"),
    )
    return Produced({"splits": rows}, rows.height)


@stage(writes=(RUNS, TRAINING), version=1)
def fit_line(shard: Shard, settings: Settings) -> Produced:
    """A linear layer made of the class means; the slope is a setting."""
    facts = RunFacts.model_validate(shard.about)
    MADE.append(shard.name)
    if facts.settings["slope"] < 0 and not MENDED:
        raise TrainingError(f"training diverged with slope {facts.settings['slope']}")
    head = nn.Linear(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2) * facts.settings["slope"])
        head.bias.zero_()
    assert shard.work is not None
    shard.work.mkdir(parents=True, exist_ok=True)
    Head.of(head).save(shard.work / HEAD)
    training = pl.DataFrame(
        {"run_id": [run_id(facts)], "epoch": [1], "measure": ["loss"], "value": [0.5]}
    )
    return Produced(
        {"runs": run_row(facts), "training": training}, 1, files={HEAD: shard.work / HEAD}
    )


@stage(writes=(OUTPUTS, PREDICTIONS), version=1)
def pass_line(shard: Shard, settings: Settings) -> Produced:
    """Logits and features of every row of the protocol; a slope of 13 is a defect."""
    facts = RunFacts.model_validate(shard.about)
    if facts.settings["slope"] == 13:
        raise ZeroDivisionError("a defect")
    splits = shard.read("splits")
    rows = splits.join(_raw(shard).select("sample_id", "feature"), on="sample_id")
    x = rows["feature"].to_numpy()
    known = sorted(set(rows.drop_nulls("label")["label"]))
    centres = [x[(rows["label"] == k).fill_null(False).to_numpy()].mean() for k in known]
    features = np.exp(-((x[:, None] - np.array(centres)) ** 2)).astype(np.float32)
    logits = features * np.float32(facts.settings["slope"])
    outputs = rows.select(
        pl.lit(run_id(facts)).alias("run_id"),
        "sample_id",
        pl.lit("plain").alias("view"),
    ).with_columns(
        pl.Series("logits", logits).cast(pl.List(pl.Float32)),
        pl.Series("features", features).cast(pl.List(pl.Float32)),
        pl.lit(None, pl.Float64).alias("novelty"),
        pl.lit(None, pl.String).alias("predicted"),
    )
    classes = dict(splits.drop_nulls("label").select("label", "class").unique().iter_rows())
    joined = outputs.drop("run_id", "predicted").join(splits, on="sample_id")
    predictions = prediction_rows(facts, joined, classes)
    return Produced({"outputs": outputs, "predictions": predictions}, outputs.height)


def build_small(
    lake: Path,
    raw: Path,
    *,
    benchmark: str = "small",
    protocols: Sequence[str] = ("first", "second"),
    slopes: Sequence[float] = (4.0,),
    seeds: Sequence[int] = (0,),
    scores: dict[str, dict[str, Any]] | None = None,
    versions: dict[str, int] | None = None,
    draws: int = 20,
) -> Build:
    choices = chosen_scores(scores or {"msp": {}, "nearest": {}})
    with Build(benchmark, lake, workers=1) as build:
        source = build.source(raw)
        files = tuple(source.files())
        build.run(read_samples, [Shard("all", files=files, source=source.root)], Settings())
        splits = [
            Shard(name, files=files, source=source.root, about={"protocol": name, "known": known})
            for name, known in PROTOCOLS.items()
            if name in protocols
        ]
        build.run(split_samples, splits, Settings())
        planned = plan_protocols(build.table("splits"), build.table("samples"))
        build.run(key_protocols, planned, Settings())
        build.publish()
        keys = protocol_keys(build)
        facts = [
            RunFacts(
                benchmark=benchmark,
                protocol=protocol,
                model="line",
                preset="small",
                settings={"slope": slope},
                seed=seed,
                versions=versions or {"model": 1},
                fit_key=keys[protocol]["fit_key"],
            )
            for protocol in protocols
            for slope in slopes
            for seed in seeds
        ]
        parts = {part.shard: part for part in build.table("splits")}
        marks = [run_mark(one, keys[str(one.protocol)]["data_key"]) for one in facts]
        fits = [
            Shard(
                mark.run_id,
                files=files,
                source=source.root,
                parts=(parts[str(one.protocol)],),
                about=one.model_dump(mode="json"),
                depends={"run": mark.run_id},
                run=mark,
            )
            for one, mark in zip(facts, marks, strict=True)
        ]
        # The raw file is read, but what counts is the run's rows: `depends` says which.
        fits = [Shard(f.name, (), f.parts, f.source, f.about, f.depends, f.run) for f in fits]
        fitted = build.run_each(fit_line, fits, Settings())
        record_failures(build)
        passes = [
            Shard(fit.name, files, fit.parts, source.root, fit.about, run=fit.run)
            for fit, _ in fitted
        ]
        passed = build.run_each(pass_line, passes, Settings())
        record_failures(build)
        heads = {shard.name: piece.file(HEAD) for shard, piece in fitted}
        runs = [
            PassedRun(
                RunFacts.model_validate(shard.about),
                shard.run,
                (piece.part("outputs"),),
                shard.parts,
                build.table("samples"),
                heads[shard.name],
            )
            for shard, piece in passed
        ]
        build.run(describe_scores, plan_score_settings(choices), Settings())
        scored = score_runs(build, plan_scores(runs, choices, scores))
        build.run(
            evaluate_scores,
            plan_evaluation(runs, scored, ("openood",)),
            EvaluationSettings(draws=draws),
        )
    return build
