"""What `make demo` costs after the installation: processor seconds and wall time of each part.

`python -m benchmarks.demo` writes the sample data and builds every benchmark on it as the demo
does, each in a new process and without a Prefect server, then with `--whole` runs `novelty demo`
itself, with its server, in a lake of its own. Processor seconds count all child processes. The
stages that took longest are listed, by the times that the lake keeps.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.second_run import BUILDS
from flows.cli import benchmarks
from storage.layout import inner

MOST_STAGES = 6


def measured(*command: str, **environment: str) -> tuple[float, float]:
    """Wall and processor seconds of a command and its children."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    kept = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    done = subprocess.run(command, capture_output=True, text=True, env=kept | environment)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def longest_stages(lake: Path, benchmark: str) -> str:
    """Seconds of shards and their number, of the stages that took longest."""
    seconds: Counter[str] = Counter()
    shards: Counter[str] = Counter()
    for path in (inner(lake) / "timings").glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["benchmark"] == benchmark:
                seconds[line["stage"]] += line["seconds"]
                shards[line["stage"]] += 1
    top = seconds.most_common(MOST_STAGES)
    return ", ".join(f"{stage} {spent:.1f} s in {shards[stage]}" for stage, spent in top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", help="sample data (default: written now)")
    parser.add_argument("--lake", help="new lake to build in (default: removed afterwards)")
    parser.add_argument("--only", action="append", help="only this benchmark (may be repeated)")
    parser.add_argument("--whole", action="store_true", help="then run `novelty demo`, with server")
    chosen = parser.parse_args()
    novelty = (sys.executable, "-m", "flows.cli")
    names = chosen.only or benchmarks()
    with tempfile.TemporaryDirectory() as folder:
        sample = chosen.sample or str(Path(folder, "sample"))
        lake = Path(chosen.lake or Path(folder, "lake"))
        parts = {}
        if not chosen.sample:
            only = [word for name in names for word in ("--only", name)]
            parts["sample"] = measured(*novelty, "sample", "--out", sample, *only)
        for name in names:
            program = (sys.executable, "-c", BUILDS, sample, str(lake), name)
            parts[name] = measured(*program, NOVELTY_SERVICE=os.devnull)
        for name, (wall, busy) in parts.items():
            print(f"{name:12} {wall:6.1f} s, {busy:6.1f} processor s; {longest_stages(lake, name)}")
        wall, busy = (sum(column) for column in zip(*parts.values(), strict=True))
        print(f"{'sum':12} {wall:6.1f} s, {busy:6.1f} processor s")
        if chosen.whole:
            command = (*novelty, "demo", "--sample", sample, "--lake", str(Path(folder, "whole")))
            wall, busy = measured(*command)
            print(f"novelty demo {wall:6.1f} s, {busy:6.1f} processor s")
        print(f"load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
