"""Readers that a test runs in processes of their own: two tables that belong together, for ever."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from storage.catalog import open_catalog
from storage.tables import current_versions
from tasks.operations.history import folder_of


def by_path(lake: Path) -> float:
    folder = folder_of(lake, "toy")
    readings, totals = (
        pl.read_parquet(folder / name / "*.parquet") for name in ("readings", "totals")
    )
    return difference(readings, totals)


def by_api(lake: Path) -> float:
    found = {version.manifest.table: version for version in current_versions(lake, "toy")}
    return difference(found["readings"].read(), found["totals"].read())


def by_catalogue(lake: Path) -> float:
    with open_catalog(lake) as connection:
        readings = connection.sql("select * from toy.readings").pl()
        return difference(readings, connection.sql("select * from toy.totals").pl())


WAYS: dict[str, Callable[[Path], float]] = {
    "path": by_path,
    "api": by_api,
    "catalogue": by_catalogue,
}


def difference(readings: pl.DataFrame, totals: pl.DataFrame) -> float:
    """0 if the two tables are of one build."""
    known = readings.filter(pl.col("kind").is_not_null())
    return float(known["value"].sum() - totals["total"].sum())


def read_until_told(
    lake: Path, way: str, numbers: Sequence[int], counts: Any, stop: Any, problems: Any
) -> None:
    """One thread for each number; `counts` says how often each has read."""

    def read(number: int) -> None:
        while not stop.value:
            try:
                if WAYS[way](lake) != 0:
                    problems.put(f"{way}: a mixture of two builds")
            except Exception as error:
                problems.put(f"{way}: {type(error).__name__}: {error}")
            counts[number] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
