"""What a report hands to its sections, without a lake."""

import polars as pl

from tasks.report import Read


def read_of(tables: dict[str, pl.DataFrame]) -> Read:
    def read(
        table: str, columns: list[str] | None = None, where: pl.Expr | None = None
    ) -> pl.DataFrame | None:
        if table not in tables:
            return None
        rows = tables[table] if where is None else tables[table].filter(where)
        return rows if columns is None else rows.select(columns)

    return read
