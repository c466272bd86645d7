"""The sample shapes parse with plain readers, vary within a class and differ between classes."""

import csv
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tasks.sample.threedos import (
    BUILDERS,
    MODELNET_CLASSES,
    SCAN_CLASSES,
    SYNSETS,
    _visible,
    bad_threedos_records,
    write_threedos,
)
from tests.sample.test_sample_condda import tree_digest, tree_digest_of_child
from tests.shared import shared_path

SR1 = ("chair", "bookshelf", "door", "sink", "sofa")
SR2 = ("bed", "toilet", "desk", "monitor", "table")
LARGE = {"train": 10, "test": 5, "scans_train": 8, "scans_test": 4, "models": 5}
SMALL = {"train": 2, "test": 1, "scans_train": 2, "scans_test": 1, "models": 2}
SIZES = ", ".join(f"{name}={value}" for name, value in SMALL.items())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threedos")
    write_threedos(folder, **LARGE)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_threedos(folder, **SMALL)
    return folder


def bad_paths() -> dict[str, str]:
    return dict(bad_threedos_records(scans_test=LARGE["scans_test"]))


def read_off(path: Path) -> tuple[np.ndarray, np.ndarray]:
    text = path.read_text()
    assert text.startswith("OFF")
    words = text[3:].split()
    points, faces = int(words[0]), int(words[1])
    table = np.array(words[3 + 3 * points :], int).reshape(faces, 4)
    assert (table[:, 0] == 3).all()
    return np.array(words[3 : 3 + 3 * points], float).reshape(points, 3), table[:, 1:]


def read_obj(path: Path) -> tuple[np.ndarray, np.ndarray]:
    lines = [line.split() for line in path.read_text().splitlines()]
    points = [line[1:] for line in lines if line[:1] == ["v"]]
    faces = [
        [int(word.split("//")[0]) - 1 for word in line[1:]] for line in lines if line[:1] == ["f"]
    ]
    return np.array(points, float), np.array(faces)


def areas(points: np.ndarray, faces: np.ndarray) -> np.ndarray:
    a, b, c = (points[faces[:, k]] for k in range(3))
    return np.linalg.norm(np.cross(b - a, c - a), axis=1) / 2


def profile(points: np.ndarray, weights: np.ndarray, up: int) -> np.ndarray:
    """Histograms of height and of distance from the upright axis: blind to scale and heading."""
    weights = weights / weights.sum()
    points = (points - weights @ points) / np.ptp(points, axis=0).max()
    height, radius = points[:, up], np.linalg.norm(np.delete(points, up, axis=1), axis=1)
    return np.concatenate(
        [
            np.histogram(height, 10, (-0.8, 0.8), weights=weights)[0],
            np.histogram(radius, 10, (0, 0.8), weights=weights)[0],
            [np.ptp(height), radius.max()],
        ]
    )


def mesh_profile(points: np.ndarray, faces: np.ndarray, up: int) -> np.ndarray:
    corners = points[faces]
    spread = [corners.mean(axis=1)] + [(corners[:, i] + corners[:, i - 1]) / 2 for i in range(3)]
    return profile(np.concatenate(spread), np.tile(areas(points, faces), 4), up)


