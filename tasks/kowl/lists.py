"""Kinetics annotation lists: the bytes of a CSV, plain or gzip, become rows and rejects.

In: any public form that has a header with youtube_id, time_start and time_end; `label` and `split`
may be absent (K700-2020 test has no label), other columns (`is_cc`, `source`) are ignored, fields
may be quoted, `val` means `validate`. Out: `ROWS`, and a reject for every line that is not a clip.
Only a file that is no list at all (damaged gzip, no such header) is a `SourceError`.
KOWL-718 section 3 and the repository's nine lists set the columns and the three splits.
"""

import gzip
import hashlib
import zlib
from collections.abc import Callable
from datetime import date
from io import BytesIO
from typing import NamedTuple

import polars as pl

from schemas.errors import SourceError
from schemas.kowl import LIST_SPLITS, Release, Split
from schemas.table import REJECTED

SPLIT_SPELLINGS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "validate",
    "validate": "validate",
    "validation": "validate",
    "test": "test",
    "testing": "test",
}
KEY = ("youtube_id", "time_start", "time_end")
COLUMNS = ("label", *KEY, "split")
ROWS = pl.Schema(
    {
        "release": pl.String,
        "split": pl.String,
        "label": pl.String,
        "youtube_id": pl.String,
        "time_start": pl.Int32,
        "time_end": pl.Int32,
        "snapshot": pl.String,
        "snapshot_date": pl.Date,
    }
)
MAX_TEXT_BYTES = 1 << 29
MAX_COLUMNS = 50
MAX_LINE_CHARACTERS = 1000
MAX_LABEL_CHARACTERS = 200


class ListRead(NamedTuple):
    rows: pl.DataFrame
    rejects: pl.DataFrame


def read_list(
    data: bytes,
    *,
    name: str,
    release: str,
    split: Split | None = None,
    snapshot_date: date | None = None,
) -> ListRead:
    """Rows (schema `ROWS`) and rejects of one list; `name` is how messages call the file.

    `split` is what the declaration says the file holds: it fills an absent column and must agree
    with a present one. `snapshot` is the SHA-256 of the bytes as given. Rows keep the file's order.
    """
    columns, lines = _lines(data, name)
    if split is None and "split" not in columns:
        raise SourceError(
            f"list {name}: no split column and none declared; found columns "
            f"{', '.join(columns)}; declare the split of the file"
        )
    fields = _fields(lines, columns)
    listed = pl.col("split").str.strip_chars().str.to_lowercase()
    parsed = fields.select(
        "number",
        "line",
        "count",
        pl.col("label").str.strip_chars().replace("", None)
        if "label" in columns
        else pl.lit(None, pl.String).alias("label"),
        pl.col("youtube_id").str.strip_chars(),
        *(
            pl.col(column).str.strip_chars().str.extract(r"^(\d{1,6})(?:\.0+)?$").cast(ROWS[column])
            for column in ("time_start", "time_end")
        ),
        listed.replace_strict(SPLIT_SPELLINGS, default=None, return_dtype=pl.String)
        if "split" in columns
        else pl.lit(split, pl.String).alias("split"),
    )
    rules = _rules(columns, split)
    broken = parsed.with_columns(
        pl.coalesce(
            pl.when(bad.fill_null(False)).then(pl.lit(rule)) for rule, bad, _ in rules
        ).alias("rule")
    )
    # Only a clean row can make a later one a duplicate.
    broken = broken.with_columns(
        pl.when(pl.col("rule").is_null() & ~pl.struct("rule", *KEY).is_first_distinct())
        .then(pl.lit("unique_key"))
        .otherwise("rule")
        .alias("rule")
    )
    messages = {rule: message for rule, _, message in rules}
    messages["unique_key"] = "an earlier line has the same youtube_id, time_start and time_end"
    shown = pl.col("line").str.replace_all(r"\p{Cc}", " ").str.slice(0, 120)
    rejects = broken.filter(pl.col("rule").is_not_null()).select(
        pl.concat_str(pl.lit(name), "number", separator=":").alias("record"),
        "rule",
        pl.concat_str(
            pl.col("rule").replace_strict(messages, return_dtype=pl.String),
            shown,
            separator="; found ",
        ).alias("message"),
    )
    rows = broken.filter(pl.col("rule").is_null()).select(
        pl.lit(release).alias("release"),
        "split",
        "label",
        *KEY,
        pl.lit(hashlib.sha256(data).hexdigest()).alias("snapshot"),
        pl.lit(snapshot_date, pl.Date).alias("snapshot_date"),
    )
    return ListRead(rows.cast(ROWS), rejects.cast(REJECTED))


