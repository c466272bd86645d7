"""`catalog.duckdb`: a schema per benchmark, a view per table, descriptions as comments.

The schema `lake` has a view over all benchmarks of every table that they share, and two tables:
`builds` (every snapshot that `gc` left, and which of them the views show) and `versions` (the
tables in each). Its view `metrics_by_build` has the metrics of all these snapshots, its view
`leaderboard` ranks the detectors of all benchmarks.

Views name the immutable version folders of one snapshot, so a query never sees half of a swap; the
file itself is replaced whole after each build. Paths are relative to the lake, so that a moved or
copied lake never shows the rows of the original: an analyst says `SET file_search_path = 'lake'`,
or works in the lake's folder, and needs DuckDB (from 1.1 on) and nothing of ours.

A lake in a bucket has `catalog.sql` instead: the same views over s3:// addresses, to be read by any
DuckDB that has the bucket's credentials. Its `catalog.duckdb` stays in the cache and shows the
tables that were fetched.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import duckdb
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import LakeError
from schemas.manifest import Snapshot
from schemas.tables import METRICS, RUNS, SCORE_SETTINGS, SHARED
from storage.atomic import explained, fsync_path, step, temporary_name
from storage.iceberg import follow
from storage.layout import catalog_path
from storage.leaderboard import COLUMNS, SOURCES, leaderboard_sql
from storage.locks import locked
from storage.objects import Bucket, bucket_of
from storage.remote import SWAPS, at_once, version_prefix
from storage.snapshots import benchmarks_in, current_snapshot, history
from storage.tables import TableVersion, current_versions, find_version, versions_of
from storage.verified import problem_of, verified

CATALOG_SQL = "catalog.sql"
FOOTER_BYTES = 1 << 16
STORAGE_VERSION = "v1.0.0"  # DuckDB 1.0 and later read it
BUILDS = {
    "benchmark": ("VARCHAR", "Benchmark"),
    "snapshot": ("VARCHAR", "Snapshot, as `novelty history` names it"),
    "number": ("BIGINT", "Counts the publications of the benchmark"),
    "made": ("TIMESTAMP", "When it was published, in UTC"),
    "partial": ("BOOLEAN", "Whether the build was still going on"),
    "current": ("BOOLEAN", "Whether the views of the catalogue show it"),
    "settings": ("VARCHAR", "Settings of the build, as JSON"),
}
VERSIONS = {
    "benchmark": ("VARCHAR", "Benchmark"),
    "snapshot": ("VARCHAR", "Snapshot"),
    "number": ("BIGINT", "Number of the snapshot"),
    "table_name": ("VARCHAR", "Table"),
    "version": ("VARCHAR", "Key of the version that the snapshot shows"),
    "schema_version": ("BIGINT", "Version of the table's declaration"),
    "row_count": ("BIGINT", "Rows"),
    "bytes": ("BIGINT", "Bytes of its files"),
}
_NAME = re.compile(r'(?:"[^"]*"|[^\s".(]+)(?:\.(?:"[^"]*"|[^\s".(]+))*')
"""A name of SQL with the names before its dots."""
Row = tuple[object, ...]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _statements(version: TableVersion, schema: pa.Schema, files: Sequence[str]) -> list[str]:
    """What makes one view."""
    manifest = version.manifest
    view = f"{_identifier(manifest.benchmark)}.{_identifier(manifest.table)}"
    description = (schema.metadata or {}).get(b"description", b"").decode()
    statements = [
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
        statements.append(
            f"COMMENT ON COLUMN {view}.{_identifier(field.name)} IS {_quoted(comment)}"
        )
    return statements


def _unions(versions: Sequence[TableVersion]) -> list[str]:
    """A view `lake.<table>` over all benchmarks for each shared table, `benchmark` first.

    A benchmark whose table is of another schema version is left out, and the comment names it.
    """
    statements = ["CREATE SCHEMA IF NOT EXISTS lake"]
    for name, table in SHARED.items():
        manifests = [version.manifest for version in versions if version.manifest.table == name]
        current = [m.benchmark for m in manifests if m.schema_version == table.version]
        older = [m.benchmark for m in manifests if m.schema_version != table.version]
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


def _leaderboard(versions: Sequence[TableVersion]) -> list[str]:
    """The view of the ranking, where there are numbers to rank."""
    names = {
        version.manifest.table
        for version in versions
        if (table := SHARED.get(version.manifest.table)) is not None
        and table.version == version.manifest.schema_version
    }
    if not {METRICS.name, RUNS.name} <= names:
        return []
    sql = leaderboard_sql("lake.", described=SCORE_SETTINGS.name in names)
    comment = "Detectors ranked in each protocol and over the protocols that all of them have."
    return [
        f"CREATE OR REPLACE VIEW lake.leaderboard AS {sql}",
        f"COMMENT ON VIEW lake.leaderboard IS {_quoted(comment)}",
        *(
            f"COMMENT ON COLUMN lake.leaderboard.{_identifier(column)} IS {_quoted(meaning)}"
            for column, meaning in COLUMNS.items()
        ),
    ]


@dataclass(frozen=True)
class Past:
    """Finished snapshots that `gc` left, the current ones, and the versions that they show."""

    snapshots: list[Snapshot]
    versions: dict[tuple[str, str, str], TableVersion]
    """By benchmark, table and key; without those that are damaged or gone."""

    def build_rows(self, current: set[tuple[str, str]]) -> list[Row]:
        return [
            (
                *(s.benchmark, s.name, s.number, s.made.replace(tzinfo=None), s.partial),
                (s.benchmark, s.name) in current,
                orjson.dumps(s.settings, option=orjson.OPT_SORT_KEYS).decode(),
            )
            for s in self.snapshots
        ]

    def version_rows(self) -> list[Row]:
        return [
            (s.benchmark, s.name, s.number, table, key, m.schema_version, m.rows, m.bytes)
            for s in self.snapshots
            for table, key in s.tables.items()
            if (version := self.versions.get((s.benchmark, table, key))) is not None
            for m in (version.manifest,)
        ]


def lake_past(lake: Path) -> tuple[list[Snapshot], dict[tuple[str, str, str], TableVersion]]:
    """Snapshots that `gc` left, and their versions by benchmark, table and key."""
    past = _past(lake, benchmarks_in(lake))
    return past.snapshots, past.versions


def _past(lake: Path, benchmarks: Iterable[str]) -> Past:
    snapshots = []
    for benchmark in benchmarks:
        entries = history(lake, benchmark)
        snapshots += [one for one in entries[:-1] if not one.partial] + entries[-1:]
    versions: dict[tuple[str, str, str], TableVersion] = {}
    for snapshot in snapshots:
        for table, key in snapshot.tables.items():
            name = (snapshot.benchmark, table, key)
            with suppress(LakeError):
                if name not in versions:
                    versions[name] = find_version(lake, *name)
    return Past(snapshots, versions)


def _metrics_by_build(past: Past, place: Callable[[TableVersion], list[str]]) -> list[str]:
    """A view of the metrics of every snapshot, so that builds can be compared by one query."""
    selects = [
        f"SELECT {_quoted(key)} AS version, * FROM read_parquet([{', '.join(files)}])"
        for (_, table, key), version in past.versions.items()
        if table == METRICS.name and version.manifest.schema_version == METRICS.version
        for files in ([_quoted(file) for file in place(version)],)
    ]
    if not selects:
        return []
    comment = "Metrics of every snapshot that `gc` left, with the number of the snapshot."
    return [
        "CREATE OR REPLACE VIEW lake.metrics_by_build AS "
        "SELECT benchmark, snapshot, number, made, partial, metrics.* EXCLUDE (version) "
        "FROM lake.versions JOIN lake.builds USING (benchmark, snapshot, number) "
        f"JOIN ({' UNION ALL '.join(selects)}) AS metrics USING (version) "
        f"WHERE table_name = {_quoted(METRICS.name)}",
        f"COMMENT ON VIEW lake.metrics_by_build IS {_quoted(comment)}",
    ]


def _tables(past: Past, current: set[tuple[str, str]]) -> list[str]:
    """Statements that make `lake.builds` and `lake.versions`."""
    statements = []
    for name, columns, rows, comment in (
        (
            "builds",
            BUILDS,
            past.build_rows(current),
            "Finished snapshots that `gc` left, and the current.",
        ),
        ("versions", VERSIONS, past.version_rows(), "The tables in each snapshot."),
    ):
        types = ", ".join(f"{column} {kind}" for column, (kind, _) in columns.items())
        statements.append(f"CREATE OR REPLACE TABLE lake.{name} ({types})")
        if rows:
            values = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
            statements.append(f"INSERT INTO lake.{name} VALUES {values}")
        statements.append(f"COMMENT ON TABLE lake.{name} IS {_quoted(comment)}")
        statements += [
            f"COMMENT ON COLUMN lake.{name}.{column} IS {_quoted(meaning)}"
            for column, (_, meaning) in columns.items()
        ]
    return statements


def _literal(value: object) -> str:
    return str(value) if isinstance(value, bool | int) else _quoted(str(value))


def _all_statements(
    versions: Sequence[TableVersion],
    schemas: Sequence[pa.Schema],
    current: Sequence[Snapshot],
    past: Past,
    place: Callable[[TableVersion], list[str]],
) -> list[str]:
    """The whole catalogue; `place` says how the files of a version are named in it."""
    statements = []
    for version, schema in zip(versions, schemas, strict=True):
        statements += _statements(version, schema, place(version))
    statements += _unions(versions) + _leaderboard(versions)
    statements += _tables(past, {(snapshot.benchmark, snapshot.name) for snapshot in current})
    return statements + _metrics_by_build(past, place)


def refresh_catalog(lake: Path) -> Path:
    """Write the catalogue of every current table anew."""
    final = catalog_path(lake)
    with locked(lake, "catalog", 60.0):
        bucket = bucket_of(lake)
        current, versions, past = _state(lake) if bucket is None else _push_sql(bucket, lake)
        everything = past
        if bucket is not None:
            versions = [v for v in versions if _is_fetched(v)]
            fetched = {name: v for name, v in past.versions.items() if _is_fetched(v)}
            past = Past(past.snapshots, fetched)
        schemas = [_local_schema(version) for version in versions]
        statements = _all_statements(
            versions, schemas, current, past, lambda version: _relative(lake, version)
        )
        _write(lake, final, statements)
    follow(lake, everything.snapshots, everything.versions)
    return final


def _write(lake: Path, final: Path, statements: Sequence[str]) -> None:
    temporary = temporary_name(final)
    with explained(final):
        try:
            with duckdb.connect() as connection:
                _search_in(connection, lake)
                connection.execute(
                    f"ATTACH {_quoted(str(temporary))} AS catalog "
                    f"(STORAGE_VERSION {_quoted(STORAGE_VERSION)})"
                )
                connection.execute("USE catalog")
                connection.execute("BEGIN")
                for statement in statements:
                    connection.execute(statement)
                connection.execute("COMMIT")
                connection.execute("USE memory")
                connection.execute("DETACH catalog")
            fsync_path(temporary)
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
            Path(f"{temporary}.wal").unlink(missing_ok=True)


def open_catalog(lake: Path) -> duckdb.DuckDBPyConnection:
    """The catalogue, read-only, with the one setting that its relative paths need."""
    connection = duckdb.connect(str(catalog_path(lake)), read_only=True)
    _search_in(connection, lake)
    return connection


def _search_in(connection: duckdb.DuckDBPyConnection, lake: Path) -> None:
    if "," in str(lake):
        raise LakeError(f"DuckDB takes a comma for the end of a path; move {lake} to another name")
    connection.execute(f"SET file_search_path = {_quoted(str(lake))}")


def _relative(lake: Path, version: TableVersion) -> list[str]:
    """Paths in the lake, as patterns: these DuckDB looks up in `file_search_path` alone.

    A plain path it looks up first where it runs, which may be the folder of another lake.
    """
    paths = (str(place.relative_to(lake)) for place in version.places)
    return [f"[{path[0]}]{path[1:]}" for path in paths]


def _is_fetched(version: TableVersion) -> bool:
    return all(place.exists() for place in version.places)


def _state(lake: Path) -> tuple[list[Snapshot], list[TableVersion], Past]:
    """Current snapshots, the versions in them, and what came before."""
    names = benchmarks_in(lake)
    current = [s for name in names if (s := current_snapshot(lake, name)) is not None]
    versions = [version for snapshot in current for version in versions_of(lake, snapshot)]
    return current, versions, _past(lake, names)


def catalog_for(lake: Path, sql: str) -> Path:
    """The catalogue to run a query on; the tables that it names are fetched and compared first."""
    views = views_in(sql)
    versions = current_versions(lake)
    if "lake/leaderboard" in views:
        views |= {f"lake/{name}" for name in SOURCES}
    if "lake/metrics_by_build" in views:
        past = _past(lake, benchmarks_in(lake)).versions.values()
        versions += [version for version in past if version.manifest.table == METRICS.name]
    for version in versions:
        table = version.manifest.table
        if {version.name, f"lake/{table}", table} & views:
            _ = version.files
    return catalog_path(lake) if bucket_of(lake) is None else refresh_catalog(lake)


def views_in(sql: str) -> set[str]:
    """What a query may read, as schema/view or view; of one that is wrong, running it says what."""
    views: set[str] = set()
    with duckdb.connect() as connection, suppress(duckdb.Error):
        for statement in connection.extract_statements(sql):
            try:
                names = connection.get_table_names(statement.query, qualified=True)
            except duckdb.Error:  # PIVOT, for one, is taken for several statements
                names = set(re.findall(r"[\w.]+", statement.query))
            for name in names:
                if match := _NAME.match(name):  # an alias follows it, or a sample
                    views.add("/".join(match[0].replace('"', "").lower().split(".")[-2:]))
    return views


def _push_sql(bucket: Bucket, lake: Path) -> tuple[list[Snapshot], list[TableVersion], Past]:
    """Put `catalog.sql` and give what is in it.

    Whoever wrote it since we read the pointers makes us read them again: it never goes back.
    """

    def place(version: TableVersion) -> list[str]:
        manifest = version.manifest
        prefix = version_prefix(manifest.benchmark, manifest.table, manifest.key)
        return [f"{bucket.address}/{prefix}/{part.file}" for part in manifest.parts]

    for _ in range(SWAPS):
        before = bucket.get(CATALOG_SQL)
        current, versions, past = _state(lake)
        schemas = at_once(lambda version: _schema(bucket, version), versions)
        statements = _all_statements(versions, schemas, current, past, place)
        data = "".join(f"{line};\n" for line in statements).encode()
        if before is not None and before.data == data:
            return current, versions, past
        if bucket.replace(CATALOG_SQL, data, before):
            return current, versions, past
    raise LakeError(
        f"{bucket.address}/{CATALOG_SQL} is written by others all the time; run the same command "
        "again. The tables themselves are committed."
    )


def version_schema(lake: Path, version: TableVersion) -> pa.Schema:
    """The columns of a version's files."""
    bucket = bucket_of(lake)
    return _local_schema(version) if bucket is None else _schema(bucket, version)


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
