import polars as pl
import pytest

from schemas.errors import SourceError
from tasks.kowl.drift import compare_lists, compare_snapshots
from tasks.kowl.lists import read_list
from tests.shared import shared_path

ROWS = {"youtube_id": pl.String, "time_start": pl.Int32, "time_end": pl.Int32}
ROWS |= {"label": pl.String, "split": pl.String}


def rows(*listed: tuple) -> pl.DataFrame:
    return pl.DataFrame(
        [(video, start, start + 10, label, split) for video, start, label, split in listed],
        schema=ROWS,
        orient="row",
    )


BEFORE = rows(
    ("a", 0, "x", "train"),
    ("b", 0, "x", "train"),
    ("c", 0, "x", "train"),
    ("d", 0, None, "test"),
    ("e", 0, None, "test"),
    ("f", 0, "x", "train"),
)
AFTER = rows(
    ("a", 0, "x", "train"),
    ("b", 0, "y", "train"),
    ("c", 0, "y", "test"),
    ("d", 0, None, "test"),
    ("e", 0, "x", "test"),
    ("f", 1, "x", "train"),
)


def test_every_change_is_a_row():
    drift = compare_snapshots(BEFORE, AFTER)
    assert drift.rows.rows() == [
        ("b", 0, 10, "relabelled", "x", "y", "train", "train"),
        ("c", 0, 10, "relabelled", "x", "y", "train", "test"),
        ("c", 0, 10, "moved", "x", "y", "train", "test"),
        ("e", 0, 10, "relabelled", None, "x", "test", "test"),
        ("f", 0, 10, "removed", "x", None, "train", None),
        ("f", 1, 11, "added", None, "x", None, "train"),
    ]
    assert drift.summary.row(0, named=True) == {
        "before": 6,
        "after": 6,
        "unchanged": 2,
        "added": 1,
        "removed": 1,
        "relabelled": 3,
        "moved": 1,
    }


def test_no_change_and_the_way_back():
    same = compare_snapshots(BEFORE, BEFORE.reverse())
    assert same.rows.is_empty()
    assert same.summary["unchanged"][0] == 6
    back = compare_snapshots(AFTER, BEFORE).summary.row(0, named=True)
    assert (back["added"], back["removed"], back["relabelled"]) == (1, 1, 3)


def test_from_and_to_nothing():
    assert compare_snapshots(BEFORE.clear(), BEFORE).summary["added"][0] == 6
    assert compare_snapshots(BEFORE, BEFORE.clear()).summary["removed"][0] == 6


PAIRS = [
    ("snapshots/kinetics400_val_2017", "kinetics400_validate", "validate"),
    ("snapshots/kinetics400_validate_b", "kinetics400_validate", "validate"),
    ("snapshots/kinetics600_val_2018", "kinetics600_validate", "validate"),
    ("snapshots/kinetics600_test_2018", "kinetics600_test", "test"),
    ("snapshots/kinetics700_2019_val", "kinetics700_2020_validate", "validate"),
    ("snapshots/kinetics700_2020_validate_2021-03", "kinetics700_2020_validate", "validate"),
]


@pytest.mark.parametrize(("older", "newer", "split"), PAIRS)
def test_real_snapshots_against_sets(older, newer, split):
    before, after = (
        read_list(
            shared_path(f"kinetics/{name}.csv.gz").read_bytes(),
            name=name,
            release="r",
            split=split,
        ).rows
        for name in (older, newer)
    )
    drift = compare_snapshots(before, after)
    key = ["youtube_id", "time_start", "time_end"]
    old, new = (
        {tuple(row[:3]): row[3] for row in frame.select(*key, "label").rows()}
        for frame in (before, after)
    )
    differ = sum(old[clip] != new[clip] for clip in old.keys() & new.keys())
    assert drift.summary.row(0, named=True) == {
        "before": len(old),
        "after": len(new),
        "unchanged": len(old.keys() & new.keys()) - differ,
        "added": len(new.keys() - old.keys()),
        "removed": len(old.keys() - new.keys()),
        "relabelled": differ,
        "moved": 0,
    }
    assert drift.summary["removed"][0] > 0 or drift.summary["added"][0] > 0


def test_clips_that_moved_between_releases():
    """K400 validate against K600 test: 430 clips changed split (unified_split_combinations)."""
    before, after = (
        read_list(shared_path(f"kinetics/{n}.csv.gz").read_bytes(), name=n, release="r").rows
        for n in ("kinetics400_validate", "kinetics600_test")
    )
    combined = pl.read_csv(shared_path("kinetics/expected/unified_split_combinations.csv"))
    moved = combined.filter(
        (pl.col("split_kinetics400") == "validate") & (pl.col("split_kinetics600") == "test")
    )["rows"].sum()
    assert compare_snapshots(before, after).summary["moved"][0] == moved == 430


def test_between_folders_of_a_release_clips_move(tmp_path):
    header = "label,youtube_id,time_start,time_end\n"
    clips = {name: f"luge,{name * 11},0,10\n" for name in "abc"}
    lists = {
        "old": {"train.csv": "ab", "k600_validate.csv": "c"},
        "new": {"train.csv": "a", "k600_validate.csv": "bc"},
    }
    for folder, files in lists.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").write_text("not a list")
        for name, inside in files.items():
            text = header + "".join(clips[letter] for letter in inside)
            (tmp_path / folder / name).write_text(text)
    drift = compare_lists(tmp_path / "old", tmp_path / "new")
    moved = drift.rows.select("youtube_id", "change", "split_before", "split_after").rows()
    assert moved == [("b" * 11, "moved", "train", "validate")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="has no list"):
        compare_lists(tmp_path / "old", tmp_path / "empty")
