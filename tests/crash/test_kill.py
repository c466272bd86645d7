"""kill -9 at every commit step, then run again: the same bytes as an undisturbed run."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.tables import current_versions
from storage.upkeep import find_garbage, verify_version
from tests.toy import build_toy, parquet_bytes, write_raw

ROOT = Path(__file__).parents[2]
STEPS = [
    "part_written",
    "piece_manifest_written",
    "before_rename",
    "after_rename",
    "part_linked",
    "table_manifest_written",
    "before_swap",
    "after_swap",
]


def test_every_step_of_the_code_is_killed_at():
    files = [p for p in (ROOT / "storage").glob("*.py") if p.name != "remote.py"]
    code = "".join(p.read_text() for p in files)  # remote.py: test_kill_remote.py
    assert set(re.findall(r'step\("(\w+)"\)', code)) == set(STEPS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    write_raw(root / "raw", files=3, lines=8)
    build_toy(root / "lake", root / "raw")
    return root


@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize("step", STEPS)
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
