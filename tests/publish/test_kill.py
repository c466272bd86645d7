"""kill -9 in the middle of publishing: no folder, or the old one whole; then it goes on."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.publish import folder as code
from tasks.publish.folder import publish, published_in
from tasks.publish.verify import differences
from tests.toy import build_toy, write_raw

ROOT = Path(__file__).parents[2]
STEPS = [
    "publication_copied",
    "publication_described",
    "publication_written",
    "publication_placed",
]


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    root = tmp_path_factory.mktemp("kill")
    write_raw(root / "raw", files=2, lines=6)
    build_toy(root / "lake", root / "raw")
    return root / "lake"


def killed(lake: Path, out: Path, step: str) -> None:
    command = [sys.executable, "-m", "tests.publish.kill_at", str(lake), str(out), "2", step]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_every_step_is_killed_at():
    found = re.findall(r'step\("(\w+)"\)', Path(code.__file__).read_text())
    assert sorted(found) == sorted(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_old_publication_stays_whole(lake, tmp_path, step):
    out = tmp_path / "out"
    old = publish(lake, "toy", out, version="1", date="2026-11-16").publication
    killed(lake, out, step)
    assert differences(str(out)) == []
    assert (published_in(out) == old) == (step != "publication_placed")
    done = publish(lake, "toy", out, version="2", tables=["totals"], date="2026-11-16")
    assert done.written == (step != "publication_placed")
    publish(lake, "toy", tmp_path / "calm", version="2", tables=["totals"], date="2026-11-16")
    assert (out / "SHA256SUMS").read_bytes() == (tmp_path / "calm" / "SHA256SUMS").read_bytes()
    assert differences(str(out)) == []


def test_new_folder_is_absent_and_leftovers_go(lake, tmp_path):
    out = tmp_path / "out"
    killed(lake, out, "publication_described")
    assert not out.exists()
    (left,) = tmp_path.iterdir()
    assert differences(str(left)) == [
        "SHA256SUMS is missing: this is no published folder, or not all of one"
    ]
    assert publish(lake, "toy", out, version="2", tables=["totals"], date="2026-11-16").written
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
