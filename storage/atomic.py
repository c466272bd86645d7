"""Writes that leave the old state or the new one, never a mixture, even when killed at any point.

Files and directories are made under a temporary name, fsynced and renamed. `step` marks each point
at which a kill is survivable; the crash tests replace it to kill the process exactly there.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from schemas.errors import LakeError

FICLONE = 0x40049409  # of <linux/fs.h>
_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EROFS: "the file system is read-only; choose another lake with NOVELTY_LAKE or --lake",
    errno.EACCES: "permission denied; choose another lake with NOVELTY_LAKE or --lake",
    errno.EPERM: "not permitted; choose another lake with NOVELTY_LAKE or --lake",
    errno.EIO: "the disk failed; look at the system's log, then run the same command again",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away",
    errno.EISDIR: "a folder stands where a file is needed; move it away",
    errno.EEXIST: "a file stands where a folder is needed; move it away",
}


def _no_step(name: str) -> None:
    """Nothing happens outside the crash tests."""


step: Callable[[str], None] = _no_step


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a write into a sentence for the user."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0)
        if reason is None:
            raise
        raise LakeError(
            f"cannot write {path}: {reason}. What was committed before is still readable."
        ) from error


def temporary_name(path: Path) -> Path:
    """A unique sibling; the process id lets `novelty gc` tell a leftover from work under way."""
    return path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` atomically."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            step("bytes_written")
            temporary.replace(path)
            step("bytes_replaced")
        finally:
            temporary.unlink(missing_ok=True)
        fsync_path(path.parent)


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """A temporary folder that becomes `final` in one rename when the block ends without error.

    If another process made `final` meanwhile, its version stays: names are content keys, so both
    hold the same bytes.
    """
    with explained(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(final)
        temporary.mkdir()
        try:
            yield temporary
            for file in sorted(temporary.iterdir()):
                if not file.is_symlink():
                    fsync_path(file)
            fsync_path(temporary)
            step("before_rename")
            try:
                temporary.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            step("after_rename")
            fsync_path(final.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system has them, else a copy."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, target)


def copy_file(source: Path, target: Path) -> None:
    """A copy of its own; file systems that can (XFS, Btrfs) share the blocks until one changes."""
    with source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        except OSError:
            shutil.copyfileobj(old, new, 1 << 20)


def swap_symlink(link: Path, target: str) -> None:
    """Point `link` at `target` in one step; readers see the old one or the new one."""
    with explained(link):
        if link.is_symlink() and os.readlink(link) == target:
            return
        temporary = temporary_name(link)
        try:
            temporary.symlink_to(target)
            step("before_swap")
            temporary.replace(link)
            step("after_swap")
        finally:
            temporary.unlink(missing_ok=True)
        fsync_path(link.parent)
