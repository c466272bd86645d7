"""Bug for bug: equal to the published numbers and to plain loops, wrong where upstream is."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, RecordError
from tasks.condda.metrics_upstream import (
    NO_RANK,
    THRESHOLDS,
    evaluate,
    label_ranks,
    m_acc,
    m_acc_round_wise,
    m_is_cdt_and_is_early,
    m_ndp,
    m_ndp_failed_reaction,
    m_nrp,
    m_num,
    m_num_stats,
    rolling_accuracy,
)
from tests.condda import TEST, posted, published_activity, truth
from tests.shared import shared_path

# Our name of a metric -> its name in the file of expected numbers.
EXPECTED = {
    "m_num": "m_num_values",
    "m_num_stats": "m_num_stats_values",
    "m_ndp": "m_ndp_values",
    "m_ndp_pre": "m_ndp_pre_values",
    "m_ndp_post": "m_ndp_post_values",
    "m_acc": "m_acc_values",
    "m_acc_failed": "m_ndp_failed_values",
}


@pytest.fixture(scope="module")
def activity() -> dict[str, np.ndarray]:
    return published_activity()


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, float]]:
    path = shared_path(f"sailon/expected_metrics/{TEST}_activity_recognition.json")
    return json.loads(path.read_text())


# ---------------------------------------------------------------- published numbers


def test_every_published_number_to_the_last_digit(activity, expected):
    found = evaluate(**activity)
    assert set(found) == {*EXPECTED, "m_is_cdt_and_is_early"}
    for ours, theirs in EXPECTED.items():
        assert found[ours] == expected[theirs]
    assert found["m_is_cdt_and_is_early"] == {"Is CDT": True, "Is Early": False}


def test_published_reaction_and_round_numbers(activity, expected):
    novel, labels = activity["novel"], activity["labels"]
    baseline = posted(f"{TEST}_BaselinePreComputedONDAgent_classification")
    agent = m_acc(novel, activity["classification"], labels)
    assert m_nrp(agent, m_acc(novel, baseline, labels)) == expected["m_nrp_values"]
    by_round = m_acc_round_wise(activity["classification"], labels, 0)
    assert by_round == expected["m_acc_roundwise_values"]


def test_the_local_harness_reads_another_column_for_m_ndp_only(activity):
    server = evaluate(**activity)
    local = evaluate(**activity, ndp_input=activity["classification"][:, 30])
    assert server["m_ndp"]["FN_0.175"] == 13
    assert local["m_ndp"]["FN_0.175"] == 98
    ndp = ("m_ndp", "m_ndp_pre", "m_ndp_post")
    assert all(server[name] == local[name] for name in server if name not in ndp)


def test_a_perfect_image_classifier_is_not_perfect_upstream():
    novel, labels = truth("OND.54011215.0000.1236", "image_classification", 1, 2)
    perfect = np.zeros((len(labels), 414))
    perfect[np.arange(len(labels)), np.maximum(labels, 0)] = 1
    accuracy = m_acc(novel, perfect, labels)
    assert accuracy["pre_top1"] == 0.99818 == round(547 / 548, 5)
    assert round(accuracy["post_top1"], 2) == 0.49
    steps = {name.split("_")[1] for name in accuracy if name.startswith("asymptotic")}
    assert steps == {str(rows) for rows in range(500, 2560, 100)}


# ---------------------------------------------------------------- each bug, by hand


def test_bug_1_never_detected_looks_like_detected_at_once():
    assert m_num([0.0, 0.1, 0.1], [0, 1, 1])["0.9"] == 1
    assert m_num_stats([0.0, 0.1, 0.1], [0, 1, 1])["P_indx_0.9"] == 4


def test_bug_2_first_novel_row_counts_before_novelty():
    right, wrong = [1, 0], [0, 1]
    accuracy = m_acc([0, 1, 1], [right, wrong, right], [0, 0, 0])
    assert (accuracy["pre_top1"], accuracy["post_top1"]) == (0.5, 1.0)


def test_bug_3_detection_on_the_last_row_does_not_count():
    assert m_is_cdt_and_is_early(3, 9, 10) == {"Is CDT": True, "Is Early": False}
    assert m_is_cdt_and_is_early(3, 10, 10) == {"Is CDT": False, "Is Early": False}
    assert m_is_cdt_and_is_early(3, 2, 10) == {"Is CDT": False, "Is Early": True}


def test_bug_5_negative_labels_are_always_wrong_and_refused_only_if_all_are():
    unknown_chosen = [[1, 0, 0, 0]] * 3
    mixed = m_acc([0, 1, 1], unknown_chosen, [1, -2, 0])
    assert mixed["full_top1"] == 0.33333
    with pytest.raises(RecordError, match="all labels of the post part of the test are negative"):
        m_acc([0, 1, 1], unknown_chosen, [1, -2, -2])
    with pytest.raises(RecordError, match="are negative"):
        m_acc_round_wise(unknown_chosen, [-1, -2, -2], 0)


def test_bug_6_ties_go_to_the_earlier_column():
    flat = np.full((4, 4), 0.25)
    np.testing.assert_array_equal(label_ranks(flat, np.arange(4)), [0, 1, 2, 3])
    ranks = label_ranks(flat, np.array([-1, -8, 3, 4]))
    assert (ranks == NO_RANK).tolist() == [True, True, False, True]
    assert m_acc([0, 0], [[1, 0], [1, 0]], [-1, 1])["full_top3"] == 0.5


def test_bug_7_the_threshold_itself_is_detected_by_m_num_and_not_by_m_ndp():
    assert m_num_stats([0.0, 0.5], [0, 1])["P_indx_0.5"] == 2
    assert m_ndp([0.0, 0.5], [0, 1])["FN_0.5"] == 1


def test_stand_ins_for_no_value():
    assert set(m_num([0.2, 1], [0, 0]).values()) == {-1}
    assert m_num_stats([0.2, 1], [0, 0])["GT_indx"] == 3
    assert set(m_ndp([0.2, 1], [0, 0], "post").values()) == {-1}
    assert m_ndp([0.2, 1], [0, 0], "pre") == m_ndp([0.2, 1], [0, 0], "full")
    assert m_ndp([0.2, 1], [1, 1], "pre") == m_ndp([0.2, 1], [1, 1], "full")
    assert math.isnan(m_ndp([0.2, 1], [1, 0], "pre")["accuracy_0.5"])
    known = m_acc([0, 0], [[1, 0], [1, 0]], [0, 1])
    assert known["pre_top1"] == 0.5
    assert "pre_mean_top1" not in known
    assert known["post_mean_top3"] == -1
    assert math.isnan(m_acc([0, 1, 1], [[1, 0]] * 3, [0, 1, 0])["post_mean_top1"])
    failed = m_ndp_failed_reaction([0, 1], [0, 1], [[1, 0], [0, 1]], [0, 1])
    assert failed["top1_TP"] == -1
    assert len(failed) == 16


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"detection": [0.1, 0.2]}, "rows"),
        ({"detection": [0.1, 0.2, 1.2]}, "detection"),
        ({"detection": [0.1, 0.2, float("nan")]}, "detection"),
        ({"detection": ["a", 0.2, 0.3]}, "detection"),
        ({"detection": [[0.1], [0.2], [0.3]]}, "detection"),
        ({"novel": [0, 1, 2]}, "novel"),
        ({"classification": [[0.5, 0.5]] * 2}, "rows"),
        ({"classification": [[0.5, -0.5]] * 3}, "classification"),
        ({"classification": [0.5, 0.5, 0.5]}, "classification"),
        ({"labels": [0, 1, 2]}, "labels"),
        ({"labels": [0, 1, 0.5]}, "labels"),
        ({"labels": [-1, -1, -2]}, "labels"),
        ({"novel": [0, 0, 1]}, "labels"),
        ({"ndp_input": [2, 2, 2]}, "detection"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_input_is_one_sentence(change, rule):
    good = {
        "detection": [0.1, 0.2, 0.3],
        "classification": [[0.5, 0.5]] * 3,
        "novel": [0, 1, 1],
        "labels": [0, 1, 0],
    }
    evaluate(**good)
    with pytest.raises(RecordError) as raised:
        evaluate(**good | change)
    assert raised.value.rule == rule


def test_other_refusals():
    with pytest.raises(ConfigError, match="mode 'all'"):
        m_ndp([0.1], [0], "all")
    with pytest.raises(RecordError, match="baseline"):
        m_nrp({"post_top1": 1, "post_top3": 1}, {"pre_top1": 0, "pre_top3": 1})


# ---------------------------------------------------------------- plain loops


@st.composite
def drawn_tests(draw):
    """Coarse probabilities, so that ties and values at a threshold occur; at least one not novel.

    Novelty never starts at the last row and no label is negative: upstream has no value there.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    rows, columns = draw(st.integers(3, 30)), draw(st.integers(2, 6))
    novel = random.random(rows) < draw(st.sampled_from([0.0, 0.2, 0.9]))
    novel[-1] &= novel[:-1].any()
    return {
        "detection": random.choice([0, 0.1, *THRESHOLDS, 0.95, 1], rows),
        "classification": random.integers(0, 5, (rows, columns)) / 4,
        "novel": novel.astype(int),
        "labels": random.integers(0, columns, rows),
    }


