"""All tables of a benchmark are published by one swap; older snapshots can be read and restored."""

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from flows.cli import main
from schemas.errors import ConfigError, LakeError
from schemas.manifest import Snapshot
from storage import tables
from storage.damage import drop, restore_snapshot, verify_lake
from storage.layout import MANIFEST, SNAPSHOT, current_path, pointer_path, snapshot_path
from storage.snapshots import (
    current_snapshot,
    find_snapshot,
    history,
    pin,
    read_snapshot,
    retained,
)
from storage.tables import current_version, current_versions, versions_of
from storage.tombstones import discard
from storage.upkeep import find_garbage
from tasks.engine.stage import Build
from tests.evaluation.small_runs import build_small
from tests.evaluation.small_runs import write_raw as write_samples
from tests.toy import build_toy, parquet_bytes, write_raw


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


def difference(readings: pl.DataFrame, totals: pl.DataFrame) -> float:
    """0 if the two tables are of one build."""
    known = readings.filter(pl.col("kind").is_not_null())
    return float(known["value"].sum() - totals["total"].sum())


def in_folder(folder: Path) -> float:
    both = (pl.read_parquet(folder / name / "*.parquet") for name in ("readings", "totals"))
    return difference(*both)


# One swap


def test_every_table_goes_through_one_link(lake: Path) -> None:
    snapshot = current_snapshot(lake, "toy")
    assert snapshot.number == 2 and not snapshot.partial
    assert os.readlink(pointer_path(lake, "toy")) == f"snapshots/{snapshot.name}"
    for table in ("readings", "files", "totals", "quarantine"):
        assert os.readlink(current_path(lake, "toy", table)) == f"../current/{table}"
        version = current_version(lake, "toy", table)
        assert current_path(lake, "toy", table).resolve() == version.folder
        assert snapshot.tables[table] == version.manifest.key
    assert not verify_lake(lake).damage


def test_no_table_is_new_while_another_is_old(lake: Path, raw: Path, monkeypatch) -> None:
    """Seen from every step of a publication, by path and by the API."""
    seen = []

    def look(name: str) -> None:
        by_path = in_folder(pointer_path(lake, "toy").resolve())
        found = {v.manifest.table: v.read() for v in current_versions(lake, "toy")}
        seen.append((name, by_path, difference(found["readings"], found["totals"])))

    from storage import atomic, snapshots

    for module in (atomic, snapshots, tables):
        monkeypatch.setattr(module, "step", look)
    build_toy(lake, raw, scale=1.5)
    assert {"before_swap", "after_swap", "snapshot_written"} <= {name for name, *_ in seen}
    assert [entry for entry in seen if entry[1:] != (0, 0)] == []


def test_the_same_rows_are_no_new_snapshot(lake: Path, raw: Path) -> None:
    before = current_snapshot(lake, "toy")
    build_toy(lake, raw, scale=2.0)
    assert current_snapshot(lake, "toy") == before


def test_a_lake_of_the_time_before_snapshots(tmp_path: Path, raw: Path) -> None:
    lake = tmp_path / "lake"
    build_toy(lake, raw)
    before = parquet_bytes(lake)
    tables = current_snapshot(lake, "toy").tables
    pointer_path(lake, "toy").unlink()
    shutil.rmtree(lake / "toy" / "snapshots")
    for table, key in tables.items():
        current_path(lake, "toy", table).unlink()
        current_path(lake, "toy", table).symlink_to(f"versions/{key}")
    assert parquet_bytes(lake) == before and current_snapshot(lake, "toy").number == 0
    assert {v.manifest.key for v in current_versions(lake)} == set(tables.values())
    assert not verify_lake(lake).damage and find_garbage(lake) == []
    build_toy(lake, raw, scale=2.0)
    assert [snapshot.number for snapshot in history(lake, "toy")] == [0, 1]
    assert os.readlink(current_path(lake, "toy", "totals")) == "../current/totals"
    restore_snapshot(lake, find_snapshot(lake, "toy@s0"))
    assert parquet_bytes(lake) == before


def test_a_table_made_from_what_is_gone_leaves_with_it(lake: Path, raw: Path, capsys) -> None:
    from tasks.engine.stage import Build, Shard
    from tests.toy import ReadSettings, read_lines

    def without_totals(scale: float) -> set[str]:
        with Build("toy", lake) as build:
            source = build.source(raw)
            shards = [Shard(f.name, files=(f,), source=source.root) for f in source.files()]
            build.run(read_lines, shards, ReadSettings(scale=scale))
        return set(current_snapshot(lake, "toy").tables)

    assert "totals" in without_totals(2.0)  # still true of the readings
    assert "totals" not in without_totals(1.0)
    assert "toy/totals: left out" in capsys.readouterr().err
    with pytest.raises(LakeError, match="no table toy/totals"):
        current_version(lake, "toy", "totals")
    assert not current_path(lake, "toy", "totals").is_symlink()


# Damage


