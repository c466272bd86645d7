"""Raw sources to tables: every shape is a row or a refusal, one new mesh costs one shard."""

import shutil
import zipfile
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest

from schemas.threedos import SHAPES, ListSettings, ShapeSettings, point_clouds_table
from storage.raw import open_raw
from tasks.engine.stage import Build, Shard
from tasks.ingest import raw_files
from tasks.sample.threedos import bad_threedos_records, write_threedos
from tasks.threedos import ingest
from tasks.threedos.ingest import plan_shape_shards, sample_shapes
from tasks.threedos.lists import read_lists
from tasks.threedos.sources import Listing, list_shapes
from tests.shared import shared_path
from tests.threedos.test_formats import plain_off

SMALL = {"train": 2, "test": 1, "scans_train": 2, "scans_test": 1, "models": 2}
SETTINGS = ShapeSettings(points=32, candidates=64)


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sample")
    write_threedos(root, **SMALL)
    return root


def sample_listings(root: Path) -> list[Listing]:
    lists = read_lists(open_raw(root / "shapenet"), ListSettings()).members
    return [
        list_shapes(kind, open_raw(root / kind), SETTINGS, members=lists)
        for kind in ("modelnet40", "scanobjectnn", "shapenet")
    ]


def made(shards: list[Shard], settings: ShapeSettings = SETTINGS):
    """All rows of the shards, checked as in a build, and the rejects."""
    shapes, clouds, rejects = [], [], []
    for shard in shards:
        produced = sample_shapes(shard, settings)
        rejects += produced.rejects
        if produced.tables:
            good, bad = SHAPES.check(produced.tables["shapes"])
            cloud, worse = point_clouds_table(settings.points).check(
                produced.tables["point_clouds"], {"shapes": good}
            )
            assert bad.is_empty() and worse.is_empty()
            assert produced.records == good.height + len(produced.rejects) and good.height > 0
            assert good["sample_id"].equals(cloud["sample_id"])
            shapes.append(good)
            clouds.append(cloud)
    return pl.concat(shapes).sort("sample_id"), pl.concat(clouds).sort("sample_id"), rejects


def meshes(root: Path, count: int) -> Path:
    """Different tetrahedra in two classes."""
    for number in range(count):
        path = root / "ab"[number % 2] / f"{number:04d}.off"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"OFF\n4 4 6\n0 0 0\n{number + 1} 0 0\n0 1 0\n0 0 1\n"
            "3 0 2 1\n3 0 1 3\n3 0 3 2\n3 1 2 3\n"
        )
    return root


def folder_shards(root: Path) -> list[Shard]:
    return plan_shape_shards([list_shapes("folder", open_raw(root), SETTINGS)])


def test_the_sample_with_its_bad_records(sample, tmp_path):
    listings = sample_listings(sample)
    with Build("threedos", tmp_path / "lake", workers=2) as build:
        build.run(sample_shapes, plan_shape_shards(listings), SETTINGS)
        refused = build.read("quarantine")
        shapes, clouds = build.read("shapes"), build.read("point_clouds")
    said = dict(refused.filter(pl.col("rule") != "other_synset").select("record", "rule").rows())
    expected = {}
    for path, wrong in bad_threedos_records(scans_test=SMALL["scans_test"]):
        name, *rest = path.removesuffix(".off").split("/")
        if name == "scanobjectnn":
            record = f"{name}/test/{int(path.partition('#')[2]):05d}"
        else:
            record = f"{name}/{rest[-1]}" if name == "modelnet40" else "/".join([name, *rest[:2]])
        expected[record] = {
            "empty file": "empty_file",
            "a vertex is nan": "non_finite_vertex",
            "a face names a vertex that does not exist": "index_out_of_range",
            "cut off in the middle of the vertices": "truncated",
            "no faces": "no_faces",
            "binary bytes, not text": said[record],
            "every coordinate is nan": "non_finite_point",
            "listed in all.csv, no file": "missing",
        }[wrong]
    assert said == expected
    assert said["modelnet40/bed_9001"] in ("bad_header", "not_text")
    assert shapes.height == clouds.height == 17 * 3 + 15 * 3 + 20 * 2
    assert shapes["sample_id"].n_unique() == shapes.height
    assert set(shapes["kind"]) == {"mesh", "scan"}
    scans = shapes.filter(pl.col("kind") == "scan")
    assert scans["area"].null_count() == scans.height and scans["background"].null_count() == 0

    # Readers with no code of ours.
    pattern = str(tmp_path / "lake" / "threedos" / "point_clouds" / "current" / "*.parquet")
    points = pl.read_parquet(pattern)["points"].to_numpy().reshape(-1, 32, 3)
    assert np.linalg.norm(points, axis=2).max(axis=1) == pytest.approx(1, abs=1e-5)
    assert np.abs(points.mean(axis=1)).max() < 1e-5
    query = f"select min(len(points)), max(len(points)), count(*) from '{pattern}'"
    assert duckdb.sql(query).fetchall() == [(96, 96, shapes.height)]


