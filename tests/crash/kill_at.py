"""Run as a child: build the toy benchmark and kill -9 ourselves at the n-th passing of a step."""

import os
import signal
import sys
from pathlib import Path

from storage import atomic, pieces, remote, tables
from tests.toy import build_toy

lake, raw, wanted, number = sys.argv[1:]
passed = 0


def kill_here(name: str) -> None:
    global passed
    if name == wanted:
        passed += 1
        if passed == int(number):
            os.kill(os.getpid(), signal.SIGKILL)


for module in (atomic, pieces, remote, tables):
    module.step = kill_here
build_toy(Path(lake), Path(raw), workers=1)
