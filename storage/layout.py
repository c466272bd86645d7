"""Where everything in a lake stands: every path template in one place.

<lake>/catalog.duckdb                                views and comments for analysts
<lake>/reports/<benchmark>.html                      what was built, for people
<lake>/<benchmark>/<table>/current                   symlink to the version to read
<lake>/<benchmark>/<table>/versions/<key>/*.parquet  immutable, with _manifest.json beside
<lake>/.novelty/pieces/<benchmark>/<stage>/<key>/    what one stage made from one shard
<lake>/.novelty/work/<benchmark>/<stage>/<key>/      checkpoints of unfinished shards
<lake>/.novelty/hashes.sqlite                        digests of raw files by (path, size, mtime)
<lake>/.novelty/builds/<benchmark>.json              what the last finished build saw
<lake>/.novelty/locks/<name>.lock
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import orjson

MANIFEST = "_manifest.json"  # readers of whole folders skip names with an underscore
DEFAULT_LAKE = "lake"


def lake_root(given: str | Path | None = None) -> Path:
    """The lake folder: the argument, else NOVELTY_LAKE, else ./lake; always absolute."""
    return Path(given or os.environ.get("NOVELTY_LAKE") or DEFAULT_LAKE).expanduser().absolute()


def content_key(value: Any) -> str:
    """A name made of what goes in: 32 hex digits of the SHA-256 of canonical JSON."""
    data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).hexdigest()[:32]


def file_slug(name: str) -> str:
    """A shard name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._")[:80] or "all"


def inner(lake: Path) -> Path:
    return lake / ".novelty"


def hash_cache_path(lake: Path) -> Path:
    return inner(lake) / "hashes.sqlite"


def lock_path(lake: Path, name: str) -> Path:
    return inner(lake) / "locks" / f"{file_slug(name)}.lock"


def build_record_path(lake: Path, benchmark: str) -> Path:
    return inner(lake) / "builds" / f"{benchmark}.json"


def pieces_path(lake: Path) -> Path:
    return inner(lake) / "pieces"


def piece_path(lake: Path, benchmark: str, stage: str, key: str) -> Path:
    return pieces_path(lake) / benchmark / stage / key


def work_path(lake: Path, benchmark: str, stage: str, key: str) -> Path:
    return inner(lake) / "work" / benchmark / stage / key


def table_path(lake: Path, benchmark: str, table: str) -> Path:
    return lake / benchmark / table


def versions_path(lake: Path, benchmark: str, table: str) -> Path:
    return table_path(lake, benchmark, table) / "versions"


def current_path(lake: Path, benchmark: str, table: str) -> Path:
    return table_path(lake, benchmark, table) / "current"


def catalog_path(lake: Path) -> Path:
    return lake / "catalog.duckdb"
