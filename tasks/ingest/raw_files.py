"""Raw files for stages: in buckets that a new file hardly changes, and on disk one slice at a time.

Enters: ids of records, or raw files of a folder or archive. Leaves: buckets, or paths.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from schemas.errors import RecordError
from storage.archives import ArchiveLimits
from storage.raw import RawFile, open_raw

# A bomb in an archive is one bad record: it is refused by the size that it declares.
ARCHIVE_LIMITS = ArchiveLimits(total_bytes=1 << 60, ratio=math.inf)
BYTES_ON_DISK = 256 << 20


def hash_buckets(ids: Iterable[str], most: int) -> Iterator[tuple[str, list[str]]]:
    """Names and sorted ids of buckets of at most `most`.

    A bucket is a prefix of the hash of the id, one bit longer wherever more share it: a new id
    changes one bucket, or splits it in two, whatever its name.
    """
    hashed = [
        (f"{int.from_bytes(hashlib.sha256(one.encode()).digest()[:8]):064b}", one) for one in ids
    ]
    yield from _halved("", hashed, most)


def _halved(
    prefix: str, hashed: list[tuple[str, str]], most: int
) -> Iterator[tuple[str, list[str]]]:
    if len(hashed) > most:
        for bit in "01":
            longer = prefix + bit
            inside = [pair for pair in hashed if pair[0].startswith(longer)]
            yield from _halved(longer, inside, most)
    elif hashed:
        yield f"hash_{prefix}", sorted(one for _, one in hashed)


def on_disk(
    root: str, files: Sequence[RawFile], limit: int
) -> Iterator[dict[str, Path | RecordError]]:
    """Where each raw file lies, in order, or why it cannot be read.

    Files of a folder come at once; those of an archive as many at a time as `BYTES_ON_DISK` allows,
    unpacked for as long as the caller works on them.
    """
    if Path(root).is_dir():
        yield {file.name: _in_folder(root, file, limit) for file in files}
        return
    source = open_raw(Path(root), limits=ARCHIVE_LIMITS)
    for some in _slices(files, limit):
        paths_or_errors: dict[str, Path | RecordError] = {}
        with TemporaryDirectory(prefix="novelty-") as folder:
            for number, file in enumerate(some):
                suffix = re.sub(r"[^.A-Za-z0-9]", "", PurePosixPath(file.name).suffix)
                path = Path(folder, f"{number}{suffix}")
                try:
                    path.write_bytes(source.read(file.name, limit=limit))
                    paths_or_errors[file.name] = path
                except RecordError as error:
                    paths_or_errors[file.name] = error
            yield paths_or_errors


def _in_folder(root: str, file: RawFile, limit: int) -> Path | RecordError:
    # Of an h5 file only rows are read, so its size does not matter.
    if file.size > limit and not file.name.lower().endswith(".h5"):
        return RecordError("too_large", f"{file.size} bytes, expected at most {limit}")
    return Path(root, file.name)


def _slices(files: Sequence[RawFile], limit: int) -> Iterator[list[RawFile]]:
    some: list[RawFile] = []
    total = 0
    for file in files:
        # A file above the limit is refused, not unpacked.
        size = file.size if file.size <= limit else 0
        if some and total + size > BYTES_ON_DISK:
            yield some
            some, total = [], 0
        some.append(file)
        total += size
    if some:
        yield some
