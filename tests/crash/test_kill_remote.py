"""kill -9 at every commit step of a lake in a bucket, then run again: the same objects."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.catalog import CATALOG_SQL
from storage.layout import lake_root
from storage.objects import bucket_of
from storage.tables import current_versions
from storage.upkeep import find_remote_garbage, verify_version
from tests.crash.test_kill import STEPS as LOCAL_STEPS
from tests.s3 import BUCKET, moto, settings
from tests.toy import build_toy, write_raw

ROOT = Path(__file__).parents[2]
STEPS = [
    "piece_file_put",
    "piece_manifest_put",
    "version_part_put",
    "version_manifest_put",
    "before_pointer",
    "after_pointer",
]
FAST = {("piece_file_put", 3), ("piece_manifest_put", 1), ("before_pointer", 1)}
KILLS = [(step, number) for step in STEPS + LOCAL_STEPS for number in (1, 3, 8)]


def test_every_step_of_the_code_is_killed_at():
    code = (ROOT / "storage" / "remote.py").read_text()
    assert set(re.findall(r'step\("(\w+)"\)', code)) == set(STEPS)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with moto(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture
def machine(url, tmp_path, monkeypatch):
    """Make this process and its children a machine with an empty cache of that name."""

    def use(name: str, address: str = f"s3://{BUCKET}/{tmp_path.name}") -> Path:
        for key, value in settings(url, tmp_path / name).items():
            monkeypatch.setenv(key, value)
        return lake_root(address)

    return use


@pytest.fixture(scope="module")
def undisturbed(url, tmp_path_factory):
    """A raw folder and the objects that its build leaves."""
    root = tmp_path_factory.mktemp("undisturbed")
    write_raw(root / "raw", files=3, lines=8)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in settings(url, root / "cache").items():
            patch.setenv(key, value)
        lake = lake_root(f"s3://{BUCKET}/undisturbed")
        build_toy(lake, root / "raw")
        return root / "raw", content(lake)


def content(lake: Path) -> dict[str, bytes]:
    """Every object; the catalogue names its own address, so it is left out."""
    bucket = bucket_of(lake)
    return {name: bucket.get(name).data for name in bucket.listing("") if name != CATALOG_SQL}


def killed(lake: Path, raw: Path, step: str, number: int) -> int:
    words = [str(lake), str(raw), step, str(number)]
    command = [sys.executable, "-m", "tests.crash.kill_at", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, env=os.environ)
    # Some steps are passed fewer times than `number`: then the run simply ends well.
    assert ended.returncode in (-signal.SIGKILL, 0), ended.stderr.decode()
    return ended.returncode


@pytest.mark.parametrize(
    ("step", "number"),
    [
        pytest.param(*k, marks=() if k in FAST else pytest.mark.slow, id=f"{k[0]}-{k[1]}")
        for k in KILLS
    ],
)
def test_killed_build_ends_as_if_it_never_was(machine, undisturbed, step, number):
    raw, expected = undisturbed
    lake = machine("killed")
    code = killed(lake, raw, step, number)
    assert code == -signal.SIGKILL or number > 1
    reader = machine("reader")
    for version in current_versions(reader):
        assert not verify_version(version)
    # The machine itself goes on, or another one whose cache is empty.
    build_toy(machine("killed" if number == 1 else "other"), raw)
    assert content(lake) == expected
    assert find_remote_garbage(lake, grace_hours=-1) == []


@pytest.mark.parametrize(
    "step",
    [s if s == "version_manifest_put" else pytest.param(s, marks=pytest.mark.slow) for s in STEPS],
)
def test_old_version_stays_readable_when_a_rebuild_is_killed(machine, undisturbed, tmp_path, step):
    raw = tmp_path / "raw"
    shutil.copytree(undisturbed[0], raw)
    lake = machine("killed")
    old = build_toy(lake, raw).versions["readings"].read()
    (raw / "f0.txt").write_text("a,1\n")
    assert killed(lake, raw, step, 1) == -signal.SIGKILL
    reader = machine("reader")
    (now,) = [v for v in current_versions(reader) if v.name == "toy/readings"]
    assert not verify_version(now)
    assert now.read().height in (old.height, old.height - 7)
    build_toy(machine("other"), raw)
    (now,) = [v for v in current_versions(reader) if v.name == "toy/readings"]
    assert now.read().height == old.height - 7
