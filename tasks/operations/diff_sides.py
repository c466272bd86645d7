"""What a person names on the command line becomes one side of a comparison (see `diff.py`).

Enter: `benchmark/table`, `benchmark/table@key` or `benchmark/table@s12` (a snapshot) of a lake,
`another/lake:benchmark/table` (a folder or s3://bucket/prefix), or the path of a Parquet file or of
a folder of them. Leaves: a `Side`, files with their SHA-256 digests.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from schemas.errors import ConfigError, LakeError, SourceError
from storage.filehash import sha256_file
from storage.layout import MANIFEST, lake_root, versions_path
from storage.snapshots import find_snapshot
from storage.tables import (
    TableVersion,
    all_versions,
    current_version,
    read_manifest,
    versions_of,
)

_NAMED = re.compile(
    r"(?:(?P<lake>.+):)?(?P<benchmark>[\w-]+)/(?P<table>[\w-]+)(?:@(?P<key>[\w-]+))?"
)


@dataclass(frozen=True)
class Side:
    """One of the two sets of rows: its files with their digests, and the key that it declares."""

    name: str
    files: tuple[Path, ...]
    digests: tuple[str, ...]
    key: tuple[str, ...]


def find_side(text: str, lake: Path) -> Side:
    """`benchmark/table[@key]` of the lake, `another/lake:benchmark/table[@key]`, or a path.

    The path of a version, or of a table's folder in any lake, is that version or the current one.
    A name that is both a table of the lake and a path is the table; write `./name` for the path.
    """
    match = _NAMED.fullmatch(text)
    path = Path(text).expanduser()
    if match is not None:
        home = lake_root(match["lake"]) if match["lake"] else lake
        known = versions_path(home, match["benchmark"], match["table"]).is_dir()
        if known or not path.exists():
            return _version_side(_version(home, match["benchmark"], match["table"], match["key"]))
    for folder in (path, path / "current"):
        if (folder / MANIFEST).exists():
            version = folder.resolve()
            return _version_side(TableVersion(version, read_manifest(version)))
    return _files_side(path)


def previous_side(text: str, lake: Path) -> Side:
    """The version that was made last before the current one, by the age of its manifest."""
    match = _NAMED.fullmatch(text)
    if match is None or match["key"]:
        raise ConfigError(
            f"one side alone must be a table of the lake, not {text!r}; name a second side"
        )
    home = lake_root(match["lake"]) if match["lake"] else lake
    current = current_version(home, match["benchmark"], match["table"])
    older = [
        version
        for version in all_versions(home, match["benchmark"], match["table"])
        if version.manifest.key != current.manifest.key
    ]
    if not older:
        raise ConfigError(
            f"{current.name} has one version only, {current.manifest.key}; there is nothing to "
            "compare it with (`novelty gc` removes old versions)"
        )
    return _version_side(older[0])


def _version(lake: Path, benchmark: str, table: str, key: str | None) -> TableVersion:
    current = current_version(lake, benchmark, table)
    if key is None:
        return current
    if key.startswith("s"):  # no key of a version does
        snapshot = find_snapshot(lake, f"{benchmark}@{key}")
        if table not in snapshot.tables:
            raise ConfigError(f"{snapshot.name} of {benchmark} has no table {table!r}")
        return versions_of(lake, snapshot, [table])[0]
    versions = all_versions(lake, benchmark, table)
    matches = [version for version in versions if version.manifest.key.startswith(key)]
    if len(matches) != 1:
        lines = ", ".join(
            f"{version.manifest.key} ({version.manifest.rows:,} rows"
            f"{', current' if version.manifest.key == current.manifest.key else ''})"
            for version in versions
        )
        raise ConfigError(
            f"{len(matches)} versions of {benchmark}/{table} begin with {key!r}; there are, the "
            f"newest first: {lines}"
        )
    return matches[0]


def _version_side(version: TableVersion) -> Side:
    return Side(
        name=f"{version.name}@{version.manifest.key[:12]}",
        files=tuple(version.files),
        digests=tuple(part.sha256 for part in version.manifest.parts),
        key=_declared_key(version.files[0]),
    )


def _files_side(path: Path) -> Side:
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise SourceError(
            f"{path} is no Parquet file, no folder of them and no table; write benchmark/table as "
            "`novelty status` does, or the path of a file or folder"
        )
    digests = tuple(sha256_file(file) for file in files)
    return Side(str(path), tuple(files), digests, _declared_key(files[0]))


def _declared_key(file: Path) -> tuple[str, ...]:
    """The sort key that our writer puts into the metadata; empty in files of others."""
    try:
        metadata = pq.read_schema(file).metadata or {}
    except (OSError, ValueError) as error:
        raise LakeError(f"cannot read {file}: {error}. Run `novelty verify`.") from error
    return tuple(filter(None, metadata.get(b"sort_key", b"").decode().split(",")))