def looped_confusion(p, y, threshold):
    counts = {"TP": 0, "FP": 0, "TN": 0, "FN": 0}
    for value, flag in zip(p, y, strict=True):
        said = value > threshold
        counts[("T" if said == bool(flag) else "F") + ("P" if said else "N")] += 1
    return counts


def looped_top(P, c, k):
    right = []
    for row, label in zip(P, c, strict=True):
        order = sorted(range(len(row)), key=lambda column: (-row[column], column))
        right.append(label in order[:k])
    return right


@settings(deadline=None, max_examples=60)
@given(drawn_tests())
def test_detection_counts_equal_a_plain_loop(drawn):
    p, y = drawn["detection"], drawn["novel"]
    found = evaluate(**drawn)
    start = next((row for row, flag in enumerate(y) if flag), len(y))
    for threshold in THRESHOLDS:
        counts = looped_confusion(p, y, threshold)
        assert {name: found["m_ndp"][f"{name}_{threshold}"] for name in counts} == counts
        if 0 < start < len(y):
            post = looped_confusion(p[start:], y[start:], threshold)
            assert {name: found["m_ndp_post"][f"{name}_{threshold}"] for name in post} == post
        first = next((row for row, value in enumerate(p, 1) if value >= threshold), len(p) + 1)
        assert found["m_num_stats"][f"P_indx_{threshold}"] == first
        hits = [n for n, value in enumerate(p[y == 1], 1) if value >= threshold]
        assert found["m_num"][f"{threshold}"] == ([*hits, 1][0] if y.any() else -1)
        wrong = [not right for right in looped_top(drawn["classification"], drawn["labels"], 3)]
        if any(wrong):
            failed = looped_confusion(p[wrong], y[wrong], threshold)
            assert {n: found["m_acc_failed"][f"top3_{n}_{threshold}"] for n in failed} == failed
    assert found["m_num_stats"]["GT_indx"] == start + 1


