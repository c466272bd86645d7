"""The evaluation stages: what a run is shown, what it leaves, and that it goes on after a kill."""

import json
import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from schemas.kowl import Config
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, RUNS
from storage.pieces import Part
from storage.raw import open_raw
from tasks.engine.stage import Shard
from tasks.evaluation.runs import config_id, run_id, run_mark, run_row
from tasks.evaluation.stages import PassedRun, check_scores, chosen_scores, fits, scored_rows
from tasks.kowl import evaluation, evaluation_report
from tasks.kowl.evaluation import (
    RunSettings,
    evaluate_predictor,
    group_clips,
    plan_groups,
    plan_runs,
    predictor_facts,
    protocol_inputs,
)
from tasks.predictors import resolved_predictors
from tests.kowl.test_evaluator import world
from tests.report.reading import read_of
from tests.shared import shared_path

PROTOCOL = "kowl-test"
SETTINGS = RunSettings(device="cpu")
CONFIG = {
    "lists": ".",
    "videos": ".",
    "evaluation": {"top_k": 2, "feedback": [1.0]},
}
BACKBONE = RunFacts(
    benchmark="kowl",
    protocol=None,
    model="frame_backbone",
    settings={"preprocessing": "spread"},
    origin="frozen",
    fit_key="none",
)


class Held(Part):
    """A part that is in memory, not in a lake."""

    def __new__(cls, table: str, frame: pl.DataFrame, shard: str = "all"):
        part = object.__new__(cls)
        for name, value in {"table": table, "frame": frame, "shard": shard}.items():
            object.__setattr__(part, name, value)
        return part

    def __init__(self, table: str, frame: pl.DataFrame, shard: str = "all"):
        pass

    def row_groups(self, columns):
        yield from self.read(columns).iter_slices(37)

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__

    def read(self, columns=None):
        return self.frame if columns is None else self.frame.select(columns)


def outputs_of(names, vectors, view="plain") -> pl.DataFrame:
    rows = pl.DataFrame({"sample_id": names, "features": vectors.astype(np.float32)})
    return OUTPUTS.conform(
        rows.select(
            pl.lit(run_id(BACKBONE)).alias("run_id"),
            "sample_id",
            pl.lit(view).alias("view"),
            pl.lit(None, pl.List(pl.Float32)).alias("logits"),
            pl.col("features").arr.to_list(),
            pl.lit(None, pl.Float64).alias("novelty"),
            pl.lit(None, pl.String).alias("predicted"),
        )
    )


@pytest.fixture
def parts() -> tuple[Held, Held]:
    return presented()


def presented() -> tuple[Held, Held]:
    """Outputs and splits of three increments; each clip plain and, with its features, inverted."""
    features, table = world()
    views = ("plain", "color_invert")
    shown = [outputs_of(features.sample_ids, features.values, view) for view in views]
    introduced = pl.col("class").replace_strict(
        dict(zip("abcdefgh", (0, 0, 0, 0, 1, 1, 2, 2), strict=True))
    )
    splits = table.rename({"label": "class"}).with_columns(
        pl.lit(PROTOCOL).alias("protocol"),
        pl.when(introduced < pl.max_horizontal("step", 1))
        .then(pl.lit("known"))
        .otherwise(pl.lit("novel"))
        .alias("role"),
    )
    return Held("outputs", pl.concat(shown)), Held("splits", splits, PROTOCOL)


def frozen(parts=((), ())) -> PassedRun:
    facts = BACKBONE.model_copy(
        update={"protocol": PROTOCOL, "base_runs": (run_id(BACKBONE),), "fit_key": "fit"}
    )
    outputs, splits = parts
    return PassedRun(facts, run_mark(facts, "data"), (outputs,), (splits,), phase="before")


def facts_of(predictors, **changed) -> list[RunFacts]:
    config = Config.model_validate({**CONFIG, "predictors": predictors, **changed})
    chosen = resolved_predictors(config.predictors, config.preset, config.train)
    return predictor_facts(config, chosen, frozen(), "fit")


def shard(parts, work=None, predictor="gmm_finch", feedback=1.0) -> Shard:
    (facts,) = facts_of([predictor], evaluation={"top_k": 2, "feedback": [feedback]})
    return Shard(run_id(facts), parts=tuple(parts), about=facts.model_dump(mode="json"), work=work)


def test_features_of_another_preprocessing_are_another_configuration(parts):
    """Also of another number of crops: what differs below is not the same predictor twice."""
    config = Config.model_validate({**CONFIG, "predictors": ["ann"]})
    chosen = resolved_predictors(config.predictors, config.preset, config.train)
    found = []
    for settings in ({"preprocessing": "spread"}, {"preprocessing": "fair"}, {"crops": 2}):
        values = {"settings": {**BACKBONE.settings, **settings}}
        below = replace(frozen(), facts=frozen().facts.model_copy(update=values))
        found += predictor_facts(config, chosen, below, "fit")
    assert [facts.network for facts in found] == [
        *("frame_backbone", "frame_backbone fair", "frame_backbone")
    ]
    assert len({config_id(facts) for facts in found}) == 3


