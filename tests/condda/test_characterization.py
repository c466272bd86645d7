"""Clusters against novel classes: by hand, by plain loops, and whatever the column order."""

import csv
from itertools import permutations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from schemas.errors import RecordError
from tasks.condda.characterization import (
    MEASURES,
    characterize,
    match_clusters,
    pad_blocks,
)
from tasks.condda.metrics import Columns
from tests.shared import shared_path

FIRST = Columns(known=2, unknown="first")  # 0 unknown, 1 and 2 known, 3.. discovered


def one_hot(chosen, width):
    return np.eye(width)[np.asarray(chosen)]


def value(frame: pl.DataFrame, metric: str, part: str = "post", novel_class: int | None = None):
    rows = frame.filter(
        pl.col("part") == part,
        pl.col("metric") == metric,
        pl.col("novel_class").eq_missing(novel_class),
    )
    return rows["value"].item()


@st.composite
def drawn_runs(draw):
    """Choices, labels (novel ones negative or above K), flags; every place of the unknown column.

    Probabilities are one-hot with noise below a half, so that no row has a tie.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    place = draw(st.sampled_from(["first", "after_known", "last", "none"]))
    columns = Columns(draw(st.integers(1, 3)), place)
    clusters = draw(st.integers(0, 4))
    width = columns.known + clusters + (place != "none")
    rows = draw(st.integers(1, 40))
    labels = random.choice([-9, -2, *range(columns.known + 1), 7], rows)
    noise = random.random((rows, width)) / 2.1
    probabilities = np.maximum(one_hot(random.integers(0, width, rows), width), noise)
    novel = np.arange(rows) >= draw(st.integers(0, rows))
    return probabilities, labels, novel, columns


# ---------------------------------------------------------------- by hand


def test_a_small_test_by_hand():
    labels = [1, 2, -5, -5, 1, -7, -7, -5, -7, 2]
    chosen = [1, 2, 00, +4, 1, +4, +3, +4, +3, 1]
    novel = np.arange(10) >= 2
    found = characterize(one_hot(chosen, 6), labels, novel, FIRST)
    assert dict(found.schema) == MEASURES
    assert value(found, "rows") == 8
    assert value(found, "rows", "all") == 10
    assert value(found, "novel_classes") == 2
    assert value(found, "clusters_used") == 2  # column 5 is there and never chosen
    # -5 is matched to 4 (2 of 3 rows), -7 to 3 (2 of 3 rows).
    assert value(found, "discovery_accuracy") == pytest.approx(4 / 6)
    assert value(found, "full_accuracy") == pytest.approx(5 / 8)
    assert value(found, "full_accuracy", "all") == pytest.approx(7 / 10)
    assert value(found, "k_plus_1_accuracy") == pytest.approx(7 / 8)
    # Columns of the part: 0 {-5}, 1 {1, 2}, 3 {-7, -7}, 4 {-5, -7, -5}.
    assert value(found, "purity") == pytest.approx((1 + 1 + 2 + 2) / 8)
    assert value(found, "nmi") == pytest.approx(
        normalized_mutual_info_score(labels[2:], chosen[2:])
    )
    assert value(found, "ari", "all") == pytest.approx(adjusted_rand_score(labels, chosen))
    assert value(found, "discovery_delay", "all", -5) == 1
    assert value(found, "discovery_delay", "all", -7) == 1


def test_stability_is_the_share_of_rounds_that_keep_the_column_of_a_class():
    # Rounds of 3. Class -5: column 3, 3, then 4; class -7: column 5 in rounds 1 and 2.
    labels = [-5, -5, 1, -5, -7, -7, -5, -5, -7]
    chosen = [+3, +3, 1, +3, +5, 00, +4, +4, +5]
    found = characterize(one_hot(chosen, 6), labels, [1] * 9, FIRST, round_size=3)
    assert value(found, "column_stability") == pytest.approx(2 / 3)
    # A class that is never discovered, or in one round alone, has no pair of rounds.
    once = characterize(one_hot([0, 3, 1], 4), [-5, -5, 1], [1, 1, 1], FIRST, round_size=2)
    assert value(once, "column_stability") is None


def test_delay_counts_from_the_first_sample_of_the_class():
    labels = [1, -5, 1, -5, -5]
    early = [3, 0, 1, 3, 3]  # column 3 is used before the class exists: that is no discovery
    found = characterize(one_hot(early, 4), labels, [0, 1, 1, 1, 1], FIRST)
    assert value(found, "discovery_delay", "all", -5) == 2
    borrowed = [1, 0, 3, 0, 3]  # the first row of the matched column is of another class
    found = characterize(one_hot(borrowed, 4), labels, [0, 1, 1, 1, 1], FIRST)
    assert value(found, "discovery_delay", "all", -5) == 1


def test_a_class_without_a_cluster_is_never_discovered():
    found = characterize(one_hot([3, 3, 0], 4), [-5, -5, -7], [1, 1, 1], FIRST)
    assert value(found, "discovery_delay", "all", -5) == 0
    assert value(found, "discovery_delay", "all", -7) is None
    nothing = characterize(one_hot([0, 0, 1], 3), [-5, -5, 1], [1, 1, 1], FIRST)
    assert value(nothing, "discovery_delay", "all", -5) is None
    assert value(nothing, "discovery_accuracy") == 0
    assert value(nothing, "k_plus_1_accuracy") == 1
    # A cluster that holds known rows only is no match.
    foreign = characterize(one_hot([0, 3], 4), [-5, 1], [1, 1], FIRST)
    assert value(foreign, "discovery_delay", "all", -5) is None


def test_no_novelty_has_no_post_part():
    found = characterize(one_hot([1, 2], 4), [1, 2], [0, 0], FIRST)
    post = found.filter(pl.col("part") == "post")
    assert post.filter(pl.col("metric") == "rows")["value"].item() == 0
    assert value(found, "nmi") is None
    assert value(found, "full_accuracy") is None
    assert value(found, "full_accuracy", "all") == 1
    assert value(found, "discovery_accuracy", "all") is None
    assert found.filter(pl.col("metric") == "discovery_delay").is_empty()


def test_the_published_characterization_of_six_columns():
    path = shared_path("sailon/sail-on-client/test_results_CONDDA.1.1.1234.csv")
    with path.open(newline="") as lines:
        posted = np.array([[float(cell) for cell in row[1:]] for row in csv.reader(lines)])
    # Chosen: cluster 0, unknown (tied with class 3), unknown, unknown. True: 1, 2, unknown, 2.
    found = characterize(posted, [1, 2, 0, 2], [1, 0, 1, 0], Columns(3, "first"))
    assert value(found, "clusters_used", "all") == 1
    assert value(found, "k_plus_1_accuracy", "all") == 0.25
    assert value(found, "discovery_delay", "all", 0) is None


# ---------------------------------------------------------------- ragged blocks


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("first", [[0.1, 0.9, 0, 0], [0.1, 0.2, 0.3, 0], [0, 0, 0, 0.7]]),
        ("after_known", [[0.1, 0.9, 0, 0], [0.1, 0.2, 0.3, 0], [0, 0, 0, 0.7]]),
        ("last", [[0.1, 0, 0, 0.9], [0.1, 0.2, 0, 0.3], [0, 0, 0, 0.7]]),
    ],
)
def test_blocks_are_padded_where_discovered_columns_stand(place, expected):
    blocks = [np.array([[0.1, 0.9]]), np.array([[0.1, 0.2, 0.3]]), np.array([[0, 0, 0, 0.7]])]
    np.testing.assert_array_equal(pad_blocks(blocks, Columns(1, place)), expected)


@settings(deadline=None, max_examples=50)
@given(drawn_runs(), st.integers(1, 39))
def test_blocks_that_lack_unused_columns_change_nothing(drawn, cut):
    probabilities, labels, novel, columns = drawn
    width = probabilities.shape[1]
    discovered = columns.discovered(width)
    end = width - (columns.unknown == "last")
    head = probabilities[:cut].copy()
    head[:, end - discovered : end] = 0
    whole = np.concatenate([head, probabilities[cut:]])
    narrow = np.delete(head, np.s_[end - discovered : end], axis=1)
    if narrow.shape[1] == 0 or not len(probabilities[cut:]):
        return
    assert_frame_equal(
        characterize([narrow, probabilities[cut:]], labels, novel, columns),
        characterize(whole, labels, novel, columns),
    )


# ---------------------------------------------------------------- properties


@settings(deadline=None, max_examples=80)
@given(drawn_runs(), st.randoms(use_true_random=False))
def test_the_order_of_discovered_columns_does_not_matter(drawn, random):
    probabilities, labels, novel, columns = drawn
    width = probabilities.shape[1]
    everywhere = np.arange(width)
    moved = everywhere[~columns.is_known(everywhere)]
    moved = moved[moved != columns.unknown_column(width)]
    order = everywhere.copy()
    order[moved] = random.sample(moved.tolist(), moved.size)
    assert_frame_equal(
        characterize(probabilities[:, order], labels, novel, columns),
        characterize(probabilities, labels, novel, columns),
        abs_tol=1e-12,
    )


@settings(deadline=None, max_examples=80)
@given(drawn_runs())
def test_bounds(drawn):
    found = characterize(*drawn)
    counted = ("rows", "clusters_used", "novel_classes", "discovery_delay")
    shares = found.filter(~pl.col("metric").is_in(counted), pl.col("value").is_not_null())
    low = pl.when(pl.col("metric") == "ari").then(-0.5).otherwise(0)
    assert shares.select(pl.col("value").is_between(low - 1e-12, 1 + 1e-12).all()).item()
    assert found.select((pl.col("value").is_null() | pl.col("value").is_finite()).all()).item()
    for part in ("all", "post"):
        if value(found, "rows", part):
            full, coarse = (value(found, f"{n}_accuracy", part) for n in ("full", "k_plus_1"))
            assert full <= coarse
    delays = found.filter(pl.col("metric") == "discovery_delay")["value"].drop_nulls()
    assert delays.is_between(0, len(drawn[1]) - 1).all()


@settings(deadline=None, max_examples=40)
@given(drawn_runs())
def test_a_perfect_agent_is_perfect(drawn):
    _, labels, novel, columns = drawn
    classes = np.unique(labels[~columns.is_known(labels)])
    width = columns.known + classes.size + (columns.unknown != "none")
    first = columns.known + (columns.unknown in ("first", "after_known"))
    chosen = labels.copy()
    for number, label in enumerate(classes):
        chosen[labels == label] = first + number
    found = characterize(one_hot(chosen, width), labels, novel, columns)
    counted = ("rows", "clusters_used", "novel_classes")
    shares = found.filter(~pl.col("metric").is_in([*counted, "discovery_delay"]))["value"]
    np.testing.assert_allclose(shares.drop_nulls(), 1)
    delays = found.filter(pl.col("metric") == "discovery_delay")["value"]
    assert delays.to_list() == [0] * classes.size
    assert value(found, "clusters_used", "all") == classes.size


# ---------------------------------------------------------------- plain loops


@settings(deadline=None, max_examples=50)
@given(drawn_runs())
def test_matching_and_purity_equal_a_plain_search(drawn):
    probabilities, labels, novel, columns = drawn
    width = probabilities.shape[1]
    chosen = probabilities.argmax(1)
    is_known = columns.is_known(labels)
    classes = sorted(set(labels[~is_known].tolist()))
    unknown = columns.unknown_column(width)
    free = [c for c in range(width) if not columns.is_known(np.array(c)) and c != unknown]
    best = 0
    for columns_of in permutations([*free, *[-1] * len(classes)], len(classes)):
        pairs = dict(zip(classes, columns_of, strict=True))
        hits = sum(pairs.get(t) == c for t, c in zip(labels.tolist(), chosen, strict=True))
        best = max(best, hits)
    found = characterize(probabilities, labels, novel, columns)
    if classes:
        expected = best / (~is_known).sum()
        assert value(found, "discovery_accuracy", "all") == pytest.approx(expected)
    pure = 0
    for column in set(chosen.tolist()):
        inside = labels[chosen == column].tolist()
        pure += max(inside.count(label) for label in inside)
    assert value(found, "purity", "all") == pytest.approx(pure / len(labels))
    matched = match_clusters(chosen, labels, columns, width)
    for label, column in matched.items():
        delay = None
        rows = [row for row, true in enumerate(labels) if true == label]
        for row in range(rows[0], len(labels)):
            if delay is None and chosen[row] == column:
                delay = row - rows[0]
        assert value(found, "discovery_delay", "all", label) == delay


@pytest.mark.parametrize(
    ("probabilities", "labels", "rule"),
    [
        ([], [1], "characterization"),
        (np.array([[0.1, 0.2]]), [1], "columns"),
        (np.array([[0.1, 0.2, float("nan")]]), [1], "classification"),
        (np.array([[0.1, 0.2, 0.3]]), [1, 2], "rows"),
        (np.array([[0.1, 0.2, 0.3]]), [0.5], "labels"),
    ],
    ids=["no blocks", "too few columns", "nan", "rows differ", "label is no number"],
)
def test_refusals(probabilities, labels, rule):
    with pytest.raises(RecordError) as raised:
        characterize(probabilities, labels, [1], FIRST)
    assert raised.value.rule == rule
