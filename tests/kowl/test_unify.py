from datetime import date

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from schemas.config import make_config
from schemas.errors import ConfigError, SourceError
from schemas.kowl import Config
from tasks.kowl.lists import ROWS
from tasks.kowl.unify import UnifySettings, unify, validate_as_test
from tests.kowl import ORDER, read_shared_releases
from tests.shared import shared_path


def rows(*listed: tuple[str, str, str | None, str, int]) -> pl.DataFrame:
    """(release, split, label, video letter, start)"""
    return pl.DataFrame(
        [
            (release, split, label, video * 11, start, start + 10, "0" * 64, date(2020, 1, 1))
            for release, split, label, video, start in listed
        ],
        schema=ROWS,
        orient="row",
    )


FOUR = rows(
    ("k1", "train", "tie", "a", 0),
    ("k2", "validate", "necktie", "a", 0),
    ("k3", "test", None, "a", 0),
    ("k2", "test", "hug", "b", 123),
    ("k3", "test", None, "c", 0),
    ("k4", "train", "new", "c", 0),
    ("k1", "train", "tie", "a", 1),
)
K = ["k1", "k2", "k3", "k4"]


def test_rules_on_four_releases():
    recent = unify(FOUR, K, UnifySettings(renames=()))
    assert recent.clips.rows() == [
        ("a" * 11 + "_000000_000010", "a" * 11, 0, 10, "necktie", "k2", "train", "k1"),
        ("a" * 11 + "_000001_000011", "a" * 11, 1, 11, "tie", "k1", "train", "k1"),
        ("b" * 11 + "_000123_000133", "b" * 11, 123, 133, "hug", "k2", "test", "k2"),
        ("c" * 11 + "_000000_000010", "c" * 11, 0, 10, "new", "k4", "test", "k3"),
    ]
    other = unify(
        FOUR, K, UnifySettings(label_rule="oldest_first", split_rule="most_recent", renames=())
    )
    assert other.clips.select("label", "label_release", "split", "release").rows() == [
        ("tie", "k1", "test", "k3"),
        ("tie", "k1", "train", "k1"),
        ("hug", "k2", "test", "k2"),
        ("new", "k4", "train", "k4"),
    ]


def test_order_of_releases_is_free():
    turned = unify(FOUR, K[::-1], UnifySettings(renames=()))
    assert turned.clips.select("label", "split", "release").rows() == [
        ("tie", "test", "k3"),
        ("tie", "train", "k1"),
        ("hug", "test", "k2"),
        ("new", "train", "k4"),
    ]


def test_long_tables():
    unified = unify(FOUR, K)
    assert unified.listings.height == FOUR.height
    assert unified.listings.row(2) == ("a" * 11 + "_000000_000010", "k3", None, "test")
    assert unified.labels.rows() == [
        ("k1", "tie", 2),
        ("k2", "hug", 1),
        ("k2", "necktie", 1),
        ("k4", "new", 1),
    ]
    assert unified.label_changes.rows() == [("k1", "k2", "tie", "necktie", 1)]


def test_renames_touch_only_labels_from_their_release():
    old, new = "tying tie", "tying necktie"
    american = "passing american football (not in game)"
    listed = rows(
        ("kinetics400", "train", old, "a", 0),
        ("kinetics600", "train", old, "b", 0),
        ("kinetics400", "train", old, "c", 0),
        ("kinetics600", "train", "hug", "c", 0),
        ("kinetics600", "train", american, "d", 0),
    )
    assert unify(listed, ORDER).clips["label"].to_list() == [
        new,
        old,
        "hug",
        american.replace("american", "American"),
    ]
    assert unify(listed, ORDER, UnifySettings(renames=())).clips["label"].to_list() == [
        old,
        old,
        "hug",
        american,
    ]
    with pytest.raises(ConfigError, match="football_case"):
        unify(listed, ORDER, UnifySettings(renames=("football",)))


@pytest.mark.parametrize("said", ["none", "", ["none"], [""], []])
def test_no_renames_can_be_said(said):
    config = make_config(Config, {"lists": ".", "unify": {"renames": said}})
    assert config.unify.renames == ()


def test_own_rename_tables_come_with_the_configuration():
    listed = rows(
        ("kinetics400", "train", "tying tie", "a", 0), ("mine", "train", "knotting ties", "b", 0)
    )
    own = {"own": [{"release": "mine", "old": "knotting ties", "new": "tying necktie"}]}
    unified = {"renames": ["kinetics400_renames", "own"], "rename_tables": own}
    config = make_config(Config, {"lists": ".", "unify": unified})
    found = unify(listed, [*ORDER, "mine"], config.unify).clips
    assert set(found["label"]) == {"tying necktie"}
    with pytest.raises(ConfigError, match="own is declared but not named"):
        make_config(Config, {"lists": ".", "unify": {"rename_tables": own}})


def test_refusals():
    with pytest.raises(ConfigError, match="k4"):
        unify(FOUR, K[:3])
    with pytest.raises(ConfigError, match="once"):
        unify(FOUR, [*K, "k1"])
    with pytest.raises(SourceError, match="aaaaaaaaaaa_000000_000010 in k1"):
        unify(pl.concat([FOUR, FOUR.head(1)]), K)


def test_nothing_in_nothing_out():
    unified = unify(FOUR.clear(), K)
    assert unified.clips.is_empty()
    assert unified.clips.schema == unify(FOUR, K).clips.schema
    assert unified.label_changes.schema == unify(FOUR, K).label_changes.schema


