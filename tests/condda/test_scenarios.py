"""Tests of every scenario made of a lake, run by an agent, and measured."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from flows import condda
from schemas.condda import Config, SessionSettings, TestSettings
from schemas.errors import ConfigError
from storage.tables import current_version
from tasks.condda.from_lake import tests_of_lake as write_tests
from tasks.condda.measures import lake_scoreboard
from tasks.condda.scenarios import SCENARIOS
from tests.small_lake import put_table

KNOWN, NOVEL = 3, 4


def put_lake(
    lake: Path, views: tuple[str, ...] = ("plain", "turned"), benchmark: str = "kowl"
) -> None:
    """Gaussian classes far from each other; a turned view is somewhere else again."""
    draws = np.random.default_rng(1)
    means = {name: 6 * draws.standard_normal(6) for name in (*"abcdefg", *views)}
    rows = [
        (f"{name}{number:03d}", name, "train" if role == "known" and number < 40 else "test", role)
        for name in "abcdefg"[: KNOWN + NOVEL]
        for role in ("known" if name in "abc" else "novel",)
        for number in range(100)
    ]
    put_table(lake, benchmark, "runs", [{"run_id": "frozen", "origin": "frozen"}])
    splits = [dict(zip(("sample_id", "class", "split", "role"), row, strict=True)) for row in rows]
    put_table(lake, benchmark, "splits", [row | {"protocol": "p"} for row in splits])
    samples = [{"sample_id": row[0], "class": row[1], "sequence": None} for row in rows]
    put_table(lake, benchmark, "samples", samples)
    outputs = [
        {
            "run_id": "frozen",
            "sample_id": sample,
            "view": view,
            "features": (means[name] + (view != "plain") * means[view] + noise).tolist(),
        }
        for sample, name, _, _ in rows
        for view, noise in zip(views, draws.standard_normal((2, 6)), strict=False)
    ]
    put_table(lake, benchmark, "outputs", outputs)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with the runs of one agent over a test of each scenario."""
    root = tmp_path_factory.mktemp("scenarios")
    put_lake(root / "lake")
    settings = TestSettings(scenario=("all",), tests=11, seed=5)
    write_tests(root / "lake", "kowl", root / "tests", settings)
    run = SessionSettings(red_light="both", baseline="threshold")
    config = {"tests": root / "tests", "lake": root / "lake", "run": run, "scores": {"nearest": {}}}
    condda.build.fn(Config(predictors={"clustering": {}}, **config))
    return root


def read(root: Path, name: str) -> pl.DataFrame:
    return current_version(root / "lake", "condda", name).read()


def test_every_scenario_is_run_and_measured(built: Path) -> None:
    tests, sessions = read(built, "tests"), read(built, "sessions")
    assert set(tests["scenario"]) == set(SCENARIOS)
    assert sessions.height == 22 and sessions["completed"].all()
    runs = read(built, "runs").filter(model="clustering")
    assert runs.height == 22 and set(runs["state"]) == {"done"}
    lit = tests.filter(pl.col("scenario").is_in(["nuisance", "disturbed"]))
    assert lit["nuisance_row"].null_count() == 0
    assert tests.filter(pl.col("nuisance_row").is_not_null()).height == lit.height
    still = tests.filter(pl.col("change_row").is_null())
    assert set(still["scenario"]) == {"none", "nuisance"} and still["novel_rows"].sum() == 0
    instances = read(built, "instances")
    assert set(instances["view"]) == {"plain", "turned"}


def test_alarms_without_a_change_are_counted_and_nothing_else_is(built: Path) -> None:
    tests = read(built, "tests").select("test_id", "scenario", "change_row")
    sessions = read(built, "sessions").select("session_id", "test_id", "red_light")
    measures = read(built, "session_measures").filter(form="corrected")
    rows = measures.join(sessions, on=["session_id", "test_id"]).join(tests, on="test_id")
    alarms = rows.filter(metric="m_false_alarm")
    assert set(alarms["scenario"]) == {"none", "nuisance"}
    assert set(alarms.filter(scenario="nuisance")["name"]) == {"nuisance"}
    still = rows.filter(pl.col("change_row").is_null())
    assert still.filter(metric="m_num_stats", name="GT_indx")["value"].is_null().all()
    assert still.filter(name="post_top1")["value"].is_null().all()
    # With the red light an agent knows that nothing changes.
    assert alarms.filter("red_light")["value"].sum() == 0
    # The turned view is far away, so it is taken for a change.
    board = lake_scoreboard(built / "lake", "threshold")[0].row(0, named=True)
    unchanged = alarms.filter(~pl.col("red_light"), name="unchanged")["value"]
    assert board["nuisance_alarms"] == 100 and board["false_alarms"] == 100 * unchanged.mean()
    assert board["M2"] > 80 and board["M1"] < 12 and board["tests"] == 11


def test_what_a_lake_cannot_give_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_lake(tmp_path / "lake", ("plain",))
    for name in ("nuisance", "disturbed"):
        with pytest.raises(ConfigError, match=f"scenario {name} does not fit .* no view but the"):
            write_tests(tmp_path / "lake", "kowl", tmp_path / "out", TestSettings(scenario=(name,)))
    with pytest.raises(ConfigError, match="no scenario 'often'; there are none, sudden"):
        write_tests(tmp_path / "lake", "kowl", tmp_path / "out", TestSettings(scenario=("often",)))
    with pytest.raises(ConfigError, match="3 tests are fewer than the 7 scenarios"):
        settings = TestSettings(scenario=("all",), tests=3)
        write_tests(tmp_path / "lake", "kowl", tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()
    made = write_tests(tmp_path / "lake", "kowl", tmp_path / "out", TestSettings(scenario=("all",)))
    assert set(made["scenario"]) == set(SCENARIOS) - {"nuisance", "disturbed"}
    assert "without scenario nuisance: its run has no view" in capsys.readouterr().err
