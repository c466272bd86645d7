"""The stat cache: right after every kind of change, cheap on a second run, shared, rebuilt."""

import hashlib
import multiprocessing
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from schemas.errors import LakeError, SourceError
from storage import filehash
from storage.filehash import HashCache, sha256_file, sha256_files

OLD = 1_000_000_000


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(path: Path, data: bytes, mtime: int = OLD) -> Path:
    path.write_bytes(data)
    os.utime(path, (mtime, mtime))
    return path


@pytest.fixture
def cache(tmp_path):
    return HashCache(tmp_path / "cache" / "hashes.sqlite")


@pytest.fixture
def reads(monkeypatch):
    """Names of the files whose content was read."""
    seen = []
    real = filehash._hash
    monkeypatch.setattr(
        filehash, "_hash", lambda path: (seen.append(Path(path).name), real(path))[1]
    )
    return seen


@pytest.mark.parametrize("size", [0, 1, filehash.SMALL, filehash.SMALL + 1, 3_000_001])
def test_digest_is_that_of_hashlib(tmp_path, size):
    data = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    assert sha256_file(write(tmp_path / "a", data[:size])) == sha(data[:size])


def test_second_time_reads_nothing(tmp_path, cache, reads):
    files = [write(tmp_path / f"{i:03d}", b"%d" % i) for i in range(50)]
    expected = [sha(b"%d" % i) for i in range(50)]
    assert cache.sha256_many(files) == expected
    assert sorted(reads) == [f.name for f in files]
    reads.clear()
    assert HashCache(cache.path).sha256_many(reversed(files)) == expected[::-1]
    assert cache.sha256(files[7]) == expected[7]
    assert reads == []


def test_batches_join_in_order(tmp_path, cache, reads, monkeypatch):
    monkeypatch.setattr(filehash, "BATCH", 7)
    files = [write(tmp_path / f"{i:03d}", b"%d" % i) for i in range(30)]
    known = files[::3]
    cache.sha256_many(known)
    reads.clear()
    assert cache.sha256_many(files, threads=3) == [sha(b"%d" % i) for i in range(30)]
    assert sorted(reads) == [f.name for f in files if f not in known]


@pytest.mark.parametrize("change", ["size", "mtime", "ctime", "inode"])
def test_each_sign_of_change_is_noticed(tmp_path, cache, change):
    path = write(tmp_path / "a", b"old")
    assert cache.sha256(path) == sha(b"old")
    if change == "size":
        write(path, b"longer")
    elif change == "mtime":
        write(path, b"new", OLD + 1)
    elif change == "ctime":
        write(path, b"new")
    else:
        os.replace(write(tmp_path / "b", b"new"), path)
    assert cache.sha256(path) == sha(path.read_bytes()) != sha(b"old")


def test_the_stamp_holds_every_sign_of_change():
    signs = {"st_size": 1, "st_mtime_ns": 2, "st_ctime_ns": 3, "st_ino": 1 << 63}
    first = filehash.stamp_of(SimpleNamespace(**signs))
    for name, value in signs.items():
        assert filehash.stamp_of(SimpleNamespace(**signs | {name: value + 1})) != first
    assert all(number < 1 << 63 for number in first)


def test_a_fresh_file_is_hashed_but_not_remembered(tmp_path, cache, reads, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"x")
    modified = path.stat().st_mtime_ns
    for age, times in ((0, 2), (filehash.RACY_NS - 1, 2), (-1, 2), (filehash.RACY_NS, 1)):
        monkeypatch.setattr(filehash.time, "time_ns", lambda age=age: modified + age)
        reads.clear()
        assert cache.sha256(path) == cache.sha256(path) == sha(b"x")
        assert len(reads) == times, age


def test_a_file_that_changes_while_read_has_no_digest(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "a", b"x" * (filehash.SMALL + 1))
    real = hashlib.file_digest

    def meanwhile(file, kind):
        digest = real(file, kind)
        write(path, b"y" * (filehash.SMALL + 1), OLD + 1)
        return digest

    monkeypatch.setattr(hashlib, "file_digest", meanwhile)
    with pytest.raises(SourceError, match="changed while it was being read"):
        cache.sha256(path)


def test_unreadable_files_are_raised_or_listed(tmp_path, cache):
    good, none = write(tmp_path / "good", b"g"), tmp_path / "none"
    for hash_many in (cache.sha256_many, sha256_files):
        with pytest.raises(SourceError, match=f"{none} cannot be read: No such file"):
            hash_many([good, none])
        failed = {}
        assert hash_many([good, none, tmp_path], failed=failed) == [sha(b"g"), "", ""]
        assert set(failed) == {str(none), str(tmp_path)}
    cache.sha256(good)
    good.unlink()
    with pytest.raises(SourceError, match="No such file"):
        cache.sha256(good)


