"""Removals that may be killed at any point and undone: what goes is renamed first, whole.

<lake>/.novelty/tombstones/<name>/_tombstone.json lists the paths before the first one goes, and
<lake>/.novelty/tombstones/<name>/<path in the lake> is where each goes. One rename takes manifest
and files together, so nothing half removed ever looks committed. `unbury` renames back what was
not made anew meanwhile; `discard` hides things before their files are deleted.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import LakeError
from schemas.manifest import Tombstone
from storage.atomic import explained, fsync_path, step, temporary_name, write_bytes
from storage.layout import tombstones_path

RECORD = "_tombstone.json"


@dataclass(frozen=True)
class Buried:
    """A tombstone as it stands in the lake."""

    folder: Path
    record: Tombstone

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.time() - self.folder.stat().st_mtime)


def new_name() -> str:
    """Sorts by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"


def bury(lake: Path, paths: Sequence[Path], reason: str) -> Buried:
    """Take the paths out of the lake, in this order; each goes whole, or not at all."""
    names = [str(path.relative_to(lake)) for path in paths]
    buried = Buried(tombstones_path(lake) / new_name(), Tombstone(reason=reason, paths=names))
    write_bytes(buried.folder / RECORD, buried.record.model_dump_json(indent=1).encode() + b"\n")
    step("tombstone_written")
    _move([(lake / name, buried.folder / name) for name in names], "buried")
    return buried


def unbury(lake: Path, buried: Buried) -> tuple[list[str], list[str]]:
    """Undo a removal: (what came back, what was made anew meanwhile and stays as it is now).

    The tombstone stays, so that an undoing that is killed can be done again; discard it at the end.
    """
    back = [path for path in reversed(buried.record.paths) if os.path.lexists(buried.folder / path)]
    newer = [path for path in back if os.path.lexists(lake / path)]
    restored = [path for path in back if path not in newer]
    _move([(buried.folder / path, lake / path) for path in restored], "restored")
    return restored, newer


def _move(pairs: Iterable[tuple[Path, Path]], done: str) -> None:
    """Rename each; what is gone already was taken by a removal that was killed."""
    changed = set()
    for source, target in pairs:
        with explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                source.rename(target)
            except FileNotFoundError:
                continue
            changed |= {source.parent, target.parent}
            step(done)
    for folder in sorted(changed):
        if folder.is_dir():
            fsync_path(folder)


def discard(lake: Path, paths: Sequence[Path]) -> None:
    """Delete for good, after a rename to a name that nothing reads and `gc` knows as a leftover."""
    hidden = temporary_name(tombstones_path(lake) / "discarded")
    _move([(path, hidden / str(number)) for number, path in enumerate(paths)], "discarded")
    if hidden.exists():
        shutil.rmtree(hidden)
        step("deleted")


def tombstones(lake: Path) -> list[Buried]:
    """The oldest first. One without a readable record holds nothing that can be undone."""
    removals = []
    for folder in sorted(tombstones_path(lake).glob("[!.]*")):
        try:
            record = Tombstone.model_validate_json((folder / RECORD).read_bytes())
        except (OSError, ValueError):
            record = Tombstone(reason="its record is damaged", paths=[])
        if any(Path(path).is_absolute() or ".." in Path(path).parts for path in record.paths):
            raise LakeError(f"{folder / RECORD} leads out of the lake; find out who wrote it")
        removals.append(Buried(folder, record))
    return removals
