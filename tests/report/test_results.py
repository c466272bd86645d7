"""What a report says about runs: ranking, index, curves, confusions and the time they took."""

import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from schemas.config import Settings
from schemas.older_tables import CURVES, METRICS, SCORES
from storage.tables import current_versions
from tasks.report import Tables, confused, write, write_report
from tasks.report.confusion import MOST_LABELS, confusion
from tasks.report.curves import MOST_RUNS, curves
from tasks.report.leaderboard import ranked
from tasks.stage import Build, Produced, Shard, stage
from tests.test_report import parsed, results

READY: dict[str, pl.DataFrame] = {}
TABLES = {"metrics": METRICS, "scores": SCORES, "curves": CURVES}


@stage(writes=lambda settings: [TABLES[name] for name in READY])
def pretend_some(shard: Shard, settings: Settings) -> Produced:
    """Write what a test prepared."""
    return Produced(READY, next(iter(READY.values())).height)


def lake_of(lake: Path, tables: dict[str, pl.DataFrame], benchmark: str = "toy") -> Tables:
    READY.clear()
    READY.update(tables)
    with Build(benchmark, lake) as build:
        build.run(pretend_some, [Shard("all", about=lake.name)], Settings())
    return Tables(lake, benchmark, current_versions(lake, benchmark))


def metric_rows(*rows: tuple) -> pl.DataFrame:
    """protocol, detector, seed, convention, metric, value."""
    given = ["protocol", "detector", "seed", "convention", "metric", "value"]
    frame = pl.DataFrame(rows, schema=given, orient="row")
    return frame.with_columns(
        pl.col("seed").cast(pl.Int32),
        pl.col("value").cast(pl.Float64),
        benchmark=pl.lit("toy"),
        backbone=pl.lit("none"),
        split=pl.lit("test"),
        n=pl.lit(10, pl.Int64),
        data_key=pl.lit("key"),
    )


def cells(page: Path | str) -> list[list[str]]:
    source = page.read_text() if isinstance(page, Path) else page
    rows = re.findall(r"<tr>(<td.*?)</tr>", source)
    return [re.findall(r"<td.*?>(.*?)</td>", row) for row in rows]


# ---- ranking


def test_rank_follows_the_paper_before_the_general_convention():
    found = ranked(
        metric_rows(
            ("p", "a", 0, "openood", "auroc", 0.9),
            ("p", "b", 0, "openood", "auroc", 0.1),
            ("p", "a", 0, "threedos", "auroc", 0.2),
            ("p", "b", 0, "threedos", "auroc", 0.8),
            ("p", "b", 1, "threedos", "auroc", 0.6),
        )
    )
    assert found["detector"].to_list() == ["b", "a"] and found["place"].to_list() == [0, 1]
    assert set(found["convention"]) == {"threedos"}
    assert found["mean"].to_list() == pytest.approx([0.7, 0.2])
    assert found["deviation"].to_list() == [pytest.approx(0.1 * 2**0.5), None]
    assert found["seeds"].to_list() == [2, 1]


def test_rank_by_average_precision_where_the_paper_does():
    rows = [
        ("p", name, 0, "semantic", metric, value)
        for name, auroc, precision in (("a", 0.9, 0.1), ("b", 0.2, 0.3))
        for metric, value in (("auroc", auroc), ("average_precision", precision), ("skew", 1.0))
    ]
    assert ranked(metric_rows(*rows))["detector"].to_list() == ["b", "a"]


def test_rank_turns_round_where_lower_is_better_and_gaps_come_last():
    found = ranked(
        metric_rows(
            ("p", "gap", 0, "c", "fpr95", None),
            ("p", "worse", 0, "c", "fpr95", 0.7),
            ("p", "better", 0, "c", "fpr95", 0.3),
        )
    )
    assert found["detector"].to_list() == ["better", "worse", "gap"]


# ---- the index


