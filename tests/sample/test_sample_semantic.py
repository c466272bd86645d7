"""The sample images parse with plain readers, vary within a class and differ between classes."""

import csv
import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from tasks.sample.semantic import (
    CIFAR_CLASSES,
    FUNGI,
    STL_CLASSES,
    bad_semantic_records,
    write_semantic,
)
from tests.sample.test_sample_condda import tree_digest, tree_digest_of_child
from tests.shared import shared_path

SMALL = {
    "cifar_train": 5, "cifar_test": 2, "stl_train": 2, "stl_test": 1, "imagenet_train": 2,
    "imagenet_val": 1,
}  # fmt: skip
SIZES = ", ".join(f"{name}={value}" for name, value in SMALL.items())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("semantic")
    write_semantic(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_semantic(folder, **SMALL)
    return folder


def read_cifar(root: Path, batch: str) -> tuple[np.ndarray, np.ndarray]:
    data = (root / "cifar10" / "cifar-10-batches-bin" / f"{batch}.bin").read_bytes()
    assert len(data) % 3073 == 0
    records = np.frombuffer(data, np.uint8).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]


def read_stl(root: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images = np.fromfile(root / "stl10" / f"{part}_X.bin", np.uint8).reshape(-1, 3, 96, 96)
    return images.transpose(0, 3, 2, 1), np.fromfile(root / "stl10" / f"{part}_y.bin", np.uint8)


def outline(image: np.ndarray) -> np.ndarray:
    """Histogram-of-gradients over a grid: what is drawn rather than its colour."""
    grey = cv2.resize(image, (32, 32), interpolation=cv2.INTER_AREA).astype(float).mean(axis=2)
    dy, dx = np.gradient(cv2.GaussianBlur(grey, (3, 3), 0))
    angle, size = np.arctan2(dy, dx) % np.pi, np.hypot(dx, dy)
    bins = np.minimum((angle / np.pi * 6).astype(int), 5)
    cells = [
        np.bincount(bins[i : i + 8, j : j + 8].ravel(), size[i : i + 8, j : j + 8].ravel(), 6)
        for i in range(0, 32, 8)
        for j in range(0, 32, 8)
    ]
    feature = np.concatenate(cells)
    return np.sqrt(feature / feature.sum())


def outlines(images: np.ndarray | list[np.ndarray]) -> np.ndarray:
    """Each picture and its mirror image look alike, so both are summed."""
    return np.array([outline(image) + outline(image[:, ::-1]) for image in images])


def accuracy(known: np.ndarray, labels: np.ndarray, asked: np.ndarray, truth: np.ndarray) -> float:
    found = np.linalg.norm(asked[:, None] - known, axis=2).argmin(axis=1)
    return (labels[found] == truth).mean()


def test_cifar_layout_and_signal(root: Path) -> None:
    parts = [read_cifar(root, f"data_batch_{k}") for k in range(1, 6)]
    for _, labels in parts:
        assert np.bincount(labels).tolist() == [12] * 10
        assert (np.diff(labels.astype(int)) != 0).mean() > 0.5, "classes are mixed"
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    asked, truth = read_cifar(root, "test_batch")
    assert np.bincount(truth).tolist() == [20] * 10
    meta = (root / "cifar10" / "cifar-10-batches-bin" / "batches.meta.txt").read_text()
    assert meta.split() == list(CIFAR_CLASSES)
    assert accuracy(outlines(images), labels, outlines(asked), truth) > 0.4
    everything = np.concatenate([images, asked]).reshape(len(images) + len(asked), -1)
    assert len(np.unique(everything, axis=0)) == len(everything)


def test_colour_alone_does_not_give_the_class_away(root: Path) -> None:
    known, labels = read_cifar(root, "data_batch_1")
    asked, truth = read_cifar(root, "test_batch")
    share = accuracy(known.mean(axis=(1, 2)), labels, asked.mean(axis=(1, 2)), truth)
    assert share < 0.4


def test_cifar_layout_is_the_published_one() -> None:
    import zipfile

    with zipfile.ZipFile(shared_path("images/cifar10/cifar10_binary_prefix.zip")) as archive:
        assert archive.read("cifar-10-batches-bin/batches.meta.txt").split() == [
            name.encode() for name in CIFAR_CLASSES
        ]
        size = archive.getinfo("cifar-10-batches-bin/test_batch.bin").file_size
        assert size % 3073 == 0


def test_stl_layout_and_signal(root: Path) -> None:
    (images, labels), (asked, truth) = read_stl(root, "train"), read_stl(root, "test")
    assert np.bincount(labels).tolist() == [0] + [10] * 10
    assert np.bincount(truth).tolist() == [0] + [8] * 10
    assert (root / "stl10" / "class_names.txt").read_text().split() == list(STL_CLASSES)
    assert accuracy(outlines(images), labels, outlines(asked), truth) > 0.4


def test_stl_is_column_major(root: Path) -> None:
    """Ships float: sky above and water below differ, left and right do not."""
    images, labels = read_stl(root, "train")
    ships = images[labels == STL_CLASSES.index("ship") + 1].astype(float).mean(axis=(0, 3))
    upright = abs(ships[:24].mean() - ships[-24:].mean())
    sideways = abs(ships[:, :24].mean() - ships[:, -24:].mean())
    assert upright > 2 * sideways


def test_imagenet_members_are_one_of_the_five_subsets() -> None:
    with shared_path("images/lists/semantic_anomaly_subsets.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["subset"] == "fungus"]
    assert {row["wnid"]: row["paper_name"] for row in rows} == FUNGI


def test_imagenet_layout_and_signal(root: Path) -> None:
    bad = {path for path, _ in bad_semantic_records()}
    images: dict[str, list] = {"train": [], "val": []}
    labels: dict[str, list] = {"train": [], "val": []}
    sizes = set()
    for path in sorted((root / "imagenet").glob("*/*/*")):
        if path.relative_to(root).as_posix() in bad:
            continue
        part, wnid, name = path.parts[-3:]
        assert name.startswith(f"{wnid}_" if part == "train" else "ILSVRC2012_val_")
        with Image.open(path) as image:
            assert image.format == "JPEG" and image.mode == "RGB"
            sizes.add(image.size)
            images[part].append(np.asarray(image))
        labels[part].append(wnid)
    assert len(sizes) >= 6
    assert np.unique(labels["train"], return_counts=True)[1].tolist() == [20] * 6
    assert np.unique(labels["val"], return_counts=True)[1].tolist() == [10] * 6
    found = accuracy(
        outlines(images["train"]), np.array(labels["train"]),
        outlines(images["val"]), np.array(labels["val"]),
    )  # fmt: skip
    assert found > 0.45


def test_bad_images(root: Path) -> None:
    records = [(root / path, wrong) for path, wrong in bad_semantic_records()]
    assert len(records) == 6
    for path, wrong in records:
        if wrong.startswith("text"):
            with pytest.raises(UnidentifiedImageError):
                Image.open(path)
        elif wrong.startswith("PNG whose header"):
            data = path.read_bytes()
            assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) < 1000
            assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [60_000] * 2
            with pytest.raises(Image.DecompressionBombError):
                Image.open(path)
        elif wrong.startswith("JPEG cut off"):
            with Image.open(path) as image, pytest.raises(OSError, match="truncated"):
                image.load()
        else:
            with Image.open(path) as image:
                image.load()
                kind = (image.format, image.mode)
            expected = {"CMYK": ("JPEG", "CMYK"), "grey": ("JPEG", "L"), "16-b": ("PNG", "I;16")}
            assert kind == expected[wrong[:4]]


def test_without_bad_records_there_are_none(small: Path, tmp_path: Path) -> None:
    write_semantic(tmp_path, bad_records=False, **SMALL)
    mine, bad = tree_digest(tmp_path), {path for path, _ in bad_semantic_records()}
    assert mine == {path: d for path, d in tree_digest(small).items() if path not in bad}


def test_same_bytes_in_another_process(small: Path, tmp_path: Path) -> None:
    call = f"write_semantic(ROOT, {SIZES})"
    assert tree_digest_of_child(call, "tasks.sample.semantic", tmp_path) == tree_digest(small)


def test_an_image_does_not_depend_on_how_many_there_are(root: Path, small: Path) -> None:
    few, _ = read_cifar(small, "data_batch_3")
    many, _ = read_cifar(root, "data_batch_3")
    assert {image.tobytes() for image in few} < {image.tobytes() for image in many}
    mine, all_of_them = tree_digest(small), tree_digest(root)
    photos = [path for path in mine if path.startswith("imagenet")]
    assert photos and all(mine[path] == all_of_them[path] for path in photos)


def test_second_run_touches_nothing(small: Path) -> None:
    files = [path for path in small.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, ns=(7, 7))
    write_semantic(small, **SMALL)
    assert {path.stat().st_mtime_ns for path in files} == {7}


def test_another_seed_gives_other_images(small: Path, tmp_path: Path) -> None:
    write_semantic(tmp_path, seed=1, **SMALL)
    mine, other = tree_digest(small), tree_digest(tmp_path)
    same = {Path(path).name for path in mine if mine[path] == other.get(path)}
    fixed = {"batches.meta.txt", "class_names.txt"}
    drawn_without_a_seed = {
        Path(p).name for p, w in bad_semantic_records() if w[:4] in ("text", "PNG ")
    }
    assert same == fixed | drawn_without_a_seed


def test_uneven_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 5"):
        write_semantic(tmp_path, cifar_train=7)
