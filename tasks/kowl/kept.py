"""Rows that a shard has made, in files of its folder: a killed shard goes on behind them."""

import io
from pathlib import Path

import polars as pl

from schemas.table import Table
from storage.checkpoints import read_checkpoint, write_checkpoint

ROWS_KEPT = 64
"""A killed shard loses no more rows than this, and what it was making then."""


class KeptRows:
    """Rows of one table. Without a folder nothing is written."""

    def __init__(self, work: Path | None, table: Table) -> None:
        self.work = work
        self._empty = pl.DataFrame(schema=table.polars_schema)
        self._files = [] if work is None else sorted(work.glob("rows-*.parquet"))
        self._number = len(self._files)
        self._added = [self._empty]
        self._saved = 1

    def before(self) -> pl.DataFrame:
        """Those of before the kill."""
        frames = [pl.read_parquet(read_checkpoint(file)) for file in self._files]
        return pl.concat([self._empty, *frames])

    def add(self, rows: pl.DataFrame) -> None:
        self._added.append(rows)
        unsaved = self._added[self._saved :]
        if self.work is not None and sum(frame.height for frame in unsaved) >= ROWS_KEPT:
            buffer = io.BytesIO()
            pl.concat(unsaved).write_parquet(buffer)
            self.work.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self.work / f"rows-{self._number:06}.parquet", buffer.getvalue())
            self._number += 1
            self._saved = len(self._added)

    def added(self) -> pl.DataFrame:
        """Those of this process."""
        return pl.concat(self._added)
