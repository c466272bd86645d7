"""Where everything in a lake stands: every path template in one place.

<lake>/catalog.duckdb                                views and comments for analysts
<lake>/iceberg/catalog.db                            the same tables for Iceberg, if registered
<lake>/reports/<benchmark>.html                      what was built, for people
<lake>/<benchmark>/current                           symlink to the snapshot to read: the one swap
<lake>/<benchmark>/snapshots/<name>/<table>          symlink to the table's version in it
<lake>/<benchmark>/snapshots/<name>/_snapshot.json   all versions, and the pieces of each run
<lake>/<benchmark>/<table>/current                   symlink through <benchmark>/current
<lake>/<benchmark>/<table>/versions/<key>/*.parquet  immutable, with _manifest.json beside
<lake>/.novelty/pieces/<benchmark>/<stage>/<key>/    what one stage made from one shard
<lake>/.novelty/work/<benchmark>/<stage>/<key>/      checkpoints of unfinished shards
<lake>/.novelty/tombstones/<name>/                   what was removed and can be restored
<lake>/.novelty/hashes.sqlite                        digests of raw files by (path, size, mtime)
<lake>/.novelty/builds/<benchmark>.json              what the last finished build saw
<lake>/.novelty/locks/<name>.lock
<lake>/.novelty/remote.json                          only in the cache of a lake in a bucket

A lake in a bucket (s3://bucket/prefix) is worked on through a local cache folder of this same
layout. In the bucket `<benchmark>/current` is the object `current.json`, and there are no links,
locks, hashes or checkpoints; `storage/remote.py` says how the two agree.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from schemas.errors import ConfigError, LakeError
from storage.atomic import write_bytes

MANIFEST = "_manifest.json"  # readers of whole folders skip names with an underscore
SNAPSHOT = "_snapshot.json"
PINNED = "_pinned"
DEFAULT_LAKE = "lake"
LOST_AND_FOUND = "lost+found"
"""The file system's own, at the top of a volume; only root may look into it."""
PATTERN_MARKS = frozenset("*?[#")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/.*|)")


def lake_root(lake: str | Path | None = None) -> Path:
    """The lake folder: the argument, else NOVELTY_LAKE, else ./lake; always absolute.

    Of a lake in a bucket it is this machine's cache folder. A `Path` made of s3://bucket has lost
    a slash; both forms are understood.
    """
    address = str(lake or os.environ.get("NOVELTY_LAKE") or DEFAULT_LAKE)
    match = _SCHEME.fullmatch(address)
    if match is None:
        return _plain(Path(address).expanduser().absolute())
    parts = [part for part in match[2].split("/") if part]
    if match[1].lower() != "s3" or not parts or {".", ".."} & set(parts):
        raise ConfigError(
            f"lake {address!r} is no folder and no bucket; write a path or s3://bucket/prefix"
        )
    return _cache_of("s3://" + "/".join(parts))


def _plain(lake: Path) -> Path:
    """Refused where DuckDB or Iceberg would take a part of the path for a pattern or a query."""
    for place in (str(lake), os.path.realpath(lake)):
        if marks := PATTERN_MARKS & set(place):
            raise ConfigError(
                f"lake {place!r} has {' and '.join(sorted(marks))} in its path, which DuckDB "
                "and Iceberg take for patterns; name or rename a folder without "
                f"{' '.join(sorted(PATTERN_MARKS))}"
            )
    return lake


def lake_address(lake: Path) -> str:
    """What names the lake on any machine: s3://bucket/prefix, or the folder itself."""
    try:
        return str(json.loads(remote_path(lake).read_bytes())["address"])
    except (FileNotFoundError, NotADirectoryError):
        return str(lake)
    except (ValueError, KeyError, TypeError):
        raise LakeError(
            f"{remote_path(lake)} does not name a bucket; remove the folder {lake}, it is a cache"
        ) from None


def top_folders(lake: Path) -> list[Path]:
    """What stands at the top of the lake and may be a benchmark."""
    return sorted(path for path in lake.glob("[!.]*") if path.name != LOST_AND_FOUND)


def endpoint_url() -> str:
    """The S3 server that the environment names; "" for Amazon's own."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return ""
    try:
        parts = urlsplit(os.environ[name])
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return os.environ[name]
    except ValueError:  # an address in brackets that is none, a port that is no number
        pass
    raise ConfigError(f"{name} is no address of a server; expected http(s)://HOST[:PORT]")


def _cache_of(address: str) -> Path:
    """The cache folder of a bucket; another server with a bucket of that name has another."""
    root = Path(os.environ.get("NOVELTY_CACHE") or "~/.cache/novelty").expanduser().absolute()
    name = f"{file_slug(address[5:])}-{content_key([endpoint_url(), address])[:10]}"
    lake = root / "lakes" / name
    if not remote_path(lake).exists():
        write_bytes(remote_path(lake), json.dumps({"address": address}).encode() + b"\n")
    return lake


def content_key(value: Any) -> str:
    """A name made of what goes in: 32 hex digits of the SHA-256 of canonical JSON."""
    data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).hexdigest()[:32]


def file_slug(name: str) -> str:
    """A shard name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._")[:80] or "all"


def inner(lake: Path) -> Path:
    return lake / ".novelty"


def remote_path(lake: Path) -> Path:
    return inner(lake) / "remote.json"


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


def tombstones_path(lake: Path) -> Path:
    return inner(lake) / "tombstones"


def table_path(lake: Path, benchmark: str, table: str) -> Path:
    return lake / benchmark / table


def versions_path(lake: Path, benchmark: str, table: str) -> Path:
    return table_path(lake, benchmark, table) / "versions"


def current_path(lake: Path, benchmark: str, table: str) -> Path:
    return table_path(lake, benchmark, table) / "current"


def snapshots_path(lake: Path, benchmark: str) -> Path:
    return lake / benchmark / "snapshots"


def snapshot_path(lake: Path, benchmark: str, name: str) -> Path:
    return snapshots_path(lake, benchmark) / name


def pointer_path(lake: Path, benchmark: str) -> Path:
    return lake / benchmark / "current"


def catalog_path(lake: Path) -> Path:
    return lake / "catalog.duckdb"


def iceberg_path(lake: Path) -> Path:
    return lake / "iceberg"
