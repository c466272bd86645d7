"""Downloads by (URL, SHA-256, size): resumed after a kill, checked before anyone sees them.

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
import logging
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from urllib.parse import unquote, urlsplit

from schemas.errors import ConfigError, SourceError
from storage.atomic import explained, fsync_path, write_bytes
from storage.filehash import HashCache, sha256_file

log = logging.getLogger(__name__)

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
        try:
            urlsplit(self.url)
        except ValueError as error:
            raise ConfigError(f"{self.url} is no address: {error}") from None
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError(
                f"{self.url}: sha256 {self.sha256!r}, expected 64 lowercase hex digits"
            )
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

    With a `cache`, a file that was checked before is not read again.
    """
    if urlsplit(remote.url).scheme not in ("http", "https"):
        return _checked_local(remote, cache)
    target = Path(into) / remote.file_name
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(_beside(target, ".lock"), "w") as lock:
            # Freed by the kernel if the holder dies. A second process waits, then finds the file.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                if _fault(remote, target, cache) is None:
                    return target
                target.replace(_beside(target, ".bad"))
            with _reported(progress) as report:
                _download(remote, target, retries, report)
            _accept(remote, target)
    return target


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


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
    digest = sha256_file(path) if cache is None else cache.sha256(path)
    return None if digest == remote.sha256 else f"found sha256 {digest}, expected {remote.sha256}"


def _download(remote: Remote, target: Path, retries: int, report: Progress) -> None:
    """Fills the .part file."""
    part = _beside(target, ".part")
    failures = 0
    while True:
        try:
            _transfer(remote, target, report)
            return
        except _Restart:
            part.unlink(missing_ok=True)
        except _Retry as error:
            failures += 1
            if failures > retries:
                raise SourceError(
                    f"{remote.url}: {error}; given up after {failures} tries. "
                    f"{_size(part)} bytes are kept in {part}: run again later to continue there."
                ) from None
            time.sleep(min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2 ** (failures - 1)))


def _accept(remote: Remote, target: Path) -> None:
    part, note = _beside(target, ".part"), _beside(target, ".part.json")
    fault = _fault(remote, part)
    if fault is not None:
        bad = _beside(target, ".bad")
        with open(part, "rb") as file:
            is_page = file.read(64).lstrip()[:1] == b"<"
        part.replace(bad)
        note.unlink(missing_ok=True)
        raise SourceError(
            f"{remote.url} is not the file that was asked for: {fault}. "
            + ("It looks like a web page (a login or an error). " if is_page else "")
            + f"It is kept as {bad}; check the URL, or the expected sha256 and size."
        )
    fsync_path(part)
    part.replace(target)
    fsync_path(target.parent)
    note.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(remote: Remote, target: Path, report: Progress) -> None:
    """One request: appends to the .part file what it lacks, or fills it anew."""
    part = _beside(target, ".part")
    limit = UNKNOWN_SIZE_LIMIT if remote.size is None else remote.size
    expectation = (
        f"expected {'at most ' if remote.size is None else ''}{limit}; check the URL or the size"
    )
    part_size = _size(part)
    validator = None
    if part_size:
        version = _part_version(target, remote.url)
        if part_size == remote.size and (version is not None or remote.sha256 is not None):
            return
        # Bytes of two versions must not be joined unless the hash is there to tell.
        if version is None or (not version and remote.sha256 is None) or part_size > limit:
            raise _Restart
        validator = version or None
    with _response(remote.url, part_size, validator) as response:
        start, total = _announced(response, part_size, validator)
        if total is not None and (total > limit or remote.size not in (None, total)):
            if start:
                raise _Restart
            raise SourceError(f"{remote.url}: the server announces {total} bytes, {expectation}.")
        with open(part, "r+b" if start else "wb") as file:
            if not start:
                note = {"url": remote.url, "validator": _validator(response.headers)}
                write_bytes(_beside(target, ".part.json"), json.dumps(note).encode())
            file.seek(start)
            position = start
            report(target.name, position, total)
            while total is None or position < total:
                data = _next_bytes(
                    response, min(BLOCK, BLOCK if total is None else total - position)
                )
                if not data:
                    break
                if position + len(data) > limit:
                    file.truncate(0)
                    raise SourceError(f"{remote.url}: the server sends more bytes, {expectation}.")
                file.write(data)
                position += len(data)
                report(target.name, position, total)
    expected = remote.size if total is None else total
    if expected is not None and position < expected:
        raise _Retry(f"the connection ended after {position} of {expected} bytes")


def _part_version(target: Path, url: str) -> str | None:
    """What the server called the version that the .part file is of; "" if it gave no name."""
    try:
        note = json.loads(_beside(target, ".part.json").read_bytes())
        return str(note["validator"]) if note["url"] == url else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _validator(headers: Message) -> str:
    etag = headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")


def _response(url: str, part_size: int, validator: str | None) -> http.client.HTTPResponse:
    headers = {"User-Agent": "novelty-pipeline", "Accept-Encoding": "identity"}
    if part_size:
        headers["Range"] = f"bytes={part_size}-"
        if validator:
            headers["If-Range"] = validator
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    try:
        request = urllib.request.Request(url, headers=headers)
        response: http.client.HTTPResponse = opener.open(request, timeout=TIMEOUT_SECONDS)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and part_size:
            raise _Restart from None
        if error.code >= 500:
            raise _Retry(f"the server answered {error.code} {error.reason}") from None
        raise SourceError(
            f"{url}: the server answered {error.code} {error.reason}. Check the URL and whether it "
            "needs a login."
        ) from None
    except (http.client.InvalidURL, ValueError) as error:
        raise ConfigError(f"{url} is not a usable URL: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise SourceError(
                f"{url}: the server's certificate is not trusted ({reason})."
            ) from None
        raise _Retry(f"the connection failed ({reason or type(error).__name__})") from None


def _announced(
    response: http.client.HTTPResponse, part_size: int, validator: str | None
) -> tuple[int, int | None]:
    """Where the body begins and how long the whole file is, by the server's word."""
    if response.status == 206:
        span = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip()
        )
        changed = validator and _validator(response.headers) not in ("", validator)
        if span is None or int(span[1]) != part_size or changed:
            raise _Restart
        return part_size, None if span[2] == "*" else int(span[2])
    if response.status != 200:
        raise SourceError(f"{response.url}: the server answered {response.status}, expected 200.")
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _next_bytes(response: http.client.HTTPResponse, most: int) -> bytes:
    try:
        return response.read1(most)
    except (OSError, http.client.HTTPException) as error:
        raise _Retry(f"the connection broke ({error or type(error).__name__})") from None


@contextmanager
def _reported(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Bars(*columns, console=Console(stderr=True)) as bars:
            bar = bars.add_task("", total=None)
            yield lambda name, done, total: bars.update(
                bar, description=name, completed=done, total=total
            )
    else:
        yield _Lines()


class _Lines:
    """At most one line in ten seconds, and one at the end."""

    def __init__(self) -> None:
        self._last_log = time.monotonic()

    def __call__(self, name: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if done == total or now - self._last_log >= 10:
            self._last_log = now
            log.info(f"{name}: {done}/{total or '?'} bytes")