def test_names_of_any_bytes(tmp_path, cache, reads):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe name"))
    write(path, b"x")
    assert cache.sha256(path) == cache.sha256(path) == sha(b"x")
    assert len(reads) == 1


def test_a_relative_path_is_the_same_file(tmp_path, cache, reads, monkeypatch):
    write(tmp_path / "a", b"x")
    monkeypatch.chdir(tmp_path)
    assert cache.sha256("a") == cache.sha256(tmp_path / "a")
    assert reads == ["a"]


@pytest.mark.parametrize("damage", ["text", "header", "middle", "truncated", "empty"])
def test_a_damaged_cache_is_rebuilt(tmp_path, cache, reads, damage):
    files = [write(tmp_path / f"{i:04d}", b"%d" % i) for i in range(300)]
    expected = cache.sha256_many(files)
    data = bytearray(cache.path.read_bytes())
    assert len(data) > 20_000
    if damage == "text":
        data = bytearray(b"this is not a database, sorry " * 400)
    elif damage == "header":
        data[:100] = bytes(100)
    elif damage == "middle":
        data[4096:] = b"\xa5" * (len(data) - 4096)
    elif damage == "truncated":
        del data[9000:]
    else:
        data.clear()
    cache.path.write_bytes(data)
    reads.clear()
    assert cache.sha256_many(files) == expected
    assert len(reads) == 300
    reads.clear()
    assert cache.sha256_many(files) == expected
    assert reads == []


def test_a_cache_of_another_layout_is_rebuilt(tmp_path, cache, reads):
    path = write(tmp_path / "a", b"x")
    cache.sha256(path)
    with sqlite3.connect(cache.path) as db:
        db.execute("drop table files")
        db.execute("create table files (other integer)")
        db.execute("pragma user_version = 77")
    db.close()
    assert cache.sha256(path) == sha(b"x")
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LakeError, match="cannot be made"):
        HashCache(tmp_path / "file" / "hashes.sqlite")
    (tmp_path / "folder.sqlite").mkdir()
    with pytest.raises(LakeError, match="cannot be used"):
        HashCache(tmp_path / "folder.sqlite").note("x")


def test_notes(cache):
    assert cache.note("k") is None
    cache.set_note("k", b"one")
    cache.set_note("k", b"two")
    assert HashCache(cache.path).note("k") == b"two"


def hash_all(db: Path, folder: Path, rounds: int) -> None:
    cache = HashCache(db)
    files = sorted(folder.iterdir())
    expected = [sha(file.name.encode()) for file in files]
    for _ in range(rounds):
        assert cache.sha256_many(files, threads=2) == expected
        cache.set_note(str(os.getpid()), b"x")


def test_several_processes_share_one_cache(tmp_path, cache, reads):
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(200):
        write(folder / f"{i}", b"%d" % i)
    # Not forked: a process that ran a Prefect flow leaves hooks that fail in a forked child.
    context = multiprocessing.get_context("spawn")
    arguments = (cache.path, folder, 5)
    children = [context.Process(target=hash_all, args=arguments) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    hash_all(*arguments)
    assert reads == []


def test_several_processes_find_it_damaged_at_once(tmp_path, cache):
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(50):
        write(folder / f"{i}", b"%d" % i)
    context = multiprocessing.get_context("spawn")
    for _ in range(5):
        cache.path.write_bytes(b"nonsense" * 1000)
        children = [
            context.Process(target=hash_all, args=(cache.path, folder, 3)) for _ in range(4)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0] * 4


def test_in_a_read_only_lake_it_tells_what_it_knows(tmp_path, cache, reads, monkeypatch):
    known, new = write(tmp_path / "known", b"a"), write(tmp_path / "new", b"b")
    cache.sha256(known)
    cache.set_note("plan", b"kept")
    body = cache.path.read_bytes()
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != cache.path.parent and real(path, mode)
    )
    reads.clear()
    frozen = HashCache(cache.path)
    assert frozen.sha256_many([known, new]) == [sha(b"a"), sha(b"b")]
    assert reads == ["new"] and frozen.note("plan") == b"kept" and frozen.note("other") is None
    frozen.set_note("other", b"lost")
    frozen.forget([known])
    assert cache.path.read_bytes() == body
    assert not list(cache.path.parent.glob("*-*"))  # no journal
    cache.path.write_bytes(b"damaged")
    assert frozen.sha256(known) == sha(b"a") and reads == ["new", "known"]
    cache.path.unlink()
    assert frozen.sha256(known) == sha(b"a") and not cache.path.exists()
