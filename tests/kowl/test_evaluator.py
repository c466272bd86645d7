"""The open-world evaluator: phases, feedback, known sets, sums, resuming; AVA bins."""

import math
from dataclasses import replace
from itertools import product
from typing import ClassVar

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from schemas.errors import ConfigError, SourceError
from tasks.kowl.ava import (
    AVA_ROWS,
    ava_groups,
    groups_of_clips,
    read_ava_rows,
    read_ava_vocabulary,
)
from tasks.kowl.confusion import REDUCTIONS, reaction_time
from tasks.kowl.evaluator import (
    COUNT_COLUMNS,
    MEASURE_COLUMNS,
    NOVELTY,
    PREDICTIONS,
    EvaluationSettings,
    Features,
    OpenWorldRun,
)
from tasks.kowl.increments import assign_increments
from tasks.learning.memory import new_scratch, use_memory
from tasks.predictors import find_predictor, predictor_names
from tasks.predictors.base import Prediction, Predictor
from tests.predictors import samples as synthetic_samples
from tests.shared import shared_path

SPLITS = {"train": 12, "valid": 6, "test": 8}
INTRODUCED = ("abcd", "ef", "gh")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def world(scale: int = 1, seed: int = 0) -> tuple[Features, pl.DataFrame]:
    """Increments 0 to 2: labels a to d, then e f and g h besides samples of the earlier ones."""
    rows, values = [], []
    for increment in range(len(INTRODUCED)):
        for split, count in SPLITS.items():
            names = "".join(INTRODUCED[: increment + 1])
            drawn, labels = synthetic_samples(names, count * scale, seed + 97 * increment + count)
            values.append(drawn)
            rows += [
                (f"{label}-{split}-{increment}-{number:03}", label, split, increment)
                for number, label in enumerate(labels)
            ]
    schema = {
        "sample_id": pl.String,
        "label": pl.String,
        "split": pl.String,
        "step": pl.Int32,
    }
    table = pl.DataFrame(rows, schema=schema, orient="row")
    return Features(table["sample_id"], np.concatenate(values)), table


class Memory(Predictor):
    """Names every label it was ever given, `unknown` all others; features are the label's code.

    Its columns are in reverse order, so that an evaluator that goes by index would fail.
    """

    name = "memory"
    presets: ClassVar = {"paper": {}}

    def __init__(self):
        super().__init__("paper", device="cpu")
        self.fitted: list[pl.Series] = []
        self.validated: list[set[str]] = []

    def _fit(self, train, valid, *, before, seed):
        self.fitted.append(train.labels)
        self.validated.append(set() if valid is None else set(valid.labels))

    def _predict(self, features):
        labels = ("unknown", *sorted(self.known, reverse=True))
        codes = np.array([0, *(ord(name) for name in labels[1:])])
        found = features[:, :1] == codes
        found[:, 0] = ~found.any(1)
        return Prediction(labels, found.astype(np.float32))

    def _novelty(self, features):
        return ~np.isin(features[:, 0], [ord(name) for name in self.known])

    def feedback_order(self, features, *, seed):
        return np.argsort(features[:, 0], kind="stable")

    def state(self):
        return {}

    def restore(self, state, record):
        pass


def coded(table: pl.DataFrame) -> Features:
    codes = [[ord(label)] for label in table["label"]]
    return Features(table["sample_id"], np.array(codes, np.float32))


@pytest.mark.parametrize("name", ["ann", "evm", "gmm_finch"])
def test_features_in_a_file_give_the_same_to_the_bit(name, tmp_path):
    """Nothing that is as large as the features is in memory then."""
    features, splits = world()
    lying = new_scratch().array(features.values.shape, features.values.dtype)
    lying[:] = features.values
    settings = EvaluationSettings(feedback=0.5)

    def steps(values: np.ndarray, memory: float) -> list:
        use_memory(memory, tmp_path)
        predictor = find_predictor(name)("small", device="cpu")
        return run_all(OpenWorldRun(predictor, replace(features, values=values), splits, settings))

    try:
        in_file = steps(lying, 1e-9)
    finally:
        use_memory(4.0)
    for first, second in zip(steps(features.values, 4.0), in_file, strict=True):
        for one, other in zip(first[1:], second[1:], strict=True):
            assert one.equals(other)


