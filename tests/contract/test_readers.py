"""A reader with no code of ours opens every table at its stable path."""

import duckdb
import pandas as pd
import polars as pl
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.toy import build_toy, write_raw


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    root = tmp_path_factory.mktemp("lake")
    write_raw(root / "raw")
    build_toy(root / "lake", root / "raw")
    return root / "lake"


TABLES = ["readings", "files", "totals", "quarantine"]


@pytest.mark.parametrize("table", TABLES)
def test_every_reader_sees_the_same_rows(lake, table, tmp_path):
    folder = lake / "toy" / table / "current"
    pattern = str(folder / "*.parquet")
    rows = pl.read_parquet(pattern).height
    assert rows > 0
    assert ds.dataset(folder, format="parquet").count_rows() == rows
    assert pq.read_table(folder).num_rows == rows
    assert len(pd.read_parquet(folder)) == rows
    assert duckdb.sql(f"select count(*) from '{pattern}'").fetchall() == [(rows,)]
    with duckdb.connect(str(lake / "catalog.duckdb"), read_only=True) as connection:
        connection.sql(f"SET file_search_path = '{lake}'")
        assert connection.sql(f"select count(*) from toy.{table}").fetchall() == [(rows,)]


@pytest.mark.parametrize("table", TABLES)
def test_datasets_library(lake, table, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import load_dataset

    files = str(lake / "toy" / table / "current" / "*.parquet")
    loaded = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))
    assert loaded.num_rows == pl.read_parquet(files).height


def test_descriptions_reach_the_reader(lake):
    (file, *_) = sorted((lake / "toy" / "readings" / "current").glob("*.parquet"))
    schema = pq.read_schema(file)
    assert schema.field("value").metadata == {b"description": b"Value read", b"unit": b"metre"}
    assert schema.metadata[b"sort_key"] == b"file,line"
    with duckdb.connect(str(lake / "catalog.duckdb"), read_only=True) as connection:
        comments = connection.sql(
            "select column_name, comment from duckdb_columns() "
            "where schema_name = 'toy' and table_name = 'readings'"
        ).fetchall()
    assert ("value", "Value read [metre]") in comments


def test_files_declare_order_encodings_and_index(lake):
    (file, *_) = sorted((lake / "toy" / "readings" / "current").glob("*.parquet"))
    group = pq.read_metadata(file).row_group(0)
    assert [c.column_index for c in group.sorting_columns] == [0, 1]
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert columns["value"].compression == "ZSTD"
    assert "BYTE_STREAM_SPLIT" in columns["value"].encodings
    assert "DELTA_BINARY_PACKED" in columns["line"].encodings
    assert columns["file"].has_dictionary_page
    assert columns["value"].has_offset_index and columns["value"].has_column_index
