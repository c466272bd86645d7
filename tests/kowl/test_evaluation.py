"""The evaluation stages: what a run is shown, what it leaves, and that it goes on after a kill."""

import re

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from schemas.config import Settings
from schemas.errors import SourceError
from schemas.kowl import EvaluationChoice, features_table
from storage.pieces import Part
from storage.raw import open_raw
from tasks.kowl import evaluation, evaluation_report
from tasks.kowl.evaluation import (
    RunSettings,
    evaluate_predictor,
    group_clips,
    plan_groups,
    plan_runs,
    run_settings,
)
from tasks.stage import Shard
from tests.kowl.test_evaluator import world
from tests.report.reading import read_of
from tests.shared import shared_path

SETTINGS = RunSettings(
    extractor="efficientnet",
    preset="small",
    top_k=2,
    experience_limit=None,
    experience_per_label=None,
    device="cpu",
    threads=1,
)


class Held(Part):
    """A part that is in memory, not in a lake."""

    def __new__(cls, table: str, frame: pl.DataFrame):
        part = object.__new__(cls)
        object.__setattr__(part, "table", table)
        object.__setattr__(part, "frame", frame)
        return part

    def __init__(self, table: str, frame: pl.DataFrame):
        pass

    def read(self, columns=None):
        return self.frame if columns is None else self.frame.select(columns)


@pytest.fixture
def parts() -> tuple[Held, Held]:
    """Three increments; each clip plain and, by the same features, inverted."""
    features, increments = world()
    rows = pl.DataFrame({"sample_id": features.sample_ids, "embedding": features.values})
    both = [rows.with_columns(pl.lit(t).alias("transform")) for t in ("none", "color_invert")]
    return (
        Held(features_table("efficientnet").name, pl.concat(both)),
        Held("increments", increments),
    )


def shard(parts, work=None, predictor="gmm_finch", feedback=1.0) -> Shard:
    about = {"predictor": predictor, "feedback": feedback, "seed": 0}
    return Shard("run", parts=parts, about=about, work=work)


def test_transformed_clips_are_splits_of_their_own_and_never_learned_from(parts, tmp_path):
    produced = evaluate_predictor(shard(parts, tmp_path), SETTINGS)
    measures = produced.tables["measures"]
    plain = {"train", "validate", "test"}
    assert set(measures["split"]) == plain | {"validate+color_invert", "test+color_invert"}
    given = produced.tables["feedback"]["sample_id"]
    assert len(given) and not given.str.contains("+", literal=True).any()
    # The same features give the same measures under another name; only the order is drawn anew.
    ordered = ~pl.col("metric").str.starts_with("reaction_time")
    columns = [c for c in measures.columns if c != "split"]
    found = [
        measures.filter(ordered & (pl.col("split") == s)).select(columns).sort(columns[:-2])
        for s in ("test", "test+color_invert")
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
            (pl.col("increment") == 2)
            & (pl.col("scope") == "cumulative")
            & (pl.col("split") == "test")
            & (pl.col("metric") == "accuracy")
            & (pl.col("reduction") == "raw")
        )
        return chosen["value"].item()

    assert accuracy(1.0) > accuracy(0.0)


def test_no_features_is_said(parts):
    features, increments = parts
    with pytest.raises(SourceError, match="no clip of the increments has features"):
        evaluate_predictor(
            shard((Held(features.table, features.frame.clear()), increments)), SETTINGS
        )


def test_one_run_for_each_predictor_feedback_and_seed():
    choice = EvaluationChoice(predictors=("ann", "evm"), feedback=(0.0, 0.5), seeds=(0, 1, 2))
    runs = plan_runs(choice, (), (), ())
    assert len({run.name for run in runs}) == 12
    assert runs[0].about == {"predictor": "ann", "feedback": 0.0, "seed": 0}


def test_settings_of_a_run_are_those_of_the_choice():
    from schemas.kowl import FeatureSettings

    choice = EvaluationChoice(predictors=("ann",), preset="released", top_k=3)
    found = run_settings(choice, FeatureSettings(extractor="efficientnet", threads=1))
    assert (found.preset, found.top_k, found.extractor, found.threads) == (
        "released",
        3,
        "efficientnet",
        1,
    )


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
    (planned,) = plan_groups(open_raw(kinetics), (Held("increments", clips),))
    groups = group_clips(planned, Settings()).tables["clip_groups"]
    assert set(groups["grouping"]) == {"action_type", "actions", "area", "people"}
    other = groups.filter(pl.col("sample_id") == "other")
    assert other["group"].to_list() == ["N/A"] * 4
    assert "N/A" not in groups.filter(pl.col("sample_id") == "shown")["group"].to_list()


def test_the_score_of_features_counts_unlisted_videos():
    vectors = np.random.default_rng(0).normal(size=(6, 1280)).astype(np.float32)
    names = ["clip", "other clip", "a/1.avi", "a/2.avi", "b/1.avi", "odd.avi"]
    tables = {
        "increments": pl.DataFrame({"sample_id": names[:2], "label": ["b", "a"]}),
        "unlisted_videos": pl.DataFrame({"file": names[2:], "label": ["a", "a", "b", None]}),
        "features_efficientnet": pl.DataFrame(
            {"sample_id": names, "transform": "none", "embedding": vectors},
            schema=features_table("efficientnet").polars_schema,
        ),
    }
    (section,) = evaluation_report.sections(read_of(tables))
    assert "chance" in "".join(section.parts)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", "".join(section.parts))
    assert cells[:3] == ["efficientnet", "5", "2"]


def test_the_report_shows_runs_transforms_and_groups(parts, tmp_path):
    features, increments = parts
    clips = increments.frame.select("sample_id").sort("sample_id")
    groups = clips.with_columns(
        pl.lit("people").alias("grouping"),
        (pl.int_range(pl.len()) % 3).cast(pl.String).alias("group"),
    )
    measured = []
    for feedback in (0.0, 1.0):
        run = shard(
            (*parts, Held("clip_groups", groups)), tmp_path / str(feedback), feedback=feedback
        )
        measured.append(evaluate_predictor(run, SETTINGS).tables["measures"])
    tables = {
        "measures": pl.concat(measured),
        "increments": increments.frame,
        features.table: features.frame,
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
