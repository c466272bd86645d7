"""Result files (docs/condda.md, rule 3): CSV bytes in, a few numbers a line out.

A result file has no header; the instance id comes first, then values. `parse` reduces it to what is
asked of its lines, `remember` to what later decisions need, so that a session can be rebuilt
without its files; `read_lines` gives all of it as a frame.

Small files of plain numbers, which is what agents post, are read by hand; `read_cells` reads all.
"""

import csv
import io
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from tasks.condda.commands import Event, Limits, ProtocolRefusal, refused
from tasks.condda.domains import Values
from tasks.condda.test_files import CELL_EDGES, TestFile

# A second value of detection above it calls the instance novel, as published.
_NOVEL = 0.5
# Files of up to so many bytes are read by hand if their values have only these characters.
_SMALL_BYTES = 256 * 1024
_NUMERALS = b"0123456789.,+-eE"


@dataclass(frozen=True)
class ResultFile:
    """What is asked of the lines of a posted file; NaN where there is no such number."""

    ids: list[str]
    widths: np.ndarray
    """Values on each line."""
    texts: Callable[[], list[str]]
    """First value of each line as it was posted."""
    first: np.ndarray
    second: np.ndarray
    choices: np.ndarray
    """Place of the largest value of each line, the first of equals; -1 where there is none."""
    fault: tuple[str, str] | None
    """Why the values are no probabilities."""


def parse(body: bytes, limits: Limits) -> ResultFile:
    """Read a result file; only its size and its encoding can be refused here."""
    small = len(body) <= min(_SMALL_BYTES, limits.post_bytes)
    result = _parse_plain(body) if small else None
    if result is None:
        ids, cells, numbers = read_cells(body, limits)
        result = ResultFile(
            ids,
            cells.list.len().to_numpy(),
            lambda: cells.list.first().fill_null("").to_list(),
            numbers.list.first().fill_null(math.nan).to_numpy(),
            numbers.list.get(1, null_on_oob=True).fill_null(math.nan).to_numpy(),
            _choices(numbers),
            _fault(numbers.explode()),
        )
    _check_size(len(result.ids), result.widths.max(initial=0), limits)
    if (longest := max(map(len, result.ids), default=0)) > limits.id_length:
        raise _too_large(longest, "characters in an id", limits.id_length)
    return result


def _parse_plain(body: bytes) -> ResultFile | None:
    """A file of ids and finite numbers, as many on each line; None for any other."""
    if body.translate(None, b" \"'\r\t\xef") != body:
        return None
    try:
        lines = [line.partition(",") for line in body.decode().split("\n") if line]
        rests = [rest for _, _, rest in lines]
        values = ",".join(rests)
        widths = {rest.count(",") for rest in rests}
        if values.encode().translate(None, _NUMERALS) or len(widths) != 1:
            return None
        table = np.array(list(map(float, values.split(",")))).reshape(len(lines), -1)
    except ValueError:
        return None
    if not np.isfinite(table).all():
        return None
    return ResultFile(
        [name for name, _, _ in lines],
        np.full(len(lines), table.shape[1]),
        lambda: [rest.partition(",")[0] for rest in rests],
        table[:, 0],
        table[:, 1] if table.shape[1] > 1 else np.full(len(lines), math.nan),
        table.argmax(axis=1),
        None if table.min() >= 0 and table.max() <= 1 else OUTSIDE,
    )


def read_cells(body: bytes, limits: Limits) -> tuple[list[str], pl.Series, pl.Series]:
    """Ids of a file, its other cells as lists of text, and as lists of numbers (null: not one)."""
    if len(body) > limits.post_bytes:
        raise refused(
            "TooLarge",
            f"a result file has {len(body)} bytes, at most {limits.post_bytes} are taken; "
            "post each round by itself",
        )
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(
            "UnicodeDecodeError", f"a result file is not UTF-8 text: {error.reason}"
        ) from error
    if '"' in text:
        cells = pl.Series(_quoted_rows(text), dtype=pl.List(pl.String))
    else:
        lines = pl.Series(text.split("\n"), dtype=pl.String).str.strip_chars_end("\r")
        lines = lines.filter(lines.str.strip_chars() != "")
        _check_size(len(lines), lines.str.count_matches(",", literal=True).max(), limits)
        cells = lines.str.split(",")
    cells = cells.list.eval(pl.element().str.strip_chars(CELL_EDGES))
    ids = cells.list.first().to_list()
    cells = cells.list.slice(1)
    return ids, cells, cells.list.eval(pl.element().cast(pl.Float64, strict=False))


