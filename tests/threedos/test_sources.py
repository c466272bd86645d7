"""Every file of a source is a shape, a known companion or a refusal with a reason."""

import json
import shutil
import zipfile
from pathlib import Path

import h5py
import numpy as np
import polars as pl
import pytest

from schemas.errors import ConfigError, SourceError
from schemas.threedos import ListSettings, ShapeSettings
from storage.raw import open_raw
from tasks.sample.threedos import write_threedos
from tasks.threedos.lists import SCAN_CLASSES, read_lists
from tasks.threedos.sources import Entry, Listing, list_shapes
from tests.shared import shared_path

SETTINGS = ShapeSettings()
SMALL = {"train": 2, "test": 1, "scans_train": 2, "scans_test": 1, "models": 2}


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sample")
    write_threedos(root, **SMALL)
    return root


def listed(kind: str, path: Path, **options) -> Listing:
    return list_shapes(kind, open_raw(path), SETTINGS, **options)


def rules(listing: Listing) -> dict[str, str]:
    return {refused.record: refused.rule for refused in listing.refused}


def tree(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def members(*rows: tuple[str, str, str]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=["sample_id", "class", "split"], orient="row")


def write_h5(path: Path, **arrays: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


# ---------------------------------------------------------------- meshes


def test_modelnet_tree(tmp_path):
    root = tree(
        tmp_path,
        "ModelNet40/night_stand/train/night_stand_0006.off",
        "ModelNet40/chair/test/chair_0890.off",
        "ModelNet40/chair/train/sofa_0001.off",
        "ModelNet40/chair/valid/chair_0001.off",
        "ModelNet40/chair/chair_0002.off",
        "ModelNet40/README.txt",
        "other/chair/train/chair_0890.off",
    )
    listing = listed("modelnet40", root)
    assert listing.entries == (
        Entry(
            "modelnet40/chair_0890", "chair", "test", "ModelNet40/chair/test/chair_0890.off", "off"
        ),
        Entry(
            "modelnet40/night_stand_0006",
            "night_stand",
            "train",
            "ModelNet40/night_stand/train/night_stand_0006.off",
            "off",
        ),
    )
    assert rules(listing) == {
        "ModelNet40/chair/train/sofa_0001.off": "unrecognised_file",
        "ModelNet40/chair/valid/chair_0001.off": "unrecognised_file",
        "ModelNet40/chair/chair_0002.off": "unrecognised_file",
        "ModelNet40/README.txt": "unrecognised_file",
        "modelnet40/chair_0890": "duplicate_id",
    }
    assert set(listing.files) == {entry.file for entry in listing.entries}


def test_the_real_modelnet_archive():
    listing = listed("modelnet40", shared_path("shapes/ModelNet40_mini.zip"))
    splits = [entry.split for entry in listing.entries]
    assert (splits.count("train"), splits.count("test"), listing.refused) == (1166, 522, ())
    official = read_lists(open_raw(shared_path("shapes/lists")), ListSettings()).members
    rows = [(e.sample_id, e.class_, e.split) for e in listing.entries]
    assert members(*rows).join(official, on=["sample_id", "class", "split"], how="anti").is_empty()


def test_resampled_text_takes_its_split_from_the_lists(tmp_path):
    root = tree(
        tmp_path, "chair/chair_0001.txt", "chair/chair_0002.txt", "modelnet40_train.txt",
        "filelist.txt", "modelnet10_test.txt", "notes.txt",
    )  # fmt: skip
    known = members(("modelnet40/chair_0001", "chair", "train"))
    listing = listed("modelnet40_resampled", root, members=known)
    assert [(e.sample_id, e.split, e.reader) for e in listing.entries] == [
        ("modelnet40/chair_0001", "train", "points"),
        ("modelnet40/chair_0002", None, "points"),
    ]
    assert rules(listing) == {"notes.txt": "unrecognised_file"}


def test_shapenet_goes_by_the_list_and_not_by_the_tree(sample):
    source = open_raw(sample / "shapenet")
    known = read_lists(source, ListSettings()).members
    listing = list_shapes("shapenet", source, SETTINGS, members=known)
    found = {entry.sample_id for entry in listing.entries}
    by_rule = pl.Series([refused.rule for refused in listing.refused]).value_counts(name="n")
    # Cellphones stand under telephone too, and one sofa under chair; two models have no file.
    assert dict(by_rule.iter_rows()) == {"other_synset": SMALL["models"] + 1, "missing": 2}
    assert len(found) == known.height - 2
    models = [shape.rpartition("/")[2] for shape in found]
    assert len(set(models)) == len(models)
    expected = {shape: (c, s) for shape, c, s in known.select("sample_id", "class", "split").rows()}
    assert all(expected[e.sample_id] == (e.class_, e.split) for e in listing.entries)


def test_shapenet_reports_what_lacks_and_what_is_too_much(tmp_path):
    good = "02691156/aaa/models/model_normalized"
    root = tree(
        tmp_path, f"{good}.obj", f"{good}.mtl", f"{good}.solid.binvox", "02691156/aaa/images/t.jpg",
        "02691156/zzz/models/model_normalized.obj", "all.csv", "taxonomy.json",
        "02691156/notes.doc",
    )  # fmt: skip
    known = members(
        ("shapenet/02691156/aaa", "02691156", "train"),
        ("shapenet/02691156/bbb", "02691156", "test"),
        ("shapenet/04379243/ccc", "04379243", "test"),
        ("shapenet/04379243/ddd", "04379243", "test"),
        ("modelnet40/chair_0001", "chair", "train"),
    )
    listing = listed("shapenet", root, members=known)
    assert [entry.sample_id for entry in listing.entries] == ["shapenet/02691156/aaa"]
    assert rules(listing) == {
        "02691156/notes.doc": "unrecognised_file",
        "02691156/zzz/models/model_normalized.obj": "unlisted_model",
        "shapenet/02691156/bbb": "missing",
        "shapenet/04379243": "missing_class",
    }
    (absent,) = (r for r in listing.refused if r.rule == "missing_class")
    assert "2 models" in absent.message
    with pytest.raises(ConfigError, match=r"all\.csv"):
        listed("shapenet", root)


def test_a_part_of_shapenet_is_no_flood_of_bad_records(tmp_path, capsys):
    root = tree(tmp_path, "02691156/a00/models/model_normalized.obj")
    known = members(
        *((f"shapenet/02691156/a{n:02}", "02691156", "train") for n in range(30)),
        *((f"shapenet/{n:08}/b", f"{n:08}", "train") for n in range(30)),
    )
    listing = listed("shapenet", root, members=known)
    assert [entry.sample_id for entry in listing.entries] == ["shapenet/02691156/a00"]
    assert not listing.refused
    assert "has 1 of the 60 models that all.csv lists" in capsys.readouterr().err


def test_a_folder_per_class(tmp_path):
    root = tree(
        tmp_path, "Mug/a.OBJ", "Mug/a.mtl", "Mug/b.glb", "more/Car/c.ply", "Car/test/c.stl",
        "Train/d.off", "Mug/e.csv", "Mug/f.blend", "top.off", "Mug/b.off",
    )  # fmt: skip
    listing = listed("folder", root, name="mine")
    assert {(e.sample_id, e.class_, e.split, e.reader) for e in listing.entries} == {
        ("mine/Mug/a", "Mug", None, "obj"),
        ("mine/Mug/b", "Mug", None, "glb"),
        ("mine/more/Car/c", "Car", None, "ply"),
        ("mine/Car/test/c", "test", None, "stl"),
        ("mine/Train/d", "Train", None, "off"),
        ("mine/Mug/e", "Mug", None, "points"),
    }
    assert rules(listing) == {
        "Mug/f.blend": "unrecognised_file",
        "top.off": "no_class",
        "mine/Mug/b": "duplicate_id",
    }


@pytest.mark.parametrize(
    "names",
    [("train/Car/a.off", "val/Train/b.off"), ("x/Car/train/a.off", "x/Train/Valid/b.off")],
    ids=["split above", "split below"],
)
def test_folders_of_splits(tmp_path, names):
    listing = listed("folder", tree(tmp_path, *names))
    assert [(e.class_, e.split) for e in listing.entries] == [("Car", "train"), ("Train", "valid")]


def test_stray_files_do_not_hide_the_splits(tmp_path):
    root = tree(tmp_path, "top.off", "train/x.off", "train/Car/a.off", "test/Car/b.off")
    listing = listed("folder", root)
    assert [(e.class_, e.split) for e in listing.entries] == [("Car", "test"), ("Car", "train")]
    assert rules(listing) == {"top.off": "no_class", "train/x.off": "no_class"}


def test_links_are_reported(tmp_path):
    root = tree(tmp_path, "Mug/a.off")
    (root / "Mug" / "b.off").symlink_to(root / "Mug" / "a.off")
    assert rules(listed("folder", root)) == {"Mug/b.off": "unreadable"}


@pytest.mark.parametrize(
    ("name", "classes", "shapes"),
    [("shapedb_mini.zip", 30, 387), ("lidar_objects.zip", 4, 724)],
)
def test_real_folders(name, classes, shapes):
    listing = listed("folder", shared_path(f"shapes/{name}"))
    assert (len({e.class_ for e in listing.entries}), len(listing.entries)) == (classes, shapes)
    assert listing.refused == ()


@pytest.mark.parametrize(
    "kind", ["modelnet40", "modelnet40_resampled", "scanobjectnn", "sncore", "voxels", "folder"]
)
def test_a_source_without_shapes_is_an_error(kind, tmp_path):
    tree(tmp_path, "README.md")
    with pytest.raises(SourceError, match="no shape found"):
        listed(kind, tmp_path)


def test_an_unknown_kind_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="there are folder, modelnet40"):
        listed("shapnet", tmp_path)


# ---------------------------------------------------------------- files of many shapes


def test_scanobjectnn_h5(sample, tmp_path):
    listing = listed("scanobjectnn", sample / "scanobjectnn")
    parts = [e.sample_id.split("/")[1] for e in listing.entries]
    assert (parts.count("training"), parts.count("test")) == (30, 16)
    first = listing.entries[0]
    assert first == Entry(
        "scanobjectnn/test/00000",
        "bag",
        "test",
        "main_split/test_objectdataset.h5",
        "h5",
        "data",
        0,
    )
    assert {e.class_ for e in listing.entries} == set(SCAN_CLASSES)
    archive = tmp_path / "scans.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted((sample / "scanobjectnn" / "main_split").iterdir()):
            file.write(path, f"main_split/{path.name}")
    assert listed("scanobjectnn", archive).entries == listing.entries


def test_scanobjectnn_faults(tmp_path):
    data = np.zeros((3, 8, 3), np.float32)
    write_h5(tmp_path / "a/training_objectdataset.h5", data=data, label=np.array([0, 15, 14]))
    write_h5(tmp_path / "a/test_objectdataset.h5", data=data, label=np.array([0, 1]))
    write_h5(tmp_path / "b/training_objectdataset.h5", data=data[:1], label=np.array([0]))
    write_h5(tmp_path / "a/test_objectdataset_augmented25rot.h5", data=data, label=np.zeros(3))
    listing = listed("scanobjectnn", tmp_path)
    assert [(e.sample_id, e.class_) for e in listing.entries] == [
        ("scanobjectnn/training/00000", "bag"),
        ("scanobjectnn/training/00002", "toilet"),
    ]
    assert rules(listing) == {
        "scanobjectnn/training/00001": "unknown_label",
        "a/test_objectdataset.h5": "label_length",
        "b/training_objectdataset.h5": "other_variant",
        "a/test_objectdataset_augmented25rot.h5": "unrecognised_file",
    }
    (tmp_path / "a/test_objectdataset.h5").write_bytes(b"no hdf5")
    assert rules(listed("scanobjectnn", tmp_path))["a/test_objectdataset.h5"] == "bad_h5"


def test_of_the_variants_of_scanobjectnn_main_split_is_taken(tmp_path):
    """The release has each object several times; they are not a flood of bad records."""
    data, label = np.zeros((3, 8, 3), np.float32), np.arange(3)
    for folder in ("main_split", "main_split_nobg", "another_split"):
        for part in ("training", "test"):
            write_h5(tmp_path / folder / f"{part}_objectdataset.h5", data=data, label=label)
    listing = listed("scanobjectnn", tmp_path)
    assert {e.file.rpartition("/")[0] for e in listing.entries} == {"main_split"}
    assert len(listing.entries) == 6
    assert list(rules(listing).values()) == ["other_variant"] * 4
    nobg = listed("scanobjectnn", tmp_path / "main_split_nobg")
    assert len(nobg.entries) == 6 and not nobg.refused


def test_the_two_h5_files_may_lie_apart(tmp_path):
    data, label = np.zeros((3, 8, 3), np.float32), np.arange(3)
    for part in ("training", "test"):
        write_h5(tmp_path / part / f"{part}_objectdataset.h5", data=data, label=label)
    listing = listed("scanobjectnn", tmp_path)
    assert len(listing.entries) == 6 and not listing.refused


def test_scanobjectnn_bins(tmp_path):
    root = tree(
        tmp_path, "object_dataset/bag/005_00020.bin", "object_dataset/bed/scene0001_00_00007.bin",
        "object_dataset/bag/005_00020_part.bin", "main_split.txt",
    )  # fmt: skip
    known = members(("scanobjectnn/005_00020", "bag", "test"))
    listing = listed("scanobjectnn", root, members=known)
    assert [(e.sample_id, e.class_, e.split) for e in listing.entries] == [
        ("scanobjectnn/005_00020", "bag", "test"),
        ("scanobjectnn/scene0001_00_00007", "bed", None),
    ]
    assert not listing.refused, "a part file is a companion"


def test_scanobjectnn_bins_without_class_folders(tmp_path):
    root = tree(tmp_path, "005_00020.bin", "raw/005_00021.bin", "raw/005_00022.bin")
    known = members(
        ("scanobjectnn/005_00020", "bag", "test"), ("scanobjectnn/005_00021", "bed", "train")
    )
    listing = listed("scanobjectnn", root, members=known)
    assert [(e.sample_id, e.class_, e.split) for e in listing.entries] == [
        ("scanobjectnn/005_00020", "bag", "test"),
        ("scanobjectnn/005_00021", "bed", "train"),
    ]
    assert rules(listing) == {"raw/005_00022.bin": "no_class"}


def test_sncore(tmp_path):
    for split, models in (("train", ["m1", "m2"]), ("val", ["m3"]), ("test", ["m4", "m5"])):
        stem = tmp_path / f"sncore_{split}_4096"
        write_h5(Path(f"{stem}_points.h5"), data=np.zeros((len(models), 8, 3), np.float32))
        Path(f"{stem}_sids.json").write_text(json.dumps(["02691156"] * len(models)))
        Path(f"{stem}_mids.json").write_text(json.dumps(models))
    (tmp_path / "sncore_test_4096_mids.json").write_text('["m4"]')
    listing = listed("sncore", tmp_path)
    assert [(e.sample_id, e.class_, e.split, e.row) for e in listing.entries] == [
        ("shapenet/02691156/m1", "02691156", "train", 0),
        ("shapenet/02691156/m2", "02691156", "train", 1),
        ("shapenet/02691156/m3", "02691156", "valid", 0),
    ]
    assert rules(listing) == {"sncore_test_4096_points.h5": "list_length"}
    (tmp_path / "sncore_val_4096_sids.json").unlink()
    (tmp_path / "sncore_train_4096_sids.json").write_text("{")
    assert set(rules(listed("sncore", tmp_path)).values()) == {
        "list_length", "missing_list", "bad_list",
    }  # fmt: skip


def test_a_large_h5_in_an_archive_is_refused(sample, tmp_path):
    archive = tmp_path / "scans.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted((sample / "scanobjectnn" / "main_split").iterdir()):
            file.write(path, path.name)
    settings = ShapeSettings(max_file_bytes=1000)
    refused = list_shapes("scanobjectnn", open_raw(archive), settings).refused
    assert [r.rule for r in refused] == ["too_large", "too_large"]


def test_real_voxels(tmp_path):
    shutil.copyfile(shared_path("shapes/modelnet10_voxels32.npz"), tmp_path / "modelnet10.npz")
    listing = listed("voxels", tmp_path)
    splits = [entry.split for entry in listing.entries]
    assert (splits.count("train"), splits.count("test")) == (3991, 908)
    classes = [e.class_ for e in listing.entries if e.split == "test"]
    # ModelNet10's official test counts.
    assert (classes.count("bathtub"), classes.count("bed"), classes.count("desk")) == (50, 100, 86)
    few = listed("voxels", tmp_path, grid_classes=["bathtub"])
    assert {e.class_ for e in few.entries} == {"bathtub"}
    assert {r.rule for r in few.refused} == {"unknown_label"}


def test_an_npz_is_a_source_of_its_own(tmp_path):
    """The files beside it are not looked at."""
    np.savez(tmp_path / "grids.npz", X_train=np.ones((2, 4, 4, 4)), y_train=np.array([0, 1]))
    (tmp_path / "other.txt").write_text("x")
    source = open_raw(tmp_path / "grids.npz")
    listing = list_shapes("voxels", source, SETTINGS)
    assert not listing.refused
    folder = listed("voxels", tmp_path)
    assert listing.entries == folder.entries and listing.files == folder.files
    assert source.read("grids.npz") == (tmp_path / "grids.npz").read_bytes()
    assert open_raw(Path(listing.root)).files() == source.files(), "its root opens it again"
