"""What changed between two versions of a table, or between any two sets of Parquet files.

Enter: two sides (`diff_sides.py` finds them) and the key that names a row.
Leaves: a `TableDiff`: columns added, removed and retyped; rows added, removed and changed; changes
by column; the first examples. Part files with the same SHA-256 on both sides are not read, so the
cost grows with the change. DuckDB does the comparison, out of core where it must: NaN equals NaN,
null equals null, 0.0 equals -0.0, lists and binary values compare by content.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from schemas.errors import ConfigError, SourceError
from storage.atomic import explained, temporary_name
from tasks.operations.diff_sides import Side

if TYPE_CHECKING:
    import duckdb

_NUMBER = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL\(.*\)")
LONG_FORM = ("change", "column", "before", "after")
SHOWN_CHARACTERS = 48


@dataclass(frozen=True)
class TableDiff:
    before: str
    after: str
    key: tuple[str, ...]
    columns: pl.DataFrame
    """Column, change (added, removed, retyped), and its type before and after."""
    rows: dict[str, int]
    """How many rows were added, removed, changed."""
    by_column: pl.DataFrame
    """Column, and in how many rows it changed."""
    examples: pl.DataFrame
    """The first of each kind of change, in the long form of `--out`."""
    files_skipped: int = 0
    files_read: int = 0
    out: Path | None = field(default=None, compare=False)

    @property
    def same(self) -> bool:
        return not self.columns.height and not any(self.rows.values())


def diff_tables(
    before: Side,
    after: Side,
    key: Sequence[str] = (),
    examples: int = 5,
    out: Path | None = None,
) -> TableDiff:
    """Compare two sides by `key`, or else by the key that the files declare.

    `out` gets every change in long form: the key, `change`, and for a changed value `column`,
    `before` and `after` as text (binary values as their length and SHA-256).
    """
    import duckdb

    left, right = _unshared(before, after)
    with tempfile.TemporaryDirectory(prefix="novelty-diff-") as spill:
        try:
            with duckdb.connect(config={"temp_directory": spill}) as connection:
                comparison = _Comparison(connection, before, after, left, right, key)
                comparison.mark()
                if out is not None:
                    comparison.write(out)
                return TableDiff(
                    before=before.name,
                    after=after.name,
                    key=comparison.key,
                    columns=comparison.column_changes(),
                    rows=comparison.row_counts(),
                    by_column=comparison.counts_by_column(),
                    examples=comparison.examples(examples),
                    files_skipped=len(before.files) - len(left),
                    files_read=len(left) + len(right),
                    out=out,
                )
        except duckdb.Error as error:
            raise SourceError(f"cannot compare {before.name} with {after.name}: {error}") from error


def _unshared(before: Side, after: Side) -> tuple[list[Path], list[Path]]:
    """The files of each side that the other does not hold byte for byte."""

    def rest(side: Side, other: Side) -> list[Path]:
        shared = Counter(side.digests) & Counter(other.digests)
        kept = []
        for file, digest in zip(side.files, side.digests, strict=True):
            if shared[digest]:
                shared[digest] -= 1
            else:
                kept.append(file)
        return kept

    return rest(before, after), rest(after, before)


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


class _Comparison:
    """The SQL of one comparison: views `a` and `b`, and `marks`, a row per row that differs.

    Columns of `marks` are k0, k1, ... (the key), `change`, and c0, c1, ... (whether each other
    column differs), so that names of the tables' own columns cannot clash with ours.
    """

    def __init__(
        self,
        connection: "duckdb.DuckDBPyConnection",
        before: Side,
        after: Side,
        left: list[Path],
        right: list[Path],
        key: Sequence[str],
    ):
        self.sql = connection
        self.types = {
            "a": self._view("a", left, before.files[0]),
            "b": self._view("b", right, after.files[0]),
        }
        self.shared = [name for name in self.types["b"] if name in self.types["a"]]
        self.key = self._key(tuple(key), before, after)
        self.values = [name for name in self.shared if name not in self.key]
        self._require_unique({"a": before, "b": after})

    def _view(self, view: str, files: list[Path], any_file: Path) -> dict[str, str]:
        paths = ", ".join(_literal(str(file)) for file in files or [any_file])
        nothing = "" if files else " WHERE false"
        self.sql.execute(
            f"CREATE VIEW {view} AS SELECT *, true AS novelty_side "
            f"FROM read_parquet([{paths}]){nothing}"
        )
        described = self.sql.execute(f"DESCRIBE {view}").fetchall()
        return {name: kind for name, kind, *_ in described if name != "novelty_side"}

    def _key(self, columns: tuple[str, ...], before: Side, after: Side) -> tuple[str, ...]:
        key = columns or after.key or before.key
        if not key:
            raise ConfigError(
                f"neither {before.name} nor {after.name} declares the key of its rows; name its "
                "columns with --key a,b"
            )
        if missing := [name for name in key if name not in self.shared]:
            raise ConfigError(
                f"the key {','.join(key)} needs {', '.join(missing)}, which is not in both sides; "
                f"name another with --key, of: {', '.join(self.shared)}"
            )
        return key

    def _require_unique(self, sides: dict[str, Side]) -> None:
        columns = ", ".join(map(_name, self.key))
        for view, side in sides.items():
            repeated = self.sql.execute(
                f"SELECT {columns} FROM {view} GROUP BY {columns} HAVING count(*) > 1 LIMIT 1"
            ).fetchall()
            if repeated:
                raise ConfigError(
                    f"{','.join(self.key)} is no key of {side.name}: {repeated[0]} stands in "
                    "several rows; name more columns with --key"
                )

    def _comparable(self, view: str, column: str) -> str:
        """The column, as text where its two types have no order in common."""
        kinds = {self.types["a"][column], self.types["b"][column]}
        numbers = all(_NUMBER.fullmatch(kind.removesuffix("[]")) for kind in kinds)
        alike = len({kind.endswith("[]") for kind in kinds}) == 1
        plain = f"{view}.{_name(column)}"
        return plain if len(kinds) == 1 or (numbers and alike) else f"CAST({plain} AS VARCHAR)"

    def _text(self, view: str, column: str) -> str:
        plain = f"{view}.{_name(column)}"
        if self.types[view][column] == "BLOB":
            return f"'sha256 ' || sha256({plain}) || ', ' || octet_length({plain}) || ' bytes'"
        return f"CAST({plain} AS VARCHAR)"

    def mark(self) -> None:
        """Find the rows that differ and in which columns."""
        pairs = [(self._comparable("a", name), self._comparable("b", name)) for name in self.key]
        keys = ", ".join(f"coalesce({x}, {y}) AS k{i}" for i, (x, y) in enumerate(pairs))
        differs = [
            f"{self._comparable('a', name)} IS DISTINCT FROM {self._comparable('b', name)}"
            for name in self.values
        ]
        both = "a.novelty_side AND b.novelty_side"
        marks = "".join(f", {both} AND {test} AS c{i}" for i, test in enumerate(differs))
        any_differs = " OR ".join(["false", *differs])
        self.sql.execute(
            f"CREATE TEMP TABLE marks AS SELECT {keys}, "
            "CASE WHEN a.novelty_side IS NULL THEN 'added' WHEN b.novelty_side IS NULL "
            f"THEN 'removed' ELSE 'changed' END AS change{marks} FROM a FULL OUTER JOIN b ON "
            + " AND ".join(f"{x} IS NOT DISTINCT FROM {y}" for x, y in pairs)
            + f" WHERE a.novelty_side IS NULL OR b.novelty_side IS NULL OR {any_differs}"
        )

    def column_changes(self) -> pl.DataFrame:
        old, new = self.types["a"], self.types["b"]
        rows: list[tuple[str, str, str | None, str | None]] = []
        rows += [(name, "removed", old[name], None) for name in old if name not in new]
        rows += [(name, "added", None, new[name]) for name in new if name not in old]
        rows += [
            (name, "retyped", old[name], new[name])
            for name in self.shared
            if old[name] != new[name]
        ]
        schema = {"column": pl.String, "change": pl.String, "before": pl.String, "after": pl.String}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def row_counts(self) -> dict[str, int]:
        counts = self.sql.execute("SELECT change, count(*) FROM marks GROUP BY change").fetchall()
        return {"added": 0, "removed": 0, "changed": 0} | dict(counts)

    def counts_by_column(self) -> pl.DataFrame:
        sums = ", ".join(f"count_if(c{i})" for i in range(len(self.values)))
        counts = self.sql.execute(f"SELECT {sums} FROM marks").fetchall()[0] if sums else ()
        frame = pl.DataFrame(
            {"column": self.values, "changed": list(counts)},
            schema={"column": pl.String, "changed": pl.Int64},
        )
        ordered = frame.filter(pl.col("changed") > 0)
        return ordered.sort("changed", "column", descending=[True, False])

    def _long_form(self, marks: str) -> str:
        """Rows of `marks` (a table or a query) as one row per added or removed row or value."""
        names = [f"{name}_key" if name in LONG_FORM else name for name in self.key]
        keys = ", ".join(f"m.k{i} AS {_name(name)}" for i, name in enumerate(names))
        values = [
            f"CASE WHEN m.c{i} THEN {{'column': {_literal(name)}, "
            f"'before': {self._text('a', name)}, 'after': {self._text('b', name)}}} END"
            for i, name in enumerate(self.values)
        ]
        whole = "{'column': NULL::VARCHAR, 'before': NULL::VARCHAR, 'after': NULL::VARCHAR}"
        whole = f"CASE WHEN m.change <> 'changed' THEN {whole} END"
        changes = ", ".join([whole, *values])

        def meets(view: str) -> str:
            tests = (
                f"m.k{i} IS NOT DISTINCT FROM {self._comparable(view, name)}"
                for i, name in enumerate(self.key)
            )
            return f"LEFT JOIN {view} ON " + " AND ".join(tests)

        shown = ", ".join(map(_name, names))
        order = ", ".join(f"{_name(name)} NULLS FIRST" for name in names)
        return (
            f"SELECT {shown}, change, u.column, u.before, u.after FROM (SELECT {keys}, m.change, "
            f"unnest(list_filter([{changes}], lambda x: x IS NOT NULL)) AS u "
            f"FROM ({marks}) m {meets('a')} {meets('b')}) ORDER BY {order}, u.column"
        )

    def examples(self, most: int) -> pl.DataFrame:
        """The first changes of each kind, and of each column that changed."""
        order = ", ".join(f"k{i} NULLS FIRST" for i in range(len(self.key)))
        kinds = ["change = 'added'", "change = 'removed'"]
        kinds += [f"c{i}" for i in range(len(self.values))]
        rows = " UNION ".join(
            f"(SELECT * FROM marks WHERE {kind} ORDER BY {order} LIMIT {most})" for kind in kinds
        )
        frame = self.sql.sql(self._long_form(rows)).pl()
        return frame.filter(pl.int_range(pl.len()).over("change", "column") < most)

    def write(self, out: Path) -> None:
        with explained(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(out)
            try:
                query = self._long_form("SELECT * FROM marks")
                self.sql.execute(
                    f"COPY ({query}) TO {_literal(str(temporary))} "
                    "(FORMAT parquet, COMPRESSION zstd)"
                )
                temporary.replace(out)
            finally:
                temporary.unlink(missing_ok=True)


def show_diff(diff: TableDiff) -> None:
    """The difference for people: schema, counts, and examples side by side."""
    from tasks.operations.summary import show_frame

    print(f"before: {diff.before}\nafter:  {diff.after}")
    if diff.columns.height:
        print("\ncolumns")
        show_frame(diff.columns)
    if diff.by_column.height:
        print("\nchanged values by column")
        show_frame(diff.by_column)
    if diff.examples.height:
        print("\nthe first changes")
        show_frame(diff.examples.with_columns(_cut(name) for name in ("before", "after")))
    counts = ", ".join(f"{count:,} {change}" for change, count in diff.rows.items())
    verdict = "same" if diff.same else f"rows by {','.join(diff.key)}: {counts}"
    print(f"\n{verdict}; {diff.files_read} files read, {diff.files_skipped} equal ones skipped")
    if diff.out is not None:
        print(f"every change: {diff.out}")


def _cut(column: str) -> pl.Expr:
    text = pl.col(column)
    cut = text.str.head(SHOWN_CHARACTERS) + "…"
    return pl.when(text.str.len_chars() > SHOWN_CHARACTERS).then(cut).otherwise(text).alias(column)
