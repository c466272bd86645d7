"""Bounded reading of zip and tar archives that nobody vouches for.

Enters: a .zip, .tar, .tar.gz or .tgz file and `ArchiveLimits`. Leaves: the bytes of its regular
files, one at a time, or a folder with all of them (`extract`). Every refusal is an ArchiveError
that names the archive, the member and the reason.

What a directory can show is refused when the archive is opened: unsafe or repeated names, links,
devices, encryption, overlapping members, bombs. What only the data can show is refused when a
member is read: a local header that contradicts the directory, a wrong checksum, missing or
surplus bytes. A declared size is never trusted: at most one byte more than it is inflated.
`zipfile` and `tarfile` only parse directories and headers here; they never write files.
"""

import hashlib
import io
import math
import os
import re
import shutil
import stat
import struct
import tarfile
import threading
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from schemas.errors import ArchiveError, SourceError
from storage.atomic import explained, fsync_path, temporary_name

BLOCK = 1 << 20
GZIP_BLOCK = 1 << 15
GZIP_POINTS = 512
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
STORED, DEFLATED = 0, 8
DATA_DESCRIPTOR = 0x8
ENCRYPTED = 0x1 | 0x40 | 0x2000
UTF8_NAME = 0x800
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""signature, version, flags, method, time, date, crc, packed size, size, name and extra length"""
ZIP64 = 0xFFFFFFFF
_DRIVE = re.compile(r"[A-Za-z]:")


@dataclass(frozen=True)
class ArchiveLimits:
    members: int = 2_000_000
    total_bytes: int = 256 << 30
    ratio: float = 200.0
    """Unpacked to packed size, of a member and of the whole; real JSON reaches 20 to 40."""
    ratio_above: int = 1 << 20
    """Bytes below which the ratio is not looked at."""
    header_bytes: int = 64 << 10
    """Largest extension header (long name, pax records) of a tar member."""


LIMITS = ArchiveLimits()
UNLIMITED = ArchiveLimits(total_bytes=1 << 60, ratio=math.inf)
"""For reading members one by one, each refused by the size that it declares."""


class ZipMember(NamedTuple):
    name: str
    size: int
    digest: str
    raw_name: bytes
    crc: int
    packed: int
    method: int
    start: int
    end: int
    """Start of the member that follows, or of the directory: nothing of ours lies beyond."""


class TarMember(NamedTuple):
    name: str
    size: int
    digest: str
    offset: int
    """Of the data, in the unpacked stream."""


def _refused(path: Path, member: str, reason: str) -> ArchiveError:
    return ArchiveError(
        f"{path}: member {member!r} is refused: {reason}. "
        "Get the archive again from its source, or repack it without this member."
    )


def _broken(path: Path, reason: str) -> ArchiveError:
    return ArchiveError(f"{path}: the archive is refused: {reason}. Get it again from its source.")


def _clean_name(path: Path, name: str) -> str:
    """The name with `.` and empty parts removed ("" for the root folder), or a refusal."""
    slashed = name.replace("\\", "/")
    if "\0" in name:
        raise _refused(path, name, "there is a NUL in its name")
    if slashed.startswith("/") or _DRIVE.match(name):
        raise _refused(path, name, "its name is an absolute path")
    if ".." in slashed.split("/"):
        raise _refused(path, name, "its name leads out of the archive (path traversal)")
    if slashed != name:
        raise _refused(path, name, "there is a backslash in its name, expected / between folders")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _refused(path, name, "its name is not UTF-8") from None
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _check_tree(path: Path, names: Iterable[str]) -> None:
    """No file may also be the folder of another."""
    names = set(names)
    folders: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    if clashes := folders & names:
        raise _refused(path, min(clashes), "it is both a file and a folder")


def _is_bomb(limits: ArchiveLimits, size: int, packed: int) -> bool:
    return size > limits.ratio_above and size > limits.ratio * packed


def _bomb(limits: ArchiveLimits, size: int, packed: int) -> str:
    return (
        f"{size} bytes from {packed} packed ones, expected a ratio of at most {limits.ratio:g} "
        "(a decompression bomb)"
    )


class _Archive:
    """The file is opened for each read, so that threads and forked processes share no position."""

    def __init__(self, path: Path, limits: ArchiveLimits):
        self.path = Path(path)
        self.limits = limits
        with self._opened() as file:
            self._stamp = self._stamp_of(file)

    def _opened(self) -> IO[bytes]:
        try:
            return open(self.path, "rb", buffering=0)
        except OSError as error:
            raise SourceError(
                f"archive {self.path} cannot be read: {error.strerror}. Check the path and its "
                "permissions."
            ) from None

    @staticmethod
    def _stamp_of(file: IO[bytes]) -> tuple[int, int, int]:
        status = os.fstat(file.fileno())
        return status.st_size, status.st_mtime_ns, status.st_ino

    def _reopened(self) -> IO[bytes]:
        file = self._opened()
        if self._stamp_of(file) != self._stamp:
            file.close()
            raise SourceError(f"archive {self.path} changed while it was in use. Run again.")
        return file


class _DirectoryFile(io.FileIO):
    """What zipfile parses: refuses a directory of too many members before it is parsed."""

    limits: ArchiveLimits

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > 512 * self.limits.members:
            raise ArchiveError(f"a directory of {size} bytes")
        data = super().read(size) or b""
        if data.count(b"PK\1\2") > self.limits.members:
            raise ArchiveError(f"more than {self.limits.members} members")
        return data


class ZipArchive(_Archive):
    """`members`: name -> ZipMember, files only, in the order of their data."""

    def __init__(self, path: Path, limits: ArchiveLimits = LIMITS):
        super().__init__(path, limits)
        self.members: dict[str, ZipMember] = {}
        infos, directory_start = self._directory()
        infos.sort(key=lambda info: info.header_offset)
        starts = [info.header_offset for info in infos] + [directory_start]
        for info, end in zip(infos, starts[1:], strict=True):
            member = self._member(info, end)
            if info.orig_filename.endswith("/"):
                continue
            if member.name in self.members:
                raise _refused(self.path, member.name, "the archive has two members of this name")
            self.members[member.name] = member
        total = sum(member.size for member in self.members.values())
        if total > limits.total_bytes:
            raise _broken(
                self.path, f"{total} bytes unpacked, expected at most {limits.total_bytes}"
            )
        if _is_bomb(limits, total, self._stamp[0]):
            raise _broken(self.path, _bomb(limits, total, self._stamp[0]))
        _check_tree(self.path, self.members)

    def _directory(self) -> tuple[list[zipfile.ZipInfo], int]:
        with self._reopened() as plain, _DirectoryFile(plain.fileno(), closefd=False) as file:
            file.limits = self.limits
            try:
                with zipfile.ZipFile(file) as archive:
                    return archive.infolist(), archive.start_dir
            except ArchiveError as error:
                raise _broken(self.path, str(error)) from None
            except OSError as error:
                raise _broken(self.path, f"it cannot be read ({error.strerror})") from None
            except (
                zipfile.BadZipFile,
                NotImplementedError,
                struct.error,
                ValueError,
                OverflowError,
            ) as error:
                first = os.pread(plain.fileno(), 16, 0)
                raise _broken(
                    self.path, f"not a whole zip file ({error}; it begins with {first!r})"
                ) from None

    def _member(self, info: zipfile.ZipInfo, end: int) -> ZipMember:
        # zipfile cuts `filename` at a NUL; only `orig_filename` shows it.
        name = _clean_name(self.path, info.orig_filename)
        raw_name = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8_NAME else "cp437")
        size, packed, start = info.file_size, info.compress_size, info.header_offset
        kind = stat.S_IFMT(info.external_attr >> 16)
        is_folder = info.orig_filename.endswith("/")
        reason = ""
        if info.flag_bits & ENCRYPTED:
            reason = "it is encrypted"
        elif kind == stat.S_IFLNK:
            reason = "it is a symbolic link"
        elif kind not in (0, stat.S_IFDIR if is_folder else stat.S_IFREG):
            reason = f"it is not a regular file (type {kind:#o})"
        elif is_folder and size:
            reason = f"it is a folder with {size} bytes of content"
        elif not is_folder and not name:
            reason = "it is a file without a name"
        elif info.compress_type not in (STORED, DEFLATED):
            reason = f"compression method {info.compress_type}, expected stored (0) or deflate (8)"
        elif info.compress_type == STORED and packed != size:
            reason = f"header mismatch: stored, {size} bytes, but {packed} packed ones"
        elif _is_bomb(self.limits, size, packed):
            reason = _bomb(self.limits, size, packed)
        elif start < 0 or start + LOCAL_HEADER.size + len(raw_name) + packed > end:
            reason = "its data overlaps another member or the directory"
        if reason:
            raise _refused(self.path, info.orig_filename, reason)
        digest = f"crc32:{info.CRC:08x}:{size}"
        return ZipMember(
            name,
            size,
            digest,
            raw_name,
            info.CRC,
            packed,
            info.compress_type,
            start,
            end,
        )

    def read(self, name: str) -> bytes:
        return b"".join(self.chunks(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content in blocks; a refusal may come after good blocks, up to the last."""
        member = self.members[name]
        with self._reopened() as file:
            crc = done = 0
            for data in self._unpacked(file.fileno(), member):
                done += len(data)
                crc = zlib.crc32(data, crc)
                if done > member.size:
                    raise _refused(self.path, name, f"more than the declared {member.size} bytes")
                yield data
            if done != member.size:
                raise _refused(self.path, name, f"{done} bytes, expected {member.size}")
            if crc != member.crc:
                raise _refused(self.path, name, f"checksum {crc:08x}, expected {member.crc:08x}")

    def _unpacked(self, fd: int, member: ZipMember) -> Iterator[bytes]:
        at = self._data_start(fd, member)
        left = member.packed
        inflate = zlib.decompressobj(-zlib.MAX_WBITS) if member.method == DEFLATED else None
        budget = member.size + 1
        while True:
            block = inflate.unconsumed_tail if inflate else b""
            if not block and left:
                block = os.pread(fd, min(BLOCK, left), at)
                if not block:
                    raise _refused(self.path, member.name, "the archive is truncated inside it")
                at += len(block)
                left -= len(block)
            if inflate is None:
                if not block:
                    return
                yield block
                continue
            try:
                data = inflate.decompress(block, min(BLOCK, budget))
            except zlib.error as error:
                raise _refused(self.path, member.name, f"damaged data ({error})") from None
            budget -= len(data)
            yield data
            if inflate.eof:
                break
            if not data and not block:
                raise _refused(self.path, member.name, "its compressed data ends too early")
        if left or inflate.unused_data:
            raise _refused(self.path, member.name, "header mismatch: bytes after its data")

    def _data_start(self, fd: int, member: ZipMember) -> int:
        """Checks the local header against the directory: two readers must not see two files."""
        head = os.pread(fd, LOCAL_HEADER.size + len(member.raw_name), member.start)
        if len(head) < LOCAL_HEADER.size:
            raise _refused(self.path, member.name, "the archive is truncated before it")
        signature, _, flags, method, _, _, crc, packed, size, name_length, extra_length = (
            LOCAL_HEADER.unpack_from(head)
        )
        extra_at = member.start + LOCAL_HEADER.size + name_length
        if ZIP64 in (packed, size):
            packed, size = self._zip64(os.pread(fd, extra_length, extra_at), packed, size)
        actual, expected = (crc, packed, size), (member.crc, member.packed, member.size)
        # With a data descriptor the writer did not know the numbers yet, and left zeros.
        blank = 0 if flags & DATA_DESCRIPTOR else None
        reason = ""
        if signature != b"PK\3\4":
            reason = "no local header where the directory points"
        elif name_length != len(member.raw_name) or head[LOCAL_HEADER.size :] != member.raw_name:
            reason = "the name in the local header is another"
        elif method != member.method or flags & ENCRYPTED:
            reason = "the local header has another method, or says encrypted"
        elif any(f not in (e, blank) for f, e in zip(actual, expected, strict=True)):
            reason = f"local (crc, packed, size) is {actual}, in the directory {expected}"
        elif extra_at + extra_length + member.packed > member.end:
            reason = "its data overlaps another member or the directory"
        if reason:
            raise _refused(self.path, member.name, f"header mismatch: {reason}")
        return int(extra_at + extra_length)

    @staticmethod
    def _zip64(extra: bytes, packed: int, size: int) -> tuple[int, int]:
        while len(extra) >= 4:
            kind, length = struct.unpack_from("<2H", extra)
            if kind == 1 and length >= 16 and len(extra) >= 20:
                size64, packed64 = struct.unpack_from("<2Q", extra, 4)
                return (
                    packed64 if packed == ZIP64 else packed,
                    size64 if size == ZIP64 else size,
                )
            extra = extra[4 + length :]
        return packed, size

    def contents(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        for name in self.members:
            yield name, self.chunks(name)


class _PlainBytes:
    """The stream of a .tar: `position` and `packed` are the same."""

    position = 0

    @property
    def packed(self) -> int:
        return self.position

    def take(self, fd: int, size: int) -> bytes:
        data = os.pread(fd, size, self.position)
        self.position += len(data)
        return data

    def seek(self, fd: int, position: int) -> None:
        self.position = position


@dataclass
class _GzipPoint:
    inflate: "zlib._Decompress"
    position: int = 0
    packed: int = 0
    ended: bool = False

    def copy(self) -> "_GzipPoint":
        return _GzipPoint(self.inflate.copy(), self.position, self.packed, self.ended)

    def step(self, fd: int, most: int) -> bytes:
        block = os.pread(fd, GZIP_BLOCK, self.packed)
        data = self.inflate.decompress(block, most)
        self.position += len(data)
        if self.inflate.eof:
            self.packed += len(block) - len(self.inflate.unused_data)
            self.inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
            self.ended = os.pread(fd, 1, self.packed) in (b"", b"\0")
        else:
            self.packed += len(block) - len(self.inflate.unconsumed_tail)
            if not block and not data:
                raise EOFError("the compressed data is truncated")
        return data


class _GzipBytes:
    """The stream of a .tar.gz, with restart points so that going back does not begin at byte 0."""

    def __init__(self) -> None:
        self._cursor = _GzipPoint(zlib.decompressobj(16 + zlib.MAX_WBITS))
        self._points = [self._cursor.copy()]
        self._spacing = BLOCK

    @property
    def position(self) -> int:
        return self._cursor.position

    @property
    def packed(self) -> int:
        return self._cursor.packed

    def take(self, fd: int, size: int) -> bytes:
        pieces = []
        while size > 0 and not self._cursor.ended:
            data = self._cursor.step(fd, min(size, BLOCK))
            size -= len(data)
            pieces.append(data)
            if self._cursor.position >= self._points[-1].position + self._spacing:
                self._points.append(self._cursor.copy())
                if len(self._points) > GZIP_POINTS:
                    self._points = self._points[::2]
                    self._spacing *= 2
        return b"".join(pieces)

    def seek(self, fd: int, position: int) -> None:
        point = self._points[bisect_right(self._points, position, key=lambda p: p.position) - 1]
        if not point.position <= self._cursor.position <= position:
            self._cursor = point.copy()
        while self._cursor.position < position and not self._cursor.ended:
            self.take(fd, min(BLOCK, position - self._cursor.position))


class _HeaderFile:
    """What tarfile parses: forward only, bounded, and it keeps the last block for the end check."""

    def __init__(self, archive: "TarArchive", stream: _PlainBytes | _GzipBytes, fd: int):
        self._archive, self._stream, self._fd = archive, stream, fd
        self.last = b""

    def tell(self) -> int:
        return self._stream.position

    def seek(self, position: int) -> None:
        if position < self._stream.position:
            raise _broken(self._archive.path, "a header with a negative size")
        self._stream.seek(self._fd, position)

    def read(self, size: int) -> bytes:
        most = self._archive.limits.header_bytes
        if not 0 <= size <= most:
            raise _broken(
                self._archive.path, f"an extension header of {size} bytes, expected at most {most}"
            )
        self.last = self._stream.take(self._fd, size)
        self._archive._check_ratio(self._stream)
        return self.last


class TarArchive(_Archive):
    """`members`: name -> TarMember, files only, in archive order; found by one pass over the data.

    `members` may be given where an earlier pass over the same bytes found them. Reads check the
    content against the digest of that pass, since tar itself has no checksum of data.
    """

    def __init__(
        self,
        path: Path,
        limits: ArchiveLimits = LIMITS,
        members: Iterable[TarMember] | None = None,
    ):
        super().__init__(path, limits)
        with self._reopened() as file:
            is_gzip = os.pread(file.fileno(), 2, 0) == b"\x1f\x8b"
        self._stream: _PlainBytes | _GzipBytes = _GzipBytes() if is_gzip else _PlainBytes()
        self._lock = threading.Lock()
        self.members = {m.name: m for m in (self._scan() if members is None else members)}
        _check_tree(self.path, self.members)

    def _scan(self) -> Iterator[TarMember]:
        for member, chunks in self._walk():
            digest = hashlib.sha256()
            for chunk in chunks:
                digest.update(chunk)
            yield member._replace(digest=digest.hexdigest())

    def _check_ratio(self, stream: _PlainBytes | _GzipBytes) -> None:
        if _is_bomb(self.limits, stream.position, stream.packed):
            raise _broken(self.path, _bomb(self.limits, stream.position, stream.packed))

    def _walk(self) -> Iterator[tuple[TarMember, Iterator[bytes]]]:
        """Each member with its blocks; the caller takes all blocks before the next member."""
        seen: set[str] = set()
        total = headers_seen = 0
        last = "(none)"
        with self._lock, self._reopened() as file:
            fd = file.fileno()
            self._stream.seek(fd, 0)
            headers = _HeaderFile(self, self._stream, fd)
            try:
                archive = tarfile.TarFile(
                    fileobj=headers,  # type: ignore[arg-type]
                    encoding="utf-8",
                    errors="surrogateescape",
                )
                while (info := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]
                    headers_seen += 1
                    if headers_seen > self.limits.members:
                        raise _broken(self.path, f"more than {self.limits.members} members")
                    member = self._member(info)
                    if info.isdir():
                        continue
                    last = member.name
                    if last in seen:
                        raise _refused(self.path, last, "the archive has two members of this name")
                    seen.add(last)
                    total += member.size
                    if total > self.limits.total_bytes:
                        raise _refused(
                            self.path,
                            last,
                            f"{total} bytes unpacked up to here, expected at most "
                            f"{self.limits.total_bytes}",
                        )
                    yield member, self._blocks(fd, member)
                self._check_end(fd, headers.last, last)
            except (tarfile.TarError, zlib.error, EOFError, ValueError, OverflowError) as error:
                raise _broken(self.path, f"damaged after member {last!r} ({error})") from None

    def _member(self, info: tarfile.TarInfo) -> TarMember:
        name = _clean_name(self.path, info.name)
        reason = ""
        if info.issym() or info.islnk():
            reason = f"it is a {'symbolic' if info.issym() else 'hard'} link to {info.linkname!r}"
        elif not info.isreg() and not info.isdir():
            reason = f"it is not a regular file (type {info.type!r})"
        elif info.issparse():
            reason = "it is a sparse file"
        elif info.size < 0:
            reason = f"its size is {info.size}"
        elif not info.isdir() and not name:
            reason = "it is a file without a name"
        if reason:
            raise _refused(self.path, info.name, reason)
        return TarMember(name, info.size, "", info.offset_data)

    def _blocks(self, fd: int, member: TarMember) -> Iterator[bytes]:
        stream = self._stream
        try:
            stream.seek(fd, member.offset)
        except (zlib.error, EOFError) as error:
            raise _refused(self.path, member.name, f"damaged data before it ({error})") from None
        packed_before = stream.packed
        done = 0
        while done < member.size:
            try:
                data = stream.take(fd, min(BLOCK, member.size - done))
            except (zlib.error, EOFError) as error:
                raise _refused(self.path, member.name, f"damaged data ({error})") from None
            if not data:
                raise _refused(self.path, member.name, "the archive is truncated inside it")
            done += len(data)
            packed = stream.packed - packed_before
            if _is_bomb(self.limits, done, packed):
                raise _refused(self.path, member.name, _bomb(self.limits, done, packed))
            yield data

    def _check_end(self, fd: int, block: bytes, last: str) -> None:
        """tarfile takes a damaged header for the end; a whole archive ends in zeros only."""
        if len(block) < tarfile.BLOCKSIZE:
            raise _broken(self.path, f"truncated after member {last!r}: the end mark is missing")
        while block:
            if block.strip(b"\0"):
                raise _broken(self.path, f"neither header nor end mark after member {last!r}")
            block = self._stream.take(fd, BLOCK)
            self._check_ratio(self._stream)

    def read(self, name: str) -> bytes:
        member = self.members[name]
        with self._lock, self._reopened() as file:
            data = b"".join(self._blocks(file.fileno(), member))
        digest = hashlib.sha256(data).hexdigest()
        if digest != member.digest:
            raise _refused(self.path, name, f"content {digest}, expected {member.digest}")
        return data

    def contents(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        for member, chunks in self._walk():
            yield member.name, chunks


def extract(archive: Path, into: Path, limits: ArchiveLimits = LIMITS) -> Path:
    """Writes every file of the archive below `into`, all or nothing, and returns `into`.

    `into` must not exist or be empty. Names, times and modes other than content are not kept.
    """
    archive, into = Path(archive), Path(into)
    if into.is_symlink() or (into.exists() and (not into.is_dir() or any(into.iterdir()))):
        raise SourceError(f"{into} is not an empty folder: delete it, or name another place.")
    opened: ZipArchive | TarArchive
    if archive.name.lower().endswith(TAR_SUFFIXES):
        opened = TarArchive(archive, limits, members=())
    else:
        opened = ZipArchive(archive, limits)
    work = temporary_name(into)
    with explained(into):
        try:
            work.mkdir(parents=True)
            folders = {work}
            for name, chunks in opened.contents():
                _write(archive, work, name, chunks, folders)
            for folder in folders:
                fsync_path(folder)
            work.rename(into)
            fsync_path(into.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return into


def _write(
    archive: Path, work: Path, name: str, chunks: Iterator[bytes], folders: set[Path]
) -> None:
    target = work / name
    try:
        if target.parent not in folders:
            target.parent.mkdir(parents=True, exist_ok=True)
            folders.update(parent for parent in target.parents if work in parent.parents)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise _refused(archive, name, "it is both a file and a folder") from None
    with open(fd, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(fd)
