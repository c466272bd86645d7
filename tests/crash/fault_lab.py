"""A disk that fails on demand: every file-system call that storage/ makes in a lake is a point.

A child process does one thing to a lake. Calls are counted by an audit hook, which sees each one
before it happens; `os.fsync` and the Parquet writer, which no hook sees, are counted by wrappers.
At the chosen point the fault strikes:

kill    the process is killed with -9
lost    so it is, and what was not fsynced is lost: content of files, entries of folders
EIO     this one call fails, as by a bad disk; ENOSPC: as by a full one
"""

import errno
import io
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from schemas.errors import NoveltyError
from storage import atomic, catalog, tombstones
from storage.damage import drop, restorable, restore, restore_snapshot, verify_lake
from storage.snapshots import history
from storage.upkeep import find_garbage
from tests.toy import build_toy

STORAGE = str(Path(catalog.__file__).parent) + os.sep
FAULTS = ("kill", "lost", "EIO", "ENOSPC")
FULL = ("open", "os.mkdir", "os.link", "os.symlink", "os.rename", "fsync", "parquet")
"""Calls that a full disk may refuse; `open` where it writes."""
ENDED, SENTENCE, DEFECT = 0, 2, 3
"""Exit codes: done, stopped by a sentence, any other exception."""
SQLITE = "hashes.sqlite"  # has a journal of its own


def act_build(lake: Path, raw: Path) -> None:
    build_toy(lake, raw, workers=1)


def act_gc(lake: Path, raw: Path) -> None:
    """All that is not current, as `novelty gc --grace -1 --keep 1` does."""
    tombstones.discard(lake, find_garbage(lake, -1, keep=1))


def act_drop(lake: Path, raw: Path) -> None:
    drop(lake, verify_lake(lake).damage)


def act_restore(lake: Path, raw: Path) -> None:
    for name in restorable(lake):
        restore(lake, name)


def act_go_back(lake: Path, raw: Path) -> None:
    """To the first snapshot."""
    first = history(lake, "toy")[0]
    if history(lake, "toy")[-1].tables != first.tables:
        restore_snapshot(lake, first)


def act_catalog(lake: Path, raw: Path) -> None:
    catalog.refresh_catalog(lake)


def act_carelessly(lake: Path, raw: Path) -> None:
    """A build that fsyncs no folder and no part: the lab must find that out."""
    atomic.fsync_path = lambda path: None
    act_build(lake, raw)


ACTIONS: dict[str, Callable[[Path, Path], None]] = {
    "build": act_build,
    "first_build": act_build,
    "gc": act_gc,
    "drop": act_drop,
    "restore": act_restore,
    "go_back": act_go_back,
    "catalog": act_catalog,
    "careless_build": act_carelessly,
}
CHECKED = tuple(name for name in ACTIONS if name != "careless_build")


