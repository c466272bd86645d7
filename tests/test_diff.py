"""`novelty diff`: what changed between two versions of a table, or any two Parquet files."""

import math
import os
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.cli import main
from schemas.errors import ConfigError, LakeError, SourceError
from tasks.operations.diff import TableDiff, diff_tables, show_diff
from tasks.operations.diff_sides import find_side, previous_side
from tests.small_lake import put_table
from tests.toy import build_toy, write_raw

NAN = math.nan


def compare(folder: Path, before: pl.DataFrame, after: pl.DataFrame, **options) -> TableDiff:
    for name, frame in (("before", before), ("after", after)):
        frame.write_parquet(folder / f"{name}.parquet")
    sides = [find_side(str(folder / f"{name}.parquet"), folder) for name in ("before", "after")]
    return diff_tables(*sides, **({"key": ("id",)} | options))


BEFORE = pl.DataFrame(
    {
        "id": [1, 2, 3, 4],
        "score": [0.5, NAN, None, 1.0],
        "runs": [[1, 2], [], None, [NAN]],
        "png": [b"\x00a", b"", None, b"\xff"],
    },
    schema_overrides={"runs": pl.List(pl.Float64)},
)
AFTER = pl.DataFrame(
    {
        "id": [5, 4, 3, 2],
        "score": [9.0, NAN, None, NAN],
        "runs": [[1, 2], [NAN], [], []],
        "png": [b"new", b"\xfe", None, b""],
    },
    schema_overrides={"runs": pl.List(pl.Float64)},
)


def test_rows_by_key_and_values_by_column(tmp_path):
    diff = compare(tmp_path, BEFORE, AFTER)
    assert diff.rows == {"added": 1, "removed": 1, "changed": 2}
    assert dict(diff.by_column.iter_rows()) == {"png": 1, "runs": 1, "score": 1}
    assert not diff.same
    changes = diff.examples.select("id", "change", "column", "before", "after").rows()
    assert changes[0] == (1, "removed", None, None, None)
    assert changes[1] == (3, "changed", "runs", None, "[]")
    assert changes[2][:3] == (4, "changed", "png")
    assert changes[2][3].endswith(", 1 bytes") and changes[2][3] != changes[2][4]
    assert changes[3:] == [(4, "changed", "score", "1.0", "nan"), (5, "added", None, None, None)]


def test_nan_null_lists_and_binary_equal_themselves(tmp_path):
    diff = compare(tmp_path, BEFORE, BEFORE.reverse())
    assert diff.files_read == 2, "other bytes, so the rows were compared"
    assert diff.same and not diff.examples.height


def test_columns_added_removed_and_retyped(tmp_path):
    before = pl.DataFrame({"id": [1, 2], "n": [1, 2], "word": [1, 2], "gone": ["x", "y"]})
    after = pl.DataFrame(
        {"id": [1, 2], "n": [1.0, 2.5], "word": ["1", "two"], "come": [True, False]}
    )
    diff = compare(tmp_path, before, after)
    assert diff.columns.rows() == [
        ("gone", "removed", "VARCHAR", None),
        ("come", "added", None, "BOOLEAN"),
        ("n", "retyped", "BIGINT", "DOUBLE"),
        ("word", "retyped", "BIGINT", "VARCHAR"),
    ]
    assert dict(diff.by_column.iter_rows()) == {"n": 1, "word": 1}
    same_rows = compare(tmp_path, before, before.with_columns(pl.col("n").cast(pl.Int32)))
    assert same_rows.rows == {"added": 0, "removed": 0, "changed": 0}
    assert not same_rows.same, "another schema is a difference"


def test_key_with_null_nan_several_columns_and_clashing_names(tmp_path):
    before = pl.DataFrame({"change": ["a", None], "at": [NAN, 1.0], "k1": [1, 2]})
    after = before.with_columns(pl.col("k1") + 1)
    diff = compare(tmp_path, before, after, key=("change", "at"))
    assert diff.rows == {"added": 0, "removed": 0, "changed": 2}
    assert diff.examples.columns == ["change_key", "at", "change", "column", "before", "after"]
    assert diff.examples["change_key"].to_list() == [None, "a"]


