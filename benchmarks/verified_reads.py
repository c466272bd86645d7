"""What it costs to compare raw files and parts with their SHA-256 when they are read.

`python -m benchmarks.verified_reads` builds pictures (PNG, as in NovelCraft and the semantic sets)
and two stages that read them, each as if in a new process: one decodes every picture, the other
only counts the rows, which is the worst case there is. It prints shares of the CPU time of one run.
"""

import argparse
import hashlib
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import polars as pl
import pyarrow as pa

from schemas.config import Settings
from schemas.table import Column, Table
from storage import raw as raw_files
from storage import verified
from storage.raw import open_raw
from tasks.engine.stage import Build, Produced, Shard, stage

MOST = 0.05
PICTURES = Table(
    name="pictures",
    description="Pictures.",
    columns=(Column("name", pa.string(), "Name"), Column("png", pa.binary(), "Picture")),
    key=("name",),
)
COUNTS = Table(
    name="counts",
    description="Counts.",
    columns=(Column("name", pa.string(), "Name"), Column("count", pa.int64(), "Count")),
    key=("name",),
)


@stage(writes=(PICTURES,))
def read_pictures(shard: Shard, settings: Settings) -> Produced:
    """Raw pictures as rows; each is decoded once to see that it can be."""
    source = open_raw(Path(shard.source or ""))
    rows = [(file.name, source.read(file.name)) for file in shard.files]
    for _, png in rows:
        cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    frame = pl.DataFrame(rows, schema=PICTURES.polars_schema, orient="row")
    return Produced({"pictures": frame}, frame.height)


def _count(shard: Shard, pixels: bool) -> Produced:
    rows = shard.read("pictures")
    count = rows.height
    if pixels:
        count = sum(
            cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR).size for png in rows["png"]
        )
    frame = pl.DataFrame([(shard.name, count)], schema=COUNTS.polars_schema, orient="row")
    return Produced({"counts": frame}, 1)


@stage(writes=(COUNTS,))
def count_pixels(shard: Shard, settings: Settings) -> Produced:
    """Decode every picture."""
    return _count(shard, pixels=True)


@stage(writes=(COUNTS,))
def count_rows(shard: Shard, settings: Settings) -> Produced:
    """Read only."""
    return _count(shard, pixels=False)


class Clock:
    """CPU seconds spent in comparing, over all threads; stands for what hashes parts and raw."""

    def __init__(self) -> None:
        self.seconds, self._lock = 0.0, threading.Lock()
        verified.sha256_files = self._timed(verified.sha256_files)
        raw_files.hashlib = SimpleNamespace(sha256=self._timed(hashlib.sha256))

    def _timed(self, function):
        def run(*arguments, **options):
            started = time.thread_time()
            result = function(*arguments, **options)
            with self._lock:
                self.seconds += time.thread_time() - started
            return result

        return run


def write_pictures(folder: Path, count: int) -> None:
    """Smooth pictures with some noise: a PNG of them is neither tiny nor noise."""
    rng = np.random.default_rng(0)
    for number in range(count):
        small = rng.integers(0, 256, (16, 16, 3), np.uint8)
        picture = cv2.resize(small, (256, 256), interpolation=cv2.INTER_CUBIC)
        picture ^= rng.integers(0, 4, picture.shape, np.uint8)
        cv2.imwrite(str(folder / f"{number:05d}.png"), picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=1200)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raw, lake = Path(folder, "raw"), Path(folder, "lake")
        raw.mkdir()
        write_pictures(raw, chosen.pictures)
        clock, spent, compared = Clock(), {}, {}
        with Build("bench", lake) as build:
            source = build.source(raw)
            files = source.files()
            stages = {
                read_pictures: lambda: [
                    Shard(f"{at:05d}", files=tuple(files[at : at + 100]), source=source.root)
                    for at in range(0, len(files), 100)
                ],
                count_pixels: lambda: [Shard(p.shard, parts=(p,)) for p in build.table("pictures")],
                count_rows: lambda: [Shard(p.shard, parts=(p,)) for p in build.table("pictures")],
            }
            for stage_, shards in stages.items():
                verified._known.clear()  # as a new process
                clock.seconds, started = 0.0, time.process_time()
                build.run(stage_, shards(), Settings())
                build._tables.pop("counts", None)
                spent[stage_.name] = time.process_time() - started
                compared[stage_.name] = clock.seconds
                print(
                    f"{stage_.name}: {spent[stage_.name]:.2f} CPU seconds, comparing "
                    f"{clock.seconds:.3f}, share {clock.seconds / spent[stage_.name]:.1%}"
                )
    both = ("read_pictures", "count_pixels")
    whole = sum(spent[name] for name in both)
    for what, share in (
        ("parts", compared["count_pixels"] / whole),
        ("raw files and parts", sum(compared[name] for name in both) / whole),
    ):
        print(f"of a build that reads, checks and decodes once, {what}: {share:.1%}")
    print(f"allowed {MOST:.0%}")
    if share > MOST:
        sys.exit("verified reads cost more than they may")


if __name__ == "__main__":
    main()
