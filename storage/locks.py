"""One builder at a time, and none while something is removed.

The kernel frees the lock when its holder dies, also by kill -9.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import LockedError
from storage.atomic import explained
from storage.layout import lock_path

WHOLE_LAKE = "whole_lake"


@contextlib.contextmanager
def locked(
    lake: Path,
    name: str,
    wait_seconds: float = 0.0,
    shared: bool = False,
    busy: str = "",
    cure: str = "wait for it to end, or set NOVELTY_LOCK_WAIT to the seconds to wait",
) -> Iterator[None]:
    """Hold the lock called `name`; wait up to `wait_seconds` for it, else say who has it.

    Many may hold it `shared` at once. `busy` says what the holder does, `cure` what to do then.
    """
    path = lock_path(lake, name)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    with file:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockedError(
                        f"{busy or f'{name} is being built'} by {_holder(path)}; {cure}"
                    ) from None
                time.sleep(0.05)
        with contextlib.suppress(OSError):  # a full disk: `gc` makes room on it
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        yield


@contextlib.contextmanager
def benchmark_locked(lake: Path, benchmark: str, wait_seconds: float = 0.0) -> Iterator[None]:
    """Nobody else builds this benchmark, and nothing is removed from the lake meanwhile."""
    with nothing_removed(lake, wait_seconds), locked(lake, benchmark, wait_seconds):
        yield


@contextlib.contextmanager
def nothing_removed(lake: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Nothing is removed from the lake meanwhile; others may build."""
    busy = f"something is being removed from {lake}"
    with locked(lake, WHOLE_LAKE, wait_seconds, shared=True, busy=busy):
        yield


@contextlib.contextmanager
def all_locked(lake: Path) -> Iterator[None]:
    """Nobody builds anything meanwhile, not even a benchmark that the lake does not have yet."""
    with locked(lake, WHOLE_LAKE, busy=f"{lake} is being built in"):
        yield


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"
