"""docs/extending.md, followed: a score, models and a benchmark are files, and nothing is edited.

The files below `added/` are put into a copy of the tree; the command line does the rest, on small
sample data, into one lake.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tasks.sample.condda import write_condda
from tasks.sample.kowl import write_kowl
from tasks.sample.novelcraft import write_novelcraft
from tasks.sample.semantic import write_semantic
from tasks.sample.threedos import write_threedos

ROOT = Path(__file__).parents[2]
ADDED = Path(__file__).with_name("added")
LAYERS = ("flows", "tasks", "schemas", "storage")
SCORE = ("--scores", "centroid_gap,msp", "--scores.centroid_gap.power", "2")
MODEL = ("--models", "mean_colours", *SCORE)


def novelty(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the copied tree."""
    environment = os.environ | {"PYTHONPATH": str(tree), "NOVELTY_LAKE": str(tree / "lake")}
    environment = {
        name: value for name, value in environment.items() if not name.startswith("PREFECT")
    }
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The copy with the added files."""
    tree = tmp_path_factory.mktemp("tree")
    for layer in LAYERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / layer, tree / layer, ignore=ignored)
    shutil.copytree(ADDED, tree, dirs_exist_ok=True)
    return tree


BUILDS = {
    "novelcraft": ("--source", "raw/novelcraft", *MODEL),
    "semantic": (
        *("--source", "cifar10=raw/semantic/cifar10", "--subsets", "cifar10"),
        *("--protocols", "cifar10/cat", *MODEL),
    ),
    "threedos": (
        *("--source", "modelnet40=raw/threedos/modelnet40", "--shapes.points", "64"),
        *("--shapes.candidates", "256", "--protocols", "MN1", "--models", "cross_entropy"),
        *("--networks", "dgcnn", "--train.epochs", "1", *SCORE),
    ),
    "kowl": (
        *("--lists", "raw/kowl/lists", "--videos", "raw/kowl/videos"),
        *("--scores", "centroid_gap", *SCORE[2:]),
    ),
    "condda": (
        *("--tests", "raw/condda", "--protocols", "OND/image_classification"),
        *("--predictors", "", "--scores", "centroid_gap", *SCORE[2:]),
    ),
}


@pytest.fixture(scope="module")
def metrics(tree):
    """Rows of `lake.metrics` after a build of every benchmark on small sample data."""
    raw = tree / "raw"
    write_novelcraft(
        raw / "novelcraft",
        episodes={"normal": 2, "fence": 2, "item_tnt": 1, "tree_easy": 1},
        bad_records=False,
    )
    sizes = {"cifar_train": 10, "cifar_test": 4, "stl_train": 2, "stl_test": 2}
    write_semantic(raw / "semantic", imagenet_train=2, imagenet_val=2, **sizes)
    write_threedos(raw / "threedos", train=6, test=4, scans_train=2, scans_test=2, models=2)
    write_kowl(raw / "kowl", clips_per_class=8, videos_per_class=3)
    for folder in sorted((raw / "kowl" / "videos").iterdir())[::2]:
        shutil.rmtree(folder)  # link rot of every second class, for speed
    write_condda(raw / "condda", rows=192)
    for benchmark, options in BUILDS.items():
        answer = novelty(tree, "build", benchmark, *options)
        assert answer.returncode == 0, f"{benchmark}: {answer.stderr[-2000:]}"
    with duckdb.connect(tree / "lake" / "catalog.duckdb", read_only=True) as connection:
        connection.execute(f"SET file_search_path = '{tree / 'lake'}'")
        return connection.sql(
            "select benchmark, model, score, count(*) as rows, count(value) as numbers "
            "from lake.metrics group by all"
        ).pl()


@pytest.mark.slow
def test_the_new_score_is_made_on_every_benchmark(metrics):
    rows = metrics.filter(score="centroid_gap")
    assert set(rows["benchmark"]) == set(BUILDS)
    assert (rows["numbers"] > 0).all()


@pytest.mark.slow
def test_the_new_score_is_on_the_leaderboard_of_every_benchmark(tree, metrics):
    """Wherever its AUROC has a value: the sample of some has no novel test samples."""
    with duckdb.connect(tree / "lake" / "catalog.duckdb", read_only=True) as connection:
        connection.execute(f"SET file_search_path = '{tree / 'lake'}'")
        measured, ranked = (
            set(
                connection.sql(
                    f"select distinct benchmark, split from {table} where score = 'centroid_gap' "
                    f"and metric = 'auroc' and {number} is not null"
                ).fetchall()
            )
            for table, number in (("lake.metrics", "value"), ("lake.leaderboard", "mean"))
        )
    assert ranked == measured
    assert {"novelcraft", "semantic", "threedos", "condda"} <= {name for name, _ in ranked}


@pytest.mark.slow
def test_the_new_model_runs_where_there_are_pictures(metrics):
    rows = metrics.filter(model="mean_colours")
    assert set(rows["benchmark"]) == {"novelcraft", "semantic"}
    assert set(rows["score"]) == {"centroid_gap", "msp"}


def test_a_plugin_that_does_not_fit_is_refused_before_any_work(tree):
    (tree / "raw" / "threedos" / "modelnet40").mkdir(parents=True, exist_ok=True)
    words = ("build", "threedos", *BUILDS["threedos"], "--models", "mean_colours")
    answer = novelty(tree, *words)
    assert answer.returncode == 2
    assert "mean_colours does not fit threedos" in answer.stderr


def test_they_are_listed_with_their_settings(tree):
    answer = novelty(tree, "scores", "centroid_gap")
    assert answer.returncode == 0 and "Exponent of the distance" in answer.stdout
    answer = novelty(tree, "models", "mean_colours")
    assert answer.returncode == 0 and "Cells along each side" in answer.stdout


def test_the_new_benchmark_is_built_from_its_sample(tree):
    answer = novelty(tree, "sample", "--only", "toy", "--out", str(tree / "sample"))
    assert answer.returncode == 0, answer.stderr
    options = ("--source", "sample/toy", "--models", "line", *SCORE)
    answer = novelty(tree, "build", "toy", *options)
    assert answer.returncode == 0, answer.stderr[-2000:]
    again = novelty(tree, "build", "toy", *options)
    assert "train_model: 0 of 1 shards made" in again.stderr
    with duckdb.connect(tree / "lake" / "catalog.duckdb", read_only=True) as connection:
        connection.execute(f"SET file_search_path = '{tree / 'lake'}'")
        ((auroc,),) = connection.sql(
            "select value from lake.metrics where benchmark = 'toy' and model = 'line' and "
            "score = 'centroid_gap' and split = 'test' and metric = 'auroc'"
        ).fetchall()
        ((refused,),) = connection.sql(
            "select count(*) from lake.quarantine where benchmark = 'toy'"
        ).fetchall()
    assert auroc > 0.8 and refused == 1
    answer = novelty(tree, "leaderboard", "--benchmark", "toy", "--format", "csv")
    assert "toy,all,test,openood,auroc,1,line · " in answer.stdout
    assert "line · centroid_gap (" not in answer.stdout and "line · centroid_gap" in answer.stdout
