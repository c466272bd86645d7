"""What was hashed is what is read: a passing fault is retried, then it fails; it is never a row."""

import hashlib
import io
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import polars as pl
import pytest

from schemas.config import Settings
from schemas.errors import ChangedSource, RecordError
from storage import unchanged
from storage.filehash import HashCache
from storage.layout import hash_cache_path
from storage.pieces import find_piece
from storage.raw import RawFile, open_raw
from tasks.engine.stage import Build, Produced, Reject, Shard, stage
from tasks.ingest.native.pool import run_batch
from tests.toy import READINGS, ReadSettings, build_toy, read_lines, write_raw

OLD = 1_000_000_000_000_000_000  # long before it is hashed: such a digest is remembered


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(unchanged, "PAUSES", (0, 0))


@pytest.fixture
def raw(tmp_path):
    write_raw(tmp_path / "raw", files=3, lines=8)
    for path in (tmp_path / "raw").iterdir():
        os.utime(path, ns=(OLD, OLD))
    return tmp_path / "raw"


def read_file(shard: Shard, act) -> Produced:
    """One row for each file; a file that cannot be read is quarantined, as stages do."""
    source, rows, rejects = open_raw(Path(shard.source)), [], []
    for number, file in enumerate(shard.files):
        undo = act(Path(shard.source) / file.name) if number == 0 else None
        try:
            rows.append((file.name, 0, float(len(source.read(file.name))), "a"))
        except RecordError as error:
            rejects.append(Reject.of(file.name, error))
        finally:
            if undo:
                undo()
    frame = pl.DataFrame(rows, schema=READINGS.polars_schema, orient="row")
    return Produced({"readings": frame}, len(shard.files), rejects)


def run(lake: Path, raw: Path, *acts):
    """Build with one shard whose n-th try is disturbed by the n-th of `acts`."""
    left = list(acts)

    @stage(writes=(READINGS,))
    def disturbed(shard, settings):
        return read_file(shard, left.pop(0) if left else lambda path: None)

    with Build("toy", lake, workers=1) as build:
        source = build.source(raw)
        build.run(disturbed, [Shard("all", tuple(source.files()), source=source.root)], Settings())
    return build.versions["readings"].read()