def nearest(known: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance = np.linalg.norm(asked[:, None] - known, axis=2)
    return distance.argmin(axis=1), distance.min(axis=1)


@pytest.fixture(scope="module")
def modelnet(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    features: dict[str, list] = {"train": [], "test": []}
    labels: dict[str, list] = {"train": [], "test": []}
    for path in sorted((root / "modelnet40").glob("*/*/*.off")):
        if path.relative_to(root).as_posix() not in bad_paths():
            features[path.parent.name].append(mesh_profile(*read_off(path), up=2))
            labels[path.parent.name].append(path.parts[-3])
    return {part: (np.array(features[part]), np.array(labels[part])) for part in features}


@pytest.fixture(scope="module")
def scans(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    parts = {}
    for part in ("training", "test"):
        with h5py.File(root / "scanobjectnn" / "main_split" / f"{part}_objectdataset.h5") as file:
            parts[part] = (file["data"][:], file["label"][:], file["mask"][:])
    return parts


def test_modelnet_layout_and_oddities(root: Path) -> None:
    assert set(SR1) | set(SR2) <= set(MODELNET_CLASSES) and len(MODELNET_CLASSES) >= 14
    glued = flat = 0
    sizes, seen = [], 0
    for path in sorted((root / "modelnet40").glob("*/*/*.off")):
        name, part, file = path.parts[-3:]
        assert (
            name in MODELNET_CLASSES and file.startswith(f"{name}_") and part in ("train", "test")
        )
        if path.relative_to(root).as_posix() in bad_paths():
            continue
        seen += 1
        points, faces = read_off(path)
        assert np.isfinite(points).all() and faces.min() >= 0 and faces.max() < len(points)
        area = areas(points, faces)
        assert (area > 0).mean() > 0.8
        flat += (area == 0).any()
        glued += path.read_bytes()[3:4] != b"\n"
        sizes.append(np.ptp(points, axis=0).max())
    assert seen == len(MODELNET_CLASSES) * (LARGE["train"] + LARGE["test"])
    assert 0.1 < glued / seen < 0.35 and 0.15 < flat / seen < 0.6
    assert min(sizes) < 1e-2 and max(sizes) > 1e3


def test_class_names_are_the_published_ones() -> None:
    names = shared_path("shapes/lists/modelnet40_shape_names.txt").read_text().split()
    assert set(MODELNET_CLASSES) <= set(names)
    order = shared_path("shapes/lists/scanobjectnn_shape_names_ext.txt").read_text().split()
    renamed = {"monitor": "display", "bookshelf": "shelf"}
    assert [renamed.get(name, name) for name in SCAN_CLASSES] == order
    with shared_path("shapes/expected/sn_sets.csv").open(newline="") as file:
        sets = {
            row["synset_id"]: (row["category_set"], row["name"]) for row in csv.DictReader(file)
        }
    renamed = {"monitor": "display", "cup": "mug", "bin": "trash bin"}
    for synset, kind in SYNSETS.items():
        if kind != "cellphone":
            assert sets[synset][1] == renamed.get(kind, kind)
    counts = [sum(sets.get(s, ("",))[0] == name for s in SYNSETS) for name in ("SN1", "SN2", "SN3")]
    assert min(counts) >= 5


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_members_of_a_class_vary(name: str) -> None:
    shapes = [mesh_profile(*BUILDERS[name](np.random.default_rng(k)), up=2) for k in range(6)]
    apart = [np.abs(a - b).sum() for i, a in enumerate(shapes) for b in shapes[:i]]
    assert min(apart) > 1e-3


def test_meshes_of_a_class_are_near_each_other(modelnet: dict) -> None:
    (known, labels), (asked, truth) = modelnet["train"], modelnet["test"]
    found, _ = nearest(known, asked)
    assert (labels[found] == truth).mean() > 0.8


@pytest.mark.parametrize(("mine", "others"), [(SR1, SR2), (SR2, SR1)])
def test_distance_finds_the_unknown_set(modelnet: dict, mine: tuple, others: tuple) -> None:
    (known, labels), (asked, truth) = modelnet["train"], modelnet["test"]
    use = np.isin(truth, mine + others)
    _, distance = nearest(known[np.isin(labels, mine)], asked[use])
    assert roc_auc_score(np.isin(truth[use], others), distance) > 0.8


def test_scans_layout(scans: dict) -> None:
    for part, count in (("training", LARGE["scans_train"]), ("test", LARGE["scans_test"])):
        data, label, mask = scans[part]
        rows = count * len(SCAN_CLASSES) + (part == "test")
        assert data.shape == (rows, 2048, 3) and data.dtype == np.float32
        assert label.shape == (rows,) and mask.shape == (rows, 2048)
        assert np.bincount(label).min() == count and label.max() == 14
        assert 0 < (mask == -1).mean() < 0.2 and (mask[mask != -1] >= 0).all()
    bad = [path for path in bad_paths() if "#" in path]
    assert len(bad) == 1
    row = int(bad[0].split("#")[1])
    assert np.isnan(scans["test"][0]).all(axis=(1, 2)).nonzero()[0].tolist() == [row]


def test_scans_of_a_class_are_near_each_other_and_to_the_meshes(
    modelnet: dict, scans: dict
) -> None:
    features, labels = {}, {}
    for part, (data, label, _) in scans.items():
        good = np.isfinite(data).all(axis=(1, 2))
        features[part] = np.array([profile(cloud, np.ones(2048), up=1) for cloud in data[good]])
        labels[part] = np.array(SCAN_CLASSES)[label[good]]
    found, _ = nearest(features["training"], features["test"])
    assert (labels["training"][found] == labels["test"]).mean() > 0.5
    known, names = modelnet["train"]
    of_set = np.isin(names, SR2)
    use = np.isin(labels["training"], SR2)
    found, _ = nearest(known[of_set], features["training"][use])
    assert (names[of_set][found] == labels["training"][use]).mean() > 0.4


def test_a_viewpoint_sees_the_near_side_only() -> None:
    points = np.random.default_rng(0).standard_normal((12_000, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    toward = np.array([0.6, 0.0, 0.8])
    depth, seen = points @ toward, _visible(points, toward, 1 / 18)
    assert seen[depth > 0.5].mean() > 0.98 and seen[depth < -0.5].mean() < 0.05


def test_shapenet_layout(root: Path) -> None:
    with (root / "shapenet" / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "synsetId", "subSynsetId", "modelId", "split"]
    for column in ("id", "modelId"):
        assert len({row[column] for row in rows}) == len(rows)
    for synset in SYNSETS:
        assert {row["split"] for row in rows if row["synsetId"] == synset} == {
            "train",
            "val",
            "test",
        }
    listed = {(row["synsetId"], row["modelId"]) for row in rows}
    on_disk = {path.parts[-4:-2] for path in root.glob("shapenet/*/*/models/model_normalized.obj")}
    missing = {
        tuple(path.split("/")[1:3]) for path, wrong in bad_paths().items() if "all.csv" in wrong
    }
    assert listed - on_disk == missing and len(missing) == 2
    twice = on_disk - listed
    assert {(synset, model) for synset, model in twice if synset == "04401088"} == {
        ("04401088", model) for synset, model in listed if synset == "02992529"
    }
    assert [synset for synset, _ in twice].count("03001627") == 1
    for synset, model in sorted(on_disk):
        path = f"shapenet/{synset}/{model}/models/model_normalized.obj"
        if path not in bad_paths():
            points, faces = read_obj(root / path)
            assert faces.min() == 0 and faces.max() < len(points)
            assert np.linalg.norm(np.ptp(points, axis=0)) == pytest.approx(1, abs=1e-4)


def test_each_bad_mesh_is_bad_in_its_own_way(root: Path) -> None:
    seen = set()
    for path, wrong in bad_paths().items():
        if "#" in path or "all.csv" in wrong:
            continue
        seen.add(wrong)
        file = root / path
        if wrong == "empty file":
            assert file.stat().st_size == 0
            continue
        if wrong == "binary bytes, not text":
            with pytest.raises(UnicodeDecodeError):
                file.read_text(encoding="utf-8")
            continue
        if wrong == "cut off in the middle of the vertices":
            with pytest.raises(ValueError):
                read_off(file)
            continue
        points, faces = read_obj(file) if path.endswith(".obj") else read_off(file)
        if wrong == "a vertex is nan":
            assert np.isnan(points).any()
        elif wrong == "no faces":
            assert len(faces) == 0 < len(points)
        else:
            assert wrong == "a face names a vertex that does not exist"
            assert faces.max() >= len(points)
    assert len(seen) == 6


def test_without_bad_records_everything_parses(tmp_path: Path) -> None:
    write_threedos(tmp_path, bad_records=False, **SMALL)
    for path in sorted(tmp_path.rglob("*.o[fb][fj]")):
        points, faces = (read_off if path.suffix == ".off" else read_obj)(path)
        assert np.isfinite(points).all() and len(faces) and faces.max() < len(points)
    assert not any(
        (tmp_path / path.split("#")[0]).exists() for path in bad_paths() if "#" not in path
    )


def test_same_bytes_in_another_process(small: Path, tmp_path: Path) -> None:
    call = f"write_threedos(ROOT, {SIZES})"
    assert tree_digest_of_child(call, "tasks.sample.threedos", tmp_path) == tree_digest(small)


def test_an_item_does_not_depend_on_how_many_there_are(root: Path, small: Path) -> None:
    mine, all_of_them = tree_digest(small), tree_digest(root)
    names = [name for name in mine if name.endswith((".off", ".obj"))]
    for name in names:
        # Test meshes are numbered after the training ones.
        if "/test/" not in name or name in bad_paths():
            assert mine[name] == all_of_them[name]
    name = "scanobjectnn/main_split/training_objectdataset.h5"
    with h5py.File(small / name) as few, h5py.File(root / name) as many:
        assert np.array_equal(few["data"][2:4], many["data"][8:10])


def test_second_run_touches_nothing(small: Path) -> None:
    files = [path for path in small.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, ns=(7, 7))
    write_threedos(small, **SMALL)
    assert {path.stat().st_mtime_ns for path in files} == {7}


def test_bad_records_follow_the_sizes_and_the_seed() -> None:
    small = dict(bad_threedos_records(seed=3, scans_test=1))
    assert f"scanobjectnn/main_split/test_objectdataset.h5#{len(SCAN_CLASSES)}" in small
    assert len(small) == len(bad_paths()) and small.keys() != bad_paths().keys()
