"""Runs that a lake holds: list, show, compare and drop them.

Enters: the shared tables of each benchmark. Leaves: frames for people, or tables without some runs.
A dropped run's pieces stay until `novelty gc`, and a build that asks for the run finds them again.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from schemas.errors import ConfigError, LakeError
from schemas.manifest import Snapshot
from schemas.table import Table
from schemas.tables import METRICS, RUNS, tables_of
from storage.catalog import refresh_catalog
from storage.locks import locked
from storage.pieces import Piece
from storage.snapshots import current_snapshot
from storage.tables import Contents, current_versions, pieces_of, publish, versions_of

HEADLINE = ("auroc", "fpr95", "average_precision", "acc")


def read_shared(lake: Path, table: str, version: int, benchmark: str | None = None) -> pl.DataFrame:
    """A shared table over all benchmarks, with `benchmark`; empty where there is none."""
    frames = [
        one.read().select(pl.lit(one.manifest.benchmark).alias("benchmark"), pl.all())
        for one in current_versions(lake, benchmark)
        if one.manifest.table == table and one.manifest.schema_version == version
    ]
    return pl.concat(frames) if frames else pl.DataFrame()


def list_runs(lake: Path, benchmark: str | None = None) -> pl.DataFrame:
    """One row per run, with AUROC and its interval of the first score on test."""
    runs = read_shared(lake, RUNS.name, RUNS.version, benchmark)
    if runs.is_empty():
        where = f" of {benchmark}" if benchmark else ""
        raise LakeError(f"there are no runs{where} in {lake}; name models in a build, then look")
    columns = ("benchmark", "run_id", "protocol", "model", "network", "preset", "seed", "origin")
    return runs.select(*columns, "state", "changed").sort("benchmark", "protocol", "model", "seed")


def find_run(lake: Path, name: str) -> tuple[str, str]:
    """Benchmark and id of the one run whose id begins like that."""
    runs = read_shared(lake, RUNS.name, RUNS.version)
    matches = runs.filter(pl.col("run_id").str.starts_with(name)) if not runs.is_empty() else runs
    if matches.height != 1:
        count = "no run" if matches.is_empty() else f"{matches.height} runs"
        raise ConfigError(f"{count} with an id like {name!r}; `novelty runs list` shows them")
    return matches["benchmark"][0], matches["run_id"][0]


def show_run(lake: Path, name: str) -> tuple[dict[str, object], pl.DataFrame]:
    """All facts of a run, and its numbers on test."""
    benchmark, run_id = find_run(lake, name)
    runs = read_shared(lake, RUNS.name, RUNS.version, benchmark).filter(run_id=run_id)
    facts = {key: value for key, value in runs.row(0, named=True).items() if value is not None}
    for key in ("settings", "changed", "versions"):
        facts[key] = json.loads(str(facts[key]))
    return facts, _numbers(lake, benchmark, [run_id])


def _numbers(lake: Path, benchmark: str, run_ids: Sequence[str]) -> pl.DataFrame:
    metrics = read_shared(lake, METRICS.name, METRICS.version, benchmark)
    if metrics.is_empty():
        return metrics
    # Of the steps of a stream, all together; else the one step there is.
    whole = pl.col("step") == pl.col("step").min().over("run_id", "score_id")
    return metrics.filter(
        pl.col("run_id").is_in(list(run_ids))
        & pl.col("metric").is_in(HEADLINE)
        & (pl.col("split") == "test")
        & (pl.col("view") == "plain")
        & (pl.col("subset") == "all")
        & whole
    ).select("run_id", "score", "phase", "convention", "metric", "value", "low", "high", "n")


def compare_runs(lake: Path, names: Sequence[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Settings in which the runs differ, and their numbers on test side by side."""
    pairs = [find_run(lake, name) for name in names]
    facts = []
    for benchmark, run_id in pairs:
        row = read_shared(lake, RUNS.name, RUNS.version, benchmark).filter(run_id=run_id)
        values = row.row(0, named=True)
        flat = {key: str(values[key]) for key in ("benchmark", "protocol", "model", "network")}
        flat |= {"seed": str(values["seed"]), "preset": values["preset"]}
        flat |= {key: json.dumps(value) for key, value in json.loads(values["settings"]).items()}
        facts.append(flat)
    keys = list(dict.fromkeys(key for flat in facts for key in flat))
    differing = [key for key in keys if len({flat.get(key) for flat in facts}) > 1]
    ids = [run_id for _, run_id in pairs]
    settings = pl.DataFrame(
        [(key, *(flat.get(key) for flat in facts)) for key in differing],
        schema={"what": pl.String, **dict.fromkeys(ids, pl.String)},
        orient="row",
    )
    numbers = pl.concat(
        [_numbers(lake, benchmark, [run_id]) for benchmark, run_id in pairs], how="vertical"
    )
    if numbers.is_empty():
        return settings, numbers
    by = ["score", "phase", "convention", "metric"]
    wide = numbers.pivot("run_id", index=by, values="value").sort(by)
    return settings, wide


def drop_runs(lake: Path, names: Sequence[str], wait: float = 60.0) -> list[str]:
    """Take runs, and all runs that build on them, out of the tables."""
    pairs = [find_run(lake, name) for name in names]
    dropped = []
    for benchmark in sorted({benchmark for benchmark, _ in pairs}):
        with locked(lake, benchmark, wait):
            runs = read_shared(lake, RUNS.name, RUNS.version, benchmark)
            run_ids = {run_id for of, run_id in pairs if of == benchmark}
            while True:
                building = runs.filter(
                    pl.col("base_runs").list.eval(pl.element().is_in(sorted(run_ids))).list.any()
                )
                more = set(building["run_id"]) - run_ids
                if not more:
                    break
                run_ids |= more
            _publish_without(lake, benchmark, run_ids)
            dropped += sorted(run_ids)
    refresh_catalog(lake)
    return dropped


def _publish_without(lake: Path, benchmark: str, run_ids: set[str]) -> None:
    declared = tables_of(benchmark)

    def plan(old: Snapshot | None) -> Contents:
        tables: list[Table] = []
        pieces: dict[str, Piece] = {}
        for version in versions_of(lake, old) if old is not None else []:
            gathered = pieces_of(lake, [version])
            remaining = [
                p for p in gathered if not p.manifest.run or p.manifest.run.run_id not in run_ids
            ]
            if len(remaining) < len(gathered) and version.manifest.table in declared:
                tables.append(declared[version.manifest.table])
                pieces |= {piece.manifest.address: piece for piece in remaining}
        kept, runs = (old.tables, old.runs) if old is not None else ({}, {})
        runs = {run: addresses for run, addresses in runs.items() if run not in run_ids}
        return Contents(tables, list(pieces.values()), kept, runs)

    current = current_snapshot(lake, benchmark)
    publish(lake, benchmark, plan, partial=current is not None and current.partial)
