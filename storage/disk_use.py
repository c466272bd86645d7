"""Bytes of a lake on this machine's disk: in use, free, and what `gc` would give back.

A table's version and the piece that it came from share a file (a hard link), so a file counts once,
and is given back only when all of its names go.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DiskUse:
    used: int
    free: int
    reclaimable: int


def disk_use(lake: Path, garbage: Iterable[Path]) -> DiskUse:
    """Of all files of the lake; `garbage` are the paths that `gc` would remove."""
    sizes = {(status.st_dev, status.st_ino): status.st_size for status in _files(lake)}
    return DiskUse(sum(sizes.values()), shutil.disk_usage(lake).free, freed_by(garbage))


def freed_by(paths: Iterable[Path]) -> int:
    """Bytes that the disk has back when these files and folders are gone."""
    names: Counter[tuple[int, int]] = Counter()
    facts: dict[tuple[int, int], os.stat_result] = {}
    for path in paths:
        for status in _files(path):
            inode = (status.st_dev, status.st_ino)
            names[inode] += 1
            facts[inode] = status
    return sum(status.st_size for inode, status in facts.items() if names[inode] >= status.st_nlink)


def _files(path: Path) -> Iterator[os.stat_result]:
    """What the file system knows of every file in a folder, or of the file itself."""
    if not path.is_dir() or path.is_symlink():
        yield path.lstat()
        return
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue  # a build removes its temporary files
