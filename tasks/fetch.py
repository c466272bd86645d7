"""Downloads by (URL, SHA-256, size) that can be killed and resumed, checked before anyone sees them.

Enters: a `Remote`, an http(s) URL, a file:// URL or a plain path. Leaves: the path of a file whose
size and SHA-256 are as expected. A download grows in `<name>.part`, with the server's ETag in
`<name>.part.json`; it continues there after a broken connection or a killed process, if the
server confirms that the content is still the same, and starts again if not. It gets its own name
only when it is whole and right; a wrong one is kept as `<name>.bad`. A local file is checked where
it lies: neither copied nor moved.
"""

import fcntl
import http.client
import json
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from urllib.parse import unquote, urlsplit

from schemas.errors import ConfigError, LakeError, SourceError
from storage.filehash import HashCache, sha256_file

BLOCK = 1 << 18
TIMEOUT_SECONDS = 30.0
"""Of a connection attempt, and of waiting for the next bytes."""
BACKOFF_SECONDS = 0.5
BACKOFF_LIMIT_SECONDS = 30.0
UNKNOWN_SIZE_LIMIT = 64 << 30
"""Bytes that are accepted where the Remote states no size."""

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, bytes so far and bytes in all (None: not known)."""


@dataclass(frozen=True)
class Remote:
    """`sha256` None: any content is accepted; `name` where the URL does not end in a file name."""

    url: str
    sha256: str | None = None
    size: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError(f"{self.url}: sha256 {self.sha256!r}, expected 64 lowercase hex digits")
        if self.size is not None and self.size < 0:
            raise ConfigError(f"{self.url}: size {self.size}, expected a number of bytes")

    @property
    def file_name(self) -> str:
        name = self.name or unquote(urlsplit(self.url).path).rpartition("/")[2]
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ConfigError(f"{self.url} does not end in a file name: give one as `name`")
        return name


class _Retry(Exception):
    """A failure that may pass: the connection broke, or the server answered 5xx."""


class _Restart(Exception):
    """What was kept of an earlier try does not belong to what the server has now."""


def fetch(
    remote: Remote,
    into: Path,
    *,
    retries: int = 5,
    progress: Progress | None = None,
    cache: HashCache | None = None,
) -> Path:
    """The checked file: in the folder `into`, or where it lies if `remote` is local.

    With a `cache` a file that was found good is not read again to find it good once more.
    """
    parts = urlsplit(remote.url)
    if parts.scheme not in ("http", "https"):
        return _checked_local(remote, cache)
    into = Path(into)
    target = into / remote.file_name
    try:
        into.mkdir(parents=True, exist_ok=True)
        with open(into / f".{target.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                if _fault(remote, target, cache) is None:
                    return target
                os.replace(target, f"{target}.bad")
            with _reported(progress) as report:
                _download(remote, target, retries, report)
    except OSError as error:
        raise LakeError(f"{target} cannot be written: {error}. Check space and permissions.") from None
    return target


def _checked_local(remote: Remote, cache: HashCache | None) -> Path:
    parts = urlsplit(remote.url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{remote.url}: a file URL of another machine; use file:///path")
        path = Path(unquote(parts.path))
    elif "://" in remote.url:
        raise ConfigError(f"{remote.url}: scheme {parts.scheme!r}, expected http, https or file")
    else:
        path = Path(remote.url)
    if not path.is_file():
        raise SourceError(f"{path} is not a file. Correct the path, or put the file there.")
    fault = _fault(remote, path, cache)
    if fault is not None:
        raise SourceError(f"{path} is not the file that was asked for: {fault}.")
    return path


def _fault(remote: Remote, path: Path, cache: HashCache | None = None) -> str | None:
    size = path.stat().st_size
    if remote.size is not None and size != remote.size:
        return f"found {size} bytes, expected {remote.size}"
    if remote.sha256 is None:
        return None
    found = sha256_file(path) if cache is None else cache.sha256(path)
    return None if found == remote.sha256 else f"found sha256 {found}, expected {remote.sha256}"


def _download(remote: Remote, target: Path, retries: int, report: Progress) -> None:
    part = target.with_name(f"{target.name}.part")
    kept = target.with_name(f"{target.name}.part.json")
    failures = 0
    while True:
        try:
            _transfer(remote, part, kept, report)
            break
        except _Restart:
            part.unlink(missing_ok=True)
        except _Retry as error:
            failures += 1
            if failures > retries:
                done = part.stat().st_size if part.exists() else 0
                raise SourceError(
                    f"{remote.url}: {error}, {failures} times in a row or in all. {done} bytes are "
                    f"kept in {part}: run again later to continue there."
                ) from None
            time.sleep(min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2 ** (failures - 1)))
