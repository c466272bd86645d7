"""Removals take whole things, can be undone and wait for builds; damage has a cure by command."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from flows.cli import main
from schemas.errors import LakeError
from schemas.manifest import RunMark
from storage import filehash, verified
from storage.damage import drop, restorable, restore, verify_lake
from storage.layout import MANIFEST, SNAPSHOT, build_record_path, pointer_path, work_path
from storage.pieces import write_piece
from storage.tables import current_versions, last_versions
from storage.tombstones import discard
from storage.upkeep import find_garbage, statuses
from tasks.engine.stage import Build
from tests.toy import TOTALS, build_toy, parquet_bytes, unverified, write_raw

NOBODY = 2**22 + 1
"""A process id that no process has: the kernel gives none above 2**22."""


@pytest.fixture
def built(tmp_path):
    write_raw(tmp_path / "raw", files=3, lines=8)
    return build_toy(tmp_path / "lake", tmp_path / "raw")


def stage_pieces(build, stage):
    return [piece for piece in build.pieces if piece.manifest.stage == stage]


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[60] ^= 1
    path.write_bytes(body)


def stale(lake):
    found = statuses(lake, lambda code: 1, lambda benchmark, table: 1, lambda root: {})
    return {status.name: " ".join(status.stale) for status in found}


@pytest.mark.parametrize("damage", ["no file", "short file", "no manifest", "empty manifest"])
def test_a_piece_that_is_not_whole_is_made_again(tmp_path, built, damage):
    lake, before = built.lake, parquet_bytes(built.lake)
    piece = stage_pieces(built, "read_lines")[1]
    place = piece.part("files").place
    if damage == "no file":
        place.unlink()
    elif damage == "short file":
        short = place.read_bytes()[:-9]
        place.unlink()  # it is a link to the file of the version
        place.write_bytes(short)
    elif damage == "no manifest":
        (piece.folder / MANIFEST).unlink()
    else:
        (piece.folder / MANIFEST).write_bytes(b"")
    again = build_toy(lake, tmp_path / "raw")
    assert [piece.shard for piece in again.pieces if piece.made_now] == [piece.shard]
    assert parquet_bytes(lake) == before and not verify_lake(lake).damage


def test_a_version_without_a_file_is_published_again(tmp_path, built):
    before = parquet_bytes(built.lake)
    built.versions["readings"].places[0].unlink()
    build_toy(built.lake, tmp_path / "raw")
    assert parquet_bytes(built.lake) == before and not verify_lake(built.lake).damage


@pytest.mark.parametrize("content", [None, b""])
def test_a_version_without_a_manifest_is_published_again(tmp_path, built, content):
    lake, before = built.lake, parquet_bytes(built.lake)
    manifest = built.versions["readings"].folder / MANIFEST
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    with pytest.raises(LakeError, match=r"no readable manifest in .*`novelty verify --drop`"):
        find_garbage(lake)  # it may be the only one to know of a run
    drop(lake, verify_lake(lake).damage)
    assert not [path for path in find_garbage(lake) if "pieces" in path.parts]
    build_toy(lake, tmp_path / "raw")
    assert parquet_bytes(lake) == before and not verify_lake(lake).damage
    manifest.write_bytes(b"{}")
    build_toy(lake, tmp_path / "raw")  # a build alone mends it too
    assert parquet_bytes(lake) == before and not verify_lake(lake).damage


def test_a_dropped_version_still_tells_its_pieces(tmp_path, built):
    """Runs of earlier builds are known by the versions that show them, and by nothing else."""
    lake, (child,) = built.lake, stage_pieces(built, "add_up")
    flip(child.part("totals").place)
    drop(lake, verify_lake(lake).damage)
    assert "toy/totals" not in {version.name for version in current_versions(lake)}
    (last,) = [version for version in last_versions(lake, "toy") if version.name == "toy/totals"]
    assert last.manifest == built.versions["totals"].manifest
    assert not last_versions(lake, "other")


def test_runs_made_from_a_suspect_are_suspects(built):
    """Their key does not see the digest of what they read."""
    lake, (child,) = built.lake, stage_pieces(built, "add_up")
    unverified(child)
    run = {
        "key": "1" * 32,
        "run": RunMark(run_id="r", protocol="p", data_key="k"),
        "inputs": [child.part("totals").as_input()],
    }
    frames = {"totals": (TOTALS, child.part("totals").read())}
    made = write_piece(
        lake, child.manifest.model_copy(update={**run, "inputs_verified": True}), frames
    )
    plain = {**run, "key": "2" * 32, "run": None, "inputs_verified": True}
    kept = write_piece(lake, child.manifest.model_copy(update=plain), frames)
    flip(stage_pieces(built, "read_lines")[0].part("readings").place)
    drop(lake, verify_lake(lake).damage)
    assert not made.folder.exists() and kept.folder.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"sha256": 3}', b"\xff\x00"])
@pytest.mark.parametrize("what", ["piece", "version", "record"])
def test_damaged_records_are_sentences_with_a_cure(tmp_path, built, capsys, what, content):
    lake = str(built.lake)
    path = {
        "piece": stage_pieces(built, "add_up")[0].folder / MANIFEST,
        "version": built.versions["totals"].folder / MANIFEST,
        "record": build_record_path(built.lake, "toy"),
    }[what]
    path.write_bytes(content)
    for words in (["status"], ["gc"], ["lineage", "toy/totals"], ["report"], ["verify"]):
        code = main([*words, "--lake", lake])
        assert code in (0, 2)
        assert code == 0 or "verify" in " ".join((*words, *capsys.readouterr()))
    assert main(["verify", "--lake", lake]) == 2
    assert path.name in capsys.readouterr().out
    assert main(["verify", "--drop", "--lake", lake]) == 2
    assert main(["verify", "--lake", lake]) == 0
    build_toy(built.lake, tmp_path / "raw")
    assert main(["verify", "--lake", lake]) == main(["status", "--lake", lake]) == 0


def test_verify_covers_what_is_not_published(tmp_path, built):
    (tmp_path / "raw" / "f0.txt").write_text("a,1\n")
    build_toy(built.lake, tmp_path / "raw")
    old = stage_pieces(built, "read_lines")[0].part("files").place
    flip(old)
    owners = {str(entry.owner.relative_to(built.lake)) for entry in verify_lake(built.lake).damage}
    assert owners == {
        str(old.parent.relative_to(built.lake)),
        f"toy/files/versions/{built.versions['files'].manifest.key}",
    }
    assert not verify_lake(built.lake, "toy/files").damage


def test_what_verified_its_inputs_outlives_them(tmp_path, built):
    """One flipped bit must not cost the training that read good bytes."""
    lake, (child,) = built.lake, stage_pieces(built, "add_up")
    flip(stage_pieces(built, "read_lines")[0].part("readings").place)
    drop(lake, verify_lake(lake).damage)
    assert child.folder.exists()
    assert "pieces it was made from are gone" in stale(lake)["toy/totals"]
    again = build_toy(lake, tmp_path / "raw")
    assert [piece.manifest.stage for piece in again.pieces if piece.made_now] == ["read_lines"]
    assert "are gone" not in stale(lake)["toy/totals"]


def test_what_did_not_verify_them_goes_too_and_can_come_back(tmp_path, built):
    lake, (child,) = built.lake, stage_pieces(built, "add_up")
    before = parquet_bytes(lake)
    unverified(child)
    damaged = stage_pieces(built, "read_lines")[0].part("readings").place
    flip(damaged)
    drop(lake, verify_lake(lake).damage)
    assert not child.folder.exists() and not damaged.exists()
    again = build_toy(lake, tmp_path / "raw")
    assert {piece.manifest.stage for piece in again.pieces if piece.made_now} == {
        "read_lines",
        "add_up",
    }
    assert parquet_bytes(lake) == before
    (name,) = restorable(lake)
    shutil.rmtree(child.folder)
    restored, newer = restore(lake, name)
    assert str(child.folder.relative_to(lake)) in restored and child.folder.exists()
    assert str(damaged.parent.relative_to(lake)) in newer  # what was made anew stays
    assert not restorable(lake) and not verify_lake(lake).damage


def test_nothing_is_removed_while_a_first_build_runs(tmp_path, capsys):
    lake = tmp_path / "lake"
    with Build("toy", lake):
        checkpoint = work_path(lake, "toy", "train", "0" * 32) / "checkpoint"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.touch()
        for words in (["gc", "--yes"], ["verify", "--drop"], ["restore", "x"]):
            assert main([*words, "--lake", str(lake)]) == 2
            assert "is being built in by process" in capsys.readouterr().err
        assert checkpoint.exists()
        assert main(["verify", "--lake", str(lake)]) == 0
    assert main(["gc", "--yes", "--lake", str(lake)]) == 0


def test_gc_keeps_what_a_lost_piece_may_need(tmp_path, built):
    lake, (child,) = built.lake, stage_pieces(built, "add_up")
    (child.folder / MANIFEST).write_bytes(b"")
    drop(lake, verify_lake(lake).damage)
    discard(lake, find_garbage(lake))
    again = build_toy(lake, tmp_path / "raw")
    assert [piece.manifest.stage for piece in again.pieces if piece.made_now] == ["add_up"]


def test_gc_removes_no_snapshot_that_the_disk_does_not_give_now(tmp_path, built, monkeypatch):
    """A passing fault at any of its reads: it stops, and the snapshot is still the current one."""
    lake, real, faults = built.lake, Path.read_bytes, 0
    while True:
        reads = 0

        def read_bytes(path: Path, fault: int = faults) -> bytes:
            nonlocal reads
            if path.name == SNAPSHOT:
                reads += 1
                if reads == fault + 1:
                    raise OSError(errno.EIO, "Input/output error", str(path))
            return real(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        try:
            garbage = find_garbage(lake, -1, keep=1)
        except OSError:
            faults += 1
            continue
        assert garbage == []  # all reads went well
        break
    assert faults > 1


COMMANDS = [
    *(["gc", "--yes"], ["verify"], ["verify", "--drop"], ["query", "from toy.totals"]),
    *(["upgrade"], ["iceberg"]),
]
PLACES = ["piece", "version", "part", "snapshot", "build record", "folder"]
READ_BY = {
    "gc": ["piece", "version", "snapshot", "folder"],
    "verify": PLACES,
    "query": ["version", "part", "snapshot"],
    "upgrade": ["version", "part", "snapshot"],
    "iceberg": ["version", "part", "snapshot"],
}


@pytest.mark.parametrize(
    ("words", "place"),
    [(words, place) for words in COMMANDS for place in PLACES if place in READ_BY[words[0]]],
)
def test_what_may_not_be_read_is_no_damage_and_no_garbage(built, monkeypatch, capsys, words, place):
    """Root may read all, so a lake of another user is played by the calls that fail for us."""
    lake = built.lake
    (total,), version = stage_pieces(built, "add_up"), built.versions["totals"]
    hidden = {
        "piece": total.folder / MANIFEST,
        "version": version.folder / MANIFEST,
        "part": version.places[0],
        "snapshot": pointer_path(lake, "toy") / SNAPSHOT,
        "build record": build_record_path(lake, "toy"),
        "folder": version.folder,
    }[place].resolve()
    before = set(lake.rglob("*"))

    def guarded(real):
        def call(path, *arguments, **options):
            if isinstance(path, str | Path) and Path(path).resolve() == hidden:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *arguments, **options)

        return call

    with monkeypatch.context() as denied:
        denied.setattr(Path, "read_bytes", guarded(Path.read_bytes))
        denied.setattr(os, "scandir", guarded(os.scandir))
        denied.setattr(filehash, "_hash", guarded(filehash._hash))
        denied.setattr(verified, "_known", {})
        assert main([*words, "--lake", str(lake)]) == 2
    said = capsys.readouterr().err
    assert "Permission denied; mend its permissions" in said, said
    assert not before - set(lake.rglob("*")) and not restorable(lake)


@pytest.mark.parametrize("words", [["status"], ["history"], *COMMANDS], ids=" ".join)
def test_a_lake_may_be_the_top_of_a_volume(built, monkeypatch, words):
    """Where the file system has a folder of its own that is closed to all but root."""
    lost = built.lake / "lost+found"
    lost.mkdir()

    def closed(real, inside):
        def call(path, *arguments, **options):
            place = Path(path) if isinstance(path, str | Path) else Path()
            if lost in (place, *place.parents)[inside:]:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *arguments, **options)

        return call

    for name, inside in (("scandir", 0), ("stat", 1), ("lstat", 1), ("readlink", 1)):
        monkeypatch.setattr(os, name, closed(getattr(os, name), inside))
    assert main([*words, "--lake", str(built.lake), "--quiet"]) == 0
    assert lost.exists()


def test_gc_takes_what_a_killed_writer_of_the_catalogue_left(built):
    left = [built.lake / f".catalog.duckdb.{NOBODY}.0123abcd.tmp{end}" for end in ("", ".wal")]
    living = built.lake / f".catalog.duckdb.{os.getpid()}.0123abcd.tmp.wal"
    for path in (*left, living):
        path.write_bytes(b"x")
    assert {path.name for path in find_garbage(built.lake)} == {path.name for path in left}


def test_gc_takes_tombstones_after_the_grace_period(built):
    (stage_pieces(built, "add_up")[0].folder / MANIFEST).write_bytes(b"")
    drop(built.lake, verify_lake(built.lake).damage)
    (tombstone,) = restorable(built.lake)
    assert tombstone not in {path.name for path in find_garbage(built.lake)}
    assert tombstone in {path.name for path in find_garbage(built.lake, grace_hours=-1)}
