"""People without this project read a publication: datasets, mlcroissant, polars, pandas, DuckDB."""

import datetime
import io
import json
import shutil
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from PIL import Image

from flows.cli import main
from schemas.errors import ConfigError
from schemas.table import Column, Table
from schemas.tables import benchmark_names, tables_of
from tasks.publish.check import check_published
from tasks.publish.croissant import data_type
from tasks.publish.folder import publish
from tests.publish.lakes import (
    EXPECTED,
    KINDS,
    NONE,
    PNG,
    any_rows,
    kinds_rows,
    put_table,
)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("readers")
    put_table(root / "lake", "odd", KINDS, kinds_rows())
    put_table(root / "lake", "odd", NONE, NONE.empty())
    publish(root / "lake", "odd", root / "out", date="2026-11-16", version="1.0.0", licence="MIT")
    return root / "out"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return str(tmp_path / "cache")


def fields_of(folder: Path, table: str) -> dict[str, dict]:
    described = json.loads((folder / "croissant.json").read_text())
    (one,) = [one for one in described["recordSet"] if one["@id"] == table]
    return {field["name"]: field for field in one["field"]}


def test_croissant_describes_every_kind_of_column(published):
    fields = fields_of(published, "kinds")
    assert {
        name: (field["dataType"], field.get("arrayShape")) for name, field in fields.items()
    } == EXPECTED
    assert {name for name, field in fields.items() if field.get("isArray")} == {
        "names",
        "vector",
        "grid",
    }
    assert fields["exact"]["description"] == "Exact number. Unit: metre."
    assert fields["small"]["description"] == "Small number. May be null."
    assert fields["raw"]["description"] == "Bytes of no kind. Raw bytes."
    assert fields_of(published, "none")["vector"]["arrayShape"] == "3"


