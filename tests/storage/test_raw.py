"""One interface over folders, zips and tars: same names, same bytes, honest identities."""

import hashlib
import io
import os
import random
import socket
import tarfile
import zipfile
from pathlib import Path

import pytest

from schemas.errors import ArchiveError, ChangedSource, RecordError, SourceError
from storage import filehash, raw
from storage.archives import ArchiveLimits, TarArchive, ZipArchive
from storage.filehash import HashCache
from storage.raw import RawFile, open_raw, top_folder
from tests.shared import shared_path

FILES = {
    "data/normal/10/2.json": b"{}",
    "data/normal/9/1.json": b'{"a": 1}' * 50,
    "data/normal/9/1.png": random.Random(0).randbytes(70_000),
    "data/empty": b"",
}
KINDS = ["folder", "a.zip", "a.tar", "a.tar.gz", "A.TGZ"]


@pytest.fixture(autouse=True)
def _forget():
    raw._opened.clear()


@pytest.fixture
def cache(tmp_path):
    return HashCache(tmp_path / "hashes.sqlite")


def make(path: Path, files: dict[str, bytes] = FILES) -> Path:
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    elif "." in path.name:
        with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    else:
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
            os.utime(path / name, (1, 1))
    os.utime(path, (1, 1))
    return path


def refused(source, name: str, rule: str, limit: int = 1 << 20) -> str:
    with pytest.raises(RecordError) as caught:
        source.read(name, limit)
    assert caught.value.rule == rule
    return caught.value.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [True, False])
def test_all_kinds_alike(tmp_path, cache, kind, cached):
    source = open_raw(make(tmp_path / kind), cache if cached else None)
    files = source.files()
    assert [file.name for file in files] == sorted(FILES)
    for file in files:
        data = FILES[file.name]
        assert file.size == len(data) and source.read(file.name) == data
        if kind != "a.zip":
            assert file.digest == hashlib.sha256(data).hexdigest()
    assert len({file.digest for file in files}) == len(files)
    assert [f.name for f in source.files("*/9/*.json")] == ["data/normal/9/1.json"]
    assert [f.name for f in source.files("data/*1.*")] == [
        "data/normal/9/1.json",
        "data/normal/9/1.png",
    ]
    assert source.skipped == []
    message = refused(source, "data/normal/9/1.png", "too_large", 69_999)
    assert "has 70000 bytes, expected at most 69999" in message
    assert len(source.read("data/normal/9/1.png", 70_000)) == 70_000
    for name in ("data/normal/9/7.png", "data/normal", "Data/empty"):
        assert name in refused(source, name, "missing")


@pytest.mark.parametrize("kind", KINDS)
def test_inside_and_the_root_that_opens_it_again(tmp_path, cache, kind):
    path = make(tmp_path / kind)
    whole = open_raw(path, cache)
    assert top_folder(whole) == "data/"
    for inside in ("data/normal/", "data/normal", "/data/normal"):
        part = open_raw(path, cache, inside=inside)
        assert [f.name for f in part.files()] == ["10/2.json", "9/1.json", "9/1.png"]
        assert part.read("10/2.json") == b"{}"
        refused(part, "data/normal/10/2.json", "missing")
        again = open_raw(Path(part.root), cache)
        assert again.root == part.root and again.files() == part.files()
    assert top_folder(part) is None
    assert open_raw(Path(whole.root)).files() == whole.files()
    for inside in ("data/norm", "nowhere/"):
        with pytest.raises(SourceError, match=r"has no folder .*Found at its top: data\."):
            open_raw(path, cache, inside=inside)


def test_top_folder_of_loose_files(tmp_path):
    assert top_folder(open_raw(make(tmp_path / "a.zip", {"a": b"", "b": b""}))) is None
    assert top_folder(open_raw(make(tmp_path / "b.zip", {"a": b""}))) is None
    assert top_folder(open_raw(make(tmp_path / "c.zip", {}))) is None


def test_sources_that_are_not_there_say_what_to_do(tmp_path):
    with pytest.raises(SourceError, match=r"does not exist\. Name an existing folder"):
        open_raw(tmp_path / "none")
    (tmp_path / "a.txt").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"neither a folder nor a \.zip"):
        open_raw(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "a.zip")
    with pytest.raises(SourceError, match="neither a folder nor"):
        open_raw(tmp_path / "a.zip")


