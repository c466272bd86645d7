"""Tests and their features out of a lake: the splits of any protocol, the outputs of any run.

Enters: `splits`, `samples`, `runs` and `outputs` of a benchmark. Leaves: a folder of test files
(`make_tests`) with `features/<test>.npz` for agents: vectors of the test's instances, and examples
of the known classes from the train split, with the number of each one's sequence (`train_groups`)
where samples come in sequences.
"""

import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from schemas.condda import TestSettings
from schemas.errors import ConfigError, LakeError
from schemas.tables import PLAIN
from storage.atomic import write_bytes
from storage.tables import current_version
from tasks.condda.agent import FeatureLookup, training_examples
from tasks.condda.make_tests import LABELLED, PlannedTest, Pool, planned
from tasks.condda.media import MediaWriter
from tasks.condda.scenarios import scenarios_named
from tasks.condda.test_files import features_file

log = logging.getLogger(__name__)

# Frames of an episode are alike: so many, evenly spread, are examples enough of a class.
EXAMPLES_PER_CLASS = 200
# So many samples of a class make its mean.
MEAN_OF = 50
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
    features are of, and the run is the only one of the protocol that has features; of runs that
    differ in their seed alone, that of the lowest one, which is said.
    """
    scenarios_named(settings.scenario)  # refuses what is none
    runs = _feature_runs(lake, benchmark)
    if run is not None:
        runs = runs.filter(pl.col("run_id").str.starts_with(run))
        if runs.is_empty():
            raise ConfigError(f"no run {run}… of {benchmark} has features; see novelty runs list")
    protocol = _chosen_protocol(lake, benchmark, protocol, runs)
    run_id = _chosen_run(runs, benchmark, protocol)
    outputs = _outputs(lake, benchmark).filter(pl.col("run_id") == run_id)
    splits = _table(lake, benchmark, "splits").filter(pl.col("protocol") == protocol).collect()
    views = outputs.select("sample_id", "view").collect()
    plain = views.filter(view=PLAIN).select("sample_id")
    labelled = labelled_samples(splits).join(plain, on="sample_id", how="semi")
    examples, drawn = _examples(labelled), labelled
    if not examples:
        raise ConfigError(
            f"run {run_id} has no features of known train samples of {benchmark} protocol "
            f"{protocol}; name another --protocol or --run"
        )
    if "train" in settings.splits:
        # What agents learn is not what they are asked: of known classes, every second sample.
        examples = examples[::2]
        drawn = labelled.filter(~pl.col("sample_id").is_in(pl.Series(examples).implode()))
    others = views.filter(pl.col("view") != PLAIN).group_by("view").agg("sample_id")
    pool = Pool(
        drawn,
        views={view: frozenset(ids) for view, ids in others.iter_rows()},
        distances=_distances(labelled, outputs, settings),
        source=f"protocol {protocol} of {benchmark}, run {run_id}",
    )
    media = MediaWriter(lake, benchmark, out) if settings.media else None
    plan = planned(pool, out, settings)
    needed = {(name, PLAIN) for name in examples}
    for number in range(settings.tests):
        needed |= set(plan.test(number).truth.select("sample_id", "view").iter_rows())
    features = _vectors(outputs, needed)
    kept = pl.col("sample_id").is_in(pl.Series(examples, dtype=pl.String).implode())
    training = training_examples(labelled.filter((pl.col("split") != "train") | kept), features)
    groups: dict[str, np.ndarray] = {}
    if "train" not in settings.splits:  # else rows of a test are of the examples' sequences
        groups = _groups(_table(lake, benchmark, "samples"), training.sample_ids)

    def write_beside(test: PlannedTest) -> None:
        if media is not None:
            media.write(test.test_id, test.truth)
        names = [_key(*row) for row in test.truth.select("sample_id", "view").iter_rows()]
        buffer = io.BytesIO()
        np.savez(
            buffer,
            instance_id=np.array(test.truth["instance_id"].to_list(), np.str_),
            features=features.of(names).astype(np.float32),
            train_features=training.features.astype(np.float32),
            train_labels=training.labels + 1,
            **groups,
        )
        write_bytes(out / features_file(test.test_id), buffer.getvalue())

    return plan.write(out, write_beside)


def _key(sample: str, view: str) -> str:
    return sample if view == PLAIN else f"{sample}\0{view}"


def _vectors(outputs: pl.LazyFrame, needed: set[tuple[str, str]]) -> FeatureLookup:
    """Features of samples in views, by `_key`."""
    wanted = pl.DataFrame(sorted(needed), {"sample_id": pl.String, "view": pl.String}, orient="row")
    found = outputs.join(wanted.lazy(), on=["sample_id", "view"], how="semi")
    rows = found.select("sample_id", "view", "features").collect()
    keys = [_key(*row) for row in rows.select("sample_id", "view").iter_rows()]
    return FeatureLookup.of_table(
        rows.with_columns(sample_id=pl.Series(keys, dtype=pl.String)), embedding="features"
    )


def _groups(samples: pl.LazyFrame, examples: Sequence[str]) -> dict[str, np.ndarray]:
    """`train_groups`: sequences of the examples, numbered as they come, -1 for none; empty if no
    example is of one."""
    ids = pl.DataFrame({"sample_id": examples}, {"sample_id": pl.String}).lazy()
    rows = ids.join(samples, on="sample_id", how="left", maintain_order="left")
    names = rows.select("sequence").collect()["sequence"]
    number = {
        name: place for place, name in enumerate(names.drop_nulls().unique(maintain_order=True))
    }
    return {"train_groups": np.array([number.get(name, -1) for name in names])} if number else {}


def _distances(
    labelled: pl.DataFrame, outputs: pl.LazyFrame, settings: TestSettings
) -> dict[str, float]:
    """From the mean of each novel class to the nearest mean of a known one; empty if not asked."""
    if all(one.distance == "any" for one in scenarios_named(settings.scenario)):
        return {}
    rows = labelled.drop_nulls("class").filter(pl.int_range(pl.len()).over("class") < MEAN_OF)
    features = _vectors(outputs, {(name, PLAIN) for name in rows["sample_id"]})
    means: dict[str, dict[str, np.ndarray]] = {"known": {}, "novel": {}}
    for (role, name), part in rows.group_by("role", "class", maintain_order=True):
        if role in means:
            means[str(role)][str(name)] = features.of(part["sample_id"].to_list()).mean(0)
    known = np.array(list(means["known"].values()))
    return {
        name: float(np.linalg.norm(known - mean, axis=1).min())
        for name, mean in means["novel"].items()
        if len(known)
    }


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
    """Outputs with features."""
    return _table(lake, benchmark, "outputs").filter(pl.col("features").is_not_null())


def _feature_runs(lake: Path, benchmark: str) -> pl.DataFrame:
    """run_id, protocol, model, seed and config_id of the runs that give features."""
    columns = ("run_id", "protocol", "model", "seed", "config_id")
    runs = _table(lake, benchmark, "runs").select(columns).collect()
    plain = _outputs(lake, benchmark).filter(pl.col("view") == PLAIN)
    giving = plain.select(pl.col("run_id").unique()).collect()
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
    if not (of_runs := runs["protocol"].drop_nulls()).is_empty():
        return str(of_runs.min())
    featured = _outputs(lake, benchmark).filter(pl.col("run_id").is_in(runs["run_id"].implode()))
    rows = _table(lake, benchmark, "splits").filter(role="known", split="train")
    rows = rows.join(featured, on="sample_id", how="semi").select(pl.col("protocol").unique())
    return min(rows.collect()["protocol"], default=protocols[0])


def _chosen_run(runs: pl.DataFrame, benchmark: str, protocol: str) -> str:
    """The only one of these runs that is of the protocol, else the only one of none."""
    fitting = runs.filter(pl.col("protocol") == protocol)
    if fitting.is_empty():
        fitting = runs.filter(pl.col("protocol").is_null())
    if fitting["config_id"].n_unique() == 1:
        run_id, _, model, seed, _ = fitting.sort("seed", "run_id").row(0)
        if fitting.height > 1:
            log.warning(f"features are of run {run_id} ({model}, seed {seed}), the lowest seed")
        return str(run_id)
    shown = fitting if fitting.height else runs
    names = [
        f"{run_id} ({model}, seed {seed}, {of or 'any protocol'})"
        for run_id, of, model, seed, _ in shown.iter_rows()
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