def test_logits_of_other_classes_are_scored_and_never_taken_for_labels():
    """Five columns of the weights' own classes, three labels of the protocol."""
    rng = np.random.default_rng(0)
    count = 24
    rows = pl.DataFrame(
        {
            "sample_id": [f"{n:02}" for n in range(count)],
            "view": "plain",
            "step": pl.Series([0] * 12 + [1] * 12, dtype=pl.Int32),
            "split": ["train"] * 12 + ["test"] * 12,
            "role": ["known"] * 18 + ["novel"] * 6,
            "class": list("abc") * 8,
            "label": pl.Series([0, 1, 2] * 8, dtype=pl.Int32),
            "logits": rng.normal(size=(count, 5)).astype(np.float32).tolist(),
            "features": rng.normal(size=(count, 4)).astype(np.float32).tolist(),
            "novelty": pl.Series([None] * count, dtype=pl.Float64),
            "predicted": pl.Series([None] * count, dtype=pl.String),
        },
        schema_overrides={"logits": pl.List(pl.Float32), "features": pl.List(pl.Float32)},
    )
    about = replace(frozen(), foreign_logits=True).about()
    for name, named in (("energy", False), ("nearest", True)):
        (choice,) = chosen_scores({name: {}})
        found = scored_rows(about, choice, rows, None)
        assert found.height == 12 and found["value"].is_finite().all()
        assert (found["predicted"].null_count() == 0) == named
    given = frozenset({"logits", "features", "train", "valid"})
    assert fits("energy", given, True) and fits("kl_matching", given, True)
    assert fits("openmax", given) and not fits("openmax", given, True)
    assert not fits("temperature", given, True)
    with pytest.raises(ConfigError, match=r"openmax fits none .* of the protocol's own classes"):
        check_scores(["openmax"], {"x3d": frozenset({"logits", "features"})}, foreign_logits=True)


def test_every_table_of_a_run(parts, tmp_path):
    run = shard(parts, tmp_path)
    tables = evaluate_predictor(run, SETTINGS).tables
    splits, outputs = parts[1].frame, parts[0].frame
    assert all(set(table["run_id"]) == {run.name} for table in tables.values())
    row = tables["runs"].row(0, named=True)
    assert (row["model"], row["network"], row["protocol"]) == (
        "gmm_finch",
        "frame_backbone",
        PROTOCOL,
    )
    assert json.loads(row["settings"])["feedback"] == 1 and row["origin"] == "trained"
    # One prediction for each valid and test clip, view and phase; none before increment 1.
    tested = splits.filter(pl.col("split") != "train").join(outputs, on="sample_id")
    counts = tested.group_by("step", "split", "view").len()
    for phase in ("before", "after"):
        expected = counts.filter(pl.col("step") > 0) if phase == "before" else counts
        found = tables["predictions"].filter(phase=phase).group_by("step", "split", "view").len()
        assert_frame_equal(found, expected, check_row_order=False, check_dtypes=False)
    scores = tables["scores"]
    assert set(scores["score"]) == {"own", "p_unknown"} and set(scores["phase"]) == {"before"}
    for score in ("own", "p_unknown"):
        found = scores.filter(score=score).group_by("step", "split", "view").len()
        expected = counts.filter(pl.col("step") > 0)
        assert_frame_equal(found, expected, check_row_order=False, check_dtypes=False)
    novel = scores.filter(score="own", split="test", view="plain", step=1)
    assert set(novel.filter("novel")["class"]) == set("ef")
    assert novel.filter("novel")["value"].min() > novel.filter(~pl.col("novel"))["value"].median()
    # The reduced measures stand in the shared table too.
    pick = {"split": "test", "view": "plain", "subset": "all", "step": -1}
    found = tables["metrics"].filter(
        convention="kowl-novel_to_evaluator", metric="classification_accuracy", **pick
    )
    measures = tables["measures"].filter(
        scope="cumulative", step=2, split="test", view="plain", known_set="novel_to_evaluator"
    )
    expected = measures.filter(metric="accuracy", reduction="classification")
    assert found["value"].item() == expected["value"].item() and found["n"].item() > 0


def test_transformed_clips_are_a_view_of_their_own_and_never_learned_from(parts, tmp_path):
    produced = evaluate_predictor(shard(parts, tmp_path), SETTINGS)
    measures = produced.tables["measures"]
    assert set(measures["split"]) == {"train", "valid", "test"}
    shown = set(measures.filter(view="color_invert")["split"])
    assert shown == {"valid", "test"}
    # The same features give the same measures under another name; only the order is drawn anew.
    ordered = ~pl.col("metric").str.starts_with("reaction_time")
    columns = [c for c in measures.columns if c != "view"]
    found = [
        measures.filter(ordered & (pl.col("split") == "test") & (pl.col("view") == view))
        .select(columns)
        .sort(columns[:-2])
        for view in ("plain", "color_invert")
    ]
    assert_frame_equal(*found)


