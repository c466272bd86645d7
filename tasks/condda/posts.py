"""Posted result files (docs/condda.md, rules 3 and 10): CSV bytes in, events with their facts out.

`take_results` takes all files of a post or none; the same file again, for the same round and type,
is a repeated request and makes no event. A result file has no header; the instance id comes first,
then values. `parse` reduces it to a few numbers a line, `remember` to what later decisions need, so
that a session can be rebuilt without its files; `_Posted` refuses what the protocol forbids.

Small files of plain numbers, which is what agents post, are read by hand; `read_cells` reads all.
"""

import csv
import hashlib
import io
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from tasks.condda.commands import Decision, Post
from tasks.condda.domains import DOMAINS, Values
from tasks.condda.lookup import (
    Rules,
    find_test,
    known_classes,
    lenient_metadata,
    load_test,
    open_test,
    round_count,
    round_rows,
    round_size,
)
from tasks.condda.rules import Limits, ProtocolRefusal, refused
from tasks.condda.session import Event, SessionState, TestState
from tasks.condda.test_files import CELL_EDGES, TestFile

# A second value of detection above it calls the instance novel, as published.
_NOVEL = 0.5
# Names that end up as members of an archive: no separators, no leading dot.
_NAME = re.compile(r"[\w-][\w.\-]*")
# Files of up to so many bytes are read by hand if their values have only these characters.
_SMALL_BYTES = 256 * 1024
_NUMERALS = b"0123456789.,+-eE"


def take_results(state: SessionState, command: Post, rules: Rules) -> Decision:
    progress = open_test(state, command.test)
    if not command.results:
        raise refused("MissingParamsError", "no result file was given")
    post = _Posted(command, state, progress, *_posted_test(state, command.test, rules))
    before = progress.posted.get(command.round, {})
    events = []
    for kind, body in command.results.items():
        check_name(kind, "result type", rules.limits)
        sha256 = hashlib.sha256(body).hexdigest()
        if sha256 in before.get(kind, ()):
            continue
        if kind in before and (rules.strict or kind == "detection"):
            raise refused(
                "DetectionRepost" if kind == "detection" else "ResultRepost",
                f"{kind} of round {command.round} was posted before with other content",
            )
        result = parse(body, rules.limits)
        if rules.strict:
            post.check(kind, result)
        facts = remember(result, DOMAINS[state.domain].results.get(kind), post.test)
        facts["round_size"] = post.metadata.get("round_size", 0)
        place = (command.test, progress.attempt, command.round, kind)
        events.append(Event("posted", rules.now, *place, sha256, facts, body))
    return Decision(tuple(events))


def _posted_test(
    state: SessionState, name: str, rules: Rules
) -> tuple[TestFile | None, Mapping[str, Any]]:
    """The test of a post; none is known, and nothing of it, where anything may be posted."""
    if rules.strict:
        test, metadata = load_test(state, name, rules)
        return test, {**metadata, "round_size": round_size(metadata, name)}
    try:
        file = find_test(state, name, rules.library)
    except ProtocolRefusal as refusal:
        if refusal.reason == "SourceError":
            raise
        return None, {}
    return file, lenient_metadata(state, file)


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
        None if table.min() >= 0 and table.max() <= 1 else _OUTSIDE,
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


_OUTSIDE = ("OutOfRange", "a probability outside 0 to 1")


def _fault(flat: pl.Series) -> tuple[str, str] | None:
    if flat.null_count():
        return "NotANumber", "a value that is no number"
    if not flat.is_finite().all():
        return "NotFinite", "a value that is not finite"
    return None if flat.is_between(0.0, 1.0).all() else _OUTSIDE


def is_name(name: str, limits: Limits) -> bool:
    """Whether a name can safely be part of a file's name in an export."""
    return len(name) <= limits.id_length and _NAME.fullmatch(name) is not None


def check_name(name: str, what: str, limits: Limits) -> None:
    """Refuse a name that could not safely be part of a file's name in an export."""
    if not is_name(name, limits):
        raise refused(
            "InvalidName",
            f"{what} {name[:80]!r} is not a name of letters, digits, '_', '-' and '.', "
            f"at most {limits.id_length} long",
        )


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


