"""KOWL's confusions."""

import polars as pl

from schemas.kowl import CONFUSION
from tasks.kowl import results_report
from tests.report.reading import read_of


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
