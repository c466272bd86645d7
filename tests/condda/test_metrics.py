"""Each repair by hand, a perfect agent, the program metrics, and the long form of both."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, RecordError
from tasks.condda import metrics_upstream
from tasks.condda.metrics import (
    LONG_FORM,
    Columns,
    Trial,
    evaluate,
    long_form,
    m_acc,
    m_false_alarm,
    m_is_cdt_and_is_early,
    m_ndp,
    m_ndp_failed_reaction,
    m_nrp,
    m_num,
    m_num_stats,
    program_metrics,
)
from tasks.condda.metrics_upstream import THRESHOLDS
from tests.condda import published_activity, truth

IMAGE = Columns(known=2, unknown="first")
ACTIVITY = Columns(known=2, unknown="last")


@pytest.fixture(scope="module")
def activity() -> dict[str, np.ndarray]:
    return published_activity()


@st.composite
def drawn_tests(draw, labels_in=(-3, 9)):
    """A test with results; labels may be negative, unknown or beyond the columns."""
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    columns = Columns(
        draw(st.integers(1, 4)), draw(st.sampled_from(["first", "after_known", "last", "none"]))
    )
    width = columns.known + draw(st.integers(int(columns.unknown != "none"), 4))
    rows = draw(st.integers(1, 40))
    return {
        "detection": random.choice([0, 0.1, *THRESHOLDS, 0.95, 1], rows),
        "classification": random.integers(0, 5, (rows, width)) / 4,
        "novel": (random.random(rows) < draw(st.sampled_from([0.0, 0.2, 0.9]))).astype(int),
        "labels": random.integers(*labels_in, rows),
        "columns": columns,
        "round_size": draw(st.integers(1, 10)),
    }


# ---------------------------------------------------------------- each repair, by hand


def test_repair_1_never_detected_has_no_delay():
    found = m_num([0.0, 0.1, 0.65], [0, 1, 1])
    assert found["0.6"] == 2
    assert found["0.7"] is None
    assert m_num_stats([0.0, 0.1, 0.65], [0, 1, 1])["P_indx_0.7"] is None
    assert set(m_num([1.0, 1.0], [0, 0]).values()) == {None}
    assert m_num_stats([1.0], [0])["GT_indx"] is None


def test_repair_2_the_first_novel_row_is_after_novelty():
    right, wrong = [0, 1, 0], [0, 0, 1]
    found = m_acc([0, 1, 1], [right, wrong, right], [1, 1, 1], IMAGE, round_size=2)
    assert (found["pre_top1"], found["post_top1"]) == (1.0, 0.5)
    at_the_end = m_acc([0, 0, 1], [right, wrong, right], [1, 1, 1], IMAGE, round_size=2)
    assert (at_the_end["pre_top1"], at_the_end["post_top1"]) == (0.5, 1.0)


def test_repair_3_detection_on_the_last_row_counts():
    found = evaluate([0, 0, 1], [[1, 0, 0]] * 3, [0, 1, 1], [0, 0, 0], IMAGE, 2)
    assert found["m_is_cdt_and_is_early"] == {"Is CDT": True, "Is Early": False}
    assert m_is_cdt_and_is_early(2, None) == {"Is CDT": False, "Is Early": False}
    assert m_is_cdt_and_is_early(2, 1) == {"Is CDT": False, "Is Early": True}
    assert m_is_cdt_and_is_early(None, 1) == {"Is CDT": None, "Is Early": True}
    assert m_is_cdt_and_is_early(None, None) == {"Is CDT": None, "Is Early": False}


def test_repair_4_m_ndp_reads_the_detection_or_the_posted_novelty(activity):
    found = evaluate(**activity, columns=Columns(88, "last"), round_size=32)
    assert found["m_ndp"]["FN_0.175"] == 13
    other = evaluate(
        **activity, columns=Columns(88, "last"), round_size=32, ndp_input=activity["novel"]
    )
    assert other["m_ndp"]["FN_0.175"] == 0
    assert other["m_acc_failed"] == found["m_acc_failed"]


def test_repair_5_unknown_and_discovered_columns_are_right_for_novel_labels():
    unknown, known, cluster = [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]
    for label in (-8, 0, 3):
        found = m_acc([1, 1, 1], [unknown, known, cluster], [label] * 3, IMAGE, round_size=3)
        assert found["post_top1"] == 0.66667
    known_labels = m_acc([0, 0, 0], [unknown, known, cluster], [1, 1, 1], IMAGE, round_size=3)
    assert known_labels["full_top1"] == 0.33333
    last = m_acc([1, 1], [[0, 0, 0, 1], [0, 0, 1, 0]], [2, 2], ACTIVITY, round_size=3)
    assert last["post_top1"] == 1.0
    nowhere = Columns(known=2, unknown="none")
    assert m_acc([1], [[1, 0]], [-1], nowhere, round_size=1)["full_top3"] == 0.0


def test_repair_5_a_perfect_image_classifier_is_perfect():
    novel, labels = truth("OND.54011215.0000.1236", "image_classification", 1, 2)
    perfect = np.zeros((len(labels), 414))
    perfect[np.arange(len(labels)), np.maximum(labels, 0)] = 1
    found = m_acc(novel, perfect, labels, Columns(413, "first"), round_size=100)
    assert {found[name] for name in found if "std" not in name} == {1.0}


def test_repair_6_ties_go_to_the_earlier_column():
    tie = [[0.5, 0.5, 0.5, 0.5]]
    first = m_acc([1], tie, [-1], IMAGE, round_size=1)
    assert first["full_top1"] == 1.0
    last = m_acc([1], tie, [2], ACTIVITY, round_size=1)
    assert (last["full_top1"], last["full_top3"]) == (0.0, 1.0)


def test_repair_7_one_comparison_and_the_round_size_of_the_test():
    assert m_ndp([0.0, 0.5], [0, 1])["TP_0.5"] == 1
    assert m_num_stats([0.0, 0.5], [0, 1])["P_indx_0.5"] == 2
    right, wrong = [0, 1, 0], [0, 0, 1]
    rows = [right, right, wrong, right, right, wrong]
    found = m_acc([0, 0, 1, 1, 1, 1], rows, [1] * 6, IMAGE, round_size=2, asymptotic_start_round=2)
    assert found["post_mean_top1"] == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert found["post_std_top1"] == pytest.approx(np.std([0.5, 1, 0.5], ddof=1))
    assert found["asymptotic_4_top1"] == 0.5
    assert "asymptotic_6_top1" not in found
    improving = [right, wrong, right, right]
    end = m_acc([0, 1, 1, 1], improving, [1] * 4, IMAGE, round_size=2, asymptotic_rows=2)
    assert (end["post_top1"], end["post_asymptotic_top1"]) == (0.66667, 1.0)
    few = m_acc([0, 0, 1, 1, 1, 1], rows, [1] * 6, IMAGE, round_size=2, asymptotic_rows=100)
    assert few["post_asymptotic_top1"] == few["post_top1"] == 0.5


def test_no_value_is_none():
    no_novelty = evaluate([0.1, 1], [[0, 1, 0]] * 2, [0, 0], [1, 1], IMAGE, 5)
    assert no_novelty["m_acc"]["post_top1"] is None
    assert no_novelty["m_acc"]["pre_mean_top1"] is None
    assert no_novelty["m_acc"]["pre_top1"] == 1.0
    assert no_novelty["m_ndp_post"]["accuracy_0.5"] is None
    assert no_novelty["m_ndp_post"]["TP_0.5"] == 0
    assert no_novelty["m_ndp"]["recall_0.5"] is None
    assert no_novelty["m_ndp"]["precision_0.5"] == 0.0
    all_novel = m_ndp([0.1, 1], [1, 1], "pre")
    assert (all_novel["TN_0.5"], all_novel["accuracy_0.5"]) == (0, None)
    none_wrong = m_ndp_failed_reaction([0.1], [0], [[0, 1, 0]], [1], IMAGE)
    assert len(none_wrong) == 144
    assert (none_wrong["top1_TP_0.5"], none_wrong["top3_accuracy_0.9"]) == (0, None)


# ---------------------------------------------------------------- properties


@settings(deadline=None, max_examples=80)
@given(drawn_tests())
def test_a_perfect_agent_is_perfect(drawn):
    columns, labels, novel = drawn["columns"], drawn["labels"], drawn["novel"]
    assume(columns.unknown != "none" or columns.is_known(labels).all())
    width = drawn["classification"].shape[1]
    answers = np.where(columns.is_known(labels), labels, columns.unknown_column(width))
    drawn |= {"detection": novel, "classification": np.eye(width)[answers.astype(int)]}
    found = evaluate(**drawn)
    assert set(found["m_num"].values()) <= ({1} if novel.any() else {None})
    assert len(set(found["m_num_stats"].values())) == 1
    for metric in ("m_ndp", "m_ndp_pre", "m_ndp_post"):
        for name, value in found[metric].items():
            if name.startswith(("FP", "FN")):
                assert value == 0
            elif not name.startswith(("TP", "TN")):
                assert value in (1.0, None)
    for name, value in found["m_acc"].items():
        assert value in ((0.0, None) if "std" in name else (1.0, None))
    assert found["m_acc"]["full_top1"] == 1.0
    assert found["m_is_cdt_and_is_early"]["Is CDT"] == (True if novel.any() else None)
    assert not found["m_is_cdt_and_is_early"]["Is Early"]
    scores = program_metrics([Trial(found, "system", found["m_acc"])])
    if novel.any():
        assert (scores["M1"], scores["M2"], scores["M2.1"]) == (0, 100, 0)
        assert (scores["M5"], scores["M6_docs"], scores["M6_balanced"]) == (0.5, 1, 0.5)
        assert scores["M3"] == (None if novel[0] else 1)


@settings(deadline=None, max_examples=80)
@given(drawn_tests())
def test_bounds_and_names(drawn):
    found = evaluate(**drawn)
    rows = len(drawn["labels"])
    for metric in ("m_ndp", "m_ndp_pre", "m_ndp_post", "m_acc", "m_acc_failed"):
        for name, value in found[metric].items():
            counted = any(part in ("TP", "FP", "TN", "FN") for part in name.split("_"))
            assert value is None or 0 <= value <= (rows if counted else 1)
    for k in ("top1", "top3"):
        assert found["m_acc"][f"full_{k}"] is not None
    assert found["m_acc"]["full_top1"] <= found["m_acc"]["full_top3"]
    for threshold in THRESHOLDS:
        parts = [found[f"m_ndp{part}"][f"TP_{threshold}"] for part in ("_pre", "_post", "")]
        assert parts[0] + parts[1] == parts[2]
        assert parts[0] == 0


@settings(deadline=None, max_examples=80)
@given(drawn_tests())
def test_right_rows_equal_a_plain_loop(drawn):
    columns, P = drawn["columns"], drawn["classification"]
    first = 1 if columns.unknown == "first" else 0
    known = range(first, first + columns.known)
    found = m_acc(drawn["novel"], P, drawn["labels"], columns, drawn["round_size"])
    for k in (1, 3):
        right = 0
        for row, label in zip(P, drawn["labels"], strict=True):
            order = sorted(range(len(row)), key=lambda column: (-row[column], column))[:k]
            right += label in order if label in known else any(c not in known for c in order)
        assert found[f"full_top{k}"] == round(right / len(P), 5)


@settings(deadline=None, max_examples=60)
@given(drawn_tests(labels_in=(0, 1)))
def test_without_a_bug_in_play_both_forms_agree(drawn):
    """Known labels only, no value at a threshold, novelty detected: m_num and m_ndp are equal."""
    novel = drawn["novel"]
    assume(novel.argmax() > 0)
    detection = np.clip(drawn["detection"] + 0.01, 0, 1)
    detection[novel.argmax()] = 1
    upstream = metrics_upstream.m_num(detection, novel)
    assert m_num(detection, novel) == upstream
    for mode in ("full", "pre", "post"):
        ours, theirs = m_ndp(detection, novel, mode), metrics_upstream.m_ndp(detection, novel, mode)
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(0 if value is None else value, abs=1.1e-5)


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("place", "known", "unknown", "discovered"),
    [
        ("first", [1, 2], 0, 2),
        ("after_known", [0, 1], 2, 2),
        ("last", [0, 1], 4, 2),
        ("none", [0, 1], None, 3),
    ],
)
def test_places_of_columns(place, known, unknown, discovered):
    columns = Columns(2, place)
    assert np.flatnonzero(columns.is_known(np.arange(5))).tolist() == known
    assert columns.unknown_column(5) == unknown
    assert columns.discovered(5) == discovered


def test_refusals():
    with pytest.raises(ConfigError, match="0 known classes"):
        Columns(0, "first")
    with pytest.raises(ConfigError, match="unknown column 'middle'"):
        Columns(1, "middle")
    with pytest.raises(RecordError, match="2 columns cannot hold 2 known"):
        m_acc([0], [[1, 0]], [1], IMAGE, round_size=1)
    with pytest.raises(ConfigError, match="round size"):
        m_acc([0], [[1, 0, 0]], [1], IMAGE, round_size=0)
    with pytest.raises(ConfigError, match="mode"):
        m_ndp([0.1], [0], "all")
    with pytest.raises(ConfigError, match="condition"):
        Trial({}, "hinted")
    with pytest.raises(RecordError) as raised:
        m_acc([0, 1], [[1, 0, 0]], [1], IMAGE, round_size=1)
    assert raised.value.rule == "rows"


# ---------------------------------------------------------------- program metrics


def trial(gt, p, condition="system", agent=None, baseline=None):
    """A trial by its numbers; accuracies are (post, end) of the agent, (pre, post, end) else."""
    post, end = agent or (None, None)
    pre, base_post, base_end = baseline or (None, None, None)
    result = {
        "m_num_stats": {"GT_indx": gt, "P_indx_0.5": p},
        "m_is_cdt_and_is_early": m_is_cdt_and_is_early(gt, p),
        "m_acc": {"post_top1": post, "post_asymptotic_top1": end},
    }
    base = {"pre_top1": pre, "post_top1": base_post, "post_asymptotic_top1": base_end}
    return Trial(result, condition, base if baseline else None)


def test_program_metrics_by_hand():
    trials = [
        trial(10, 10, agent=(0.6, 0.8), baseline=(0.8, 0.2, 0.4)),
        trial(10, 16, agent=(0.5, 0.4), baseline=(0.8, 0.5, 0.4)),
        trial(10, 4),
        trial(10, None),
        trial(None, 3),
        trial(10, 10, "given", agent=(0.9, 0.9), baseline=(0.5, 0.1, 0.1)),
        trial(10, 11, "given", agent=(0.9, 0.9), baseline=(0.0, 0.0, 0.0)),
    ]
    found = program_metrics(trials)
    assert found["M1"] == 3  # (0 + 6) / 2, the given ones left out
    assert found["M2"] == 50  # 2 of the 4 with novelty
    assert found["M2.1"] == 40  # 2 of 5
    assert found["no_cdt"] == 25  # 1 of the 4 with novelty
    assert found["false_alarms"] is found["nuisance_alarms"] is None
    assert found["M3"] == pytest.approx((0.8 / 0.8 + 0.4 / 0.8) / 2)
    assert found["M4"] == pytest.approx(0.9 / 0.5)
    assert found["M5"] == pytest.approx((0.75 + 0.5 + 0.9 + 1) / 4)
    assert found["M6_docs"] == pytest.approx((2 + 1 + 9) / 3)
    assert found["M6_balanced"] == pytest.approx((2 / 3 + 0.5 + 0.9 + 1) / 4)


def test_alarms_of_tests_without_novelty_are_counted_apart():
    quiet, alarmed = {"GT_indx": None, "P_indx_0.5": None}, {"GT_indx": None, "P_indx_0.5": 7}
    assert m_false_alarm({"GT_indx": 3, "P_indx_0.5": 7}, False) == {}
    assert m_false_alarm(quiet, False) == {"unchanged": False}
    assert m_false_alarm(alarmed, True) == {"nuisance": True}
    trials = [trial(10, 12), trial(None, 3), trial(None, None), trial(None, 5), trial(None, 2)]
    kinds = (None, (alarmed, False), (quiet, False), (quiet, False), (alarmed, True))
    for one, kind in zip(trials, kinds, strict=True):
        if kind is not None:
            one.agent["m_false_alarm"] = m_false_alarm(*kind)
    found = program_metrics(trials)
    assert found["false_alarms"] == pytest.approx(100 / 3) and found["nuisance_alarms"] == 100
    assert (found["M1"], found["M2"], found["no_cdt"]) == (2, 100, 0)


def test_program_metrics_of_nothing_are_not_available():
    assert set(program_metrics([]).values()) == {None}
    never = program_metrics([trial(10, None)])
    assert (never["M1"], never["M2"], never["M2.1"], never["no_cdt"]) == (None, 0, 0, 100)


def test_reaction_takes_the_end_of_the_test():
    agent = {"post_asymptotic_top1": 0.4, "post_asymptotic_top3": None, "post_top1": 0.9}
    found = m_nrp(agent, {"pre_top1": 0.8, "pre_top3": 0.9})
    assert found == {"M_nrp_post_top1": pytest.approx(50), "M_nrp_post_top3": None}
    assert m_nrp(agent, {"pre_top1": 0.0, "pre_top3": 0.9})["M_nrp_post_top1"] is None


# ---------------------------------------------------------------- long form


def test_long_form_has_every_number_of_both_forms(activity):
    upstream = metrics_upstream.evaluate(**activity)
    corrected = evaluate(**activity, columns=Columns(88, "last"), round_size=32)
    frame = long_form(upstream, corrected)
    assert dict(frame.schema) == LONG_FORM
    sizes = [sum(map(len, form.values())) for form in (upstream, corrected)]
    assert frame["form"].value_counts(sort=True).rows() == sorted(
        zip(("upstream", "corrected"), sizes, strict=True), key=lambda row: -row[1]
    )
    assert frame.select("form", "metric", "name").is_unique().all()

    values = {row[:3]: row[3] for row in frame.iter_rows()}
    assert values["upstream", "m_num", "0.9"] == 1.0
    assert values["corrected", "m_num", "0.9"] is None
    assert values["upstream", "m_is_cdt_and_is_early", "Is CDT"] == 1.0
    assert values["corrected", "m_num_stats", "P_indx_0.5"] == 193
    assert values["upstream", "m_acc", "pre_top3"] == 0.08547 == round(10 / 117, 5)
    assert values["corrected", "m_acc", "pre_top3"] == round(10 / 116, 5)


def test_long_form_turns_nan_into_null():
    frame = long_form({"m": {"a": float("nan"), "b": -1}}, {"m": {"a": None, "b": True}})
    assert frame["value"].to_list() == [None, -1.0, None, 1.0]
    assert long_form({}, {}).is_empty()
