"""Declarations: what a rule refuses, and that the data dictionary says what is declared."""

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.table import Column, Reference, Rule, Table
from schemas.tables import SHARED, benchmark_names, tables_of
from tasks.operations.dictionary import data_dictionary

THINGS = Table(
    name="things",
    description="Things.",
    columns=(
        Column("id", pa.string(), "Id", pattern=r"^[a-z]\d+$"),
        Column("size", pa.float64(), "Size", minimum=0, maximum=10, nullable=True),
        Column("colour", pa.string(), "Colour", allowed=("red", "blue")),
        Column("owner", pa.string(), "Owner", nullable=True),
    ),
    key=("id",),
    rules=(
        Rule(
            "red_is_small", (pl.col("colour") != "red") | (pl.col("size") < 5), "too large for red"
        ),
    ),
    references=(Reference(("owner",), "people", ("name",)),),
)
PEOPLE = pl.DataFrame({"name": ["ann", "bob"]})


def check(**row):
    row = {"id": "a1", "size": 1.0, "colour": "blue", "owner": "ann"} | row
    frame = pl.DataFrame([row], schema=THINGS.polars_schema)
    good, bad = THINGS.check(frame, {"people": PEOPLE})
    assert good.height + bad.height == 1
    return bad.row(0, named=True) if bad.height else None


def test_good_row_passes():
    assert check() is None
    assert check(size=None) is None


@pytest.mark.parametrize(
    ("change", "rule", "said"),
    [
        ({"id": None}, "id_present", "id is missing"),
        ({"id": "A1"}, "id_form", "id is A1, expected the form"),
        ({"size": 11.0}, "size_range", "size is 11.0, expected 0 to 10"),
        ({"size": float("nan")}, "size_finite", "size is NaN, expected a finite number"),
        ({"size": float("inf")}, "size_finite", "expected a finite number; size is inf"),
        ({"colour": "green"}, "colour_allowed", "expected one of red, blue"),
        ({"colour": "red", "size": 6.0}, "red_is_small", "too large for red"),
        ({"owner": "eve"}, "owner_in_people", "no such row in people"),
    ],
)
def test_bad_row_is_named(change, rule, said):
    bad = check(**change)
    assert bad is not None and bad["rule"] == rule
    assert said in bad["message"]


def test_second_row_of_a_key_is_refused():
    frame = pl.DataFrame(
        [("a1", 1.0, "blue", None), ("a1", 2.0, "blue", None)],
        schema=THINGS.polars_schema,
        orient="row",
    )
    good, bad = THINGS.check(frame)
    assert good["size"].to_list() == [1.0]
    assert bad["rule"].to_list() == ["unique_key"]


def test_undeclared_columns_are_our_defect():
    with pytest.raises(ConfigError, match="extra"):
        THINGS.check(THINGS.empty().with_columns(pl.lit(1).alias("extra")))
    with pytest.raises(ConfigError, match="named twice"):
        Table("t", "T.", (Column("a", pa.int32(), "A"), Column("a", pa.int32(), "A")), ("a",))


values = st.one_of(st.none(), st.floats(), st.floats(0, 10))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a1", "a2", "b3", "??"]), values, st.sampled_from(["red", "blue", "x"])
        )
    )
)
def test_nothing_vanishes_and_good_rows_are_sorted(rows):
    frame = pl.DataFrame([(*row, None) for row in rows], schema=THINGS.polars_schema, orient="row")
    good, bad = THINGS.check(frame)
    assert good.height + bad.height == len(rows)
    assert good["id"].is_sorted() and good["id"].is_unique().all()
    assert not bad["rule"].is_null().any() and not bad["message"].is_null().any()


def test_data_dictionary_is_up_to_date():
    path = Path(__file__).parents[1] / "docs" / "tables.md"
    assert path.read_text() == data_dictionary(), "run `make docs`"


def test_every_column_is_described():
    for benchmark in ["", *benchmark_names()]:
        for table in (tables_of(benchmark) if benchmark else SHARED).values():
            assert table.description.endswith("."), table.name
            for column in table.columns:
                assert column.description, f"{table.name}.{column.name}"
