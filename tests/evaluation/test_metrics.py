"""Metrics against the published tables, the 3DOS / OpenOOD trap and brute-force definitions."""

from itertools import product

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.evaluation import metrics
from tasks.evaluation.conventions import CONVENTIONS, Convention, find_convention
from tasks.evaluation.metrics import CURVES, METRICS, curves, detection_delay, evaluate
from tests.shared import shared_path

PLAIN = Convention(name="plain", pr_area="average_precision", fpr_rule="first_threshold")
OPERATING = ("tnr_at_tpr95", "ppv_at_tpr95", "tnr_at_ppv80", "tpr_at_ppv80")


def values(frame: pl.DataFrame) -> dict[str, float | None]:
    return dict(zip(frame["metric"], frame["value"], strict=True))


@st.composite
def scored(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Small integer scores (many ties), both classes present."""
    size = draw(st.integers(2, 30))
    scores = draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size))
    novel = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    novel[0], novel[1] = True, False
    return np.array(scores, dtype=float), np.array(novel)


# ---- curves


@given(scored(), st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.3]), min_size=30, max_size=30))
def test_curves_and_areas_are_those_of_sklearn_to_the_last_bit(rows, weights) -> None:
    from sklearn.metrics import auc, precision_recall_curve, roc_curve

    scores, novel = rows
    weight = np.array([0.3, 1.1, *weights])[: scores.size]
    samples = metrics._Samples(rank=scores / 3, positive=novel, weight=weight, sign=1.0)
    for drop in (True, False):
        convention = PLAIN.model_copy(update={"roc_drop_intermediate": drop})
        roc = metrics._roc(samples, convention)
        theirs = roc_curve(novel, scores / 3, sample_weight=weight, drop_intermediate=drop)
        assert all(map(np.array_equal, roc, theirs))
        assert metrics._area(*roc[:2]) == auc(*theirs[:2])
    pr = metrics._precision_recall(samples)
    theirs = precision_recall_curve(novel, scores / 3, sample_weight=weight)
    assert all(map(np.array_equal, pr, theirs))
    assert metrics._area(pr[1], pr[0]) == auc(theirs[1], theirs[0])


# ---- conventions


@pytest.mark.parametrize("name", CONVENTIONS)
def test_named_convention_is_valid_data(name: str) -> None:
    convention = find_convention(name)
    assert convention.name == name
    assert Convention.model_validate_json(convention.model_dump_json()) == convention


def test_unknown_convention_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"novelcraft-2023.*novelcraft-2022.*semantic"):
        find_convention("novelcraft-2023")


# ---- published numbers


@pytest.mark.parametrize(
    ("method", "name"),
    product(("odin", "deep_ensemble", "ocsvm", "ae_patch"), ("novelcraft-2022", "novelcraft-tmlr")),
)
def test_table_2(method: str, name: str) -> None:
    scores = pl.read_csv(shared_path("novelcraft/scores/visual_test_scores.csv"))
    table = pl.read_csv(shared_path("novelcraft/expected/table2_recomputed.csv")).filter(
        pl.col("method") == method
    )
    paper = table.row(0, named=True)
    expected = table.row(0 if name == "novelcraft-2022" else 1, named=True)
    frame = evaluate(scores[method], scores["novel_true"], find_convention(name))
    found = values(frame)
    thresholds = dict(zip(frame["metric"], frame["threshold"], strict=True))

    assert dict(frame.schema) == METRICS
    assert frame["n"].unique().to_list() == [4420]
    assert found["skew"] == pytest.approx(0.25, abs=1e-12)
    assert found["auroc"] == pytest.approx(expected["auroc"], abs=1e-9)
    assert found["aupr"] == pytest.approx(expected["auprc_trapezoid"], abs=1e-9)
    assert found["aupr_out"] == found["aupr"]
    assert found["average_precision"] == pytest.approx(expected["average_precision"], abs=1e-9)
    for metric in OPERATING:
        if paper[f"paper_{metric}"] is None:
            assert found[metric] is None
            assert thresholds[metric] is None
        else:
            assert found[metric] == pytest.approx(expected[metric], abs=1e-9)
            threshold = expected[f"threshold_{metric.split('_')[-1]}"]
            assert thresholds[metric] == pytest.approx(threshold, rel=1e-6)
    if name == "novelcraft-2022":
        printed = {"auroc": "auroc", "aupr": "auprc"} | {metric: metric for metric in OPERATING}
        for metric, column in printed.items():
            value = found[metric]
            assert (None if value is None else round(100 * value, 2)) == paper[f"paper_{column}"]


def test_ensemble_is_mostly_ties() -> None:
    scores = pl.read_csv(shared_path("novelcraft/scores/visual_test_scores.csv"))
    assert (scores["deep_ensemble"] == -1).mean() == pytest.approx(0.679, abs=5e-4)
    found = values(
        evaluate(scores["deep_ensemble"], scores["novel_true"], find_convention("openood"))
    )
    assert found["fpr95"] == 1.0


@pytest.mark.parametrize("context", [2, 10])
def test_table_3(context: int) -> None:
    windows = pl.read_csv(shared_path(f"novelcraft/scores/symbolic_windows_k{context}.csv"))
    expected = (
        pl.read_csv(shared_path("novelcraft/expected/table3_recomputed.csv"))
        .filter(pl.col("context_k") == context)
        .row(0, named=True)
    )
    frame = evaluate(
        windows["novel_score"], windows["novel_true"], find_convention("novelcraft-symbolic")
    )
    found = values(frame)
    assert frame["n"].unique().to_list() == [expected["windows"]]
    assert found["aupr"] == found["average_precision"]
    columns = {"auroc": "auroc", "aupr": "auprc"} | {
        name: name for name in ("tnr_at_tpr95", "ppv_at_tpr95", "tnr_at_ppv40", "tpr_at_ppv40")
    }
    for metric, column in columns.items():
        if expected[f"paper_{column}"] is None:
            assert found[metric] is None
        else:
            exact = expected["average_precision" if metric == "aupr" else metric]
            assert found[metric] == pytest.approx(exact, abs=1e-9)
            assert round(100 * found[metric], 2) == expected[f"paper_{column}"]


def test_episode_scores_under_the_episode_convention() -> None:
    """Max over frames without the last one; thresholds checked by counting."""
    path = pl.col("path").str.strip_suffix(".png").str.split("/").list
    first = {
        "fence": 14,
        "tree_easy": 15,
        "supplier": 12,
        "thief": 16,
        "rotten": 0,
        "normal": 10**6,
    }
    episodes = (
        pl.read_csv(shared_path("novelcraft/scores/episode_ae_patch.csv"))
        .with_columns(
            path.get(0).alias("class"),
            path.get(1).cast(pl.Int64).alias("episode"),
            path.get(2).cast(pl.Int64).alias("frame"),
        )
        .filter(pl.col("class") != "ArenaBlockHard")
        .filter(pl.col("frame") < pl.col("frame").max().over("class", "episode"))
        .group_by("class", "episode")
        .agg(pl.col("score").max())
        .with_columns(
            (
                pl.col("episode") >= pl.col("class").replace_strict(first, return_dtype=pl.Int64)
            ).alias("novel")
        )
    )
    assert episodes.height == 10 + 94 + 100 + 100 + 100 + 81
    frame = evaluate(episodes["score"], episodes["novel"], find_convention("novelcraft-episodes"))
    found = values(frame)
    assert found["skew"] == pytest.approx(0.85)
    score, novel = episodes["score"].to_numpy(), episodes["novel"].to_numpy()
    threshold = frame.filter(pl.col("metric") == "tpr_at_ppv95")["threshold"][0]
    tpr, fpr = (score[novel] >= threshold).mean(), (score[~novel] >= threshold).mean()
    assert found["tpr_at_ppv95"] == pytest.approx(tpr)
    assert found["tnr_at_ppv95"] == pytest.approx(1 - fpr)
    assert 0.95 <= 0.85 * tpr / (0.85 * tpr + 0.15 * fpr) < 0.96


def test_three_fpr95_of_the_same_scores() -> None:
    """2240 known, 8020 unknown: .733416 (3DOS), .731172 (first threshold), .750000 (OpenOOD).

    0.95 * 2240 and 0.95 * 8020 are whole, so the TPR has a plateau at exactly .95 either way.
    """
    runs = ((560, False), (402, True), (1567, False), (5462, True), (1, False), (18, True))
    runs += ((1, False), (2138, True), (111, False))
    novel = np.concatenate([np.full(size, kind) for size, kind in runs])
    novelty = np.arange(novel.size, dtype=float)
    assert ((~novel).sum(), novel.sum()) == (2240, 8020)
    found = {
        name: values(evaluate(novelty, novel, find_convention(name)))
        for name in ("threedos", "threedos-first-threshold", "openood")
    }
    assert [round(row["fpr95"], 6) for row in found.values()] == [0.733416, 0.731172, 0.75]
    for metric in ("auroc", "aupr_in", "aupr_out"):
        assert len({round(row[metric], 12) for row in found.values()}) == 1
    assert found["threedos"]["aupr"] == found["threedos"]["aupr_in"]
    assert found["openood"]["aupr"] == found["openood"]["aupr_out"]


# ---- definitions, by brute force


@settings(deadline=None)
@given(scored())
def test_areas_follow_their_definitions(data: tuple[np.ndarray, np.ndarray]) -> None:
    scores, novel = data
    found = values(evaluate(scores, novel, PLAIN))
    difference = scores[novel][:, None] - scores[~novel][None, :]
    assert found["auroc"] == pytest.approx(((difference > 0) + 0.5 * (difference == 0)).mean())
    precision_sum, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        recall = (scores[novel] >= threshold).mean()
        precision_sum += novel[scores >= threshold].mean() * (recall - before)
        before = recall
    assert found["average_precision"] == pytest.approx(precision_sum)
    first = max(t for t in scores if (scores[novel] >= t).mean() >= 0.95)
    assert found["fpr95"] == pytest.approx((scores[~novel] >= first).mean())
    assert found["skew"] == pytest.approx(novel.mean())


@settings(deadline=None)
@given(scored(), st.sampled_from(["lowest_threshold", "smallest_precision_at_least"]))
def test_operating_points_follow_their_definitions(
    data: tuple[np.ndarray, np.ndarray], rule: str
) -> None:
    scores, novel = data
    convention = Convention(
        name="c",
        pr_area="trapezoid",
        ppv_target=0.6,
        ppv_rule=rule,
        roc_drop_intermediate=False,
    )
    found = values(evaluate(scores, novel, convention))
    points = [
        (t, novel[scores >= t].mean(), (scores[novel] >= t).mean(), (scores[~novel] < t).mean())
        for t in sorted(set(scores))
    ]
    meets = [point for point in points if point[1] >= 0.6]
    if any(point[0] > scores.min() for point in meets):
        at = meets[0] if rule == "lowest_threshold" else min(meets, key=lambda point: point[1])
        assert found["tpr_at_ppv60"] == pytest.approx(at[2])
        assert found["tnr_at_ppv60"] == pytest.approx(at[3])
    else:
        assert found["tpr_at_ppv60"] is None
        assert found["tnr_at_ppv60"] is None
    at = [point for point in points if point[2] >= 0.95][-1]
    trivial = at[2] == 1 and at[3] == 0
    assert found["tnr_at_tpr95"] == (None if trivial else pytest.approx(at[3]))
    assert found["ppv_at_tpr95"] == (None if trivial else pytest.approx(at[1]))


@settings(max_examples=50, deadline=None)
@given(scored(), st.randoms(use_true_random=False))
def test_row_order_and_direction_do_not_matter(
    data: tuple[np.ndarray, np.ndarray], random: object
) -> None:
    scores, novel = data
    order = list(range(scores.size))
    random.shuffle(order)
    convention = find_convention("threedos")
    plain = evaluate(scores, novel, convention)
    shuffled = evaluate(scores[order], novel[order], convention)
    normality = convention.model_copy(update={"score_direction": "higher_is_known"})
    turned = evaluate(-scores, novel, normality)
    for metric, value in values(plain).items():
        assert values(shuffled)[metric] == pytest.approx(value)
        assert values(turned)[metric] == pytest.approx(value)


@settings(max_examples=50, deadline=None)
@given(scored(), st.lists(st.integers(1, 4), min_size=30, max_size=30))
def test_whole_weights_are_repetitions(
    data: tuple[np.ndarray, np.ndarray], repeats: list[int]
) -> None:
    scores, novel = data
    times = np.array(repeats[: scores.size])
    classes = (scores % 3, scores % 2)
    repeated = (np.repeat(classes[0], times), np.repeat(classes[1], times))
    for name in ("threedos", "semantic"):
        convention = find_convention(name)
        weighted = values(evaluate(scores, novel, convention, weights=times, classes=classes))
        plain = values(
            evaluate(np.repeat(scores, times), np.repeat(novel, times), convention, None, repeated)
        )
        for metric, value in plain.items():
            assert weighted[metric] == pytest.approx(value), metric


@settings(max_examples=50, deadline=None)
@given(scored())
def test_oscr_is_auroc_of_a_perfect_classifier(data: tuple[np.ndarray, np.ndarray]) -> None:
    scores, novel = data
    name = np.where(novel, "?", "a")
    found = values(evaluate(scores, novel, PLAIN, classes=(name, np.full(novel.size, "a"))))
    assert found["acc"] == 1
    assert found["oscr"] == pytest.approx(found["auroc"])
    wrong = values(evaluate(scores, novel, PLAIN, classes=(name, np.full(novel.size, "b"))))
    assert (wrong["acc"], wrong["oscr"]) == (0, 0)


def test_oscr_by_hand() -> None:
    """Accepted from low novelty: known right, unknown, known wrong, known right, unknown."""
    frame = evaluate(
        [1, 2, 3, 4, 5],
        [False, True, False, False, True],
        PLAIN,
        classes=([0, 9, 0, 1, 9], [0, 0, 1, 1, 1]),
    )
    found = values(frame)
    assert found["acc"] == pytest.approx(2 / 3)
    assert found["oscr"] == pytest.approx(0.5 * 1 / 3 + 0.5 * 2 / 3)
    assert frame.filter(pl.col("metric") == "acc")["n"][0] == 3


# ---- thresholds, curves


def test_thresholds_are_in_the_given_direction() -> None:
    novelty, novel = np.array([1.0, 2.0, 3.0, 4.0]), np.array([False, False, True, True])
    for name, expected in (("openood", 3.0), ("threedos-first-threshold", 2.0)):
        frame = evaluate(novelty, novel, find_convention(name)).filter(pl.col("metric") == "fpr95")
        assert frame.row(0)[2:] == (0.0, 4, expected)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_curves_hold_the_areas(name: str) -> None:
    rng = np.random.default_rng(5)
    novel = rng.random(3000) < 0.4
    scores = np.round(rng.normal(novel * 1.0), 2)
    convention = find_convention(name)
    found = values(evaluate(scores, novel, convention))
    frame = curves(scores, novel, convention)
    assert dict(frame.schema) == CURVES
    parts = {key: frame.filter(pl.col("curve") == key) for key in ("roc", "pr")}
    assert np.trapz(parts["roc"]["y"], parts["roc"]["x"]) == pytest.approx(found["auroc"])
    steps = -np.diff(parts["pr"]["x"]) * parts["pr"]["y"].to_numpy()[:-1]
    assert steps.sum() == pytest.approx(found["average_precision"])
    assert parts["roc"]["threshold"].is_null().arg_true().to_list() == [0]
    assert parts["pr"]["threshold"].is_null().arg_true().to_list() == [parts["pr"].height - 1]
    thin = curves(scores, novel, convention, points=50)
    for key, part in parts.items():
        kept = thin.filter(pl.col("curve") == key)
        assert kept.height == 50
        assert kept.row(0) == part.row(0)
        assert kept.row(-1) == part.row(-1)
        assert kept.is_unique().all()


def test_delay_is_averaged_over_episodes_then_classes() -> None:
    frames = pl.DataFrame(
        {
            "class": ["a"] * 5 + ["b"] * 2,
            "episode": [0, 0, 0, 1, 1, 0, 0],
            "frame": [10, 2, 3, 0, 1, 1, 0],
            "score": [0.0, 0.1, 0.9, 0.9, 0.0, 0.1, 0.2],
        }
    )
    assert detection_delay(frames, 0.9) == pytest.approx(((1 + 0) / 2 + 2) / 2)
    assert detection_delay(frames.clear(), 0.9) is None


# ---- what has no value, what is refused


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("kind", [True, False])
def test_one_class_gives_nulls(name: str, kind: bool) -> None:
    classes = (["a", "b"], ["a", "a"])
    convention = find_convention(name)
    frame = evaluate([0.5, 0.7], [kind, kind], convention, classes=classes)
    both = evaluate([0.5, 0.7], [True, False], convention, classes=classes)
    assert frame["metric"].to_list() == both["metric"].to_list()
    found = values(frame)
    assert found.pop("skew") == float(kind == (convention.positive == "novel"))
    assert found.pop("acc") == (None if kind else 0.5)
    assert set(found.values()) == {None}
    assert frame.filter(pl.col("metric") == "auroc")["n"][0] == 2
    assert curves([0.5, 0.7], [kind, kind], convention).is_empty()


def test_all_scores_equal() -> None:
    found = values(evaluate([1.0] * 10, [True, False] * 5, find_convention("novelcraft-2022")))
    assert found["auroc"] == pytest.approx(0.5)
    assert [found[metric] for metric in OPERATING] == [None] * 4


@pytest.mark.parametrize(
    ("scores", "novel", "weights", "classes", "message"),
    [
        ([], [], None, None, "one or more"),
        ([[1.0]], [True], None, None, "shape"),
        (["x"], [True], None, None, "not numbers"),
        ([1.0, float("nan"), float("inf")], [0, 1, 1], None, None, "2 of 3 .* nan at row 1"),
        ([1.0, None], [0, 1], None, None, "not finite"),
        ([1.0, 2.0], [True], None, None, r"novel has shape \(1,\), expected \(2,\)"),
        ([1.0, 2.0], [0, 2], None, None, "other than"),
        ([1.0, 2.0], [True, None], None, None, "other than"),
        ([1.0, 2.0], [0, 1], [1.0], None, "weights has shape"),
        ([1.0, 2.0], [0, 1], [1.0, -1.0], None, "zero or more"),
        ([1.0, 2.0], [0, 1], [1.0, 0.0], None, "all zero"),
        ([1.0, 2.0], [0, 1], None, (["a"], ["a", "b"]), "classes has shape"),
    ],
)
def test_refused_input(scores, novel, weights, classes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(scores, novel, PLAIN, weights, classes)


def test_too_few_curve_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="curve points is 1"):
        curves([1.0, 2.0], [0, 1], PLAIN, points=1)
