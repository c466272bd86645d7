"""The doctor: before any setup, beside a broken torch, without libraries, without Python 3.11."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.operations import doctor

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "make", "env", "dirname", "sh")


def clean_environment(**more: str) -> dict[str, str]:
    """Without what the make that runs these tests tells its children."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    return kept | {"PATH": path_with_python()} | more


def path_with_python() -> str:
    """The Python of these tests is on it, however it was found."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def make(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=folder,
        env=clean_environment(**more),
        capture_output=True,
        text=True,
    )


@pytest.fixture
def checkout(tmp_path):
    """What a fresh clone has of the installation; no .venv."""
    root = tmp_path / "clone"
    root.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-dev.lock"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(ROOT / ".ci" / "install", root / ".ci" / "install")
    (root / "tasks" / "operations").mkdir(parents=True)
    for name in ("__init__.py", "operations/__init__.py", "operations/doctor.py"):
        shutil.copy(ROOT / "tasks" / name, root / "tasks" / name)
    return root


@pytest.fixture
def tools(tmp_path):
    """A PATH with a shell and make, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_doctor_needs_the_standard_library_only(checkout):
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-m", "tasks.operations.doctor"],
        cwd=checkout,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packages are not installed yet: run `make setup`" in done.stdout
    assert done.stderr == ""


def test_doctor_is_written_for_older_pythons_too():
    ast.parse((ROOT / "tasks" / "operations" / "doctor.py").read_text(), feature_version=(3, 8))
    for package in ("tasks", "tasks/operations"):
        assert (ROOT / package / "__init__.py").read_text() == ""


def test_make_doctor_runs_before_setup_and_installs_nothing(checkout):
    done = make(checkout, "doctor")
    assert "packages are not installed yet: run `make setup`" in done.stdout
    assert "disk space" in done.stdout and done.stderr == ""
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("target", ["setup", "doctor", "demo", "test", "lock", "setup-blender"])
def test_no_python_is_one_sentence(checkout, tools, target):
    done = make(checkout, target, PATH=str(tools))
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert done.returncode == 2 and len(said) == 1 and done.stdout == ""
    assert said[0].startswith("Python 3.11 is needed and none was found")
    for way in ("uv python install 3.11", "pyenv install 3.11", "Debian 12"):
        assert way in said[0]
    assert not (checkout / ".venv").exists()


def test_a_shim_that_fails_and_an_older_python_are_passed_over(checkout, tools):
    program(tools / "python3.11", "echo shim: command not found >&2; exit 127")
    program(
        tools / "python3",
        f'test "$2" = "import ensurepip, venv" && exit 0; exec {sys.executable} "$@"',
    )
    done = subprocess.run(
        ["bash", ".ci/install/python"],
        cwd=checkout,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(tools / "python3"))
    assert done.stderr == ""


def test_a_python_that_is_named_and_is_not_one(checkout):
    done = make(checkout, "setup", "PYTHON=/nowhere/python")
    assert done.returncode == 2 and "/nowhere/python is not one" in done.stderr


def test_a_python_without_venv_is_said(checkout, tools):
    program(
        tools / "python3.11",
        f'test "$2" = "import ensurepip, venv" && exit 1; exec {sys.executable} "$@"',
    )
    done = make(checkout, "setup", PATH=str(tools))
    assert done.returncode == 2 and "apt-get install python3.11-venv" in done.stderr


def environment(root: Path, torch: str) -> Path:
    """A .venv whose torch is a package with this text."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    (packages,) = (root / ".venv" / "lib").glob("python*/site-packages")
    (packages / "torch.py").write_text(torch)
    about = packages / "torch-2.13.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    return root / ".venv"


BROKEN = "raise ImportError('libcudnn.so.9: cannot open shared object file')"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(("torch", "reason"), [(BROKEN, "libcudnn.so.9"), (CRASH, "says nothing")])
def test_a_broken_torch_is_a_line_with_its_cure(checkout, torch, reason):
    environment(checkout, torch)
    done = make(checkout, "doctor")
    assert done.returncode == 2
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("BAD")]
    assert "torch 2.13.0 does not load" in line and reason in line
    assert "make setup TORCH=cuda" in line
    assert "disk space" in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_packages_that_differ_from_the_lock_are_named(checkout):
    venv = environment(checkout, "__version__ = '2.13.0'\nclass cuda:\n is_available = bool")
    (venv / "requirements.txt").write_text("numpy==1.26.4 \\\n    --hash=sha256:00\n")
    done = make(checkout, "doctor")
    assert "numpy is absent, the lock file says 1.26.4" in done.stdout
    assert "torch 2.13.0; GPU: none; detectors run on the CPU" in done.stdout


def test_an_environment_whose_python_is_gone(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("/nowhere/python3.11")
    done = make(checkout, "doctor")
    assert done.returncode == 2
    assert "does not run" in done.stdout and "remove .venv" in done.stdout


@pytest.fixture
def without_libraries(monkeypatch):
    """No library loads until the (fake) apt-get has run."""
    done: list[list[str]] = []

    def load(name: str) -> None:
        if name.startswith(("libXi", "libGL")) and len(done) < 2:
            raise OSError(name)

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        done.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(doctor.ctypes, "CDLL", load)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor.subprocess, "run", run)
    return done


def test_a_missing_library_names_the_renderer_and_stops_nothing(monkeypatch, capsys):
    def load(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(doctor.ctypes, "CDLL", load)
    monkeypatch.setenv("PATH", path_with_python())
    assert doctor.examine() == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "libXi.so.6" in line]
    assert line.startswith("warn") and "the renderer `blender`" in line
    assert "apt-get install libxi6" in line


def test_root_installs_libraries_and_says_so_first(without_libraries, monkeypatch, capsys):
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    doctor.install_libraries()
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("installing missing system libraries as root: apt-get install -y")
    assert "libgl1 libxi6" in first
    assert [command[1] for command in without_libraries] == ["update", "install"]
    assert doctor.missing_libraries() == {}


def test_others_get_the_command(without_libraries, monkeypatch, capsys):
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    doctor.install_libraries()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("sudo apt-get install -y --no-install-recommends libgl1 libxi6")
    assert f"which only {doctor.OPEN3D} and {doctor.BLENDER} need; the rest works" in line
    assert without_libraries == []


def test_apt_that_fails_stops_nothing(without_libraries, monkeypatch, capsys):
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    failed = subprocess.CompletedProcess([], 100)
    monkeypatch.setattr(doctor.subprocess, "run", lambda command, **options: failed)
    doctor.install_libraries()
    assert "this failed: apt-get update" in capsys.readouterr().out


def test_setup_begins_with_the_libraries(checkout, tools):
    """What make calls, in order; a stand-in for Python tells its arguments."""
    program(
        tools / "python3.11",
        'case "$*" in\n'
        "  *version_info*|*ensurepip*) exit 0;;\n"
        '  *"-m venv"*) /bin/mkdir -p .venv/bin; /bin/cp "$0" .venv/bin/python;;\n'
        "esac\n"
        'echo "$*"',
    )
    done = make(checkout, "setup", "TORCH=cpu", "EXTRAS=video,s3", PATH=str(tools))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "-m tasks.operations.doctor --install",
        "-m venv .venv",
        ".ci/install/packages.py --torch cpu --extras video,s3",
    ]
    done = make(checkout, "lint", "-n", PATH=str(tools))
    assert "install all --dev" in done.stdout
    done = make(checkout, "demo", "-n", PATH=str(tools))
    assert "install all;" not in done.stdout and "install all" in done.stdout
