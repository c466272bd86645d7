"""Every example query runs on a lake of hand-written rows and gives the right answer.

The rows are small enough to know each answer by heart, or to compute it with another library.
"""

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from flows.cli import main
from storage.catalog import open_catalog
from tasks.operations.queries import QUERIES, example_queries
from tests.contract.query_lake import NOVEL, make_query_lake

NAMES = [path.stem for path in sorted(QUERIES.glob("*.sql"))]


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    return make_query_lake(tmp_path_factory.mktemp("queries") / "lake")


def ask(lake: Path, name: str) -> pl.DataFrame:
    with open_catalog(lake) as connection:
        return connection.sql((QUERIES / f"{name}.sql").read_text()).pl()


@pytest.mark.parametrize("name", NAMES)
def test_query_has_a_question_and_answers_it_the_same_each_time(lake, name):
    text = (QUERIES / f"{name}.sql").read_text()
    assert re.match(r"-- [A-Z].*\?\n", text), "the first line is the question"
    rows = ask(lake, name)
    assert rows.height > 0
    assert rows.equals(ask(lake, name)), "the order of rows is not left to chance"


def test_every_query_is_in_the_guide():
    guide = (QUERIES.parent / "queries.md").read_text()
    assert set(re.findall(r"queries/(\w+)\.sql", guide)) == set(NAMES)


def scored(lake: Path, benchmark: str) -> pl.DataFrame:
    return pl.read_parquet(lake / f"{benchmark}/scores/current/*.parquet")


def test_hardest_classes_are_those_of_sklearn(lake):
    from sklearn.metrics import roc_auc_score

    rows = ask(lake, "hardest_classes").filter(pl.col("benchmark").is_in(["one", "two"]))
    assert rows.group_by("benchmark", "run_id").len()["len"].to_list() == [3] * 5
    for row in rows.iter_rows(named=True):
        run = scored(lake, row["benchmark"]).filter(run_id=row["run_id"])
        pair = run.filter((pl.col("class") == row["class"]) | ~pl.col("novel"))
        assert row["auroc"] == pytest.approx(roc_auc_score(pair["novel"], pair["value"]), abs=1e-4)
    assert rows.filter(model="odin")["auroc"].is_sorted(), "the hardest first"


def test_disagreement_is_the_distance_of_ranks(lake):
    rows = ask(lake, "score_disagreement")
    assert rows.height == 20 and rows["apart"].is_sorted(descending=True)
    assert (rows["apart"] - (rows["first_rank"] - rows["second_rank"]).abs()).abs().max() < 0.0015
    first = rows.row(0, named=True)
    assert first["benchmark"] == "one" and first["sample_id"] == "normal/0/0"
    assert (first["first_run"], first["second_run"]) == ("memory msp 0", "vgg msp 0")
    assert (first["first_rank"], first["second_rank"]) == (0.0, 1.0)
    for row in rows.filter(benchmark="one").iter_rows(named=True):
        run = scored(lake, "one").filter(run_id=row["first_run"].split()[0])
        own = run.filter(sample_id=row["sample_id"])["value"][0]
        assert row["first_rank"] == pytest.approx((run["value"] < own).sum() / 39, abs=1e-3)


def test_false_alarms_count_scores(lake):
    rows = ask(lake, "false_alarms")
    assert not set(rows["class"]) & set(NOVEL)
    known = scored(lake, "one").filter(~pl.col("novel"))
    line = pl.col("value").quantile(0.9, "linear").over("run_id")
    alarms = known.filter(pl.col("value") > line).group_by("sample_id").len()
    expected = dict(alarms.iter_rows())
    found = rows.filter(benchmark="one")
    assert found.height == min(10, len(expected))
    assert dict(found.select("sample_id", "alarms").iter_rows()).items() <= expected.items()
    assert found["alarms"][0] == max(expected.values())
    assert (rows["of_all"] == (rows["alarms"] == rows["of_scores"])).all()


def test_best_run_is_of_whole_protocols_over_seeds(lake):
    rows = ask(lake, "best_runs").filter(benchmark="two")
    columns = ["protocol", "model", "score", "seeds", "auroc", "low", "samples"]
    assert rows.select(columns).rows() == [("SN1", "ce", "msp", 2, 0.8, None, 10)]


def test_deviation_is_over_seeds_of_one_configuration(lake):
    rows = ask(lake, "seed_deviation").filter(benchmark="two")
    columns = ["model", "seeds", "mean", "deviation", "lowest", "highest"]
    assert rows.select(columns).rows() == [
        ("arpl", 3, 0.7, 0.2, 0.5, 0.9),
        ("ce", 2, 0.8, 0.0, 0.8, 0.8),
    ]