@dataclass(frozen=True)
class _Posted:
    """A post, and what it is checked against where the policy is strict."""

    command: Post
    session: SessionState
    progress: TestState
    test: TestFile | None
    metadata: Mapping[str, Any]

    def check(self, kind: str, result: ResultFile) -> None:
        """Refuse a file whose type, ids, columns or values the protocol forbids."""
        values = DOMAINS[self.session.domain].results.get(kind)
        if values is None:
            raise refused("UnknownResultType", f"{kind} is no result type of {self.session.domain}")
        _check_ids(kind, result.ids, self._expected_names(kind))
        width = int(result.widths.max(initial=0))
        narrowest = int(result.widths.min(initial=width))
        if narrowest < width:
            raise refused("WrongColumns", f"lines of {kind} have {narrowest} to {width} values")
        least, most = self._columns_allowed(values, self.progress.columns.get(kind))
        if width < least or (most is not None and width > most):
            allowed = (
                f"{least} or more" if most is None else f"{least}" + f" to {most}" * (most > least)
            )
            raise refused(
                "WrongColumns", f"{kind} has {width} values on a line, expected {allowed}"
            )
        if values == "text":
            return
        if values == "labels" and result.fault in (None, _OUTSIDE):
            if not np.isin(result.first, (0.0, 1.0)).all():
                raise refused("OutOfRange", f"a flag of {kind} is neither 0 nor 1")
        elif result.fault is not None:
            raise refused(result.fault[0], f"{kind} holds {result.fault[1]}")

    def _expected_names(self, kind: str) -> Sequence[str]:
        """Names of the rows that a file must answer, in order: those of the round just served.

        OND characterization is posted once, after the last round, as round 0 for the whole test.
        """
        assert self.test is not None
        number, size, served = self.command.round, self.metadata["round_size"], self.progress.served
        if self.session.protocol == "OND" and kind == "characterization":
            if number != 0 or len(served) < round_count(self.test, size):
                raise refused(
                    "RoundOrder",
                    "OND characterization is posted as round 0 when all rounds have been served",
                )
            return self.test.names
        if number not in served:
            raise refused("RoundNotServed", f"ask for the data of round {number} before posting")
        if number != len(served) - 1:
            raise refused("RoundOrder", f"round {number} is over, {len(served) - 1} is open")
        return self.test.names[round_rows(self.test, number, size)]

    def _columns_allowed(self, values: Values, before: int | None) -> tuple[int, int | None]:
        """Least and greatest number of values on a line; `before` is what earlier files had.

        known_classes is not to be trusted to one (CONDDA rule 3): a classification may have K or
        K+1 columns, but always as many as in its first round.
        """
        if values in ("detection", "text", "labels"):
            return {"detection": (1, 2), "text": (1, 1), "labels": (2, 2)}[values]
        known = known_classes(self.metadata)
        if values == "classification":
            if before is not None:
                return before, before
            return (2, None) if known is None else (known, known + 1)
        if self.session.protocol != "CONDDA":
            return 1, None
        counted = DOMAINS[self.session.domain].unknown_counted
        # No bound by the number of novel classes: being refused would tell it.
        return max(2 if known is None else known + 1 - counted, before or 0), None


def _check_ids(kind: str, ids: list[str], expected: Sequence[str]) -> None:
    if ids == list(expected):
        return
    foreign = next((name for name in ids if name not in set(expected)), None)
    if foreign is not None:
        raise refused("ForeignIds", f"{kind} names {foreign!r}, which is not of this round")
    if len(set(ids)) != len(ids):
        raise refused("RepeatedIds", f"{kind} has an instance twice; post one line for each")
    if len(ids) != len(expected):
        raise refused(
            "MissingIds", f"{kind} has {len(ids)} of the {len(expected)} instances served"
        )
    raise refused("WrongOrder", f"{kind} is not in the order in which the instances were served")
