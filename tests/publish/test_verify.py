"""verify.py alone, in a Python without this project, finds what differs."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.publish.folder import publish
from tests.publish.lakes import KINDS, kinds_rows, put_table


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    put_table(root / "lake", "odd", KINDS, kinds_rows())
    publish(root / "lake", "odd", root / "out", date="2026-11-16")
    return root / "out"


@pytest.fixture
def copy(published, tmp_path):
    """Copied, not linked: a test that flips a byte must not flip it in the lake."""
    return Path(shutil.copytree(published, tmp_path / "copy"))


def verify(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-I", "-S", str(folder / "verify.py"), *words]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def sum_again(folder: Path, name: str) -> None:
    """Make SHA256SUMS agree with a changed file, as a forger would."""
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    lines = [f"{digest}  {name}" if line.endswith(f"  {name}") else line for line in lines]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")


def test_whole_folder_is_good(copy):
    key = json.loads((copy / "manifest.json").read_text())["key"]
    assert verify(copy) == (0, f"good: 5 files, key {key}\n")
    assert verify(copy, str(copy))[0] == 0


def test_finds_a_flipped_byte_a_missing_file_and_an_extra_one(copy):
    (data,) = (copy / "data" / "kinds").glob("*.parquet")
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    data.write_bytes(flipped)
    (copy / "croissant.json").unlink()
    (copy / "data" / "kinds" / "more.parquet").write_bytes(b"")
    code, said = verify(copy)
    assert code == 1
    lines = said.splitlines()
    assert lines[0] == "data/kinds/more.parquet is not listed in SHA256SUMS"
    assert lines[1] == "croissant.json is missing"
    assert lines[2].startswith("data/kinds/00000-all.parquet has sha256 ")
    assert lines[3] == "3 differences: this is not what was published"


def test_what_hosts_add_at_the_top_is_passed_over(copy):
    (copy / ".gitattributes").write_text("x")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "lock").write_text("x")
    assert verify(copy)[0] == 0
    (copy / "data" / ".hidden").write_text("x")
    assert verify(copy)[0] == 1


def test_data_exchanged_together_with_its_sum_breaks_the_key(copy):
    (data,) = (copy / "data" / "kinds").glob("*.parquet")
    data.write_bytes(b"other")
    sum_again(copy, "data/kinds/00000-all.parquet")
    code, said = verify(copy)
    assert code == 1 and said.startswith("manifest.json says key ")


@pytest.mark.parametrize(
    "line",
    [
        "0" * 64 + "  ../outside",
        "0" * 64 + "  /etc/passwd",
        "0" * 64 + " README.md",
        "",
        "nonsense",
    ],
    ids=["above", "absolute", "one_space", "empty", "words"],
)
def test_malformed_sums_are_refused(copy, line):
    with (copy / "SHA256SUMS").open("a") as file:
        file.write(line + "\n")
    code, said = verify(copy)
    assert code == 1 and "is not `digest  path`" in said


def test_folder_without_sums_or_absent(copy, tmp_path):
    (copy / "SHA256SUMS").unlink()
    assert verify(copy)[0] == 1
    code, said = verify(copy, str(tmp_path / "absent"))
    assert code == 2 and said.startswith("cannot read ")
    assert verify(copy, "--help")[0] == 2
