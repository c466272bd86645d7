"""`catalog.duckdb`: a schema per benchmark, a view per table, descriptions as comments.

Views name the immutable version folders, so a query never sees half of a swap; the file itself is
replaced whole after each build. An analyst needs DuckDB and nothing of ours.
"""

from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from schemas.errors import LakeError
from storage.atomic import explained, temporary_name
from storage.layout import catalog_path
from storage.locks import locked
from storage.tables import current_versions


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def refresh_catalog(lake: Path) -> Path:
    """Write the catalogue of every current table anew."""
    final = catalog_path(lake)
    with locked(lake, "catalog", 60.0), explained(final):
        temporary = temporary_name(final)
        try:
            with duckdb.connect(str(temporary)) as connection:
                for version in current_versions(lake):
                    manifest = version.manifest
                    schema = pq.read_schema(version.files[0])
                    view = f"{_identifier(manifest.benchmark)}.{_identifier(manifest.table)}"
                    files = ", ".join(_quoted(str(file)) for file in version.files)
                    connection.execute(
                        f"CREATE SCHEMA IF NOT EXISTS {_identifier(manifest.benchmark)}"
                    )
                    connection.execute(
                        f"CREATE VIEW {view} AS SELECT * FROM read_parquet([{files}])"
                    )
                    description = (schema.metadata or {}).get(b"description", b"").decode()
                    connection.execute(f"COMMENT ON VIEW {view} IS {_quoted(description)}")
                    for field in schema:
                        metadata = field.metadata or {}
                        comment = metadata.get(b"description", b"").decode()
                        if unit := metadata.get(b"unit", b"").decode():
                            comment += f" [{unit}]"
                        column = f"{view}.{_identifier(field.name)}"
                        connection.execute(f"COMMENT ON COLUMN {column} IS {_quoted(comment)}")
            temporary.replace(final)
        except duckdb.IOException as error:
            raise LakeError(
                f"cannot write {final}: {error}. Free some space or mend permissions, then run the "
                "same command again. The tables themselves are committed."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
    return final
