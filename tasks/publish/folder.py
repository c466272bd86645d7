"""Publishing: enters the current tables of a benchmark, leaves one self-contained folder.

    data/<table>/*.parquet   the lake's bytes, copied
    README.md                Hugging Face card          tasks/publish/card.py
    croissant.json           the same for machines      tasks/publish/croissant.py
    manifest.json            where it came from         tasks/publish/record.py
    verify.py, SHA256SUMS    whether it is still whole  tasks/publish/verify.py

The folder is made beside its place and put there in one rename, so it holds the old publication or
the new one. It is replaced only by another --version, and only if it is still what was published.
"""

import ctypes
import datetime
import errno
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schemas.errors import ConfigError, LakeError
from schemas.table import Table
from storage import atomic
from storage.damage import verify_version
from storage.locks import benchmark_locked
from storage.parquet import opened_parquet
from storage.tables import TableVersion
from storage.upkeep import ancestors_of, require_lake
from tasks.publish.card import card
from tasks.publish.croissant import croissant, is_bytes
from tasks.publish.record import (
    Publication,
    chosen_versions,
    gather,
    leak_pattern,
    leaks,
    table_of,
)
from tasks.publish.verify import MANIFEST, SUMS, differences, sha256_of

CARD = "README.md"
CROISSANT = "croissant.json"
VERIFY = "verify.py"
_PICTURE = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP", re.DOTALL)
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD


@dataclass(frozen=True)
class Outcome:
    publication: Publication
    written: bool  # False: the folder held exactly this already


def publish(
    lake: Path,
    benchmark: str,
    folder: Path,
    *,
    version: str | None = None,
    tables: list[str] | None = None,
    licence: str | None = None,
    date: str | None = None,
) -> Outcome:
    """Make `folder` a publication of the benchmark's current tables (`tables`: only these)."""
    require_lake(lake)
    version, licence, date = _checked(version, licence, date)
    folder = Path(os.path.realpath(folder.expanduser()))
    if folder.is_relative_to(os.path.realpath(lake)):
        raise ConfigError(f"{folder} is inside the lake; publish to a folder outside of it")
    old = published_in(folder)
    with _unchanging(lake, benchmark):
        versions = chosen_versions(lake, benchmark, tables)
        pieces = {piece.address: piece for piece in ancestors_of(lake, *versions)}
        new = gather(lake, versions, pieces, date, version, licence)
        if old is not None:
            _refuse_damaged(folder)
            if _says_the_same(old, new):
                return Outcome(old, written=False)
            _refuse_replacing(folder, old, new)
        pattern = leak_pattern(lake, benchmark, pieces)
        _refuse_unfit(versions, pattern)
        _write(folder, new, versions, pattern, replace=old is not None)
    return Outcome(new, written=True)


def _checked(
    version: str | None, licence: str | None, date: str | None
) -> tuple[str | None, str | None, str]:
    if version is not None and not _VERSION.fullmatch(version):
        raise ConfigError(
            f"version {version!r} is not a version; use letters, digits and . _ + -, such as 1.0.0"
        )
    if licence is not None and (not licence.strip() or len(licence.splitlines()) != 1):
        raise ConfigError("the licence must be one line of text, such as CC-BY-4.0, or a URL")
    try:
        day = datetime.date.fromisoformat(date) if date else datetime.datetime.now(datetime.UTC)
    except ValueError:
        raise ConfigError(f"date {date!r} is not a day; write it as 2026-11-30") from None
    return version, licence.strip() if licence else None, day.strftime("%Y-%m-%d")


def _unchanging(lake: Path, benchmark: str) -> AbstractContextManager[Any]:
    """Nobody builds meanwhile; a lake that cannot be written is compared afterwards only."""
    if not os.access(lake, os.W_OK):
        return nullcontext()
    return benchmark_locked(lake, benchmark, float(os.environ.get("NOVELTY_LOCK_WAIT", "0")))


