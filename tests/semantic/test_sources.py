"""Every file of a source is an image, a file of images, a companion or a refusal."""

import io
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from schemas.errors import SourceError
from storage.raw import open_raw
from tasks.semantic.sources import Listing, list_images
from tasks.semantic.trials import declared_subsets, imagenet_names
from tests.shared import shared_path


def tree(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def listed(name: str, root: Path, **options) -> Listing:
    return list_images(name, open_raw(root), **options)


def rules(listing: Listing) -> dict[str, str]:
    return {refused.record: refused.rule for refused in listing.refused}


def test_folders_of_classes(tmp_path):
    found = listed("mine", tree(tmp_path, "cat/1.jpg", "cat/2.PNG", "a/dog/1.jpg", "notes.txt"))
    assert [(e.sample_id, e.class_, e.split) for e in found.entries] == [
        ("mine/a/dog/1", "dog", None),
        ("mine/cat/1", "cat", None),
        ("mine/cat/2", "cat", None),
    ]
    assert rules(found) == {"notes.txt": "unrecognised_file"}


@pytest.mark.parametrize("layout", ["{split}/{class}/1.jpg", "{class}/{split}/1.jpg"])
def test_split_folders_on_either_side(layout, tmp_path):
    wanted = {(c, s) for c in ("cat", "dog") for s in ("train", "val", "Validation", "testing")}
    names = [layout.format(**{"class": c, "split": s}) for c, s in wanted]
    found = listed("mine", tree(tmp_path, *names, "stray.jpg"))
    splits = {"train": "train", "val": "valid", "Validation": "valid", "testing": "test"}
    assert {(e.class_, e.split) for e in found.entries} == {(c, splits[s]) for c, s in wanted}
    assert rules(found) == {"stray.jpg": "no_split"}


def test_a_class_may_be_called_like_a_split(tmp_path):
    names = [f"{class_}/{n}.jpg" for class_ in ("train", "bus", "car") for n in range(3)]
    assert {e.class_ for e in listed("mine", tree(tmp_path, *names)).entries} == {
        "train", "bus", "car",
    }  # fmt: skip


def test_one_id_once(tmp_path):
    found = listed("mine", tree(tmp_path, "cat/1.jpg", "cat/1.png"))
    assert [e.file for e in found.entries] == ["cat/1.jpg"]
    assert rules(found) == {"mine/cat/1": "duplicate_id"}


def test_cifar_binary_before_python(tmp_path):
    found = listed(
        "cifar10",
        tree(tmp_path, "b/data_batch_1.bin", "p/data_batch_1", "p/test_batch", "p/batches.meta"),
    )
    assert [(r.stem, r.reader, r.split) for r in found.records] == [
        ("data_batch_1", "cifar_binary", "train"),
        ("test_batch", "cifar_python", "test"),
    ]
    assert rules(found) == {"p/data_batch_1": "duplicate_id"}


def test_stl_needs_labels(tmp_path):
    names = ["train_X.bin", "train_y.bin", "test_X.bin", "unlabeled_X.bin", "fold_indices.txt"]
    found = listed("stl10", tree(tmp_path, *names))
    assert [(r.split, r.labels) for r in found.records] == [("train", "train_y.bin")]
    assert rules(found) == {"test_X.bin": "missing_labels"}


def test_imagenet_by_folder_name_file_name_and_list(tmp_path):
    root = tree(
        tmp_path,
        "train/n02088364/n02088364_1.JPEG",
        "train/n02088364/images/n02088364_2.JPEG",
        "n02091244_Ibizan_hound.JPEG",
        "val/ILSVRC2012_val_00000001.JPEG",
        "val/images/val_7.JPEG",
        "val/images/val_8.JPEG",
        "train/n02088364/n02088364_boxes.txt",
    )
    (root / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\nILSVRC2012_val_00000001,n02091244 1 2 3 4 n02091244 5 6 7 8 \n"
    )
    (root / "val_annotations.txt").write_text("val_7.JPEG\tn02088364\t0\t0\t62\t62\n")
    (root / "words.txt").write_text("n02088364\tbeagle\nn02091244\tIbizan hound, Ibizan Podenco\n")
    found = listed("imagenet", root)
    assert [
        (e.file.rpartition("/")[2], e.class_, e.class_name, e.split) for e in found.entries
    ] == [
        ("n02091244_Ibizan_hound.JPEG", "n02091244", "Ibizan hound", None),
        ("n02088364_2.JPEG", "n02088364", "beagle", "train"),
        ("n02088364_1.JPEG", "n02088364", "beagle", "train"),
        ("ILSVRC2012_val_00000001.JPEG", "n02091244", "Ibizan hound", "test"),
        ("val_7.JPEG", "n02088364", "beagle", "test"),
    ]
    assert rules(found) == {"val/images/val_8.JPEG": "no_class"}
    some = listed("imagenet", root, classes={"beagle"})
    assert len(some.entries) == 3 and some.left_out == 2 and rules(some) == rules(found)


def test_what_else_lies_in_the_official_archives_is_no_refusal(tmp_path):
    """Tiny ImageNet and ILSVRC: test images have no labels, boxes and lists are not images."""
    root = tree(
        tmp_path,
        "tiny-imagenet-200/train/n02088364/images/n02088364_1.JPEG",
        "tiny-imagenet-200/train/n02088364/n02088364_boxes.txt",
        "tiny-imagenet-200/test/images/test_0.JPEG",
        "ILSVRC/Data/CLS-LOC/train/n02088364/n02088364_2.JPEG",
        "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG",
        "ILSVRC/Annotations/CLS-LOC/train/n02088364/n02088364_2.xml",
        "ILSVRC/ImageSets/CLS-LOC/train_cls.txt",
        "LOC_train_solution.csv",
        "LOC_sample_submission.csv",
        "LOC_synset_mapping.txt",
        "test/n02088364/1.JPEG",
    )
    found = listed("imagenet", root)
    assert [(e.class_, e.split) for e in found.entries] == [
        ("n02088364", "train"), ("n02088364", "test"), ("n02088364", "train"),
    ]  # fmt: skip
    assert not found.refused and found.unlabelled == 2


def test_nothing_found_is_a_sentence(tmp_path):
    with pytest.raises(SourceError, match=r"no image found in .*: expected <class>/<name>"):
        listed("cifar10", tree(tmp_path, "readme.html"))


def test_the_real_tiny_imagenet():
    names = imagenet_names(declared_subsets(None))
    path = shared_path("images/tiny_imagenet_subset.zip")
    found = list_images("imagenet", open_raw(path), class_names=names)
    assert Counter((e.split) for e in found.entries) == {"train": 2400, "test": 600}
    assert set(Counter((e.class_, e.split) for e in found.entries).values()) == {200, 50}
    assert not found.refused
    members = list_images("imagenet", open_raw(path), classes=names, class_names=names)
    assert len({e.class_ for e in members.entries}) == 6 and members.left_out == 6 * 250


def test_the_real_one_of_each_member():
    found = listed("imagenet", shared_path("images/imagenet_sample"))
    assert len({e.class_ for e in found.entries}) == 43 == len(found.entries)
    assert {e.class_ for e in found.entries} == set(imagenet_names(declared_subsets(None)))


def test_archives_are_read_in_place(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("train/cat/1.jpg", b"x")
        archive.writestr("train/dog/1.jpg", b"x")
    (tmp_path / "set.zip").write_bytes(buffer.getvalue())
    found = listed("cifar10.train", tmp_path / "set.zip")
    assert found.dataset == "cifar10" and found.name == "cifar10.train"
    assert [e.sample_id for e in found.entries] == ["cifar10/train/cat/1", "cifar10/train/dog/1"]
