"""The paper's Tables 1 and 2 are what was printed, and every difference has its reason."""

import polars as pl
import pytest

from tasks.kowl.paper_tables import (
    INCREMENTS,
    KNOWN_CLASSES,
    LISTED,
    NOVEL_CLASSES,
    TABLE_2,
    beside_paper,
)
from tests.shared import shared_path

NAMES = ("known_classes", "novel_classes", "known_samples", "novel_samples")


def counts(novel=NOVEL_CLASSES, samples=TABLE_2) -> pl.DataFrame:
    rows = [
        (n, split, sum(novel[:n]) + 409, novel[n], *found)
        for split, increments in samples.items()
        for n, found in enumerate(increments)
        if any(found)
    ]
    return pl.DataFrame(rows, schema=["increment", "split", *NAMES], orient="row")


def classes(first: int = 10, last: int = 900) -> pl.DataFrame:
    return pl.DataFrame(
        {"label": ["a", "b"], "increment_introduced": [1, 5], "train_samples": [first, last]}
    )


@pytest.mark.parametrize("number", [1, 2])
def test_the_paper_s_side_is_what_it_printed(number: int) -> None:
    printed = pl.read_csv(shared_path(f"kinetics/expected/paper_table{number}.csv"))
    found = beside_paper(counts(), classes(), LISTED)[f"Table {number}"]
    ours = found.select("split", "increment", *(f"paper_{name}" for name in NAMES))
    assert sorted(ours.rows()) == sorted(printed.select("split", "increment", *NAMES).rows())


def test_equal_samples_need_no_reason() -> None:
    table = beside_paper(counts(), classes(), LISTED)["Table 2"]
    assert KNOWN_CLASSES[-1] + NOVEL_CLASSES[-1] == 718
    said = set(table.filter(pl.col("increment") > 0)["reason"])
    assert said == {"equal"} and table["ours_more_percent"].drop_nulls().abs().max() == 0


def test_every_difference_has_its_reason() -> None:
    samples = {
        split: [(known + 7, novel + 1) for known, novel in rows] for split, rows in TABLE_2.items()
    }
    shorter = LISTED | {("kinetics400", "train"): 213_755}
    for rows in beside_paper(counts(samples=samples), classes(), shorter).values():
        assert not rows.filter(pl.col("reason").is_in(["", "equal"])).height
        train = rows.filter(pl.col("split") == "train")["reason"].to_list()
        assert "list of 213,755 clips, theirs 219,782" in train[0]
        assert all("our K400 list lacks" in reason for reason in train[1:])


def test_options_that_are_not_those_of_table_1_are_said() -> None:
    backwards = beside_paper(counts(), classes(900, 10), LISTED)["Table 1"]
    assert backwards["reason"].str.contains("most frequent first").sum() == 2 * (INCREMENTS - 1)
    floor = (0, 45, 45, 45, 45, 47, 16, 16, 16, 16, 18)
    cut = beside_paper(counts(novel=floor), classes(), LISTED)["Table 1"]
    assert cut["reason"].str.contains("other classes per increment").any()


def test_other_releases_are_not_compared() -> None:
    assert beside_paper(counts(), classes(), {("mine", "train"): 5}) is None
    assert beside_paper(counts().head(5), classes(), LISTED) is None
    few = counts().with_columns(known_classes=pl.col("known_classes") - 400)
    assert beside_paper(few, classes(), LISTED) is None
