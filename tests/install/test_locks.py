"""The lock files, and the commands that write and install them, on an index of toy packages."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from schemas.extras import EXTRAS
from tests.install.wheels import Index

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / ".ci" / "install"
TORCH_ONLY = re.compile(r"torch|triton|(nvidia|cuda)-.*")


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location("packages_under_test", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


packages = loaded(INSTALL / "packages.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN_TIME = packages.entries((ROOT / "requirements.lock").read_text())
DEV = packages.entries((ROOT / "requirements-dev.lock").read_text())


def canonical(text: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>\[ ]", text)[0]).lower()


def test_every_locked_package_has_hashes_and_one_version():
    for pin, (_, text) in (RUN_TIME | DEV).items():
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", text)
        assert hashes and len(set(hashes)) == len(hashes), pin
    names = [canonical(pin) for pin in [*RUN_TIME, *DEV]]
    assert len(set(names)) == len(names)


def test_torch_is_not_locked():
    assert not [pin for pin in [*RUN_TIME, *DEV] if TORCH_ONLY.fullmatch(canonical(pin))]
    assert packages.torch_requirement() == "torch==2.13.0"


def test_what_some_python_3_11_alone_asks_for_is_locked():
    """`make lock` sees one of them; Debian 12 has 3.11.2, whose asyncio lacks a part."""
    locked = {canonical(pin) for pin in [*RUN_TIME, *DEV]}
    asked = {}
    for installed in importlib.metadata.distributions():
        for line in installed.requires or []:
            needs = Requirement(line)
            patches = [
                needs.marker is None
                or needs.marker.evaluate({"python_full_version": f"3.11.{n}", "extra": ""})
                for n in range(20)
            ]
            if any(patches) and not all(patches):
                asked[canonical(needs.name)] = installed.metadata["Name"]
    assert asked and set(asked) <= locked, asked


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_what_a_page_for_analysts_imports_comes_with_the_demo(page):
    """`make demo` installs every extra, and none of the tools of tests."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    assert {"polars", "pandas", "duckdb"} <= names
    locked = {canonical(pin) for pin in RUN_TIME}
    assert {"pillow" if name == "PIL" else name for name in names} <= locked


def test_numpy_stays():
    assert "numpy==1.26.4" in RUN_TIME


def test_every_requirement_is_locked_for_its_group():
    groups = {"base": PROJECT["dependencies"]} | PROJECT["optional-dependencies"]
    locked = {canonical(pin): needed for pin, (needed, _) in RUN_TIME.items()}
    for group, lines in groups.items():
        for line in lines:
            name = canonical(line)
            if name == "torch":
                continue
            there = group in locked.get(name, ())
            assert there or (group == "dev" and name in {*locked, *map(canonical, DEV)}), line


def test_the_base_is_without_the_heavy_libraries():
    base = {canonical(pin) for pin, (needed, _) in RUN_TIME.items() if "base" in needed}
    heavy = {"bpy", "open3d-cpu", "decord", "distributed", "obstore", "scipy", "scikit-learn"}
    assert not base & (heavy | {"opencv-python-headless", "h5py", "pandas", "sympy"})
    assert {"polars", "pyarrow", "prefect", "setuptools"} <= base


def test_every_extra_that_a_sentence_names_exists():
    assert set(EXTRAS.values()) <= set(PROJECT["optional-dependencies"])
    assert set(packages.extras()) == set(PROJECT["optional-dependencies"]) - {"dev"}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("", ["torch==2.13.0"]),
        ("cpu", ["torch==2.13.0+cpu"]),
        ("cuda", ["torch===2.13.0"]),
        (
            "https://index.example/cpu",
            ["--index-url", "https://index.example/cpu", "torch==2.13.0"],
        ),
    ],
)
def test_the_command_that_installs_torch(choice, words):
    command = packages.torch_command(choice, Path("held"))
    assert command == ["install", "--constraint", "held", *words]
    assert "--no-deps" not in command


