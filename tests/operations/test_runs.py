"""`novelty runs`, and one plain SELECT over all benchmarks."""

from pathlib import Path

import pytest

from flows.cli import main
from schemas.errors import ConfigError
from storage.catalog import open_catalog
from tasks.operations.runs import compare_runs, drop_runs, list_runs, show_run
from tests.evaluation.small_runs import build_small, write_raw
from tests.evaluation.test_runs import read


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_raw(folder / "raw" / "samples.csv")
    build_small(folder / "lake", folder / "raw", slopes=(4.0, 5.0))
    build_small(folder / "lake", folder / "raw", benchmark="other", protocols=("first",))
    return folder / "lake"


SELECT = """
select benchmark, protocol, run_id, model, score, seed, split, metric, value, low, high, n
from lake.metrics"""


def test_every_number_by_one_select(lake: Path) -> None:
    with open_catalog(lake) as connection:
        rows = connection.sql(SELECT).pl()
        listed = "select view_name from duckdb_views() where schema_name = 'lake'"
        views = {name for (name,) in connection.sql(listed).fetchall()}
    assert {"samples", "splits", "runs", "scores", "predictions", "metrics", "quarantine"} <= views
    assert set(rows["benchmark"]) == {"small", "other"}
    for benchmark in ("small", "other"):
        assert {"auroc", "fpr95"} <= set(rows.filter(benchmark=benchmark)["metric"])
    own = read(lake, "metrics").height + read(lake, "metrics", "other").height
    assert rows.height == own


def test_runs_are_listed_shown_and_compared(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = list_runs(lake)
    assert runs.height == 5 and list_runs(lake, "other").height == 1
    first, second = runs.filter(benchmark="small", protocol="first")["run_id"]
    facts, numbers = show_run(lake, first[:8])
    assert facts["run_id"] == first and facts["settings"]["slope"] in (4.0, 5.0)
    assert set(numbers["score"]) == {"msp", "nearest"} and numbers["n"].min() > 0
    settings, wide = compare_runs(lake, [first, second])
    assert settings["what"].to_list() == ["slope"]
    assert {first, second} <= set(wide.columns) and wide.height
    with pytest.raises(ConfigError, match="no run with an id like 'zz'"):
        show_run(lake, "zz")
    assert main(["runs", "--lake", str(lake), "list", "other"]) == 0
    assert "line" in capsys.readouterr().out
    assert main(["runs", "--lake", str(lake), "compare", first]) == 2
    assert main(["runs", "--lake", str(lake), "show", first]) == 0


def test_a_dropped_run_leaves_every_table_and_comes_back(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw" / "samples.csv")
    lake = tmp_path / "lake"
    build_small(lake, tmp_path / "raw", slopes=(4.0, 5.0), protocols=("first",))
    gone, kept = read(lake, "runs")["run_id"]
    assert drop_runs(lake, [gone[:10]]) == [gone]
    for table in ("runs", "scores", "metrics", "curves", "outputs", "predictions", "training"):
        assert set(read(lake, table)["run_id"]) == {kept}, table
    build_small(lake, tmp_path / "raw", slopes=(5.0,), protocols=("second",))
    assert gone not in set(read(lake, "runs")["run_id"])
    build_small(lake, tmp_path / "raw", slopes=(4.0, 5.0), protocols=("first",))
    assert gone in set(read(lake, "runs")["run_id"])
