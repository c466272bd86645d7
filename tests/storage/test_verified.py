"""What is read from the lake is what was written: one flipped bit stops a build and is named."""

import ast
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.cli import main
from schemas.errors import LakeError
from schemas.manifest import BuildRecord, PieceManifest
from storage import verified as module
from storage.checkpoints import read_checkpoint, write_checkpoint
from storage.parquet import opened_parquet, write_parquet
from storage.pieces import find_piece, write_piece
from storage.raw import open_raw
from storage.tables import current_version
from tasks.engine import stage as stages
from tasks.engine.stage import Shard
from tests.toy import READINGS, ReadSettings, build_toy, read_lines, unverified, write_raw

ROOT = Path(__file__).parents[2]


def flip(path: Path, at: int = 60, bit: int = 0) -> None:
    body = bytearray(path.read_bytes())
    body[at % len(body)] ^= 1 << bit
    path.write_bytes(body)


@pytest.fixture
def built(tmp_path):
    write_raw(tmp_path / "raw", files=3, lines=8)
    return build_toy(tmp_path / "lake", tmp_path / "raw")


def pieces_of(build, stage):
    return [piece for piece in build.pieces if piece.manifest.stage == stage]


def test_a_damaged_part_stops_the_build_with_its_name(tmp_path, built):
    part = pieces_of(built, "read_lines")[1].part("readings")
    (total,) = pieces_of(built, "add_up")
    shutil.rmtree(total.folder)
    flip(part.place)
    with pytest.raises(LakeError, match=r"readings\.parquet has sha256 .* `novelty verify --drop`"):
        build_toy(tmp_path / "lake", tmp_path / "raw")
    assert find_piece(tmp_path / "lake", "toy", "add_up", total.manifest.key) is None


def test_parts_are_hashed_once_in_a_process(built, monkeypatch):
    hashed = []
    real = module.sha256_files
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(
        module, "sha256_files", lambda paths, **how: hashed.append(paths) or real(paths, **how)
    )
    part = pieces_of(built, "read_lines")[0].part("readings")
    assert part.read().equals(part.read(["file", "line", "value", "kind"]))
    assert len(hashed) == 1
    version = built.versions["readings"]
    version.read()
    assert len(hashed) == len(version.places)  # its parts are links to those of the pieces


def test_other_files_of_a_piece_are_verified_too(tmp_path, built):
    manifest = pieces_of(built, "add_up")[0].manifest.model_copy(update={"key": "0" * 32})
    (tmp_path / "model").write_bytes(b"weights")
    file = write_piece(tmp_path / "lake", manifest, {}, {"model": tmp_path / "model"}).file("model")
    assert file.path.read_bytes() == b"weights"
    flip(file.place)
    with pytest.raises(LakeError, match="model has sha256"):
        _ = file.path
    file.place.write_bytes(b"weight")
    with pytest.raises(LakeError, match="model has 6 bytes, expected 7"):
        _ = file.path
    file.place.unlink()
    with pytest.raises(LakeError, match="model is missing"):
        _ = file.path


def test_a_damaged_version_is_named_when_it_is_read(tmp_path, built):
    version = built.versions["totals"]
    flip(version.places[0])
    with pytest.raises(LakeError, match=r"00000-all-.* has sha256"):
        current_version(tmp_path / "lake", "toy", "totals").read()


@pytest.mark.parametrize(
    "sql",
    [
        "select * from toy.totals",
        "SET threads = 1; select * from (FROM Toy.Totals)",
        "USE catalog.toy; select * from totals",
        "PIVOT toy.totals ON kind USING sum(total)",
        "select t.total from toy.totals t",
        "select * from toy.files as f, toy.totals t(a, b)",
        'select (select max(total) from "Toy"."Totals" "my own") from toy.readings r',
        "from toy.totals tablesample 10%",
    ],
)
def test_a_query_reads_no_damaged_table(tmp_path, built, capsys, sql):
    words = ["query", "--lake", str(tmp_path / "lake")]
    flip(built.versions["totals"].places[0])
    assert main([*words, "select count(*) from toy.readings"]) == 0
    assert main([*words, sql]) == 2
    assert "has sha256" in capsys.readouterr().err


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_of_a_manifest_is_noticed(at, bit):
    record = BuildRecord(benchmark="toy", settings={"a": [1.5, None, "x"]}, sources=[])
    data = bytearray(record.sealed())
    assert BuildRecord.unsealed(bytes(data)).settings == record.settings
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(ValueError):
        BuildRecord.unsealed(bytes(data))


