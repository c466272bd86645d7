"""How a table is declared: one `Table` yields Arrow schema, data dictionary and row rules.

A `Column` says type, meaning, unit and allowed values. `Table.check` splits a frame into good rows
(sorted by key) and one row per bad record with the rule it broke, so that nothing vanishes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import polars as pl
import pyarrow as pa

from schemas.errors import ConfigError

REJECTED = pl.Schema({"record": pl.String, "rule": pl.String, "message": pl.String})


@dataclass(frozen=True, eq=False)
class Rule:
    """`holds` is true for good rows; `message` may be a string or a polars expression."""

    name: str
    holds: pl.Expr
    message: str | pl.Expr

    def message_expression(self) -> pl.Expr:
        return pl.lit(self.message) if isinstance(self.message, str) else self.message


@dataclass(frozen=True)
class Column:
    name: str
    type: pa.DataType
    description: str
    unit: str = ""
    nullable: bool = False
    minimum: float | None = None
    maximum: float | None = None
    allowed: tuple[str, ...] | None = None
    pattern: str | None = None

    def rules(self) -> Iterator[Rule]:
        value = pl.col(self.name)
        shown = pl.format(f"{self.name} is {{}}", value.cast(pl.String).fill_null("null"))
        if not self.nullable:
            yield Rule(f"{self.name}_present", value.is_not_null(), f"{self.name} is missing")
        if pa.types.is_floating(self.type):
            yield Rule(
                f"{self.name}_finite", value.is_finite(), shown + ", expected a finite number"
            )
        if self.minimum is not None or self.maximum is not None:
            low = float("-inf") if self.minimum is None else self.minimum
            high = float("inf") if self.maximum is None else self.maximum
            expected = f", expected {low:g} to {high:g}"
            yield Rule(f"{self.name}_range", value.is_between(low, high), shown + expected)
        if self.allowed is not None:
            expected = f", expected one of {', '.join(self.allowed)}"
            yield Rule(f"{self.name}_allowed", value.is_in(list(self.allowed)), shown + expected)
        if self.pattern is not None:
            expected = f", expected the form {self.pattern}"
            yield Rule(f"{self.name}_form", value.str.contains(self.pattern), shown + expected)


@dataclass(frozen=True)
class Reference:
    """Every value of `columns` must stand in `to` of the table called `table` (same benchmark)."""

    columns: tuple[str, ...]
    table: str
    to: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{'_'.join(self.columns)}_in_{self.table}"


@dataclass(frozen=True, eq=False)
class Table:
    """`key` is unique and the sort order. `row_group_by` starts a row group at each new value."""

    name: str
    description: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    version: int = 1
    rules: tuple[Rule, ...] = ()
    references: tuple[Reference, ...] = ()
    row_group_rows: int = 100_000
    row_group_by: str | None = None
    upgrades: Mapping[int, Callable[[pl.DataFrame], pl.DataFrame]] = field(default_factory=dict)
    """From rows of that schema version to those of the next, where that needs no raw files."""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        missing = [name for name in self.key if name not in names]
        if missing or len(set(names)) != len(names):
            raise ConfigError(
                f"table {self.name}: key {missing} undeclared or a column named twice"
            )

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        fields = []
        for column in self.columns:
            metadata = {"description": column.description}
            if column.unit:
                metadata["unit"] = column.unit
            fields.append(pa.field(column.name, column.type, column.nullable, metadata))
        return pa.schema(
            fields,
            {
                "table": self.name,
                "description": self.description,
                "schema_version": str(self.version),
                "sort_key": ",".join(self.key),
            },
        )

    @cached_property
    def polars_schema(self) -> pl.Schema:
        return pl.Schema(self.arrow_schema)  # by way of an empty table pandas would be imported

    @cached_property
    def row_rules(self) -> tuple[Rule, ...]:
        """What a row alone, or beside the others of its table, must keep."""
        unique = pl.struct(self.key).is_first_distinct()
        return (
            *(rule for column in self.columns for rule in column.rules()),
            *self.rules,
            Rule("unique_key", unique, f"another row has the same {self.key}"),
        )

    def empty(self) -> pl.DataFrame:
        return pl.DataFrame(schema=self.polars_schema)

    def conform(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The declared columns in declared order and type; a missing or extra one is our defect."""
        names = [column.name for column in self.columns]
        if set(frame.columns) != set(names):
            raise ConfigError(
                f"table {self.name}: columns {sorted(set(frame.columns) ^ set(names))} do not "
                "agree with the declaration"
            )
        if frame.schema != self.polars_schema:
            frame = frame.select(names).cast(self.polars_schema)
        return frame.rechunk()  # pl.format of polars 2.1.0 panics on an empty chunk

    def check(
        self, frame: pl.DataFrame, referenced: Mapping[str, pl.DataFrame] | None = None
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Good rows sorted by key, and (record, rule, message) for each bad one.

        A record that breaks several rules is one rejected row: the first rule, all the messages.
        Of rows with the same key the first is kept.
        """
        frame = self.conform(frame)
        if frame.is_empty():
            return frame, pl.DataFrame(schema=REJECTED)
        rules = list(self.row_rules)
        for reference in self.references:
            if referenced is not None and reference.table in referenced:
                known = (
                    referenced[reference.table]
                    .select(
                        pl.struct(
                            pl.col(target).alias(column)
                            for column, target in zip(reference.columns, reference.to, strict=True)
                        )
                    )
                    .to_series()
                )
                rules.append(
                    Rule(
                        reference.name,
                        pl.struct(reference.columns).is_in(known.implode()),
                        f"no such row in {reference.table}",
                    )
                )
        holds = (rule.holds.fill_null(True).all().alias(f"{i}") for i, rule in enumerate(rules))
        if all(frame.select(holds).row(0)):
            return frame.sort(self.key), pl.DataFrame(schema=REJECTED)
        names = [rule.name for rule in rules]
        broken = frame.with_columns(
            pl.when(~rule.holds.fill_null(True))
            .then(rule.message_expression())
            .otherwise(None)
            .alias(f"__{i}")
            for i, rule in enumerate(rules)
        )
        marks = [pl.col(f"__{i}") for i in range(len(rules))]
        is_bad = pl.any_horizontal(mark.is_not_null() for mark in marks)
        record = pl.concat_str(
            [pl.col(name).cast(pl.String).fill_null("null") for name in self.key], separator="/"
        )
        bad = broken.filter(is_bad).select(
            record.alias("record"),
            pl.coalesce(
                pl.when(mark.is_not_null()).then(pl.lit(name))
                for mark, name in zip(marks, names, strict=True)
            ).alias("rule"),
            pl.concat_str(marks, separator="; ", ignore_nulls=True).alias("message"),
        )
        good = broken.filter(~is_bad).select(frame.columns).sort(self.key)
        return good, bad
