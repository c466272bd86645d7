"""Checking a published folder with more than sums: enters a folder, leaves sentences.

Sums and key as `verify.py` checks them; then the Parquet footers must say what `manifest.json` and
`croissant.json` say of rows, columns and types; then mlcroissant, where it is installed, must find
no error in `croissant.json`.
"""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import SourceError
from tasks.publish.croissant import data_type, is_bytes
from tasks.publish.folder import CROISSANT, published_in
from tasks.publish.record import Publication, PublishedTable
from tasks.publish.verify import differences


@dataclass(frozen=True)
class Checked:
    publication: Publication  # what the folder says it is
    problems: list[str]
    by_mlcroissant: bool  # whether mlcroissant was there to check croissant.json too


def check_published(folder: Path) -> Checked:
    """One sentence per problem; those of a later kind only if there is none of an earlier."""
    installed = importlib.util.find_spec("mlcroissant") is not None
    publication = published_in(folder)
    if publication is None:
        raise SourceError(f"there is nothing in {folder}; name a published folder")
    if found := differences(str(folder)):
        return Checked(publication, found, installed)
    described = json.loads((folder / CROISSANT).read_bytes())
    record_sets = {one["@id"]: one for one in described["recordSet"]}
    sums = {one["@id"]: one["sha256"] for one in described["distribution"] if "sha256" in one}
    listed = {file.path: file.sha256 for table in publication.tables for file in table.files}
    if sums != listed:
        found.append(f"{CROISSANT} and manifest.json list other files or digests")
    for table in publication.tables:
        found += _table_problems(folder, table, record_sets.get(table.name))
    if installed and not found:
        found = _croissant_problems(folder)
    return Checked(publication, found, installed)


def _table_problems(
    folder: Path, table: PublishedTable, record_set: dict[str, Any] | None
) -> list[str]:
    found = []
    schemas = []
    for file in table.files:
        parquet = pq.read_metadata(folder / file.path)
        schemas.append(parquet.schema.to_arrow_schema())
        if parquet.num_rows != file.rows:
            found.append(f"{file.path} has {parquet.num_rows} rows, expected {file.rows}")
    if any(not schema.equals(schemas[0]) for schema in schemas):
        found.append(f"files of {table.name} have different columns")
    if record_set is None:
        return [*found, f"{CROISSANT} does not describe the table {table.name}"]
    said = {field["name"]: _said(field) for field in record_set["field"]}
    are = {field.name: _is(field, said) for field in schemas[0]}
    if said != are:
        wrong = sorted(name for name in said.keys() | are.keys() if said.get(name) != are.get(name))
        found.append(f"{CROISSANT} is wrong about column {wrong[0]} of {table.name}")
    return found


def _said(field: dict[str, Any]) -> tuple[str, list[int]]:
    shape = field.get("arrayShape", "")
    return field["dataType"], [int(length) for length in shape.split(",") if length]


def _is(field: pa.Field, said: dict[str, tuple[str, list[int]]]) -> tuple[str, list[int]]:
    picture = is_bytes(field.type) and said.get(field.name, ("",))[0] == "sc:ImageObject"
    return data_type(field.type, picture)


def _croissant_problems(folder: Path) -> list[str]:
    import mlcroissant

    try:
        mlcroissant.Dataset(str(folder / CROISSANT))
    except mlcroissant.ValidationError as error:
        return [f"mlcroissant refuses {CROISSANT}: {error}"]
    return []