@settings(deadline=None, max_examples=60)
@given(drawn_tests(), st.integers(1, 6))
def test_accuracies_equal_a_plain_loop_and_pandas(drawn, round_size):
    y, P, c = drawn["novel"], drawn["classification"], drawn["labels"]
    found = m_acc(y, P, c, round_size, 2)
    split = next((row for row, flag in enumerate(y, 1) if flag), None)
    parts = {f"asymptotic_{n}": slice(-n, None) for n in range(2 * round_size, len(y), round_size)}
    if split:
        parts |= {"pre": slice(split), "post": slice(split, None)}
    for k in (1, 3):
        right = pd.Series(looped_top(P, c, k)).astype(int)
        assert found[f"full_top{k}"] == round(right.mean(), 5)
        for name, part in parts.items():
            rolled = right[part].rolling(window=round_size).mean()
            assert found[f"{name}_top{k}"] == pytest.approx(right[part].mean(), abs=6e-6)
            for ours, theirs in (("mean", rolled.mean()), ("std", rolled.std())):
                value = found[f"{name}_{ours}_top{k}"]
                assert value == pytest.approx(theirs, nan_ok=True, abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=400), st.integers(1, 120))
def test_rolling_accuracy_has_the_bits_of_pandas(correct, window):
    rolled = pd.Series(np.array(correct, int)).rolling(window=window).mean()
    found = rolling_accuracy(np.array(correct), window)
    np.testing.assert_array_equal(found, [rolled.mean(), rolled.std()])
