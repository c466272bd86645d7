"""Bootstrap draws against `evaluate` on repeated rows; what is drawn; coverage of a known truth."""

from math import erf
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.evaluation import intervals as module
from tasks.evaluation.conventions import CONVENTIONS, Convention, find_convention
from tasks.evaluation.intervals import INTERVALS, intervals, resampled, share_intervals
from tasks.evaluation.metrics import evaluate

OPENOOD = find_convention("openood")


def simulated(seed: int, known: int, novel: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal scores one standard deviation apart, with ties."""
    generator = np.random.default_rng(seed)
    truth = np.arange(known + novel) >= known
    return np.round(generator.normal(truth * 1.0), 1), truth


# ---- a draw is what evaluate gives for the repeated rows


def repeated_values(
    counts: np.ndarray,
    scores: np.ndarray,
    novel: np.ndarray,
    convention: Convention,
    weights: np.ndarray | None,
    classes: tuple[np.ndarray, np.ndarray] | None,
) -> dict[str, float | None]:
    """Metrics of the materialised draw; none has a value where evaluate refuses the rows."""
    again = np.arange(scores.size).repeat(counts)
    try:
        frame = evaluate(
            scores[again],
            novel[again],
            convention,
            None if weights is None else weights[again],
            None if classes is None else (classes[0][again], classes[1][again]),
        )
    except ConfigError:
        names = evaluate(scores, novel, convention, weights, classes)["metric"]
        return dict.fromkeys(names)
    return dict(zip(frame["metric"], frame["value"], strict=True))


@st.composite
def draws_of_samples(draw: st.DrawFn) -> dict[str, Any]:
    """Scores with many or few ties, both classes, weights or none; counts of any draw.

    Weights that are no sums of powers of two round otherwise in another order, in evaluate too:
    those rows stand in the order that is documented.
    """
    size = draw(st.integers(2, 24))
    most = draw(st.sampled_from([1, 4, 60]))

    def column(values: st.SearchStrategy) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=size, max_size=size)))

    scores = column(st.integers(-most, most)).astype(float)
    novel = column(st.booleans())
    novel[:2] = True, False
    kind = draw(st.sampled_from(["none", "exact", "rounded"]))
    weights = None
    if kind != "none":
        numbers = [0, 0.25, 1, 1.5] if kind == "exact" else [0, 0.1, 0.3, 1 / 3, 7]
        weights = column(st.sampled_from(numbers)).astype(float)
        weights[:2] = 0.5, 0.7
    counts = np.stack([column(st.integers(0, 3)) for _ in range(4)])
    counts[:, :2] += draw(st.integers(0, 1))
    counts[:, 1] += counts.sum(axis=1) == 0
    classes = None
    if draw(st.booleans()):
        classes = (column(st.sampled_from("ab")), column(st.sampled_from("ab")))
    return {
        "scores": scores,
        "novel": novel,
        "weights": weights,
        "classes": classes,
        "counts": counts,
        "rounded": kind == "rounded",
    }


def sorted_samples(data: dict[str, Any], convention: Convention) -> dict[str, Any]:
    """From the most to the least positive score, then by truth and weight."""
    higher = (convention.positive == "novel") == (convention.score_direction == "higher_is_novel")
    falling = -data["scores"] if higher else data["scores"]
    order = np.lexsort((data["weights"], data["novel"], falling))
    changed = {key: data[key][order] for key in ("scores", "novel", "weights")}
    changed["counts"] = data["counts"][:, order]
    if data["classes"] is not None:
        changed["classes"] = tuple(values[order] for values in data["classes"])
    return data | changed


def check_draws(data: dict[str, Any], convention: Convention) -> None:
    if data["rounded"]:
        data = sorted_samples(data, convention)
    given = {key: data[key] for key in ("scores", "novel", "weights", "classes")}
    found = resampled(convention=convention, counts=data["counts"], **given)
    for counts, row in zip(data["counts"], found.iter_rows(named=True), strict=True):
        expected = repeated_values(counts, convention=convention, **given)
        assert list(row) == list(expected)
        for metric, value in expected.items():
            wanted = None if value is None else pytest.approx(value, abs=1e-9, rel=0)
            assert row[metric] == wanted, metric


@pytest.mark.parametrize("name", CONVENTIONS)
@settings(max_examples=60, derandomize=True)
@given(data=draws_of_samples())
def test_draws_are_evaluations_of_repeated_rows(name: str, data: dict[str, Any]) -> None:
    check_draws(data, find_convention(name))


@settings(max_examples=200, derandomize=True)
@given(data=draws_of_samples(), settings_=st.data())
def test_draws_follow_every_rule_of_a_convention(
    data: dict[str, Any], settings_: st.DataObject
) -> None:
    def one(*values: Any) -> Any:
        return settings_.draw(st.sampled_from(values))

    convention = Convention(
        name="any",
        positive=one("novel", "known"),
        inside=one("novel", "known"),
        score_direction=one("higher_is_novel", "higher_is_known"),
        pr_area=one("trapezoid", "average_precision"),
        roc_drop_intermediate=one(True, False),
        tpr_target=one(0.1, 0.5, 0.75, 0.95, 1.0),
        ppv_target=one(None, 0.25, 0.5, 0.6, 1.0),
        ppv_rule=one("lowest_threshold", "smallest_precision_at_least"),
        fpr_rule=one(None, "interpolated", "first_threshold"),
        normal_share=one(None, 0.3, 0.75),
    )
    check_draws(data, convention)


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("places", [1, 9])
def test_larger_draws_too(name: str, places: int) -> None:
    """Sums of 700 weights that are rounded, runs of collinear points, a near-perfect detector."""
    generator = np.random.default_rng(3)
    novel = generator.random(700) < 0.3
    data = {
        "scores": np.round(generator.normal(novel * 3.0), places),
        "novel": novel,
        "classes": (novel * 1, generator.integers(0, 2, 700)),
        "counts": np.stack([generator.integers(0, 3, 700), np.ones(700, dtype=int)]),
    }
    check_draws(data | {"weights": None, "rounded": False}, find_convention(name))
    for weights in (generator.random(700), np.full(700, 0.1)):
        check_draws(data | {"weights": weights, "rounded": True}, find_convention(name))


def test_collinear_points_are_those_of_one_draw() -> None:
    """The first draw ends at (1, 1); the next goes on to (2, 2) and (3, 3), by the same steps."""
    convention = OPENOOD.model_copy(update={"tpr_target": 0.5})
    counts = [[1, 1, 0, 0], [2, 2, 1, 1]]
    found = resampled([2, 2, 1, 1], [True, False] * 2, convention, counts)
    assert found["fpr50"].to_list() == pytest.approx([1, 2 / 3])


# ---- what is drawn


def naive_bounds(scores: np.ndarray, novel: np.ndarray, draws: list[np.ndarray]) -> dict:
    values = pl.concat(
        evaluate(scores.repeat(times), novel.repeat(times), OPENOOD).select("metric", "value")
        for times in draws
    )
    return {
        metric: tuple(np.percentile(group["value"].to_numpy(), [2.5, 97.5]))
        for (metric,), group in values.group_by("metric")
    }


def drawn(scores: np.ndarray, novel: np.ndarray, sequences: Any, draws: int) -> np.ndarray:
    """Counts of `intervals` in the order of the input."""
    rows = module._rows(scores, novel, OPENOOD, None, None)
    blocks = module._draws(rows.novel, module._units(rows.order, sequences), 5, draws)
    counts = np.empty((draws, scores.size), dtype=int)
    counts[:, rows.order] = np.concatenate(list(blocks))
    return counts


def test_bounds_are_percentiles_of_evaluate_over_the_draws() -> None:
    scores, novel = simulated(1, 30, 20)
    sequences = [None if row % 3 == 0 else f"s{row % 7}" for row in range(50)]
    for names in (None, sequences):
        counts = drawn(scores, novel, names, 60)
        expected = naive_bounds(scores, novel, list(counts))
        frame = intervals(scores, novel, OPENOOD, sequences=names, seed=5, draws=60)
        assert dict(frame.schema) == INTERVALS
        assert frame["metric"].to_list() == evaluate(scores, novel, OPENOOD)["metric"].to_list()
        for metric, low, high in frame.iter_rows():
            assert (low, high) == pytest.approx(expected[metric], abs=1e-9), metric


def test_shares_are_drawn_as_the_metrics_are() -> None:
    """The share of known samples of the right class is the metric `acc`."""
    scores, novel = simulated(1, 60, 20)
    right = np.random.default_rng(0).random(80) < 0.7
    classes = (np.zeros(80), np.where(right, 0, 1))
    sequences = [f"{'novel' if novel[row] else 'known'}-{row % 11}" for row in range(80)]
    frame = intervals(scores, novel, OPENOOD, classes=classes, sequences=sequences, seed=5)
    known = [name for name in sequences if name.startswith("known")]
    hits = np.stack([right[:60], ~right[:60]], 1)
    bounds = share_intervals(hits, novel[:60], sequences=known, seed=5)
    accuracy = frame.filter(metric="acc").select("low", "high").row(0)
    assert tuple(bounds[0]) == pytest.approx(accuracy) and accuracy[0] < accuracy[1]
    assert bounds[1] == pytest.approx(1 - bounds[0, ::-1])
    order = np.random.default_rng(1).permutation(60)
    again = [known[place] for place in order]
    mixed = share_intervals(hits[order], novel[:60], sequences=again, seed=5)
    np.testing.assert_array_equal(mixed, bounds)


def test_known_and_novel_samples_are_drawn_apart() -> None:
    scores, novel = simulated(2, 40, 9)
    counts = drawn(scores, novel, None, 300)
    assert (counts[:, novel].sum(axis=1) == 9).all()
    assert (counts[:, ~novel].sum(axis=1) == 40).all()
    assert counts.mean(axis=0) == pytest.approx(1, abs=0.25)
    assert counts.var() == pytest.approx(1, abs=0.1)  # about Poisson
    frame = intervals(scores, novel, OPENOOD, seed=0, draws=50)
    assert frame.filter(pl.col("metric") == "skew").row(0) == ("skew", 9 / 49, 9 / 49)


def test_sequences_are_drawn_whole_and_by_whether_they_show_novelty() -> None:
    scores, novel = simulated(2, 40, 20)
    sequences = ["a"] * 30 + ["b"] * 20 + ["c"] * 6 + [None] * 4  # b is mixed
    counts = drawn(scores, novel, sequences, 200)
    for part in (slice(0, 30), slice(30, 50), slice(50, 56)):
        assert (counts[:, part] == counts[:, part.start : part.start + 1]).all()
    assert (counts[:, 0] == 1).all()  # the only one without novelty
    assert (counts[:, [30, 50, 56, 57, 58, 59]].sum(axis=1) == 6).all()
    assert len(np.unique(counts[:, 56:], axis=0)) > 20


def test_copies_of_a_sample_in_its_sequence_add_no_certainty() -> None:
    scores, novel = simulated(4, 25, 15)
    names = [f"s{row:02}" for row in range(40)]
    for convention in CONVENTIONS.values():
        once = intervals(scores, novel, convention, sequences=names, seed=3, draws=80)
        copied = intervals(
            scores.repeat(3),
            novel.repeat(3),
            convention,
            sequences=np.repeat(names, 3).tolist(),
            seed=3,
            draws=80,
        )
        areas = pl.col("metric").is_in(["auroc", "aupr", "average_precision", "skew"])
        for one, other in zip(
            once.filter(areas).iter_rows(), copied.filter(areas).iter_rows(), strict=True
        ):
            assert other[1:] == pytest.approx(one[1:], abs=1e-9)


@pytest.mark.parametrize("name", ["novelcraft-2022", "threedos", "openood"])
@pytest.mark.parametrize("with_sequences", [False, True])
def test_same_bits_in_any_row_order_and_with_any_block(
    name: str, with_sequences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, novel = simulated(6, 60, 40)
    generator = np.random.default_rng(0)
    columns = {
        "scores": scores,
        "novel": novel,
        "weights": generator.choice([0.1, 0.3, 1 / 3], 100),
        "true": generator.choice(["a", "b"], 100),
        "predicted": generator.choice(["a", "b"], 100),
        "sequence": np.array([None, *"uvwxyz"], dtype=object)[generator.integers(0, 7, 100)],
    }

    def run(order: np.ndarray, weighted: bool) -> pl.DataFrame:
        rows = {key: values[order] for key, values in columns.items()}
        return intervals(
            rows["scores"],
            rows["novel"],
            find_convention(name),
            weights=rows["weights"] if weighted else None,
            classes=(rows["true"], rows["predicted"]),
            sequences=rows["sequence"].tolist() if with_sequences else None,
            seed=9,
            draws=70,
        )

    for weighted in (False, True):
        first = run(np.arange(100), weighted)
        assert first.equals(run(generator.permutation(100), weighted))
        with monkeypatch.context() as patch:
            patch.setattr(module, "BLOCK", 700)
            assert first.equals(run(np.arange(100), weighted))


def test_the_seed_decides() -> None:
    scores, novel = simulated(7, 50, 50)
    found = [intervals(scores, novel, OPENOOD, seed=seed, draws=40) for seed in (1, 1, 2)]
    assert found[0].equals(found[1])
    assert not found[0].equals(found[2])


# ---- what has no value, what is refused


@pytest.mark.parametrize("kind", [True, False])
def test_one_class_has_no_intervals(kind: bool) -> None:
    classes = (["a", "a", "b"], ["a", "b", "b"])
    frame = intervals([1, 2, 3], [kind] * 3, OPENOOD, classes=classes, seed=0, draws=200)
    bounds = {metric: (low, high) for metric, low, high in frame.iter_rows()}
    assert bounds.pop("skew") == (kind, kind)
    acc = bounds.pop("acc")
    assert acc == ((None, None) if kind else (0, 1))
    assert set(bounds.values()) == {(None, None)}


def test_bounds_are_of_the_draws_with_a_value() -> None:
    """All is flagged where a draw lacks the known sample below the novel ones: 35 % of them."""
    convention = find_convention("novelcraft-tmlr")
    scores, novel = np.array([0, 2, 3, 4, 5, 1]), np.array([0, 0, 0, 0, 0, 1])
    counts = drawn(scores, novel, None, 400)
    found = resampled(scores, novel, convention, counts)["tnr_at_tpr95"]
    assert (found.is_null().to_numpy() == (counts[:, 0] == 0)).all()
    assert 0.25 < found.null_count() / 400 < 0.45
    frame = intervals(scores, novel, convention, seed=5, draws=400)
    bounds = frame.filter(pl.col("metric") == "tnr_at_tpr95").row(0)[1:]
    assert bounds == pytest.approx(np.percentile(found.drop_nulls(), [2.5, 97.5]))


@pytest.mark.parametrize(("lacking", "null"), [(0, False), (50, False), (51, True), (100, True)])
def test_null_where_more_than_half_of_the_draws_have_no_value(
    lacking: int, null: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.where(np.arange(100) < lacking, np.nan, 0.5)
    monkeypatch.setattr(module, "_values", lambda *_: np.tile(values[:, None], 7))
    scores, novel = simulated(1, 10, 10)
    frame = intervals(scores, novel, OPENOOD, seed=0, draws=100)
    assert frame["low"].to_list() == frame["high"].to_list() == [None if null else 0.5] * 7


def test_null_where_the_metric_has_no_value() -> None:
    """The novel sample has the lowest score, but a third of the draws lack it."""
    convention = find_convention("novelcraft-tmlr")
    frame = intervals([0, 1, 1, 1, 2, 3], [1, 0, 0, 0, 1, 1], convention, seed=0, draws=100)
    bounds = {metric: low for metric, low, _ in frame.iter_rows()}
    assert bounds["tnr_at_tpr95"] is None
    assert bounds["auroc"] is not None


def test_sequences_without_a_known_sample_in_a_draw() -> None:
    """All known samples are in one mixed sequence, which a third of the draws lack."""
    scores, novel = [1, 2, 3, 4, 5], [False, False, True, True, True]
    names = ["m", "m", "m", None, None]
    counts = drawn(np.array(scores, dtype=float), np.array(novel), names, 300)
    lacking = counts[:, 0] == 0
    assert 0.2 < lacking.mean() < 0.4
    found = resampled(scores, novel, OPENOOD, counts)
    assert (found["auroc"].is_null().to_numpy() == lacking).all()
    assert (found["skew"].to_numpy() == 1).tolist() == lacking.tolist()
    frame = intervals(scores, novel, OPENOOD, sequences=names, seed=5, draws=300)
    assert frame["low"].null_count() == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draws": 0}, "draws is 0"),
        ({"sequences": ["a"]}, "sequences has 1 values, expected 2"),
        ({"scores": [1.0, float("nan")]}, "not finite"),
        ({"weights": [1.0, 0.0]}, "all zero"),
    ],
)
def test_refused_input(changed: dict[str, Any], message: str) -> None:
    given = {"scores": [1.0, 2.0], "novel": [False, True], "seed": 0} | changed
    with pytest.raises(ConfigError, match=message):
        intervals(convention=OPENOOD, **given)


def test_refused_counts() -> None:
    with pytest.raises(ConfigError, match=r"counts have shape \(2,\), expected \(draws, 2\)"):
        resampled([1.0, 2.0], [False, True], OPENOOD, [1, 1])


# ---- statistics


def test_intervals_hold_the_truth_in_about_95_of_100_sets() -> None:
    """AUROC of two normal distributions one standard deviation apart: Phi(1 / sqrt 2)."""
    truth = (1 + erf(0.5)) / 2
    held = 0
    for number in range(200):
        generator = np.random.default_rng([17, number])
        novel = np.arange(120) >= 60
        frame = intervals(generator.normal(novel * 1.0), novel, OPENOOD, seed=number, draws=300)
        low, high = frame.filter(pl.col("metric") == "auroc").row(0)[1:]
        held += low <= truth <= high
    assert 180 <= held <= 196


def test_sequences_widen_the_interval_of_samples_that_are_alike() -> None:
    generator = np.random.default_rng(8)
    novel = (np.arange(60) >= 30).repeat(10)
    scores = generator.normal(size=60).repeat(10) + 0.1 * generator.normal(size=600) + novel
    names = [f"s{number}" for number in np.arange(60).repeat(10)]
    width = {}
    for key, sequences in (("samples", None), ("sequences", names)):
        frame = intervals(scores, novel, OPENOOD, sequences=sequences, seed=1, draws=300)
        low, high = frame.filter(pl.col("metric") == "auroc").row(0)[1:]
        width[key] = high - low
    assert 2 < width["sequences"] / width["samples"] < 4.5  # near sqrt(10)
