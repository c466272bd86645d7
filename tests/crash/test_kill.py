"""kill -9 at every commit step, then run again: the same bytes as an undisturbed run."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.catalog import open_catalog
from storage.damage import drop, restorable, restore, verify_lake, verify_version
from storage.tables import current_versions
from storage.tombstones import discard
from storage.upkeep import find_garbage
from tests.toy import build_toy, parquet_bytes, unverified, write_raw

ROOT = Path(__file__).parents[2]
REMOVALS = {
    "gc": [("discarded", 1), ("discarded", 3), ("deleted", 1)],
    "drop": [("tombstone_written", 1), *(("buried", number) for number in (1, 2, 3, 4))],
    "restore": [("restored", 1), ("restored", 3), ("discarded", 1), ("deleted", 1)],
}
STEPS = [
    "bytes_written",
    "bytes_replaced",
    "catalog_written",
    "catalog_replaced",
    "part_written",
    "piece_manifest_written",
    "before_rename",
    "after_rename",
    "part_linked",
    "table_manifest_written",
    "snapshot_written",
    "before_swap",
    "after_swap",
]
ONCE = ("bytes_", "catalog_")


def test_every_step_of_the_code_is_killed_at():
    # remote*.py: test_kill_remote.py; iceberg.py: tests/storage/test_iceberg.py
    files = [p for p in (ROOT / "storage").glob("*.py") if p.stem != "iceberg"]
    code = "".join(p.read_text() for p in files if not p.name.startswith("remote"))
    found = re.findall(r'(?:step\(|_move\(.*, )"(\w+)"\)', code)
    assert set(found) == {*STEPS, *(step for steps in REMOVALS.values() for step, _ in steps)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    write_raw(root / "raw", files=3, lines=8)
    build_toy(root / "lake", root / "raw")
    return root


@pytest.mark.parametrize(
    ("step", "number"),
    [(step, n) for step in STEPS for n in (1, 3, 8) if n == 1 or not step.startswith(ONCE)],
)
def test_killed_build_ends_as_if_it_never_was(tmp_path, undisturbed, step, number):
    raw, lake = undisturbed / "raw", tmp_path / "lake"
    command = [sys.executable, "-m", "tests.crash.kill_at", str(lake), str(raw), step, str(number)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True)
    # Some steps are passed fewer times than `number`: then the run simply ends well.
    assert ended.returncode in (-signal.SIGKILL, 0), ended.stderr.decode()
    for version in current_versions(lake) if lake.exists() else []:
        assert not verify_version(version)
    build_toy(lake, raw)
    assert parquet_bytes(lake) == parquet_bytes(undisturbed / "lake")
    assert not [path for path in find_garbage(lake) if path.suffix != ".tmp"]


@pytest.mark.parametrize("step", STEPS)
def test_old_version_stays_readable_when_a_rebuild_is_killed(tmp_path, step):
    write_raw(tmp_path / "raw", files=3, lines=8)
    old = build_toy(tmp_path / "lake", tmp_path / "raw").versions["readings"].read()
    (tmp_path / "raw" / "f0.txt").write_text("a,1\n")
    lake, raw = str(tmp_path / "lake"), str(tmp_path / "raw")
    command = [sys.executable, "-m", "tests.crash.kill_at", lake, raw, step, "1"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    (now,) = [v for v in current_versions(tmp_path / "lake") if v.name == "toy/readings"]
    assert not verify_version(now)
    assert now.read().height in (old.height, old.height - 7)
    write_raw(tmp_path / "again", files=3, lines=8)
    (tmp_path / "again" / "f0.txt").write_text("a,1\n")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    build_toy(tmp_path / "other", tmp_path / "again")
    assert parquet_bytes(tmp_path / "lake").keys() == parquet_bytes(tmp_path / "other").keys()


def test_leftovers_of_a_dead_builder_are_garbage(tmp_path):
    write_raw(tmp_path / "raw", files=2, lines=4)
    lake, raw = str(tmp_path / "lake"), str(tmp_path / "raw")
    command = [sys.executable, "-m", "tests.crash.kill_at", lake, raw, "before_rename", "1"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    assert [path.suffix for path in find_garbage(tmp_path / "lake")] == [".tmp"]


def killed(action: str, lake: Path, step: str, number: int) -> None:
    words = [str(lake), "-", step, str(number), action]
    command = [sys.executable, "-m", "tests.crash.kill_at", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


@pytest.fixture
def rebuilt(tmp_path, undisturbed):
    """A lake with garbage of an earlier build; its raw files are those of `undisturbed`."""
    lake, raw = tmp_path / "lake", tmp_path / "raw"
    shutil.copytree(undisturbed / "raw", raw)
    (raw / "f0.txt").write_text("a,1\n")
    build_toy(lake, raw)
    shutil.copy(undisturbed / "raw" / "f0.txt", raw / "f0.txt")
    return lake, build_toy(lake, raw)


def parquet_only(lake: Path) -> dict[str, bytes]:
    """A manifest also counts records of the build that first made its version."""
    return {name: data for name, data in parquet_bytes(lake).items() if name.endswith(".parquet")}


@pytest.mark.parametrize(("step", "number"), REMOVALS["gc"])
def test_killed_gc_leaves_every_table_whole(tmp_path, undisturbed, rebuilt, step, number):
    lake, _ = rebuilt
    killed("gc", lake, step, number)
    assert not verify_lake(lake).damage
    again = build_toy(lake, tmp_path / "raw")
    assert not any(piece.made_now for piece in again.pieces)
    discard(lake, find_garbage(lake, -1, keep=1))
    assert find_garbage(lake, -1, keep=1) == []
    assert parquet_only(lake) == parquet_only(undisturbed / "lake")


@pytest.fixture
def damaged(rebuilt):
    """A bit was flipped before an older program read it: what it made is wrong too."""
    lake, build = rebuilt
    (child,) = [piece for piece in build.pieces if piece.manifest.stage == "add_up"]
    unverified(child)
    path = build.pieces[1].part("readings").place
    body = bytearray(path.read_bytes())
    body[60] ^= 1
    path.write_bytes(body)
    return lake, child


@pytest.mark.parametrize(("step", "number"), REMOVALS["drop"])
def test_killed_drop_goes_on_where_it_was(tmp_path, undisturbed, damaged, step, number):
    lake, child = damaged
    killed("drop", lake, step, number)
    drop(lake, verify_lake(lake).damage)
    assert not verify_lake(lake).damage and not child.folder.exists()
    again = build_toy(lake, tmp_path / "raw")
    assert [piece.manifest.stage for piece in again.pieces if piece.made_now] == [
        "read_lines",
        "add_up",
    ]
    assert parquet_only(lake) == parquet_only(undisturbed / "lake")


@pytest.mark.parametrize(("step", "number"), REMOVALS["restore"])
def test_killed_restore_goes_on_where_it_was(tmp_path, damaged, step, number):
    lake, child = damaged
    before = {path for path in lake.rglob("*") if not {"locks", "snapshots"} & set(path.parts[:-1])}
    shown = parquet_bytes(lake)
    damage = verify_lake(lake).damage
    drop(lake, damage)
    killed("restore", lake, step, number)
    for name in restorable(lake):
        restore(lake, name)
    assert verify_lake(lake).damage == damage and child.folder.exists()
    discard(lake, [path for path in find_garbage(lake) if path.suffix == ".tmp"])
    after = {path for path in lake.rglob("*") if not {"locks", "snapshots"} & set(path.parts[:-1])}
    assert {path for path in after if path.name != "tombstones"} == before
    assert parquet_bytes(lake) == shown


@pytest.mark.parametrize(
    ("action", "step"),
    [
        ("catalog", "catalog_written"),
        ("catalog", "catalog_replaced"),
        ("report", "bytes_written"),
        ("report", "bytes_replaced"),
    ],
)
def test_killed_catalogue_and_report_stay_old_or_new(rebuilt, action, step):
    lake, _ = rebuilt
    killed(action, lake, step, 1)
    with open_catalog(lake) as connection:
        assert connection.execute("select count(*) from toy.readings").fetchone() == (21,)
    assert (lake / "reports" / "toy.html").exists() == (step == "bytes_replaced")
    assert not verify_lake(lake).damage
