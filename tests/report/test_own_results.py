"""Measures of KOWL-718 and CONDDA in the form of the shared metrics, and KOWL's confusions."""

import polars as pl

from schemas.kowl import CONFUSION, MEASURES
from tasks.kowl import results_report
from tasks.report.leaderboard import ranked
from tests.report.reading import read_of


def measures() -> pl.DataFrame:
    """Two predictors, two amounts of feedback; the last increment is 3."""
    base = {"extractor": "x3d", "seed": 0, "phase": "post_feedback", "scope": "cumulative"}
    base |= {"split": "test", "known_set": "novel_to_evaluator", "reduction": "classification"}
    base |= {"grouping": "all", "group": "", "metric": "accuracy", "n": 7}
    rows = [
        base | {"predictor": name, "feedback": feedback, "increment": increment, "value": value}
        for name, good in (("ann", 0.1), ("evm", 0.2))
        for feedback in (0.5, 1.0)
        for increment, value in ((2, 0.9), (3, good + feedback / 10))
    ]
    last = rows[-1]
    rows += [
        last | {"split": "train"},
        last | {"split": "test+rotation"},
        last | {"grouping": "people", "group": "1"},
        last | {"known_set": "novel_to_predictor"},
        last | {"scope": "increment"},
    ]
    return pl.DataFrame(rows, schema=MEASURES.polars_schema)


def test_kowl_is_ranked_by_all_increments_after_the_last():
    found = results_report.results(read_of({"measures": measures()}))
    assert found is not None and found.height == 4
    best = ranked(found)
    assert [" ".join(name.split()) for name in best["protocol"]] == [
        *["feedback 50 %"] * 2,
        *["feedback 100 %"] * 2,
    ]
    assert best["detector"].to_list() == ["evm", "ann"] * 2
    assert [round(value, 3) for value in best["mean"]] == [0.25, 0.15, 0.3, 0.2]
    assert results_report.results(read_of({})) is None


def test_kowl_confusions_are_first_guesses_after_feedback():
    base = {"extractor": "x3d", "predictor": "ann", "feedback": 1.0, "seed": 0, "increment": 1}
    base |= {"phase": "post_feedback", "split": "test", "grouping": "all", "group": "", "rank": 1}
    rows = [
        base | {"target": "a", "predicted": "a", "count": 3},
        base | {"target": "a", "predicted": "unknown_4", "count": 2},
        base | {"target": "a", "predicted": "unknown_7", "count": 1},
        base | {"target": "b", "predicted": "a", "count": 2},
    ]
    others = [
        base | {"rank": 2, "target": "a", "predicted": "z", "count": 99},
        base | {"phase": "pre_feedback", "target": "a", "predicted": "z", "count": 99},
        base | {"feedback": 0.0, "target": "a", "predicted": "z", "count": 1},
        base | {"split": "train", "target": "a", "predicted": "z", "count": 99},
    ]
    table = pl.DataFrame(rows + others, schema=CONFUSION.polars_schema)
    section = results_report.confusions(read_of({"confusion": table}))
    assert section is not None
    shown = "".join(section.parts)
    assert "ann · x3d: 37.5% right" in shown and "with feedback 100 %" in shown
    assert '<td>a</td><td>unknown</td><td class="n">3</td><td class="n">0.500</td>' in shown
    assert "<td>z</td>" not in shown
    assert results_report.confusions(read_of({"confusion": table.clear()})) is None