def test_a_killed_run_goes_on_and_gives_the_same(parts, tmp_path, monkeypatch):
    whole = evaluate_predictor(shard(parts, tmp_path / "whole"), SETTINGS).tables
    written = evaluation._write_step

    def dies(work, number, step):
        written(work, number, step)
        if number == 1:
            raise KeyboardInterrupt  # the step is there, the run is saved after increment 0 only

    monkeypatch.setattr(evaluation, "_write_step", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate_predictor(shard(parts, tmp_path / "cut"), SETTINGS)
    steps: list[int] = []
    monkeypatch.setattr(
        evaluation, "_write_step", lambda w, n, s: (steps.append(n), written(w, n, s))
    )
    resumed = evaluate_predictor(shard(parts, tmp_path / "cut"), SETTINGS).tables
    assert steps == [1, 2]
    assert all(resumed[name].equals(whole[name]) for name in whole)


def test_more_feedback_is_better(parts, tmp_path):
    def accuracy(feedback: float) -> float:
        run = shard(parts, tmp_path / str(feedback), "ann", feedback)
        measures = evaluate_predictor(run, SETTINGS).tables["measures"]
        chosen = measures.filter(
            (pl.col("step") == 2)
            & (pl.col("scope") == "cumulative")
            & (pl.col("split") == "test")
            & (pl.col("view") == "plain")
            & (pl.col("metric") == "accuracy")
            & (pl.col("reduction") == "raw")
        )
        return chosen["value"].item()

    assert accuracy(1.0) > accuracy(0.0)


def test_no_features_is_said(parts):
    outputs, splits = parts
    with pytest.raises(SourceError, match="no train clip of the first increment has features"):
        evaluate_predictor(shard((Held("outputs", outputs.frame.clear()), splits)), SETTINGS)


def test_runs_need_train_clips_of_the_first_increment(parts):
    outputs, splits = parts
    first = splits.frame.filter(step=0, split="train")
    rest = Held("outputs", outputs.frame.join(first, on="sample_id", how="anti"))
    other = Held("splits", splits.frame, "another")
    assert protocol_inputs([rest], [splits, other], PROTOCOL) == ((), ())
    assert protocol_inputs([rest, outputs], [splits, other], PROTOCOL) == (
        (rest, outputs),
        (splits,),
    )


def test_one_run_for_each_predictor_feedback_and_seed(parts):
    facts = facts_of(["ann", "evm"], evaluation={"feedback": [0.0, 0.5]}, seeds=[0, 1, 2])
    shards = plan_runs(facts, frozen(parts))
    assert len({run.name for run in shards}) == 12
    assert {run.run.data_key for run in shards} == {"data"}
    assert shards[0].depends["views"] == ["color_invert", "plain"]


def ids(predictors=("ann", "evm"), **changed) -> dict[str, str]:
    found = facts_of(predictors, **changed)
    return {facts.model: run_id(facts) for facts in found}


def test_what_changes_the_runs_of_which_predictor(monkeypatch):
    before = ids()
    assert ids(device="cpu", predictors=["evm", "ann"]) == before
    assert ids(evaluation={"top_k": 2, "feedback": [1.0], "predicted_ranks": 2}) == before
    for changed in (
        {"predictors": {"ann": {"dropout": 0.3}, "evm": {}}},
        {"train": {"epochs": 3}},
        {"train": {"learning_rate": "0.01"}},
    ):
        after = ids(**changed)
        assert after["evm"] == before["evm"] and after["ann"] != before["ann"], changed
    for changed in (
        {"preset": "paper"},
        {"seeds": [1]},
        {"evaluation": {"top_k": 2, "feedback": [0.5]}},
        {"evaluation": {"top_k": 3, "feedback": [1.0]}},
        {"evaluation": {"top_k": 2, "feedback": [1.0], "experience_limit": 9}},
        {"evaluation": {"top_k": 2, "feedback": [1.0], "threads": 1}},
    ):
        after = ids(**changed)
        assert after["evm"] != before["evm"] and after["ann"] != before["ann"], changed
    from tasks.predictors.evm import Evm

    monkeypatch.setattr(Evm, "version", Evm.version + 1)
    after = ids()
    assert after["evm"] != before["evm"] and after["ann"] == before["ann"]


# ---------------------------------------------------------------- AVA


def test_ava_lists_are_found_by_name(tmp_path):
    (tmp_path / "ava_val.csv").write_text("-5KQ66BBWC4,902,0.077,0.151,0.283,0.811,80\n")
    with pytest.raises(SourceError, match="0 action lists"):
        plan_groups(open_raw(tmp_path), ())


def test_real_ava_groups_of_clips_that_have_a_key_frame():
    kinetics = shared_path("kinetics")
    listed = pl.read_csv(kinetics / "ava_kinetics_val_v1.0.csv.gz", has_header=False, n_rows=1)
    video, second = listed.row(0)[:2]
    clip = {"youtube_id": video, "time_start": int(second), "time_end": int(second) + 10}
    clips = pl.DataFrame(
        [
            {"sample_id": "shown", **clip},
            {"sample_id": "other", **clip, "youtube_id": "no such one"},
        ]
    )
    (planned,) = plan_groups(open_raw(kinetics), (Held("clips", clips),))
    groups = group_clips(planned, Settings()).tables["clip_groups"]
    assert set(groups["grouping"]) == {"action_type", "actions", "area", "people"}
    other = groups.filter(pl.col("sample_id") == "other")
    assert other["subset"].to_list() == ["N/A"] * 4
    assert "N/A" not in groups.filter(pl.col("sample_id") == "shown")["subset"].to_list()


def backbone_row() -> pl.DataFrame:
    return run_row(BACKBONE)


def test_the_score_of_features_counts_unlisted_videos():
    vectors = np.random.default_rng(0).normal(size=(6, 1280)).astype(np.float32)
    names = ["clip", "other clip", "a/1.avi", "a/2.avi", "b/1.avi", "odd.avi"]
    samples = pl.DataFrame(
        {"sample_id": names, "class": ["b", "a", "a", "a", "b", None], "digest": "x"}
    )
    tables = {
        "samples": samples,
        "runs": backbone_row(),
        "outputs": outputs_of(names, vectors),
    }
    (section,) = evaluation_report.sections(read_of(tables))
    assert "chance" in "".join(section.parts)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", "".join(section.parts))
    assert cells[:3] == ["frame_backbone", "5", "2"]
    changed = pl.lit('{"preprocessing": "fair"}').alias("changed")
    (section,) = evaluation_report.sections(
        read_of({**tables, "runs": backbone_row().with_columns(changed)})
    )
    assert "frame_backbone, preprocessing fair" in "".join(section.parts)


def test_the_report_shows_runs_transforms_and_groups(parts, tmp_path):
    outputs, splits = parts
    clips = splits.frame.select("sample_id").sort("sample_id")
    groups = clips.with_columns(
        pl.lit("people").alias("grouping"),
        (pl.int_range(pl.len()) % 3).cast(pl.String).alias("subset"),
    )
    made = []
    for feedback in (0.0, 1.0):
        run = shard(
            (*parts, Held("clip_groups", groups)), tmp_path / str(feedback), feedback=feedback
        )
        made.append(evaluate_predictor(run, SETTINGS).tables)
    samples = clips.with_columns(
        pl.col("sample_id").str.slice(0, 1).alias("class"), pl.lit("x").alias("digest")
    )
    tables = {
        "measures": pl.concat(tables["measures"] for tables in made),
        "runs": pl.concat([backbone_row(), *(tables["runs"] for tables in made)]),
        "samples": samples,
        "outputs": outputs.frame,
    }
    sections = evaluation_report.sections(read_of(tables))
    titles = [section.title for section in sections]
    assert titles == [
        "Do features separate the classes?",
        "Predictors over the increments",
        "All increments so far",
        "Nuisance transforms",
        "What the clips show",
    ]
    pictures = "".join(part for section in sections for part in section.parts)
    assert "color_invert" in pictures and "gmm_finch, feedback 100 %" in pictures
    for number in range(3):
        assert f"{number} (n = " in pictures
    only_train = {**tables, "measures": tables["measures"].filter(split="train")}
    shown = "".join(p for one in evaluation_report.sections(read_of(only_train)) for p in one.parts)
    assert "Clips of the split train." in shown
    metrics = pl.concat(tables["metrics"] for tables in made)
    assert {"people 0", "people 1", "people 2", "all"} == set(metrics["subset"])


def test_runs_of_one_predictor_are_told_apart():
    facts = [
        *facts_of(["ann"]),
        *facts_of({"ann": {"dropout": 0.3}}),
        *facts_of(["ann"], evaluation={"top_k": 2, "feedback": [1.0], "experience_limit": 9}),
    ]
    runs = pl.concat([backbone_row(), *(run_row(one) for one in facts)])
    found = evaluation_report.predictor_runs(read_of({"runs": runs}))
    assert found["line"].n_unique() == 3
    assert "ann, dropout 0.3, feedback 100 %" in found["line"].to_list()
    assert evaluation_report.predictor_runs(read_of({"runs": RUNS.empty()})) is None
