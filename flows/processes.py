"""Background processes that a later command can find again and end, and never another's.

A process is known by its id, the moment it started (in ticks of the kernel) and the boot of the
machine: an id alone is used again by other programs.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from storage.atomic import write_bytes

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG, which exec keeps
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def start_mark(pid: int) -> str | None:
    """When this process started, as the kernel counts; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"{BOOT_ID.read_text().strip()}/{fields[19]}"


@dataclass(frozen=True)
class Background:
    """One named process: `<folder>/<name>.json` says which, `<folder>/<name>.log` what it said."""

    name: str
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def record(self) -> Path:
        return self.folder / f"{self.name}.json"

    def pid(self) -> int | None:
        """Its id while it lives."""
        try:
            record = json.loads(self.record.read_text())
        except FileNotFoundError:
            return None
        # One that ended before it could be recorded has no mark, and never lives.
        lives = record["start"] is not None and start_mark(record["pid"]) == record["start"]
        return record["pid"] if lives else None

    def start(
        self, command: list[str], environment: dict[str, str], *, for_ever: bool = True
    ) -> None:
        """Start it in a session of its own; what it says goes to the log.

        Unless it is `for_ever`, it dies with the thread that calls this, however that ends.
        """
        if not for_ever:
            command = [sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid()), *command]
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".old.log"))
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        record = {"pid": process.pid, "start": start_mark(process.pid), "command": command}
        write_bytes(self.record, json.dumps(record).encode())

    def family(self) -> list[psutil.Process]:
        """It and everything that it started."""
        pid = self.pid()
        if pid is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def ask_to_stop(self) -> None:
        if (pid := self.pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def stop(self, wait_seconds: float = 30.0) -> bool:
        """Ask it to end, insist after a while, forget it; True if there was one."""
        family = self.family()
        self.ask_to_stop()
        end_all(family[:1], wait_seconds, term_sent=True)
        end_all(family[1:], min(5.0, wait_seconds))
        self.record.unlink(missing_ok=True)
        return bool(family)

    def last_words(self, lines: int = 15) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def end_all(
    processes: Iterable[psutil.Process], wait_seconds: float, *, term_sent: bool = False
) -> None:
    """SIGTERM, then SIGKILL for what is still there; psutil refuses ids that are used again."""
    living = [process for process in processes if process.is_running()]
    for process in [] if term_sent else living:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, living = psutil.wait_procs(living, wait_seconds)
    for process in living:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(living, 10.0)


def processes_with(name: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Our own processes that have an environment variable of that name, with their environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if name in environment and process.status() != psutil.STATUS_ZOMBIE:
                yield process, environment


def wait_until(ready: Callable[[], object], wait_seconds: float, every: float = 0.2) -> bool:
    """Call `ready` until it is true; False when the time is up."""
    deadline = time.monotonic() + wait_seconds
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
    return True


def end_within(seconds: float, stop: BaseException) -> None:
    """End this process by then, even if threads of it do not: Python waits for them without limit.

    All that the lake holds is committed in one step each, so nothing is lost by it.
    """
    code = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
