"""Runs of sample data, exported and imported again: the same numbers to the last bit."""

from pathlib import Path

import polars as pl
import pytest

from flows.cli import main
from flows.importing import import_file
from storage.tables import current_version
from tasks.evaluation.imports import Import
from tasks.operations.export_outputs import export_outputs
from tasks.sample.condda import write_condda
from tasks.sample.threedos import write_threedos
from tasks.scores import PLUGINS

PLACE = ["score_id", "split", "view", "step", "subset", "convention", "metric"]


def numbers(lake: Path, benchmark: str, run: str) -> pl.DataFrame:
    rows = current_version(lake, benchmark, "metrics").read().filter(run_id=run)
    return rows.drop("run_id", "model", "seed").sort(PLACE)


def again(lake: Path, benchmark: str, run: str, file: Path, head: Path | None = None) -> str:
    """The run that its own outputs make when they are imported."""
    runs = current_version(lake, benchmark, "runs").read().filter(run_id=run)
    protocol, seed = runs["protocol"][0], runs["seed"][0]
    export_outputs(lake, run, file, head)
    return import_file(lake, Import("outputs", file, benchmark, protocol, "mine", seed, head))


def test_features_of_a_condda_test_come_back(tmp_path: Path) -> None:
    write_condda(tmp_path / "raw", rows=192)
    lake = tmp_path / "lake"
    words = ["--protocols", "OND/image_classification", "--predictors", "", "--lake", str(lake)]
    assert main(["build", "condda", "--tests", str(tmp_path / "raw"), *words]) == 0
    run = current_version(lake, "condda", "runs").read()["run_id"][0]
    before = numbers(lake, "condda", run)
    imported = again(lake, "condda", run, tmp_path / "features.csv")
    assert {"nearest", "mahalanobis", "cosine"} <= set(before["score"])
    assert before["low"].is_not_null().any()
    assert numbers(lake, "condda", imported).equals(before)
    assert numbers(lake, "condda", run).equals(before)


@pytest.mark.slow
def test_a_network_of_threedos_comes_back_with_its_head(tmp_path: Path) -> None:
    write_threedos(tmp_path / "raw", train=6, test=4, scans_train=2, scans_test=2, models=2)
    lake = tmp_path / "lake"
    words = [
        *("--source", f"modelnet40={tmp_path}/raw/modelnet40", "--shapes.points", "64"),
        *("--shapes.candidates", "256", "--protocols", "MN1", "--models", "cross_entropy"),
        *("--networks", "dgcnn", "--train.epochs", "1", "--lake", str(lake)),
    ]
    assert main(["build", "threedos", *words]) == 0
    (run,) = current_version(lake, "threedos", "runs").read()["run_id"]
    before = numbers(lake, "threedos", run)
    imported = again(lake, "threedos", run, tmp_path / "o.parquet", tmp_path / "h.safetensors")
    assert {"msp", "nearest", "react", "gradnorm"} <= set(before["score"])
    assert set(before["convention"]) > {"openood"}
    assert numbers(lake, "threedos", imported).equals(before)
    assert main(["build", "threedos", *words, "--scores", "msp"]) == 0
    assert numbers(lake, "threedos", imported).equals(before), "it stays through a build"
    bare = Import("outputs", tmp_path / "o.parquet", "threedos", "MN1", "bare", 0)
    rest = numbers(lake, "threedos", import_file(lake, bare))
    heads = [name for name in PLUGINS.names() if "head" in PLUGINS.find(name).needs]
    assert {"react", "gradnorm", "vim"} <= set(heads)
    assert rest.equals(before.filter(~pl.col("score").is_in(heads)))
