"""Archives that are in order: every byte comes out, as zipfile and tarfile read it."""

import gzip
import hashlib
import io
import os
import random
import tarfile
import threading
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ArchiveError, LakeError, SourceError
from storage import archives
from storage.archives import ArchiveLimits, TarArchive, ZipArchive, extract
from tests.shared import shared_path

RANDOM = random.Random(0)
FILES = {
    "top/b.json": b'{"a": 1}' * 5000,
    "top/a.bin": RANDOM.randbytes(2_000_000),
    "top/deep/er/empty": b"",
    "naïve/日本.txt": "ß".encode(),
}


class Unseekable(io.RawIOBase):
    """zipfile then writes data descriptors, since it cannot go back to the local header."""

    def __init__(self, file):
        self._file = file

    def writable(self):
        return True

    def write(self, data):
        return self._file.write(data)


def make_zip(path: Path, files: dict[str, bytes], method=zipfile.ZIP_DEFLATED, **options) -> Path:
    with zipfile.ZipFile(path, "w", method, **options) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def make_tar(path: Path, files: dict[str, bytes], format=tarfile.PAX_FORMAT) -> Path:
    mode = "w" if path.name.endswith(".tar") else "w:gz"
    with tarfile.open(path, mode, format=format) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def contents(archive: ZipArchive | TarArchive) -> dict[str, bytes]:
    return {name: archive.read(name) for name in archive.members}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip(tmp_path, method):
    archive = ZipArchive(make_zip(tmp_path / "a.zip", FILES, method))
    assert contents(archive) == FILES
    member = archive.members["top/b.json"]
    with zipfile.ZipFile(archive.path) as other:
        crc = other.getinfo("top/b.json").CRC
    assert (member.size, member.digest) == (40_000, f"crc32:{crc:08x}:40000")


def test_zip_with_data_descriptors_and_zip64_headers_and_a_prefix(tmp_path):
    path = tmp_path / "a.zip"
    with open(path, "wb") as file:
        file.write(b"#!/bin/sh\n")
        with zipfile.ZipFile(Unseekable(file), "w", zipfile.ZIP_DEFLATED) as archive:
            for number, (name, data) in enumerate(FILES.items()):
                with archive.open(name, "w", force_zip64=number % 2 == 0) as member:
                    member.write(data)
    assert contents(ZipArchive(path)) == FILES
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        with archive.open("x", "w", force_zip64=True) as member:
            member.write(b"abc")
        archive.comment = b"PK\1\2 a comment"
    assert contents(ZipArchive(tmp_path / "b.zip")) == {"x": b"abc"}


def test_zip_folders_are_not_members(tmp_path):
    path = make_zip(tmp_path / "a.zip", {"d/": b"", "d/x": b"1", "./y": b"2"})
    assert contents(ZipArchive(path)) == {"d/x": b"1", "y": b"2"}
    assert ZipArchive(make_zip(tmp_path / "none.zip", {})).members == {}


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar(tmp_path, suffix, format):
    files = FILES | {f"long/{'x' * 200}/{'y' * 90}": b"long name"}
    archive = TarArchive(make_tar(tmp_path / f"a{suffix}", files, format))
    assert contents(archive) == files
    for name, member in archive.members.items():
        assert member.size == len(files[name])
        assert member.digest == hashlib.sha256(files[name]).hexdigest()


def test_tar_of_a_folder_as_people_make_them(tmp_path):
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "x").write_bytes(b"1")
    (source / "y").write_bytes(b"2" * 512)
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        archive.add(source, ".")
    assert contents(TarArchive(tmp_path / "a.tgz")) == {"d/x": b"1", "y": b"2" * 512}
    assert TarArchive(make_tar(tmp_path / "none.tar.gz", {})).members == {}


def test_tar_in_several_gzip_members_with_padding(tmp_path):
    plain = make_tar(tmp_path / "a.tar", FILES).read_bytes()
    cuts = [0, 100, 100, 70_000, len(plain)]
    packed = b"".join(gzip.compress(plain[a:b]) for a, b in pairwise(cuts))
    (tmp_path / "a.tar.gz").write_bytes(packed + bytes(1000))
    assert contents(TarArchive(tmp_path / "a.tar.gz")) == FILES


def test_gzip_is_told_by_content_not_by_name(tmp_path):
    os.rename(make_tar(tmp_path / "a.tar.gz", FILES), tmp_path / "a.tar")
    assert contents(TarArchive(tmp_path / "a.tar")) == FILES


@pytest.mark.parametrize("points", [2, 4, archives.GZIP_POINTS])
def test_gzip_is_read_in_any_order_from_restart_points(tmp_path, monkeypatch, points):
    monkeypatch.setattr(archives, "BLOCK", 1 << 14)
    monkeypatch.setattr(archives, "GZIP_POINTS", points)
    files = {f"{i:02d}": RANDOM.randbytes(1000 * i) + bytes(5000) for i in range(40)}
    path = make_tar(tmp_path / "a.tgz", files)
    found = TarArchive(path)
    again = TarArchive(path, members=found.members.values())
    for archive in (found, again):
        for name in [*sorted(files, reverse=True), *sorted(files), "07", "31", "30", "39", "00"]:
            assert archive.read(name) == files[name]
        assert len(archive._stream._points) <= points


