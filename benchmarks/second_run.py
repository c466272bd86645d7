"""Everything again on unchanged data: what a second run of all benchmarks costs, and of what.

`python -m benchmarks.second_run` builds every benchmark on the sample data (skipped where `--lake`
names one that `make demo` built from `--sample`), then builds all again in a new process. The
second run must make no shard; its time is compared with the first run and with starting up alone:
one flow without work for each benchmark, in a process that imports what the command imports.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import flows  # noqa: F401  keeps Prefect offline
from flows.cli import benchmarks

EMPTY = """
import sys
import flows.cli, flows.runner
from prefect import flow

for name in sys.argv[1:]:
    __import__(f"flows.{name}")
    flow(lambda: None, name=name)()
"""
MADE = re.compile(r"^(\w+/\w+): (\d+) of (\d+) shards made", re.MULTILINE)


def timed(*command: str) -> tuple[float, str]:
    """Seconds of a command and what it said; ends the benchmark if it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return seconds, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", help="sample data (default: written now)")
    parser.add_argument("--lake", help="lake that was built from it (default: built now)")
    chosen = parser.parse_args()
    novelty = (sys.executable, "-m", "flows.cli")
    with tempfile.TemporaryDirectory() as folder:
        sample = chosen.sample or str(Path(folder, "sample"))
        lake = chosen.lake or str(Path(folder, "lake"))
        if not chosen.sample:
            timed(*novelty, "sample", "--out", sample)
        demo = (*novelty, "demo", "--sample", sample, "--lake", lake)
        first, said = timed(*demo)
        print(f"first run: {first:.0f} s, {sum(int(n) for _, n, _ in MADE.findall(said))} shards")
        second, said = timed(*demo)
        stages = MADE.findall(said)
        made = [f"{name}: {count}" for name, count, _ in stages if int(count)]
        start, _ = timed(sys.executable, "-c", EMPTY, *benchmarks())
        shards = sum(int(total) for _, _, total in stages)
        print(f"second run: {second:.1f} s, {len(stages)} stages, {shards} shards found")
        print(f"made again: {', '.join(made) or 'nothing'}")
        print(f"start-up alone: {start:.1f} s, {start / second:.0%} of the second run")
        print(f"second / first: {second / first:.3f}")
    if made:
        sys.exit("a second run on unchanged data must make nothing")


if __name__ == "__main__":
    main()
