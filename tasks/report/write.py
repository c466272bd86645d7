"""Puts a report together: results first, the benchmark's own sections, then what was built."""

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from schemas.errors import ConfigError, LakeError
from storage.atomic import write_bytes
from storage.layout import content_key, pointer_path
from storage.locks import locked
from storage.tables import TableVersion, current_versions
from storage.upkeep import read_build_record
from tasks.report.balance import balance
from tasks.report.built import data_quality, tiles, what_was_built
from tasks.report.confusion import confusion
from tasks.report.curves import curves
from tasks.report.index import index
from tasks.report.leaderboard import leaderboard
from tasks.report.page import INDEX, key_of, page
from tasks.report.reading import Tables, module, names

REPORTS = "reports"


def write_report(lake: Path, benchmark: str, *, anew: bool = True) -> Path:
    """Write `<lake>/reports/<benchmark>.html` and the index of all reports.

    Without `anew` a page that was made from the same tables, settings and code is left as it is.
    """
    if not benchmark.isidentifier():
        raise ConfigError(f"benchmark is {benchmark!r}, expected a name such as novelcraft")
    versions = current_versions(lake, benchmark)
    if not versions:
        raise LakeError(
            f"no tables of {benchmark} in {lake}; `novelty build {benchmark}` makes them"
        )
    path = lake / REPORTS / f"{benchmark}.html"
    if anew or key_of(path) != report_key(lake, benchmark, versions):
        write_bytes(path, render_report(lake, benchmark, versions).encode())
    with locked(lake, REPORTS, 60.0):
        pages = list(path.parent.glob("*.html"))
        shown = [*pages, *(pointer_path(lake, page.stem) for page in pages)]
        if anew or _written(path.with_stem(INDEX)) < max(map(_written, shown)):
            write_bytes(path.with_stem(INDEX), index(lake, pages).encode())
    return path


def _written(path: Path) -> int:
    """When the file, or the link itself, was written; 0 if there is none."""
    return path.lstat().st_mtime_ns if os.path.lexists(path) else 0


def report_key(lake: Path, benchmark: str, versions: Sequence[TableVersion]) -> str:
    """Everything that a page shows: tables, what the build recorded, and the code that draws."""
    record = read_build_record(lake, benchmark)
    recorded = record.model_dump(mode="json") if record else {}
    recorded.get("settings", {}).pop("lake", None)
    return content_key(
        {
            "tables": {version.name: version.manifest.key for version in versions},
            "record": recorded,
            "code": _code_digest(),
        }
    )


@cache
def _code_digest() -> str:
    """Of all files of `tasks` and `schemas`: cheaper to read than to know which of them matter."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for folder in ("schemas", "tasks"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".html", ".csv", ".yaml"):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def render_report(lake: Path, benchmark: str, versions: Sequence[TableVersion]) -> str:
    """The page. All sections see these versions, even if a build swaps the tables meanwhile."""
    read = Tables(lake, benchmark, versions)
    extra = module(f"tasks.{benchmark}.report")
    class_names = getattr(extra, "CLASS_NAMES", {})  # where a class is an id
    sections = leaderboard(read)
    if extra is not None:
        sections += extra.sections(read)
    sections += [*curves(read), *confusion(read)]
    sections += [*balance(read, class_names), what_was_built(read), data_quality(read)]
    title, about = names(benchmark)
    key = report_key(lake, benchmark, versions)
    return page(title, about, tiles(read), sections, key)
