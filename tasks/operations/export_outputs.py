"""`novelty export outputs`: what a run put out, as a file that `novelty import outputs` reads."""

import shutil
from pathlib import Path

import polars as pl

from schemas.errors import ConfigError
from schemas.tables import OUTPUTS, RUNS, SPLITS
from storage.tables import current_version, pieces_of
from tasks.evaluation.output_files import write_outputs
from tasks.evaluation.stages import HEAD, numbered_labels
from tasks.operations.runs import find_run


def export_outputs(lake: Path, name: str, path: Path, head: Path | None = None) -> int:
    """Write the outputs of a run on the samples of its protocol; how many rows."""
    benchmark, run_id = find_run(lake, name)
    run = current_version(lake, benchmark, RUNS.name).read().filter(run_id=run_id)
    protocol, bases = run["protocol"][0], run["base_runs"][0].to_list()
    if head is not None:
        shutil.copyfile(_head_of(lake, benchmark, run_id), head)
    if protocol is None:
        raise ConfigError(f"run {run_id} serves all protocols; export a run that builds on it")
    outputs = current_version(lake, benchmark, OUTPUTS.name).read()
    rows = outputs.filter(run_id=run_id)
    if rows.is_empty() and run["origin"][0] == "frozen":
        # On one protocol it has the outputs that it has for all.
        rows = outputs.filter(pl.col("run_id").is_in(bases))
    splits = current_version(lake, benchmark, SPLITS.name).read().filter(protocol=protocol)
    rows = rows.join(splits, on="sample_id", how="semi").drop("run_id").sort("view", "sample_id")
    if rows.is_empty():
        below = f"; it builds on {', '.join(bases)}" if bases else ""
        raise ConfigError(f"run {run_id} puts out nothing for samples of {protocol}{below}")
    _, classes = numbered_labels(rows.join(splits, on="sample_id"))
    write_outputs(path, rows, list(classes.values()))
    return rows.height


def _head_of(lake: Path, benchmark: str, run_id: str) -> Path:
    tables = [current_version(lake, benchmark, name) for name in (RUNS.name, OUTPUTS.name)]
    for piece in pieces_of(lake, tables):
        run, files = piece.manifest.run, piece.manifest.files
        if run is not None and run.run_id == run_id and any(file.file == HEAD for file in files):
            return piece.file(HEAD).path
    raise ConfigError(f"run {run_id} has no head: its logits are not of one linear layer")
