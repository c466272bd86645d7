"""Tests and their features out of a lake: the splits of any protocol, the outputs of any run.

Enters: `splits`, `runs` and `outputs` of a benchmark. Leaves: a folder of test files (`make_tests`)
with `features/<test>.npz` for agents: vectors of the test's instances, and examples of the known
classes from the train split.
"""

import io
from pathlib import Path

import numpy as np
import polars as pl

from schemas.condda import TestSettings
from schemas.errors import ConfigError, LakeError
from schemas.tables import PLAIN
from storage.atomic import write_bytes
from storage.tables import current_version
from tasks.condda.agent import FeatureLookup, training_examples
from tasks.condda.instances import features_file
from tasks.condda.make_tests import LABELLED, make_tests
from tasks.condda.test_files import TestLibrary

# Frames of an episode are alike: so many, evenly spread, are examples enough of a class.
EXAMPLES_PER_CLASS = 200
SHOWN = 12


def tests_of_lake(
    lake: Path,
    benchmark: str,
    out: Path,
    settings: TestSettings,
    *,
    protocol: str | None = None,
    run: str | None = None,
) -> pl.DataFrame:
    """Write tests and features below `out`; gives one row per test.

    `run` is the beginning of a run's id. Without a name the protocol is the first that runs with
    features are of, and the run is the only one of the protocol that has features.
    """
    runs = _feature_runs(lake, benchmark)
    if run is not None:
        runs = runs.filter(pl.col("run_id").str.starts_with(run))
        if runs.is_empty():
            raise ConfigError(f"no run {run}… of {benchmark} has features; see novelty runs list")
    protocol = _chosen_protocol(lake, benchmark, protocol, runs)
    run_id = _chosen_run(runs, benchmark, protocol)
    outputs = _outputs(lake, benchmark).filter(pl.col("run_id") == run_id)
    featured = outputs.select("sample_id").collect()
    splits = _table(lake, benchmark, "splits").filter(pl.col("protocol") == protocol).collect()
    labelled = labelled_samples(splits).join(featured, on="sample_id", how="semi")
    made = make_tests(labelled, out, settings)
    library = TestLibrary(out)
    tests = [library.load(row, settings.kind, "novelty") for row in made["test_id"]]
    examples = _examples(labelled)
    needed = sorted({name for test in tests for name in test.truth["sample_id"]} | set(examples))
    wanted = pl.col("sample_id").is_in(pl.Series(needed, dtype=pl.String).implode())
    features = FeatureLookup.of_table(
        outputs.filter(wanted).select("sample_id", "features").collect(), embedding="features"
    )
    training = training_examples(
        labelled.filter(
            (pl.col("split") != "train") | pl.col("sample_id").is_in(pl.Series(examples).implode())
        ),
        features,
    )
    for test in tests:
        buffer = io.BytesIO()
        np.savez(
            buffer,
            instance_id=np.array(test.names, np.str_),
            features=features.of(test.truth["sample_id"].to_list()).astype(np.float32),
            train_features=training.features.astype(np.float32),
            train_labels=training.labels + 1,
        )
        write_bytes(out / features_file(test.test_id), buffer.getvalue())
    return made


def labelled_samples(splits: pl.DataFrame) -> pl.DataFrame:
    """One row a sample, one role a class, as `make_tests` takes them.

    Where samples come in steps a class may be novel first and known later: known is then what has
    training samples in step 0, and a sample counts where it comes first.
    """
    rows = splits.sort("step", "sample_id").unique("sample_id", keep="first", maintain_order=True)
    if rows["step"].n_unique() > 1:
        given = rows.filter((pl.col("split") == "train") & (pl.col("step") == 0))["class"]
        known = pl.col("class").is_in(given.unique().implode())
        role = pl.when(known).then(pl.lit("known")).otherwise(pl.lit("novel"))
        rows = rows.with_columns(role.alias("role"))
    return rows.select(LABELLED)


def _table(lake: Path, benchmark: str, name: str) -> pl.LazyFrame:
    return pl.scan_parquet(current_version(lake, benchmark, name).files)


def _outputs(lake: Path, benchmark: str) -> pl.LazyFrame:
    """Outputs with features of samples as they are."""
    return _table(lake, benchmark, "outputs").filter(
        (pl.col("view") == PLAIN) & pl.col("features").is_not_null()
    )


def _feature_runs(lake: Path, benchmark: str) -> pl.DataFrame:
    """run_id, protocol, model and seed of the runs that give features."""
    runs = _table(lake, benchmark, "runs").select("run_id", "protocol", "model", "seed").collect()
    giving = _outputs(lake, benchmark).select(pl.col("run_id").unique()).collect()
    runs = runs.join(giving, on="run_id", how="semi").sort("protocol", "model", "seed", "run_id")
    if runs.is_empty():
        raise LakeError(
            f"no run of {benchmark} gives features in {lake}; novelty build {benchmark} with a "
            "model that does"
        )
    return runs


def _chosen_protocol(lake: Path, benchmark: str, wanted: str | None, runs: pl.DataFrame) -> str:
    splits = _table(lake, benchmark, "splits").select(pl.col("protocol").unique())
    protocols = splits.collect()["protocol"].sort().to_list()
    if wanted is not None:
        if wanted not in protocols:
            raise ConfigError(
                f"{benchmark} has no protocol {wanted!r}; there are: {_listed(protocols)}"
            )
        return wanted
    of_runs = runs["protocol"]
    return protocols[0] if of_runs.has_nulls() else str(of_runs.min())


def _chosen_run(runs: pl.DataFrame, benchmark: str, protocol: str) -> str:
    """The only one of these runs that is of the protocol, or of none."""
    fitting = runs.filter(pl.col("protocol").is_null() | (pl.col("protocol") == protocol))
    if fitting.height == 1:
        return str(fitting["run_id"][0])
    shown = fitting if fitting.height else runs
    names = [
        f"{run_id} ({model}, seed {seed}, {of or 'any protocol'})"
        for run_id, of, model, seed in shown.iter_rows()
    ]
    count = "several runs have" if fitting.height else "no such run has"
    raise ConfigError(
        f"{count} features of {benchmark} protocol {protocol}; name one by --run: {_listed(names)}"
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _examples(labelled: pl.DataFrame) -> list[str]:
    """Train samples of known classes, evenly thinned where a class has many."""
    rows = labelled.filter((pl.col("role") == "known") & (pl.col("split") == "train"))
    rows = rows.sort("class", "sample_id")
    place, size = pl.int_range(pl.len()).over("class"), pl.len().over("class")
    kept = (place * EXAMPLES_PER_CLASS // size) != ((place - 1) * EXAMPLES_PER_CLASS // size)
    return rows.filter((size <= EXAMPLES_PER_CLASS) | kept)["sample_id"].to_list()
