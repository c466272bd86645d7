"""Any file-system call of storage/ may fail or be the last: old or new, never lost, never wedged.

`make faults` strikes at every call of every action; `make test` at a few, drawn by a fixed seed.
"""

import random
import shutil
import signal
from functools import cached_property
from pathlib import Path

import polars as pl
import pytest

from schemas.errors import LakeError
from storage.damage import drop, verify_lake
from storage.snapshots import current_snapshot, history
from storage.tables import current_versions
from tests.crash.fault_lab import CHECKED, ENDED, FAULTS, SENTENCE, strike
from tests.toy import build_toy, write_raw

Rows = dict[str, pl.DataFrame]


class Start:
    """A lake before an action, and the tables that it may show afterwards."""

    def __init__(self, action: str, root: Path) -> None:
        self.action, self.lake, self.raw = action, root / "lake", root / "raw"
        write_raw(self.raw, files=3, lines=8)
        self.allowed: list[Rows] = [{}]
        if action != "first_build":
            build_toy(self.lake, self.raw)
            self.allowed = [rows_of(self.lake)]
        (self.raw / "f0.txt").write_text("a,1\n")
        other = root / "other"
        build_toy(other, self.raw)
        self.new = rows_of(other)
        if action in ("gc", "go_back", "drop", "restore", "catalog"):
            build_toy(self.lake, self.raw)
        if action in ("gc", "catalog", "drop", "restore"):
            self.allowed = [self.new]
        if action in ("drop", "restore"):
            (part, *_) = (v.places[0] for v in current_versions(self.lake, "toy"))
            data = bytearray(part.read_bytes())
            data[len(data) // 2] ^= 1
            part.chmod(0o644)
            part.unlink()
            part.write_bytes(data)
        if action == "restore":
            drop(self.lake, verify_lake(self.lake).damage)
        self.end = self.allowed[0] if action == "go_back" else self.new
        self.allowed.append(self.new)
        shutil.rmtree(other)

    @cached_property
    def points(self) -> int:
        """Calls of the action when nothing goes wrong."""
        lake = copied(self, self.raw.parent / "count")
        code, count = strike(self.action, lake, self.raw)
        assert code == ENDED, f"{self.action}: {count}"
        return int(count)

    def check(self, lake: Path, fault: str, point: int) -> None:
        """Strike, look, do it again, look."""
        where = f"{self.action}, {fault} at call {point}"
        code, said = strike(self.action, lake, self.raw, fault, point)
        killed = fault in ("kill", "lost")
        allowed = (-signal.SIGKILL, ENDED) if killed else (SENTENCE, ENDED)
        assert code in allowed, f"{where}: ended with {code} {said}"
        self.look(lake, where)
        code, said = strike(self.action, lake, self.raw, "kill", 10**9)
        assert code == ENDED, f"{where}: the same once more ended with {code} {said}"
        if self.action in ("drop", "restore"):
            code, said = strike("drop", lake, self.raw, "kill", 10**9)
            assert code == ENDED, f"{where}: drop ended with {code} {said}"
        assert not verify_lake(lake).damage, where
        if self.action in ("drop", "restore", "gc"):
            build_toy(lake, self.raw)
        assert same(rows_of(lake), self.end), f"{where}: other rows in the end"

    def look(self, lake: Path, where: str) -> None:
        """Whatever is shown is of one build, and whole."""
        if not lake.exists():
            return
        snapshot = current_snapshot(lake, "toy")
        shown = rows_of(lake, whole=self.action not in ("drop", "restore"))
        for table, rows in shown.items():
            assert any(table in one and rows.equals(one[table]) for one in self.allowed), (
                f"{where}: {table} is of no build"
            )
        if snapshot is not None and self.action in ("build", "first_build", "go_back", "gc"):
            assert any(same(shown, one) for one in self.allowed), f"{where}: a mixture"
        assert history(lake, "toy") or snapshot is None


def rows_of(lake: Path, whole: bool = True) -> Rows:
    """Every current table; of one that is damaged nothing, where that is so."""
    found = {}
    for version in current_versions(lake, "toy") if lake.exists() else []:
        if whole or all(place.exists() for place in version.places):
            try:
                found[version.manifest.table] = version.read()
            except Exception:
                if whole:
                    raise
    return found


def same(one: Rows, other: Rows) -> bool:
    return one.keys() == other.keys() and all(one[name].equals(other[name]) for name in one)


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> dict[str, Start]:
    return {action: Start(action, tmp_path_factory.mktemp(action)) for action in CHECKED}


def copied(start: Start, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    lake = folder / "lake"
    if start.lake.exists():
        shutil.copytree(start.lake, lake, symlinks=True)
    return lake


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("action", CHECKED)
def test_a_call_that_was_drawn(action: str, fault: str, starts, tmp_path) -> None:
    start = starts[action]
    point = random.Random(f"{action} {fault}").randint(1, start.points)
    start.check(copied(start, tmp_path), fault, point)


def test_the_lab_sees_what_was_not_synced(starts, tmp_path) -> None:
    """A build whose folders are never fsynced is lost, though it ended."""
    start = starts["first_build"]
    lake = copied(start, tmp_path / "whole")
    code, count = strike("careless_build", lake, start.raw)
    assert code == ENDED and same(rows_of(lake), start.new)
    lake = copied(start, tmp_path / "lost")
    code, _ = strike("careless_build", lake, start.raw, "lost", int(count))
    assert code == -signal.SIGKILL
    with pytest.raises((LakeError, AssertionError)):
        assert same(rows_of(lake), start.new)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("action", CHECKED)
def test_every_call(action: str, fault: str, starts, tmp_path) -> None:
    start, wrong = starts[action], []
    for point in range(1, start.points + 1):
        folder = tmp_path / str(point)
        folder.mkdir()
        try:
            start.check(copied(start, folder), fault, point)
        except AssertionError as error:
            wrong.append(str(error).partition("\n")[0])
        shutil.rmtree(folder, ignore_errors=True)
    assert not wrong, "\n".join(wrong)
