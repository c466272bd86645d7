"""A file of any model as a run: checked, scored and evaluated by the stages of every run."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.config import Settings
from schemas.errors import ConfigError, LakeError, SourceError
from schemas.similar import did_you_mean
from schemas.tables import PHASES, RUNS
from storage.leaderboard import CONVENTION
from storage.snapshots import benchmarks_in, current_snapshot
from tasks import models
from tasks.evaluation.imported import import_outputs
from tasks.evaluation.imports import (
    Addition,
    Import,
    import_scores,
    other_file,
    passed_import,
    plan_import,
)
from tasks.evaluation.output_files import NAME
from tasks.evaluation.stages import measure_runs, plan_records, plan_scores, record_run
from tasks.predictors import predictor_names


def import_file(lake: Path, request: Import) -> str:
    """Add the run to the lake; its id. The report is left to the caller."""
    benchmarks = benchmarks_in(lake)
    if request.benchmark not in benchmarks:
        names = f"{', '.join(benchmarks) or 'none'}{did_you_mean(request.benchmark, benchmarks)}"
        raise LakeError(f"no tables of {request.benchmark!r} in {lake}; there are: {names}")
    _check_name(request.name)
    if request.seed is not None and not 0 <= request.seed < 1 << 31:
        raise ConfigError(f"--seed is {request.seed}, expected 0 to {(1 << 31) - 1}")
    with Addition(request.benchmark, lake, max_reject_share=0.0) as build:
        shard = plan_import(build, request)
        snapshot = current_snapshot(lake, request.benchmark)
        if snapshot is not None and RUNS.name in snapshot.tables:
            runs = build.read_current(RUNS.name)
            if (runs.filter(model=request.name)["origin"] != "imported").any():
                raise ConfigError(
                    f"{request.name} is a model of {request.benchmark}; choose another"
                )
            if (other := other_file(runs, shard)) is not None:
                raise ConfigError(
                    f"run {other} of {request.name} with this seed on {request.protocol} is of "
                    f"another file; `novelty runs drop {other}` first, or choose another --name or "
                    "--seed"
                )
        (piece,) = build.run(import_outputs, [shard], Settings())
        run = passed_import(shard, piece, phase_of(request.benchmark))
        scores = import_scores(build)
        if not plan_scores([run], scores):
            raise SourceError(
                f"{request.path.name}: no score can be made of it: features need the train samples "
                f"of {request.protocol} in the same file"
            )
        build.run(record_run, plan_records([run]), Settings())
        measure_runs(build, [run], scores, lambda name: conventions_of(request.benchmark, name))
    return run.mark.run_id


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name is {name!r}, expected letters, digits and any of _ . + -")
    if name in (*models.names(), *predictor_names()):
        raise ConfigError(f"{name} is the name of a plug-in; choose another name for the file")


def conventions_of(benchmark: str, protocol: str) -> Sequence[str]:
    """The conventions of the benchmark's flow (`CONVENTIONS`), or the default one."""
    declared = _declared(benchmark, "CONVENTIONS")
    if isinstance(declared, Mapping):
        declared = declared.get(protocol)
    return tuple(declared or (CONVENTION,))


def phase_of(benchmark: str) -> str:
    """The phase that scores of the benchmark's flow are of (`PHASE`), or none."""
    return str(_declared(benchmark, "PHASE") or PHASES[0])


def _declared(benchmark: str, name: str) -> Any:
    """What the benchmark's flow declares by this name, if there is such a flow and it does."""
    flow = f"flows.{benchmark}"
    if importlib.util.find_spec(flow) is None:
        return None
    return getattr(importlib.import_module(flow), name, None)
