"""Ordered confusion counts, reductions, measures and reaction time."""

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from sklearn.metrics import (
    accuracy_score,
    matthews_corrcoef,
    normalized_mutual_info_score,
    top_k_accuracy_score,
)

from schemas.errors import ConfigError, NoveltyError
from tasks.kowl.confusion import (
    COUNTS,
    REDUCTIONS,
    add,
    count,
    measure,
    reaction_time,
    reduce,
    top_k,
)

LABELS = ("unknown", "b", "a", "d", "c", "unknown_0")


@st.composite
def predictions(draw):
    """Targets by text (one of them no column of the predictor) and ranked columns."""
    seed = draw(st.integers(0, 2**20))
    size = draw(st.integers(1, 60))
    random = np.random.default_rng(seed)
    targets = random.choice(["a", "b", "c", "d", "e"], size)
    return pl.Series(targets), random.random((size, len(LABELS)))


def values(counts: pl.DataFrame) -> dict[str, float]:
    return dict(measure(counts).select("metric", "value").iter_rows())


def expanded(counts: pl.DataFrame) -> tuple[list[str], list[str]]:
    first = counts.filter(pl.col("rank") == 1)
    rows = first.select(pl.col("target", "predicted").repeat_by("count").explode())
    return rows["target"].to_list(), rows["predicted"].to_list()


# ---------------------------------------------------------------- counting


