"""What was hashed is what is read, also by native code that reads raw files by their paths.

Enters: the raw files of a shard with the digests of their listing, and the work that reads them.
Leaves: what the work made. `RawFolder.read` compares bytes with the digest while it reads. A file
that was read in another way is hashed after the work, and must have had the same inode, size and
times before and after. Members of archives are compared by the archive's own checksums; here the
archive must have stayed the same and must still list them so.

A file that is gone or another than when it was listed is a passing fault: its remembered digest is
forgotten, it is hashed again, and the work is done again if it is as it was. If not, or if that
does not help, the work fails with a ChangedSource; nothing of it is committed.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from schemas.errors import ChangedSource, RecordError
from storage.archives import UNLIMITED
from storage.filehash import HashCache, Stamp, is_racy, sha256_files, stamp_of
from storage.raw import RawArchive, RawFile, RawSource, open_raw
from storage.watch import watching

PAUSES = (0.5, 3.0)
"""Seconds before another try: a network file system needs some to come back."""
Result = TypeVar("Result")
_known: dict[tuple[str, Stamp], str] = {}


def read_unchanged(
    root: str | None,
    files: Sequence[RawFile],
    work: Callable[[], Result],
    cache: HashCache | None = None,
    fault: Callable[[Result], str | None] = lambda result: None,
) -> Result:
    """What the work gives, made from files that were as listed from its beginning to its end.

    `fault` may see in the result that a file could not be read.
    """
    if not files:
        return work()
    for pause in (None, *PAUSES):
        if pause is not None:
            time.sleep(pause)
        try:
            return _attempt(root, files, work, cache, fault, again=pause is not None)
        except ChangedSource as error:
            changed = error
            if cache is not None:
                cache.forget([error.path])
    raise changed


def _attempt(
    root: str | None,
    files: Sequence[RawFile],
    work: Callable[[], Result],
    cache: HashCache | None,
    fault: Callable[[Result], str | None],
    again: bool,
) -> Result:
    digests = _digests(root, files, cache)
    before = {path: _stamp(path) for path in digests}
    if again:
        _compare(digests)  # what changed for good needs no second try
    with watching(digests) as watch:
        try:
            result = work()
        except Exception as error:
            _require_same(before)
            if isinstance(error, OSError) and str(error.filename).startswith(root or "\0"):
                reason = f"could not be read: {error.strerror}"
                raise ChangedSource(str(error.filename), reason) from error
            raise
    _require_same(before)
    _compare({path: digest for path, digest in digests.items() if path not in watch.compared})
    if problem := fault(result):
        raise ChangedSource(root or "", f"could not be read: {problem}")
    return result


def _digests(root: str | None, files: Sequence[RawFile], cache: HashCache | None) -> dict[str, str]:
    """Real paths that must not change, and their digests: of an archive its own path, with ""."""
    digests = {file.path: file.digest for file in files if file.path}
    inside = [file for file in files if file.path is None]
    if not inside or root is None:
        return digests
    if Path(root).is_dir():
        real = os.path.realpath(root)
        return digests | {f"{real}/{file.name}": file.digest for file in inside}
    archive = next((path for path in (Path(root), *Path(root).parents) if path.is_file()), None)
    if archive is None:
        raise ChangedSource(root, "is gone")
    if archive.suffix.lower() == ".npz":
        return digests | {os.path.realpath(archive): inside[0].digest}
    source = open_raw(Path(root), cache, limits=UNLIMITED)
    for file in inside:
        digest = source.digest(file.name) if isinstance(source, RawArchive) else None
        if (
            digest is not None
            and digest.startswith("crc32:")
            and not file.digest.startswith("crc32:")
        ):
            digest = _member_digest(source, file)
        if digest is None or (file.digest and file.digest != digest):
            raise ChangedSource(f"{root}/{file.name}", "is gone or another")
    return digests | {os.path.realpath(archive): ""}


def _member_digest(source: RawSource, file: RawFile) -> str | None:
    """SHA-256 of a zip member whose expected digest comes from a table, not from a listing."""
    try:
        return hashlib.sha256(source.read(file.name, limit=file.size)).hexdigest()
    except RecordError:
        return None


def _stamp(path: str) -> Stamp:
    try:
        return stamp_of(os.stat(path))
    except OSError as error:
        raise ChangedSource(path, f"cannot be read: {error.strerror}") from None


def _require_same(before: Mapping[str, Stamp]) -> None:
    for path, stamp in before.items():
        if _stamp(path) != stamp:
            raise ChangedSource(path, "changed while it was being read")


def _compare(digests: Mapping[str, str]) -> None:
    """Hash the files and compare; a file that did not change is hashed once in each process."""
    stamps = {path: _stamp(path) for path, digest in digests.items() if digest}
    new = [path for path, stamp in stamps.items() if (path, stamp) not in _known]
    failed: dict[str, OSError] = {}
    new_digests = dict(zip(new, sha256_files(new, failed=failed), strict=True))
    for path, error in failed.items():
        raise ChangedSource(path, f"cannot be read: {error.strerror or error}")
    now = time.time_ns()
    for path, stamp in stamps.items():
        digest = new_digests.get(path) or _known[path, stamp]
        if digest != digests[path]:
            raise ChangedSource(path, "is not what it was")
        if not is_racy(os.stat(path), now):
            _known[path, stamp] = digest