def test_calibration_bins_by_novel_fraction(lake):
    rows = ask(lake, "novelcraft_calibration").filter(model="odin")
    assert rows["novel_pixels"].to_list() == ["0 normal", "2 1 to 5 %", "4 20 % and more"]
    assert rows["frames"].to_list() == [14, 19, 7]
    assert rows["mean_fraction"].to_list() == [0.02, 0.02, 0.3]
    run = pl.read_parquet(lake / "novelcraft/scores/current/*.parquet").filter(run_id="odin")
    normal = run.filter(~pl.col("novel"))["value"]
    tnt = run.filter(pl.col("class") == "item_tnt")["value"]
    assert rows["found"][2] == pytest.approx(
        (tnt > normal.quantile(0.95, "linear")).mean(), abs=1e-3
    )
    above = np.mean([(normal <= score).mean() for score in tnt])
    assert rows["above_normal"][2] == pytest.approx(above, abs=1e-3)


def test_quarantined_names_the_first_record(lake):
    rows = ask(lake, "quarantined").select(
        "benchmark", "rule", "records", "first_record", "its_message"
    )
    assert rows.rows() == [
        ("novelcraft", "json_syntax", 2, "normal/0/7", "the first"),
        ("kowl", "field_count", 1, "list.csv:4", "5 fields"),
        ("novelcraft", "image_size", 1, "fence/0/1", "too small"),
    ]


def test_costs_are_those_of_the_files(lake):
    rows = ask(lake, "table_costs")
    assert rows.height == len(list(lake.glob("*/*/current")))
    row = rows.filter(benchmark="one", table_name="scores").row(0, named=True)
    size = sum(path.stat().st_size for path in (lake / "one/scores/current/").glob("*.parquet"))
    assert (row["rows"], row["bytes"], row["files"]) == (120, size, 1)
    assert rows["share"].sum() == pytest.approx(1, abs=0.01)


ANSWERS = [
        (
            "novelcraft_class_balance",
            ["class", "train", "valid", "test", "filtered_out", "episodes"],
            [("normal", 2, 0, 1, 0, 3), ("item_tnt", 0, 1, 0, 1, 2)],
        ),
        (
            "kowl_class_balance",
            ["increment", "clips", "labels", "new_clips", "new_labels", "clips_a_label"],
            [(0, 1, 1, 0, 0, 1.0), (1, 3, 2, 2, 1, 1.5)],
        ),
        (
            "threedos_class_balance",
            ["class", "role", "train", "valid", "test", "of_them_read"],
            [("chair", "known", 2, 0, 1, 1), ("car", "novel", 0, 0, 1, 1)],
        ),
        (
            "semantic_class_balance",
            ["held_out", "split", "known", "novel", "novel_share", "classes"],
            [("pug", "test", 3, 1, 0.25, 2)],
        ),
        (
            "kowl_worst_increments",
            ["increment", "before_increment", "before", "after", "change"],
            [(3, 1, 0.8, 0.2, -0.6), (1, 0, 0.9, 0.8, -0.1), (4, 3, 0.2, 0.6, 0.4)],
        ),
        (
            "kowl_hardest_labels",
            ["label", "clips", "recall", "taken_for", "times"],
            [("luge", 4, 0.25, "skiing", 2), ("skiing", 5, 1.0, None, None)],
        ),
        (
            "condda_sessions",
            ["session_id", "tests_finished", "test_id", "attempts", "rounds", "result_lines",
             "types", "feedback_requests", "feedback_ids"],
            [("s1", "1 of 2", "t1", 2, 2, 3, "classification, detection", 2, 10)],
        ),
        (
            "condda_missed",
            ["agent", "protocol", "round", "test_row", "class", "predicted", "p_unknown"],
            [("threshold", "OND/d/t1", 1, 9, "-1", "3", 0.25)],
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    ANSWERS,
    ids=[name for name, *_ in ANSWERS],
)
def test_answers(lake, name, columns, expected):
    assert [tuple(row) for row in ask(lake, name).select(columns).rows()] == expected


def test_command_lists_and_runs_examples(lake, tmp_path, capsys):
    assert main(["query", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES) and example_queries().height == len(NAMES)
    words = ["query", "--lake", str(lake)]
    for given in (QUERIES / "quarantined.sql", "quarantined"):
        assert main([*words, "--file", str(given)]) == 0
        assert "json_syntax" in capsys.readouterr().out
    assert main([*words, "select 40 + 2 as answer"]) == 0
    assert "42" in capsys.readouterr().out
    for bad, said in (
        ([], "give either SQL or --file"),
        (["select 1", "--file", "quarantined"], "give either SQL or --file"),
        (["--file", "nonsense"], "cannot read the query nonsense"),
        (["select * from nowhere"], "the query failed"),
        (["create table kowl.x (y int)"], "the query failed"),
    ):
        assert main([*words, *bad]) == 2
        assert said in capsys.readouterr().err
