"""The catalogue travels with its lake, opens in DuckDB from 1.0 on, and knows past builds."""

import shutil
import struct
from pathlib import Path

import duckdb
import polars as pl
import pytest

from flows.cli import main
from schemas.errors import LakeError
from storage.catalog import open_catalog, refresh_catalog
from storage.layout import catalog_path
from storage.snapshots import current_snapshot, history
from storage.tables import current_version
from tests.evaluation.small_runs import build_small
from tests.evaluation.small_runs import write_raw as write_samples
from tests.toy import build_toy, write_raw


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    write_raw(tmp_path / "raw", files=3, lines=8)
    build_toy(tmp_path / "lake", tmp_path / "raw")
    return tmp_path / "lake"


def total(lake: Path, at: Path) -> float:
    """By DuckDB alone, with the one setting that the guide names."""
    with duckdb.connect(str(lake / "catalog.duckdb"), read_only=True) as connection:
        connection.sql(f"SET file_search_path = '{at}'")
        return connection.sql("select sum(value) from toy.readings").fetchall()[0][0]


def test_a_copied_lake_shows_its_own_rows_or_an_error(lake: Path, tmp_path: Path) -> None:
    copy, original = tmp_path / "copy", total(lake, lake)
    shutil.copytree(lake, copy, symlinks=True)
    build_toy(lake, tmp_path / "raw", scale=2.0)
    assert total(lake, lake) == 2 * original and total(copy, copy) == original
    shutil.rmtree(copy / "toy" / "readings" / "versions")
    with pytest.raises(duckdb.IOException, match="No files found"):
        total(copy, copy)


def test_a_moved_lake_works(lake: Path, tmp_path: Path, capsys) -> None:
    before = total(lake, lake)
    moved = lake.rename(tmp_path / "elsewhere")
    assert total(moved, moved) == before
    assert main(["query", "select count(*) from toy.readings", "--lake", str(moved)]) == 0
    assert "21" in capsys.readouterr().out
    with pytest.raises(duckdb.IOException, match="No files found"):
        total(moved, lake)


def test_without_the_setting_it_works_in_the_lake_folder_only(lake, tmp_path, monkeypatch) -> None:
    def count() -> int:
        with duckdb.connect(str(lake / "catalog.duckdb"), read_only=True) as connection:
            return connection.sql("select count(*) from toy.readings").fetchall()[0][0]

    monkeypatch.chdir(tmp_path)
    with pytest.raises(duckdb.IOException, match="No files found"):
        count()
    monkeypatch.chdir(lake)
    assert count() == 21


def test_a_query_in_the_folder_of_another_lake_reads_its_own(lake, tmp_path, monkeypatch) -> None:
    """A copy has versions of the same names; what became of the original's files is no matter."""
    shutil.copytree(lake, tmp_path / "copy", symlinks=True)
    before = total(lake, lake)
    first, second, _ = current_version(lake, "toy", "readings").places
    second.unlink()
    shutil.copyfile(first, second)
    monkeypatch.chdir(lake)
    assert total(tmp_path / "copy", tmp_path / "copy") == before
    with open_catalog(tmp_path / "copy") as connection:
        assert connection.sql("select sum(value) from toy.readings").fetchall() == [(before,)]


def test_a_comma_in_the_path_is_a_sentence(lake: Path, tmp_path: Path) -> None:
    moved = lake.rename(tmp_path / "a,b")
    with pytest.raises(LakeError, match="DuckDB takes a comma"):
        open_catalog(moved)


def test_the_file_is_of_the_first_stable_format(lake: Path) -> None:
    """Number 64 is that of DuckDB 1.0 and 1.1; newer ones read it too."""
    header = catalog_path(lake).read_bytes()[:20]
    assert header[8:12] == b"DUCK" and struct.unpack("<Q", header[12:20]) == (64,)


def test_it_names_one_snapshot_and_an_open_one_goes_on(lake: Path, tmp_path: Path) -> None:
    snapshot = current_snapshot(lake, "toy")
    with open_catalog(lake) as connection:
        before = connection.sql("select sum(value) from toy.readings").fetchall()
        build_toy(lake, tmp_path / "raw", scale=2.0)
        assert connection.sql("select sum(value) from toy.readings").fetchall() == before
        shown = connection.sql("select snapshot from lake.builds where current").fetchall()
    assert shown == [(snapshot.name,)]


def test_past_builds_are_a_query(tmp_path: Path) -> None:
    write_samples(tmp_path / "raw" / "samples.csv")
    lake = tmp_path / "lake"
    build_small(lake, tmp_path / "raw", slopes=(4.0,))
    build_small(lake, tmp_path / "raw", slopes=(5.0,))
    finished = [snapshot for snapshot in history(lake, "small") if not snapshot.partial]
    with open_catalog(lake) as connection:
        builds = connection.sql("select snapshot, current from lake.builds order by number")
        assert builds.fetchall() == [(s.name, s == finished[-1]) for s in finished]
        rows = connection.sql("select * from lake.metrics_by_build").pl()
        versions = connection.sql("select * from lake.versions").pl()
        comment = connection.sql(
            "select comment from duckdb_columns() where table_name = 'builds' "
            "and column_name = 'made' and schema_name = 'lake'"
        ).fetchall()
    assert comment == [("When it was published, in UTC",)]
    assert rows.group_by("number").agg(pl.col("run_id").n_unique()).sort("number")[
        "run_id"
    ].to_list() == [2, 4]
    last = rows.filter(number=finished[-1].number)
    assert last.height == current_version(lake, "small", "metrics").manifest.rows
    assert versions.height == sum(len(snapshot.tables) for snapshot in finished)


def test_it_is_written_in_one_transaction(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statements = []
    connect = duckdb.connect

    class Watched:
        def __init__(self, *words):
            self.connection = connect(*words)

        def execute(self, sql):
            statements.append(sql.split()[0])
            return self.connection.execute(sql)

        def __enter__(self):
            return self

        def __exit__(self, *words):
            self.connection.close()

    monkeypatch.setattr("storage.catalog.duckdb.connect", Watched)
    refresh_catalog(lake)
    assert statements.count("BEGIN") == statements.count("COMMIT") == 1
    inside = statements[statements.index("BEGIN") : statements.index("COMMIT")]
    assert {"CREATE", "COMMENT"} <= set(inside)
    assert not {"CREATE", "COMMENT"} & set(statements[: statements.index("BEGIN")])
