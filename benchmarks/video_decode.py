"""Clips per second by decoder and number of workers, on the real clips found by NOVELTY_SHARED.

`python -m benchmarks.video_decode` decodes every clip to its end and takes the frames of X3D-M from
it, with decord and with OpenCV, with one and two child processes, in turn and several rounds in
one run; the median round counts. CPU seconds are those of the children, so that they can be
compared on a shared machine. Both decoders must find the same frames.
"""

import argparse
import csv
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.clips import FrameSampling
from schemas.kowl import SampleSettings
from tasks.ingest.native.pool import run_batch
from tasks.kowl.videos import DECORD, IMPORTS, OPENCV, SAMPLE

SHARED = Path(os.environ.get("NOVELTY_SHARED", Path(__file__).parents[2] / "shared"))
FUNCTIONS = {
    "decode to the end": {"decord": DECORD, "opencv": OPENCV},
    "take 4 x 16 frames": SAMPLE,
}
DECODERS = ("decord", "opencv")


def clips(part: str) -> list[dict[str, Any]]:
    """Items of the Kinetics clips in the shared data, or of all files that decode whole."""
    root = SHARED / "data" / "videos"
    if not root.is_dir():
        sys.exit(f"videos not found: {root}; set NOVELTY_SHARED")
    options = SampleSettings().model_dump(include=set(FrameSampling.model_fields))
    with (root / "manifest.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["file"].startswith(part)]
    return [
        {
            "path": str(root / row["file"]),
            "known": int(row["frames_in_header"]),
            "fps": None,
            **options,
        }
        for row in rows
        if row["frames_in_header"] == row["frames_decoded_opencv"]
    ]


def measure(
    function: str, decoder: str, items: Sequence[dict[str, Any]], workers: int
) -> tuple[float, float]:
    """Wall seconds and CPU seconds of the children, their start included."""
    # Without a count to agree with, OpenCV decodes to the end; sampling needs the count.
    sampling = function == SAMPLE[decoder]
    ready = [{**item, "frames": item["known"] if sampling else None} for item in items]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for item, outcome in zip(
        items,
        run_batch(function, ready, imports=IMPORTS[decoder], workers=workers),
        strict=True,
    ):
        if outcome.value is None:
            sys.exit(f"{item['path']}: {outcome.message}")
        found = outcome.value["counted" if decoder == "opencv" and not sampling else "frames"]
        if not sampling and found != item["known"]:
            sys.exit(f"{item['path']}: {decoder} found {found} frames, expected {item['known']}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds in turn; the median counts")
    parser.add_argument("--part", default="kinetics400", help='folder of the videos; "" for all')
    options = parser.parse_args()
    items = clips(options.part)
    runs: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for task, functions in FUNCTIONS.items():
            for workers in (1, 2):
                for decoder in DECODERS:
                    result = measure(functions[decoder], decoder, items, workers)
                    runs.setdefault((task, decoder, workers), []).append(result)
    print(f"{len(items)} clips, median of {options.rounds} rounds")
    print(f"{'':22}{'decoder':10}{'workers':>8}{'clips/s':>10}{'clips/CPU s':>13}")
    rate = {}
    for (task, decoder, workers), results in runs.items():
        wall, cpu = (statistics.median(values) for values in zip(*results, strict=True))
        rate[task, decoder, workers] = len(items) / wall, len(items) / cpu
        print(f"{task:22}{decoder:10}{workers:8}{len(items) / wall:10.2f}{len(items) / cpu:13.2f}")
    for task in FUNCTIONS:
        for workers in (1, 2):
            wall, cpu = (
                rate[task, "opencv", workers][i] / rate[task, "decord", workers][i] for i in (0, 1)
            )
            print(
                f"{task}, {workers} workers: OpenCV / decord = {wall:.2f} (wall), {cpu:.2f} (CPU)"
            )
        for decoder in DECODERS:
            gain = rate[task, decoder, 2][0] / rate[task, decoder, 1][0]
            print(f"{task}, {decoder}: 2 workers / 1 = {gain:.2f} (wall)")


if __name__ == "__main__":
    main()