@pytest.mark.parametrize("flag", [["--torch", "nonsense"], ["--extras", "nonsense"]])
def test_a_wrong_choice_is_one_sentence(flag):
    done = subprocess.run(
        [sys.executable, INSTALL / "packages.py", *flag], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr and done.stderr.count("\n") == 1


# ---------------------------------------------------------------- on toy packages

PYPROJECT = """\
[build-system]
requires = ["setuptools>=1"]
[project]
name = "toy-project"
version = "1"
dependencies = ["plain"]
[project.optional-dependencies]
learn = ["torch==2.13.0", "loader"]
other = ["heavy[more]"]
dev = ["linter"]
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A checkout with its own pyproject.toml, and an index with a build of torch for CUDA."""
    root = tmp_path_factory.mktemp("toy")
    (root / ".ci" / "install").mkdir(parents=True)
    for name in ("packages.py", "lock.py"):
        shutil.copy(INSTALL / name, root / ".ci" / "install")
    (root / "pyproject.toml").write_text(PYPROJECT)
    index = Index(root / "index")
    index.add("setuptools", "1.0")
    index.add("plain", "1.0")
    index.add("plain", "2.0")
    index.add("heavy", "1.0", ["thick; extra == 'more'", "thin; sys_platform == 'win32'"])
    index.add("thick", "1.0")
    index.add("loader", "1.0", ["torch"])
    index.add("linter", "1.0", ["plain"])
    index.add("sympy", "1.0")
    index.add("sympy", "2.0")
    index.add("nvidia-toy", "1.0")
    index.add("torch", "2.13.0", ["sympy", "nvidia-toy==1.0", "plain"], "import nvidia_toy")
    index.put("plain", "plain-1.0-cp39-cp39-win_amd64.whl", b"a build for another machine")
    index.put("plain", "plain-1.0.tar.gz", b"a source archive")
    # What is locked today: newer versions exist, and the hashes are not there yet.
    (root / "requirements.lock").write_text("# base\nplain==1.0\nsympy==1.0\n")
    (root / "requirements-dev.lock").write_text("")
    done = subprocess.run(
        [sys.executable, ".ci/install/lock.py"],
        cwd=root,
        env=index.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return root, index


def test_lock_keeps_versions_and_takes_the_hashes_of_all_files(toy):
    root, index = toy
    locked = packages.entries((root / "requirements.lock").read_text())
    groups = {pin: needed for pin, (needed, _) in locked.items()}
    assert groups == {
        "plain==1.0": {"base", "learn"},
        "setuptools==1.0": {"base"},
        "heavy==1.0": {"other"},
        "thick==1.0": {"other"},
        "loader==1.0": {"learn"},
        "sympy==1.0": {"learn"},
    }
    found = set(re.findall(r"sha256:(\w+)", locked["plain==1.0"][1]))
    assert found == index.hashes("plain", "1.0") and len(found) == 3
    dev = packages.entries((root / "requirements-dev.lock").read_text())
    assert list(dev) == ["linter==1.0"]


def test_an_index_that_does_not_answer_stops_the_lock(toy):
    root, index = toy
    paths = [root / "requirements.lock", root / "requirements-dev.lock"]
    before = [path.read_bytes() for path in paths]
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/simple"
        done = subprocess.run(
            [sys.executable, ".ci/install/lock.py"],
            cwd=root,
            env={**index.environment(), "PIP_EXTRA_INDEX_URL": address, "PIP_RETRIES": "0"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"Could not fetch URL {address}/heavy/: ")
    assert done.stderr.endswith("; nothing is written, try again\n")
    assert [path.read_bytes() for path in paths] == before


def test_torch_brings_its_libraries_and_moves_no_locked_package(toy, tmp_path):
    """The three commands in a fresh environment; the project's own build is left out."""
    root, index = toy
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"

    def install(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [python, ".ci/install/packages.py", "--without-base", *words],
            cwd=root,
            env=index.environment(),
            capture_output=True,
            text=True,
        )

    def versions() -> dict[str, str]:
        code = (
            "import importlib.metadata as m\n"
            "for d in m.distributions(): print(d.metadata['Name'], d.version)"
        )
        told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        return dict(line.split() for line in told.stdout.splitlines())

    done = install("--extras", "other")
    assert done.returncode == 0, done.stderr
    assert "torch" not in versions() and versions()["thick"] == "1.0"
    done = install("--extras", "learn")
    assert done.returncode == 0, done.stderr
    found = versions()
    assert found["torch"] == "2.13.0" and found["nvidia-toy"] == "1.0"
    assert (found["plain"], found["sympy"]) == ("1.0", "1.0")
    subprocess.run([python, "-c", "import torch"], check=True)
    # No build without CUDA at hand: a sentence, and an index that has one is asked instead.
    done = install("--extras", "learn", "--torch", "cpu")
    assert done.returncode and "name an index that has one" in done.stderr
    other = Index(tmp_path / "other")
    other.add("torch", "2.13.0+cpu", ["sympy"])
    done = install("--extras", "none", "--torch", other.root.as_uri())
    assert done.returncode == 0, done.stderr
    assert versions()["torch"] == "2.13.0+cpu" and versions()["sympy"] == "1.0"
    # A file that changed on the index is refused.
    lock = root / "requirements.lock"
    before = lock.read_text()
    try:
        lock.write_text(before.replace(next(iter(index.hashes("thick", "1.0"))), "0" * 64))
        subprocess.run([python, "-m", "pip", "uninstall", "-qq", "-y", "thick"], check=True)
        done = install("--extras", "other")
    finally:
        lock.write_text(before)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr


def test_no_index_and_no_machine_is_named():
    """The files of the installation name neither a registry's host nor a folder of a machine."""
    for path in [ROOT / "Makefile", ROOT / ".ci" / "run", *INSTALL.iterdir(), *ROOT.glob("*.lock")]:
        if path.is_file():
            assert not re.search(r"https?://|file:///\w", path.read_text()), path
