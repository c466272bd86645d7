"""Stages for the tests of clusters, in a module that workers import quickly (no Prefect)."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.engine.stage import Produced, Shard, stage
from tests.toy import FILES, READINGS, ReadSettings, read_lines

PATIENCE_SECONDS = 60


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def who(*numbers: int) -> Produced:
    """One row that tells processes; the key is the first of them."""
    rows = [(str(numbers[0]), place, float(n % 100), "a") for place, n in enumerate(numbers)]
    return Produced(
        {"readings": pl.DataFrame(rows, schema=READINGS.polars_schema, orient="row")}, len(rows)
    )


@stage(writes=(READINGS, FILES))
def read_after_a_death(shard: Shard, settings: ReadSettings) -> Produced:
    """As `read_lines`, but the first to make f3.txt tells its process and waits to be killed."""
    folder = Path(shard.about)
    try:
        if shard.name == "f3.txt":
            with (folder / "process").open("x") as file:
                file.write(str(os.getpid()))
            wait_for((folder / "killed").exists)
    except FileExistsError:
        pass
    return read_lines(shard, settings)


@stage(writes=(READINGS, FILES))
def read_after_a_word(shard: Shard, settings: ReadSettings) -> Produced:
    """As `read_lines`, once the file `go on` is there."""
    folder = Path(shard.about)
    (folder / "before").touch()
    wait_for((folder / "go on").exists)
    return read_lines(shard, settings) if shard.files else who(0)


@stage(writes=(READINGS,), tags=("gpu",), apart=True)
def train_apart(shard: Shard, settings: Settings) -> Produced:
    """Tells whose child it is, and whether another one was under way at the same place."""
    folder = Path(shard.about)
    (folder / f"parent-{shard.name}").write_text(str(os.getppid()))
    try:
        (folder / "place").open("x").close()
    except FileExistsError:
        (folder / f"shared-{shard.name}").touch()
    produced = who(int(shard.name))
    time.sleep(0.2)  # so that another one would meet this one
    (folder / "place").unlink(missing_ok=True)
    return produced


@stage(writes=(READINGS,))
def meet_three(shard: Shard, settings: Settings) -> Produced:
    """Wait until three processes are here."""
    (Path(shard.about) / str(os.getpid())).touch()
    wait_for(lambda: len(os.listdir(shard.about)) >= 3)
    return who(int(shard.name))


@stage(writes=(READINGS,), apart=True)
def tell_process(shard: Shard, settings: Settings) -> Produced:
    (Path(shard.about) / shard.name).write_text(f"{os.getpid()} {os.getppid()}")
    return who(int(shard.name))


@stage(writes=(READINGS,), tags=("gpu",))
def tell_worker(shard: Shard, settings: Settings) -> Produced:
    (Path(shard.about) / shard.name).write_text(str(os.getpid()))
    return who(int(shard.name))


@stage(writes=(READINGS,))
def fail(shard: Shard, settings: Settings) -> Produced:
    if shard.name == "user":
        raise ConfigError("that cannot be; do something else")
    raise ValueError("a defect of ours")


@stage(writes=(READINGS,), apart=True)
def die(shard: Shard, settings: Settings) -> Produced:
    os._exit(3)


@stage(writes=(READINGS,))
def end_worker(shard: Shard, settings: Settings) -> Produced:
    """The process that makes it dies, whoever it is."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives")


@stage(writes=(READINGS,))
def fail_beside(shard: Shard, settings: Settings) -> Produced:
    """`fails` fails once `waits` is under way, which nobody lets go on."""
    started = Path(shard.about) / "started"
    if shard.name == "waits":
        started.touch()
        wait_for((Path(shard.about) / "never").exists)
    wait_for(started.exists)
    raise ConfigError("fails as it should")