@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_a_damaged_record_is_said_and_mended(lake: Path, raw: Path, content, capsys) -> None:
    before, tables = parquet_bytes(lake), current_snapshot(lake, "toy").tables
    path = snapshot_path(lake, "toy", current_snapshot(lake, "toy").name) / SNAPSHOT
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert main(["status", "--lake", str(lake)]) == 2
    assert "`novelty verify --drop`" in capsys.readouterr().err
    drop(lake, verify_lake(lake).damage)
    assert not verify_lake(lake).damage
    assert current_snapshot(lake, "toy").tables == tables and parquet_bytes(lake) == before


def test_a_link_in_the_place_of_a_record_is_no_table(lake: Path, raw: Path) -> None:
    tables = current_snapshot(lake, "toy").tables
    path = snapshot_path(lake, "toy", current_snapshot(lake, "toy").name) / SNAPSHOT
    path.unlink()
    path.symlink_to("/nowhere")
    drop(lake, verify_lake(lake).damage)
    assert not verify_lake(lake).damage
    assert current_snapshot(lake, "toy").tables == tables


def test_a_flipped_bit_in_a_record_is_noticed(lake: Path) -> None:
    path = snapshot_path(lake, "toy", current_snapshot(lake, "toy").name) / SNAPSHOT
    body = path.read_bytes()
    for place in range(0, len(body), 7):
        changed = bytearray(body)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(LakeError):
            read_snapshot(path.parent)


def test_a_build_alone_mends_a_damaged_record(lake: Path, raw: Path) -> None:
    path = snapshot_path(lake, "toy", current_snapshot(lake, "toy").name) / SNAPSHOT
    path.write_bytes(b"")
    build_toy(lake, raw, scale=2.0)
    assert in_folder(pointer_path(lake, "toy").resolve()) == 0


def test_a_damaged_part_costs_its_run_only(tmp_path: Path, capsys) -> None:
    write_samples(tmp_path / "raw" / "samples.csv")
    lake = tmp_path / "lake"
    build_small(lake, tmp_path / "raw", slopes=(4.0, 5.0), protocols=("first",))
    snapshot = current_snapshot(lake, "small")
    assert set(snapshot.runs) == set(current_version(lake, "small", "runs").read()["run_id"])
    lost, kept = sorted(snapshot.runs)
    metrics = current_version(lake, "small", "metrics")
    part = next(p for p in metrics.manifest.parts if p.piece in snapshot.runs[lost])
    file = metrics.folder / part.file
    file.write_bytes(b"?" * part.bytes)  # a link to the piece's own file
    drop(lake, verify_lake(lake).damage)
    build_small(lake, tmp_path / "raw", slopes=(5.0,), protocols=("second",))
    assert "1 runs lack a piece" in capsys.readouterr().err
    for table in ("runs", "metrics", "scores", "outputs", "training"):
        found = set(current_version(lake, "small", table).read()["run_id"])
        assert kept in found and lost not in found, table
    build_small(lake, tmp_path / "raw", slopes=(4.0, 5.0), protocols=("first",))
    assert {lost, kept} < set(current_version(lake, "small", "metrics").read()["run_id"])


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("table", ["splits", "protocols", "samples"])
def test_a_damaged_manifest_of_a_table_costs_no_run(tmp_path: Path, table, dropped) -> None:
    """What the runs were made from is told by the manifests of their pieces too."""
    write_samples(tmp_path / "raw" / "samples.csv")
    lake = tmp_path / "lake"
    build_small(lake, tmp_path / "raw", protocols=("first",))
    pieces = Build("small", lake).take_over(table)
    (runs,) = current_snapshot(lake, "small").runs
    manifest = current_version(lake, "small", table).folder / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"small", b"smalm", 1))
    assert [p.folder for p in Build("small", lake).take_over(table)] == [p.folder for p in pieces]
    if dropped:
        drop(lake, verify_lake(lake).damage)
    build_small(lake, tmp_path / "raw", protocols=("second",))
    assert runs in set(current_version(lake, "small", "metrics").read()["run_id"])
    assert set(current_version(lake, "small", "splits").read()["protocol"]) == {"first", "second"}


# History


def test_an_older_snapshot_is_read_diffed_pinned_and_restored(lake: Path, raw, capsys) -> None:
    first, second = history(lake, "toy")
    assert [snapshot.number for snapshot in (first, second)] == [1, 2]
    words = ["--lake", str(lake)]

    def said(*command: str, code: int = 0) -> str:
        assert main([*command, *words]) == code
        return capsys.readouterr().out

    assert "current" in said("history", "toy") and "s000001" in said("history")
    folder = Path(said("path", "toy@s1").strip())
    assert folder == snapshot_path(lake, "toy", first.name) and in_folder(folder) == 0
    assert Path(said("path", "toy/readings").strip()).resolve() == (
        current_version(lake, "toy", "readings").folder
    )
    assert "changed" in said("diff", "toy/readings@s1", "toy/readings@s2", code=1)
    assert "is pinned" in said("history", "--pin", "toy@s1")
    assert "pinned" in said("history", "toy")
    assert "toy@s1 is current again, as s000003" in said("restore", "toy@s1")
    now = current_snapshot(lake, "toy")
    assert (now.tables, now.restored) == (first.tables, first.name)
    build_toy(lake, raw, scale=2.0)
    assert current_snapshot(lake, "toy").tables == second.tables
    for wrong in ("toy@s9", "toy@s²", "toy@nothing", "other"):
        assert main(["path", wrong, *words]) == 2
    assert find_snapshot(lake, f"toy@{first.name[:12]}") == first


