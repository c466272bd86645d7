"""kill -9 at every commit step of a lake in a bucket, then run again: the same objects."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.manifest import Snapshot
from storage.catalog import CATALOG_SQL
from storage.damage import drop, restorable, restore, verify_lake, verify_version
from storage.layout import MANIFEST, SNAPSHOT, lake_root
from storage.objects import bucket_of
from storage.remote import piece_object, version_prefix
from storage.snapshots import history
from storage.tables import current_versions, versions_of
from storage.upkeep import find_remote_garbage, remove_remote_garbage
from tests.crash.test_kill import STEPS as LOCAL_STEPS
from tests.s3 import BUCKET, moto, settings
from tests.toy import build_toy, write_raw

ROOT = Path(__file__).parents[2]
STEPS = [
    "piece_file_put",
    "piece_manifest_put",
    "version_part_put",
    "version_manifest_put",
    "snapshot_put",
    "before_pointer",
    "after_pointer",
]
REMOVALS = [
    ("drop", "objects_copied"),
    ("drop", "manifest_deleted"),
    ("restore", "object_restored"),
]
GARBAGE = "garbage_deleted"
CURRENT = "/current.json"
FAST = {("piece_file_put", 3), ("piece_manifest_put", 1), ("before_pointer", 1)}
KILLS = [(step, number) for step in STEPS + LOCAL_STEPS for number in (1, 3, 8)]


def test_every_step_of_the_code_is_killed_at():
    code = "".join(path.read_text() for path in (ROOT / "storage").glob("remote*.py"))
    found = set(re.findall(r'step\("(\w+)"\)', code))
    assert found == {*STEPS, *(step for _, step in REMOVALS), GARBAGE}


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


def content(lake: Path) -> dict[str, Any]:
    """Every object; the catalogue names its own address, so it is left out, and so are clocks."""
    bucket = bucket_of(lake)
    found = {name: bucket.get(name).data for name in bucket.listing("") if name != CATALOG_SQL}
    return {
        name: Snapshot.unsealed(data).model_dump(exclude={"made", "finished"})
        if name.endswith(SNAPSHOT)
        else data
        for name, data in found.items()
    }


def killed(lake: Path, raw: Path, step: str, number: int, action: str = "build") -> int:
    words = [str(lake), str(raw), step, str(number), action]
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
    assert find_remote_garbage(lake, grace_hours=-1, keep=1) == []


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


@pytest.mark.parametrize(
    ("action", "step"),
    [
        k if k[1] == "manifest_deleted" else pytest.param(*k, marks=pytest.mark.slow)
        for k in REMOVALS
    ],
)
def test_a_killed_removal_goes_on_where_it_was(machine, undisturbed, action, step):
    raw, expected = undisturbed
    lake = machine("killed")
    build = build_toy(lake, raw)
    bucket = bucket_of(lake)
    piece = build.pieces[0].manifest
    version = build.versions["readings"].manifest
    name = version_prefix("toy", "readings", version.key)
    for damaged in (f"{name}/{version.parts[1].file}", piece_object(piece.address, piece.parts[0])):
        bucket.put(damaged, b"?")
    damage = verify_lake(lake).damage
    assert len(damage) == 2
    if action == "restore":
        drop(lake, damage)
    assert killed(lake, raw, step, 1, action) == -signal.SIGKILL
    if action == "restore":
        for tombstone in restorable(lake):
            restore(lake, tombstone)
        assert verify_lake(lake).damage == damage
    drop(lake, verify_lake(lake).damage)
    assert not verify_lake(lake).damage
    build_toy(machine("other"), raw)

    def comparable(objects: dict[str, Any]) -> dict[str, Any]:
        """Without what counts publications, and records of the build that first made a version."""
        counted = (CURRENT, MANIFEST, SNAPSHOT)
        there = {name: data for name, data in objects.items() if "tombstones" not in name}
        return {name: data for name, data in there.items() if not name.endswith(counted)}

    assert comparable(content(lake)) == comparable(expected)
    tables = {version.name: version.manifest.key for version in current_versions(lake)}
    assert tables == {version.name: version.manifest.key for version in build.versions.values()}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_killed_gc_leaves_every_table_whole(machine, undisturbed, tmp_path, number):
    raw = tmp_path / "raw"
    shutil.copytree(undisturbed[0], raw)
    lake = machine("killed")
    build_toy(lake, raw)
    (raw / "f0.txt").write_text("a,1\n")
    build_toy(lake, raw)
    assert killed(lake, raw, GARBAGE, number, "gc") == -signal.SIGKILL
    reader = machine("reader")
    assert not verify_lake(reader).damage
    for snapshot in history(reader, "toy"):
        assert versions_of(reader, snapshot)
    remove_remote_garbage(reader, find_remote_garbage(reader, -1, keep=1))
    assert find_remote_garbage(reader, -1, keep=1) == []
    assert not any(piece.made_now for piece in build_toy(machine("other"), raw).pieces)