def test_index_names_the_best_of_each_protocol_and_who_is_as_good(tmp_path):
    lake_of(
        tmp_path,
        {
            "metrics": metric_rows(
                ("one", "a", 0, "c", "auroc", 0.5),
                ("one", "a", 1, "c", "auroc", 0.7),
                ("one", "b", 0, "c", "auroc", 0.55),
                ("two", "a", 0, "c", "auroc", 1.0),
                ("two", "b", 0, "c", "auroc", 1.0),
            )
        },
    )
    write_report(tmp_path, "toy")
    assert cells(tmp_path / "reports/index.html") == [
        ["one", "test", "a", "2", "auroc (c)", "0.600 ± 0.141", "2"],
        ["two", "test", "a (and 1 as good)", "2", "auroc (c)", "1.000", "1"],
    ]


def test_index_averages_families_over_runs_that_have_all_members(tmp_path):
    whole = [
        (f"set/{member}", "whole", seed, "c", "auroc", value + seed / 10)
        for member, value in (("cat", 0.2), ("dog", 0.4))
        for seed in (0, 1)
    ]
    part = ("set/dog", "part", 0, "c", "auroc", 0.99)
    lake_of(tmp_path, {"metrics": metric_rows(*whole, part)})
    write_report(tmp_path, "toy")
    assert cells(tmp_path / "reports/index.html") == [
        ["set (mean of 2)", "test", "whole", "1", "auroc (c)", "0.350 ± 0.071", "2"]
    ]


def test_damage_of_one_benchmark_does_not_stop_the_report_of_another(tmp_path):
    metrics = {"metrics": metric_rows(("p", "a", 0, "c", "auroc", 0.5))}
    lake_of(tmp_path, metrics)
    lake_of(tmp_path, metrics, "broken")
    write_report(tmp_path, "broken")
    (file,) = tmp_path.glob("broken/metrics/current/*.parquet")
    file.write_bytes(b"PAR1 no more PAR1")
    write_report(tmp_path, "toy")
    found = parsed(tmp_path / "reports/index.html")
    assert "parquet has 17 bytes, expected" in found.prose and "novelty verify" in found.prose


# ---- pages that need not be written


def test_a_page_of_the_same_tables_is_left_alone(tmp_path, monkeypatch):
    lake_of(tmp_path, {"metrics": metric_rows(("p", "a", 0, "c", "auroc", 0.5))})
    path = write_report(tmp_path, "toy", anew=False)
    page = path.read_text()
    marked = page.replace("</main>", "<!-- as it was --></main>")
    path.write_text(marked)
    write_report(tmp_path, "toy", anew=False)
    assert path.read_text() == marked
    write_report(tmp_path, "toy")
    assert path.read_text() == page
    path.write_text(marked)
    monkeypatch.setattr(write, "_code_digest", lambda: "newer")
    write_report(tmp_path, "toy", anew=False)
    assert "as it was" not in path.read_text(), "newer code draws it again"
    versions = current_versions(tmp_path, "toy")
    keys = {write.report_key(tmp_path, "toy", versions[:count]) for count in range(3)}
    assert len(keys) == 3, "other tables, another page"


# ---- curves


def test_only_the_best_runs_are_drawn(tmp_path):
    samples = pl.DataFrame({"sample_id": [f"s{n:02}" for n in range(60)], "class": "c"})
    samples = samples.with_columns((pl.int_range(60) % 3 == 0).alias("novel"))
    good = {f"run{n:02}": 4.0 - n / 3 for n in range(MOST_RUNS + 4)}
    made = results(samples, good, seeds=1)
    (section,) = curves(lake_of(tmp_path, made))
    drawn = "".join(section.parts)
    best = made["metrics"].filter(metric="auroc").sort("value", descending=True)
    assert set(re.findall(r"run\d\d", drawn)) == set(best["detector"].head(MOST_RUNS))
    assert f"Drawn are the {MOST_RUNS} best runs" in drawn


# ---- confusions


def score_rows(detector: str, seed: int, pairs: list[tuple[str, str | None]]) -> pl.DataFrame:
    """Known samples of (class, predicted)."""
    return pl.DataFrame(
        {
            "protocol": "p",
            "detector": detector,
            "backbone": "none",
            "seed": pl.Series([seed] * len(pairs), dtype=pl.Int32),
            "split": "test",
            "sample_id": [f"s{n:03}" for n in range(len(pairs))],
            "class": [true for true, _ in pairs],
            "novel": False,
            "score": 0.0,
            "predicted": pl.Series([guess for _, guess in pairs], dtype=pl.String),
        }
    )


