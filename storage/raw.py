"""Raw sources behind one interface: a folder, zip, tar or npz, read in place and never unpacked.

Enters: a path given by the user. Leaves: `RawFile`s sorted by name, with the identity of their
content, and their bytes on demand. What is wrong with one file is a RecordError (rules `missing`,
`too_large`, `unreadable`, `damaged`) that a stage quarantines; what is wrong with the source as a
whole is a SourceError or ArchiveError when it is opened. What was listed and then is gone, or is
not what was hashed, is a ChangedSource (`storage/unchanged.py`).

In a folder, what is not a plain readable file with a UTF-8 name is never read: symbolic links
(wherever they point), sockets, pipes, devices, files without permission. Each is listed in
`skipped` with the reason, so that a stage can account for it.
"""

import errno
import hashlib
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import orjson

from schemas.errors import ArchiveError, ChangedSource, RecordError, SourceError
from storage.archives import (
    LIMITS,
    TAR_SUFFIXES,
    ArchiveLimits,
    TarArchive,
    TarMember,
    ZipArchive,
    ZipMember,
)
from storage.filehash import HashCache, is_racy, sha256_files, stamp_of
from storage.watch import current_watch

READ_LIMIT = 64 << 20
LISTING_PAUSES = (0.5, 3.0)
"""Seconds before a folder is listed again, of which something was gone before it was hashed."""
REMEMBERED = 4
"""Archives whose directory a process keeps."""
INDEX_VERSION = 1
"""Raise when the meaning of a cached tar index changes."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """`digest` identifies the content: SHA-256, or `crc32:<crc>:<size>` in a zip, or "" unasked.

    `path` says where it lies if that is not below the source: "" if it is no file at all.
    """

    name: str
    size: int
    digest: str
    path: str | None = None

    def sha256(self, data: bytes) -> str:
        """Of bytes that were read as this file: a listing by SHA-256 has it, compared by `read`."""
        listed = len(self.digest) == 64
        return self.digest if listed else hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Skipped:
    name: str
    reason: str


class RawSource(Protocol):
    root: str
    skipped: list[Skipped]
    """Links, sockets and odd names, left out of `files`, which fills this."""

    def files(self, pattern: str | None = None, digests: bool = True) -> list[RawFile]:
        """Sorted by name. `pattern` is a glob over the whole name, whose `*` also crosses `/`.

        Without `digests` no content is hashed where that would cost a read of the file.
        """
        ...

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes: ...


def top_folder(source: RawSource) -> str | None:
    """`"folder/"` if every file lies below one top folder: what to pass as `inside`."""
    tops = {file.name.partition("/")[:2] for file in source.files(digests=False)}
    return "".join(tops.pop()) if len(tops) == 1 and next(iter(tops))[1] else None


def open_raw(
    path: Path,
    cache: HashCache | None = None,
    inside: str = "",
    limits: ArchiveLimits = LIMITS,
    listed_once: bool = False,
) -> RawSource:
    """`inside="folder/"` shows only what lies below that folder, with names that begin there.

    `archive.zip/folder` says the same in one path: the `root` of a source opens that source again.
    `listed_once`: who asks for all files of a folder again is told the same.
    """
    path = Path(os.path.abspath(path))
    if not path.exists():
        for parent in path.parents:
            if parent.is_file():
                inside = f"{path.relative_to(parent).as_posix()}/{inside}"
                path = parent
                break
    prefix = f"{inside.strip('/')}/" if inside.strip("/") else ""
    if path.is_dir():
        return RawFolder(path, cache, prefix, listed_once)
    if not path.exists():
        raise SourceError(
            f"raw source {path} does not exist. Name an existing folder, .zip, .tar, .tar.gz or "
            ".tgz file; if it is still to be downloaded, fetch it first."
        )
    if path.is_file() and path.name.lower().endswith(".zip"):
        return RawZip(path, limits, prefix)
    if path.is_file() and path.name.lower().endswith(TAR_SUFFIXES):
        return RawTar(path, cache, limits, prefix)
    if path.is_file() and path.name.lower().endswith(".npz"):
        return RawLoneFile(path, cache)
    raise SourceError(
        f"raw source {path} is neither a folder nor a .zip, .tar, .tar.gz, .tgz or .npz file. "
        "Name the folder that holds it, or repack it as one of these."
    )


def _chosen(names: Iterable[str], pattern: str | None) -> list[str]:
    return sorted(name for name in names if pattern is None or fnmatchcase(name, pattern))


def _check_size(root: str, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise RecordError(
            "too_large", f"{name} in {root} has {size} bytes, expected at most {limit}"
        )


def _nothing_inside(root: str, inside: str, names: Iterable[str]) -> SourceError:
    tops = sorted({name.partition("/")[0] for name in names})
    top_names = ", ".join(tops[:10]) + (", ..." if len(tops) > 10 else "")
    return SourceError(
        f"raw source {root} has no folder {inside!r}. Found at its top: {top_names or 'nothing'}. "
        "Name one of these, or leave `inside` out."
    )


def _missing(root: str, name: str) -> RecordError:
    return RecordError("missing", f"{name} is not a file of {root}")


def _forbidden(what: str, reason: str) -> SourceError:
    return SourceError(f"{what} {reason}. Mend its permissions, or move it away, and run again.")


class RawFolder:
    def __init__(
        self,
        path: Path,
        cache: HashCache | None = None,
        inside: str = "",
        listed_once: bool = False,
    ):
        self.root = os.path.join(path, inside).rstrip("/")
        self._real = os.path.realpath(path)
        if inside:
            self._real = os.path.join(self._real, inside.rstrip("/"))
            if not os.path.isdir(self._real) or os.path.realpath(self._real) != self._real:
                raise _nothing_inside(str(path), inside, os.listdir(path))
        self.skipped: list[Skipped] = []
        self._cache = cache
        self._listed: dict[str, str] = {}
        self._listed_once = listed_once
        self._all: tuple[list[RawFile], list[Skipped]] | None = None
        self._plain_folders: set[str] = set()

    def files(self, pattern: str | None = None, digests: bool = True) -> list[RawFile]:
        if self._all is not None and pattern is None and digests:
            listed, self.skipped = self._all
            return list(listed)
        for pause in (*LISTING_PAUSES, None):
            self.skipped = []
            try:
                sizes = dict(self._walk())
                names = _chosen(sizes, pattern)
                digest_of = self._digests(names) if digests else dict.fromkeys(names, "")
                break
            except ChangedSource:
                if pause is None:
                    raise
                time.sleep(pause)
        self._listed |= digest_of
        self.skipped.sort(key=lambda skipped: skipped.name)
        listed = [RawFile(name, sizes[name], digest) for name, digest in digest_of.items()]
        if self._listed_once and pattern is None and digests:
            self._all = listed, self.skipped
        return list(listed)

    def _walk(self) -> Iterator[tuple[str, int]]:
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(self._real, folder)) as entries:
                    for entry in entries:
                        name = folder + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{name}/")
                        elif reason := self._unfit(entry, name):
                            shown = name.encode(errors="backslashreplace").decode()
                            self.skipped.append(Skipped(shown, reason))
                        else:
                            yield name, entry.stat(follow_symlinks=False).st_size
            except PermissionError as error:
                reason = f"cannot be listed: {error.strerror}"
                raise _forbidden(f"folder {self.root}/{folder}", reason) from None
            except OSError as error:
                place = f"{self.root}/{folder}".rstrip("/")
                raise ChangedSource(place, f"cannot be listed: {error.strerror}") from None

    @staticmethod
    def _unfit(entry: os.DirEntry[str], name: str) -> str:
        if entry.is_symlink():
            return "symbolic link: put the file itself here"
        if not entry.is_file(follow_symlinks=False):
            return "neither file nor folder (socket, pipe or device)"
        try:
            name.encode()
        except UnicodeEncodeError:
            return "name is not UTF-8: rename it"
        return ""

    def _digests(self, names: list[str]) -> dict[str, str]:
        paths = [f"{self._real}/{name}" for name in names]
        failed: dict[str, OSError] = {}
        if self._cache is None:
            digests = sha256_files(paths, failed=failed)
        else:
            digests = self._cache.sha256_many(paths, failed=failed)
        for name, path in zip(names, paths, strict=True):
            if (error := failed.get(path)) is None:
                continue
            reason = f"cannot be read: {error.strerror or error}"
            if isinstance(error, PermissionError):
                raise _forbidden(f"{self.root}/{name}", reason)
            raise ChangedSource(path, reason)  # gone, changing, or a fault of the disk
        return dict(zip(names, digests, strict=True))

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes:
        path = f"{self._real}/{name}"
        watch = current_watch()
        digest = self._listed.get(name, watch.digest_of(path))
        try:
            data = self._read(path, name, limit)
            if digest and hashlib.sha256(data).hexdigest() != digest:
                raise RecordError("unreadable", "is not what it was")
        except RecordError as error:
            if digest is None or error.rule == "too_large":
                raise
            self._all = None
            if self._cache is not None:
                self._cache.forget([path])
            raise ChangedSource(path, error.message) from None
        watch.compared.add(path)
        return data

    def _is_inside(self, path: str) -> bool:
        """Whether no folder on its way is a link; the file itself is opened only if it is none."""
        folder, _, last = path.rpartition("/")
        if folder not in self._plain_folders:
            if os.path.realpath(folder) != folder:
                return False
            self._plain_folders.add(folder)
        return last not in ("", ".", "..")

    def _read(self, path: str, name: str, limit: int) -> bytes:
        astray = RecordError(
            "unreadable", f"{name!r} leads out of {self.root} or through a symbolic link"
        )
        if "\0" in name or not self._is_inside(path):
            raise astray
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise _missing(self.root, name)
                _check_size(self.root, name, status.st_size, limit)
                with open(fd, "rb", closefd=False) as file:
                    data = file.read(status.st_size + 1)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise _missing(self.root, name) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise astray from None
            raise RecordError(
                "unreadable", f"{name} in {self.root} cannot be read: {error.strerror}"
            ) from None
        if len(data) != status.st_size:
            raise RecordError(
                "unreadable", f"{name} in {self.root} changed while it was being read; run again"
            )
        return data


class RawLoneFile(RawFolder):
    """A file of many records as a source of its own; the files beside it do not count."""

    def __init__(self, path: Path, cache: HashCache | None = None):
        super().__init__(path.parent, cache)
        self.root = str(path)
        self._name = path.name

    def _walk(self) -> Iterator[tuple[str, int]]:
        yield self._name, os.stat(f"{self._real}/{self._name}").st_size


class RawArchive:
    def __init__(self, archive: ZipArchive | TarArchive, inside: str):
        self.root = f"{archive.path}/{inside}".rstrip("/")
        self.skipped: list[Skipped] = []
        self._archive = archive
        self._members: Mapping[str, ZipMember | TarMember] = archive.members
        if inside:
            self._members = {
                name.removeprefix(inside): member
                for name, member in archive.members.items()
                if name.startswith(inside)
            }
            if not self._members:
                raise _nothing_inside(str(archive.path), inside, archive.members)

    def files(self, pattern: str | None = None, digests: bool = True) -> list[RawFile]:
        members = self._members
        return [
            RawFile(name, members[name].size, members[name].digest)
            for name in _chosen(members, pattern)
        ]

    def digest(self, name: str) -> str | None:
        """The digest of one member; None if there is no such member."""
        member = self._members.get(name)
        return None if member is None else member.digest

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes:
        member = self._members.get(name)
        if member is None:
            raise _missing(self.root, name)
        _check_size(self.root, name, member.size, limit)
        try:
            return self._archive.read(member.name)
        except ArchiveError as error:
            raise RecordError("damaged", str(error)) from None
        except OSError as error:
            raise RecordError(
                "unreadable", f"{name} in {self.root} cannot be read: {error.strerror}"
            ) from None


class RawZip(RawArchive):
    """Opening reads the directory only: the digests are the checksums that it declares."""

    def __init__(self, path: Path, limits: ArchiveLimits = LIMITS, inside: str = ""):
        super().__init__(_remembered(path, limits, lambda: ZipArchive(path, limits)), inside)


class RawTar(RawArchive):
    """The first opening passes over all the data; with a cache, later ones take its index.

    A compressed tar is fastest read in archive order; any other order costs up to some megabytes
    of decompression for each read.
    """

    def __init__(
        self,
        path: Path,
        cache: HashCache | None = None,
        limits: ArchiveLimits = LIMITS,
        inside: str = "",
    ):
        super().__init__(_remembered(path, limits, lambda: _open_tar(path, cache, limits)), inside)


def _open_tar(path: Path, cache: HashCache | None, limits: ArchiveLimits) -> TarArchive:
    if cache is None:
        return TarArchive(path, limits)
    key = f"tar {INDEX_VERSION} {limits} {cache.sha256(path)}"
    index = cache.note(key)
    if index is not None:
        rows = orjson.loads(zlib.decompress(index))
        return TarArchive(path, limits, [TarMember(*row) for row in rows])
    archive = TarArchive(path, limits)
    cache.set_note(key, zlib.compress(orjson.dumps([list(m) for m in archive.members.values()])))
    return archive


_opened: dict[tuple, ZipArchive | TarArchive] = {}


def _remembered(
    path: Path, limits: ArchiveLimits, opened: Callable[[], ZipArchive | TarArchive]
) -> ZipArchive | TarArchive:
    """Shards of one process that name the same unchanged archive share what opening it cost."""
    status = os.stat(path)
    key = (os.path.abspath(path), limits, *stamp_of(status))
    archive = _opened.get(key)
    if archive is None:
        archive = opened()
        if not is_racy(status, time.time_ns()):
            while len(_opened) >= REMEMBERED:
                _opened.pop(next(iter(_opened)), None)
            _opened[key] = archive
    return archive
