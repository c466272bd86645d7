"""`catalog.duckdb`: a schema per benchmark, a view per table, descriptions as comments.

The schema `lake` has a view over all benchmarks of every table that they share.

Views name the immutable version folders, so a query never sees half of a swap; the file itself is
replaced whole after each build. An analyst needs DuckDB and nothing of ours.

A lake in a bucket has `catalog.sql` instead: the same views over s3:// addresses, to be read by any
DuckDB that has the bucket's credentials. Its `catalog.duckdb` stays in the cache and shows the
tables that were fetched.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import LakeError
from schemas.tables import SHARED
from storage.atomic import explained, step, temporary_name
from storage.layout import catalog_path
from storage.locks import locked
from storage.objects import Bucket, bucket_of
from storage.remote import SWAPS, at_once, version_prefix
from storage.tables import TableVersion, current_versions
from storage.verified import problem_of, verified

CATALOG_SQL = "catalog.sql"
FOOTER_BYTES = 1 << 16


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _statements(version: TableVersion, schema: pa.Schema, files: Sequence[str]) -> list[str]:
    """What makes one view."""
    manifest = version.manifest
    view = f"{_identifier(manifest.benchmark)}.{_identifier(manifest.table)}"
    description = (schema.metadata or {}).get(b"description", b"").decode()
    said = [
        f"CREATE SCHEMA IF NOT EXISTS {_identifier(manifest.benchmark)}",
        f"CREATE OR REPLACE VIEW {view} AS SELECT * FROM "
        f"read_parquet([{', '.join(_quoted(file) for file in files)}])",
        f"COMMENT ON VIEW {view} IS {_quoted(description)}",
    ]
    for field in schema:
        metadata = field.metadata or {}
        comment = metadata.get(b"description", b"").decode()
        if unit := metadata.get(b"unit", b"").decode():
            comment += f" [{unit}]"
        said.append(f"COMMENT ON COLUMN {view}.{_identifier(field.name)} IS {_quoted(comment)}")
    return said


def _unions(versions: Sequence[TableVersion]) -> list[str]:
    """A view `lake.<table>` over all benchmarks for each shared table, `benchmark` first.

    A benchmark whose table is of another schema version is left out, and the comment names it.
    """
    statements = ["CREATE SCHEMA IF NOT EXISTS lake"]
    for name, table in SHARED.items():
        there = [version.manifest for version in versions if version.manifest.table == name]
        current = [m.benchmark for m in there if m.schema_version == table.version]
        older = [m.benchmark for m in there if m.schema_version != table.version]
        if not current:
            continue
        selects = [
            f"SELECT {_quoted(benchmark)} AS benchmark, * "
            f"FROM {_identifier(benchmark)}.{_identifier(name)}"
            for benchmark in current
        ]
        comment = table.description
        if older:
            comment += f" Left out, as they are of another version: {', '.join(older)}."
        statements += [
            f"CREATE OR REPLACE VIEW lake.{_identifier(name)} AS {' UNION ALL '.join(selects)}",
            f"COMMENT ON VIEW lake.{_identifier(name)} IS {_quoted(comment)}",
        ]
    return statements


def refresh_catalog(lake: Path) -> Path:
    """Write the catalogue of every current table anew."""
    final = catalog_path(lake)
    with locked(lake, "catalog", 60.0), explained(final):
        if (bucket := bucket_of(lake)) is None:
            versions = current_versions(lake)
        else:
            versions = [
                version
                for version in _push_sql(bucket, lake)
                if all(place.exists() for place in version.places)
            ]
        temporary = temporary_name(final)
        try:
            with duckdb.connect(str(temporary)) as connection:
                for version in versions:
                    schema = _local_schema(version)
                    files = [str(file) for file in version.places]
                    for statement in _statements(version, schema, files):
                        connection.execute(statement)
                for statement in _unions(versions):
                    connection.execute(statement)
            step("catalog_written")
            temporary.replace(final)
            step("catalog_replaced")
        except duckdb.IOException as error:
            raise LakeError(
                f"cannot write {final}: {error}. Free some space or mend permissions, then run the "
                "same command again. The tables themselves are committed."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
    return final


def catalog_for(lake: Path, sql: str) -> Path:
    """The catalogue to run a query on; of a bucket the tables that it names are fetched first."""
    if bucket_of(lake) is None:
        return catalog_path(lake)
    names: set[str] = set()
    # A query that is wrong names nothing here; running it says what is wrong.
    with duckdb.connect() as connection, suppress(duckdb.Error):
        for statement in connection.extract_statements(sql):
            names |= connection.get_table_names(statement.query, qualified=True)
    wanted = {name.replace('"', "").replace(".", "/") for name in names}
    for version in current_versions(lake):
        if {version.name, f"lake/{version.manifest.table}"} & wanted:
            _ = version.files
    return refresh_catalog(lake)


def _push_sql(bucket: Bucket, lake: Path) -> list[TableVersion]:
    """Put `catalog.sql` and give the versions in it.

    Whoever wrote it since we read the pointers makes us read them again: it never goes back.
    """
    for _ in range(SWAPS):
        before = bucket.get(CATALOG_SQL)
        versions = current_versions(lake)
        schemas = at_once(lambda version: _schema(bucket, version), versions)
        said = []
        for version, schema in zip(versions, schemas, strict=True):
            manifest = version.manifest
            prefix = version_prefix(manifest.benchmark, manifest.table, manifest.key)
            files = [f"{bucket.address}/{prefix}/{part.file}" for part in manifest.parts]
            said += _statements(version, schema, files)
        said += _unions(versions)
        data = "".join(f"{line};\n" for line in said).encode()
        if before is not None and before.data == data:
            return versions
        if bucket.replace(CATALOG_SQL, data, before):
            return versions
    raise LakeError(
        f"{bucket.address}/{CATALOG_SQL} is written by others all the time; run the same command "
        "again. The tables themselves are committed."
    )


def _local_schema(version: TableVersion) -> pa.Schema:
    part = version.smallest
    return pq.read_schema(verified(version.folder / part.file, part))


def _schema(bucket: Bucket, version: TableVersion) -> pa.Schema:
    """From the cache, or from the footer in the bucket: no need for the whole file."""
    part = version.smallest
    if problem_of(version.folder / part.file, part) is None:
        return _local_schema(version)
    manifest = version.manifest
    prefix = version_prefix(manifest.benchmark, manifest.table, manifest.key)
    tail = bucket.tail(f"{prefix}/{part.file}", part.bytes, FOOTER_BYTES)
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if needed > len(tail):
        tail = bucket.tail(f"{prefix}/{part.file}", part.bytes, needed)
    return pq.read_schema(pa.BufferReader(tail))
