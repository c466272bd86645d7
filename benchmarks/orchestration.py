"""What stages, workers and Prefect cost: 200 shards of 50 ms in a flow against a plain loop.

`python -m benchmarks.orchestration` prints CPU seconds of all processes, with the overhead over the
plain loop, which writes plain Parquet. It starts a Prefect server in a temporary folder for the
last part; what the server itself does is not counted.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa

from benchmarks._cpu import spent
from schemas.config import Settings
from schemas.table import Column, Table
from tasks.engine.places import WORKERS
from tasks.engine.stage import Build, Produced, Shard, stage

SHARDS = 200
SECONDS = 0.05
ROWS = 100
MOST = 0.10
WORKER_COUNT = 2
NUMBERS = Table(
    name="numbers",
    description="Numbers.",
    columns=(
        Column("shard", pa.int32(), "Shard"),
        Column("row", pa.int32(), "Row"),
        Column("value", pa.float64(), "Value"),
    ),
    key=("shard", "row"),
)


def work(number: int) -> pl.DataFrame:
    """So much CPU time in plain Python, and a few rows."""
    end = time.thread_time() + SECONDS
    while time.thread_time() < end:
        sum(range(1000))
    rows = pl.int_range(ROWS, dtype=pl.Int32, eager=True).alias("row")
    shard, value = pl.lit(number, pl.Int32).alias("shard"), (rows * 0.5).alias("value")
    return rows.to_frame().select(shard, "row", value)


@stage(writes=(NUMBERS,))
def make_numbers(shard: Shard, settings: Settings) -> Produced:
    """Make the numbers of one shard."""
    return Produced({"numbers": work(shard.about)}, ROWS)


def build(lake: Path) -> None:
    shards = [Shard(f"{n:03d}", about=n) for n in range(SHARDS)]
    with Build("bench", lake, workers=WORKER_COUNT) as running:
        running.run(make_numbers, shards, Settings())


def build_tracked(lake: Path) -> None:
    from flows.tracked import run_tracked, server_address, tracked_flow

    address = server_address()
    if address is None:
        raise SystemExit("the Prefect server did not start")
    run_tracked(tracked_flow("bench", lambda config: build(lake)), {"lake": str(lake)}, address)


def build_directly(lake: Path) -> None:
    from flows.runner import run_directly

    run_directly("bench", lambda config: build(lake), {"lake": str(lake)})


def write_service(root: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (root / "service.yaml").write_text(f"state: state\nport: {probe.getsockname()[1]}\n")
    os.environ["NOVELTY_SERVICE"] = str(root / "service.yaml")
    os.environ.pop("PREFECT_API_URL", None)


def main() -> None:
    from flows.service import temporary_server

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_service(root)

        def loop(_: Path) -> None:
            for number in range(SHARDS):
                work(number).write_parquet(root / f"{number}.parquet", compression="zstd")

        def measure(title: str, function: Callable[[Path], None], lake: str) -> float:
            start, wall = spent(), time.perf_counter()
            function(root / lake)
            seconds, wall = spent() - start, time.perf_counter() - wall
            over = seconds / plain - 1 if plain else 0.0
            print(f"{title:<40} {seconds:6.2f} s {over:+7.1%}   passed {wall:.1f} s", flush=True)
            return seconds

        plain = 0.0
        print(f"{SHARDS} shards of {SECONDS * 1e3:.0f} ms, {WORKER_COUNT} workers; CPU seconds")
        plain = measure("plain loop, plain Parquet", loop, "")
        measure("a flow, its workers started for it", build_directly, "cold")
        warm = measure("a flow, its workers are there", build_directly, "warm")
        measure("the same again, nothing changed", build_directly, "warm")
        with temporary_server():
            build_tracked(root / "warm")  # imports Prefect
            measure("the flow under a Prefect server", build_tracked, "tracked")
            measure("the same again under the server", build_tracked, "tracked")
        WORKERS.stop()
    if warm / plain - 1 > MOST:
        raise SystemExit(f"the flow costs more than {MOST:.0%} over the plain loop")


if __name__ == "__main__":
    main()
