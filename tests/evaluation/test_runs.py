"""Runs: their keys, and that they stay in the lake as long as their rows do."""

from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pytest

from schemas.errors import ConfigError, RunsFailed
from schemas.manifest import Snapshot
from schemas.runs import RunFacts
from storage.snapshots import current_snapshot, history
from storage.tables import current_version, versions_of
from tasks.engine.stage import Build
from tasks.evaluation import stages
from tasks.evaluation.protocols import rows_key
from tasks.evaluation.runs import config_id, run_id
from tasks.evaluation.stages import numbered_labels
from tasks.scores.msp import Msp
from tests.evaluation.small_runs import MADE, MENDED, build_small, write_raw


def read(lake: Path, table: str, benchmark: str = "small") -> pl.DataFrame:
    return current_version(lake, benchmark, table).read()


def bytes_of(lake: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(lake)): path.read_bytes()
        for path in sorted(lake.glob("small/*/current/*.parquet"))
    }


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    write_raw(tmp_path / "raw" / "samples.csv")
    return tmp_path / "raw"


def test_every_table_of_the_spine_is_written(raw: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    build_small(lake, raw)
    metrics = read(lake, "metrics")
    assert set(metrics["score"]) == {"msp", "nearest"}
    assert set(metrics["protocol"]) == {"first", "second"}
    area = metrics.filter(metric="auroc", split="test", score="nearest")
    assert area["value"].min() > 0.9 and (area["low"] <= area["value"]).all()
    assert {"auroc", "fpr95", "acc"} <= set(metrics["metric"])
    scores = read(lake, "scores")
    assert set(scores["split"]) == {"valid", "test"}
    runs = read(lake, "runs")
    assert runs.height == 2 and set(runs["run_id"]) == set(scores["run_id"])
    assert read(lake, "score_settings").height == 2
    splits, predictions = read(lake, "splits"), read(lake, "predictions")
    tested = splits.filter(pl.col("split") != "train")
    assert predictions.height == tested.height
    assert read(lake, "curves").height and read(lake, "training").height == 2


def test_runs_stay_when_a_later_build_asks_for_others(raw: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    build_small(lake, raw, slopes=(4.0,))
    build_small(lake, raw, slopes=(5.0,), protocols=("first",), scores={"energy": {}})
    runs = read(lake, "runs")
    assert runs.group_by("protocol").len().sort("protocol").rows() == [("first", 2), ("second", 1)]
    assert set(read(lake, "metrics")["score"]) == {"msp", "nearest", "energy"}
    assert set(read(lake, "splits")["protocol"]) == {"first", "second"}


COMMANDS = (
    {"slopes": (4.0,), "protocols": ("first",)},
    {"slopes": (5.0,), "seeds": (0, 1)},
    {"slopes": (4.0,), "scores": {"energy": {"temperature": 2.0}}},
)


def test_the_order_of_commands_does_not_matter(raw: Path, tmp_path: Path) -> None:
    found = []
    for number, order in enumerate(permutations(COMMANDS)):
        lake = tmp_path / f"lake{number}"
        for command in order:
            build_small(lake, raw, **command)
        found.append(bytes_of(lake))
    for one in found[1:]:
        assert sorted(one) == sorted(found[0])
        assert [name for name in one if one[name] != found[0][name]] == []


def test_a_setting_a_version_and_a_seed_are_runs_of_their_own(raw: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    MADE.clear()
    build_small(lake, raw, protocols=("first",))
    build_small(lake, raw, protocols=("first",))
    assert len(MADE) == 1
    build_small(lake, raw, protocols=("first",), slopes=(4.5,))
    build_small(lake, raw, protocols=("first",), seeds=(7,))
    build_small(lake, raw, protocols=("first",), versions={"model": 2})
    assert len(MADE) == 4 and read(lake, "runs").height == 4


def test_an_unused_sample_fits_nothing_anew_and_a_used_one_does(raw: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    build_small(lake, raw)
    MADE.clear()
    write_raw(raw / "samples.csv", extra=["unused,d,train,9.0"])
    build_small(lake, raw)
    assert MADE == []
    write_raw(raw / "samples.csv", extra=["more,a,test,0.1"])
    build_small(lake, raw)
    assert MADE == [] and "more" in set(read(lake, "scores")["sample_id"])
    write_raw(raw / "samples.csv", extra=["used,a,train,0.1"])
    build_small(lake, raw)
    assert len(MADE) == 1  # class a is known in the first protocol only


def test_runs_leave_with_the_rows_that_they_were_made_on(raw: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    build_small(lake, raw, slopes=(4.0, 5.0))
    write_raw(raw / "samples.csv", extra=["more,a,test,0.1"])
    build_small(lake, raw, slopes=(4.0,))
    runs = read(lake, "runs")
    # The second protocol has no class a but as novel, so the new sample is in both.
    assert runs.height == 2 and set(runs["protocol"]) == {"first", "second"}


def test_a_run_that_fails_is_recorded_and_stops_no_other(raw: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    MENDED.clear()
    with pytest.raises(RunsFailed, match=r"1 shards of runs failed .* diverged with slope"):
        build_small(lake, raw, slopes=(-1.0, 4.0), protocols=("first",))
    runs = read(lake, "runs").sort("state")
    assert runs["state"].to_list() == ["done", "failed"]
    assert runs["reason"][1] == "training diverged with slope -1.0"
    assert set(read(lake, "metrics")["run_id"]) == {runs["run_id"][0]}
    build_small(lake, raw, slopes=(4.0,), protocols=("first",))
    assert read(lake, "runs").height == 2  # what failed stays known
    MENDED.append("yes")
    build_small(lake, raw, slopes=(-1.0,), protocols=("first",))
    assert read(lake, "runs")["state"].to_list() == ["done", "done"]


def test_a_run_whose_pass_has_a_defect_is_recorded_once(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(RunsFailed, match=r"1 shards of runs failed .* ZeroDivisionError: a defect"):
        build_small(tmp_path, raw, slopes=(13.0, 4.0), protocols=("first",))
    runs = read(tmp_path, "runs").sort("state")
    assert runs["state"].to_list() == ["done", "failed"]
    assert set(read(tmp_path, "metrics")["run_id"]) == {runs["run_id"][0]}


class Unfit(Msp):
    """A score for which rows never suffice, or one with a defect."""

    error: ClassVar[type[Exception]] = ConfigError

    def _novelty(self, logits: Any) -> Any:
        raise self.error("too few rows")


def with_unfit(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    found = stages.score_files.find
    kind = type("Broken", (Unfit,), {"error": error})
    monkeypatch.setattr(
        stages.score_files, "find", lambda name: kind if name == "mls" else found(name)
    )


def test_a_score_without_enough_rows_is_quarantined(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_unfit(monkeypatch, ConfigError)
    build_small(tmp_path, raw, protocols=("first",), scores={"msp": {}, "mls": {}})
    assert set(read(tmp_path, "metrics")["score"]) == {"msp"}
    (row,) = read(tmp_path, "quarantine").to_dicts()
    assert row["record"].startswith("mls of ") and row["message"] == "too few rows"


def test_a_score_with_a_defect_stops_no_other(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_unfit(monkeypatch, ZeroDivisionError)
    with pytest.raises(RunsFailed, match="too few rows"):
        build_small(
            tmp_path, raw, slopes=(4.0,), protocols=("first",), scores={"msp": {}, "mls": {}}
        )
    assert set(read(tmp_path, "metrics")["score"]) == {"msp"}
    assert read(tmp_path, "runs")["state"].to_list() == ["done"]
    assert read(tmp_path, "quarantine").is_empty()


def test_ids_see_what_decides_the_numbers_and_nothing_else() -> None:
    facts = RunFacts(
        benchmark="b", protocol="p", model="m", seed=1, settings={"rate": 0.1}, fit_key="k"
    )
    other = {
        "benchmark": "c",
        "protocol": "q",
        "model": "n",
        "network": "net",
        "seed": 2,
        "settings": {"rate": 0.2},
        "base_runs": ("x",),
        "versions": {"model": 2},
        "weights": {"file": "sha"},
        "precision": "bfloat16",
        "fit_key": "l",
        "origin": "frozen",
        "preset": "small",
    }
    for name, value in other.items():
        assert run_id(facts.model_copy(update={name: value})) != run_id(facts), name
    assert run_id(facts.model_copy(update={"changed": {"rate": 0.1}})) == run_id(facts)
    assert config_id(facts) == config_id(facts.model_copy(update={"seed": 3, "fit_key": "z"}))
    assert config_id(facts) != config_id(facts.model_copy(update={"settings": {}}))


def test_the_key_of_rows_sees_content_and_not_order() -> None:
    rows = pl.DataFrame(
        {
            "sample_id": ["a", "b"],
            "step": [0, 0],
            "class": ["x", "y"],
            "label": [0, None],
            "split": ["train", "test"],
            "role": ["known", "novel"],
            "subset": [None, None],
            "digest": ["1", "2"],
            "sequence": [None, None],
        }
    )
    assert rows_key(rows) == rows_key(rows.reverse())
    changed = rows.with_columns(pl.Series("digest", ["1", "3"]))
    assert rows_key(rows) != rows_key(changed)


def test_labels_are_numbered_among_those_with_training_rows() -> None:
    rows = pl.DataFrame(
        {
            "split": ["train", "train", "test", "test"],
            "label": pl.Series([4, 2, 2, 3], dtype=pl.Int32),
            "class": ["e", "c", "c", "d"],
        }
    )
    numbered, classes = numbered_labels(rows)
    assert numbered["label"].to_list() == [1, 0, 0, None] and classes == {0: "c", 1: "e"}


def snapshot_runs(lake: Path, snapshot: Snapshot) -> set[str]:
    """The runs that a snapshot shows; each is in all tables of runs, with all its scores."""
    tables = {version.manifest.table: version.read() for version in versions_of(lake, snapshot)}
    found = set(snapshot.runs)
    for name in ("runs", "training", "outputs", "predictions", "scores", "metrics", "curves"):
        assert set(tables[name]["run_id"] if name in tables else ()) == found, name
    if found:
        scores = tables["metrics"].group_by("run_id").agg(pl.col("score").n_unique())
        assert set(scores["score"]) == {2}
    return found


def test_finished_runs_are_shown_while_the_build_goes_on(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.engine.stage.PUBLISH_SECONDS", 0)
    monkeypatch.setattr("tasks.engine.stage.PUBLISH_SHARE", float("inf"))
    lake = tmp_path / "lake"
    build_small(lake, raw, slopes=(4.0, 5.0))
    *partial, last = history(lake, "small")
    assert all(snapshot.partial for snapshot in partial) and not last.partial
    shown = [snapshot_runs(lake, snapshot) for snapshot in (*partial, last)]
    assert shown[0] == set() and "splits" in partial[0].tables  # data first
    assert all(before < after for before, after in pairwise(shown[:-1]))  # then run by run
    assert len(shown[-1]) == 4 and {len(runs) for runs in shown} >= {0, 1, 2, 3}


def test_what_is_finished_stays_when_a_build_is_killed(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.engine.stage.PUBLISH_SECONDS", 0)
    monkeypatch.setattr("tasks.engine.stage.PUBLISH_SHARE", float("inf"))
    lake = tmp_path / "lake"
    build_small(lake, raw, slopes=(4.0,))
    before = bytes_of(lake)
    published = Build._publish_partial

    def kill(build: Build, pieces, pending=()) -> None:
        published(build, pieces, pending)
        if len(current_snapshot(lake, "small").runs) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Build, "_publish_partial", kill)
    with pytest.raises(KeyboardInterrupt):
        build_small(lake, raw, slopes=(5.0,))
    snapshot = current_snapshot(lake, "small")
    assert snapshot.partial and len(snapshot_runs(lake, snapshot)) == 3
    monkeypatch.undo()
    build_small(lake, raw, slopes=(5.0,))
    other = tmp_path / "other"
    build_small(other, raw, slopes=(4.0, 5.0))
    assert bytes_of(lake) == bytes_of(other) != before


def test_runs_leave_in_the_swap_that_brings_other_data(raw: Path, tmp_path: Path) -> None:
    """Seen in the partial snapshot that shows the new data."""
    lake = tmp_path / "lake"
    build_small(lake, raw)
    write_raw(raw / "samples.csv", extra=["more,a,test,0.1"])
    build_small(lake, raw)
    _, _, partial, last = history(lake, "small")
    assert partial.partial and snapshot_runs(lake, partial) == set()
    assert len(snapshot_runs(lake, last)) == 2
