"""One posted result file: CSV bytes in, what the protocol must remember of it out.

A result file has no header; the instance id comes first, then values (CONDDA rule 3). `parse`
reads any number of values on a line; `remember` reduces a file to whole numbers per row, so that a
session can be rebuilt without its files; `check_strict` refuses what the protocol forbids.
"""

import csv
import io
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import polars as pl

from tasks.condda.domains import Values
from tasks.condda.lookup import known_classes
from tasks.condda.rules import Limits, ProtocolRefusal
from tasks.condda.test_files import CELL_EDGES, TestFile

# A second value of detection above it calls the instance novel, as published.
_NOVEL = 0.5
# Names that end up as members of an archive: no separators, no leading dot.
_NAME = re.compile(r"[\w-][\w.\-]*")


@dataclass(frozen=True)
class ResultFile:
    """Lines of a posted file: ids, cells after the id as text, and as numbers (null: not one)."""

    ids: list[str]
    cells: pl.Series
    numbers: pl.Series

    @property
    def widths(self) -> pl.Series:
        """Values on each line."""
        return self.cells.list.len()


def parse(body: bytes, limits: Limits) -> ResultFile:
    """Read a result file; only its size and its encoding can be refused here."""
    if len(body) > limits.post_bytes:
        raise ProtocolRefusal(
            400,
            "TooLarge",
            f"a result file has {len(body)} bytes, at most {limits.post_bytes} are taken; "
            "post each round by itself",
        )
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProtocolRefusal(
            500, "UnicodeDecodeError", f"a result file is not UTF-8 text: {error.reason}"
        ) from error
    if '"' in text:
        cells = pl.Series(_quoted_rows(text), dtype=pl.List(pl.String))
    else:
        lines = pl.Series(text.split("\n"), dtype=pl.String).str.strip_chars_end("\r")
        cells = lines.filter(lines.str.strip_chars() != "").str.split(",")
    cells = cells.list.eval(pl.element().str.strip_chars(CELL_EDGES))
    ids = cells.list.first().to_list()
    cells = cells.list.slice(1)
    _check_size(ids, cells, limits)
    numbers = cells.list.eval(pl.element().cast(pl.Float64, strict=False))
    return ResultFile(ids, cells, numbers)


