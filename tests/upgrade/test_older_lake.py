"""A lake of older schema versions is read, and what is older is said."""

import tarfile
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from flows.cli import main
from schemas.tables import QUARANTINE
from storage.catalog import open_catalog, refresh_catalog
from storage.damage import verify_lake
from storage.tables import current_version
from tasks.operations import upgrade as operation
from tests.toy import build_toy, write_raw

ARCHIVE = Path(__file__).parent / "lake_of_version_1.tar.xz"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)  # ours; Python 3.11.2 knows no filter
    return tmp_path / "lake"


def test_its_tables_are_read_as_they_are(lake: Path) -> None:
    assert current_version(lake, "novelcraft", "frames").read().height == 62
    refresh_catalog(lake)
    with open_catalog(lake) as connection:
        assert connection.sql("select count(*) from novelcraft.scores").fetchall() == [(15,)]
        assert connection.sql("select count(*) from toy.readings").fetchall()[0][0] > 0
        views = connection.sql(
            "select view_name from duckdb_views() where schema_name = 'lake'"
        ).fetchall()
    # None of its shared tables has today's columns, so none is in a view over all benchmarks.
    assert views == []


def test_status_names_what_is_older(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--lake", str(lake)]) == 0
    shown = capsys.readouterr().out
    assert "schema is version" in shown


def test_what_needs_no_raw_files_is_upgraded_and_the_rest_is_named(lake: Path, capsys) -> None:
    before = current_version(lake, "toy", "quarantine").read()
    assert main(["upgrade", "--lake", str(lake)]) == 1
    said = capsys.readouterr().out
    assert "toy/quarantine: version 1 became 2" in said
    assert "novelcraft/scores: version 1 cannot become 2 without raw files" in said
    assert f"novelty build novelcraft --lake {lake} --source /" in said
    after = current_version(lake, "toy", "quarantine")
    assert after.manifest.schema_version == 2
    assert after.read().equals(before.rename({"table": "table_name"}).select(after.read().columns))
    windows = current_version(lake, "novelcraft", "windows").read()
    assert windows["sample_id"].to_list()[0].startswith("non_overlapping/")
    with open_catalog(lake) as connection:
        benchmarks = connection.sql("select distinct benchmark from lake.quarantine").fetchall()
    assert {name for (name,) in benchmarks} == {"novelcraft", "toy"}
    assert not verify_lake(lake).damage
    assert current_version(lake, "novelcraft", "frames").read().height == 62
    # Once more there is nothing to do for these, and `gc` keeps what they were made from.
    assert main(["upgrade", "--lake", str(lake)]) == 1
    assert "became" not in capsys.readouterr().out
    assert main(["gc", "--yes", "--grace", "0", "--keep", "1", "--lake", str(lake)]) == 0
    assert not verify_lake(lake).damage


@pytest.mark.parametrize(
    ("benchmark", "settings", "roots", "options"),
    [
        ("kowl", {"lists": "s/lists", "videos": None}, ["/a/s/lists"], "--lists /a/s/lists"),
        (
            "kowl",
            {"lists": "s/lists", "videos": "s/v"},
            ["/a/s/lists", "/a/s/v"],
            "--lists /a/s/lists --videos /a/s/v",
        ),
        ("condda", {"tests": "/b c"}, ["/b c"], "--tests '/b c'"),
        (
            "semantic",
            {"source": {"cifar10": "c10", "stl10": "/d/s.zip"}},
            ["/d/c10", "/d/s.zip"],
            "--source cifar10=/d/c10 --source stl10=/d/s.zip",
        ),
        ("toy", {}, ["/e"], "--source /e"),
    ],
)
def test_the_build_that_makes_tables_anew_has_the_options_of_its_benchmark(
    monkeypatch, benchmark, settings, roots, options
):
    record = SimpleNamespace(settings=settings, sources=[SimpleNamespace(root=r) for r in roots])
    monkeypatch.setattr(operation, "read_build_record", lambda lake, name: record)
    command = operation.build_command(Path("lake"), benchmark)
    assert command == f"novelty build {benchmark} --lake lake {options}"


@pytest.mark.parametrize(
    ("view", "table", "state"),
    [
        ("lake.metrics", "metrics", "of an older version"),
        ("lake.leaderboard", "metrics", "of an older version"),
        ("novelcraft.runs", "runs", "not built"),
    ],
)
def test_a_query_says_who_lacks_a_table_and_what_builds_it(lake, capsys, view, table, state):
    assert main(["upgrade", "--lake", str(lake)]) == 1
    capsys.readouterr()
    assert main(["query", "--lake", str(lake), f"select * from {view}"]) == 2
    said = capsys.readouterr().err
    assert f"there is no {view}, as the table {table} of novelcraft is {state}; `novelty" in said
    assert f"`novelty build novelcraft --lake {lake} --source /" in said
    assert "Catalog Error" not in said
    # Any other mistake keeps the words of DuckDB.
    assert main(["query", "--lake", str(lake), "select nothing from novelcraft.metrics"]) == 2
    assert "the query failed" in capsys.readouterr().err


def test_a_lake_of_today_has_nothing_to_upgrade(tmp_path: Path, capsys) -> None:
    write_raw(tmp_path / "raw", files=2, lines=4)
    build_toy(tmp_path / "lake", tmp_path / "raw")
    assert main(["upgrade", "--lake", str(tmp_path / "lake")]) == 0
    assert "every table has today's schema" in capsys.readouterr().out


def test_rows_that_do_not_fit_the_new_schema_are_one_sentence(lake: Path, capsys, monkeypatch):
    def spoilt(rows: pl.DataFrame) -> pl.DataFrame:
        return rows.rename({"table": "table_name"}).with_columns(pl.lit(-1).alias("number"))

    monkeypatch.setitem(QUARANTINE.upgrades, 1, spoilt)
    assert main(["upgrade", "--lake", str(lake)]) == 2
    said = capsys.readouterr().err
    assert "quarantine cannot be upgraded" in said and "make it anew with `novelty build" in said
