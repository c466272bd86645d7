"""The lake's tables in an Iceberg catalogue: no copy, a snapshot a version, expired with gc."""

import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table as IcebergTable
from pyiceberg.types import StringType

from flows.cli import main
from storage import iceberg
from storage.iceberg import NUMBER, VERSION, open_catalog, register
from storage.layout import lake_root
from storage.snapshots import current_snapshot, history
from storage.tables import current_version, find_version
from tests.s3 import BUCKET, moto, settings
from tests.toy import build_toy, parquet_bytes, write_raw

ROOT = Path(__file__).parents[2]
TABLES = {"toy/files", "toy/quarantine", "toy/readings", "toy/totals"}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    write_raw(tmp_path / "raw", files=3, lines=8)
    return tmp_path / "raw"


@pytest.fixture
def lake(tmp_path: Path, raw: Path) -> Path:
    """Two builds of other values."""
    build_toy(tmp_path / "lake", raw)
    build_toy(tmp_path / "lake", raw, scale=2.0)
    return tmp_path / "lake"


def table_of(lake: Path, name: str = "toy.readings") -> IcebergTable:
    return open_catalog(lake).load_table(name)


def numbers(table: IcebergTable) -> list[str]:
    """Our snapshots that its snapshots stand for, the oldest first."""
    return [one.summary.additional_properties[NUMBER] for one in table.snapshots()]


def files_of(table: IcebergTable) -> set[str]:
    return {task.file.file_path for task in table.scan().plan_files()}


def same_rows(lake: Path, name: str = "readings") -> bool:
    ours = current_version(lake, "toy", name).read()
    theirs = pl.scan_iceberg(table_of(lake, f"toy.{name}")).collect()
    key = ours.columns
    return ours.sort(key).equals(theirs.select(key).sort(key))


def test_the_same_files_are_registered_and_read_by_pyiceberg_and_polars(lake: Path) -> None:
    before = parquet_bytes(lake)
    done = register(lake)
    assert {one.name for one in done} == TABLES
    assert parquet_bytes(lake) == before
    assert not list((lake / "iceberg").rglob("*.parquet")), "nothing is copied"
    version = current_version(lake, "toy", "readings")
    assert files_of(table_of(lake)) == {place.as_uri() for place in version.places}
    assert all(same_rows(lake, name.partition("/")[2]) for name in TABLES)
    assert table_of(lake).properties["gc.enabled"] == "false"


def test_every_published_version_can_be_read_again(lake: Path) -> None:
    register(lake)
    table = table_of(lake)
    assert numbers(table) == ["1", "2"]
    for snapshot, ours in zip(table.snapshots(), history(lake, "toy"), strict=True):
        expected = find_version(lake, "toy", "readings", ours.tables["readings"]).read()
        assert snapshot.summary.additional_properties[VERSION] == ours.tables["readings"]
        found = pl.scan_iceberg(table, snapshot_id=snapshot.snapshot_id).collect()
        assert found.sort(expected.columns).equals(expected.sort(expected.columns))
        rows = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows
        assert rows == expected.height


def test_what_did_not_change_has_no_new_snapshot(lake: Path, raw: Path) -> None:
    write_raw(raw, files=4, lines=8)  # nothing more is quarantined
    build_toy(lake, raw, scale=2.0)
    register(lake)
    changed = 0
    for name in TABLES:
        keys = [one.tables[name.partition("/")[2]] for one in history(lake, "toy")]
        expected = [str(n) for n, key in enumerate(keys, 1) if n == 1 or key != keys[n - 2]]
        assert numbers(table_of(lake, name.replace("/", "."))) == expected
        changed += len(expected)
    assert changed < len(TABLES) * len(history(lake, "toy"))


def test_builds_and_gc_keep_it_up_to_date(lake: Path, raw: Path, capsys) -> None:
    register(lake)
    build_toy(lake, raw, scale=3.0)
    assert numbers(table_of(lake)) == ["1", "2", "3"] and same_rows(lake)
    assert main(["gc", "--yes", "--grace", "0", "--keep", "2", "--lake", str(lake)]) == 0
    assert numbers(table_of(lake)) == ["2", "3"] and same_rows(lake)
    assert main(["restore", "toy@s2", "--lake", str(lake)]) == 0
    assert numbers(table_of(lake)) == ["2", "3", "4"] and same_rows(lake)
    assert "behind" not in capsys.readouterr().err


def test_a_lake_that_was_never_registered_is_left_alone(lake: Path) -> None:
    assert not (lake / "iceberg").exists()


def test_nothing_new_writes_nothing(lake: Path, raw: Path, monkeypatch) -> None:
    register(lake)
    monkeypatch.setattr(iceberg, "register", lambda *_: pytest.fail("nothing was published"))
    build_toy(lake, raw, scale=2.0)


