"""What stages and Prefect cost: 200 shards in a flow against the same work in a plain loop.

`python -m benchmarks.orchestration` starts a Prefect server in a temporary folder for one part.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa

from flows.runner import run_directly
from flows.service import temporary_server
from flows.tracked import run_tracked, server_address, tracked_flow
from schemas.config import Settings
from schemas.table import Column, Table
from storage.layout import content_key
from tasks.engine.stage import Build, Produced, Shard, stage

SHARDS = 200
ROWS = 20_000
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
    """Some tens of milliseconds of real work on a shard."""
    frame = pl.DataFrame({"row": pl.int_range(ROWS, dtype=pl.Int32, eager=True)})
    for power in range(2, 12):
        frame = frame.with_columns(
            ((pl.col("row") + number).cast(pl.Float64).log1p() ** power).alias("value")
        )
    return (
        frame.select(pl.lit(number, pl.Int32).alias("shard"), "row", "value")
        .sort("value")
        .sort("row")
    )


@stage(writes=(NUMBERS,))
def make_numbers(shard: Shard, settings: Settings) -> Produced:
    """Make the numbers of one shard."""
    return Produced({"numbers": work(shard.about)}, ROWS)


def build(lake: Path) -> None:
    with Build("bench", lake) as running:
        running.run(make_numbers, [Shard(f"{n:03d}", about=n) for n in range(SHARDS)], Settings())


def build_tracked(lake: Path) -> None:
    address = server_address()
    if address is None:
        raise SystemExit("the Prefect server did not start")
    run_tracked(tracked_flow("bench", lambda config: build(lake)), {"lake": str(lake)}, address)


def build_directly(lake: Path) -> None:
    run_directly("bench", lambda config: build(lake), {"lake": str(lake)})


def write_service(root: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (root / "service.yaml").write_text(f"state: state\nport: {probe.getsockname()[1]}\n")
    os.environ["NOVELTY_SERVICE"] = str(root / "service.yaml")
    os.environ.pop("PREFECT_API_URL", None)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_service(root)
        start = time.perf_counter()
        for number in range(SHARDS):
            work(number).write_parquet(root / f"{number}.parquet", compression="zstd")
        plain = time.perf_counter() - start

        timed = {}

        def measure(name: str, run: Callable[[Path], None], lake: str) -> None:
            start = time.perf_counter()
            run(root / lake)
            timed[name] = time.perf_counter() - start

        measure("a flow without a server", build_directly, "one")
        measure("the same again, nothing changed", build_directly, "one")
        start = time.perf_counter()
        with temporary_server():
            first = time.perf_counter() - start
            measure("the flow under a Prefect server", build_tracked, "two")
            measure("the same again under the server", build_tracked, "two")
        print(f"{SHARDS} shards of {ROWS} rows, key {content_key(SHARDS)[:8]}")
        print(f"{'plain loop, plain Parquet':<40} {plain:7.2f} s   1.00 x")
        for name, seconds in timed.items():
            print(f"{name:<40} {seconds:7.2f} s {seconds / plain:6.2f} x")
        print(f"{'start of the server':<40} {first:7.2f} s")


if __name__ == "__main__":
    main()