def test_manifests_say_that_inputs_were_verified(built):
    for piece in built.pieces:
        data = (piece.folder / "_manifest.json").read_bytes()
        manifest = PieceManifest.unsealed(data)
        assert manifest.inputs_verified and manifest.sealed() == data
        old = manifest.model_dump_json(exclude={"sha256", "inputs_verified"})
        assert not PieceManifest.unsealed(old.encode()).inputs_verified


def test_rows_taken_over_are_as_good_as_their_piece(tmp_path, built):
    piece = pieces_of(built, "read_lines")[0]
    unverified(piece)
    old = find_piece(built.lake, "toy", "read_lines", piece.manifest.key)
    source = open_raw(tmp_path / "raw")
    shard = Shard("new", tuple(source.files()[:1]), source=source.root, earlier=old)
    made = read_lines.make(tmp_path / "other", "toy", shard, ReadSettings())
    assert not made.manifest.inputs_verified


def test_pages_have_checksums_that_streaming_compares(tmp_path, built):
    frame = built.versions["readings"].read()
    write_parquet(frame, READINGS, tmp_path / "part.parquet")
    with opened_parquet(tmp_path / "part.parquet") as file:
        start = file.metadata.row_group(0).column(2).data_page_offset
        size = file.metadata.row_group(0).column(2).total_compressed_size
        assert file.read_row_group(0).num_rows == frame.height
    flip(tmp_path / "part.parquet", start + size - 1)  # in the data, behind the page's header
    with pytest.raises(LakeError, match=r"(?i)checksum verification failed.*novelty verify"):
        with opened_parquet(tmp_path / "part.parquet") as file:
            file.read_row_group(0)


def test_the_writer_is_in_every_key(tmp_path, built, monkeypatch):
    monkeypatch.setattr(stages, "WRITER_VERSION", 99)
    again = build_toy(tmp_path / "lake", tmp_path / "raw")
    assert all(piece.made_now for piece in again.pieces)
    assert again.versions["totals"].read().equals(built.versions["totals"].read())


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = tmp_path / "work" / "step"
    write_checkpoint(path, b"state\nof a run")
    assert read_checkpoint(path) == b"state\nof a run"
    for at in (3, 70):
        flip(path, at)
        with pytest.raises(LakeError, match="step is damaged"):
            read_checkpoint(path)
        flip(path, at)


READERS = {
    "read_parquet",
    "scan_parquet",
    "read_table",
    "read_metadata",
    "read_schema",
    "ParquetFile",
}
FOREIGN = {
    "tasks/operations/diff_sides.py": "paths of TableVersion.files, or files that the user names",
    "tasks/kowl/evaluation.py": "checkpoints through read_checkpoint",
    "tasks/condda/from_lake.py": "TableVersion.files",
    "tasks/condda/media.py": "TableVersion.files",
    "tasks/publish/check.py": "a publication, whose own sums were compared before",
    "tasks/publish/record.py": "TableVersion.files",
    "tasks/report/built.py": "TableVersion.files",
    "tasks/report/reading.py": "TableVersion.files",
    "tasks/operations/score_files.py": "a file that the user names",
    "tasks/evaluation/output_files.py": "a file that the user names, by its digest",
    "tasks/learning/pictures.py": "Part.path and TableVersion.files",
    "tasks/kowl/kept.py": "checkpoints through read_checkpoint",
}
CODE = sorted(path for layer in ("tasks", "flows") for path in (ROOT / layer).rglob("*.py"))


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_outside_storage_opens_an_unverified_file(path):
    """`Part.path` and `TableVersion.files` verify; where a file merely stands is storage's own."""
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("place", "places"), f"{where} takes an unverified path"
            assert node.attr not in READERS or name in FOREIGN, f"{where} reads Parquet by itself"
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Attribute):
            own = isinstance(node.left.value, ast.Name) and node.left.value.id in ("self", "parsed")
            assert own or node.left.attr != "folder", f"{where} makes a path inside a piece"
