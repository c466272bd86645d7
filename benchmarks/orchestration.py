"""What stages and Prefect cost: 200 shards in a flow against the same work in a plain loop.

`python -m benchmarks.orchestration`
"""

import tempfile
import time
from pathlib import Path

import polars as pl
import pyarrow as pa
from prefect import flow

import flows  # noqa: F401  keeps Prefect offline
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


prefect_build = flow(name="bench")(build)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        @flow(name="warm-up")
        def warm_up() -> None:
            """The first serverless flow of a process starts the API."""

        start = time.perf_counter()
        warm_up()
        first = time.perf_counter() - start

        start = time.perf_counter()
        for number in range(SHARDS):
            work(number).write_parquet(root / f"{number}.parquet", compression="zstd")
        plain = time.perf_counter() - start

        timed = {}
        for name, run, lake in (
            ("stages without Prefect", build, root / "one"),
            ("stages in a Prefect flow", prefect_build, root / "two"),
            ("the same flow again, nothing changed", prefect_build, root / "two"),
        ):
            start = time.perf_counter()
            run(lake)
            timed[name] = time.perf_counter() - start
        print(f"{SHARDS} shards of {ROWS} rows, key {content_key(SHARDS)[:8]}")
        print(f"{'plain loop, plain Parquet':<40} {plain:7.2f} s   1.00 x")
        for name, seconds in timed.items():
            print(f"{name:<40} {seconds:7.2f} s {seconds / plain:6.2f} x")
        print(f"{'first flow of a process (start of the API)':<40} {first:7.2f} s")


if __name__ == "__main__":
    main()
