"""SQL on the catalogue: the example queries of docs/queries, and any query of one's own.

Enter: SQL, a file of it, or an example's name. Leaves: rows on the terminal. The first line of an
example is a comment: the question that it answers.
"""

import sys
from pathlib import Path

import polars as pl

from schemas.errors import ConfigError
from storage.catalog import open_catalog

CHECKOUT = Path(__file__).parents[2] / "docs" / "queries"
QUERIES = CHECKOUT if CHECKOUT.is_dir() else Path(sys.prefix) / "share" / "novelty" / "queries"
"""In a checkout, or where a wheel puts them."""


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
        raise ConfigError(f"the query failed: {error}") from None
