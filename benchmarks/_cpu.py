"""CPU seconds, which other work on the machine changes less than the time that passes."""

import multiprocessing
import os
import resource
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[1]


class Run(NamedTuple):
    """What a command took, and what it printed."""

    cpu: float
    wall: float
    out: str
    err: str


def run(*command: str, checkout: Path = HERE) -> Run:
    """Python with these arguments and all that it starts; no Prefect server follows it.

    Modules are compiled, as they are from the second command on wherever Python may write.
    """
    environment = os.environ | {"PYTHONPATH": str(checkout), "NOVELTY_SERVICE": os.devnull}
    for name in ("PREFECT_API_URL", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    _compile(checkout)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=checkout
    )
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(cpu, wall, done.stdout, done.stderr)


@cache
def _compile(checkout: Path) -> None:
    folders = ("schemas", "storage", "tasks", "flows", "benchmarks")
    subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], cwd=checkout, check=True)


def spent() -> float:
    """CPU seconds of this process and of the workers that it started."""
    times = os.times()
    seconds = times.user + times.system
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds
