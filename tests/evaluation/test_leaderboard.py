"""The ranking of detectors: properties of drawn numbers; the view, command and page of a lake."""

import json
import shutil
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest

from flows.cli import main
from schemas.runs import RunFacts
from schemas.tables import METRICS, SCORE_SETTINGS
from storage.catalog import open_catalog, refresh_catalog
from storage.leaderboard import ALL_PROTOCOLS, COLUMNS, RANKED
from tasks.evaluation.leaderboard import boards, note, ranking
from tasks.evaluation.runs import run_id, run_row
from tasks.operations.leaderboard import show_best
from tasks.report import write_report
from tests.small_lake import put_table
from tests.test_report import parsed


def number(
    model: str, protocol: str, seed: int | None, value: float | None, **other: Any
) -> dict[str, Any]:
    """One row of metrics, with what else the run is."""
    row = {"benchmark": "toy", "protocol": protocol, "model": model, "seed": seed, "value": value}
    row |= {"score": "msp", "split": "test", "view": "plain", "phase": "none", "step": 0}
    row |= {"subset": "all", "convention": "openood", "metric": "auroc", "low": None, "high": None}
    row |= {"n": 10, "changed": {}, "settings": {}, "network": "none", "preset": "small"} | other
    return {"score_id": row["score"]} | row


def tables_of(rows: list[dict[str, Any]], **scores: dict[str, Any]) -> dict[str, pl.DataFrame]:
    """The three tables of these numbers; `scores` are settings by score_id."""
    runs, metrics = {}, []
    for row in rows:
        names = ("protocol", "model", "network", "preset", "settings", "changed", "seed")
        facts = RunFacts(
            benchmark=row["benchmark"], fit_key="rows", **{name: row[name] for name in names}
        )
        runs[run_id(facts)] = run_row(facts).select(
            pl.lit(row["benchmark"]).alias("benchmark"), pl.all()
        )
        metrics.append(row | {"run_id": run_id(facts)})
    columns = {"benchmark": pl.String, **METRICS.polars_schema}
    described = [
        {"benchmark": "toy", "score_id": name, "score": name[:3], "version": 1}
        | {"settings": json.dumps(settings)}
        for name, settings in scores.items()
    ]
    found = {
        "metrics": pl.DataFrame(
            [{name: row[name] for name in columns} for row in metrics], schema=columns
        ),
        "runs": pl.concat(runs.values()),
    }
    if described:
        schema = {"benchmark": pl.String, **SCORE_SETTINGS.polars_schema}
        found["score_settings"] = pl.DataFrame(described, schema=schema)
    return found


def drawn(seed: int) -> list[dict[str, Any]]:
    """Some detectors, protocols and seeds; values on a grid, so that there are ties."""
    draws = np.random.default_rng(seed)
    protocols = [f"p{place}" for place in range(draws.integers(1, 4))]
    rows = []
    for model in range(draws.integers(1, 6)):
        seeds = [None] if draws.random() < 0.2 else list(range(draws.integers(1, 4)))
        for protocol in protocols:
            if draws.random() < 0.25:
                continue
            for own in seeds:
                value = round(float(draws.integers(3, 10)) / 10, 1)
                known = draws.random() < 0.9
                low, high = (value - 0.15, min(1.0, value + 0.1)) if known else (None, None)
                rows.append(number(f"m{model}", protocol, own, value, low=low, high=high))
                fpr = {"metric": "fpr95", "low": None, "high": None}
                rows.append(number(f"m{model}", protocol, own, 1 - value, **fpr))
    return rows or drawn(seed + 1000)


def expected(rows: list[dict[str, Any]], metric: str) -> dict[tuple[str, str], tuple]:
    """(protocol, model) -> rank, mean, deviation, low, high, protocols, seeds; by plain Python."""
    values = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["metric"] == metric:
            values[row["model"]][row["protocol"]].append(row)
    shared = sorted(set.intersection(*(set(found) for found in values.values())))

    def cell(found: list[dict[str, Any]]) -> tuple:
        numbers = [row["value"] for row in found]
        several = len(numbers) > 1 and found[0]["seed"] is not None
        whole = all(row["low"] is not None for row in found)
        return (
            statistics.fmean(numbers),
            statistics.stdev(numbers) if several else None,
            min(row["low"] for row in found) if whole else None,
            max(row["high"] for row in found) if whole else None,
            1,
            len([row for row in found if row["seed"] is not None]),
        )

    cells = {(p, model): cell(found) for model, by in values.items() for p, found in by.items()}
    for model, by in values.items() if shared else ():
        parts = [cells[protocol, model] for protocol in shared]
        seeds = [row["seed"] for row in by[shared[0]]]
        means = [
            statistics.fmean(row["value"] for p in shared for row in by[p] if row["seed"] == seed)
            for seed in seeds
        ]
        several = len(means) > 1
        whole = all(part[2] is not None for part in parts)
        bounds = [statistics.fmean(p[at] for p in parts) if whole else None for at in (2, 3)]
        mean, deviation = statistics.fmean(p[0] for p in parts), None
        if several:
            deviation = statistics.stdev(means)
        cells[ALL_PROTOCOLS, model] = (
            *(mean, deviation, *bounds, len(shared), min(part[5] for part in parts)),
        )
    sign = 1 if metric == "fpr95" else -1

    def rank(protocol: str, mean: float) -> int:
        others = [own[0] for (name, _), own in cells.items() if name == protocol]
        return 1 + sum(round(sign * other, 9) < round(sign * mean, 9) for other in others)

    return {key: (rank(key[0], found[0]), *found) for key, found in cells.items()}


@pytest.mark.parametrize("metric", ["auroc", "fpr95"])
@pytest.mark.parametrize("seed", range(12))
def test_ranks_means_deviations_and_intervals_are_those_of_plain_python(
    seed: int, metric: str
) -> None:
    rows = drawn(seed)
    found = ranking(tables_of(rows)).filter(metric=metric)
    columns = ("rank", "mean", "deviation", "low", "high", "protocols", "seeds")
    got = {
        (row["protocol"], row["model"]): tuple(row[name] for name in columns)
        for row in found.iter_rows(named=True)
    }
    wanted = expected(rows, metric)
    assert got.keys() == wanted.keys()
    for key, values in wanted.items():
        assert got[key] == pytest.approx(values, abs=1e-12), key
    for row in found.iter_rows(named=True):
        clear = None if row["low"] is None else row["low"] > 0.5
        assert row["above_chance"] == (clear if metric == "auroc" else None)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_rows_and_other_benchmarks_change_nothing(seed: int) -> None:
    rows = drawn(seed)
    before = ranking(tables_of(rows))
    shuffled = [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]
    others = [row | {"benchmark": "other", "value": 0.99} for row in rows]
    after = ranking(tables_of([*shuffled, *others])).filter(benchmark="toy")
    rounded = pl.selectors.float().round(12)
    assert before.with_columns(rounded).equals(after.with_columns(rounded))


@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_a_board_are_those_of_a_competition(seed: int) -> None:
    found = ranking(tables_of(drawn(seed)))
    for _, part in found.group_by("protocol", "metric"):
        ranks = part["rank"].sort().to_list()
        assert ranks[0] == 1 and part["detectors"].unique().to_list() == [part.height]
        assert all(rank in (last, place) for place, (rank, last) in enumerate(
            zip(ranks[1:], ranks, strict=False), 2))  # fmt: skip
        better = part.sort("rank")["mean"] * (1 if part["metric"][0] == "fpr95" else -1)
        assert better.round(9).is_sorted()


def test_a_protocol_that_one_detector_lacks_is_in_no_common_mean() -> None:
    rows = [
        *(number("a", protocol, 0, value) for protocol, value in (("p", 0.6), ("q", 1.0))),
        number("b", "p", 0, 0.7),
    ]
    tables = tables_of(rows)
    (board,) = boards(ranking(tables))
    assert board.protocols == ("p",) and board.of_protocols == 2
    assert board.rows.select("detector", "mean", "rank", "protocols").rows() == [
        ("b · msp", 0.7, 1, 1),
        ("a · msp", 0.6, 2, 1),
    ]
    assert "mean over 1 of 2 protocols (p), those that all 2 detectors have" in board.scope
    (only,) = boards(ranking(tables, ["q"]))
    assert only.rows["detector"].to_list() == ["a · msp"] and only.rows["mean"].to_list() == [1.0]


def test_detectors_without_a_common_protocol_are_ranked_in_each() -> None:
    found = boards(ranking(tables_of([number("a", "p", 0, 0.6), number("b", "q", 0, 0.9)])))
    assert [(board.protocols, board.rows["rank"].to_list()) for board in found] == [
        (("p",), [1]),
        (("q",), [1]),
    ]


def test_one_detector_over_seeds_and_protocols_others_told_apart() -> None:
    fixed = {"session": {"red_light": False}}
    told = {"session": {"red_light": True}}
    rows = [
        number("agent", "p", 0, 0.6, settings=fixed),
        number("agent", "p", 1, 0.7, settings=fixed),
        number("agent", "p", 0, 0.8, settings=told),
        number("net", "p", 0, 0.6, network="dgcnn", changed={"epochs": 5}, settings={"epochs": 5}),
        number("knn", "p", 0, 0.6, score="knn", score_id="knn1"),
        number("knn", "p", 0, 0.6, score="knn", score_id="knn5"),
        # Settings that the protocol asks for make no other detector.
        number("fits", "p", 0, 0.6, settings={"size": 1}),
        number("fits", "q", 0, 0.6, settings={"size": 2}),
        number("old", "p", 0, 0.6, preset="small", settings={"epochs": 1}),
        number("old", "p", 0, 0.6, preset="paper", settings={"epochs": 9}),
    ]
    found = ranking(tables_of(rows, knn1={"k": 1}, knn5={"k": 5})).filter(protocol="p")
    assert dict(found.sort("detector").select("detector", "seeds").iter_rows()) == {
        "agent · msp (red_light=false)": 2,
        "agent · msp (red_light=true)": 1,
        "fits · msp": 1,
        "knn · knn (k=1)": 1,
        "knn · knn (k=5)": 1,
        "net · dgcnn · msp (epochs=5)": 1,
        "old · msp": 1,
    }
    assert sorted(found.filter(detector="old · msp")["preset"]) == ["paper", "small"]
    assert ranking(tables_of(rows)).filter(model="fits")["detector"].n_unique() == 1


def test_threads_are_in_a_name_only_where_nothing_else_tells_two_apart() -> None:
    first, last, between = (
        {"cpu_threads": 1, "side": 9},
        {"a": 2, "cpu_threads": 1},
        {"a": 2, "cpu_threads": 16, "side": 9},
    )
    rows = [
        number(f"m{i}", "p", 0, 0.6, changed=one, settings=one)
        for i, one in enumerate(({"cpu_threads": 1}, first, last, between, {"net": first}))
    ]
    rows += [
        number("two", "p", 0, 0.6, changed=changed, settings={"cpu_threads": threads})
        for threads, changed in ((1, {"cpu_threads": 1}), (2, {}))
    ]
    assert ranking(tables_of(rows)).filter(protocol="p")["detector"].sort().to_list() == [
        "m0 · msp",
        "m1 · msp (side=9)",
        "m2 · msp (a=2)",
        "m3 · msp (a=2, side=9)",
        "m4 · msp (side=9)",
        "two · msp (cpu_threads=1)",
        "two · msp (cpu_threads=2)",
    ]


def test_only_whole_plain_numbers_count_and_gaps_are_left_out() -> None:
    rows = [
        number("a", "p", 0, 0.9, subset="SN2"),
        number("a", "p", 0, 0.9, view="turned"),
        number("a", "p", 0, 0.9, phase="after"),
        number("a", "p", 0, 0.4, step=-1),
        number("a", "p", 0, 0.9, step=0),
        number("a", "p", 1, None, step=-1),
        number("a", "p", 0, 0.9, metric="skew", step=-1),
    ]
    found = ranking(tables_of(rows)).filter(protocol="p")
    assert found.select("metric", "mean", "seeds").rows() == [("auroc", 0.4, 1)]
    assert list(COLUMNS) == found.columns


def test_notes_tell_a_wide_interval_from_a_bad_detector() -> None:
    kinds = [("auroc", 0.6, 0.4), ("auroc", 0.5, 0.4), ("auroc", 0.9, 0.8), ("oscr", 0.1, 0.0)]
    kinds += [("fpr95", 0.9, 0.8), ("fpr95", 0.97, 0.9)]
    rows = [
        number(f"m{place}", "p", 0, value, metric=metric, low=low, high=0.99)
        for place, (metric, value, low) in enumerate(kinds)
    ]
    found = ranking(tables_of(rows)).filter(protocol="p").sort("model")
    assert found.select(note())["note"].to_list() == [
        *("not above chance: wide interval", "not above chance", "", ""),
        *("not below chance: wide interval", "not below chance"),
    ]


# ---- a small lake


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds above chance, one model that is not, and one without seeds and interval."""
    folder = tmp_path_factory.mktemp("board") / "lake"
    rows = [
        number("good", protocol, seed, value + seed / 100, low=value - 0.1, high=1.0)
        for protocol, value in (("p", 0.8), ("q", 0.9))
        for seed in range(3)
    ]
    for protocol in ("p", "q"):
        rows.append(number("weak", protocol, 0, 0.6, low=0.45, high=0.7))
        rows.append(number("bare", protocol, None, 0.55, n=9))
    for name, frame in tables_of(rows).items():
        put_table(folder, "toy", name, frame.drop("benchmark"))
    refresh_catalog(folder)
    return folder


def test_the_view_of_the_catalogue_has_the_same_rows(lake: Path) -> None:
    with open_catalog(lake) as connection:
        rows = connection.sql("select * from lake.leaderboard").pl()
        comments = dict(
            connection.sql(
                "select column_name, comment from duckdb_columns() where table_name = 'leaderboard'"
            ).fetchall()
        )
    assert comments == COLUMNS
    top = rows.filter(protocol="all").row(0, named=True)
    assert (top["rank"], top["detector"], top["protocols"], top["seeds"]) == (1, "good · msp", 2, 3)
    assert top["mean"] == pytest.approx(0.86) and top["deviation"] == pytest.approx(0.01)
    assert top["low"] == pytest.approx(0.75) and top["above_chance"] is True
    assert rows.filter(protocol="all")["above_chance"].to_list() == [True, False, None]
    assert rows.filter(protocol="p")["rank"].to_list() == [1, 2, 3]


def test_a_lake_without_numbers_has_no_view(tmp_path: Path, capsys) -> None:
    put_table(tmp_path, "toy", "samples", [{"sample_id": "a", "modality": "image"}])
    refresh_catalog(tmp_path)
    with open_catalog(tmp_path) as connection, pytest.raises(duckdb.CatalogException):
        connection.sql("select * from lake.leaderboard")
    assert main(["leaderboard", "--lake", str(tmp_path)]) == 2
    assert "there are no numbers" in capsys.readouterr().err


def test_the_command_prints_tables_csv_json_and_markdown(lake: Path, capsys) -> None:
    def ask(*words: str) -> str:
        assert main(["leaderboard", "--lake", str(lake), *words]) == 0
        return capsys.readouterr().out

    shown = ask()
    assert "mean over 2 of 2 protocols (p, q), those that all 3 detectors have" in shown
    assert "1 clearly better than chance" in shown and "not all on the same samples" in shown
    assert "too good" in shown, "picking the best after looking is said to be optimistic"
    lines = {line.split()[1]: line for line in shown.splitlines() if line[:2] in ("1 ", "2 ", "3 ")}
    assert "not above chance" not in lines["good"] and "0.86" in lines["good"]
    assert "not above chance: wide interval" in lines["weak"] and "no interval" in lines["bare"]
    rows = json.loads(ask("--format", "json", "--protocol", "p", "--benchmark", "toy"))
    assert [(row["model"], row["mean"], row["deviation"]) for row in rows] == [
        ("good", pytest.approx(0.81), pytest.approx(0.01)),
        ("weak", 0.6, None),
        ("bare", 0.55, None),
    ]
    table = pl.read_csv(ask("--format", "csv", "--by-protocol").encode())
    assert table["protocol"].to_list() == ["p"] * 3 + ["q"] * 3
    assert "| 1 | good · msp | small | 0.86 |" in ask("--format", "markdown")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--benchmark", "toi"], "no benchmark 'toi'; there are: toy; did you mean toy?"),
        (["--protocol", "z"], "no protocol 'z'; there are: p, q"),
        (["--metric", "fpr99"], f"no metric 'fpr99'; there are: {', '.join(sorted(RANKED))}"),
        (["--convention", "mine"], "no convention 'mine'; there are: openood"),
        (["--split", "valid"], "no detector has auroc by openood on the split valid"),
    ],
)
def test_a_wrong_choice_is_one_sentence(lake: Path, capsys, words: list[str], said: str) -> None:
    assert main(["leaderboard", "--lake", str(lake), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_benchmark_that_is_on_no_board_is_named_below_it(lake: Path, tmp_path, capsys) -> None:
    """Test has known samples alone, so accuracy is all that there is; validation has novel ones."""
    folder = shutil.copytree(lake, tmp_path / "lake", symlinks=True)
    rows = [
        number("blind", "all_known", 0, 0.9, metric="acc"),
        number("blind", "all_known", 0, None),
        number("blind", "all_known", 0, 0.7, split="valid"),
    ]
    for name, frame in tables_of(rows).items():
        put_table(folder, "known_only", name, frame.drop("benchmark"))
    said = "known_only: no metric on novel test samples, only on those of valid"
    words = ["leaderboard", "--lake", str(folder)]

    def ask(*more: str) -> str:
        main([*words, *more])
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert f"\n{said}\n" in ask() and "known_only" not in ask("--format", "csv")
    assert "known_only" not in ask("--protocol", "p") and "known_only: no" not in ask(
        "--metric", "acc"
    )
    assert "toy: no metric on novel valid samples, only on those of test" in ask("--split", "valid")
    assert "toy: no acc by this convention on test" in ask("--metric", "acc")
    assert f"({said})" in ask("--benchmark", "known_only")
    show_best(folder)
    assert said in capsys.readouterr().out
    assert f"{said}." in parsed(write_report(folder, "known_only").with_stem("index")).prose


def test_the_index_page_shows_the_board(lake: Path) -> None:
    page = parsed(write_report(lake, "toy").with_stem("index")).prose
    assert "Leaderboard" in page and "mean over 2 of 2 protocols (p, q)" in page
    assert "0.860 ± 0.010" in page and "[0.750, 1.000]" in page
    assert page.count("not above chance") == 1 and page.count("no interval") == 1
    assert "Not clearly better than chance: weak" in page
    assert "too few samples to be sure" in page
    assert "too good" in page


def test_the_demo_ends_with_the_best_and_those_that_may_be_chance(lake: Path, capsys) -> None:
    show_best(lake)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert "  toy (p, q): good · msp" in lines
    assert any(line.startswith("    0.860 ± 0.010 over") for line in lines)
    assert "not clearly better than chance: weak" in shown and "bare" not in shown