def run_all(run: OpenWorldRun) -> list:
    return list(run)


def value(measures: pl.DataFrame, **where) -> float:
    defaults = {"scope": "increment", "grouping": "all"}
    kept = measures.filter(**{**defaults, **where})
    assert kept.height == 1, kept
    return kept["value"].item()


# ---------------------------------------------------------------- form


def test_what_comes_out():
    _, table = world()
    settings_ = EvaluationSettings(predicted_ranks=2, top_k=3)
    steps = run_all(OpenWorldRun(Memory(), coded(table), table, settings_))
    assert [step.step for step in steps] == [0, 1, 2]
    for step in steps:
        phases = {"after"} | ({"before"} if step.step else set())
        assert step.counts.columns == list(COUNT_COLUMNS)
        assert step.measures.columns == list(MEASURE_COLUMNS)
        assert step.predictions.schema == pl.Schema(PREDICTIONS)
        assert step.novelty.schema == pl.Schema(NOVELTY)
        for frame in (step.counts, step.measures, step.predictions):
            assert set(frame["phase"]) == phases
            assert set(frame["step"]) == {step.step}
        for frame in (step.counts, step.measures):
            assert set(frame["split"]) == set(SPLITS)
        key = [name for name in MEASURE_COLUMNS if name not in ("value", "n")]
        assert not step.measures.select(key).is_duplicated().any()
        cumulative = step.measures.filter(scope="cumulative")
        assert set(cumulative["phase"]) == {"after"}
        assert set(step.measures["reduction"]) == set(REDUCTIONS)
        assert set(step.measures.filter(metric="top_3_accuracy")["reduction"]) == {"raw"}
        # Each sample is predicted once a phase and rank.
        here = table.filter(step=step.step)
        totals = step.counts.group_by("phase", "split", "rank").agg(pl.col("count").sum())
        for _, split, _, count in totals.iter_rows():
            assert count == here.filter(split=split).height
        # Valid and test samples with their predictions by rank, and novelty before feedback.
        tested = here.filter(pl.col("split") != "train")
        for phase, rank in product(phases, (1, 2)):
            ranked = step.predictions.filter(rank=rank, phase=phase)
            assert sorted(ranked["sample_id"]) == sorted(tested["sample_id"])
        for score in ("own", "p_unknown"):
            scored = step.novelty.filter(score=score)
            assert scored.height == (tested.height if step.step else 0)
            assert set(scored["phase"]) <= {"before"}


def test_views_are_predicted_apart_and_never_learned_from():
    _, table = world()
    features = coded(table)
    both = pl.concat([features.sample_ids, features.sample_ids])
    views = pl.Series(["plain", "blurred"]).gather(np.repeat([0, 1], table.height))
    shown = Features(both, np.concatenate([features.values] * 2), views)
    plain, seen = Memory(), Memory()
    first = run_all(OpenWorldRun(plain, features, table))
    second = run_all(OpenWorldRun(seen, shown, table))
    assert [len(labels) for labels in seen.fitted] == [len(labels) for labels in plain.fitted]
    for one, two in zip(first, second, strict=True):
        assert_frame_equal(one.measures, two.measures.filter(view="plain"))
        assert_frame_equal(one.novelty, two.novelty.filter(view="plain"))
        assert_frame_equal(one.feedback, two.feedback)
        assert set(two.measures.filter(view="blurred")["split"]) == {"valid", "test"}


def test_novelty_and_the_probability_of_the_unknown():
    _, table = world()
    step = run_all(OpenWorldRun(Memory(), coded(table), table))[1]
    for score in ("own", "p_unknown"):
        rows = step.novelty.filter(score=score, split="test")
        novel = ~rows["class"].is_in(list("abcd"))
        assert (rows.filter(novel)["value"] == 1).all()
        assert (rows.filter(~novel)["value"] == 0).all()
        known = rows.filter(~novel)
        assert known["predicted"].equals(known["class"], check_names=False)
        assert set(rows["predicted"]) <= set("abcd")
    assert step.predictions.filter(predicted="unknown")["p_unknown"].unique().to_list() == [1]


