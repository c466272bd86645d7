"""Everything again on unchanged data: what a second run costs, of one benchmark and of all.

`python -m benchmarks.second_run` builds every benchmark on the sample data (skipped where `--lake`
names one that `make demo` built from `--sample`), then builds one again and all again, each in a
new process and without a Prefect server. A second run must make no shard; its time is compared with
starting up alone: a process that imports what the command imports.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flows.cli import benchmarks

ONE = "novelcraft"
IMPORTS = """
import sys
import flows.cli, flows.runner, flows.tracked, tasks.operations.summary

for name in sys.argv[1:]:
    __import__(f"flows.{name}")
"""
BUILDS = """
import sys
from importlib import import_module
from pathlib import Path
from flows.runner import run_flow

sample, lake, *names = sys.argv[1:]
for name in names:
    config = import_module(f"schemas.{name}").Config.demo(Path(sample, name))
    run_flow(name, config.model_copy(update={"lake": Path(lake)}))
"""
MADE = re.compile(r"^(\w+/\w+): (\d+) of (\d+) shards made", re.MULTILINE)


def timed(*command: str) -> tuple[float, str]:
    """Seconds of a command and what it said; ends the benchmark if it fails."""
    environment = os.environ | {"NOVELTY_SERVICE": os.devnull}
    environment.pop("PREFECT_API_URL", None)
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return seconds, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", help="sample data (default: written now)")
    parser.add_argument("--lake", help="lake that was built from it (default: built now)")
    parser.add_argument("--only", action="store_true", help=f"{ONE} alone, not all benchmarks")
    chosen = parser.parse_args()
    measured = {ONE: [ONE]} if chosen.only else {ONE: [ONE], "all": benchmarks()}
    novelty = (sys.executable, "-m", "flows.cli")
    with tempfile.TemporaryDirectory() as folder:
        sample = chosen.sample or str(Path(folder, "sample"))
        lake = chosen.lake or str(Path(folder, "lake"))
        if not chosen.sample:
            timed(*novelty, "sample", "--out", sample)
        made: list[str] = []
        every = list(measured.values())[-1]
        first, said = timed(sys.executable, "-c", BUILDS, sample, lake, *every)
        print(f"first run: {first:.0f} s, {sum(int(n) for _, n, _ in MADE.findall(said))} shards")
        for title, names in measured.items():
            second, said = timed(sys.executable, "-c", BUILDS, sample, lake, *names)
            start, _ = timed(sys.executable, "-c", IMPORTS, *names)
            stages = MADE.findall(said)
            shards = sum(int(total) for _, _, total in stages)
            made += [f"{name}: {count}" for name, count, _ in stages if int(count)]
            print(f"second run, {title}: {second:.1f} s, {len(stages)} stages, {shards} shards")
            print(f"  start-up alone: {start:.1f} s, {start / second:.0%} of it")
    if made:
        sys.exit(f"a second run on unchanged data must make nothing, but made {', '.join(made)}")


if __name__ == "__main__":
    main()