def test_out_holds_every_change_and_examples_only_the_first(tmp_path):
    before = pl.DataFrame({"id": range(50), "x": range(50), "y": [0.0] * 50})
    after = before.with_columns(
        pl.col("x") + 1, y=pl.when(pl.col("id") > 39).then(1.0).otherwise(0)
    )
    out = tmp_path / "deep" / "changes.parquet"
    diff = compare(tmp_path, before, after, examples=3, out=out)
    written = pl.read_parquet(out)
    assert written.group_by("column").len().sort("column").rows() == [("x", 50), ("y", 10)]
    assert written["id"].is_sorted()
    assert written.filter(id=40, column="y").select("before", "after").row(0) == ("0.0", "1.0")
    assert diff.examples.group_by("column").len().sort("column").rows() == [("x", 3), ("y", 3)]
    assert [path.name for path in out.parent.iterdir()] == [out.name], "no temporary file stays"


def test_what_is_no_key_is_said(tmp_path):
    twice = pl.DataFrame({"id": [1, 1], "x": [1, 2]})
    with pytest.raises(ConfigError, match=r"id is no key of .*before.parquet: \(1,\)"):
        compare(tmp_path, twice, twice.reverse())
    with pytest.raises(ConfigError, match="name its columns with --key"):
        compare(tmp_path, BEFORE, AFTER, key=())
    with pytest.raises(ConfigError, match=r"needs nonsense, which is not in both .* of: id, score"):
        compare(tmp_path, BEFORE, AFTER, key=("nonsense",))


