"""A build that is told to stop ends its trainings at once; the same command goes on later."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import psutil
import pytest

from schemas.config import Settings
from tasks.engine.stage import Build, Produced, Shard, stage
from tests.toy import TOTALS

LIMIT_SECONDS = 120.0
BUILD = """
import signal
import sys
from pathlib import Path
from flows.cli import stop_at_sigterm
from tests.test_stop import build_forever
stop_at_sigterm()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has it ignored
build_forever(Path(sys.argv[1]))
"""


@stage(writes=(TOTALS,), apart=True)
def train_forever(shard: Shard, settings: Settings) -> Produced:
    """Say who is at work, then never end."""
    Path(shard.about).write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def build_forever(folder: Path) -> None:
    # After a query polars has its own way with Ctrl-C.
    pl.LazyFrame({"a": [1]}).collect()
    with Build("toy", folder / "lake", workers=1) as build:
        build.run(train_forever, [Shard("all", about=str(folder / "worker"))], Settings())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_training_at_once(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path)])
    worker = tmp_path / "worker"
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (worker.exists() and worker.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(LIMIT_SECONDS) != 0
        assert not psutil.pid_exists(int(worker.read_text()))
    finally:
        process.kill()  # its worker dies with it
        process.wait()
