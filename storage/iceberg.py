"""The lake's tables in an Iceberg catalogue: the same Parquet files registered, nothing copied.

Enters: the snapshots that `novelty history` lists. Leaves: a namespace for each benchmark, a table
for each of its tables, and for each published version one Iceberg snapshot whose summary names ours
(`novelty.snapshot`, `novelty.number`). All of it is derived: `register` adds what was published,
expires what `gc` took, and makes a table anew where that is not enough: after a move (Iceberg has
whole paths), or when a column changed its type.

The catalogue is SQLite in `<lake>/iceberg`, or one that pyiceberg's own settings name. Once
registered, a lake keeps it up to date: `refresh_catalog` calls `follow`.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from schemas.errors import ConfigError, LakeError, NoveltyError
from schemas.extras import require_library
from schemas.manifest import Snapshot
from storage.atomic import step, write_bytes
from storage.layout import iceberg_path, lake_address
from storage.locks import locked
from storage.objects import bucket_of
from storage.remote import version_prefix
from storage.tables import TableVersion

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table as IcebergTable

log = logging.getLogger(__name__)

RECORD = "registered.json"
VERSION, SNAPSHOT, NUMBER = "novelty.version", "novelty.snapshot", "novelty.number"
# Other engines must not delete our files when they drop a table or expire its snapshots.
PROPERTIES = {"gc.enabled": "false"}
# What a bucket's address and keys are called there.
S3 = {
    "AWS_ENDPOINT_URL": "s3.endpoint",
    "AWS_ACCESS_KEY_ID": "s3.access-key-id",
    "AWS_SECRET_ACCESS_KEY": "s3.secret-access-key",
    "AWS_SESSION_TOKEN": "s3.session-token",
    "AWS_REGION": "s3.region",
    "AWS_DEFAULT_REGION": "s3.region",
}


@dataclass(frozen=True)
class Registered:
    """What was done to one table."""

    name: str
    versions: int
    """Iceberg snapshots that it has now."""
    added: int
    expired: int
    anew: bool


@dataclass(frozen=True)
class Published:
    """A version of a table with the first of our snapshots that shows it."""

    snapshot: Snapshot
    version: TableVersion

    @property
    def summary(self) -> dict[str, str]:
        return {
            VERSION: self.version.manifest.key,
            SNAPSHOT: self.snapshot.name,
            NUMBER: str(self.snapshot.number),
        }


def published_tables(
    snapshots: Sequence[Snapshot], versions: Mapping[tuple[str, str, str], TableVersion]
) -> dict[str, list[Published]]:
    """The versions of each `benchmark/table` in the order of their publication.

    A snapshot that left a table as it was adds nothing to its history.
    """
    histories: dict[str, list[Published]] = {}
    for snapshot in snapshots:
        for table, key in sorted(snapshot.tables.items()):
            version = versions.get((snapshot.benchmark, table, key))
            row = histories.setdefault(f"{snapshot.benchmark}/{table}", [])
            if version is not None and (not row or row[-1].version.manifest.key != key):
                row.append(Published(snapshot, version))
    return {name: row for name, row in histories.items() if row}


def register(lake: Path, catalog: str | None = None) -> list[Registered]:
    """Bring the Iceberg catalogue in line with the lake; `catalog` is a name in pyiceberg's
    settings, and stays in use until another is named."""
    from storage.catalog import lake_past

    require_library("pyiceberg")
    with locked(lake, "iceberg", 60.0, busy="the Iceberg catalogue is being written"):
        record = _read_record(lake)
        if catalog is None and record is not None:
            catalog = record["catalog"]
        histories = published_tables(*lake_past(lake))
        moved = record is None or record["lake"] != _address(lake)
        if moved and catalog is None:
            shutil.rmtree(iceberg_path(lake), ignore_errors=True)
        elif record is not None and record["catalog"] != catalog:
            record = None
        with _explained(lake, catalog):
            iceberg_catalog = open_catalog(lake, catalog)
            results = [
                _sync(iceberg_catalog, lake, name, row, moved) for name, row in histories.items()
            ]
            for name in set(record["tables"] if record else ()) - set(histories):
                _drop(iceberg_catalog, lake, name, catalog is None)
        _write_record(lake, catalog, histories)
    return results


@contextlib.contextmanager
def _explained(lake: Path, catalog: str | None) -> Iterator[None]:
    """Whatever pyiceberg, its database or its store raises, as a sentence."""
    try:
        yield
    except (NoveltyError, PermissionError):
        raise
    except Exception as error:
        cure = f"look at the catalogue {catalog}" if catalog else f"remove {iceberg_path(lake)}"
        raise LakeError(
            f"the Iceberg catalogue cannot be written ({_first_line(error)}); {cure} and run "
            "`novelty iceberg`: it holds nothing but what the lake says"
        ) from error


def follow(lake: Path, snapshots: Sequence[Snapshot], versions: Mapping[Any, TableVersion]) -> None:
    """After a change of a lake that is registered: register it again; trouble is one line."""
    try:
        record = _read_record(lake)
        if record is None or record["lake"] != _address(lake):
            return
        if record["tables"] != _keys(published_tables(snapshots, versions)):
            register(lake)
    except Exception as error:  # a catalogue beside the lake must not fail a build
        log.warning(
            f"novelty: the Iceberg catalogue is behind the lake ({_first_line(error)}); `novelty "
            "iceberg` registers it again"
        )


def open_catalog(lake: Path, catalog: str | None = None) -> "Catalog":
    """The lake's own catalogue, or that of a name in pyiceberg's settings."""
    from pyiceberg.catalog import load_catalog

    keys = {
        property_name: os.environ[name] for name, property_name in S3.items() if name in os.environ
    }
    settings = keys if bucket_of(lake) is not None else {}
    if catalog is not None:
        try:
            return load_catalog(catalog, **settings)
        except Exception as error:
            raise ConfigError(
                f"Iceberg catalogue {catalog!r} does not open ({_first_line(error)}); describe it "
                "in .pyiceberg.yaml or by PYICEBERG_CATALOG__NAME__URI"
            ) from error
    folder = iceberg_path(lake)
    folder.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{folder / 'catalog.db'}"
    return load_catalog("lake", type="sql", uri=uri, warehouse=_uri(folder), **settings)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


# ---------------------------------------------------------------- one table


def _sync(
    catalog: "Catalog", lake: Path, name: str, publications: Sequence[Published], moved: bool
) -> Registered:
    """Add the versions that are missing, expire those that are gone; or begin anew."""
    from pyiceberg.exceptions import NoSuchTableError, ResolveError, ValidationError

    namespace, _, table = name.partition("/")
    identifier = f"{namespace}.{table}"
    catalog.create_namespace_if_not_exists(namespace)
    keys = [one.version.manifest.key for one in publications]
    anew = False
    try:
        iceberg_table = catalog.load_table(identifier)
        known = _registered_keys(iceberg_table)
        kept = [key for _, key in known if key in keys]
        if moved or not kept or kept != keys[: len(kept)] or known[-1][1] not in keys:
            raise NoSuchTableError
    except NoSuchTableError:
        anew = catalog.table_exists(identifier)
        if anew:
            catalog.drop_table(identifier)
        iceberg_table, known, kept = _create(catalog, lake, identifier, publications[0]), [], []
    before = len(kept)
    for one in publications[len(kept) :]:
        try:
            _append(iceberg_table, lake, one)
        except (ResolveError, ValidationError):  # a column of another type: history begins here
            catalog.drop_table(identifier)
            iceberg_table, anew, before = _create(catalog, lake, identifier, one), True, 0
            _append(iceberg_table, lake, one)
        step("iceberg_registered")
    expired = [number for number, key in known if key not in keys]
    if expired and not anew:
        iceberg_table.maintenance.expire_snapshots().by_ids(expired).commit()
    count = len(iceberg_table.snapshots())
    return Registered(name, count, count - before, len(expired), anew)


def _registered_keys(table: "IcebergTable") -> list[tuple[int, str]]:
    """Ids of Iceberg snapshots with the versions that they show, the oldest first."""
    return [
        (one.snapshot_id, one.summary.additional_properties.get(VERSION, "") if one.summary else "")
        for one in sorted(table.snapshots(), key=lambda one: one.sequence_number or 0)
    ]


def _create(catalog: "Catalog", lake: Path, identifier: str, first: Published) -> "IcebergTable":
    return catalog.create_table(identifier, schema=_schema(lake, first), properties=PROPERTIES)


def _schema(lake: Path, one: Published) -> pa.Schema:
    """That of the files, where every column may be absent: another version may lack it."""
    from storage.catalog import version_schema

    schema = version_schema(lake, one.version).remove_metadata()
    return pa.schema([field.with_nullable(True).remove_metadata() for field in schema])


def _append(table: "IcebergTable", lake: Path, one: Published) -> None:
    """One Iceberg snapshot that has the files of this version and none of the version before."""
    from pyiceberg.io.pyarrow import parquet_files_to_data_files
    from pyiceberg.table import TableProperties

    with table.transaction() as change:
        with change.update_schema() as schema:
            schema.union_by_name(_schema(lake, one))
        names = change.table_metadata.schema().name_mapping.model_dump_json()
        change.set_properties({TableProperties.DEFAULT_NAME_MAPPING: names})
        files = parquet_files_to_data_files(
            table.io, change.table_metadata, iter(_addresses(lake, one.version))
        )
        old = [task.file for task in table.scan().plan_files()]
        with change.update_snapshot(snapshot_properties=one.summary).overwrite() as snapshot:
            for file in old:
                snapshot.delete_data_file(file)
            for file in files:
                snapshot.append_data_file(file)


def _drop(catalog: "Catalog", lake: Path, name: str, in_lake: bool) -> None:
    """Forget a table; never its data, which is the lake's."""
    namespace, _, table = name.partition("/")
    if catalog.table_exists(f"{namespace}.{table}"):
        catalog.drop_table(f"{namespace}.{table}")
    if in_lake:
        shutil.rmtree(iceberg_path(lake) / namespace / table, ignore_errors=True)


