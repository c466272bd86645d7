"""Installs the locked packages, torch and the project into the environment that runs this file.

    python .ci/install/packages.py [--extras all|none|a,b] [--dev] [--torch cpu|cuda|INDEX_URL]

Three pip commands: the lock files with their hashes and without looking at dependencies (they are
all in there); torch with its dependencies, since each build of it needs other libraries, which no
lock file can know; the project itself, editable. Standard library only.

An extra that is named joins those that are installed already; without a name the choice stays as it
was, at first everything. Who chooses a build of torch gets `learn`. Stamps in the environment tell
make what is there: .ready (what was chosen), .all (every extra), .dev (the tools of tests too).
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
DEV_LOCK = ROOT / "requirements-dev.lock"
BASE = "base"
STAMPS = (".ready", ".all", ".dev")


def entries(text: str) -> dict[str, tuple[set[str], str]]:
    """A lock file: `name==version` -> who needs it, and the requirement with its hashes."""
    found = {}
    groups: set[str] = set()
    block: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            groups = set(line.lstrip("# ").split())
        elif line.strip():
            block.append(line)
            if not line.endswith("\\"):
                found[block[0].split()[0]] = (groups, "\n".join(block))
                block = []
    return found


def extras() -> list[str]:
    """The extras of run time, as pyproject.toml names them."""
    return sorted(set(_project()["optional-dependencies"]) - {"dev"})


def torch_requirement() -> str:
    (found,) = (
        line
        for line in _project()["optional-dependencies"]["learn"]
        if re.match(r"torch\b(?!-)", line)
    )
    return found


def chosen_lines(groups: set[str], dev: bool) -> list[str]:
    """The requirements of these groups, with hashes."""
    lines = [text for needed, text in entries(LOCK.read_text()).values() if needed & groups]
    if dev:
        lines += [text for _, text in entries(DEV_LOCK.read_text()).values()]
    return lines


def constraints() -> list[str]:
    """Every locked version without hashes: a hash would make pip ask for those of torch too."""
    return [pin for path in (LOCK, DEV_LOCK) for pin in entries(path.read_text())]


def torch_command(choice: str, constraint_file: Path) -> list[str]:
    """The words for pip: torch with what its build needs, no locked package moved.

    Without a choice it is the build that pip finds first. A build is told by the local part of
    its version: `===2.13.0` is the registry's own (CUDA), `==2.13.0+cpu` one without CUDA.
    """
    requirement = torch_requirement()
    words = ["install", "--constraint", str(constraint_file)]
    if choice == "cpu":
        return [*words, f"{requirement}+cpu"]
    if choice == "cuda":
        return [*words, requirement.replace("==", "===")]
    if choice:
        return [*words, "--index-url", choice, requirement]
    return [*words, requirement]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install the locked packages and torch.")
    parser.add_argument("--extras", default="", help="all, none, or names with commas")
    parser.add_argument("--dev", action="store_true", help="the tools of lint and tests too")
    parser.add_argument("--torch", default="", help="cpu, cuda or the URL of an index")
    parser.add_argument(
        "--without-base", action="store_true", help="the extras alone, without the project"
    )
    parsed = parser.parse_args(arguments)
    here = Path(sys.prefix)
    if sys.prefix == sys.base_prefix:
        return _refused("this is no virtual environment; `make setup` makes one and calls this")
    if parsed.torch not in ("", "cpu", "cuda") and "://" not in parsed.torch:
        return _refused(f"TORCH={parsed.torch}: expected cpu, cuda or the URL of an index")
    memory = here / ".extras"
    before = set(memory.read_text().split()) if memory.exists() else set()
    named = set(parsed.extras.replace(",", " ").split())
    if not named and not memory.exists():
        named = {"all"}
    wanted = before | (set(extras()) if "all" in named else named - {"none"})
    if parsed.torch:
        wanted.add("learn")
    if unknown := wanted - set(extras()):
        known = ", ".join(extras())
        return _refused(f"no extra {', '.join(sorted(unknown))}; there are: {known}, all, none")

    for stamp in STAMPS:
        (here / stamp).unlink(missing_ok=True)
    groups = wanted if parsed.without_base else wanted | {BASE}
    (here / "requirements.txt").write_text("\n".join(chosen_lines(groups, parsed.dev)) + "\n")
    (here / "constraints.txt").write_text("\n".join(constraints()) + "\n")
    listed = ", ".join(sorted(wanted)) or "none"
    print(f"installing the locked packages (extras: {listed}); some minutes", flush=True)
    locked = ["install", "--require-hashes", "--no-deps", "-r", str(here / "requirements.txt")]
    if code := _pip(locked):
        return code
    if "learn" in wanted:
        words = torch_command(parsed.torch, here / "constraints.txt")
        shown = re.sub(r"//[^/@ ]*@", "//", " ".join(words))  # an index may want a password
        print(f"installing torch and its libraries, some minutes: pip {shown}", flush=True)
        if "://" in parsed.torch:  # the one that is installed would do, whatever its build
            _pip(["uninstall", "--yes", "torch"])
        if code := _pip(words):
            if parsed.torch == "cpu":
                _refused("no CPU build of torch is at hand: name an index that has one, TORCH=URL")
            return code
    if parsed.without_base:
        return 0
    project = ["install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    if code := _pip(project):
        return code
    memory.write_text("\n".join(sorted(wanted)) + "\n")
    doctor = [sys.executable, "-m", "tasks.operations.doctor", "--python", sys.executable]
    if code := subprocess.run(doctor, cwd=ROOT).returncode:
        return code
    (here / ".ready").touch()
    if wanted == set(extras()):
        (here / ".all").touch()
        if parsed.dev:
            (here / ".dev").touch()
    return 0


def _pip(words: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pip", words[0], "-qq", *words[1:]]).returncode


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _refused(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
