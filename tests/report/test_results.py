"""What a report says about runs: names, ranking, index, curves, confusions and the time spent."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from schemas.runs import RunFacts
from schemas.table import Column, Table
from schemas.tables import METRICS, PREDICTIONS, SCORE_SETTINGS, SHARED, SPLITS
from storage.tables import current_versions
from tasks.evaluation.runs import run_id, run_row
from tasks.report import Tables, confused, with_names, write, write_report
from tasks.report.confusion import MOST_LABELS, confusion
from tasks.report.curves import MOST_RUNS, curves
from tasks.report.leaderboard import ranked
from tests.report.reading import read_of
from tests.small_lake import put_table
from tests.test_report import parsed, results


def lake_of(lake: Path, tables: dict[str, pl.DataFrame], benchmark: str = "toy") -> Tables:
    for name, rows in tables.items():
        put_table(lake, benchmark, name, rows)
    return Tables(lake, benchmark, current_versions(lake, benchmark))


def run_facts(row: dict[str, Any]) -> RunFacts:
    given = {
        name: row[name] for name in ("network", "preset", "settings", "changed") if name in row
    }
    return RunFacts(
        benchmark="toy",
        protocol=row["protocol"],
        model=row["model"],
        seed=row["seed"],
        fit_key="rows",
        **given,
    )


def measured(*rows: tuple, **same: Any) -> dict[str, pl.DataFrame]:
    """`runs` and `metrics` of (protocol, model, seed, convention, metric, value, {others})."""
    runs, metrics = [], []
    names = ["protocol", "model", "seed", "convention", "metric", "value"]
    for row in rows:
        given = same | dict(zip(names, row[:6], strict=True)) | (row[6] if len(row) > 6 else {})
        facts = run_facts(given)
        runs.append(run_row(facts))
        usual = {"run_id": run_id(facts), "score": "own", "split": "test", "view": "plain"}
        usual |= {"phase": "none", "step": 0, "subset": "all", "low": None, "high": None, "n": 10}
        given = usual | given
        given |= {"score_id": given.get("score_id", given["score"])}
        metrics.append({name: given[name] for name in METRICS.polars_schema})
    return {
        "runs": pl.concat(runs).unique("run_id", maintain_order=True),
        "metrics": pl.DataFrame(metrics, schema=METRICS.polars_schema),
    }


def ranking(*rows: tuple) -> pl.DataFrame:
    made = measured(*rows)
    return ranked(with_names(read_of(made), made["metrics"]))


def cells(page: Path | str) -> list[list[str]]:
    source = page.read_text() if isinstance(page, Path) else page
    rows = re.findall(r"<tr>(<td.*?)</tr>", source, re.S)
    return [re.findall(r"<td.*?>(.*?)</td>", row, re.S) for row in rows]


# ---- names


def names_of(*rows: tuple, **more: pl.DataFrame) -> list[str]:
    made = measured(*rows)
    return with_names(read_of(made | more), made["metrics"])["run"].to_list()


def row(model: str = "net", protocol: str = "p", seed: int = 0, **differs: Any) -> tuple:
    return (protocol, model, seed, "c", "auroc", 0.5, differs)


def test_names_say_model_network_score_and_what_was_changed():
    many = {f"s{number}": number for number in range(5)}
    assert names_of(
        row(network="dgcnn", score="nearest"),
        row("symbolic_mlp", changed={"model": {"order": 5}}, settings={"order": 5}),
        row("other", score="none"),
        row("large", changed=many, settings=many),
    ) == [
        "net · dgcnn · nearest",
        "symbolic_mlp · own (order=5)",
        "other",
        "large · own (s0=0, s1=1, s2=2, 2 more)",
    ]


def test_threads_are_in_a_name_only_where_nothing_else_tells_two_apart():
    one, two = {"cpu_threads": 1, "order": 5}, {"cpu_threads": 2, "order": 5}
    assert names_of(row(changed={"model": one}, settings=one)) == ["net · own (order=5)"]
    assert names_of(row(changed=one, settings=one), row(changed=two, settings=two)) == [
        "net · own (order=5, cpu_threads=1)",
        "net · own (order=5, cpu_threads=2)",
    ]


def test_runs_of_one_protocol_share_a_name_only_if_they_differ_in_the_seed():
    assert names_of(row(seed=0), row(seed=1)) == ["net · own"] * 2
    assert names_of(row(settings={"a": 1, "b": 1}), row(settings={"a": 2, "b": 1})) == [
        "net · own (a=1)",
        "net · own (a=2)",
    ]
    small, paper = {"preset": "small", "settings": {"a": 1}}, {"preset": "paper", "settings": {}}
    assert names_of(row(**small), row(**paper)) == [
        "net · own (preset=small)",
        "net · own (preset=paper)",
    ]
    # In another protocol the same words may mean other settings.
    assert (
        names_of(row(settings={"a": 1}), row(settings={"a": 2}, protocol="q")) == ["net · own"] * 2
    )
    several = {f"s{number}": 0 for number in range(9)}
    changed = [several | {"s8": value} for value in (1, 2)]
    found = names_of(*(row(changed=one, settings=one) for one in changed))
    assert len(set(found)) == 2 and found[0].endswith("6 more, s8=1)")


def test_scores_with_other_settings_have_other_names():
    table = SCORE_SETTINGS.conform(
        pl.DataFrame(
            {"score_id": ["k1", "k5"], "score": "knn", "version": 1}
            | {"settings": ['{"k": 1, "metric": "l2"}', '{"k": 5, "metric": "l2"}']}
        )
    )
    pair = [row(score="knn", score_id=score_id) for score_id in ("k1", "k5")]
    assert names_of(*pair, score_settings=table) == ["net · knn (k=1)", "net · knn (k=5)"]


# ---- ranking


def test_rank_follows_the_paper_before_the_general_convention():
    found = ranking(
        ("p", "a", 0, "openood", "auroc", 0.9),
        ("p", "b", 0, "openood", "auroc", 0.1),
        ("p", "a", 0, "threedos", "auroc", 0.2, {"low": 0.1, "high": 0.3}),
        ("p", "b", 0, "threedos", "auroc", 0.8, {"low": 0.7, "high": 0.9}),
        ("p", "b", 1, "threedos", "auroc", 0.6, {"low": 0.5, "high": 0.7}),
    )
    assert found["run"].to_list() == ["b · own", "a · own"] and found["place"].to_list() == [0, 1]
    assert set(found["convention"]) == {"threedos"}
    assert found["mean"].to_list() == pytest.approx([0.7, 0.2])
    assert found["deviation"].to_list() == [pytest.approx(0.1 * 2**0.5), None]
    assert found["low"].to_list() == [None, 0.1], "an interval is of one seed"
    assert found["seeds"].to_list() == [2, 1]


def test_rank_by_average_precision_where_the_paper_does():
    rows = [
        ("p", name, 0, "semantic", metric, value)
        for name, auroc, precision in (("a", 0.9, 0.1), ("b", 0.2, 0.3))
        for metric, value in (("auroc", auroc), ("average_precision", precision), ("skew", 1.0))
    ]
    assert ranking(*rows)["run"].to_list() == ["b · own", "a · own"]


def test_rank_turns_round_where_lower_is_better_and_gaps_come_last():
    found = ranking(
        ("p", "gap", 0, "c", "fpr95", None),
        ("p", "worse", 0, "c", "fpr95", 0.7),
        ("p", "better", 0, "c", "fpr95", 0.3),
    )
    assert found["run"].to_list() == ["better · own", "worse · own", "gap · own"]


# ---- the leaderboard


def board(page: Path, caption: str) -> list[list[str]]:
    source = page.read_text()
    start = source.index(f'<p class="caption">{caption}')
    return cells(source[start : source.index("</table>", start)])


def test_only_whole_plain_numbers_are_ranked_and_the_rest_is_folded(tmp_path):
    kinds = [
        (0.5, {}),
        (0.9, {"subset": "SN2"}),
        (0.8, {"view": "turned", "subset": "SN2"}),
        (0.7, {"phase": "after"}),
        (0.6, {"step": 1}),
    ]
    rows = [("p", "a", 0, "c", "auroc", value, differs) for value, differs in kinds]
    lake_of(tmp_path, measured(*rows))
    page = write_report(tmp_path, "toy")
    assert board(page, "Split test, protocol p") == [["a · own", "p", "1", "10", "0.500"]]
    folded = page.read_text().split("Subsets, views and phases by themselves")[1]
    assert cells(folded[: folded.index("</details>")]) == [
        ["a · own", "p", "SN2", "1", "10", "0.900"],
        ["a · own", "p", "SN2, turned", "1", "10", "0.800"],
        ["a · own", "p", "after labels", "1", "10", "0.700"],
    ]
    assert "Step by step" not in page.read_text(), "one step of one is no line"


def test_all_steps_together_are_ranked_and_single_ones_drawn(tmp_path):
    rows = [
        ("p", "a", 0, "c", "auroc", value, {"step": step, "phase": "before"})
        for step, value in ((-1, 0.25), (0, None), (1, 0.3), (2, 0.2))
    ]
    lake_of(tmp_path, measured(*rows))
    page = write_report(tmp_path, "toy")
    assert board(page, "Split test, protocol p") == [["a · own", "p", "1", "10", "0.250"]]
    drawn = page.read_text().split("Step by step")[1]
    assert ">p, auroc<" in drawn and ">Step<" in drawn and "a · own" in drawn


def test_failed_runs_are_told_with_their_reasons(tmp_path):
    made = measured(("p", "a", 0, "c", "auroc", 0.5))
    facts = RunFacts(benchmark="toy", protocol="p", model="b", seed=1, fit_key="rows")
    runs = pl.concat([made["runs"], run_row(facts, failed="the loss is NaN")])
    lake_of(tmp_path, made | {"runs": runs})
    page = write_report(tmp_path, "toy").read_text()
    failed = page.split("<summary>1 run failed</summary>")[1]
    assert cells(failed[: failed.index("</details>")]) == [["b", "p", "1", "the loss is NaN"]]


@pytest.mark.parametrize("version", [1, METRICS.version], ids=["older", "undeclared"])
def test_metrics_of_an_older_version_are_named_and_not_read(tmp_path, monkeypatch, version):
    columns = Column("detector", pa.string(), "Detector"), Column("value", pa.float64(), "Value")
    older = Table("metrics", "As it was.", columns, key=("detector",), version=version)
    monkeypatch.setattr("tests.small_lake.find_table", lambda *_: older)
    lake_of(tmp_path, {"metrics": pl.DataFrame({"detector": ["a"], "value": [0.123]})})
    page = parsed(write_report(tmp_path, "toy"))
    assert "metrics is of an older version" in page.prose
    assert "0.123" not in page.prose
    assert ("so not shown below: metrics" in page.prose) == (version == 1)
    assert "Best runs" not in parsed(tmp_path / "reports/index.html").prose


def test_refused_records_of_an_older_version_stop_nothing(tmp_path, monkeypatch):
    columns = (Column("table", pa.string(), "As it was called"),)
    older = Table("quarantine", "As it was.", columns, key=("table",))
    monkeypatch.setattr("tests.small_lake.find_table", lambda *_: older)
    lake_of(tmp_path, {"quarantine": pl.DataFrame({"table": ["frames"]})})
    page = parsed(write_report(tmp_path, "toy"))
    assert "so not shown below: quarantine" in page.prose
    assert "No record was refused" not in page.prose


# ---- the index


def test_index_names_the_best_of_each_protocol_and_who_is_as_good(tmp_path):
    interval = {"low": 0.9, "high": 1.0}
    lake_of(
        tmp_path,
        measured(
            ("one", "a", 0, "c", "auroc", 0.5),
            ("one", "a", 1, "c", "auroc", 0.7),
            ("one", "b", 0, "c", "auroc", 0.55),
            ("two", "a", 0, "c", "auroc", 1.0, interval),
            ("two", "b", 0, "c", "auroc", 1.0, interval),
        ),
    )
    write_report(tmp_path, "toy")
    own = "a · own"
    one = ["one", "auroc (c)", own, "0.600 ± 0.141", "2", "2", "10", *"––"]
    two = ["two", "auroc (c)", f"{own} (and 1 as good)", "1.000\n[0.900, 1.000]", "2", "1", "10"]
    index = tmp_path / "reports/index.html"
    assert cells(index) == [one, [*two, *"––"]]
    assert "chosen after looking" in parsed(index).prose


def test_beside_the_best_on_test_stands_the_score_chosen_on_validation(tmp_path):
    values = {"msp": (0.6, 0.8), "knn": (0.9, 0.7), "vim": (None, 0.6)}
    rows = [
        ("p", "net", 0, "c", "auroc", value, {"score": score, "split": split})
        for score, both in values.items()
        for split, value in zip(("valid", "test"), both, strict=True)
    ]
    # Another model's score is better on validation: it is not the same model's.
    other = ("p", "other", 0, "c", "auroc", 0.99, {"score": "knn", "split": "valid"})
    lake_of(tmp_path, measured(*rows, other))
    page = write_report(tmp_path, "toy")
    expected = [["p", "auroc (c)", "net · msp", "0.800", "3", "1", "10", "knn", "0.700"]]
    assert cells(tmp_path / "reports/index.html") == expected
    assert board(page, "The best run of each protocol") == expected


def test_lower_is_better_on_validation_too(tmp_path):
    rows = [
        ("p", "net", 0, "c", "fpr95", value, {"score": score, "split": split})
        for score, both in {"msp": (0.3, 0.1), "knn": (0.2, 0.4)}.items()
        for split, value in zip(("valid", "test"), both, strict=True)
    ]
    lake_of(tmp_path, measured(*rows))
    write_report(tmp_path, "toy")
    (shown,) = cells(tmp_path / "reports/index.html")
    assert shown[2] == "net · msp" and shown[7:] == ["knn", "0.400"]


def test_index_averages_families_over_runs_that_have_all_members(tmp_path):
    rows = [
        (f"set/{member}", "all", seed, "c", "auroc", value + seed / 10)
        for member, value in (("cat", 0.2), ("dog", 0.4))
        for seed in (0, 1)
    ]
    part = ("set/dog", "part", 0, "c", "auroc", 0.99)
    lake_of(tmp_path, measured(*rows, part))
    write_report(tmp_path, "toy")
    assert cells(tmp_path / "reports/index.html") == [
        ["set (mean of 2)", "auroc (c)", "all · own", "0.350 ± 0.071", "1", "2", "20", *"––"]
    ]


def test_damage_of_one_benchmark_does_not_stop_the_report_of_another(tmp_path):
    metrics = measured(("p", "a", 0, "c", "auroc", 0.5))
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
    lake_of(tmp_path, measured(("p", "a", 0, "c", "auroc", 0.5)))
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


def test_the_index_is_written_when_a_page_or_a_table_is_newer(tmp_path):
    lake_of(tmp_path, measured(("p", "a", 0, "c", "auroc", 0.5)))
    path = write_report(tmp_path, "toy", anew=False)
    index = path.with_stem("index")
    written = index.read_text()
    index.write_text("as it was")
    write_report(tmp_path, "toy", anew=False)
    assert index.read_text() == "as it was"
    for newer in (path, tmp_path / "toy" / "current"):
        index.write_text("as it was")
        later = index.stat().st_mtime_ns + 1_000_000
        os.utime(newer, ns=(later, later), follow_symlinks=False)
        write_report(tmp_path, "toy", anew=False)
        assert index.read_text() == written


# ---- curves


def test_only_the_best_runs_are_drawn(tmp_path):
    samples = pl.DataFrame({"sample_id": [f"s{n:02}" for n in range(60)], "class": "c"})
    samples = samples.with_columns((pl.int_range(60) % 3 == 0).alias("novel"))
    good = {f"run{n:02}": 4.0 - n / 3 for n in range(MOST_RUNS + 4)}
    made = results(samples, good, seeds=1)
    (section,) = curves(lake_of(tmp_path, made))
    drawn = "".join(section.parts)
    best = made["metrics"].filter(metric="auroc").sort("value", descending=True)
    assert set(re.findall(r"run\d\d", drawn)) == set(best["model"].head(MOST_RUNS))
    assert f"Drawn are the {MOST_RUNS} best runs" in drawn


# ---- confusions


def guesses(model: str, seed: int, pairs: list[tuple[str, str]], **differs: Any) -> dict[str, Any]:
    """The run, what it calls samples of (class, predicted), and what the protocol says of them."""
    facts = RunFacts(benchmark="toy", protocol="p", model=model, seed=seed, fit_key="rows")
    role = differs.pop("role", "known")
    rows, splits = [], []
    for number, (true, guess) in enumerate(pairs):
        sample = {"sample_id": f"{true}{number}", "step": 0, "split": "test", "class": true}
        given = sample | {"run_id": run_id(facts), "phase": "none", "view": "plain", "rank": 1}
        given |= {"predicted": guess, "probability": 1.0, "p_unknown": None}
        rows.append(given | differs)
        splits.append(sample | {"protocol": "p", "label": 0, "role": role, "subset": None})
    return {
        "runs": run_row(facts),
        "predictions": pl.DataFrame(rows, schema=PREDICTIONS.polars_schema),
        "splits": pl.DataFrame(splits, schema=SPLITS.polars_schema),
    }


def joined(*parts: dict[str, Any]) -> dict[str, pl.DataFrame]:
    return {
        name: pl.concat(part[name] for part in parts).unique(SHARED[name].key, maintain_order=True)
        for name in parts[0]
    }


def test_confusions_of_the_run_that_classifies_best(tmp_path):
    good = [("cat", "cat"), ("cat", "dog"), ("dog", "dog"), ("dog", "dog")]
    bad = [("cat", "dog"), ("cat", "dog"), ("dog", "cat"), ("dog", "dog")]
    wrong = [("dog", "cat")] * 4
    read = lake_of(
        tmp_path,
        joined(
            guesses("good", 0, good),
            guesses("good", 1, good),
            guesses("bad", 0, bad),
            guesses("good", 0, [("yak", "dog")], role="novel"),
            guesses("good", 0, wrong, rank=2),
            guesses("good", 0, wrong, phase="before"),
            guesses("good", 0, wrong, view="turned"),
        ),
    )
    (section,) = confusion(read)
    shown = "".join(section.parts)
    assert "Protocol p, split test, good: accuracy 75.0%" in shown
    assert cells(shown) == [["cat", "dog", "2", "0.500"]]
    assert "yak" not in shown and "bad" not in shown


def test_no_predictions_no_confusions(tmp_path):
    read = lake_of(tmp_path, measured(("p", "a", 0, "c", "auroc", 0.5)))
    assert confusion(read) == []


def test_shares_add_up_row_by_row_and_strangers_share_a_column(monkeypatch):
    drawn = {}

    def keep(matrix, rows, columns):
        drawn.update(matrix=matrix, rows=rows, columns=columns)
        return b"<svg></svg>"

    monkeypatch.setattr("tasks.report.plots.confusion_matrix", keep)
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
        "tasks.report.plots.confusion_matrix", lambda m, r, c: rows.extend(r) or b"<svg></svg>"
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
    lake_of(tmp_path, measured(("p", "a", 0, "c", "auroc", 0.5)))
    folder = tmp_path / ".novelty/timings"
    folder.mkdir(parents=True, exist_ok=True)
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
