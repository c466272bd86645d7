"""The declarations agree with themselves, and posted files are read as they say."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.condda import posts
from tasks.condda.commands import Limits, ProtocolRefusal
from tasks.condda.domains import DOMAINS, SHOWN_METADATA, domain_named
from tasks.condda.posts import _choices, _parse_plain, edit_distance, parse, read_cells
from tests.shared import shared_path


@pytest.mark.parametrize("name", sorted(DOMAINS))
def test_a_domain_names_columns_it_has(name: str) -> None:
    domain = domain_named(name)
    columns = set(domain.columns)
    assert domain.columns[0] == "instance_id" and len(columns) == len(domain.columns)
    assert {domain.changed, domain.novel, domain.label} <= set(domain.integers) <= columns
    assert set(domain.served_quoted) <= set(domain.served) <= columns
    # What the metrics need is in every file.
    needed = {domain.changed, domain.novel, domain.label, *domain.served}
    assert needed <= set(domain.columns[: domain.required])
    for kind in domain.feedback.values():
        assert set(kind.columns) <= columns and kind.result in domain.results
        assert set(kind.budget) <= set(SHOWN_METADATA)


def test_places_of_the_unknown_class() -> None:
    places = {name: domain.unknown for name, domain in DOMAINS.items()}
    assert places["image_classification"] == "first"
    assert places["activity_recognition"] == places["transcripts"] == "last"


def test_columns_of_the_published_description() -> None:
    at = {name: domain.columns.index for name, domain in DOMAINS.items()}
    assert at["activity_recognition"]("kinetics_id_0") == 6
    assert at["activity_recognition"]("annotation_value_4") == 18
    assert at["transcripts"]("writer_id") == 5 and at["transcripts"]("attribute") == 10
    assert at["nlt"]("novel_instance") == 7


def test_an_unknown_domain_is_said() -> None:
    with pytest.raises(ConfigError, match="there are image_classification"):
        domain_named("svo")


def test_reads_the_published_result_files() -> None:
    folder = shared_path("sailon/sail-on-client")
    ragged = (folder / "test_results_CONDDA.1.1.1234.csv").read_bytes()
    assert parse(ragged, Limits()).widths.tolist() == [6] * 4
    assert read_cells(ragged, Limits())[2][0].to_list()[0] == 0.1
    name = "OND.10.90001.2100554_PreComputedONDAgent_classification.csv"
    body = (folder / "mock_results" / "activity_recognition" / name).read_bytes()
    whole = parse(body, Limits())
    assert len(whole.ids) == 332 and set(whole.widths.tolist()) == {89}
    assert read_cells(body, Limits())[2].explode().null_count() == 0


@pytest.mark.parametrize(
    ("body", "ids", "cells"),
    [
        (b"", [], []),
        (b"\n \n", [], []),
        (b"a,1", ["a"], [["1"]]),
        (b"a,1\r\nb,2\r\n", ["a", "b"], [["1"], ["2"]]),
        (b"\xef\xbb\xbfa, .5 ,'x'\n", ["a"], [[".5", "x"]]),
        (b'a,"x, y"\n"b",2\n', ["a", "b"], [["x, y"], ["2"]]),
        (b"a\nb,1,2\n", ["a", "b"], [[], ["1", "2"]]),
    ],
    ids=["empty", "blank", "no end", "crlf", "bom and quotes", "quoted", "ragged"],
)
def test_parse(body: bytes, ids: list[str], cells: list[list[str]]) -> None:
    assert parse(body, Limits()).ids == ids
    names, read, _ = read_cells(body, Limits())
    assert names == ids and read.to_list() == cells


def test_ties_go_to_the_first_column() -> None:
    numbers = pl.Series([[0.4, 0.4, 0.2], [0.0, 1.0, 1.0], [], [float("nan"), 0.1]])
    assert _choices(numbers).tolist() == [0, 1, -1, 1]


WORDS = st.sampled_from(
    [
        *("0.25", "1", "-0.0", "+.5", "5.", "1e-3", "1E+2", "1e400", "-1e-400", "0.1e", "", "1_0"),
        *(
            "nan",
            "inf",
            "x",
            "1 ",
            "'1'",
            '"1"',
            "\u0661",
            "0x1",
            "1.5.2",
            "e5",
            "00012",
            "-",
            "\r",
        ),
    ]
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(repr) | st.sampled_from(["0.5", "1"])
NAMES = st.sampled_from(["a", "b c", "\u00e9.png", "", "'q'", "\ufeffz", "\t"])
LINES = st.tuples(st.lists(NUMBERS | WORDS, max_size=4), NAMES)


@settings(max_examples=400, deadline=None)
@given(st.lists(LINES, max_size=5), st.sampled_from(["\n", "\r\n", "\n\n"]), st.booleans())
def test_small_files_are_read_as_large_ones(lines: list, end: str, ended: bool) -> None:
    body = (end.join(",".join([name, *row]) for row, name in lines) + end * ended).encode()
    assert_read_alike(body)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.data())
def test_plain_files_are_read_by_hand_to_the_bit(width: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(NUMBERS, min_size=width, max_size=width), min_size=1))
    body = "".join(f"i{place},{','.join(row)}\n" for place, row in enumerate(rows)).encode()
    assert _parse_plain(body) is not None
    assert_read_alike(body)


def assert_read_alike(body: bytes) -> None:
    """By hand or by the reader of large files: the same bits, the same refusal."""
    answers = []
    for small in (posts._SMALL_BYTES, -1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(posts, "_SMALL_BYTES", small)
            try:
                result = parse(body, Limits())
            except ProtocolRefusal as refusal:
                answers.append((refusal.reason, refusal.message))
                continue
        lists = (result.ids, result.widths.tolist(), result.texts(), result.choices.tolist())
        bits = [column.astype(float).tobytes() for column in (result.first, result.second)]
        answers.append((*lists, bits, result.fault))
    assert answers[0] == answers[1]


def plain_distance(left: str, right: str) -> int:
    table = np.zeros((len(left) + 1, len(right) + 1), int)
    table[:, 0], table[0] = range(len(left) + 1), range(len(right) + 1)
    for i, a in enumerate(left, 1):
        for j, b in enumerate(right, 1):
            table[i, j] = min(
                table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a != b)
            )
    return int(table[-1, -1])


@settings(max_examples=200, deadline=None)
@given(st.text("abé😀 ", max_size=12), st.text("abé😀 ", max_size=12))
def test_edit_distance_is_that_of_the_plain_loop(left: str, right: str) -> None:
    assert edit_distance(left, right) == plain_distance(left, right)