def _addresses(lake: Path, version: TableVersion) -> Iterator[str]:
    """Where Iceberg finds the parts; those of a folder are compared with their digests first."""
    bucket = bucket_of(lake)
    if bucket is None:
        yield from map(_uri, version.files)
        return
    manifest = version.manifest
    prefix = version_prefix(manifest.benchmark, manifest.table, manifest.key)
    yield from (f"{bucket.address}/{prefix}/{part.file}" for part in manifest.parts)


def _uri(path: Path) -> str:
    """As pyiceberg reads it: it takes a quoted blank for three characters."""
    return f"file://{path}"


# ---------------------------------------------------------------- what was registered


def _address(lake: Path) -> str:
    return lake_address(lake) if bucket_of(lake) is not None else str(lake)


def _keys(tables: Mapping[str, Sequence[Published]]) -> dict[str, list[str]]:
    return {name: [one.version.manifest.key for one in row] for name, row in tables.items()}


def _read_record(lake: Path) -> dict[str, Any] | None:
    """None where the lake was never registered."""
    path = iceberg_path(lake) / RECORD
    try:
        record = json.loads(path.read_bytes())
        return {name: record[name] for name in ("lake", "catalog", "tables")}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise LakeError(
            f"{path} is damaged; remove {path.parent} and run `novelty iceberg`: it holds nothing "
            "but what the lake says"
        ) from error


def _write_record(
    lake: Path, catalog: str | None, tables: Mapping[str, Sequence[Published]]
) -> None:
    record = {"lake": _address(lake), "catalog": catalog, "tables": _keys(tables)}
    path = iceberg_path(lake) / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, json.dumps(record, indent=1).encode())