def _quoted_rows(text: str) -> list[list[str]]:
    try:
        return [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:
        raise ProtocolRefusal(400, "InvalidCsv", f"a result file is not CSV: {error}") from error


def _check_size(ids: list[str], cells: pl.Series, limits: Limits) -> None:
    width = int(cast(int, cells.list.len().max() or 0))
    longest = max(map(len, ids), default=0)
    for found, most, what in (
        (len(ids), limits.post_rows, "lines"),
        (width, limits.post_columns, "values on a line"),
        (longest, limits.id_length, "characters in an id"),
    ):
        if found > most:
            raise ProtocolRefusal(
                400, "TooLarge", f"a result file has {found} {what}, at most {most} are taken"
            )


def is_name(name: str, limits: Limits) -> bool:
    """Whether a name can safely be part of a file's name in an export."""
    return len(name) <= limits.id_length and _NAME.fullmatch(name) is not None


def check_name(name: str, what: str, limits: Limits) -> None:
    """Refuse a name that could not safely be part of a file's name in an export."""
    if not is_name(name, limits):
        raise ProtocolRefusal(
            400,
            "InvalidName",
            f"{what} {name[:80]!r} is not a name of letters, digits, '_', '-' and '.', "
            f"at most {limits.id_length} long",
        )


def remember(
    result: ResultFile, values: Values | None, test: TestFile | None, red_light: str | None
) -> dict[str, Any]:
    """What later decisions need of a file: rows, a mark per row, the highest detection value.

    `rows` are rows of the test, -1 for ids it does not have. A mark is 1 or 0 for a right or wrong
    class or second value of detection, the edit distance for a transcription; of labels it is 1 for
    a right writer and 2 more for a right flag. It is -1 where there is nothing to mark.
    """
    facts: dict[str, Any] = {
        "rows": [-1] * len(result.ids) if test is None else test.rows(result.ids),
        "columns": int(cast(int, result.widths.max() or 0)),
    }
    if values == "detection":
        facts["highest"] = _highest(result)
        facts["red_light"] = red_light is not None and red_light in result.ids
    if test is not None and values is not None and values != "characterization":
        facts["marks"] = _marks(result, values, test, np.array(facts["rows"], dtype=np.int64))
    return facts


def _highest(result: ResultFile) -> float | None:
    """Largest first value; lines without a number do not count (published agents post some)."""
    first = result.numbers.list.first().drop_nulls().drop_nans()
    if first.is_empty():
        return None
    # An infinite one is kept as a number that JSON can write.
    return float(cast(float, first.clip(-sys.float_info.max, sys.float_info.max).max()))


def choices(numbers: pl.Series) -> np.ndarray:
    """Place of the largest value of each line, the first of equals; -1 where there is none."""
    return numbers.list.eval(pl.element().fill_nan(None)).list.arg_max().fill_null(-1).to_numpy()


def _marks(result: ResultFile, values: Values, test: TestFile, rows: np.ndarray) -> list[int]:
    if values == "text":
        texts = result.cells.list.first().fill_null("").to_list()
        truth = test.truth["text"]
        return [
            -1 if row < 0 else edit_distance(plain(truth[row] or ""), plain(text))
            for row, text in zip(rows.tolist(), texts, strict=True)
        ]
    if values == "detection":
        second = result.numbers.list.get(1, null_on_oob=True).fill_null(math.nan).to_numpy()
        novel = np.append(test.truth[test.domain.novel].to_numpy(), -1)[rows]
        right = (second > _NOVEL) == (novel == 1)
        return np.where((rows < 0) | np.isnan(second), -1, right).astype(int).tolist()
    if values == "labels":
        chosen = result.numbers.list.get(1, null_on_oob=True).fill_null(math.nan).to_numpy()
    else:
        # A line without values chooses nothing, not the novel class -1.
        chosen = np.where((places := choices(result.numbers)) < 0, math.nan, places)
    truth_labels = np.append(test.labels, -1)[rows]
    marks = (chosen == truth_labels).astype(int)
    if values == "labels":
        # The flag says that the reported writer is the real one.
        flags = result.cells.list.first().fill_null("")
        reported = test.truth["reported_writer_id"].cast(pl.Float64, strict=False).to_numpy()
        honest = np.append(reported, math.nan)[rows] == truth_labels
        marks += 2 * ((flags == "1").to_numpy() == honest)
        rows = np.where(flags.is_in(("0", "1")).to_numpy(), rows, -1)
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


def check_strict(
    kind: str,
    values: Values,
    result: ResultFile,
    expected: Sequence[str],
    protocol: str,
    metadata: Mapping[str, Any],
    columns: int | None,
    unknown_counted: bool,
) -> None:
    """Refuse a file whose ids, columns or values the protocol forbids.

    `expected` are the names of the rows that the file must answer, in order; `columns` is the
    number of columns that earlier files of this type had; `unknown_counted` as the domain has it.
    """
    _check_ids(kind, result.ids, expected)
    width = _one_width(kind, result)
    least, most = _columns_allowed(values, protocol, metadata, columns, unknown_counted)
    if width < least or (most is not None and width > most):
        allowed = (
            f"{least} or more" if most is None else f"{least}" + f" to {most}" * (most > least)
        )
        _refuse("WrongColumns", f"{kind} has {width} values on a line, expected {allowed}")
    if values != "text":
        _check_numbers(kind, values, result)


def _refuse(reason: str, message: str) -> None:
    raise ProtocolRefusal(400, reason, message)


def _check_ids(kind: str, ids: list[str], expected: Sequence[str]) -> None:
    if ids == list(expected):
        return
    foreign = next((name for name in ids if name not in set(expected)), None)
    if foreign is not None:
        _refuse("ForeignIds", f"{kind} names {foreign!r}, which is not of this round")
    if len(set(ids)) != len(ids):
        _refuse("RepeatedIds", f"{kind} has an instance twice; post one line for each")
    if len(ids) != len(expected):
        _refuse("MissingIds", f"{kind} has {len(ids)} of the {len(expected)} instances served")
    _refuse("WrongOrder", f"{kind} is not in the order in which the instances were served")


def _one_width(kind: str, result: ResultFile) -> int:
    widths = result.widths.unique().sort().to_list()
    if len(widths) > 1:
        _refuse("WrongColumns", f"lines of {kind} have {widths[0]} to {widths[-1]} values")
    return int(widths[0]) if widths else 0


def _columns_allowed(
    values: Values,
    protocol: str,
    metadata: Mapping[str, Any],
    before: int | None,
    unknown_counted: bool,
) -> tuple[int, int | None]:
    """Least and greatest number of values on a line.

    known_classes is not to be trusted to one (CONDDA rule 3): a classification may have K or K+1
    columns, but always as many as in its first round.
    """
    if values in ("detection", "text", "labels"):
        return {"detection": (1, 2), "text": (1, 1), "labels": (2, 2)}[values]
    known = known_classes(metadata)
    if values == "classification":
        if before is not None:
            return before, before
        return (2, None) if known is None else (known, known + 1)
    if protocol != "CONDDA":
        return 1, None
    # No bound by the number of novel classes: being refused would tell it.
    return max(2 if known is None else known + 1 - unknown_counted, before or 0), None


def _check_numbers(kind: str, values: Values, result: ResultFile) -> None:
    flat = result.numbers.explode()
    if flat.null_count():
        _refuse("NotANumber", f"{kind} holds a value that is no number")
    if not bool(flat.is_finite().all()):
        _refuse("NotFinite", f"{kind} holds a value that is not finite")
    if values == "labels":
        flags = result.numbers.list.first()
        if not bool(flags.is_in([0.0, 1.0]).all()):
            _refuse("OutOfRange", f"a flag of {kind} is neither 0 nor 1")
    elif len(flat) and not bool(flat.is_between(0.0, 1.0).all()):
        _refuse("OutOfRange", f"{kind} holds a probability outside 0 to 1")