def test_samples_come_in_a_drawn_order_that_the_table_does_not_decide():
    _, table = world()
    features = coded(table)
    settings_ = EvaluationSettings()
    first = run_all(OpenWorldRun(Memory(), features, table, settings_))
    turned = table.sample(fraction=1, shuffle=True, seed=3)
    second = run_all(OpenWorldRun(Memory(), coded(turned), turned, settings_))
    for one, two in zip(first, second, strict=True):
        for frame, other in zip(one[1:], two[1:], strict=True):
            assert_frame_equal(frame, other)
    order = first[0].predictions.filter(rank=1, split="test")["sample_id"]
    assert not order.is_sorted()
    other_seed = EvaluationSettings(seed=1)
    third = OpenWorldRun(Memory(), features, table, other_seed).step()
    assert third.predictions.filter(rank=1, split="test")["sample_id"].to_list() != order.to_list()


# ---------------------------------------------------------------- feedback and experience


@pytest.mark.parametrize("feedback", [0.0, 0.1, 0.29, 0.5, 1.0])
def test_the_first_of_the_predictors_order_get_labels(feedback):
    _, table = world()
    predictor = Memory()
    run = OpenWorldRun(predictor, coded(table), table, EvaluationSettings(feedback=feedback))
    steps = run_all(run)
    train = table.filter(split="train")
    assert steps[0].feedback.height == train.filter(step=0).height
    for step in steps[1:]:
        new = train.filter(step=step.step)
        asked = step.feedback.join(new, on="sample_id", maintain_order="left")
        assert asked.height == math.floor(feedback * new.height + 1e-9)
        assert asked["label"].is_sorted()  # what Memory asks for
    assert len(predictor.fitted) == (1 if feedback == 0 else 3)
    labelled = run.experience.filter(pl.col("label").is_not_null(), split="train")
    assert labelled.height == sum(step.feedback.height for step in steps)
    assert run.experience.filter(split="train").height == train.height
    assert run.predictor_labels == set(labelled["label"])


def test_validation_hides_labels_that_were_not_given():
    _, table = world()
    predictor = Memory()
    run_all(OpenWorldRun(predictor, coded(table), table, EvaluationSettings(feedback=0.5)))
    for labels, seen in zip(predictor.fitted, predictor.validated, strict=True):
        assert seen <= set(labels)
    assert predictor.validated[-1] < set("abcdefgh")


def test_experience_limits_keep_the_newest():
    _, table = world()
    settings_ = EvaluationSettings(experience_per_label=5, experience_limit=30)
    predictor = Memory()
    run = OpenWorldRun(predictor, coded(table), table, settings_)
    first = run.step()
    assert len(predictor.fitted[0]) == 20
    asked = first.feedback.join(table, on="sample_id", maintain_order="left")
    kept = run.experience.filter(split="train", label="a")["sample_id"]
    assert kept.to_list() == asked.filter(label="a")["sample_id"].to_list()[-5:]
    run_all(run)
    assert len(predictor.fitted[-1]) == 30
    newest = run.experience.filter(split="train")
    assert (newest["sample_id"].str.split("-").list.get(2) == "2").all()
    assert run.predictor_labels == set("abcdefgh")


def test_a_limit_that_keeps_no_labelled_sample_leaves_the_predictor_as_it_was():
    _, table = world()
    predictor = Memory()
    settings_ = EvaluationSettings(feedback=0.001, experience_limit=3)
    steps = run_all(OpenWorldRun(predictor, coded(table), table, settings_))
    assert len(steps) == 3 and len(predictor.fitted) == 1


# ---------------------------------------------------------------- known sets


