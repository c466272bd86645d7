"""A wheel outside of the checkout, and what the Dockerfile asks for."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from schemas.version import VERSION

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "schemas", "storage", "tasks")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources: setuptools leaves folders beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "docs"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation"]
    command += ["--no-deps", "--no-index", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(command, check=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_every_file_that_the_code_reads(wheel):
    assert wheel.name == f"novelty_pipeline-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    kept = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    missing = {str(p.relative_to(ROOT)) for p in kept if "__pycache__" not in p.parts} - held
    assert not {name for name in missing if ".egg-info" not in name}
    for name in ("LICENSE", "NOTICE"):
        assert f"novelty_pipeline-{VERSION}.dist-info/licenses/{name}" in held
    shared = {Path(name).name for name in held if "/share/novelty/queries/" in name}
    assert shared == {path.name for path in (ROOT / "docs" / "queries").glob("*.sql")}


@pytest.mark.slow
def test_the_wheel_runs_outside_of_the_checkout(wheel, tmp_path):
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    (site,) = (home / "lib").glob("python3*/site-packages")
    # Other packages are those of this environment; folders of a .pth come after the wheel's own.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    install = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    subprocess.run([*install, "-q", "--no-deps", "--no-index", str(wheel)], check=True)

    place = tmp_path / "elsewhere"
    place.mkdir()
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NOVELTY_", "PREFECT_", "PYTHON", "COV"))
    }
    environment = clean | {"HOME": str(place), "PREFECT_HOME": str(place / "prefect")}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    novelty = str(home / "bin" / "novelty")
    where = "import json, flows, tasks; print(json.dumps([flows.__file__, tasks.__file__]))"
    for file in json.loads(run(str(home / "bin" / "python"), "-c", where)):
        assert Path(file).is_relative_to(home)
    assert run(novelty, "--version") == f"novelty {VERSION}\n"
    run(novelty, "sample", "--only", "condda")
    words = ["--tests", "sample/condda", "--predictors", "threshold", "--protocols", "OND"]
    run(novelty, "build", "condda", *words, "--run.red-light", "without")
    assert "condda/sessions" in run(novelty, "status")
    assert "condda_sessions" in run(novelty, "query", "--list")
    assert "threshold" in run(novelty, "query", "--file", "condda_sessions")
    assert run(novelty, "report").strip().endswith("lake/reports/condda.html")
    assert "threedos" in run(novelty, "models")
    sentence = "from schemas.errors import MissingExtra; from schemas.extras import missing_extra; "
    sentence += "print(missing_extra(ModuleNotFoundError('no', name='torch')))"
    said = run(str(home / "bin" / "python"), "-c", sentence)
    assert "`pip install 'novelty-pipeline[learn]'`" in said


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile: word and what stands after it, continued lines put together."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


def test_the_dockerfile_sets_up_and_runs_the_demo():
    asked = instructions()
    known = {"ARG", "FROM", "ENV", "SHELL", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "CMD"}
    assert {word for word, _ in asked} <= known
    assert asked[0][0] == "ARG" and asked[1] == ("FROM", "${BASE}")
    assert asked[-1] == ("CMD", '["make", "demo"]')
    words = [word for word, _ in asked]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    for word, script in asked:
        if word == "RUN":
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert any("make setup TORCH=" in script for word, script in asked if word == "RUN")


def test_the_demo_of_the_image_needs_nothing_that_setup_did_not_install():
    """`make demo` as the image calls it would only make samples and build."""
    environment = os.environ | {"SAMPLE": "/data/sample", "NOVELTY_LAKE": "/data/lake"}
    for name in ("MAKEFLAGS", "MAKELEVEL"):
        environment.pop(name, None)
    command = ["make", "-n", "-o", ".venv/.all", "demo"]
    said = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines() == [
        ".venv/bin/novelty sample --out /data/sample",
        ".venv/bin/novelty demo --sample /data/sample",
    ]


def test_the_image_is_made_without_what_builds_leave():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", "lake", "sample", ".git", "build"} <= set(ignored)
