"""Tests made of any lake: which protocol, which run, who is known, and that agents can run them."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from schemas.condda import TestSettings
from schemas.errors import ConfigError, LakeError
from storage.raw import open_raw
from storage.tables import current_version
from tasks.condda.build import plan_tests, read_features, read_test
from tasks.condda.from_lake import labelled_samples
from tasks.condda.from_lake import tests_of_lake as write_tests
from tasks.condda.test_files import TestLibrary
from tests.condda.test_scenarios import put_lake
from tests.evaluation.small_runs import build_small, write_raw
from tests.small_lake import put_table

SETTINGS = TestSettings(tests=2, rows=12, round_size=4, novelty_mix=0.3, seed=0)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small")
    write_raw(root / "raw" / "samples.csv", rows=60)
    build_small(root / "lake", root / "raw")
    return root / "lake"


def run_ids(lake: Path) -> dict[str, str]:
    runs = current_version(lake, "small", "runs").read()
    return dict(runs.select("protocol", "run_id").iter_rows())


def known_names(out: Path, test: str) -> list[str]:
    return TestLibrary(out).load(test, "CONDDA", "novelty").metadata["known_class_names"]


def test_the_first_protocol_and_its_only_run_are_taken(lake: Path, tmp_path: Path) -> None:
    made = write_tests(lake, "small", tmp_path, SETTINGS)
    assert made.height == 2 and known_names(tmp_path, made["test_id"][0]) == ["a", "b"]
    source = open_raw(tmp_path)
    test = made["test_id"][0]
    files = {file.name: file for file in source.files()}
    training, features = read_features(tmp_path, files[f"features/{test}.npz"], "first")
    outputs = current_version(lake, "small", "outputs").read()
    rows = outputs.filter(run_id=run_ids(lake)["first"])
    vectors = dict(rows.select("sample_id", "features").iter_rows())
    truth = TestLibrary(tmp_path).load(test, "CONDDA", "novelty").truth
    assert truth["instance_id"].to_list() == features.sample_ids
    for name, vector in zip(truth["sample_id"], features.values, strict=True):
        assert np.array_equal(vector, np.array(vectors[name], np.float32))
    assert len(training.labels) == 40 and set(training.labels) == {0, 1}
    for shard in plan_tests(source):
        tables = read_test(shard, SETTINGS).tables
        splits = tables["splits"]
        assert set(splits.filter(role="novel")["class"]) == {"c"}
        assert tables["tests"]["examples"].to_list() == [40]


def test_sequences_of_examples_are_groups_that_tell_nothing_else(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    put_lake(lake)

    def arrays(name: str, **changes: object) -> dict[str, np.ndarray]:
        settings = SETTINGS.model_copy(update=changes)
        made = write_tests(lake, "kowl", tmp_path / name, settings)
        file = tmp_path / name / f"features/{made['test_id'][0]}.npz"
        with np.load(file) as read:
            return dict(read)

    without = arrays("without")
    assert "train_groups" not in without
    samples = current_version(lake, "kowl", "samples").read()
    place = pl.col("sample_id").str.slice(1).cast(pl.Int64)
    sequence = pl.when(place % 7 > 0).then(pl.format("{}{}", pl.col("class"), place // 5))
    put_table(lake, "kowl", "samples", samples.with_columns(sequence.alias("sequence")))
    groups = (read := arrays("with")).pop("train_groups")
    for name, values in read.items():
        assert np.array_equal(values, without[name])
    # Forty examples of each of three classes; every seventh is of no sequence.
    expected = [5 * 0 + (8 * c + n // 5 if n % 7 else -1) for c in range(3) for n in range(40)]
    assert groups.tolist() == expected
    # Where test rows come of the examples' own sequences, these would be held out in vain.
    assert "train_groups" not in arrays("train", splits=("train", "test"))
    files = {file.name: file for file in open_raw(tmp_path / "with").files()}
    name = next(file for file in files if file.endswith(".npz"))
    assert read_features(tmp_path / "with", files[name], "first")[0].groups.tolist() == expected


def test_a_protocol_and_a_run_can_be_named(lake: Path, tmp_path: Path) -> None:
    second = run_ids(lake)["second"]
    by_run = write_tests(lake, "small", tmp_path / "a", SETTINGS, run=second[:6])
    assert known_names(tmp_path / "a", by_run["test_id"][0]) == ["b", "c"]
    by_name = write_tests(lake, "small", tmp_path / "b", SETTINGS, protocol="second")
    assert by_name.equals(by_run)


def test_a_wrong_choice_is_a_sentence_that_lists_what_there_is(lake: Path, tmp_path: Path) -> None:
    ids = run_ids(lake)
    with pytest.raises(ConfigError, match="no protocol 'third'; there are: first, second"):
        write_tests(lake, "small", tmp_path, SETTINGS, protocol="third")
    with pytest.raises(ConfigError, match="no run zz… of small has features"):
        write_tests(lake, "small", tmp_path, SETTINGS, run="zz")
    with pytest.raises(ConfigError, match=rf"no such run .*{ids['second']} \(line, seed 0, second"):
        write_tests(lake, "small", tmp_path, SETTINGS, run=ids["second"], protocol="first")
    assert not list(tmp_path.iterdir())


def test_a_wrong_scenario_is_refused_before_the_lake_is_looked_at(tmp_path: Path) -> None:
    wrong = SETTINGS.model_copy(update={"scenario": ("sudden", "suden")})
    with pytest.raises(ConfigError, match="no scenario 'suden'"):
        write_tests(tmp_path / "absent", "small", tmp_path / "out", wrong)


def test_of_runs_that_differ_in_their_seed_the_lowest_is_taken(
    lake: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = lake.parent / "raw"
    build_small(tmp_path / "lake", raw, protocols=("first",), seeds=(1, 0))
    caplog.set_level("WARNING")
    caplog.clear()
    made = write_tests(tmp_path / "lake", "small", tmp_path / "out", SETTINGS)
    runs = current_version(tmp_path / "lake", "small", "runs").read()
    (lowest,) = runs.filter(seed=0)["run_id"]
    assert caplog.messages == [f"features are of run {lowest} (line, seed 0), the lowest seed"]
    named = write_tests(tmp_path / "lake", "small", tmp_path / "b", SETTINGS, run=lowest)
    assert made.equals(named)


def test_several_runs_need_a_name(tmp_path: Path) -> None:
    runs = [{"run_id": name, "model": name, "config_id": name} for name in ("cosine", "line")]
    put_table(tmp_path, "kowl", "runs", runs)
    outputs = [{"run_id": row["run_id"], "sample_id": "s", "features": [0.5]} for row in runs]
    put_table(tmp_path, "kowl", "outputs", [row | {"view": "plain"} for row in outputs])
    put_table(tmp_path, "kowl", "splits", [{"protocol": "p", "sample_id": "s", "class": "x"}])
    with pytest.raises(ConfigError, match=r"several runs .*cosine \(cosine, .*line \(line, "):
        write_tests(tmp_path, "kowl", tmp_path / "out", SETTINGS)


def test_a_run_without_a_protocol_serves_all_of_them(tmp_path: Path) -> None:
    """A frozen backbone; and a run without features is no choice."""
    lake, ids = tmp_path / "lake", [f"s{number:02d}" for number in range(60)]
    runs = [{"run_id": "frozen"}, {"run_id": "plain", "protocol": "p"}]
    put_table(lake, "kowl", "runs", [run | {"origin": "frozen"} for run in runs])
    outputs = [{"run_id": "frozen", "sample_id": s, "features": [0.5, 1.0]} for s in ids]
    outputs += [{"run_id": "plain", "sample_id": s, "features": None} for s in ids]
    put_table(lake, "kowl", "outputs", [row | {"view": "plain"} for row in outputs])
    splits = [
        {
            "protocol": protocol,
            "sample_id": s,
            "class": "xyz"[number % 3],
            "split": "train" if number % 3 != novel and number < 30 else "test",
            "role": "novel" if number % 3 == novel else "known",
        }
        for protocol, novel in (("p", 2), ("q", 0))
        for number, s in enumerate(ids)
    ]
    put_table(lake, "kowl", "splits", splits)
    put_table(lake, "kowl", "samples", [{"sample_id": s} for s in ids])
    made = write_tests(lake, "kowl", tmp_path / "p", SETTINGS)
    assert known_names(tmp_path / "p", made["test_id"][0]) == ["x", "y"]
    made = write_tests(lake, "kowl", tmp_path / "q", SETTINGS, protocol="q", run="fro")
    assert known_names(tmp_path / "q", made["test_id"][0]) == ["y", "z"]
    put_table(lake, "kowl", "outputs", [{"run_id": "plain", "sample_id": "s00", "view": "plain"}])
    with pytest.raises(LakeError, match="no run of kowl gives features"):
        write_tests(lake, "kowl", tmp_path / "none", SETTINGS)


def test_in_steps_known_is_what_was_given_first() -> None:
    splits = pl.DataFrame(
        {
            "sample_id": ["a", "b", "c", "d", "e", "b"],
            "class": ["x", "y", "y", "x", "z", "y"],
            "split": ["train", "train", "test", "test", "test", "test"],
            "step": [0, 1, 2, 2, 0, 2],
            "role": ["novel", "novel", "known", "known", "novel", "known"],
        }
    )
    roles = dict(labelled_samples(splits).select("sample_id", "role").rows())
    assert roles == {"a": "known", "b": "novel", "c": "novel", "d": "known", "e": "novel"}
    once = splits.with_columns(step=pl.lit(0)).unique("sample_id", keep="first")
    assert labelled_samples(once).filter(role="known").height == 2