ROWS = st.dictionaries(
    st.integers(0, 12),
    st.tuples(
        st.none() | st.sampled_from([0.0, 1.5, NAN]),
        st.none() | st.lists(st.sampled_from([1, 2]), max_size=2),
    ),
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(old=ROWS, new=ROWS)
def test_counts_agree_with_plain_python(tmp_path_factory, old, new):
    def frame(rows: dict) -> pl.DataFrame:
        data = [(key, *values) for key, values in rows.items()]
        schema = {"id": pl.Int64, "x": pl.Float64, "l": pl.List(pl.Int64)}
        return pl.DataFrame(data, schema=schema, orient="row")

    def spelt(rows: dict) -> dict:
        return {key: repr(values) for key, values in rows.items()}

    diff = compare(tmp_path_factory.mktemp("pair"), frame(old), frame(new))
    first, second = spelt(old), spelt(new)
    assert diff.rows == {
        "added": len(second.keys() - first.keys()),
        "removed": len(first.keys() - second.keys()),
        "changed": sum(first[key] != second[key] for key in first.keys() & second.keys()),
    }
    assert diff.same == (first == second)


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """A lake whose table toy/readings has two versions: line 1 of f1.txt changed, f5.txt went."""
    root = tmp_path_factory.mktemp("lake")
    write_raw(root / "raw")
    build_toy(root / "lake", root / "raw")
    for manifest in (root / "lake").glob("toy/*/versions/*/_manifest.json"):
        os.utime(manifest, (1_000_000, 1_000_000))
    changed = root / "raw" / "f1.txt"
    lines = changed.read_text().splitlines()
    changed.write_text("\n".join([lines[0], "b,49.5", *lines[2:]]) + "\n")
    (root / "raw" / "f5.txt").unlink()
    build_toy(root / "lake", root / "raw")
    return root / "lake"


def test_current_against_previous_reads_only_what_changed(lake, monkeypatch):
    before, after = previous_side("toy/readings", lake), find_side("toy/readings", lake)
    shared = set(before.digests) & set(after.digests)
    assert len(shared) == 4
    damaged = {path for path in after.files if after.digests[after.files.index(path)] in shared}
    hidden = [path.rename(path.with_suffix(".hidden")) for path in sorted(damaged)]
    try:
        diff = diff_tables(before, after)
    finally:
        for path in hidden:
            path.rename(path.with_suffix(".parquet"))
    assert diff.rows == {"added": 0, "removed": 20, "changed": 1}
    assert (diff.files_read, diff.files_skipped) == (3, 4)
    values = diff.examples.filter(column="value").select("file", "line", "after").row(0)
    assert values == ("f1.txt", 1, "49.5")


def test_every_way_to_name_a_side(lake, tmp_path):
    current = find_side("toy/readings", lake)
    (old,) = [
        path.name
        for path in (lake / "toy/readings/versions").iterdir()
        if path.name != (lake / "toy/readings/current").resolve().name
    ]
    assert find_side(f"toy/readings@{old[:8]}", lake) == previous_side("toy/readings", lake)
    assert find_side(f"{lake}:toy/readings", tmp_path).digests == current.digests
    for path in (lake / "toy/readings/current", lake / "toy/readings"):
        assert find_side(str(path), tmp_path).digests == current.digests
    plain = tmp_path / "plain"
    plain.mkdir()
    pl.read_parquet(lake / "toy/readings/current/*.parquet").write_parquet(plain / "x.parquet")
    assert diff_tables(current, find_side(str(plain), lake)).same, "other files, same rows"
    assert find_side("toy/readings", lake).key == ("file", "line")


def test_wrong_names_list_what_there_is(lake, tmp_path):
    with pytest.raises(ConfigError, match=r"0 versions of toy/readings begin with 'zz'.*current"):
        find_side("toy/readings@zz", lake)
    with pytest.raises(LakeError, match="no table toy/nonsense"):
        find_side("toy/nonsense", lake)
    with pytest.raises(SourceError, match="is no Parquet file, no folder of them and no table"):
        find_side(str(tmp_path / "nowhere" / "at" / "all"), lake)
    with pytest.raises(ConfigError, match="name a second side"):
        previous_side(str(tmp_path), lake)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(LakeError, match=r"cannot read .*bad\.parquet"):
        find_side(str(tmp_path / "bad.parquet"), lake)


def test_command_exits_like_diff(lake, tmp_path, capsys):
    out = tmp_path / "changes.parquet"
    assert main(["diff", "toy/readings", "--lake", str(lake), "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "rows by file,line: 0 added, 20 removed, 1 changed" in printed
    assert "3 files read, 4 equal ones skipped" in printed and "49.5" in printed
    assert pl.read_parquet(out).height >= 21
    assert main(["diff", "toy/readings", "toy/readings", "--lake", str(lake)]) == 0
    assert "same; 0 files read" in capsys.readouterr().out
    assert main(["diff", "toy/readings@zz", "toy/readings", "--lake", str(lake)]) == 2
    words = ["diff", str(out), str(out), "--key", "nonsense", "--lake", str(lake)]
    assert main(words) == 2
    assert "novelty: " in capsys.readouterr().err


def test_one_version_only(tmp_path, capsys):
    write_raw(tmp_path / "raw", files=1)
    build_toy(tmp_path / "lake", tmp_path / "raw")
    assert main(["diff", "toy/readings", "--lake", str(tmp_path / "lake")]) == 2
    assert "has one version only" in capsys.readouterr().err


def test_previous_is_the_newest_of_the_others(tmp_path):
    for age, frames in ((30, 1), (10, 2), (20, 3), (40, 4)):
        rows = [{"class": "normal", "subset": "", "episode": 0, "frames": frames}]
        version = put_table(tmp_path, "novelcraft", "episodes", rows)
        os.utime(version.folder / "_manifest.json", (1_000_000 - age, 1_000_000 - age))
    diff = diff_tables(
        previous_side("novelcraft/episodes", tmp_path), find_side("novelcraft/episodes", tmp_path)
    )
    assert diff.examples.select("column", "before", "after").rows() == [("frames", "2", "4")]


def test_a_file_twice_is_not_the_file_once(tmp_path):
    for name in ("once/a", "twice/a", "twice/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        BEFORE.write_parquet(tmp_path / f"{name}.parquet")
    sides = [find_side(str(tmp_path / name), tmp_path) for name in ("twice", "once")]
    assert diff_tables(*sides, key=("id",)).rows == {"added": 0, "removed": 4, "changed": 0}


def test_long_values_are_cut_on_the_screen(tmp_path, capsys):
    before = pl.DataFrame({"id": [1], "text": ["x" * 500]})
    show_diff(compare(tmp_path, before, before.with_columns(text=pl.lit("y" * 500))))
    printed = capsys.readouterr().out
    assert "x" * 20 in printed and "…" in printed
    assert sum(line.count("x") for line in printed.splitlines()) < 60 + len(str(tmp_path)) * 2