def _quoted_rows(text: str) -> list[list[str]]:
    try:
        return [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:
        raise refused("InvalidCsv", f"a result file is not CSV: {error}") from error


def _check_size(lines: int, width: Any, limits: Limits) -> None:
    if lines > limits.post_rows:
        raise _too_large(lines, "lines", limits.post_rows)
    if (width or 0) > limits.post_columns:
        raise _too_large(width, "values on a line", limits.post_columns)


def _too_large(size: int, what: str, most: int) -> ProtocolRefusal:
    message = f"a result file has {size} {what}, at most {most} are taken"
    return refused("TooLarge", message)


def _choices(numbers: pl.Series) -> np.ndarray:
    return numbers.list.eval(pl.element().fill_nan(None)).list.arg_max().fill_null(-1).to_numpy()


OUTSIDE = ("OutOfRange", "a probability outside 0 to 1")


def _fault(flat: pl.Series) -> tuple[str, str] | None:
    if flat.null_count():
        return "NotANumber", "a value that is no number"
    if not flat.is_finite().all():
        return "NotFinite", "a value that is not finite"
    return None if flat.is_between(0.0, 1.0).all() else OUTSIDE


def remember(result: ResultFile, values: Values | None, test: TestFile | None) -> dict[str, Any]:
    """What later decisions need of a file: rows, a mark per row, the highest detection value.

    `rows` are rows of the test, -1 for ids it does not have. A mark is 1 or 0 for a right or wrong
    class or second value of detection, the edit distance for a transcription; of labels it is 1 for
    a right writer and 2 more for a right flag. It is -1 where there is nothing to mark.
    """
    facts: dict[str, Any] = {
        "rows": [-1] * len(result.ids) if test is None else test.rows(result.ids),
        "columns": int(result.widths.max(initial=0)),
    }
    if values == "detection":
        # Lines without a number do not count (published agents post some); JSON has no infinity.
        numbers = result.first[~np.isnan(result.first)]
        most = sys.float_info.max
        facts["highest"] = float(numbers.clip(-most, most).max()) if len(numbers) else None
        red_light = None if test is None else test.red_light
        facts["red_light"] = red_light is not None and red_light in result.ids
    if test is not None and values is not None and values != "characterization":
        facts["marks"] = _marks(result, values, test, np.array(facts["rows"], dtype=np.int64))
    return facts


def _marks(result: ResultFile, values: Values, test: TestFile, rows: np.ndarray) -> list[int]:
    if values == "text":
        truth = test.truth["text"]
        return [
            -1 if row < 0 else edit_distance(plain(truth[row] or ""), plain(text))
            for row, text in zip(rows.tolist(), result.texts(), strict=True)
        ]
    if values == "detection":
        novel = np.append(test.truth[test.domain.novel].to_numpy(), -1)[rows]
        right = (result.second > _NOVEL) == (novel == 1)
        return np.where((rows < 0) | np.isnan(result.second), -1, right).astype(int).tolist()
    if values == "labels":
        chosen = result.second
    else:
        # A line without values chooses nothing, not the novel class -1.
        chosen = np.where(result.choices < 0, math.nan, result.choices)
    truth_labels = np.append(test.labels, -1)[rows]
    marks = (chosen == truth_labels).astype(int)
    if values == "labels":
        # The flag says that the reported writer is the real one.
        flags = np.array(result.texts(), dtype=object)
        reported = test.truth["reported_writer_id"].cast(pl.Float64, strict=False).to_numpy()
        honest = np.append(reported, math.nan)[rows] == truth_labels
        marks += 2 * ((flags == "1") == honest)
        rows = np.where((flags == "0") | (flags == "1"), rows, -1)
    return np.where(rows < 0, -1, marks).tolist()


def plain(text: str) -> str:
    """Text as the public server compares it: no quotes, a space between words and what is between.

    So a missing comma costs more than itself: "one, two" is "one , two", "one two" "one  two".
    """
    runs = re.split(r"(\W+)", re.sub(r'[;"|]', "", text).replace("  ", " "))
    return " ".join(run.strip() for run in runs)


def edit_distance(left: str, right: str) -> int:
    """Levenshtein distance, one numpy row at a time."""
    if not left or not right:
        return max(len(left), len(right))
    target = np.frombuffer(right.encode("utf-32-le"), np.uint32)
    place = np.arange(len(target) + 1)
    row = place
    for number, letter in enumerate(left, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (target != ord(letter)))
        row = np.concatenate(([number], best))
        # An insertion costs one for each step to the right.
        row = np.minimum.accumulate(row - place) + place
    return int(row[-1])


RESULTS: dict[str, pl.DataType | type[pl.DataType]] = {
    "round": pl.Int64,
    "instance_id": pl.String,
    # Numbers on the line; null if one of its cells is none, and then `cells` is what was posted.
    "values": pl.List(pl.Float64),
    "cells": pl.List(pl.String),
}


def read_lines(event: Event, limits: Limits) -> pl.DataFrame:
    """All lines of a posted file, as `RESULTS`."""
    assert event.body is not None
    ids, cells, numbers = read_cells(event.body, limits)
    numeric = numbers.list.eval(pl.element().is_not_null()).list.all()
    return pl.DataFrame(
        {
            "round": pl.Series([event.round] * len(ids), dtype=pl.Int64),
            "instance_id": pl.Series(ids, dtype=pl.String),
            "values": numbers,
            "cells": cells,
        },
        schema=RESULTS,
    ).with_columns(
        values=pl.when(numeric).then(pl.col("values")),
        cells=pl.when(~numeric).then(pl.col("cells")),
    )