def test_going_back_costs_little_decompression(tmp_path, monkeypatch):
    files = {f"{i:03d}": RANDOM.randbytes(100_000) for i in range(200)}
    archive = TarArchive(make_tar(tmp_path / "a.tgz", files))
    packed = []
    real = archives._GzipPoint.step

    def counted(self, fd, most):
        data = real(self, fd, most)
        packed.append(len(data))
        return data

    monkeypatch.setattr(archives._GzipPoint, "step", counted)
    for name in ["150", "003", "100"]:
        assert archive.read(name) == files[name]
    assert sum(packed) < 3 * (archives.BLOCK + 2 * 100_000)
    packed.clear()
    for name in sorted(files)[101:]:
        archive.read(name)
    assert sum(packed) < 1.05 * 99 * 100_000


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tgz"])
def test_threads_and_forks_read_at_once(tmp_path, name):
    files = {f"{i:02d}": bytes([i]) * 70_000 + RANDOM.randbytes(10_000) for i in range(40)}
    make = make_zip if name == "a.zip" else make_tar
    path = make(tmp_path / name, files)
    archive = ZipArchive(path) if name == "a.zip" else TarArchive(path)
    wrong = []

    def read_all(step: int) -> None:
        for i in range(40):
            wanted = f"{i * step % 40:02d}"
            if archive.read(wanted) != files[wanted]:
                wrong.append(wanted)

    threads = [threading.Thread(target=read_all, args=(step,)) for step in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    child = os.fork()
    if child == 0:
        read_all(39)
        os._exit(len(wrong))
    read_all(1)
    assert os.waitpid(child, 0)[1] == 0 and wrong == []


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\\\0:"), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(NAMES, st.binary(max_size=3000) | st.just(b"x" * 50_000), max_size=8),
    st.sampled_from(["stored.zip", "deflated.zip", "plain.tar", "packed.tgz"]),
)
def test_whatever_is_packed_comes_out(tmp_path_factory, files, kind):
    path = tmp_path_factory.mktemp("any") / kind
    if kind.endswith(".zip"):
        method = zipfile.ZIP_STORED if kind == "stored.zip" else zipfile.ZIP_DEFLATED
        assert contents(ZipArchive(make_zip(path, files, method))) == files
    else:
        assert contents(TarArchive(make_tar(path, files))) == files


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_extract(tmp_path, name):
    make = make_zip if name == "a.zip" else make_tar
    path = make(tmp_path / name, FILES)
    into = extract(path, tmp_path / "new" / "here")
    assert on_disk(into) == FILES
    assert list(into.parent.iterdir()) == [into]
    with pytest.raises(SourceError, match="not an empty folder"):
        extract(path, into)
    (tmp_path / "empty").mkdir()
    assert on_disk(extract(path, tmp_path / "empty")) == FILES


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_extract_leaves_nothing_of_a_refused_archive(tmp_path, name):
    make = make_zip if name == "a.zip" else make_tar
    path = make(tmp_path / name, FILES | {"last": RANDOM.randbytes(1000)})
    data = bytearray(path.read_bytes())
    at = -1500 if name == "a.zip" else -600
    data[at] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ArchiveError):
        extract(path, tmp_path / "into")
    assert [found.name for found in tmp_path.iterdir()] == [name]


def test_extract_says_why_the_disk_refuses(tmp_path, monkeypatch):
    path = make_zip(tmp_path / "a.zip", FILES)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LakeError, match="disk is full"):
        extract(path, tmp_path / "into")
    assert [found.name for found in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_an_archive_that_changes_under_us_is_noticed(tmp_path, name):
    make = make_zip if name == "a.zip" else make_tar
    path = make(tmp_path / name, FILES)
    archive = ZipArchive(path) if name == "a.zip" else TarArchive(path)
    with open(path, "ab") as file:
        file.write(b"\0")
    with pytest.raises(SourceError, match="changed while it was in use"):
        archive.read("top/b.json")
    path.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        archive.read("top/b.json")


def test_limits_are_inclusive(tmp_path):
    files = {"a": b"x" * 100, "b": b"y" * 100}
    exact = ArchiveLimits(members=2, total_bytes=200)
    assert contents(ZipArchive(make_zip(tmp_path / "a.zip", files), exact)) == files
    assert contents(TarArchive(make_tar(tmp_path / "a.tar", files), exact)) == files


@pytest.mark.parametrize(
    "name",
    [
        "shapes/ModelNet40_mini.zip",
        "images/tiny_imagenet_subset.zip",
        "images/stl10_examples.zip",
        "images/cifar10/cifar10_binary_prefix.zip",
    ],
)
def test_real_archives_agree_with_zipfile(name):
    path = shared_path(name)
    archive = ZipArchive(path)
    with zipfile.ZipFile(path) as other:
        assert sorted(archive.members) == sorted(i.filename for i in other.infolist())
        for number, name in enumerate(archive.members):
            if number % 10 == 0:
                assert archive.read(name) == other.read(name)