def published_in(folder: Path) -> Publication | None:
    """The publication that a folder says it holds; None if it is absent or empty."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder to publish to")
    if not any(folder.iterdir()):
        return None
    try:
        return Publication.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        raise ConfigError(
            f"{folder} holds other things than a publication; publish to a new or empty folder"
        ) from None


def _refuse_damaged(folder: Path) -> None:
    if problems := differences(str(folder)):
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise LakeError(
            f"{folder} is no longer what was published: {problems[0]}{more}; move it away and "
            "publish again"
        )


def _says_the_same(old: Publication, new: Publication) -> bool:
    """The same content; a version or licence that is not named now agrees with any."""
    return (
        old.content == new.content
        and new.version in (None, old.version)
        and new.licence in (None, old.licence)
    )


def _refuse_replacing(folder: Path, old: Publication, new: Publication) -> None:
    if new.version in (None, old.version):
        what = "tables" if old.content != new.content else "licence"
        label = f"version {old.version}" if old.version else "no version name"
        raise ConfigError(
            f"{folder} holds another publication ({old.benchmark}, key {old.key}, {label}) with "
            f"other {what}; name a new folder, or another --version to replace it"
        )
    if names := sorted(path.name for path in folder.glob(".*")):
        raise ConfigError(
            f"{folder} also holds {names[0]}, which replacing would remove; publish to a new "
            "folder and copy from there"
        )


def _refuse_unfit(versions: list[TableVersion], pattern: str) -> None:
    for version in versions:
        if damage := verify_version(version):
            raise LakeError(
                f"table {version.name} is damaged: {damage[0].file.name} {damage[0].problem}; "
                "`novelty verify --drop` and a build make it again"
            )
    if columns := leaks(versions, pattern):
        raise ConfigError(
            f"folders of this machine stand in {columns[0]}; leave the table out with --tables, or "
            "build it from a source elsewhere"
        )


def picture_columns(version: TableVersion, table: Table) -> set[str]:
    """Binary columns whose first value begins like a PNG, JPEG, GIF or WebP file."""
    names = [column.name for column in table.columns if is_bytes(column.type)]
    pictures = set()
    for name in names:
        with opened_parquet(version.files[0]) as file:
            for batch in file.iter_batches(batch_size=16, columns=[name]):
                first = next((value for value in batch.column(0).to_pylist() if value), None)
                if first is not None:
                    pictures |= {name} if _PICTURE.match(first) else set()
                    break
    return pictures


def _write(
    folder: Path,
    publication: Publication,
    versions: list[TableVersion],
    pattern: str,
    *,
    replace: bool,
) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        with _beside(folder) as temporary:
            _fill(temporary, publication, versions, pattern)
            _synced(temporary)
            atomic.step("publication_written")
            _put_in_place(temporary, folder, replace)
            atomic.step("publication_placed")
            atomic.fsync_path(folder.parent)
    except OSError as error:
        raise LakeError(
            f"cannot publish to {folder}: {error.strerror or error}; what stood there before still "
            "does"
        ) from error


def _fill(
    temporary: Path, publication: Publication, versions: list[TableVersion], pattern: str
) -> None:
    """All files; SHA256SUMS last, so that an unfinished folder never verifies."""
    sums = {}
    for version, published in zip(versions, publication.tables, strict=True):
        (temporary / "data" / published.name).mkdir(parents=True)
        for source, file in zip(version.files, published.files, strict=True):
            atomic.copy_file(source, temporary / file.path)
            sums[file.path] = file.sha256
            atomic.step("publication_copied")
    tables = [table_of(version) for version in versions]
    pictures = {
        table.name: picture_columns(version, table)
        for version, table in zip(versions, tables, strict=True)
    }
    description = croissant(publication, tables, pictures)
    texts = {
        CARD: card(publication, tables, pictures),
        CROISSANT: json.dumps(description, indent=1, ensure_ascii=False) + "\n",
        MANIFEST: publication.model_dump_json(indent=1) + "\n",
        VERIFY: Path(__file__).with_name(VERIFY).read_text(),
    }
    for name, text in texts.items():
        if match := re.search(pattern, text, re.MULTILINE):
            raise ConfigError(
                f"{name} would name a folder of this machine ({match.group().strip()}); build with "
                "settings that do not hold it"
            )
        (temporary / name).write_text(text)
        sums[name] = sha256_of(str(temporary / name))
    atomic.step("publication_described")
    lines = [f"{digest}  {path}\n" for path, digest in sorted(sums.items())]
    (temporary / SUMS).write_text("".join(lines))


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    temporary = atomic.temporary_name(folder)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """What killed publishers of the same folder left beside it."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*.*.tmp"):
        process = path.name.split(".")[-3]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _synced(folder: Path) -> None:
    """To the disk."""
    for path in folder.rglob("*"):
        atomic.fsync_path(path)
    atomic.fsync_path(folder)


def _put_in_place(temporary: Path, folder: Path, replace: bool) -> None:
    """Rename; a folder to replace changes places with the new one in a single step."""
    if not replace:
        temporary.rename(folder)
    elif not exchange(temporary, folder):
        # For a moment there is no folder, never a mixture.
        away = atomic.temporary_name(folder)
        folder.rename(away)
        temporary.rename(folder)
        shutil.rmtree(away, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    return False