def test_a_relative_path_gets_an_absolute_root(tmp_path, monkeypatch):
    make(tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    assert open_raw(Path("folder")).root == str(tmp_path / "folder")


def test_a_second_run_reads_no_file(tmp_path, cache, monkeypatch):
    first = open_raw(make(tmp_path / "folder"), cache).files()
    monkeypatch.setattr(filehash, "_hash", lambda path: pytest.fail(f"read {path}"))
    assert open_raw(tmp_path / "folder", cache).files() == first
    make(tmp_path / "other")
    unread = open_raw(tmp_path / "other", cache).files(digests=False)
    assert unread == [RawFile(name, len(FILES[name]), "") for name in sorted(FILES)]


def test_a_changed_file_changes_its_digest_alone(tmp_path, cache):
    source = open_raw(make(tmp_path / "folder"), cache)
    before = source.files()
    (tmp_path / "folder" / "data/empty").write_bytes(b"now")
    after = source.files()
    assert [b.name for b, a in zip(before, after, strict=True) if b != a] == ["data/empty"]


def test_links_pipes_and_strange_names_are_listed_not_read(tmp_path, cache):
    folder = make(tmp_path / "folder")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    os.symlink(outside, folder / "linked")
    os.symlink(outside / "secret", folder / "data/link_out")
    os.symlink("empty", folder / "data/link_in")
    os.symlink("..", folder / "data/loop")
    os.symlink("none", folder / "data/broken")
    os.mkfifo(folder / "data/pipe")
    with open(os.fsencode(folder) + b"/data/\xff.json", "wb"):
        pass
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(folder / "socket"))
        source = open_raw(folder, cache)
        assert [file.name for file in source.files()] == sorted(FILES)
    found = {skipped.name: skipped.reason for skipped in source.skipped}
    assert sorted(found) == [skipped.name for skipped in source.skipped]
    assert set(found) == {
        "linked", "data/link_out", "data/link_in", "data/loop", "data/broken",
        "data/pipe", "data/\\udcff.json", "socket",
    }  # fmt: skip
    assert "symbolic link" in found["linked"] and "symbolic link" in found["data/link_in"]
    assert "neither file nor folder" in found["data/pipe"]
    assert "not UTF-8" in found["data/\\udcff.json"]
    source.files()
    assert len(source.skipped) == 8
    for name in ("linked/secret", "data/link_out", "data/link_in", "data/loop/data/empty"):
        assert "symbolic link" in refused(source, name, "unreadable")
    for name in ("../outside/secret", str(outside / "secret"), "data//empty", "data/./empty", ""):
        refused(source, name, "unreadable")
    refused(source, "data/\0", "unreadable")
    refused(source, "data/pipe", "missing")


