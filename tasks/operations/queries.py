"""SQL on the catalogue: the example queries of docs/queries, and any query of one's own.

Enter: SQL, a file of it, or an example's name. Leaves: rows on the terminal. The first line of an
example is a comment: the question that it answers.
"""

import sys
from pathlib import Path

import polars as pl

from schemas.errors import ConfigError
from schemas.tables import METRICS, RUNS, find_table
from storage.catalog import open_catalog, views_in
from storage.snapshots import benchmarks_in
from storage.tables import current_versions
from tasks.operations.upgrade import build_command, older_tables

CHECKOUT = Path(__file__).parents[2] / "docs" / "queries"
QUERIES = CHECKOUT if CHECKOUT.is_dir() else Path(sys.prefix) / "share" / "novelty" / "queries"
"""In a checkout, or where a wheel puts them."""
MADE_OF = {"leaderboard": (METRICS.name, RUNS.name), "metrics_by_build": (METRICS.name,)}
"""Views over all benchmarks that are made of tables with other names."""


def example_queries() -> pl.DataFrame:
    """Name and question of every example."""
    files = sorted(QUERIES.glob("*.sql"))
    if not files:
        raise ConfigError(f"there are no example queries in {QUERIES}; install the wheel again")
    rows = [(file.stem, _question(file)) for file in files]
    return pl.DataFrame(rows, schema=["name", "question"], orient="row")


def _question(file: Path) -> str:
    return file.read_text().split("\n", 1)[0].removeprefix("--").strip()


def read_query(sql: str | None, file: str | None) -> str:
    """The SQL itself, or that of a file, or of the example of that name."""
    if (sql is None) == (file is None):
        raise ConfigError("give either SQL or --file; `novelty query --list` shows examples")
    if file is None:
        return sql or ""
    path = Path(file) if Path(file).exists() else QUERIES / f"{Path(file).stem}.sql"
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the query {file}: {error}; `novelty query --list` shows the examples"
        ) from None


def show_query(lake: Path, sql: str) -> None:
    """Run it read-only on the catalogue of the lake and print what its last statement returns."""
    import duckdb

    try:
        with open_catalog(lake) as connection:
            result = connection.sql(sql)
            if result is not None:
                result.show(max_width=200, max_rows=100)
    except duckdb.Error as error:
        raise ConfigError(_absent(lake, sql) or f"the query failed: {error}") from None


def _absent(lake: Path, sql: str) -> str:
    """Who lacks a table that the query names, and what builds it; empty if nobody does."""
    older = {table.name for table in older_tables(lake)}
    present = {version.name for version in current_versions(lake)}
    for view in sorted(views_in(sql)):
        schema, _, name = view.rpartition("/")
        over_all = schema == "lake"  # such a view leaves out what is older
        shown = present - older if over_all else present
        for table in MADE_OF.get(name, (name,)) if over_all else (name,):
            benchmarks = [
                benchmark
                for benchmark in benchmarks_in(lake)
                if (over_all or benchmark == schema) and find_table(benchmark, table)
            ]
            if not benchmarks or any(f"{benchmark}/{table}" in shown for benchmark in benchmarks):
                continue
            outdated = [one for one in benchmarks if f"{one}/{table}" in older]
            state = "of an older version" if outdated else "not built"
            builds = [f"`{build_command(lake, one)}`" for one in outdated or benchmarks]
            return (
                f"there is no {schema}.{name}, as the table {table} of "
                f"{', '.join(outdated or benchmarks)} is {state}; {' and '.join(builds)} makes it, "
                "with settings that ask for it"
            )
    return ""