def test_known_is_judged_by_what_was_given_or_by_what_was_released():
    _, table = world()
    pick = {"split": "test", "reduction": "classification", "metric": "accuracy"}
    whole = run_all(OpenWorldRun(Memory(), coded(table), table))
    none = run_all(OpenWorldRun(Memory(), coded(table), table, EvaluationSettings(feedback=0)))
    for steps in (whole, none):
        for step in steps:
            # Memory is right by what it was told, before and after.
            for phase in step.measures["phase"].unique():
                assert (
                    value(step.measures, known_set="novel_to_predictor", phase=phase, **pick) == 1
                )
    for step in whole:
        for phase in step.measures["phase"].unique():
            assert value(step.measures, known_set="novel_to_evaluator", phase=phase, **pick) == 1
    # Without feedback the labels of increment 1 stay unknown to it, though they are out since then.
    novel_to_evaluator = [
        value(none[n].measures, known_set="novel_to_evaluator", phase=phase, **pick)
        for n, phase in ((1, "before"), (1, "after"), (2, "before"))
    ]
    assert novel_to_evaluator == [1, pytest.approx(4 / 6), pytest.approx(6 / 8)]
    raw = value(
        whole[1].measures,
        known_set="none",
        phase="before",
        **{**pick, "reduction": "raw"},
    )
    assert raw == pytest.approx(4 / 6)


def test_partial_feedback_knows_the_labels_really_given():
    _, table = world()
    # Memory asks for a, b, ... in order: half of increment 1 gives no label of e or f.
    run = OpenWorldRun(Memory(), coded(table), table, EvaluationSettings(feedback=0.5))
    steps = run_all(run)
    assert run.predictor_labels == set("abcd")
    pick = {"split": "test", "reduction": "detection", "phase": "after"}
    for step in steps[1:]:
        for known_set, expected in (("novel_to_predictor", 1.0), ("novel_to_evaluator", None)):
            mcc = value(step.measures, known_set=known_set, metric="mcc", **pick)
            assert mcc == expected if expected else mcc < 1


# ---------------------------------------------------------------- cumulative, groups, reaction


def test_cumulative_adds_counts_after_feedback_only():
    _, table = world()
    steps = run_all(OpenWorldRun(Memory(), coded(table), table, EvaluationSettings(feedback=0)))
    expected = 0
    for step in steps:
        expected += table.filter(split="test", step=step.step).height
        ends = step.measures.filter(scope="cumulative", split="test")
        assert set(ends["n"]) == {expected}
    # Memory without feedback names abcd only: right by raw counts for 4/4, 4/6, 4/8 of the labels.
    pick = {"split": "test", "reduction": "raw", "metric": "accuracy", "scope": "cumulative"}
    shares = [value(step.measures, **pick) for step in steps]
    assert shares == [1, pytest.approx(8 / 10), pytest.approx(12 / 18)]


def test_a_group_is_measured_as_a_run_on_its_samples_alone():
    _, table = world()
    vowel = pl.col("label").is_in(["a", "e"])
    groups = pl.concat(
        [
            table.select(
                "sample_id",
                pl.lit("letter").alias("grouping"),
                pl.when(vowel).then(pl.lit("vowel")).otherwise(pl.lit("consonant")).alias("subset"),
            ),
            # A second group of the same grouping for some samples, one that nobody is in.
            table.filter(label="a").select(
                "sample_id", pl.lit("letter").alias("grouping"), pl.lit("first").alias("subset")
            ),
            pl.DataFrame({"sample_id": ["x"], "grouping": ["letter"], "subset": ["absent"]}),
        ]
    )
    settings_ = EvaluationSettings(feedback=0.8)
    run = OpenWorldRun(Memory(), coded(table), table, settings_, groups)
    plain = OpenWorldRun(Memory(), coded(table), table, settings_)
    for step, without in zip(run_all(run), run_all(plain), strict=True):
        assert_frame_equal(step.measures.filter(grouping="all"), without.measures)
        grouped = step.measures.filter(grouping="letter", split="test", scope="increment")
        assert set(grouped["subset"]) == {"vowel", "consonant", "first"}
        here = table.filter(split="test", step=step.step)
        counts = {
            "vowel": here.filter(vowel).height,
            "consonant": here.filter(~vowel).height,
            "first": here.filter(label="a").height,
        }
        for group, n in counts.items():
            assert set(grouped.filter(subset=group)["n"]) == {n}
        parts = step.counts.filter(pl.col("subset").is_in(["vowel", "consonant"]))
        key = ["phase", "split", "rank", "target", "predicted"]
        assert_frame_equal(
            parts.group_by(key).agg(pl.col("count").sum()).sort(key),
            step.counts.filter(grouping="all").select(*key, "count").sort(key),
        )