def test_rows_do_not_depend_on_shards(tmp_path, monkeypatch):
    root = meshes(tmp_path, 8)
    whole = made(folder_shards(root))
    other = made(folder_shards(root), SETTINGS.model_copy(update={"seed": 1}))
    assert other[0].equals(whole[0]) and not other[1]["points"].equals(whole[1]["points"])
    monkeypatch.setattr(ingest, "SHAPES_PER_SHARD", 3)
    shards = folder_shards(root)
    assert len(shards) >= 3
    parts = made(shards[::-1])
    assert whole[0].equals(parts[0]) and whole[1].equals(parts[1])


def test_an_archive_gives_the_same_rows_as_its_folder(tmp_path, monkeypatch):
    root = meshes(tmp_path / "raw", 8)
    monkeypatch.setattr(raw_files, "BYTES_ON_DISK", 200)
    archive = tmp_path / "raw.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(root.rglob("*.off")):
            file.write(path, path.relative_to(root).as_posix())
    folder, zipped = made(folder_shards(root)), made(folder_shards(archive))
    assert folder[0].equals(zipped[0]) and folder[1].equals(zipped[1])


@pytest.mark.parametrize("name", ["a/0000_first.off", "zz/last.off", "b/0100.off"])
def test_one_new_mesh_costs_one_shard(tmp_path, monkeypatch, name):
    monkeypatch.setattr(ingest, "SHAPES_PER_SHARD", 8)
    root = meshes(tmp_path, 60)

    def keys() -> dict[str, set[str]]:
        shards = folder_shards(root)
        assert max(len(shard.files) for shard in shards) <= 8
        return {
            sample_shapes.key("threedos", shard, SETTINGS): {file.name for file in shard.files}
            for shard in shards
        }

    before = keys()
    assert len(before) > 8
    (root / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(root / "a" / "0000.off", root / name)
    after = keys()
    new = [files for key, files in after.items() if key not in before]
    # One shard, or the two halves of one that was full.
    assert len(new) <= 2 and sum(map(len, new)) <= 9 and name in set().union(*new)
    assert len(before.keys() - after.keys()) <= 1


def test_shards_are_bounded_whatever_the_source_holds():
    listing = list_shapes(
        "modelnet40", open_raw(shared_path("shapes/ModelNet40_mini.zip")), SETTINGS
    )
    shards = plan_shape_shards([listing])
    sizes = [len(shard.files) for shard in shards]
    assert sum(sizes) == 1688 and max(sizes) <= ingest.SHAPES_PER_SHARD and len(shards) < 20


def test_a_shape_of_two_sources_is_taken_once(tmp_path):
    off = tmp_path / "off" / "chair" / "train" / "chair_0001.off"
    off.parent.mkdir(parents=True)
    shutil.copyfile(meshes(tmp_path / "m", 1) / "a" / "0000.off", off)
    for number in (1, 2):
        text = tmp_path / "text" / "chair" / f"chair_{number:04d}.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("0,0,0,0,0,1\n1,0,0,0,0,1\n0,1,0,0,0,1\n")
    listings = [
        list_shapes("modelnet40", open_raw(tmp_path / "off"), SETTINGS),
        list_shapes("modelnet40_resampled", open_raw(tmp_path / "text"), SETTINGS),
    ]
    shapes, clouds, rejects = made(plan_shape_shards(listings))
    assert shapes.select("sample_id", "source", "kind").rows() == [
        ("modelnet40/chair_0001", "modelnet40", "mesh"),
        ("modelnet40/chair_0002", "modelnet40_resampled", "scan"),
    ]
    assert [(r.record, r.rule) for r in rejects] == [("modelnet40/chair_0001", "duplicate_id")]
    assert clouds["count"].to_list() == [32, 3]
    with pytest.raises(ValueError, match="same name"):
        plan_shape_shards([listings[0], listings[0]])


def test_a_mesh_above_the_limit_is_refused(tmp_path):
    root = meshes(tmp_path, 2)
    (root / "a" / "big.off").write_bytes(b"OFF" + b" " * 5000)
    settings = SETTINGS.model_copy(update={"max_file_bytes": 4000})
    shapes, _, rejects = made(folder_shards(root), settings)
    assert shapes.height == 2
    assert [(r.record, r.rule) for r in rejects] == [("folder/a/big", "too_large")]


def test_a_reader_that_dies_costs_one_shape(tmp_path, monkeypatch):
    root = meshes(tmp_path, 4)
    monkeypatch.setattr(ingest, "SAMPLE", "tests.threedos.dying_reader:sample_file")
    shapes, _, rejects = made(folder_shards(root))
    assert [(r.record, r.rule) for r in rejects] == [("folder/a/0002", "native_crash")]
    assert shapes.height == 3


def test_all_real_meshes_against_plain_numbers():
    path = shared_path("shapes/ModelNet40_mini.zip")
    listing = list_shapes("modelnet40", open_raw(path), SETTINGS)
    shapes, clouds, rejects = made(
        plan_shape_shards([listing]), ShapeSettings(points=8, candidates=8)
    )
    assert (shapes.height, clouds.height, rejects) == (1688, 1688, [])
    assert (shapes["area"].min(), shapes["area"].max()) == (
        pytest.approx(0.06265176), pytest.approx(2.857875547e13),
    )  # fmt: skip
    repaired = Counter()
    for text in shapes["repaired"].drop_nulls():
        repaired.update(part.lstrip("0123456789 ") for part in text.split("; "))
    assert repaired == {"faces without area dropped": 709, "header glued to the counts": 315}
    flat = shapes["repaired"].str.extract(r"(\d+) faces without").cast(pl.Int64).fill_null(0)
    announced = shapes.with_columns(faces=pl.col("faces") + flat)
    with zipfile.ZipFile(path) as archive:
        for row in announced.gather_every(40).rows(named=True):
            points, triangles = plain_off(archive.read(row["file"]))
            assert (len(points), len(triangles)) == (row["vertices"], row["faces"])
            a, b, c = points[np.array(triangles)].transpose(1, 0, 2)
            sides = [np.linalg.norm(side, axis=1) for side in (b - a, c - b, a - c)]
            half = sum(sides) / 2
            heron = half * (half - sides[0]) * (half - sides[1]) * (half - sides[2])
            area = np.sqrt(heron.clip(0)).sum()
            assert row["area"] == pytest.approx(area, rel=1e-4), row["file"]


def test_real_scans_of_any_size():
    listing = list_shapes("folder", open_raw(shared_path("shapes/lidar_objects.zip")), SETTINGS)
    settings = ShapeSettings(points=64, candidates=64)
    shapes, clouds, rejects = made(plan_shape_shards([listing]), settings)
    assert (shapes.height, rejects) == (724, [])
    assert (shapes["vertices"].min(), shapes["vertices"].max()) == (50, 3853)
    assert dict(shapes["class"].value_counts().iter_rows()) == {
        "Bush": 246, "Car": 93, "Trunk": 274, "Pedestrian": 111,
    }  # fmt: skip
    assert clouds["count"].to_list() == shapes["vertices"].clip(upper_bound=64).to_list()


@pytest.mark.slow
def test_real_voxels_with_their_empty_grids(tmp_path):
    shutil.copyfile(shared_path("shapes/modelnet10_voxels32.npz"), tmp_path / "modelnet10.npz")
    listing = list_shapes("voxels", open_raw(tmp_path), SETTINGS)
    shapes, _, rejects = made(plan_shape_shards([listing]), ShapeSettings(points=8, candidates=8))
    empty = Counter((r.record.split("/")[2], r.rule) for r in rejects)
    assert empty == {("train", "empty_grid"): 27, ("test", "empty_grid"): 7}
    assert shapes.height == 3991 + 908 - 34
    assert (shapes["area"] % 1 == 0).all() and set(shapes["kind"]) == {"voxels"}