def read_release(release: Release, read: Callable[[str], bytes]) -> ListRead:
    """All lists of a release, train first; a clip listed again in a later file is a reject."""
    parts = [
        read_list(
            read(file),
            name=file,
            release=release.name,
            split=split,
            snapshot_date=release.snapshot_date,
        )
        for split in LIST_SPLITS
        for file in release.files.get(split, ())
    ]
    rows = pl.concat([pl.DataFrame(schema=ROWS), *(part.rows for part in parts)])
    again = rows.filter(~pl.struct(KEY).is_first_distinct())
    repeats = again.select(
        pl.concat_str(pl.lit(release.name), *KEY, separator="/").alias("record"),
        pl.lit("unique_key_in_release").alias("rule"),
        pl.concat_str(
            pl.lit("an earlier list of the release has this clip; found again in "), "split"
        ).alias("message"),
    )
    return ListRead(
        rows.unique(KEY, keep="first", maintain_order=True) if again.height else rows,
        pl.concat([pl.DataFrame(schema=REJECTED), *(part.rejects for part in parts), repeats]),
    )


def _lines(data: bytes, name: str) -> tuple[list[str], pl.DataFrame]:
    """Column names of the header, and the numbered lines below it that are not blank."""
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=BytesIO(data)) as stream:
                data = stream.read(MAX_TEXT_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(f"list {name}: damaged gzip ({error}); fetch it again") from error
    if len(data) > MAX_TEXT_BYTES:
        raise SourceError(f"list {name}: text is over {MAX_TEXT_BYTES} bytes; not a Kinetics list")
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    lines = (
        pl.select(pl.lit(text).str.split("\n").explode().alias("line"))
        .with_row_index("number", 1)
        .filter(pl.col("line").str.strip_chars() != "")
    )
    header = lines["line"][0] if lines.height else ""
    columns = [column.strip().strip('"').lower() for column in header.split(",")]
    missing = any(column not in columns for column in KEY)
    if missing or len(columns) > MAX_COLUMNS or any(columns.count(c) > 1 for c in COLUMNS):
        raise SourceError(
            f"list {name}: first line is '{header[:120]}', expected a header that names "
            f"{', '.join(KEY)} once each; check that the file is a Kinetics list"
        )
    return columns, lines.slice(1)


def _fields(lines: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """`lines` with the text of each known column and `count`, null where quoting is broken."""
    line, size = pl.col("line"), len(columns)
    places = {column: i for i, column in enumerate(columns) if column in COLUMNS}
    quoted = line.str.contains('"', literal=True)
    pieces = line.str.splitn(",", size).struct
    plain = lines.filter(~quoted).select(
        "number",
        "line",
        (line.str.count_matches(",", literal=True) + 1).alias("count"),
        *(pieces.field(f"field_{i}").alias(column) for column, i in places.items()),
    )
    one = r'(?:\s*"((?:[^"]|"")*)"\s*|([^",]*))'
    groups = pl.col("groups").struct
    unquoted = (
        lines.filter(quoted)
        .with_columns(line.str.extract_groups(f"^{','.join([one] * size)}$").alias("groups"))
        .select(
            "number",
            "line",
            pl.when(pl.coalesce(groups.field("1"), groups.field("2")).is_not_null())
            .then(pl.lit(size, pl.UInt32))
            .alias("count"),
            *(
                pl.coalesce(groups.field(str(2 * i + 1)), groups.field(str(2 * i + 2)))
                .str.replace_all('""', '"', literal=True)
                .alias(column)
                for column, i in places.items()
            ),
        )
    )
    return pl.concat([plain, unquoted]).sort("number") if unquoted.height else plain


def _rules(columns: list[str], declared: Split | None) -> list[tuple[str, pl.Expr, str]]:
    """(rule, true for a bad line, message), in the order in which a line is judged."""
    size = len(columns)
    line, label, split = pl.col("line"), pl.col("label"), pl.col("split")
    rules = [
        ("line_length", line.str.len_chars() > MAX_LINE_CHARACTERS, "line is too long for a clip"),
        ("utf8", line.str.contains("\ufffd", literal=True), "line is not UTF-8 text"),
        (
            "repeated_header",
            pl.col("youtube_id").str.to_lowercase() == "youtube_id",
            "header again, as in joined shards",
        ),
        (
            "field_count",
            pl.col("count").is_null() | (pl.col("count") != size),
            f"expected {size} fields: {','.join(columns)}",
        ),
        (
            "youtube_id_form",
            ~pl.col("youtube_id").str.contains(r"^[-_A-Za-z0-9]{11}$"),
            "youtube_id is not 11 letters, digits, - or _",
        ),
        (
            "time_form",
            pl.col("time_start").is_null() | pl.col("time_end").is_null(),
            "time_start and time_end must be whole seconds from 0 to 999999",
        ),
        (
            "time_order",
            pl.col("time_end") <= pl.col("time_start"),
            "time_end must come after time_start",
        ),
        ("split_allowed", split.is_null(), f"split is none of {', '.join(SPLIT_SPELLINGS)}"),
        (
            "label_form",
            label.str.contains(r"\p{Cc}") | (label.str.len_chars() > MAX_LABEL_CHARACTERS),
            f"label has control characters or is over {MAX_LABEL_CHARACTERS} characters",
        ),
    ]
    if "label" in columns:
        missing = label.is_null() & (split != "test")
        rules.append(("label_present", missing, "label is missing outside test"))
    if declared is not None:
        message = f"the file is declared as {declared} and the line names another split"
        rules.append(("split_declared", split != declared, message))
    return rules
