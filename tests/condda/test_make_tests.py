"""Tests made from our own tables: their properties, and that they read back as they were made."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from schemas.condda import TestSettings
from schemas.config import make_config
from schemas.errors import ConfigError, SourceError
from tasks.condda.make_tests import (
    MADE,
    Plan,
    PlannedTest,
    Pool,
    known_class_names,
    make_tests,
    planned,
)
from tasks.condda.scenarios import SCENARIOS, WHOLE
from tasks.condda.test_files import TestLibrary


def labelled(known: int = 4, novel: int = 3, each: int = 60) -> pl.DataFrame:
    """`each` test samples of a class, and ten train samples of the known ones."""
    rows = [
        (f"{kind}_{number}/{split}{sample:04d}.png", f"{kind}_{number}", split, kind)
        for kind, classes, train in (("known", known, 10), ("novel", novel, 0))
        for number in range(classes)
        for split, size in (("test", each), ("train", train))
        for sample in range(size)
    ]
    return pl.DataFrame(rows, ["sample_id", "class", "split", "role"], orient="row")


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def pool(known: int = 4, novel: int = 4, each: int = 60) -> Pool:
    """Samples, half of the known ones in a second view, and how far novel classes are."""
    samples = labelled(known, novel, each)
    turned = samples.filter(role="known")["sample_id"]
    distances = {f"novel_{number}": float(number) for number in range(novel)}
    return Pool(samples, {"turned": frozenset(turned)}, distances)


@st.composite
def possible_settings(draw: st.DrawFn) -> TestSettings:
    values = {
        "kind": draw(st.sampled_from(["CONDDA", "OND"])),
        "scenario": (draw(st.sampled_from([*SCENARIOS, "all"])),),
        "tests": draw(st.integers(10, 14)),
        "unchanged": draw(st.floats(0, 1)),
        "rows": draw(st.none() | st.integers(24, 150)),
        "round_size": draw(st.none() | st.integers(1, 40)),
        "earliest_change": draw(st.floats(0.01, 0.3)),
        "latest_change": draw(st.floats(0.3, 0.6)),
        "novelty_mix": draw(st.none() | st.floats(0.2, 1)),
        "novel_classes": draw(st.none() | st.just(2)),
        "anonymous": draw(st.booleans()),
        "seed": draw(st.integers(0, 5)),
    }
    return TestSettings(**values)


@given(settings=possible_settings())
@hypothesis_settings(max_examples=40, deadline=None)
def test_made_tests_keep_their_promises(settings: TestSettings) -> None:
    samples = pool(each=160)
    names = known_class_names(samples.labelled)
    with TemporaryDirectory() as folder:
        made = planned(samples, Path(folder), settings).write(Path(folder))
        library = TestLibrary(Path(folder))
        assert library.test_ids(settings.kind, "novelty") == made["test_id"].to_list()
        tests = [library.load(test, settings.kind, "novelty") for test in made["test_id"]]
    assert made.schema == pl.Schema(MADE) and made.height == settings.tests
    # The same size, whatever the scenario; as many without a change as the settings say.
    [rows], [size] = made["rows"].unique(), {test.metadata["round_size"] for test in tests}
    assert rows == (settings.rows or rows) and size == (settings.round_size or size)
    dealt = made["scenario"].value_counts()
    changing = dealt.filter(pl.col("scenario") != "none")["count"]
    assert changing.is_empty() or changing.max() - changing.min() <= 1
    if settings.scenario == ("all",):
        assert set(dealt["scenario"]) == set(SCENARIOS)
    classes = {
        name: (kind, split)
        for name, kind, split in samples.labelled.select("sample_id", "class", "split").rows()
    }
    for test, row in zip(tests, made.rows(named=True), strict=True):
        truth, start = test.truth, row["red_light_row"]
        scenario = SCENARIOS[row["scenario"]]
        first = rows if start is None else start
        assert len(set(test.ids)) == len(test.ids) == rows
        assert truth["sample_id"].n_unique() == rows
        assert truth["detection"].to_list() == [int(n >= first) for n in range(rows)]
        assert (start is not None) == bool(scenario.present) == bool(row["novel_rows"])
        assert (truth["novel"] == (truth["classification"] < 0)).all()
        assert truth["novel"][:first].sum() == 0
        assert truth["novel"].sum() == row["novel_rows"]
        low, high = settings.change_rows(rows)
        if start is not None:
            assert truth["novel"].arg_max() == row["first_novel_row"] >= start
            assert low <= start and (scenario.disturbed or start <= high)
            assert test.metadata["red_light"] == test.ids[start] == row["red_light"]
        else:
            assert test.metadata["red_light"] == "" and test.red_light == ""
        views = truth["view"] != "plain"
        assert views.any() == scenario.disturbed
        assert not views[:low].any() and not (views & (truth["novel"] == 1)).any()
        assert test.metadata["known_classes"] == 4 == row["known_classes"]
        assert test.metadata["known_class_names"] == list(names)
        told = test.metadata["novel_class_names"]
        assert list(told.values()) == row["novel_classes"]
        if settings.novel_classes and scenario.present:
            assert len(row["novel_classes"]) == settings.novel_classes
        assert (truth["sample_id"].to_list() == list(test.ids)) != settings.anonymous
        for name, label in zip(truth["sample_id"], test.labels.tolist(), strict=True):
            kind, split = classes[name]
            assert split == "test"
            assert kind == (names[label - 1] if label > 0 else told[str(label)])
        counts = truth.filter(pl.col("novel") == 1)["classification"].value_counts()["count"]
        if scenario.present == WHOLE and not scenario.apart:
            assert counts.max() - counts.min() <= 1


def rows_of(truth: pl.DataFrame) -> dict[int, np.ndarray]:
    """Rows of each novel class."""
    labels = truth["classification"].to_numpy()
    return {label: np.flatnonzero(labels == label) for label in np.unique(labels[labels < 0])}


def many(name: str, **changes: Any) -> list[tuple[pl.DataFrame, dict[str, Any]]]:
    """Truth and metadata of twenty tests of a scenario."""
    values = {"tests": 20, "rows": 200, "unchanged": 0, "novelty_mix": 0.5, "seed": 3} | changes
    plan = Plan(pool(each=200), TestSettings(scenario=(name,), **values))
    tests = [plan.test(number) for number in range(20)]
    return [(test.truth, test.metadata) for test in tests]


def test_scenarios_are_what_they_say() -> None:
    for truth, about in many("staggered", novel_classes=3):
        firsts = sorted(rows[0] for rows in rows_of(truth).values())
        span = 200 - about["detection"]
        assert firsts[1] - firsts[0] > span / 6 and firsts[2] - firsts[1] > span / 12
    for truth, about in many("vanishing", novel_classes=2):
        left = max(rows[-1] for rows in rows_of(truth).values())
        assert left <= about["detection"] + 0.62 * (200 - about["detection"])
    for truth, about in many("recurring", novel_classes=1):
        [rows], span = rows_of(truth).values(), 200 - about["detection"]
        assert np.diff(rows).max() > span * 0.18 and rows[-1] > 200 - span * 0.15
    for truth, about in many("gradual", novel_classes=1):
        [rows], middle = rows_of(truth).values(), (200 + about["detection"]) / 2
        assert 1.4 * (rows < middle).sum() < (rows >= middle).sum()
    for name, classes in (("near", {"novel_0", "novel_1"}), ("far", {"novel_2", "novel_3"})):
        drawn = {n for _, about in many(name) for n in about["novel_class_names"].values()}
        assert drawn == classes
    for truth, about in many("disturbed"):
        first = int((truth["view"] != "plain").arg_max() or 0)
        assert first < about["detection"] <= int(truth["novel"].arg_max() or 0)
    assert not any(truth["novel"].max() for truth, _ in many("nuisance"))


def test_a_killed_command_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    settings = TestSettings(scenario=("all",), tests=12)
    whole = tmp_path / "whole"
    planned(pool(), whole, settings).write(whole)
    kept = json.loads((whole / "plan-CONDDA.1.json").read_text())
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "plan-CONDDA.1.json").write_text(json.dumps(kept, indent=2))
    seen: list[str] = []

    def kill_at(test: PlannedTest) -> None:
        seen.append(test.test_id)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(pool(), killed, settings).write(killed, kill_at)
    assert len(list(killed.rglob("*_metadata.json"))) == 4
    planned(pool(), killed, settings).write(killed, kill_at)
    assert len(seen) == 5 + 8 and files(killed) == files(whole)
    # A third command has nothing to do; another seed, other settings or samples are refused.
    planned(pool(), killed, settings).write(killed, kill_at)
    assert len(seen) == 13
    for changed, other in (("settings", {"rows": 30}), ("seed", {"seed": 1})):
        with pytest.raises(ConfigError, match=f"other tests .{changed} differ"):
            planned(pool(), killed, settings.model_copy(update=other))
    with pytest.raises(ConfigError, match="samples differ"):
        planned(pool(each=61), killed, settings)


def test_another_group_stands_beside(tmp_path: Path) -> None:
    for group in (1, 2, 1):
        make_tests(labelled(), tmp_path, TestSettings(tests=2, group=group))
    ids = TestLibrary(tmp_path).test_ids("CONDDA", "novelty")
    assert sorted(name.split(".")[1] for name in ids) == ["1", "1", "2", "2"]


def test_row_order_does_not_matter_and_the_seed_does(tmp_path: Path) -> None:
    samples, settings = labelled(), TestSettings(tests=2, rows=80, seed=0, novelty_mix=0.5)
    make_tests(samples, tmp_path / "a", settings)
    make_tests(samples.sample(fraction=1, shuffle=True, seed=3), tmp_path / "b", settings)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    make_tests(samples, tmp_path / "c", settings.model_copy(update={"seed": 1}))
    assert not set(files(tmp_path / "a").values()) & set(files(tmp_path / "c").values())
    unnamed = settings.model_copy(update={"seed": None})
    drawn = [make_tests(samples, tmp_path / name, unnamed) for name in "de"]
    assert not set(drawn[0]["test_id"]) & set(drawn[1]["test_id"])
    first, second = TestLibrary(tmp_path / "a").test_ids("CONDDA", "novelty")
    library = TestLibrary(tmp_path / "a")
    assert library.load(first, "CONDDA", "novelty").ids != (
        library.load(second, "CONDDA", "novelty").ids
    )


def test_numbers_of_one_test(tmp_path: Path) -> None:
    settings = TestSettings(
        kind="OND", tests=1, rows=100, round_size=30, earliest_change=0.4,
        latest_change=0.4, novelty_mix=0.25, novel_classes=2, feedback_max_ids=7, group=5, seed=9,
    )  # fmt: skip
    row = make_tests(labelled(), tmp_path, settings).row(0, named=True)
    test = row["test_id"]
    assert test.startswith("OND.5.0.") and test != "OND.5.0.9"
    assert (row["rounds"], row["red_light_row"], row["novel_rows"]) == (4, 40, 15)
    folder = tmp_path / "OND" / "novelty"
    metadata = json.loads((folder / f"{test}_metadata.json").read_text())
    assert (metadata["round_size"], metadata["feedback_max_ids"]) == (30, 7)
    assert metadata["detection"] == 40
    header = (folder / f"{test}_single_df.csv").read_text().split("\n")[0]
    assert header == "instance_id,novel,detection,classification,sample_id,view"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 2000}, "samples of known classes, splits test have 240"),
        ({"novelty_mix": 1.0, "rows": 200}, "0 novel classes have the 1.. samples"),
        ({"novel_classes": 4}, "3 novel classes have the"),
        ({"splits": ("train",), "rows": 20}, "0 novel classes have"),
    ],
    ids=["known", "novel", "classes", "split"],
)
def test_too_few_samples_are_a_sentence(tmp_path: Path, change: dict, message: str) -> None:
    settings = TestSettings(**{"rows": 80, "novelty_mix": 0.5, "novel_classes": 1, **change})
    with pytest.raises(ConfigError, match=message):
        make_tests(labelled(), tmp_path, settings)
    assert not files(tmp_path)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="latest_change is smaller"):
        make_config(TestSettings, {"earliest_change": 0.6})


def test_bad_frames_are_refused(tmp_path: Path) -> None:
    settings, samples = TestSettings(rows=60), labelled()
    with pytest.raises(SourceError, match="stands twice"):
        make_tests(pl.concat([samples, samples[:1]]), tmp_path, settings)
    with pytest.raises(SourceError, match="no column role"):
        make_tests(samples.drop("role"), tmp_path, settings)
    mixed = samples.with_columns(class_=pl.lit("one")).drop("class").rename({"class_": "class"})
    with pytest.raises(SourceError, match="class 'one' has known and novel samples"):
        make_tests(mixed, tmp_path, settings)
    with pytest.raises(SourceError, match="role novel"):
        make_tests(samples.filter(pl.col("role") == "known"), tmp_path, settings)


@pytest.mark.parametrize("bad", ["a,b", "a|b", 'a"b', "a\nb", " a", "'a'", "", ".", "a\u2028b"])
def test_ids_that_a_csv_would_change_need_anonymous_tests(tmp_path: Path, bad: str) -> None:
    samples = labelled().with_columns(
        pl.when(pl.int_range(pl.len()) == 0)
        .then(pl.lit(bad))
        .otherwise(pl.col("sample_id"))
        .alias("sample_id")
    )
    with pytest.raises(SourceError, match="use anonymous ids"):
        make_tests(samples, tmp_path, TestSettings(rows=60, anonymous=False))
    made = make_tests(samples, tmp_path, TestSettings(rows=200, tests=1, novelty_mix=0.3))
    test = TestLibrary(tmp_path).load(made["test_id"][0], "CONDDA", "novelty")
    assert set(test.truth["sample_id"]) <= set(samples["sample_id"])
    assert not [name for name in test.ids if "known" in name or "novel" in name]


def test_known_rows_are_drawn_from_all_known_samples_alike(tmp_path: Path) -> None:
    """A class three times as large as another is three times as often in the tests."""
    rng = np.random.default_rng(0)
    samples = labelled(known=2, novel=1, each=300)
    small = (pl.col("class") == "known_0") & (pl.col("split") == "test")
    samples = samples.filter(~small | (pl.Series(rng.random(samples.height)) < 1 / 3))
    settings = TestSettings(tests=30, rows=60, earliest_change=0.5, seed=0)
    made = make_tests(samples, tmp_path, settings)
    library = TestLibrary(tmp_path)
    labels = np.concatenate([library.load(t, "CONDDA", "novelty").labels for t in made["test_id"]])
    assert 0.2 < (labels == 1).sum() / (labels > 0).sum() < 0.3