def test_the_root_itself_may_be_a_link(tmp_path, cache):
    make(tmp_path / "folder")
    os.symlink(tmp_path / "folder", tmp_path / "link")
    source = open_raw(tmp_path / "link", cache)
    assert source.root == str(tmp_path / "link")
    assert [file.name for file in source.files()] == sorted(FILES)
    assert source.read("data/empty") == b""


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_that_may_not_be_read_stops(tmp_path, cache, monkeypatch, cached):
    source = open_raw(make(tmp_path / "folder"), cache if cached else None)
    real = filehash._hash

    def denied(path):
        if path.endswith("1.png"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(filehash, "_hash", denied)
    with pytest.raises(SourceError, match=r"9/1\.png cannot be read: Permission denied\. Mend its"):
        source.files()


FAULTS = [
    FileNotFoundError(2, "No such file"),
    OSError(5, "Input/output error"),
    OSError("it changed"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=["gone", "disk", "changed"])
@pytest.mark.parametrize("cached", [True, False])
def test_what_is_gone_between_listing_and_hashing_is_no_data(
    tmp_path, cache, monkeypatch, cached, fault
):
    """For a moment: it is listed again. For long: a sentence, and never a source without it."""
    folder, left = make(tmp_path / "folder"), [1]
    source, real = open_raw(folder, cache if cached else None), filehash._hash

    def hashed(path):
        if path.endswith("1.png") and left[0]:
            left[0] -= 1
            raise fault
        return real(path)

    monkeypatch.setattr(filehash, "_hash", hashed)
    monkeypatch.setattr(raw, "LISTING_PAUSES", (0, 0))
    assert [file.name for file in source.files()] == sorted(FILES) and not source.skipped
    for path in folder.rglob("1.png"):
        os.utime(path)  # remembered digests are no longer true
    left[0] = 10
    with pytest.raises(ChangedSource, match=r"1\.png cannot be read: .*, though it was listed"):
        source.files()


def test_a_folder_that_cannot_be_listed_stops(tmp_path, monkeypatch):
    source = open_raw(make(tmp_path / "folder"))
    real = os.scandir

    def denied(path):
        if str(path).endswith("9/"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(SourceError, match="normal/9/ cannot be listed: Permission denied"):
        source.files()


def test_order_does_not_depend_on_the_directory(tmp_path, monkeypatch):
    source = open_raw(make(tmp_path / "folder"))
    first = source.files()
    real = os.scandir

    class Reversed:
        def __init__(self, path):
            with real(path) as entries:
                self._entries = list(entries)[::-1]

        def __enter__(self):
            return iter(self._entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Reversed)
    assert source.files() == first


def test_zip_identity_needs_no_data(tmp_path):
    path = make(tmp_path / "a.zip")
    data = bytearray(path.read_bytes())
    before = open_raw(path).files()
    data[40] ^= 0xFF
    path.write_bytes(data)
    assert open_raw(path).files() == before
    crc = next(file.digest for file in before if file.name == "data/normal/10/2.json")
    assert crc == f"crc32:{__import__('zlib').crc32(b'{}'):08x}:2"


@pytest.mark.parametrize("kind", ["a.tar", "a.tar.gz"])
def test_tar_is_streamed_once(tmp_path, cache, monkeypatch, kind):
    path = make(tmp_path / kind)
    first = open_raw(path, cache).files()
    raw._opened.clear()
    monkeypatch.setattr(TarArchive, "_scan", lambda self: pytest.fail("streamed again"))
    again = open_raw(path, HashCache(cache.path))
    assert again.files() == first
    assert {f.name: again.read(f.name) for f in first} == FILES


def test_a_changed_tar_gets_a_new_index(tmp_path, cache):
    path = make(tmp_path / "a.tar")
    assert len(open_raw(path, cache).files()) == len(FILES)
    make(path, {"other": b"1"})
    os.utime(path, (2, 2))
    assert [file.name for file in open_raw(path, cache).files()] == ["other"]


def test_an_index_made_under_loose_limits_does_not_pass_strict_ones(tmp_path, cache):
    path = make(tmp_path / "a.tar")
    open_raw(path, cache)
    with pytest.raises(ArchiveError, match="more than 3 members"):
        open_raw(path, cache, limits=ArchiveLimits(members=3))


def test_an_unchanged_archive_is_opened_once_per_process(tmp_path, monkeypatch):
    path = make(tmp_path / "a.zip")
    opened = []
    real = ZipArchive.__init__
    monkeypatch.setattr(
        ZipArchive, "__init__", lambda self, *a: (opened.append(1), real(self, *a))[1]
    )
    assert open_raw(path).files() == open_raw(path, inside="").files()
    assert len(opened) == 1
    make(path, {"other": b"1"})
    os.utime(path, (2, 2))
    assert [file.name for file in open_raw(path).files()] == ["other"]
    os.utime(path)
    open_raw(path), open_raw(path)
    assert len(opened) == 4
    for i in range(5):
        open_raw(make(tmp_path / f"{i}.zip"))
    assert len(raw._opened) == raw.REMEMBERED


def test_a_real_zip():
    source = open_raw(shared_path("shapes/ModelNet40_mini.zip"), inside="ModelNet40")
    files = source.files("*/test/*.off")
    assert files and all(file.digest.endswith(f":{file.size}") for file in files)
    assert source.read(files[0].name)[:3] == b"OFF"