class Disk:
    """Counts the calls below `lake` and lets the one of number `point` go wrong."""

    def __init__(self, lake: Path, fault: str, point: int) -> None:
        self.lake, self.fault, self.point = str(lake), fault, point
        self.count, self.busy = 0, False
        self.log: list[tuple[Callable[[], None], set[str]]] = []
        """How to undo changes of folders, and the folders whose fsync makes each one safe."""
        self.before = {path.lstat().st_ino for path in lake.rglob("*")} if lake.exists() else set()
        self.synced: set[int] = set()
        self.backups = lake.parent / f"{lake.name}.backups"

    def watch(self) -> None:
        real_sync, real_writer = os.fsync, pq.ParquetWriter

        def fsync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.call("fsync", path)
            real_sync(descriptor)
            self.synced.add(os.fstat(descriptor).st_ino)
            self.log = [(undo, folders - {path}) for undo, folders in self.log]
            self.log = [(undo, folders) for undo, folders in self.log if folders]

        def writer(path: Any, *given: Any, **named: Any) -> Any:
            self.call("parquet", str(path))
            return real_writer(path, *given, **named)

        os.fsync, pq.ParquetWriter = fsync, writer
        self.backups.mkdir(exist_ok=True)
        sys.addaudithook(self.heard)

    def heard(self, event: str, given: tuple[Any, ...]) -> None:
        if self.busy or not (event == "open" or event.startswith("os.")) or not given:
            return
        self.busy = True
        try:
            self.noticed(event, given)
        finally:
            self.busy = False

    def noticed(self, event: str, given: tuple[Any, ...]) -> None:
        folders = {"os.rename": given[2:4], "os.link": given[2:4], "os.symlink": given[2:3]}
        folder = folders.get(event, given[-1:])[0] if event not in ("open", "os.listdir") else -1
        path = full_path(given[0], folder)
        target = path
        if event in ("os.rename", "os.link", "os.symlink"):
            target = full_path(given[1], folders[event][-1])
        if target is None or not f"{target}/".startswith(f"{self.lake}/") or not from_storage():
            return
        writes = event != "open" or bool(given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        self.call(event, target, writes and event not in ("os.listdir", "os.scandir"))
        if writes:
            self.remember(event, path or "", target)

    def call(self, name: str, path: str, writes: bool = True) -> None:
        self.count += 1
        if self.count != self.point:
            return
        self.busy = True
        if self.fault == "lost":
            self.lose()
        if self.fault in ("kill", "lost"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.busy = False
        if self.fault == "ENOSPC" and not (writes and name in FULL):
            return
        code = getattr(errno, self.fault)
        raise OSError(code, os.strerror(code), path)

    # ------------------------------------------------------------ what a crash takes back

    def remember(self, event: str, path: str, target: str) -> None:
        """How to undo this change of a folder, which is about to happen."""
        parents = {os.path.dirname(target)}
        kept = self.kept(target)
        if event == "open" and kept is None:
            self.log.append((lambda: remove(target), parents))
        elif event == "os.rename":
            number = os.lstat(path).st_ino if os.path.lexists(path) else -1

            def rename_back() -> None:
                if os.path.lexists(target) and os.lstat(target).st_ino == number:
                    os.rename(target, path)
                    put_back(kept, target)

            self.log.append((rename_back, parents))
        elif event in ("os.link", "os.symlink"):
            self.log.append((lambda: remove(target), parents))
        elif event == "os.remove":
            self.log.append((lambda: put_back(kept, target), parents))
        elif event == "os.rmdir":
            self.log.append((lambda: os.makedirs(target, exist_ok=True), parents))

    def kept(self, path: str) -> tuple[str, str] | None:
        """What stands there now: where a link leads, or a second name of the file."""
        if os.path.islink(path):
            return "link", os.readlink(path)
        if not os.path.isfile(path):
            return None
        copy = str(self.backups / str(len(os.listdir(self.backups))))
        os.link(path, copy)
        return "file", copy

    def lose(self) -> None:
        for undo, _ in reversed(self.log):
            undo()
        for path in Path(self.lake).rglob("*"):
            new = path.is_file() and not path.is_symlink() and SQLITE not in path.name
            if new and path.stat().st_ino not in self.before | self.synced:
                os.truncate(path, 0)


def full_path(path: Any, folder: Any) -> str | None:
    """Of a name as the call gave it, perhaps relative to an open folder."""
    if isinstance(path, int) or path is None:
        return None
    name = os.fsdecode(path)
    if os.path.isabs(name) or not isinstance(folder, int) or folder < 0:
        return os.path.abspath(name)
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)


def from_storage() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(STORAGE):
            return True
        frame = frame.f_back
    return False


def remove(path: str) -> None:
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.path.islink(path)):
        os.unlink(path)


def put_back(kept: tuple[str, str] | None, path: str) -> None:
    if kept is None:
        return
    remove(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if kept[0] == "link":
        os.symlink(kept[1], path)
    else:
        os.link(kept[1], path)


def _child(action: str, lake: str, raw: str, fault: str, point: int, said: str) -> None:
    """Ends with one of the exit codes above, or killed; says how many calls there were, or why."""
    sys.stdout = sys.stderr = io.StringIO()
    disk = Disk(Path(lake), fault, point)
    disk.watch()
    code, text = ENDED, ""
    try:
        ACTIONS[action](Path(lake), Path(raw))
    except (NoveltyError, OSError):
        code = SENTENCE
    except BaseException as error:
        code, text = DEFECT, f"{type(error).__name__}: {error}"
    disk.busy = True
    Path(said).write_text(text or str(disk.count))
    os._exit(code)


def strike(
    action: str, lake: Path, raw: Path, fault: str = "kill", point: int = 0
) -> tuple[int, str]:
    """Do it in a child: its exit code, and how many calls there were or what a defect said."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    said = lake.parent / f"{lake.name}.said"
    said.unlink(missing_ok=True)
    given = (action, str(lake), str(raw), fault, point, str(said))
    child = context.Process(target=_child, args=given)
    child.start()
    child.join(120)
    shutil.rmtree(lake.parent / f"{lake.name}.backups", ignore_errors=True)
    if child.exitcode is None:
        child.kill()
        raise AssertionError(f"{action}: it hangs after {fault} at {point}")
    return child.exitcode, said.read_text() if said.exists() else ""
