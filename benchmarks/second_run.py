"""Everything again on unchanged data: what a second run costs, of each benchmark and of all.

`python -m benchmarks.second_run` builds every benchmark on the sample data (skipped where `--lake`
names one that `make demo` built from `--sample`), then each again and all again, every time in a
new process and without a Prefect server. A second run must make no shard and import no library that
only work needs; its time, in CPU seconds too, is compared with starting up alone: a process that
imports what the command imports.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from benchmarks._cpu import run
from flows.cli import benchmarks

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
print(" ".join({"torch", "sklearn", "matplotlib", "pandas", "cv2", "prefect"} & sys.modules.keys()))
"""
AIM_ONE, AIM_ALL = 3.0, 5.0
MADE = re.compile(r"^(\w+/\w+): (\d+) of (\d+) shards made", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", help="sample data (default: written now)")
    parser.add_argument("--lake", help="lake that was built from it (default: built now)")
    parser.add_argument("--only", nargs="+", help="these benchmarks, not all")
    chosen = parser.parse_args()
    every = chosen.only or benchmarks()
    measured = {name: [name] for name in every}
    if len(every) > 1:
        measured[f"all {len(every)}"] = every
    with tempfile.TemporaryDirectory() as folder:
        sample = chosen.sample or str(Path(folder, "sample"))
        lake = chosen.lake or str(Path(folder, "lake"))
        if not chosen.sample:
            run("-m", "flows.cli", "sample", "--out", sample)
        made: list[str] = []
        first = run("-c", BUILDS, sample, lake, *every)
        shards = sum(int(n) for _, n, _ in MADE.findall(first.err))
        print(f"first run: {first.wall:.0f} s passed, {first.cpu:.0f} CPU seconds, {shards} shards")
        for title, names in measured.items():
            second = run("-c", BUILDS, sample, lake, *names)
            start = run("-c", IMPORTS, *names)
            stages = MADE.findall(second.err)
            shards = sum(int(total) for _, _, total in stages)
            made += [f"{name}: {count}" for name, count, _ in stages if int(count)]
            made += [f"an import of {library}" for library in second.out.split()]
            aim = AIM_ONE if len(names) == 1 else AIM_ALL
            print(
                f"second run, {title}: {second.cpu:.2f} CPU seconds (aim {aim:.0f}), "
                f"{second.wall:.1f} s passed, {len(stages)} stages, {shards} shards; "
                f"start-up alone {start.cpu:.2f}"
            )
    if made:
        sys.exit(f"a second run on unchanged data must make nothing, but made {', '.join(made)}")


if __name__ == "__main__":
    main()