LISTED = st.lists(
    st.tuples(
        st.sampled_from(K),
        st.sampled_from(["train", "validate", "test"]),
        st.sampled_from([None, "x", "y"]),
        st.sampled_from("abc"),
        st.integers(0, 2),
    ),
    unique_by=lambda row: (row[0], *row[3:]),
    max_size=20,
)


@settings(max_examples=80, deadline=None)
@given(LISTED, st.permutations(K), st.randoms(use_true_random=False))
def test_against_a_plain_loop_and_whatever_the_row_order(listed, order, random):
    unified = unify(rows(*listed), order)
    expected = {}
    for _, split, label, video, start in sorted(listed, key=lambda row: order.index(row[0])):
        old_split, old_label = expected.get((video * 11, start), (split, None))
        expected[video * 11, start] = (old_split, label if label is not None else old_label)
    assert {
        (video, start): (split, label)
        for video, start, split, label in unified.clips.select(
            "youtube_id", "time_start", "split", "label"
        ).rows()
    } == expected
    random.shuffle(listed)
    for one, other in zip(unified, unify(rows(*listed), order), strict=True):
        assert_frame_equal(one, other)


@pytest.fixture(scope="module")
def real_rows():
    return pl.concat(read.rows for read in read_shared_releases())


@pytest.fixture(scope="module")
def unified(real_rows):
    return unify(real_rows, ORDER)


def expected(name: str) -> pl.DataFrame:
    return pl.read_csv(shared_path(f"kinetics/expected/{name}.csv"))


def test_unified_numbers(unified):
    clips = unified.clips
    assert clips.height == clips["sample_id"].n_unique() == 869_006
    assert clips.select("youtube_id", "time_start", "time_end").n_unique() == 869_006
    assert clips["label"].count() == 803_370
    assert clips["sample_id"].is_sorted()


def new_labels(clips: pl.DataFrame) -> list[int]:
    """Labels of all clips, then for each release those of its train part not in an earlier one."""
    counts, seen = [clips["label"].drop_nulls().n_unique()], set()
    for release in ORDER:
        part = clips.filter((pl.col("release") == release) & (pl.col("split") == "train"))
        counts.append(len(set(part["label"]) - seen))
        seen |= set(part["label"])
    return counts


def test_label_counts_by_policy(unified, real_rows):
    assert new_labels(unified.clips) == [718, 409, 227, 82]
    no_merge = unify(real_rows, ORDER, UnifySettings(renames=("kinetics400_renames",))).clips
    assert new_labels(no_merge) == [719, 410, 227, 82]
    raw = unify(real_rows, ORDER, UnifySettings(renames=())).clips
    assert new_labels(raw)[0] == 725


def test_unified_label_set(unified):
    names = expected("unified_label_set_718")
    found = unified.clips.drop_nulls("label").group_by("label").agg(pl.len().alias("unified_rows"))
    assert_frame_equal(
        found.sort("label"),
        names.select("label", "unified_rows").sort("label"),
        check_dtypes=False,
    )
    # The names of K400 and K600 in the expected file are those of the class lists.
    for release in ORDER:
        listed = unified.labels.filter(pl.col("release") == release)["label"]
        published = names.filter(pl.col(f"in_{release}_names") == 1)["label"]
        assert set(published) <= set(listed)


def test_split_combinations(unified):
    combined = expected("unified_split_combinations")
    wide = unified.listings.pivot("release", index="sample_id", values="split").join(
        unified.clips.select("sample_id", "label"), on="sample_id"
    )
    found = wide.group_by(pl.col(name).alias(f"split_{name}") for name in ORDER).agg(
        pl.len().alias("rows"), pl.col("label").count().alias("labelled_rows")
    )
    assert_frame_equal(
        found.select(combined.columns), combined, check_dtypes=False, check_row_order=False
    )


@pytest.mark.parametrize(
    ("older", "newer"), [(ORDER[0], ORDER[1]), (ORDER[0], ORDER[2]), (ORDER[1], ORDER[2])]
)
def test_label_changes(unified, older, newer):
    found = unified.label_changes.filter(
        (pl.col("older") == older) & (pl.col("newer") == newer)
    ).drop("older", "newer")
    assert found.rows() == expected(f"label_changes_{older}_to_{newer}").rows()


def test_parts_after_first_come(unified):
    parts = (
        unified.clips.drop_nulls("label")
        .group_by("release", "split")
        .agg(pl.len(), pl.col("label").n_unique())
    )
    found = {(release, split): counts for release, split, *counts in parts.rows()}
    k400, k600, k700 = ORDER
    assert found[k400, "train"] == [213_755, 409]
    assert found[k400, "validate"] == [18_035, 406]
    assert found[k400, "test"] == [35_357, 409]
    assert [found[k600, split][0] for split in ("train", "validate", "test")] == [
        234_653,
        14_631,
        29_765,
    ]
    assert found[k700, "train"][0] == 228_753
    assert found[k700, "validate"][0] == 28_421
    assert (k700, "test") not in found


def test_validate_as_test_changes_only_releases_without_labelled_test(unified):
    before, after = unified.clips, validate_as_test(unified.clips)
    changed = before.filter(before["split"] != after["split"])
    assert changed["release"].unique().to_list() == [ORDER[2]]
    assert changed["split"].unique().to_list() == ["validate"]
    assert changed.height == 28_421
    assert after.drop("split").equals(before.drop("split"))