def swap(path: Path) -> None:
    """Another content of the same size and age."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[::-1])
    os.utime(path, ns=(OLD, OLD))


def absent(path: Path):
    path.rename(path.with_suffix(".away"))
    return lambda: path.with_suffix(".away").rename(path)


def folder_absent(path: Path):
    path.parent.rename(path.parent.with_name("away"))
    return lambda: path.parent.with_name("away").rename(path.parent)


def rot(path: Path):
    """The disk gives other bytes, and no time tells of it; then the right ones again."""
    content, times = path.read_bytes(), os.stat(path)
    stat = os.stat
    path.write_bytes(content[:-1] + b"?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def undo():
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert stat(path).st_size == len(content)

    return undo


@pytest.mark.parametrize("act", [absent, folder_absent, rot])
def test_a_passing_fault_is_retried(tmp_path, raw, act):
    expected = run(tmp_path / "calm", raw)
    assert run(tmp_path / "lake", raw, act).equals(expected)
    assert expected.height == 3


@pytest.mark.parametrize("act", [absent, folder_absent, rot])
def test_a_fault_that_stays_fails_and_commits_nothing(tmp_path, raw, act):
    with pytest.raises(ChangedSource, match="run the same command again"):
        run(tmp_path / "lake", raw, act, act, act)
    assert not list((tmp_path / "lake").glob(".novelty/pieces/toy/*/*"))
    assert run(tmp_path / "lake", raw).equals(run(tmp_path / "calm", raw))


def test_a_swapped_file_never_gets_the_key_of_the_other(tmp_path, raw):
    with pytest.raises(ChangedSource, match=r"f0\.txt is not what it was"):
        run(tmp_path / "lake", raw, swap)
    after = run(tmp_path / "lake", raw)
    assert after.equals(run(tmp_path / "calm", raw))


def test_a_wrong_remembered_digest_is_forgotten(tmp_path, raw):
    """Whatever put it there: the first build stops, the next one hashes again."""
    lake, path = tmp_path / "lake", raw / "f1.txt"
    cache = HashCache(hash_cache_path(lake))
    right = cache.sha256(path)
    cache._run(lambda db: db.execute("update files set sha256 = ?", ["0" * 64]))
    assert cache.sha256(path) == "0" * 64
    with pytest.raises(ChangedSource, match=r"f1\.txt is not what it was"):
        build_toy(lake, raw)
    assert cache.sha256(path) == right
    build_toy(lake, raw)


def test_absent_when_listed_is_data(tmp_path, raw):
    source = open_raw(raw)
    with pytest.raises(RecordError, match="not a file"):
        source.read("none.txt")
    source.files()
    (raw / "f0.txt").unlink()
    with pytest.raises(ChangedSource, match=r"f0\.txt"):
        source.read("f0.txt")


def pack(path: Path, contents: dict[str, str]) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in contents.items():
                archive.writestr(name, text)
        return
    with tarfile.open(path, "w") as archive:
        for name, text in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_a_changed_archive_is_noticed(tmp_path, suffix):
    lake, path = tmp_path / "lake", tmp_path / f"raw{suffix}"
    contents = {"x.txt": "a,10\n", "y.txt": "a,20\n"}
    pack(path, contents)
    source = open_raw(path)
    shard = Shard("all", tuple(source.files()), source=source.root)
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in contents.values()]
    rows = [RawFile(*row) for row in zip(contents, (5, 5), hashes, strict=True)]
    assert unchanged.read_unchanged(source.root, rows, lambda: 3) == 3
    pack(path, {**contents, "y.txt": "a,30\n"})
    with pytest.raises(ChangedSource, match=r"y\.txt is gone or another"):
        read_lines.make(lake, "toy", shard, ReadSettings())
    with pytest.raises(ChangedSource, match=r"y\.txt is gone or another"):
        unchanged.read_unchanged(source.root, rows, lambda: 3)
    pack(path, {"x.txt": "a,10\n"})
    with pytest.raises(ChangedSource, match=r"y\.txt is gone or another"):
        read_lines.make(lake, "toy", shard, ReadSettings())
    path.unlink()
    with pytest.raises(ChangedSource, match="is gone"):
        read_lines.make(lake, "toy", shard, ReadSettings())
    key = read_lines.key("toy", shard, ReadSettings())
    assert find_piece(lake, "toy", "read_lines", key) is None
    pack(path, contents)
    assert read_lines.make(lake, "toy", shard, ReadSettings()).manifest.rows_out == 2


def sizes(item: dict, work: Path) -> dict:
    return {"size": len(Path(item["path"]).read_bytes())}


def test_children_that_read_by_path_are_watched_too(tmp_path, raw):
    """They cannot compare, so the file is hashed afterwards and must not have been touched."""
    acts = [folder_absent, swap]

    @stage(writes=(READINGS,))
    def by_path(shard, settings):
        path = Path(shard.source) / shard.files[0].name
        undo = acts.pop(0)(path) if acts else None
        (outcome,) = run_batch("tests.storage.test_unchanged:sizes", [{"path": str(path)}])
        if undo:
            undo()
        if outcome.value is None:
            return Produced({}, 1, [Reject("f", outcome.rule, outcome.message)])
        row = [("f", 0, float(outcome.value["size"]), "a")]
        frame = pl.DataFrame(row, schema=READINGS.polars_schema, orient="row")
        return Produced({"readings": frame}, 1)

    def made(lake):
        source = open_raw(raw)
        shard = Shard("one", tuple(source.files()[:1]), source=source.root)
        return by_path.make(lake, "toy", shard, Settings())

    acts[1] = lambda path: None
    assert made(tmp_path / "absent").manifest.rows_out == 1  # retried
    acts[:] = [swap]
    with pytest.raises(ChangedSource, match=r"is not what it was|changed while"):
        made(tmp_path / "swapped")
    assert not list((tmp_path / "swapped").glob(".novelty/pieces/toy/*/*"))


def test_it_crosses_processes():
    error = pickle.loads(pickle.dumps(ChangedSource("/x", "is gone")))
    assert (error.path, error.problem) == ("/x", "is gone") and "run the same" in str(error)


def test_a_lone_npz_and_files_elsewhere(tmp_path):
    path = tmp_path / "grids.npz"
    path.write_bytes(b"numbers")
    source = open_raw(path)
    (file,) = source.files()
    assert unchanged.read_unchanged(source.root, [file], lambda: 3) == 3
    elsewhere = RawFile("w.pth", 7, file.digest, str(path))
    nowhere = RawFile("state#1", 7, "1" * 64, "")
    assert unchanged.read_unchanged("/none", [elsewhere, nowhere], lambda: 3) == 3
    with pytest.raises(ChangedSource, match=r"is not what it was"):
        unchanged.read_unchanged(source.root, [file], lambda: path.write_bytes(b"another"))
    shutil.rmtree(tmp_path)
    with pytest.raises(ChangedSource):
        unchanged.read_unchanged("/none", [elsewhere], lambda: 3)
