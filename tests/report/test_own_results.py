"""KOWL's confusions."""

import polars as pl

from schemas.kowl import CONFUSION
from schemas.runs import RunFacts
from tasks.evaluation.runs import run_id, run_row
from tasks.kowl import results_report
from tests.report.reading import read_of


def run(feedback: float) -> RunFacts:
    return RunFacts(
        benchmark="kowl",
        protocol="kowl-test",
        model="ann",
        network="x3d",
        settings={"feedback": feedback},
        seed=0,
        fit_key="key",
    )


def test_kowl_confusions_are_first_guesses_after_feedback():
    base = {"run_id": run_id(run(1.0)), "step": 1, "view": "plain"}
    base |= {"phase": "after", "split": "test", "grouping": "all", "subset": "", "rank": 1}
    rows = [
        base | {"target": "a", "predicted": "a", "count": 3},
        base | {"target": "a", "predicted": "unknown_4", "count": 2},
        base | {"target": "a", "predicted": "unknown_7", "count": 1},
        base | {"target": "b", "predicted": "a", "count": 2},
    ]
    others = [
        base | {"rank": 2, "target": "a", "predicted": "z", "count": 99},
        base | {"phase": "before", "target": "a", "predicted": "z", "count": 99},
        base | {"run_id": run_id(run(0.0)), "target": "a", "predicted": "z", "count": 1},
        base | {"view": "rotation", "target": "a", "predicted": "z", "count": 99},
        base | {"split": "train", "target": "a", "predicted": "z", "count": 99},
    ]
    table = pl.DataFrame(rows + others, schema=CONFUSION.polars_schema)
    runs = pl.concat([run_row(run(1.0)), run_row(run(0.0))])
    (section,) = results_report.confusions(read_of({"confusion": table, "runs": runs}))
    shown = "".join(section.parts)
    assert "ann · x3d: 37.5% right" in shown and "with feedback 100 %" in shown
    assert '<td>a</td><td>unknown</td><td class="n">3</td><td class="n">0.500</td>' in shown
    assert "<td>z</td>" not in shown
    assert results_report.confusions(read_of({"confusion": table.clear(), "runs": runs})) == []
