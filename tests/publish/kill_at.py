"""Run as a child: publish the toy benchmark and kill -9 ourselves at a step."""

import os
import signal
import sys
from pathlib import Path

from storage import atomic
from tasks.publish.folder import publish

lake, out, version, wanted = sys.argv[1:]


def kill_here(name: str) -> None:
    if name == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


atomic.step = kill_here
publish(Path(lake), "toy", Path(out), version=version, tables=["totals"], date="2026-11-16")
