"""A bucket as the lake needs it: few verbs, two of them conditional, errors as sentences.

Enters: an address s3://bucket/prefix and the usual AWS_* variables. Leaves: bytes of objects, named
relative to the address. A name that is not there is None or False; anything else that goes wrong
is a LakeError that tells the user what to do and never holds a key or a token.
"""

import functools
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from schemas.errors import ConfigError, LakeError
from schemas.extras import require_library
from storage.layout import endpoint_url, lake_address

BLOCK = 8 << 20
CUT_REPLY = ("body error", "decoding response body", "Content-Range header not present")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StoredObject:
    """An object that was read."""

    data: bytes
    e_tag: str | None
    modified: datetime


@dataclass(frozen=True)
class Listed:
    """An object as a listing tells it."""

    bytes: int
    modified: datetime


def bucket_of(lake: Path) -> "Bucket | None":
    """The bucket that this lake folder is a cache of; None for a lake that is a plain folder."""
    address = lake_address(lake)
    if not address.startswith("s3://"):
        return None
    settings = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_")))
    return _connected(address, settings, os.getpid())


@functools.lru_cache(maxsize=8)
def _connected(address: str, settings: tuple[tuple[str, str], ...], process: int) -> "Bucket":
    """One client for each process: its connections do not survive a fork."""
    return Bucket(address)


class Bucket:
    """The objects below one address."""

    def __init__(self, address: str):
        require_library("obstore")
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        self.address = address
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        url = endpoint_url()
        options: dict[str, Any] = {"endpoint": url} if url else {}
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                client_options={
                    "allow_http": url.startswith("http://"),
                    "connect_timeout": "10s",
                    "read_timeout": "60s",
                    "timeout": "24h",  # of a whole download, however large
                },
                retry_config={
                    "max_retries": _retries(),
                    "retry_timeout": timedelta(seconds=180),
                },
                **options,
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"{address} cannot be opened: {_first_line(error)}; check the AWS_* variables"
            ) from None

    def get(self, name: str) -> StoredObject | None:
        def read() -> StoredObject | None:
            try:
                answer = self._store.get(name)
                data = bytes(answer.bytes())
            except FileNotFoundError as error:
                _require_bucket(error)
                return None
            return StoredObject(data, answer.meta["e_tag"], answer.meta["last_modified"])

        return self._whole(name, read)

    def digest(self, name: str, into: Path | None = None) -> str | None:
        """SHA-256 of an object, written to a file on the way if one is named; None if absent."""

        def read() -> str | None:
            digest = hashlib.sha256()
            try:
                blocks = self._store.get(name).stream(min_chunk_size=BLOCK)
            except FileNotFoundError as error:
                _require_bucket(error)
                return None
            with nullcontext() if into is None else into.open("wb") as file:
                for block in blocks:
                    digest.update(block)
                    if file is not None:
                        file.write(block)
                if file is not None:
                    file.flush()
                    os.fsync(file.fileno())
            return digest.hexdigest()

        return self._whole(name, read)

    def tail(self, name: str, size: int, count: int) -> bytes:
        """The last `count` bytes of an object of this size, or all of it."""
        from obstore.exceptions import GenericError

        def read() -> bytes:
            try:
                start = max(0, size - count)
                return bytes(self._store.get_range(name, start=start, end=size))
            except GenericError as error:
                if "non-partial response" not in str(error):
                    raise
                # rclone serves the whole object whatever the range, which the client refuses.
                return bytes(self._store.get(name).bytes())[-count:]

        return self._whole(name, read)

    def _whole(self, name: str, read: Callable[[], Result]) -> Result:
        """What `read` returns; it begins anew where a reply was cut in its middle.

        The client itself goes on after a cut, but only if the store has e-tags and ranges.
        """
        from obstore.exceptions import GenericError

        with self._explained(f"read {name}"):
            for _ in range(_retries()):
                try:
                    return read()
                except GenericError as error:
                    if not any(sign in str(error) for sign in CUT_REPLY):
                        raise
                time.sleep(random.uniform(0.05, 0.5))
            return read()

    def put(self, name: str, data: bytes | Path) -> None:
        with self._explained(f"write {name}"):
            self._store.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write the object unless it is there; False if it is."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._explained(f"write {name}"):
            try:
                self._store.put(name, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

    def replace(self, name: str, data: bytes, before: StoredObject | None) -> bool:
        """Write the object if it still is what was read `before`; False if it is another now."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        if before is None:
            return self.create(name, data)
        with self._explained(f"write {name}"):
            try:
                self._store.put(name, data, mode={"e_tag": before.e_tag})
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return False
            return True

    def copy(self, name: str, target: str) -> bool:
        """Copy inside the store; False if there is nothing to copy."""
        with self._explained(f"copy {name}"):
            try:
                self._store.copy(name, target)
            except FileNotFoundError as error:
                _require_bucket(error)
                return False
            return True

    def listing(self, below: str) -> dict[str, Listed]:
        """Every object below a prefix: its name and what the listing says."""
        with self._explained(f"list {below or 'objects'}"):
            return {
                entry["path"]: Listed(entry["size"], entry["last_modified"])
                for batch in self._store.list(below or None)
                for entry in batch
            }

    def folders(self, below: str) -> list[str]:
        """Names of the "folders" directly below a prefix."""
        with self._explained(f"list {below or 'objects'}"):
            listing = self._store.list_with_delimiter(below or None)
        return sorted(name.rstrip("/").rpartition("/")[2] for name in listing["common_prefixes"])

    def delete(self, names: Iterable[str]) -> None:
        with self._explained("delete objects"):
            if paths := sorted(names):
                self._store.delete(paths)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn what the client says into a sentence for the user."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the local disk, not the bucket
            raise LakeError(f"cannot {what} in {self.address}: {_reason(error)}") from None


def _retries() -> int:
    setting = os.environ.get("NOVELTY_S3_RETRIES", "8")
    if not setting.isdigit():
        raise ConfigError(f"NOVELTY_S3_RETRIES is {setting!r}; set it to a whole number, such as 8")
    return int(setting)


def _require_bucket(error: Exception) -> None:
    """An object may be absent, its bucket may not."""
    if "NoSuchBucket" in str(error):
        raise error


def _reason(error: Exception) -> str:
    text = str(error)
    if "NoSuchBucket" in text:
        return "there is no such bucket; make it first or name another with --lake or NOVELTY_LAKE"
    if "/latest/api/token" in text or "/latest/meta-data" in text:  # the last place to ask
        return (
            "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and "
            "AWS_SESSION_TOKEN, if there is one)"
        )
    if "403 Forbidden" in text or "401 Unauthorized" in text or isinstance(error, PermissionError):
        return "access was denied; check the AWS_* credentials and the bucket's policy"
    if "error sending request" in text or "timed out" in text or "onnect" in text:
        return (
            f"{endpoint_url() or 'the S3 server'} cannot be reached; check the network and "
            "AWS_ENDPOINT_URL, then run the same command again. What was committed is still there"
        )
    return f"{_first_line(error)}; run the same command again"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition("<?xml")[0].strip()[:300]