@pytest.mark.parametrize(
    ("copied", "name"), [(False, "other"), (True, "other"), (False, 'one\'s ü "%20"')]
)
def test_a_moved_or_copied_lake_is_registered_by_one_command(
    lake: Path, copied: bool, name: str
) -> None:
    register(lake)
    other = lake.parent / name
    if copied:
        shutil.copytree(lake, other, symlinks=True)
    else:
        lake.rename(other)
    assert main(["iceberg", "--lake", str(other)]) == 0
    assert numbers(table_of(other)) == ["1", "2"] and same_rows(other)
    assert all(path.startswith(f"file://{other}/") for path in files_of(table_of(other)))
    if copied:  # the original's is as it was
        assert all(path.startswith(f"file://{lake}/") for path in files_of(table_of(lake)))
        assert same_rows(lake)


def test_a_killed_registration_is_finished_by_the_next(lake: Path, raw: Path, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    def die(name: str) -> None:
        raise Killed

    monkeypatch.setattr(iceberg, "step", die)
    with pytest.raises(Killed):
        register(lake)
    monkeypatch.undo()
    register(lake)
    assert numbers(table_of(lake)) == ["1", "2"] and same_rows(lake)
    monkeypatch.setattr(iceberg, "step", die)
    with pytest.raises(Killed):
        build_toy(lake, raw, scale=3.0)
    monkeypatch.undo()
    assert current_snapshot(lake, "toy").number == 3  # published before
    register(lake)
    assert numbers(table_of(lake)) == ["1", "2", "3"] and same_rows(lake)


def test_a_column_of_another_type_begins_its_history_anew(lake: Path, raw: Path) -> None:
    register(lake)
    table = table_of(lake, "toy.totals")
    with table.update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("total")
    with table.update_schema() as change:
        change.add_column("total", StringType())
    build_toy(lake, raw, scale=3.0)
    assert numbers(table_of(lake, "toy.totals")) == ["3"] and same_rows(lake, "totals")
    assert numbers(table_of(lake)) == ["1", "2", "3"]


def test_trouble_of_the_catalogue_fails_no_build(lake: Path, raw: Path, capsys) -> None:
    register(lake)
    (lake / "iceberg" / "catalog.db").write_bytes(b"no database")
    build_toy(lake, raw, scale=3.0)
    said = capsys.readouterr().err
    assert said.count("the Iceberg catalogue is behind the lake") == 1
    assert "`novelty iceberg` registers it again" in said
    assert main(["iceberg", "--lake", str(lake)]) == 2
    said = capsys.readouterr().err
    assert f"remove {lake / 'iceberg'} and run `novelty iceberg`" in said and said.count("\n") == 1
    shutil.rmtree(lake / "iceberg")
    assert main(["iceberg", "--lake", str(lake)]) == 0 and same_rows(lake)
    (lake / "iceberg" / "registered.json").write_text("{")
    assert main(["iceberg", "--lake", str(lake)]) == 2
    assert "registered.json is damaged; remove" in capsys.readouterr().err


def test_any_catalogue_of_pyicebergs_settings(lake: Path, raw: Path, tmp_path, monkeypatch) -> None:
    """It stays the one that builds follow."""
    monkeypatch.setenv("PYICEBERG_CATALOG__TEAM__URI", f"sqlite:///{tmp_path}/team.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__TEAM__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__TEAM__WAREHOUSE", (tmp_path / "team").as_uri())
    command = [sys.executable, "-m", "flows.cli", "iceberg", "--lake", str(lake)]
    subprocess.run([*command, "--catalog", "team"], cwd=ROOT, check=True, capture_output=True)
    build_toy(lake, raw, scale=3.0)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    uri, place = f"sqlite:///{tmp_path}/team.db", (tmp_path / "team").as_uri()
    team = load_catalog("team", type="sql", uri=uri, warehouse=place)
    assert numbers(team.load_table("toy.readings")) == ["1", "2", "3"]
    assert not (lake / "iceberg" / "catalog.db").exists()


def test_a_catalogue_that_does_not_open_is_one_sentence(lake: Path, capsys) -> None:
    assert main(["iceberg", "--lake", str(lake), "--catalog", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert "Iceberg catalogue 'nowhere' does not open" in said and said.count("\n") == 1


def test_a_lake_in_a_bucket_is_registered_by_its_address(tmp_path, raw, monkeypatch) -> None:
    with moto(tmp_path) as url:
        for name, value in settings(url, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        lake = lake_root(f"s3://{BUCKET}/one")
        build_toy(lake, raw)
        build_toy(lake, raw, scale=2.0)
        register(lake)
        table = table_of(lake)
        assert numbers(table) == ["1", "2"]
        assert all(path.startswith(f"s3://{BUCKET}/one/toy/readings/") for path in files_of(table))
        found = pl.from_arrow(table.scan().to_arrow())
        ours = current_version(lake, "toy", "readings").read()
        assert found.select(ours.columns).sort(ours.columns).equals(ours.sort(ours.columns))
