"""A lake of older schema versions is read, and what is older is said."""

import tarfile
from pathlib import Path

import pytest

from flows.cli import main
from storage.catalog import open_catalog, refresh_catalog
from storage.tables import current_version

ARCHIVE = Path(__file__).parent / "lake_of_version_1.tar.xz"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="tar")
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
