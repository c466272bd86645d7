"""Run as a child: do something to a lake and kill -9 ourselves at the n-th passing of a step."""

import os
import signal
import sys
from pathlib import Path

from storage import atomic, catalog, pieces, remote, remote_upkeep, snapshots, tables, tombstones
from storage.damage import drop, restorable, restore, verify_lake
from storage.upkeep import find_garbage, find_remote_garbage, remove_remote_garbage
from tests.toy import build_toy

lake, raw, wanted, number, *action = sys.argv[1:]
passed = 0


def kill_here(name: str) -> None:
    global passed
    if name == wanted:
        passed += 1
        if passed == int(number):
            os.kill(os.getpid(), signal.SIGKILL)


def write_report() -> None:
    from tasks.report import write_report

    write_report(Path(lake), "toy")


def collect_garbage() -> None:
    """All that is not current, as `novelty gc --grace -1 --keep 1` does."""
    remove_remote_garbage(Path(lake), find_remote_garbage(Path(lake), -1, keep=1))
    tombstones.discard(Path(lake), find_garbage(Path(lake), -1, keep=1))


ACTIONS = {
    "build": lambda: build_toy(Path(lake), Path(raw), workers=1),
    "gc": collect_garbage,
    "drop": lambda: drop(Path(lake), verify_lake(Path(lake)).damage),
    "restore": lambda: restore(Path(lake), min(restorable(Path(lake)))),
    "catalog": lambda: catalog.refresh_catalog(Path(lake)),
    "report": write_report,
}
for module in (atomic, catalog, pieces, remote, remote_upkeep, snapshots, tables, tombstones):
    module.step = kill_here
ACTIONS[action[0] if action else "build"]()
