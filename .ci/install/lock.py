"""Writes requirements.lock and requirements-dev.lock: `make lock`.

Versions come from pip's resolver over all of pyproject.toml, held where the lock files are today:
change a version there, or take its line out, and the next run resolves it anew. Hashes are those of
every file that the index lists for a version, whatever the platform, so that a lock does not depend
on the machine that wrote it. Which index that is, pip's own settings say; its session is used,
with its proxies, certificates and passwords.

torch and the libraries that one of its builds asks for are left out: `packages.py` beside this
file installs them with a command of their own.
"""

import json
import logging
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import InvalidVersion, Version

sys.path.insert(0, str(Path(__file__).parent))
from packages import BASE, DEV_LOCK, LOCK, ROOT, entries

DEV = "dev"
TORCH = re.compile(r"torch|triton|pytorch-triton.*|(nvidia|cuda)-.*")
"""torch and what only some builds of it ask for."""

HEAD = """\
# Written by `make lock`. Above each package: who needs it, the base or which extras.
# torch and the libraries of its build are not here: .ci/install/packages.py installs them.

"""
DEV_HEAD = """\
# Written by `make lock`. What lint and tests need beside requirements.lock.

"""


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    roots = {BASE: project["project"]["dependencies"] + project["build-system"]["requires"]}
    roots |= project["project"]["optional-dependencies"]
    texts = {path: path.read_text() if path.exists() else "" for path in (LOCK, DEV_LOCK)}
    pins = [pin for text in texts.values() for pin in entries(text)]
    report = resolved([line for lines in roots.values() for line in lines], pins)
    packages = {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in report}
    groups = {name: reached(packages, lines) for name, lines in roots.items()}
    run_time, dev = [], []
    hashes_of = index_hashes()
    for name in sorted(packages):
        if TORCH.fullmatch(name):
            continue
        needed = sorted(group for group, names in groups.items() if name in names)
        version = packages[name]["version"]
        block = entry(packages[name]["name"], version, hashes_of(name, version))
        if needed == [DEV]:
            dev.append(block)
        else:
            run_time.append(f"# {' '.join(n for n in needed if n != DEV)}\n{block}")
    LOCK.write_text(HEAD + "\n".join(run_time) + "\n")
    DEV_LOCK.write_text(DEV_HEAD + "\n".join(dev) + "\n")
    print(f"{len(run_time)} packages in {LOCK.name}, {len(dev)} in {DEV_LOCK.name}")
    return 0


def resolved(requirements: Iterable[str], pins: Iterable[str]) -> list[dict]:
    """What pip would install into an empty environment, with the metadata of each."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, held, report = (Path(folder) / name for name in ("wanted", "held", "report"))
        wanted.write_text("\n".join(requirements))
        held.write_text("\n".join(pins))
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report)]
        command += ["--requirement", str(wanted), "--constraint", str(held)]
        subprocess.run(command, check=True)
        return json.loads(report.read_text())["install"]


def reached(packages: Mapping[str, dict], lines: Iterable[str]) -> set[str]:
    """The packages that these requirements lead to, themselves among them."""
    found: set[tuple[str, str]] = set()
    todo = [Requirement(line) for line in lines]
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        if name not in packages:
            continue  # for another platform
        for extra in {"", *asked.extras}:
            if (name, extra) in found:
                continue
            found.add((name, extra))
            for line in packages[name].get("requires_dist", ()):
                needs = Requirement(line)
                if needs.marker is None or needs.marker.evaluate({"extra": extra}):
                    todo.append(needs)
    return {name for name, _ in found}


def index_hashes() -> Callable[[str, str], list[str]]:
    """A function of name and version: the sha256 of every file that pip's indexes list for it."""
    from pip._internal.commands import create_command
    from pip._internal.index.collector import parse_links

    logging.getLogger("pip").setLevel(logging.ERROR)
    fetching = logging.getLogger("pip._internal.index.collector")
    fetching.setLevel(logging.DEBUG)
    fetching.propagate = False
    fetching.addHandler(Unreachable())
    command = create_command("install")
    options, _ = command.parse_args([])
    with command.main_context():
        finder = command._build_package_finder(options, command._build_session(options))
    collector = finder._link_collector

    def links(page):
        content = collector.fetch_response(page)
        return parse_links(content) if content else ()

    def hashes(name: str, version: str) -> list[str]:
        found = set()
        for source in collector.collect_sources(name, links).index_urls:
            for link in source.page_candidates() if source else ():
                if _is_of(link.filename, name, Version(version)):
                    if link.hash_name != "sha256":
                        raise SystemExit(f"{link.filename}: the index lists no sha256")
                    found.add(link.hash)
        if not found:
            raise SystemExit(f"{name}=={version}: no index lists a file of it")
        return sorted(found)

    return hashes


class Unreachable(logging.Handler):
    """Stops where an index does not answer: pip would go on, and its hashes would be missing."""

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if said.startswith("Could not fetch URL") and "404 Client Error" not in said:
            raise SystemExit(f"{said.removesuffix(' - skipping')}; nothing is written, try again")


def _is_of(filename: str, name: str, version: Version) -> bool:
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[:2] == (name, version)
        return parse_sdist_filename(filename) == (name, version)
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return False


def entry(name: str, version: str, hashes: Iterable[str]) -> str:
    return " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{h}" for h in hashes)])


if __name__ == "__main__":
    sys.exit(main())
