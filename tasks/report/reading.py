"""What sections read: the current tables of one benchmark, as they were when the report began."""

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from schemas.errors import LakeError
from schemas.manifest import BuildRecord
from schemas.tables import find_table
from storage.tables import TableVersion
from storage.upkeep import read_build_record


class Read(Protocol):
    """The current table, or None where the lake has none; all of it unless narrowed."""

    def __call__(
        self, table: str, columns: list[str] | None = None, where: pl.Expr | None = None
    ) -> pl.DataFrame | None: ...


class Tables:
    """`Read` for these versions of a lake's tables, and what the last build recorded.

    A table of another schema version than the declared one is named in `older` and not read.
    """

    def __init__(self, lake: Path, benchmark: str, versions: Sequence[TableVersion]) -> None:
        self.lake, self.benchmark, self.versions = lake, benchmark, versions
        self.older: list[str] = []
        self._by_name: dict[str, TableVersion] = {}
        for version in versions:
            manifest = version.manifest
            declared = find_table(benchmark, manifest.table)
            if declared is None or declared.version == manifest.schema_version:
                self._by_name[manifest.table] = version
            else:
                self.older.append(manifest.table)

    def __call__(
        self, table: str, columns: list[str] | None = None, where: pl.Expr | None = None
    ) -> pl.DataFrame | None:
        rows = self.scan(table)
        if rows is None:
            return None
        rows = rows if where is None else rows.filter(where)
        return self.collect(table, rows if columns is None else rows.select(columns))

    def scan(self, table: str) -> pl.LazyFrame | None:
        """The table unread, for sections that need only a summary of many rows."""
        version = self._by_name.get(table)
        return None if version is None else pl.scan_parquet(version.files, glob=False)

    def collect(self, table: str, rows: pl.LazyFrame) -> pl.DataFrame:
        with self._damage_is_said(table):
            return rows.collect()

    @contextmanager
    def _damage_is_said(self, table: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pl.exceptions.ComputeError) as error:
            name = f"{self.benchmark}/{table}"
            raise LakeError(f"cannot read {name}: {error}. Run `novelty verify`.") from error

    def rows(self, table: str) -> int | None:
        """How many rows the table has, without reading it."""
        version = self._by_name.get(table)
        return None if version is None else version.manifest.rows

    def columns(self, table: str) -> list[str]:
        rows = self.scan(table)
        with self._damage_is_said(table):
            return [] if rows is None else rows.collect_schema().names()

    @cached_property
    def record(self) -> BuildRecord | None:
        """The last finished build."""
        return read_build_record(self.lake, self.benchmark)


def module(name: str) -> Any:
    """The module, or None if there is none; an error inside it is an error."""
    parent = name.rpartition(".")[0]
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


def names(benchmark: str) -> tuple[str, str]:
    """Title and subtitle: the first line of the configuration's docstring, `Title: what it is`."""
    config = getattr(module(f"schemas.{benchmark}"), "Config", None)
    title, _, about = ((config and config.__doc__) or "").partition("\n")[0].partition(": ")
    return (title, about[:1].upper() + about[1:]) if about else (benchmark, "")
