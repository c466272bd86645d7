"""One builder at a time. The kernel frees the lock when its holder dies, also by kill -9."""

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
from storage.layout import lock_path, pieces_path


@contextlib.contextmanager
def locked(lake: Path, name: str, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock called `name`; wait up to `wait_seconds` for it, else say who has it."""
    path = lock_path(lake, name)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockedError(
                        f"{name} is being built by {_holder(path)}; wait for it to end, or set "
                        "NOVELTY_LOCK_WAIT to the seconds to wait"
                    ) from None
                time.sleep(0.05)
        file.seek(0)
        file.truncate()
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        yield


@contextlib.contextmanager
def all_locked(lake: Path) -> Iterator[None]:
    """Hold the lock of every benchmark in the lake: nobody builds meanwhile."""
    with contextlib.ExitStack() as stack:
        for folder in sorted(pieces_path(lake).glob("*")):
            stack.enter_context(locked(lake, folder.name))
        yield


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"
