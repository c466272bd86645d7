"""The rates that a first `--dry-run` tells times by, measured on a lake of sample data.

`python -m benchmarks.reference_rates LAKE[:STAGE,…]…` reads timings and pieces of every benchmark
built there and writes `tasks/engine/reference_rates.csv`. Of several lakes, the first that made a
stage counts; name stages to take no others from a lake. Make lakes for it (`novelty demo --sample
sample`, NOVELTY_LAKE a new folder): the settings of several builds in one lake would mix. Times of
a busy machine are too long: there build with a `sitecustomize` that makes `time.perf_counter` CPU
seconds, children's too, and `os.cpu_count` 1.
"""

import argparse
import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from flows.cli import benchmarks
from flows.first_build import first_build
from schemas.config import make_config
from schemas.tables import RUNS
from storage.layout import inner, pieces_path
from storage.pieces import pieces_of_stage
from storage.upkeep import read_build_record
from tasks.engine.reference import FILE, Rate, Raw, Work, shipped_reference, write_reference


def seconds_of(lake: Path, benchmark: str) -> dict[tuple[str, str], float]:
    """Seconds by stage and shard, the last time that each was made."""
    found = {}
    for path in sorted((inner(lake) / "timings").glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["benchmark"] == benchmark:
                found[line["stage"], line["shard"]] = line["seconds"]
    return found


def measured(lake: Path, benchmark: str) -> Iterator[tuple[Work, Rate]]:
    """The rate of all work of a benchmark that was built in the lake."""
    built = read_build_record(lake, benchmark)
    if built is None:
        return
    config = make_config(import_module(f"schemas.{benchmark}").Config, built.settings)
    seconds = seconds_of(lake, benchmark)
    raw: dict[str, dict[str, Raw]] = defaultdict(dict)
    written: dict[tuple[str, str], int] = {}
    runs: dict[tuple[str, str], str] = {}
    models: dict[str, str] = {}
    seen = set()
    for stage in sorted(path.name for path in (pieces_path(lake) / benchmark).iterdir()):
        for _, piece in pieces_of_stage(lake, benchmark, stage):
            record, place = piece.manifest, (stage, piece.shard)
            files = {(stage, i.name, i.digest): i.size for i in record.inputs if i.piece is None}
            new = [size for file, size in files.items() if file not in seen]
            raw[stage][piece.shard] = Raw(len(new), sum(new))
            seen |= files.keys()
            written[place] = sum(file.bytes for file in (*record.parts, *record.files))
            if record.run is not None:
                runs[place] = record.run.run_id
            if piece.has(RUNS.name):
                models |= dict(piece.part(RUNS.name).read(["run_id", "model"]).iter_rows())
    works: dict[tuple[str, str], Work] = {}
    for work in first_build(benchmark, config, raw) or []:
        same = works.get((work.stage, work.model), replace(work, shards=0, amount=0.0, written=0.0))
        works[work.stage, work.model] = replace(
            work,
            shards=same.shards + work.shards,
            amount=same.amount + work.amount,
            written=same.written + work.written,
        )
    for work in works.values():
        name = work.model.partition(" (")[0]
        own = [
            (work.stage, shard)
            for shard in raw.get(work.stage, ())
            if name in ("", models.get(runs.get((work.stage, shard), "")))
        ]
        timed = [seconds[place] for place in own if place in seconds]
        if not timed or not work.amount:
            print(f"{benchmark}: {work.stage} {work.model} was not made in {lake}")
            continue
        if len(own) != work.shards:
            print(f"{benchmark}: {work.stage} {work.model}: {len(own)} of {work.shards} shards")
        share = min(1.0, len(own) / work.shards)  # of what was expected, part may be there
        total = sum(timed) / len(timed) * len(own)
        made = sum(written[place] for place in own)
        yield work, Rate(total / work.amount / share, made / work.written / share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lakes", metavar="LAKE[:STAGE,…]", nargs="*")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--note", default="", help="what else is to be known of the measurement")
    chosen = parser.parse_args()
    if not chosen.lakes:  # as `make bench` runs it
        print(f"no lake is named, so nothing is measured; {FILE.name} is of: ", end="")
        print(shipped_reference().machine)
        return
    day = datetime.now(UTC).date()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {day}"
    machine += f", {chosen.note}" if chosen.note else ""
    rows: dict[tuple[str, str, str], tuple[str, Work, Rate]] = {}
    for name in benchmarks():
        for lake, _, stages in (given.partition(":") for given in chosen.lakes):
            for work, rate in measured(Path(lake), name):
                if not stages or work.stage in stages.split(","):
                    rows.setdefault((name, work.stage, work.model), (name, work, rate))
    write_reference(chosen.out, machine, rows.values())
    print(f"{chosen.out}: {len(rows)} rates")


if __name__ == "__main__":
    main()