def test_a_publication_that_was_overtaken_is_no_history(lake: Path) -> None:
    first, second = history(lake, "toy")
    lost = first.model_copy(update={"tables": {"readings": first.tables["readings"]}})
    coming = second.model_copy(update={"number": 3, "previous": second.name})
    for snapshot in (lost, coming):
        folder = snapshot_path(lake, "toy", snapshot.name)
        folder.mkdir()
        (folder / SNAPSHOT).write_bytes(snapshot.sealed())
    assert history(lake, "toy") == [first, second]
    assert {path.name for path in find_garbage(lake)} == {lost.name, coming.name}


# Retention


def aged(lake: Path, hours: dict[int, float], partial: tuple[int, ...] = ()) -> list[Snapshot]:
    """Snapshots that were made so many hours ago."""
    base = current_snapshot(lake, "toy")
    shutil.rmtree(lake / "toy" / "snapshots")
    made: list[Snapshot] = []
    for number, age in hours.items():
        snapshot = base.model_copy(
            update={
                "number": number,
                "previous": made[-1].name if made else None,
                "made": datetime.now(UTC) - timedelta(hours=age),
                "partial": number in partial,
            }
        )
        folder = snapshot_path(lake, "toy", snapshot.name)
        folder.mkdir(parents=True)
        (folder / SNAPSHOT).write_bytes(snapshot.sealed())
        for table, key in snapshot.tables.items():
            (folder / table).symlink_to(f"../../{table}/versions/{key}")
        made.append(snapshot)
    pointer_path(lake, "toy").unlink()
    pointer_path(lake, "toy").symlink_to(f"snapshots/{made[-1].name}")
    return made


def test_what_was_replaced_a_short_time_ago_stays_however_old(lake: Path) -> None:
    made = aged(lake, {1: 900, 2: 800, 3: 25, 4: 1})
    assert retained(lake, "toy", grace_hours=24, keep=1) == made[2:]
    assert retained(lake, "toy", grace_hours=0.5, keep=1) == made[3:]
    assert retained(lake, "toy", grace_hours=0.5, keep=3) == made[1:]
    pin(lake, made[0])
    assert retained(lake, "toy", grace_hours=0.5, keep=1) == [made[0], made[3]]
    pin(lake, made[0], pinned=False)
    assert retained(lake, "toy", grace_hours=0.5, keep=1) == made[3:]


def test_partial_snapshots_do_not_count_among_the_last(lake: Path) -> None:
    made = aged(lake, {1: 50, 2: 49, 3: 48, 4: 47, 5: 46}, partial=(3, 4))
    assert retained(lake, "toy", grace_hours=1, keep=2) == [made[1], made[4]]
    names = {path.name for path in find_garbage(lake, grace_hours=1, keep=2)}
    assert {made[0].name, made[2].name, made[3].name} <= names


def test_gc_keeps_the_pieces_of_an_unfinished_build(lake: Path, raw: Path) -> None:
    from tasks.engine.stage import Build, Shard
    from tests.toy import ReadSettings, read_lines

    with pytest.raises(RuntimeError, match="killed"), Build("toy", lake) as build:
        source = build.source(raw)
        shards = [Shard(f.name, files=(f,), source=source.root) for f in source.files()]
        build.run(read_lines, shards, ReadSettings(scale=3.0))
        raise RuntimeError("killed")
    restore_snapshot(lake, find_snapshot(lake, "toy@s1"))  # a publication, but no build
    discard(lake, find_garbage(lake, grace_hours=-1, keep=1))
    again = build_toy(lake, raw, scale=3.0)
    made = [piece.manifest.stage for piece in again.pieces if piece.made_now]
    assert made == ["add_up"]
    first, *_ = history(lake, "toy")
    assert versions_of(lake, first)


def test_the_only_snapshot_with_a_version_takes_it_along(lake: Path, raw: Path) -> None:
    before = parquet_bytes(lake)
    discard(lake, find_garbage(lake, grace_hours=-1, keep=1))
    assert [snapshot.number for snapshot in history(lake, "toy")] == [2]
    assert parquet_bytes(lake) == before and not verify_lake(lake).damage
    with pytest.raises(ConfigError, match="`novelty history toy` lists them"):
        find_snapshot(lake, "toy@s1")
