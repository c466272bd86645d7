"""Disk full and read-only lake: one clear sentence, and the old version is still readable."""

import errno
import os
import shutil
import subprocess
from contextlib import suppress

import pytest

from flows.cli import main
from schemas.errors import LakeError
from storage import atomic
from storage.damage import verify_lake
from storage.tables import current_version
from tests.toy import build_toy, write_raw


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MB, where we may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can only be mounted as root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_keeps_the_old_version(tmp_path, small_disk):
    write_raw(tmp_path / "raw", files=2, lines=5)
    lake = small_disk / "lake"
    old = build_toy(lake, tmp_path / "raw").versions["readings"].read()
    (small_disk / "ballast").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096 - 8192))
    write_raw(tmp_path / "raw", files=12, lines=400)
    with pytest.raises(LakeError, match=r"(?i)free (some )?space"):
        build_toy(lake, tmp_path / "raw")
    assert current_version(lake, "toy", "readings").read().equals(old)
    (small_disk / "ballast").unlink()
    assert build_toy(lake, tmp_path / "raw").versions["readings"].manifest.rows > old.height


def test_read_only_lake_is_one_sentence(tmp_path, small_disk):
    write_raw(tmp_path / "raw", files=2, lines=5)
    lake = small_disk / "lake"
    old = build_toy(lake, tmp_path / "raw").versions["readings"].read()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    write_raw(tmp_path / "raw", files=3, lines=8)
    with pytest.raises(LakeError, match="read-only"):
        build_toy(lake, tmp_path / "raw")
    assert current_version(lake, "toy", "readings").read().equals(old)


@pytest.mark.parametrize("words", [["gc", "--yes", "--grace", "-1", "--keep", "1"], ["verify"]])
def test_a_full_disk_keeps_nobody_from_giving_space_back(tmp_path, small_disk, capsys, words):
    """What a lock says of its holder is for people; without room it says nothing."""
    write_raw(tmp_path / "raw", files=2, lines=5)
    lake = small_disk / "lake"
    build_toy(lake, tmp_path / "raw")
    build_toy(lake, tmp_path / "raw", scale=2.0)
    shutil.rmtree(lake / ".novelty" / "locks")
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(b"x" * 4096)
    before = len(list(lake.glob(".novelty/pieces/toy/*/*")))
    main([*words, "--lake", str(lake)])
    assert "Traceback" not in capsys.readouterr().err
    if words[0] == "gc":
        assert len(list(lake.glob(".novelty/pieces/toy/*/*"))) < before
    assert not verify_lake(lake).damage


def test_a_folder_in_the_place_of_a_file_is_a_sentence(tmp_path, capsys):
    write_raw(tmp_path / "raw", files=2, lines=5)
    build_toy(tmp_path / "lake", tmp_path / "raw")
    lock = tmp_path / "lake" / ".novelty" / "locks" / "whole_lake.lock"
    lock.unlink()
    lock.mkdir()
    assert main(["gc", "--yes", "--lake", str(tmp_path / "lake")]) == 2
    assert "a folder stands where a file is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"), [(errno.ENOSPC, "full"), (errno.EROFS, "read-only"), (errno.EACCES, "denied")]
)
def test_errors_of_the_operating_system_are_explained(tmp_path, code, said):
    with pytest.raises(LakeError, match=f"cannot write .*x.*{said}"):
        with atomic.explained(tmp_path / "x"):
            raise OSError(code, os.strerror(code))


def test_other_errors_are_not_hidden(tmp_path):
    with pytest.raises(OSError, match="Too many levels"), atomic.explained(tmp_path / "x"):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
