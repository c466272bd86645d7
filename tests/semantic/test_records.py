"""CIFAR-10 and STL-10 files: labels and pixels in place, pickles that can call nothing."""

import io
import os
import pickle
import pickletools
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from schemas.errors import RecordError
from tasks.semantic import records
from tasks.semantic.records import (
    CIFAR_CLASSES,
    read_cifar_binary,
    read_cifar_python,
    read_stl,
)
from tests.shared import shared_path


def batch(count: int = 3) -> tuple[list[int], np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3072), np.uint8)
    return [number % 10 for number in range(count)], pixels


def test_binary_records():
    labels, pixels = batch()
    data = b"".join(
        bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)
    )
    found = read_cifar_binary(data + b"abc")
    assert found.labels.tolist() == labels and found.rest == 3
    # byte 1024 c + 32 y + x of a record is channel c at (x, y)
    assert found.pixels[2, 7, 11, 1] == pixels[2, 1024 + 32 * 7 + 11]


def test_the_real_binary_is_the_real_jpeg():
    """Channel order and orientation, checked against a second copy of the same images."""
    with zipfile.ZipFile(shared_path("images/cifar10/cifar10_binary_prefix.zip")) as archive:
        found = read_cifar_binary(archive.read("cifar-10-batches-bin/test_batch.bin"))
    assert len(found.labels) == 846 and found.rest == 0
    jpegs = zipfile.ZipFile(shared_path("images/cifar10/cifar10_jpeg_test.zip"))
    seen = dict.fromkeys(range(10), 0)
    for label, pixels in list(zip(found.labels.tolist(), found.pixels, strict=True))[:60]:
        name = f"test/{CIFAR_CLASSES[label]}/{seen[label]:04d}.jpg"
        seen[label] += 1
        jpeg = np.asarray(Image.open(io.BytesIO(jpegs.read(name))).convert("RGB"))
        assert np.abs(jpeg.astype(int) - pixels).mean() < 12, name


def test_stl_is_stored_by_columns():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 96, 96), np.uint8)
    found = read_stl(pixels.tobytes(), bytes([1, 10]))
    assert found.labels.tolist() == [0, 9]
    # byte c * 9216 + x * 96 + y is channel c at (x, y)
    assert found.pixels[1, 5, 70, 2] == pixels[1, 2, 70, 5]


@pytest.mark.parametrize("wrong", [b"\1", b"\1\2\3"], ids=["few", "many"])
def test_stl_files_that_do_not_belong_together(wrong):
    with pytest.raises(RecordError, match="fetch both files again") as caught:
        read_stl(bytes(2 * 27_648), wrong)
    assert caught.value.rule == "label_length"


# ---------------------------------------------------------------- pickles


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("column_major", [False, True], ids=["C", "F"])
def test_pickles_of_every_protocol_of_numpy(protocol, column_major):
    labels, pixels = batch()
    stored = np.asfortranarray(pixels) if column_major else pixels
    content = {"data": stored, "labels": labels, "filenames": ["a", "b", "c"]}
    found = read_cifar_python(pickle.dumps(content, protocol))
    assert found.labels.tolist() == labels
    assert found.pixels[2, 7, 11, 1] == pixels[2, 1024 + 32 * 7 + 11]


def python_2_pickle(labels: list[int], pixels: np.ndarray) -> bytes:
    """As cPickle of Python 2 wrote the official batches: 8-bit strings, numpy.core names."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little")

    rows, columns = pixels.shape
    raw = b"T" + (rows * columns).to_bytes(4, "little") + pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + text(b"b") + b"tR"
        b"(K\1(" + number(rows) + number(columns) + b"tcnumpy\ndtype\n(" + text(b"u1")
        + b"K\0K\1tR(K\3" + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\0tbI00\n"
        + raw + b"tb"
    )  # fmt: skip
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def test_the_pickles_of_the_official_archive():
    labels, pixels = batch()
    data = python_2_pickle(labels, pixels)
    pickletools.dis(data, io.StringIO())  # a whole, valid pickle
    found = read_cifar_python(data)
    assert found.labels.tolist() == labels
    assert np.array_equal(found.pixels.transpose(0, 3, 1, 2).reshape(3, -1), pixels)


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


UNSAFE = {
    "system": Calls(os.system, "touch /tmp/novelty_pickle_was_run"),
    "eval": Calls(eval, "1 + 1"),
    "getattr": Calls(getattr, "text", "upper"),
    "nested": {"data": Calls(print, "x"), "labels": []},
    "objects": {"data": np.array([{}], object), "labels": [1]},
    "floats": {"data": np.zeros((1, 3072)), "labels": [1]},
}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", UNSAFE)
def test_a_pickle_that_asks_for_anything_else_is_refused(name, protocol, monkeypatch):
    called = []
    monkeypatch.setattr(os, "system", called.append)
    with pytest.raises(RecordError) as caught:
        read_cifar_python(pickle.dumps(UNSAFE[name], protocol))
    assert caught.value.rule == "unsafe_pickle" and not called


def test_every_global_but_the_stand_ins_is_refused():
    """The one way from a pickle to code is find_class; nothing it gives back is a real function."""
    for (module, name), stand_in in records._STAND_INS.items():
        assert stand_in.__module__ == records.__name__, (module, name)
    for name in (b"builtins\nexec", b"posix\nsystem", b"numpy\nfrombuffer", b"copyreg\n__newobj__"):
        with pytest.raises(RecordError, match="only arrays"):
            read_cifar_python(b"\x80\x02c" + name + b"\n.")


NOT_BATCHES = {
    "list": ([1, 2], "not_a_batch"),
    "no data": ({"labels": [1]}, "not_a_batch"),
    "no labels": ({"data": batch(1)[1]}, "not_a_batch"),
    "text labels": ({"data": batch(1)[1], "labels": ["cat"]}, "not_a_batch"),
    "wrong width": ({"data": np.zeros((1, 10), np.uint8), "labels": [1]}, "not_a_batch"),
    "few labels": ({"data": batch(2)[1], "labels": [1]}, "label_length"),
}


@pytest.mark.parametrize("name", NOT_BATCHES)
def test_a_pickle_that_is_no_batch(name):
    content, rule = NOT_BATCHES[name]
    with pytest.raises(RecordError) as caught:
        read_cifar_python(pickle.dumps(content, 2))
    assert caught.value.rule == rule


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_pickle_is_a_refusal(data):
    whole = bytearray(python_2_pickle(*batch(1)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(whole), 250) - 1))
        # Opcodes that ask for gigabytes are the business of the child's memory limit.
        byte = data.draw(st.integers(0, 255).filter(lambda value: value not in b"rTXB\x8d\x8e\x96"))
        whole[place] = byte
    cut = data.draw(st.integers(0, len(whole)))
    try:
        read_cifar_python(bytes(whole[:cut]))
    except RecordError as error:
        assert error.message
