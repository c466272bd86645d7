"""Files of the lake are compared with their SHA-256 before they are read, once in each process.

Enters: a path and what a manifest says of the file. Leaves: the path, or a LakeError that names the
file and its cure. A file that was compared is known by device, inode, size and mtime, so a part is
hashed once although the versions of a table link to it too.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from schemas.errors import LakeError
from storage.filehash import sha256_files

CURE = "`novelty verify --drop` removes what is damaged, and a build makes it again"
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""No such file. After any other fault of the system the file may be whole."""
Known = dict[tuple[int, int, int, int], str]
_known: Known = {}


class File(Protocol):
    """A file that a manifest lists."""

    @property
    def file(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def bytes(self) -> int: ...


def verified(path: Path, file: File) -> Path:
    """The path of a file that is what its manifest says."""
    if problem := problem_of(path, file):
        raise LakeError(f"{path} {problem}; {CURE}")
    return path


def verified_all(pairs: Sequence[tuple[Path, File]]) -> list[Path]:
    """The paths of many files, hashed together."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda pair: verified(*pair), pairs))


def problem_of(path: Path, file: File, known: Known | None = None) -> str | None:
    """What is wrong with a file, in words. `known` holds digests that need no new reading."""
    known = _known if known is None else known
    try:
        status = os.stat(path)
    except ABSENT:
        return "is missing"
    if status.st_size != file.bytes:
        return f"has {status.st_size} bytes, expected {file.bytes}"
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if stamp not in known:
        failed: dict[str, OSError] = {}
        (digest,) = sha256_files([path], threads=1, failed=failed)
        if failed:
            error = failed[str(path)]
            if isinstance(error, PermissionError):
                raise error  # it may be whole
            return f"cannot be read: {error.strerror or error}"
        known[stamp] = digest
    if known[stamp] != file.sha256:
        return f"has sha256 {known[stamp][:16]}…, expected {file.sha256[:16]}…"
    return None
