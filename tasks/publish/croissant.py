"""`croissant.json`: the tables in the Croissant 1.1 vocabulary (JSON-LD), for machines.

Enters a publication, its tables and which binary columns are pictures; leaves a dictionary. Each
Parquet file is a FileObject with its SHA-256, the files of a table are a FileSet, a table is a
RecordSet with one field a column. The vocabulary has no type for raw bytes: they are `sc:Text`,
which mlcroissant hands over as bytes, and the description says so. References between tables are
words only: mlcroissant would join the tables on them whenever it reads one.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from schemas.errors import ConfigError
from schemas.table import Column, Table
from tasks.publish.card import citation, pretty_name, what_it_is
from tasks.publish.record import Publication, PublishedTable

NO_LICENCE = "No licence was given. Check the terms of each source before you use the tables."
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
} | {
    word: f"cr:{word}"
    for word in (
        "arrayShape",
        "citeAs",
        "column",
        "containedIn",
        "equivalentProperty",
        "extract",
        "field",
        "fileObject",
        "fileProperty",
        "fileSet",
        "format",
        "includes",
        "isArray",
        "isLiveDataset",
        "jsonPath",
        "key",
        "md5",
        "parentField",
        "path",
        "recordSet",
        "references",
        "regex",
        "repeated",
        "replace",
        "samplingRate",
        "separator",
        "source",
        "subField",
        "transform",
    )
}
_NUMBERS = {
    pa.int8(): "cr:Int8",
    pa.int16(): "cr:Int16",
    pa.int32(): "cr:Int32",
    pa.int64(): "cr:Int64",
    pa.uint8(): "cr:UInt8",
    pa.uint16(): "cr:UInt16",
    pa.uint32(): "cr:UInt32",
    pa.uint64(): "cr:UInt64",
    pa.float16(): "cr:Float16",
    pa.float32(): "cr:Float32",
    pa.float64(): "cr:Float64",
    pa.bool_(): "sc:Boolean",
}


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def data_type(kind: pa.DataType, picture: bool = False) -> tuple[str, list[int]]:
    """Croissant type of the innermost values, and the array's shape (-1: any length)."""
    shape = []
    while _is_list(kind):
        shape.append(kind.list_size if pa.types.is_fixed_size_list(kind) else -1)
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind in _NUMBERS:
        return _NUMBERS[kind], shape
    if is_bytes(kind):
        return ("sc:ImageObject" if picture else "sc:Text"), shape
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return "sc:Text", shape
    if pa.types.is_date(kind):
        return "sc:Date", shape
    if pa.types.is_timestamp(kind):
        return "sc:DateTime", shape
    if pa.types.is_time(kind):
        return "sc:Time", shape
    raise ConfigError(f"Croissant has no type for {kind}; leave the table out with --tables")


def _meaning(column: Column, picture: bool) -> str:
    phrases = [column.description.rstrip(".")]
    if column.unit:
        phrases.append(f"Unit: {column.unit}")
    if column.allowed:
        phrases.append(f"One of: {', '.join(column.allowed)}")
    if is_bytes(column.type) and not picture:
        phrases.append("Raw bytes")
    if column.nullable:
        phrases.append("May be null")
    return ". ".join(part for part in phrases if part) + "."


def _field(table: Table, column: Column, picture: bool) -> dict[str, Any]:
    kind, shape = data_type(column.type, picture)
    field: dict[str, Any] = {
        "@type": "cr:Field",
        "@id": f"{table.name}/{column.name}",
        "name": column.name,
        "description": _meaning(column, picture),
        "dataType": kind,
    }
    if shape:
        field |= {"isArray": True, "arrayShape": ",".join(str(length) for length in shape)}
    field["source"] = {
        "fileSet": {"@id": f"{table.name}-files"},
        "extract": {"column": column.name},
    }
    return field


def _record_set(table: Table, pictures: set[str]) -> dict[str, Any]:
    description = table.description
    for reference in table.references:
        description += (
            f" {', '.join(reference.columns)} stands for {', '.join(reference.to)} of the table "
            f"{reference.table}."
        )
    record_set = {
        "@type": "cr:RecordSet",
        "@id": table.name,
        "name": table.name,
        "description": description,
        "field": [_field(table, column, column.name in pictures) for column in table.columns],
    }
    if table.key:
        record_set["key"] = [{"@id": f"{table.name}/{name}"} for name in table.key]
    return record_set


def _distribution(table: PublishedTable) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = [
        {
            "@type": "cr:FileObject",
            "@id": file.path,
            "name": file.path.rpartition("/")[2],
            "contentUrl": file.path,
            "contentSize": f"{file.bytes} B",
            "encodingFormat": "application/x-parquet",
            "sha256": file.sha256,
        }
        for file in table.files
    ]
    together = {
        "@type": "cr:FileSet",
        "@id": f"{table.name}-files",
        "name": f"{table.name}-files",
        "description": f"The Parquet files of the table {table.name}.",
        "encodingFormat": "application/x-parquet",
        "includes": f"data/{table.name}/*.parquet",
    }
    return [*files, together]


def croissant(
    publication: Publication, tables: list[Table], pictures: Mapping[str, set[str]]
) -> dict[str, Any]:
    """The whole description; `pictures` names the picture columns of a table."""
    name = pretty_name(publication.benchmark)
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": name,
        "description": what_it_is(publication.benchmark),
        "keywords": ["novelty detection", "open world", publication.benchmark],
        "license": publication.licence or NO_LICENCE,
        # Versions must be MAJOR.MINOR.PATCH; the key may follow as what semver calls build data.
        "version": publication.version or f"0.0.0+{publication.key}",
        "datePublished": publication.date,
        "citeAs": citation(publication),
        "distribution": [file for table in publication.tables for file in _distribution(table)],
        "recordSet": [_record_set(table, pictures[table.name]) for table in tables],
    }