def test_reaction_times_follow_the_order_of_samples():
    _, table = world()
    settings_ = EvaluationSettings(feedback=0)
    steps = run_all(OpenWorldRun(Memory(), coded(table), table, settings_))
    for step in steps[1:]:
        first = step.predictions.filter(phase="before", split="test", rank=1)
        novel = ~first["class"].is_in(list("abcd")).to_numpy()
        flagged = ~first["predicted"].is_in(list("abcd")).to_numpy()
        for reading in ("inclusive", "before"):
            found = value(
                step.measures,
                phase="before",
                split="test",
                known_set="novel_to_predictor",
                metric=f"reaction_time_{reading}",
            )
            assert found == reaction_time(novel, flagged, reading) == 0
    assert (
        value(
            steps[0].measures,
            phase="after",
            split="test",
            known_set="novel_to_predictor",
            metric="reaction_time_before",
        )
        is None
    )


# ---------------------------------------------------------------- real predictors


@pytest.mark.parametrize("name", predictor_names())
def test_feedback_helps_and_novelty_is_noticed(name):
    features, table = world(scale=3)
    last = {}
    for feedback in (0.0, 1.0):
        predictor = find_predictor(name)("small", device="cpu")
        run = OpenWorldRun(predictor, features, table, EvaluationSettings(feedback=feedback))
        last[feedback] = run_all(run)
    pick = {"split": "test", "known_set": "novel_to_evaluator", "reduction": "classification"}
    for metric in ("accuracy", "mcc", "nmi"):
        without, whole = (
            value(last[f][-1].measures, phase="after", metric=metric, **pick) for f in (0.0, 1.0)
        )
        assert whole > without + 0.1, metric
    noticed = value(
        last[1.0][1].measures,
        phase="before",
        metric="mcc",
        **{**pick, "reduction": "detection"},
    )
    assert noticed > 0.4


@pytest.mark.parametrize("name", predictor_names())
@pytest.mark.parametrize("feedback", [0.0, 0.4])
def test_a_run_that_stops_and_goes_on_is_the_same_run(name, feedback, tmp_path):
    features, table = world()
    groups = table.select(
        "sample_id", pl.lit("label").alias("grouping"), pl.col("label").alias("subset")
    )
    settings_ = EvaluationSettings(feedback=feedback, experience_limit=90)

    def start() -> OpenWorldRun:
        predictor = find_predictor(name)("small", device="cpu")
        return OpenWorldRun(predictor, features, table, settings_, groups)

    undisturbed = start()
    expected = run_all(undisturbed)
    undisturbed.save(tmp_path / "whole")
    path = tmp_path / "state"
    start().save(path)
    run = OpenWorldRun.resume(path, features, table, groups, device="cpu")
    for step in expected:
        found = run.step()
        for frame, other in zip(found[1:], step[1:], strict=True):
            assert_frame_equal(frame, other, check_exact=True)
        run.save(path)
        run = OpenWorldRun.resume(path, features, table, groups, device="cpu")
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(ConfigError, match="done"):
        run.step()


def test_a_saved_run_wants_its_own_inputs(tmp_path):
    features, table = world()
    predictor = find_predictor("evm")("small", device="cpu")
    run = OpenWorldRun(predictor, features, table)
    run.step()
    run.save(tmp_path / "state")
    with pytest.raises(ConfigError, match="other features"):
        OpenWorldRun.resume(tmp_path / "state", features, table.head(-1))
    moved = Features(features.sample_ids, features.values + 1)
    with pytest.raises(ConfigError, match="other features"):
        OpenWorldRun.resume(tmp_path / "state", moved, table)
    predictor.save(tmp_path / "predictor")
    with pytest.raises(SourceError, match="no saved run"):
        OpenWorldRun.resume(tmp_path / "predictor", features, table)


