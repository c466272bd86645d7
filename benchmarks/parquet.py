"""A 700,000-row table our way and with pyarrow's defaults: size, write time, a filtered query.

`python -m benchmarks.parquet`
"""

import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.table import Column, Table
from storage.parquet import write_parquet

ROWS = 700_000
CLIPS = Table(
    name="clips",
    description="Clips.",
    columns=(
        Column("sample_id", pa.string(), "Sample"),
        Column("label", pa.string(), "Label"),
        Column("split", pa.string(), "Split"),
        Column("start", pa.int32(), "Start", unit="second"),
        Column("frames", pa.int64(), "Frames"),
        Column("fps", pa.float64(), "Frames per second"),
        Column("score", pa.float32(), "Score"),
    ),
    key=("label", "sample_id"),
)


def make() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    labels = np.array([f"action number {i}" for i in range(700)])
    return pl.DataFrame(
        {
            "sample_id": [f"{i:011x}_{i % 600:06d}" for i in rng.permutation(ROWS)],
            "label": labels[rng.zipf(1.3, ROWS) % 700],
            "split": rng.choice(["train", "validate", "test"], ROWS, p=[0.8, 0.1, 0.1]),
            "start": rng.integers(0, 600, ROWS).astype(np.int32),
            "frames": rng.normal(300, 10, ROWS).astype(np.int64),
            "fps": rng.choice([25.0, 29.97, 30.0], ROWS),
            "score": rng.normal(size=ROWS).astype(np.float32),
        }
    ).sort("label", "sample_id")


def timed(run, times: int = 5) -> float:
    """Best of several."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    frame = make()
    plain_table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = Path(folder) / "ours.parquet", Path(folder) / "plain.parquet"
        write = {
            "ours": timed(lambda: write_parquet(frame, CLIPS, ours), 3),
            "pyarrow defaults": timed(lambda: pq.write_table(plain_table, plain), 3),
        }
        query = (
            "select count(*), avg(score) from '{}' where label = 'action number 42' and start < 100"
        )
        read = {
            name: timed(lambda path=path: duckdb.sql(query.format(path)).fetchall())
            for name, path in (("ours", ours), ("pyarrow defaults", plain))
        }
        size = {"ours": ours.stat().st_size, "pyarrow defaults": plain.stat().st_size}
        print(f"{ROWS:,} rows           bytes   ratio   write s   ratio   query ms   ratio")
        for name in size:
            base = "pyarrow defaults"
            print(
                f"{name:<18} {size[name]:>12,} {size[name] / size[base]:7.2f} {write[name]:9.2f} "
                f"{write[name] / write[base]:7.2f} {read[name] * 1000:10.1f} "
                f"{read[name] / read[base]:7.2f}"
            )


if __name__ == "__main__":
    main()
