"""Parquet as analysts like it: explicit schema, sorted, the same bytes each time.

zstd; dictionary on strings, DELTA_BINARY_PACKED on integers, BYTE_STREAM_SPLIT on floats; page
index and page checksums; sorting columns declared; descriptions and units in the Arrow schema.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import LakeError
from schemas.manifest import PartFile
from schemas.table import Table
from storage.filehash import sha256_file
from storage.verified import CURE

WRITER_VERSION = 2
"""Raise when the same rows give other bytes: it is in every content key. 2: page checksums."""
LARGEST_GROUP_BYTES = 64 << 20


def _leaf(field: pa.Field) -> tuple[str, pa.DataType]:
    path, type_ = field.name, field.type
    while (
        pa.types.is_list(type_)
        or pa.types.is_fixed_size_list(type_)
        or pa.types.is_large_list(type_)
    ):
        path, type_ = f"{path}.list.{type_.value_field.name}", type_.value_type
    return path, type_


def _encodings(schema: pa.Schema) -> tuple[list[str], dict[str, str]]:
    dictionary, encodings = [], {}
    for field in schema:
        path, type_ = _leaf(field)
        if pa.types.is_string(type_) or pa.types.is_large_string(type_):
            dictionary.append(path)
        elif pa.types.is_integer(type_) and type_.bit_width >= 32:
            encodings[path] = "DELTA_BINARY_PACKED"
        elif pa.types.is_floating(type_) and type_.bit_width >= 32:
            encodings[path] = "BYTE_STREAM_SPLIT"
    return dictionary, encodings


def _group_starts(frame: pl.DataFrame, table: Table, bytes_per_row: float) -> list[int]:
    """Row numbers at which a row group starts, and the end; without rows there is no group."""
    most = max(1, min(table.row_group_rows, int(LARGEST_GROUP_BYTES / max(bytes_per_row, 1))))
    edges = [0, frame.height]
    if table.row_group_by is not None and frame.height:
        changes = (frame[table.row_group_by] != frame[table.row_group_by].shift(1)).arg_true()
        edges += changes.to_list()
    starts: list[int] = []
    edges = sorted(set(edges))
    for start, stop in itertools.pairwise(edges):
        starts += range(start, stop, most)
    return [*starts, frame.height]


def write_parquet(frame: pl.DataFrame, table: Table, path: Path) -> PartFile:
    """Write rows that `table.check` has passed (so: conforming and sorted by key)."""
    schema = table.arrow_schema
    data = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(schema)
    dictionary, encodings = _encodings(schema)
    starts = _group_starts(frame, table, data.nbytes / max(data.num_rows, 1))
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=dictionary,
        column_encoding=encodings,
        write_page_index=True,
        write_page_checksum=True,
        sorting_columns=pq.SortingColumn.from_ordering(
            schema, [(name, "ascending") for name in table.key]
        ),
        version="2.6",
        data_page_version="1.0",
    ) as writer:
        for start, stop in itertools.pairwise(starts):
            writer.write_table(data.slice(start, stop - start), row_group_size=stop - start)
    keys = frame.select(table.key)
    return PartFile(
        table=table.name,
        file=path.name,
        sha256=sha256_file(path),
        bytes=path.stat().st_size,
        rows=frame.height,
        schema_version=table.version,
        first=list(keys.row(0)) if frame.height else None,
        last=list(keys.row(-1)) if frame.height else None,
    )


@contextmanager
def opened_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """To read row group by row group. Each page is compared with its checksum on the way.

    Page checksums cover no headers and no footer: take the path from `Part.path` or
    `TableVersion.files`, which compare the whole file once.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"cannot read {path}: {error}; {CURE}") from error


def read_parquet(paths: list[Path], columns: list[str] | None = None) -> pl.DataFrame:
    """Rows of the files in the order given."""
    try:
        return pl.concat([pl.read_parquet(path, columns=columns, glob=False) for path in paths])
    except (OSError, pl.exceptions.ComputeError) as error:
        raise LakeError(f"cannot read {paths[0].parent}: {error}; {CURE}") from error


def filled_columns(path: Path) -> set[str]:
    """Columns that hold anything but nulls, by the file's own statistics."""
    metadata = pq.read_metadata(path)
    filled = set()
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            statistics = column.statistics
            if statistics is None or statistics.null_count < column.num_values:
                filled.add(column.path_in_schema.partition(".")[0])
    return filled