def test_the_increments_of_the_protocol_can_be_run():
    random = np.random.default_rng(0)
    table = pl.DataFrame(
        {
            "sample_id": [f"s{number:04}" for number in range(600)],
            "label": random.choice(list("abcdefgh"), 600, p=np.arange(1, 9) / 36),
            "split": random.choice(list(SPLITS), 600, p=[0.6, 0.2, 0.2]),
        }
    )
    made = assign_increments(table).increments.rename({"increment": "step"})
    steps = run_all(OpenWorldRun(Memory(), coded(made), made))
    assert len(steps) == made["step"].n_unique()
    assert sum(step.feedback.height for step in steps) == made.filter(split="train").height


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 1), st.integers(0, 5), st.integers(1, 3))
def test_totals_hold_for_any_settings(feedback, seed, batch):
    _, table = world()
    settings_ = EvaluationSettings(feedback=feedback, seed=seed, batch_size=batch * 40, top_k=2)
    for step in OpenWorldRun(Memory(), coded(table), table, settings_):
        sizes = step.measures.filter(scope="increment").group_by("split").agg(pl.col("n").unique())
        for split, n in sizes.iter_rows():
            assert n == [table.filter(split=split, step=step.step).height]
        finite = step.measures.filter(pl.col("value").is_not_null())["value"]
        assert finite.is_finite().all() and finite.is_between(-1, 1).all()


# ---------------------------------------------------------------- wrong input


def test_wrong_input():
    features, table = world()
    with pytest.raises(ConfigError, match="lack"):
        OpenWorldRun(Memory(), features, table.drop("label"))
    fewer = Features(table["sample_id"].head(-2), features.values[:-2])
    with pytest.raises(SourceError, match=r"2 of .* have no features"):
        OpenWorldRun(Memory(), fewer, table)
    with pytest.raises(SourceError, match="twice"):
        OpenWorldRun(Memory(), features, pl.concat([table, table.head(1)]))
    with pytest.raises(SourceError, match="twice"):
        Features(pl.Series(["a", "a"]), np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="expected"):
        Features(pl.Series(["a"]), np.zeros(3))
    with pytest.raises(ConfigError, match="rename"):
        named = pl.lit("unknown").alias("label")
        OpenWorldRun(Memory(), features, table.with_columns(named))
    late = pl.col("step") > 0
    with pytest.raises(ConfigError, match="no train"):
        OpenWorldRun(Memory(), features, table.filter(late | (pl.col("split") == "test")))


# ---------------------------------------------------------------- AVA-Kinetics

VOCABULARY = """
label {
  name: "bend/bow (at the waist)"
  label_id: 1
  label_type: PERSON_MOVEMENT
}
label {
  name: "answer phone"
  label_id: 15
  label_type: OBJECT_MANIPULATION
}
label {
  name: "hug (a person)"
  label_id: 70
  label_type: PERSON_INTERACTION
}
"""
AVA = b"""v1,5.0,0.0,0.0,0.1,0.1,1
v1,5.0,0.0,0.0,0.1,0.1,15
v2,7.5,0.0,0.0,0.5,0.5,1
v2,7.5,0.5,0.5,1.0,1.0,1
v2,7.5,0.5,0.5,1.0,1.0,70
v3,2.0
v4,9.0,0.0,0.0,0.9,0.9,15
"""


def small_ava() -> pl.DataFrame:
    return ava_groups(read_ava_rows(AVA), read_ava_vocabulary(VOCABULARY))


