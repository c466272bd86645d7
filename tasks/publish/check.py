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
    """One sentence per problem. Contents are checked only if the sums are right."""
    installed = importlib.util.find_spec("mlcroissant") is not None
    publication = published_in(folder)
    if publication is None:
        raise SourceError(f"there is nothing in {folder}; name a published folder")
    if problems := differences(str(folder)):
        return Checked(publication, problems, installed)
    croissant = json.loads((folder / CROISSANT).read_bytes())
    record_sets = {one["@id"]: one for one in croissant["recordSet"]}
    sums = {one["@id"]: one["sha256"] for one in croissant["distribution"] if "sha256" in one}
    digests = {file.path: file.sha256 for table in publication.tables for file in table.files}
    if sums != digests:
        problems.append(f"{CROISSANT} and manifest.json list other files or digests")
    for table in publication.tables:
        problems += _table_problems(folder, table, record_sets.get(table.name))
    if installed and not problems:
        problems = _croissant_problems(folder)
    return Checked(publication, problems, installed)


def _table_problems(
    folder: Path, table: PublishedTable, record_set: dict[str, Any] | None
) -> list[str]:
    problems = []
    schemas = []
    for file in table.files:
        parquet = pq.read_metadata(folder / file.path)
        schemas.append(parquet.schema.to_arrow_schema())
        if parquet.num_rows != file.rows:
            problems.append(f"{file.path} has {parquet.num_rows} rows, expected {file.rows}")
    if any(not schema.equals(schemas[0]) for schema in schemas):
        problems.append(f"files of {table.name} have different columns")
    if record_set is None:
        return [*problems, f"{CROISSANT} does not describe the table {table.name}"]
    types_described = {field["name"]: _declared_type(field) for field in record_set["field"]}
    types_stored = {field.name: _is(field, types_described) for field in schemas[0]}
    if types_described != types_stored:
        wrong = sorted(
            name
            for name in types_described.keys() | types_stored.keys()
            if types_described.get(name) != types_stored.get(name)
        )
        problems.append(f"{CROISSANT} is wrong about column {wrong[0]} of {table.name}")
    return problems


def _declared_type(field: dict[str, Any]) -> tuple[str, list[int]]:
    shape = field.get("arrayShape", "")
    return field["dataType"], [int(length) for length in shape.split(",") if length]


def _is(field: pa.Field, described: dict[str, tuple[str, list[int]]]) -> tuple[str, list[int]]:
    picture = is_bytes(field.type) and described.get(field.name, ("",))[0] == "sc:ImageObject"
    return data_type(field.type, picture)


def _croissant_problems(folder: Path) -> list[str]:
    import mlcroissant

    try:
        mlcroissant.Dataset(str(folder / CROISSANT))
    except mlcroissant.ValidationError as error:
        return [f"mlcroissant refuses {CROISSANT}: {error}"]
    return []