def test_type_without_a_croissant_name_is_refused_before_anything_is_written(tmp_path):
    table = Table(
        name="times",
        description="Durations.",
        columns=(Column("id", pa.int32(), "Id"), Column("long", pa.duration("us"), "How long")),
        key=("id",),
    )
    rows = pl.DataFrame({"id": [1], "long": [datetime.timedelta(seconds=1)]})
    put_table(tmp_path / "lake", "odd", table, rows.cast(table.polars_schema))
    with pytest.raises(ConfigError, match="no type for duration"):
        publish(tmp_path / "lake", "odd", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake"]
    assert data_type(pa.time64("us")) == ("sc:Time", [])
    assert data_type(pa.dictionary(pa.int8(), pa.string())) == ("sc:Text", [])
    assert data_type(pa.null()) == ("sc:Text", [])


def test_mlcroissant_has_nothing_to_say_against_it(published, caplog):
    import mlcroissant

    with caplog.at_level("WARNING"):
        dataset = mlcroissant.Dataset(str(published / "croissant.json"))
    assert not dataset.metadata.issues.errors and not dataset.metadata.issues.warnings
    assert caplog.text == ""
    assert [one.uuid for one in dataset.metadata.record_sets] == ["kinds", "none"]


def test_mlcroissant_reads_the_values(published):
    import mlcroissant

    dataset = mlcroissant.Dataset(str(published / "croissant.json"))
    assert list(dataset.records("none")) == []
    first, second, third = (
        {name.removeprefix("kinds/"): value for name, value in record.items()}
        for record in dataset.records("kinds")
    )
    assert (first["id"], third["large"], third["exact"]) == (b"row0", 2**40 + 2, 0.2)
    assert [second[name] for name in ("small", "share", "yes", "day", "moment", "names")] == (
        [None] * 6
    )
    assert third["small"] == 2 and third["yes"] and third["nothing"] is None
    assert third["names"] == [b"a", "ü".encode()]
    assert third["vector"] == [1.0, 2.0, 2.0] and third["grid"] == [[2, 1], [2, 1]]
    assert third["day"] == pd.Timestamp("2026-02-03")
    assert third["moment"] == pd.Timestamp("2026-02-03T04:05:06Z")
    assert third["picture"].size == (2, 1) and first["picture"] is None
    assert third["raw"] == b"\x00\xff\x00\xff"


def test_datasets_reads_the_configuration_of_a_table(published, offline):
    import datasets

    rows = kinds_rows()
    assert datasets.get_dataset_config_names(str(published)) == ["kinds"]
    loaded = datasets.load_dataset(str(published), "kinds", split="train", cache_dir=offline)
    assert loaded.num_rows == 3 and loaded.column_names == rows.columns
    assert loaded[2]["names"] == ["a", "ü"] and loaded[1]["names"] is None
    assert loaded[2]["grid"] == [[2, 1], [2, 1]] and loaded[2]["vector"] == [1.0, 2.0, 2.0]
    assert loaded.features["vector"].length == 3
    assert loaded.cast_column("picture", datasets.Image())[2]["picture"].size == (2, 1)


def test_table_without_rows_is_there_for_the_other_readers(published):
    """`datasets` refuses a split without rows, so the card offers none and says so."""
    assert "not for `datasets`: `none`." in (published / "README.md").read_text()
    pattern = str(published / "data" / "none" / "*.parquet")
    assert pl.read_parquet(pattern).schema == NONE.polars_schema
    assert len(pd.read_parquet(published / "data" / "none")) == 0


def test_code_of_the_card_runs_as_written(published, offline, monkeypatch):
    card = (published / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    assert "duckdb" in code and "polars" in code and "mlcroissant" in code
    monkeypatch.chdir(published)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", offline)
    exec(compile(code, "README.md", "exec"), {})


def test_check_passes_and_finds_a_wrong_description(published, tmp_path, capsys):
    from tests.publish.test_verify import sum_again

    assert check_published(published).problems == []
    copy = Path(shutil.copytree(published, tmp_path / "copy"))
    described = json.loads((copy / "croissant.json").read_text())
    described["recordSet"][0]["field"][1]["dataType"] = "cr:Int64"
    (copy / "croissant.json").write_text(json.dumps(described))
    assert main(["check-published", str(copy)]) == 1
    assert "croissant.json has sha256" in capsys.readouterr().out
    sum_again(copy, "croissant.json")
    assert main(["check-published", str(copy)]) == 1
    assert "croissant.json is wrong about column small of kinds" in capsys.readouterr().out
    described["recordSet"][0]["field"][1] |= {"dataType": "cr:Int16", "arrayShape": "-1"}
    (copy / "croissant.json").write_text(json.dumps(described))
    sum_again(copy, "croissant.json")
    assert main(["check-published", str(copy)]) == 1
    described["recordSet"][0]["field"][1].pop("arrayShape")
    described["distribution"][0].pop("encodingFormat")
    (copy / "croissant.json").write_text(json.dumps(described))
    sum_again(copy, "croissant.json")
    capsys.readouterr()
    assert main(["check-published", str(copy)]) == 1
    assert "mlcroissant refuses croissant.json" in capsys.readouterr().out


def test_check_of_no_publication_is_a_sentence(tmp_path, capsys):
    assert main(["check-published", str(tmp_path / "absent")]) == 2
    assert "there is nothing in" in capsys.readouterr().err


def test_picture_of_the_tests_is_a_picture():
    with Image.open(io.BytesIO(PNG)) as picture:
        assert picture.size == (2, 1)
        assert picture.tobytes() == b"\x10\x20"


@pytest.mark.parametrize("benchmark", benchmark_names())
def test_every_declared_table_is_described_right(benchmark, tmp_path):
    tables = tables_of(benchmark)
    for number, table in enumerate(tables.values()):
        rows = any_rows(table) if number % 4 else table.empty()
        put_table(tmp_path / "lake", benchmark, table, rows)
    publish(tmp_path / "lake", benchmark, tmp_path / "out", date="2026-11-16")
    assert check_published(tmp_path / "out").problems == []
    card = (tmp_path / "out" / "README.md").read_text()
    for table in tables.values():
        for column in table.columns:
            field = fields_of(tmp_path / "out", table.name)[column.name]
            assert column.description.rstrip(".") in field["description"]
            assert f"| `{column.name}` | {column.type} |" in card


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", benchmark_names())
def test_every_declared_table_is_read_by_both_libraries(benchmark, tmp_path, offline):
    import datasets
    import mlcroissant

    tables = tables_of(benchmark)
    for table in tables.values():
        put_table(tmp_path / "lake", benchmark, table, any_rows(table))
    publish(tmp_path / "lake", benchmark, tmp_path / "out", date="2026-11-16")
    described = mlcroissant.Dataset(str(tmp_path / "out" / "croissant.json"))
    for name, table in tables.items():
        loaded = datasets.load_dataset(
            str(tmp_path / "out"), name, split="train", cache_dir=offline
        )
        assert loaded.column_names == [column.name for column in table.columns]
        records = list(described.records(name))
        assert len(records) == loaded.num_rows == 3
        assert set(records[0]) == {f"{name}/{column.name}" for column in table.columns}