def test_ava_groups_of_a_small_list():
    found = {
        key: sorted(part["subset"])
        for key, part in small_ava().partition_by("video_id", "grouping", as_dict=True).items()
    }
    assert found["v1", "action_type"] == ["OM", "PM"] and found["v1", "area"] == ["SM"]
    assert found["v2", "action_type"] == ["PI", "PM"] and found["v2", "area"] == ["AVG"]
    assert found["v2", "people"] == ["2"] and found["v2", "actions"] == ["2"]
    assert found["v3", "people"] == ["0"] and found["v3", "actions"] == ["0"]
    assert found["v3", "area"] == ["N/A"] and found["v3", "action_type"] == ["N/A"]
    assert found["v4", "area"] == ["LG"] and found["v4", "actions"] == ["1"]


def test_a_clip_takes_the_groups_of_its_key_frame():
    clips = pl.DataFrame(
        {
            "sample_id": ["s1", "s2", "s3"],
            "youtube_id": ["v1", "v1", "v9"],
            "time_start": [0, 10, 0],
            "time_end": [10, 20, 10],
        }
    )
    groups = groups_of_clips(small_ava(), clips)
    assert groups.filter(sample_id="s1", grouping="action_type")["subset"].to_list() == ["OM", "PM"]
    for absent in ("s2", "s3"):
        rows = groups.filter(sample_id=absent)
        assert rows.height == 4 and set(rows["subset"]) == {"N/A"}


def test_ava_input_that_is_wrong():
    rows = read_ava_rows(AVA)
    assert rows.schema == pl.Schema(AVA_ROWS)
    with pytest.raises(SourceError, match="AVA vocabulary"):
        read_ava_vocabulary("<html>")
    with pytest.raises(SourceError, match="AVA vocabulary"):
        read_ava_vocabulary(VOCABULARY.replace("PERSON_INTERACTION", "OTHER"))
    with pytest.raises(SourceError, match="action 70"):
        ava_groups(rows, read_ava_vocabulary(VOCABULARY).head(2))


def test_ava_counts_of_the_real_list():
    rows = read_ava_rows(shared_path("kinetics/ava_kinetics_val_v1.0.csv.gz").read_bytes())
    text = shared_path("kinetics/ava_action_list_v2.2.pbtxt").read_text()
    vocabulary = read_ava_vocabulary(text)
    assert vocabulary.height == 80
    expected = dict(
        pl.read_csv(
            shared_path("kinetics/expected/ava_kinetics_val_key_frame_counts.csv"),
            schema={"quantity": pl.String, "value": pl.Float64},
        ).iter_rows()
    )
    groups = ava_groups(rows, vocabulary)
    counts = {
        (grouping, group): n
        for grouping, group, n in groups.group_by("grouping", "subset").len().iter_rows()
    }
    assert rows.height == expected["rows"]
    assert groups.select("video_id", "second").n_unique() == expected["key_frames"]
    named = {"humans": "people", "distinct_actions": "actions"}
    checked = 0
    for quantity, number in expected.items():
        if quantity.startswith("key_frames_with_any_"):
            assert counts["action_type", quantity[-2:].upper()] == number
        elif quantity.startswith("key_frames_with_") and quantity.split("_")[3].isdigit():
            size, what = quantity.removeprefix("key_frames_with_").split("_", 1)
            assert counts[named[what], size] == number
            checked += 1
    assert checked > 20
    people = int(expected["key_frames_with_people"])
    thirds = [counts["area", size] for size in ("SM", "AVG", "LG")]
    assert sum(thirds) == people and max(thirds) - min(thirds) <= 1
    boxes = rows.drop_nulls("x1").unique(["video_id", "second", "x1", "y1", "x2", "y2"])
    area = ((pl.col("x2") - pl.col("x1")) * (pl.col("y2") - pl.col("y1"))).mean()
    means = boxes.group_by("video_id", "second").agg(area.alias("mean"))
    sized = means.join(groups.filter(grouping="area"), on=["video_id", "second"])
    edge = expected["mean_area_first_third_upper_edge"]
    assert sized.filter(subset="SM")["mean"].max() == pytest.approx(edge, rel=1e-9)
    edge = expected["mean_area_second_third_upper_edge"]
    assert sized.filter(subset="AVG")["mean"].max() == pytest.approx(edge, rel=1e-9)