def test_confusions_of_the_run_that_classifies_best(tmp_path):
    good = [("cat", "cat"), ("cat", "dog"), ("dog", "dog"), ("dog", "dog")]
    bad = [("cat", "dog"), ("cat", "dog"), ("dog", "cat"), ("dog", "dog")]
    novel = score_rows("good", 2, [("yak", "dog")]).with_columns(novel=pl.lit(True))
    scores = [score_rows("good", 0, good), score_rows("good", 1, good), score_rows("bad", 0, bad)]
    silent = score_rows("silent", 0, [("cat", None)])
    read = lake_of(tmp_path, {"scores": pl.concat([*scores, novel, silent])})
    (section,) = confusion(read)
    shown = "".join(section.parts)
    assert "Protocol p, split test, good: accuracy 75.0%" in shown
    assert cells(shown) == [["cat", "dog", "2", "0.500"]]
    assert "yak" not in shown and "bad" not in shown


def test_no_predictions_no_confusions(tmp_path):
    read = lake_of(tmp_path, {"scores": score_rows("silent", 0, [("cat", None)])})
    assert confusion(read) == []


def test_shares_add_up_row_by_row_and_strangers_share_a_column(monkeypatch):
    drawn = {}

    def keep(matrix, rows, columns):
        drawn.update(matrix=matrix, rows=rows, columns=columns)
        return b"<svg></svg>"

    monkeypatch.setattr("tasks.plots.confusion_matrix", keep)
    counts = pl.DataFrame(
        [("a", "a", 3), ("a", "b", 1), ("b", "unknown", 2), ("b", "x", 1), ("b", "y", 1)],
        schema=["target", "predicted", "count"],
        orient="row",
    )
    confused(counts, "some", apart=("unknown",))
    assert drawn["columns"] == ["a", "b", "unknown", "(others)"]
    expected = [[0.75, 0.25, np.nan, np.nan], [np.nan, np.nan, 0.5, 0.5]]
    np.testing.assert_allclose(drawn["matrix"], expected)


def test_of_many_classes_the_worst_are_drawn(monkeypatch):
    rows = []
    monkeypatch.setattr(
        "tasks.plots.confusion_matrix", lambda m, r, c: rows.extend(r) or b"<svg></svg>"
    )
    names = [f"c{n:03}" for n in range(MOST_LABELS + 20)]
    wrong = [(name, "c000", number + 1) for number, name in enumerate(names) if number >= 15]
    right = [(name, name, 5) for name in names]
    counts = pl.DataFrame(wrong + right, schema=["target", "predicted", "count"], orient="row")
    made = "".join(confused(counts, "many"))
    assert rows == names[20:]
    assert f"the {MOST_LABELS} of {len(names)} classes with most mistakes" in made


# ---- time


def test_time_spent_is_added_up_by_stage(tmp_path):
    lake_of(tmp_path, {"metrics": metric_rows(("p", "a", 0, "c", "auroc", 0.5))})
    folder = tmp_path / ".novelty/timings"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    names = ("benchmark", "stage", "shard", "records", "seconds", "when")
    lines = [
        ("toy", "late", "x", 0, 0.0, 9),
        ("toy", "early", "x", 6, 2, 1),
        ("toy", "early", "y", 2, 6, 2),
        ("other", "none", "y", 2, 6, 2),
    ]
    text = "\n".join(json.dumps(dict(zip(names, line, strict=True))) for line in lines)
    (folder / "host.jsonl").write_text(text + '\n{"benchmark": "toy", "sta')
    page = write_report(tmp_path, "toy").read_text()
    spent = page[page.index("<summary>Time spent") :]
    assert cells(spent[: spent.index("</details>")]) == [
        ["early", "2", "8", "8.000", "6.000", "1.000"],
        ["late", "1", "0", "0.000", "0.000", "–"],
    ]
