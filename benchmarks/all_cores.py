"""Whether stages that compute use all cores: CPU seconds in one process and on workers.

`python -m benchmarks.all_cores` builds the sample of four benchmarks twice, on one worker and on
two, and prints for each stage that was spread over processes what it took. Efficiency is the CPU
time of one process over that of all processes, starting the workers included: what is lost to
start-up, imports and passing shards on. It is the speed-up over the number of cores where shards
are many and every process has a core.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks._cpu import run

NAMES = ("novelcraft", "semantic", "threedos", "condda")
BUILDS = """
import json, multiprocessing, os, sys
from importlib import import_module
from pathlib import Path

name, sample, lake, cores = sys.argv[1:]
os.cpu_count = lambda: int(cores)

from benchmarks._cpu import spent
from tasks.engine.stage import Build

taken, run = {}, Build.run

def measured(build, stage, shards, settings):
    shards, start = list(shards), spent()
    pieces = run(build, stage, shards, settings)
    before, started = taken.get(stage.name, (0.0, 0)), bool(multiprocessing.active_children())
    taken[stage.name] = (before[0] + spent() - start, before[1] + len(shards), started)
    return pieces

Build.run = measured
config = import_module(f"schemas.{name}").Config.demo(Path(sample, name))
changes = {"lake": Path(lake)} | ({} if name == "condda" else {"models": {}, "train": {}})
if name == "novelcraft":
    changes["checks"] = config.checks.model_copy(update={"share": 0.0})
import_module(f"flows.{name}").build(config.model_copy(update=changes))
print(json.dumps(taken))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", help="sample data (default: written now)")
    parser.add_argument("--only", nargs="+", default=NAMES, help="these benchmarks")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sample = chosen.sample or str(Path(folder, "sample"))
        if not chosen.sample:
            run("-m", "flows.cli", "sample", "--out", sample)
        print(f"{'stage':<30} shards   one process   {chosen.workers} workers   efficiency")
        for name in chosen.only:
            one, many = (
                json.loads(
                    run("-c", BUILDS, name, sample, str(Path(folder, f"{name}_{n}")), str(n)).out
                )
                for n in (1, chosen.workers)
            )
            for stage, (seconds, shards, spread) in many.items():
                if spread and shards > 1:
                    alone = one[stage][0]
                    print(
                        f"{f'{name}/{stage}':<30} {shards:6d} {alone:11.2f} s {seconds:9.2f} s "
                        f"{alone / seconds:10.0%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
