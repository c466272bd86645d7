"""NovelCraft from raw files to tables and masks, against a bare loop over the same files.

`python -m benchmarks.ingest` prints CPU seconds, as other work on the machine does not change them
much: of a loop that only reads, hashes, inflates and parses every file, of the two stages in one
process and on workers, and of the whole command without and with Blender's mask checks. "Longest"
is an even share of the time of all processes while several work, starting them included: what
passes where every process has a core. On a busy machine the workers' real shares follow the load.

`--times 4` takes every episode four times, under other numbers, and leaves out the whole command:
the start of the workers counts the less the more there is to do.

`--against` names a checkout of another version; its numbers come from the same run, and its rows
must be the same.
"""

import argparse
import hashlib
import itertools
import json
import os
import shutil
import struct
import sys
import tempfile
import zlib
from pathlib import Path

import orjson

from benchmarks._cpu import HERE, run

STAGES = """
import hashlib, json, multiprocessing, os, sys
from pathlib import Path

source, lake, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def spent():
    "CPU seconds of this process, and of each that it started."
    times = os.times()
    all = [times.user + times.system]
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        all.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return all

def main():
    from schemas.novelcraft import Config
    from tasks.engine.stage import Build
    from tasks.novelcraft.ingest import ARCHIVE_LIMITS, ingest_episodes, plan_episode_shards
    from tasks.novelcraft.label import plan_label_shards, render_targets

    config, marks = Config(source=source, lake=lake), [spent()]
    with Build("novelcraft", lake, config, workers=workers) as build:
        shards = plan_episode_shards(build.source(source, limits=ARCHIVE_LIMITS))
        marks.append(spent())
        ingested = build.run(ingest_episodes, shards, config.ingest)
        marks.append(spent())
        rendered = build.run(render_targets, plan_label_shards(ingested), config.render)
        marks.append(spent())
    parts = "".join(p.sha256 for piece in ingested + rendered for p in piece.manifest.parts)
    digest = hashlib.sha256(parts.encode()).hexdigest()
    print(json.dumps({"marks": marks, "shards": len(shards), "rows": digest}))

if __name__ == "__main__":
    main()
"""


def bare_loop(files: list[str]) -> None:
    """What must be done at least: read, hash, inflate, parse. Damaged files are passed over."""
    for name in files:
        data = Path(name).read_bytes()
        hashlib.sha256(data).hexdigest()
        try:
            _inflate(data) if name.endswith(".png") else orjson.loads(data)
        except (ValueError, zlib.error, struct.error):
            continue


def _inflate(png: bytes) -> None:
    place, pixels = 8, []
    while place + 12 <= len(png):
        length, kind = struct.unpack_from(">I4s", png, place)
        if kind == b"IDAT":
            pixels.append(png[place + 8 : place + 8 + length])
        place += 12 + length
    zlib.decompress(b"".join(pixels))


