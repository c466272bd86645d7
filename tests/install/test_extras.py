"""A library of an extra that is absent: one sentence that names the extra, wherever it is used."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import benchmarks
from schemas.errors import ConfigError, MissingExtra
from schemas.extras import EXTRAS, missing_extra, require_library
from tasks.ingest.native.pool import run_batch
from tasks.novelcraft.render import BLENDER_PYTHON, blender_python

ROOT = Path(__file__).parents[2]
WORK = "tests.native.misbehaving:work"

BLOCKED = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {set(EXTRAS)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
"""Begins a program in which only the base is installed."""


def in_the_base(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(("library", "extra"), sorted(EXTRAS.items()))
def test_an_absent_library_is_named_with_its_extra(monkeypatch, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra) as raised:
        require_library(library)
    sentence = str(raised.value)
    assert library in sentence and f"`make setup EXTRAS={extra}`" in sentence
    assert "\n" not in sentence


def test_a_library_that_does_not_load_is_told_from_an_absent_one(monkeypatch, tmp_path):
    (tmp_path / "decord.py").write_text("raise OSError('libavcodec.so: cannot open it')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "decord", raising=False)
    with pytest.raises(MissingExtra, match=r"does not load \(libavcodec.*make doctor"):
        require_library("decord")


def test_other_imports_keep_their_error():
    with pytest.raises(ModuleNotFoundError):
        require_library("absent_library")
    assert missing_extra(ModuleNotFoundError("…", name="absent_library")) is None
    found = missing_extra(ImportError("libcudnn.so.9: cannot open it", name="torch._C"))
    assert found is not None and "torch (extra `learn`)" in str(found)


def connect():
    from storage.objects import Bucket

    Bucket("s3://bucket/prefix")


def start_dask():
    from flows.engine import DaskCluster

    with contextlib.ExitStack() as stack:
        DaskCluster(None, stack)


def decode():
    from tasks.kowl.decode import sample_with_decord

    sample_with_decord({"path": "x"}, Path())


def read_mesh():
    from tasks.threedos.formats import read_with_open3d

    read_with_open3d(b"", "ply", Path())


def read_scans():
    from tasks.threedos.scans import read_h5_row

    read_h5_row(Path("absent.h5"), "data", 0)


def render():
    from tasks.novelcraft.blender import _blender

    _blender()


@pytest.mark.parametrize(
    ("library", "use"),
    [
        ("obstore", connect),
        ("distributed", start_dask),
        ("decord", decode),
        ("open3d", read_mesh),
        ("h5py", read_scans),
        ("bpy", render),
    ],
)
def test_where_it_is_used(monkeypatch, library, use):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=f"EXTRAS={EXTRAS[library]}`"):
        use()


def test_detection_is_measured_with_the_base_alone(tmp_path):
    scores = tmp_path / "scores.csv"
    scores.write_text("score,novel\n" + "".join(f"{i},{i % 2}\n" for i in range(8)))
    words = ["evaluate", str(scores), "--score", "score", "--truth", "novel"]
    done = in_the_base(f"from flows.cli import main\nsys.exit(main({words!r}))")
    assert done.returncode == 0 and "auroc" in done.stdout


def test_the_command_line_says_it_of_any_import():
    """Also of those that nobody guarded."""
    done = in_the_base(
        "from flows import cli\ncli.benchmarks = lambda: __import__('sklearn')\n"
        "sys.exit(cli.main(['build', 'kowl']))"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("novelty: this needs sklearn, which the extra `learn` brings")
    assert done.stderr.count("\n") == 1


def test_a_child_process_says_it_too(monkeypatch, tmp_path):
    (tmp_path / "bpy.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'bpy'\", name='bpy')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MissingExtra, match=r"^this needs bpy, which the extra `blender` brings"):
        list(run_batch(WORK, [{"n": 1}], imports=["bpy"]))


def test_the_base_imports_every_flow_and_the_server():
    modules = [f"flows.{name}" for name in benchmarks()] + ["tasks.condda.server.app"]
    modules += ["tasks.condda.server.serve", "tasks.report", "tasks.sample.write", "flows.service"]
    done = in_the_base(f"import importlib\nfor m in {modules}: importlib.import_module(m)")
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- an interpreter for Blender


def test_blender_runs_in_this_interpreter_unless_another_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(BLENDER_PYTHON, raising=False)
    assert blender_python() == sys.executable
    monkeypatch.setenv(BLENDER_PYTHON, sys.executable)
    assert blender_python() == sys.executable
    monkeypatch.setenv(BLENDER_PYTHON, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"is no program; `make setup-blender` makes one"):
        blender_python()


def test_children_run_in_the_interpreter_that_is_named(tmp_path):
    """It may be one of another environment; this one leaves a mark and goes on as the usual."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (outcome,) = run_batch(WORK, [{"n": 3}], python=str(python))
    assert outcome.value is not None and outcome.value["square"] == 9
    assert (tmp_path / "used").exists()