@settings(deadline=None)
@given(predictions(), st.integers(1, 8))
def test_ranks_are_a_stable_sort(drawn, k):
    rounded = drawn[1].round(1)
    expected = np.argsort(-rounded, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(top_k(rounded, k), expected)


def test_ties_go_to_the_earlier_column_also_across_blocks():
    even = np.full((5000, 4), 0.25, np.float32)
    assert (top_k(even, 3) == [0, 1, 2]).all()
    # A certain prediction leaves zeros behind, which are ties too.
    assert top_k(np.array([[0.0, 0, 1, 0]]), 3).tolist() == [[2, 0, 1]]


def test_ranking_leaves_the_probabilities_alone_and_refuses_nan():
    given_values = np.array([[0.1, 0.9], [0.8, 0.2]])
    before = given_values.copy()
    top_k(given_values, 2)
    np.testing.assert_array_equal(given_values, before)
    with pytest.raises(NoveltyError, match="not all numbers"):
        top_k(np.array([[0.1, np.nan]]), 1)


@settings(deadline=None)
@given(predictions())
def test_every_rank_counts_every_sample_once(drawn):
    targets, probabilities = drawn
    counts = count(targets, top_k(probabilities, 5), LABELS)
    assert counts.schema == pl.Schema(COUNTS)
    totals = counts.group_by("rank").agg(pl.col("count").sum()).sort("rank")
    assert totals["count"].to_list() == [len(targets)] * 5
    by_target = counts.filter(pl.col("rank") == 3).group_by("target").agg(pl.col("count").sum())
    expected = targets.value_counts(name="count").sort(targets.name)
    assert by_target.sort("target")["count"].to_list() == expected["count"].to_list()


def test_targets_and_predictions_meet_by_text_not_by_index():
    """Rule 9: the release's evaluator counted [.. z m d e], its predictor [.. m z d e]."""
    targets = pl.Series(["z", "m", "d", "e"])
    predictor = ("unknown", "a", "m", "z", "d", "e")
    perfect = np.eye(6)[[3, 2, 4, 5]]
    assert values(count(targets, top_k(perfect, 1), predictor)) == {
        "accuracy": 1.0,
        "mcc": 1.0,
        "nmi": 1.0,
    }
    by_index = np.eye(6)[[2, 3, 4, 5]]
    wrong = values(count(targets, top_k(by_index, 1), predictor))
    assert wrong["accuracy"] == 0.5 and wrong["nmi"] == 1.0


def test_wrong_input():
    ranked = np.zeros((2, 1), np.int32)
    with pytest.raises(ConfigError, match="3 targets, 2 predictions"):
        count(pl.Series(["a", "b", "c"]), ranked, LABELS)
    with pytest.raises(ConfigError, match="no label"):
        count(pl.Series(["a", None]), ranked, LABELS)
    with pytest.raises(ConfigError, match="twice"):
        count(pl.Series(["a", "b"]), ranked, ("a", "a"))
    with pytest.raises(ConfigError, match="reduction"):
        reduce(count(pl.Series(["a", "b"]), ranked, LABELS), ["a"], "classify")
    with pytest.raises(ConfigError, match="rename"):
        reduce(count(pl.Series(["a", "b"]), ranked, LABELS), ["a", "known"], "raw")


@settings(deadline=None)
@given(predictions(), predictions())
def test_adding_takes_the_union_of_labels(one, two):
    first = count(one[0], top_k(one[1], 3), LABELS)
    other_labels = ("unknown", "e", "f", "g", "h", "i")
    second = count(two[0], top_k(two[1], 3), other_labels)
    summed = add(first, second)
    assert set(summed["predicted"]) == set(first["predicted"]) | set(second["predicted"])
    assert summed["count"].sum() == first["count"].sum() + second["count"].sum()
    assert_frame_equal(summed, add(second, first))
    # One matrix of all samples is the sum of the matrices of its parts.
    half = len(one[0]) // 2
    ranked = top_k(one[1], 3)
    parts = [
        count(one[0][:half], ranked[:half], LABELS),
        count(one[0][half:], ranked[half:], LABELS),
    ]
    assert_frame_equal(add(*parts), first)


# ---------------------------------------------------------------- reductions

KNOWN_LABELS = ("a", "b", "never seen")


@settings(deadline=None)
@given(predictions())
def test_reductions_preserve_totals(drawn):
    counts = count(drawn[0], top_k(drawn[1], 5), LABELS)
    totals = counts.group_by("rank").agg(pl.col("count").sum()).sort("rank")
    for reduction in REDUCTIONS:
        reduced = reduce(counts, KNOWN_LABELS, reduction)
        assert_frame_equal(reduced.group_by("rank").agg(pl.col("count").sum()).sort("rank"), totals)
    assert_frame_equal(reduce(counts, KNOWN_LABELS, "raw"), counts)
    once = reduce(counts, KNOWN_LABELS, "classification")
    assert_frame_equal(reduce(once, KNOWN_LABELS, "classification"), once)


@settings(deadline=None)
@given(predictions())
def test_what_each_reduction_keeps(drawn):
    counts = count(drawn[0], top_k(drawn[1], 2), LABELS)
    names = {
        reduction: set(reduced["target"]) | set(reduced["predicted"])
        for reduction in REDUCTIONS
        for reduced in [reduce(counts, KNOWN_LABELS, reduction)]
    }
    raw = names["raw"]
    assert names["classification"] <= {"a", "b", "unknown"}
    assert names["detection"] <= {"known", "unknown"}
    unknown = raw - {"a", "b"}
    assert names["recognition"] == unknown | ({"known"} if raw & {"a", "b"} else set())
    # Detection can be had by way of classification.
    via = reduce(counts, KNOWN_LABELS, "classification")
    assert_frame_equal(
        reduce(via, KNOWN_LABELS, "detection"), reduce(counts, KNOWN_LABELS, "detection")
    )


def test_detection_is_two_by_two():
    targets = pl.Series(["a", "a", "e", "e", "c"])
    predicted = [1, 2, 0, 2, 5]  # b, a, unknown, a, unknown_0
    counts = count(targets, np.array(predicted, np.int32)[:, None], LABELS)
    found = reduce(counts, ("a", "b"), "detection").drop("rank")
    assert found.rows() == [
        ("known", "known", 2),
        ("unknown", "known", 1),
        ("unknown", "unknown", 2),
    ]


# ---------------------------------------------------------------- measures


@settings(max_examples=80, deadline=None)
@given(predictions(), st.sampled_from(REDUCTIONS))
def test_measures_equal_scikit_learn(drawn, reduction):
    counts = count(drawn[0], top_k(drawn[1], 1), LABELS)
    reduced = reduce(counts, KNOWN_LABELS, reduction)
    true, guess = expanded(reduced)
    found = values(reduced)
    assert found["accuracy"] == pytest.approx(accuracy_score(true, guess))
    assert found["mcc"] == pytest.approx(matthews_corrcoef(true, guess), abs=1e-12)
    assert found["nmi"] == pytest.approx(normalized_mutual_info_score(true, guess), abs=1e-9)


@settings(deadline=None)
@given(predictions(), st.integers(2, 5))
def test_top_k_accuracy_equals_scikit_learn(drawn, k):
    targets, probabilities = drawn
    assume(set(targets) <= set(LABELS))
    order = np.argsort(LABELS)
    expected = top_k_accuracy_score(
        targets.to_numpy(), probabilities[:, order], k=k, labels=np.array(LABELS)[order]
    )
    counts = count(targets, top_k(probabilities, k), LABELS)
    assert f"top_{k}_accuracy" not in dict(measure(counts, 1).select("metric", "value").iter_rows())
    found = values(counts)
    assert found[f"top_{k}_accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("true", "guess", "mcc", "nmi"),
    [
        ("aaa", "aaa", 0.0, 1.0),  # both entropies 0: decided as 1
        ("aaa", "bbb", 0.0, 1.0),  # so is this: the same (trivial) split of the samples
        ("aab", "aaa", 0.0, 0.0),
        ("aaa", "aab", 0.0, 0.0),
        ("aabb", "aabb", 1.0, 1.0),
        ("aabb", "bbaa", -1.0, 1.0),
        ("abab", "aabb", 0.0, 0.0),
    ],
)
def test_measures_at_the_edges(true, guess, mcc, nmi):
    labels = ("a", "b")
    ranked = np.array([labels.index(g) for g in guess], np.int32)[:, None]
    found = values(count(pl.Series(list(true)), ranked, labels))
    assert found["mcc"] == pytest.approx(mcc, abs=1e-15)
    assert found["nmi"] == pytest.approx(nmi, abs=1e-15)
    assert found["nmi"] == pytest.approx(normalized_mutual_info_score(list(true), list(guess)))


@settings(deadline=None)
@given(predictions(), st.integers(0, 2**20))
def test_groups_are_measured_as_if_alone(drawn, seed):
    targets, probabilities = drawn
    ranked = top_k(probabilities, 3)
    by = pl.DataFrame({"group": np.random.default_rng(seed).choice(["x", "y"], len(targets))})
    together = count(targets, ranked, LABELS, by)
    for name in by["group"].unique():
        mine = (by["group"] == name).to_numpy()
        alone = count(targets.filter(mine), ranked[mine], LABELS)
        assert_frame_equal(together.filter(pl.col("group") == name).drop("group"), alone)
        for reduction in REDUCTIONS:
            grouped = measure(reduce(together, KNOWN_LABELS, reduction))
            assert_frame_equal(
                grouped.filter(pl.col("group") == name).drop("group"),
                measure(reduce(alone, KNOWN_LABELS, reduction)),
            )


def test_no_counts_no_measures():
    assert measure(pl.DataFrame(schema=COUNTS)).is_empty()
    empty = count(pl.Series([], dtype=pl.String), np.empty((0, 3), np.int32), LABELS)
    assert_frame_equal(empty, pl.DataFrame(schema=COUNTS))


# ---------------------------------------------------------------- reaction time


@pytest.mark.parametrize(
    ("novel", "flagged", "inclusive", "before"),
    [
        ("0000", "0000", None, None),  # nothing novel
        ("0000", "1111", None, None),
        ("0100", "0100", 0.0, 0.0),  # d = a
        ("1111", "1000", 0.0, 0.0),
        ("0101", "1000", 1.0, 1.0),  # flagged before a only: never detected
        ("0111", "0000", 1.0, 1.0),
        # a = 1, d = 3, z = 4, r = 3: 2 / (4/2 + 3/m), m = 3 with d, 2 without
        ("01110", "00010", 2 / (4 / 2 + 3 / 3), 2 / (4 / 2 + 3 / 2)),
        # d is a known sample that is wrongly flagged: m is the same in both readings
        ("01001", "00010", 2 / (4 / 2 + 2 / 1), 2 / (4 / 2 + 2 / 1)),
        ("10", "01", 2 / (2 / 1 + 1 / 1), 2 / (2 / 1 + 1 / 1)),
    ],
)
def test_reaction_time(novel, flagged, inclusive, before):
    arrays = (np.array(list(text)) == "1" for text in (novel, flagged))
    novel, flagged = arrays
    assert reaction_time(novel, flagged, "inclusive") == inclusive
    assert reaction_time(novel, flagged, "before") == before


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_reaction_time_is_the_harmonic_mean_of_two_delays(samples):
    novel, flagged = (np.array(side) for side in zip(*samples, strict=True))
    for reading in ("inclusive", "before"):
        found = reaction_time(novel, flagged, reading)
        if not novel.any():
            assert found is None
            continue
        assert 0 <= found <= 1
        first = int(novel.argmax())
        # Samples before the first novel one do not count.
        assert reaction_time(novel[first:], flagged[first:], reading) == found
        late = flagged.copy()
        late[first] = False
        assert reaction_time(novel, late, reading) >= found


def test_unknown_reading():
    with pytest.raises(ConfigError, match="inclusive"):
        reaction_time(np.ones(2, bool), np.ones(2, bool), "after")