class Stages:
    """The stages of one checkout on some workers."""

    def __init__(self, folder: Path, source: Path, lake: Path, workers: int) -> None:
        # A file: workers that are spawned import the main module again.
        script = lake.with_suffix(".py")
        script.write_text(STAGES)
        done = run(str(script), str(source), str(lake), str(workers), checkout=folder)
        measured = json.loads(done.out)
        self.rows, self.shards = measured["rows"], measured["shards"]
        marks = measured["marks"]
        self.parts = [
            (spent := sum(after) - sum(before), spent / (workers if len(after) > 1 else 1))
            for before, after in itertools.pairwise(marks)
        ]
        self.total = sum(marks[-1]) - sum(marks[0])
        self.longest = sum(longest for _, longest in self.parts)
        self.tables = sum(longest for _, longest in self.parts[:2])

    def show(self, title: str) -> None:
        names = ("list and hash", "ingest", "render")
        parts = ", ".join(f"{n} {cpu:.2f}" for n, (cpu, _) in zip(names, self.parts, strict=True))
        line = f"{title:<34} {self.total:6.2f} s   longest {self.longest:5.2f} s"
        print(f"{line}   ({parts})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="raw NovelCraft (default: the sample)")
    parser.add_argument("--against", type=Path, help="checkout of another version")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--times", type=int, default=1, help="take every episode so many times")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.bare:
        bare_loop(chosen.bare.read_text().splitlines())
        return
    workers = chosen.workers
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = chosen.source
        if source is None:
            run("-m", "flows.cli", "sample", "--only", "novelcraft", "--out", str(root))
            source = root / "novelcraft"
        if chosen.times > 1:
            source = _repeated(source, root / "repeated", chosen.times)
        files = sorted(str(path) for path in source.rglob("*") if path.is_file())
        bare = sum(_bare(root, files, 1))
        shares = _bare(root, files, workers)
        print(f"{len(files)} files, {sum(os.path.getsize(f) for f in files) / 1e6:.0f} MB")
        print(f"{'bare loop':<34} {bare:6.2f} s")
        title = f"bare loop, {workers} processes"
        print(f"{title:<34} {sum(shares):6.2f} s   longest {max(shares):5.2f} s")
        checkouts = {"": HERE}
        if chosen.against is not None:
            checkouts["against: "] = chosen.against.absolute()
        one: dict[str, Stages] = {}
        many: dict[str, Stages] = {}
        for name, checkout in checkouts.items():
            key = name.strip(": ") or "here"
            one[name] = Stages(checkout, source, root / f"{key}_one", 1)
            one[name].show(f"{name}one process")
            many[name] = Stages(checkout, source, root / f"{key}_many", workers)
            many[name].show(f"{name}{workers} workers")
        if len({stages.rows for stages in (*one.values(), *many.values())}) > 1:
            sys.exit("the rows differ")
        first = one[list(checkouts)[-1]]
        ours = many[""]
        print(f"{ours.shards} shards; ratios of the longest process:")
        start = run("-c", "import tasks.novelcraft.ingest").cpu
        for title, tables in (
            ("", ours.tables),
            (" without start-up", ours.tables - start * (1 - 1 / workers)),
        ):
            print(f"  ingest tables{title}, {workers} workers / bare {tables / max(shares):.2f} x")
        print(f"  ingest tables, one process / bare {one[''].tables / bare:.2f} x")
        print(f"  stages, {workers} workers / one process {ours.longest / first.longest:.2f} x")
        efficiency = one[""].total / (workers * ours.longest)
        print(f"  efficiency of {workers} workers, start-up included {efficiency:.0%}")
        if chosen.times > 1:
            return
        render_cpu = one[""].parts[2][0]
        for name, checkout in checkouts.items():
            _whole(name, checkout, source, root, sum(shares), render_cpu)


def _repeated(source: Path, folder: Path, times: int) -> Path:
    """The same episodes again under other numbers: hard links where the disk is the same."""
    for number in range(times):
        for path in source.rglob("*"):
            parts = [
                str(int(part) + 1000 * number) if part.isdigit() else part
                for part in path.relative_to(source).parent.parts
            ]
            target = folder.joinpath(*parts, path.name)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    target.hardlink_to(path)
                except OSError:
                    shutil.copyfile(path, target)
    return folder


def _bare(root: Path, files: list[str], processes: int) -> list[float]:
    """CPU seconds of each process; starting Python is taken off."""
    start = run("-c", "import benchmarks.ingest").cpu
    spent = []
    for number in range(processes):
        share = root / f"files_{number}"
        share.write_text("\n".join(files[number::processes]))
        spent.append(run("-m", "benchmarks.ingest", "--bare", str(share)).cpu - start)
    return spent


def _whole(
    name: str, checkout: Path, source: Path, root: Path, bare: float, render_cpu: float
) -> None:
    """The command as users type it; the second run of it tells start-up, the third the checks."""
    lake = root / f"{name.strip(': ') or 'here'}_whole"
    command = ("-m", "flows.cli", "build", "novelcraft", "--source", str(source))
    command = (*command, "--lake", str(lake))
    whole = run(*command, "--checks.share", "0", checkout=checkout).cpu
    again = run(*command, "--checks.share", "0", checkout=checkout).cpu
    report = run("-m", "flows.cli", "report", "--lake", str(lake), checkout=checkout).cpu
    imports = run("-c", "import flows.cli, flows.novelcraft", checkout=checkout).cpu
    checks = run(*command, checkout=checkout).cpu
    report -= imports
    rest = whole - render_cpu - report - imports
    print(f"{name}whole command {whole:.2f} s, {whole / bare:.1f} x the bare loop, of it")
    print(f"  start-up {imports:.2f} s, renderer {render_cpu:.2f} s, report {report:.2f} s")
    print(f"  the rest {rest:.2f} s, {rest / bare:.1f} x the bare loop")
    print(f"  nothing changed: {again:.2f} s; Blender's mask checks: {checks - again:.2f} s more")


if __name__ == "__main__":
    main()
