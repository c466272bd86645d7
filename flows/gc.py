"""The lake looked after by a schedule: `gc` as a flow, deployed beside the benchmarks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from flows.runner import benchmark_flow
from schemas.config import Settings
from schemas.errors import LockedError
from storage.catalog import refresh_catalog
from storage.disk_use import freed_by
from storage.layout import lake_root
from storage.locks import all_locked
from storage.tombstones import discard
from storage.upkeep import find_garbage, find_remote_garbage, remove_remote_garbage, require_lake


class Cleanup(Settings):
    """What `gc` removes."""

    lake: Path | None = None
    """Lake: a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)."""
    grace: float = Field(24.0, ge=0)
    """Hours that replaced snapshots and dropped things stay, and objects in a bucket."""
    keep: int = Field(5, ge=1)
    """Snapshots that stay however old."""


@benchmark_flow
def build(config: Cleanup) -> None:
    """Remove what nothing current refers to; while a build is under way, leave it to the next."""
    lake = lake_root(config.lake)
    require_lake(lake)
    with _free(lake) as free:
        if not free:
            return
        garbage = find_garbage(lake, config.grace, config.keep)
        objects = find_remote_garbage(lake, config.grace, config.keep)
        freed = freed_by(garbage) + sum(entry.bytes for entry in objects)
        remove_remote_garbage(lake, objects)
        discard(lake, garbage)
        refresh_catalog(lake)
        print(f"gc: removed {len(garbage) + len(objects)}, {freed:,} bytes", flush=True)


@contextlib.contextmanager
def _free(lake: Path) -> Iterator[bool]:
    """Holds the whole lake; False where a build has it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(all_locked(lake))
        except LockedError as error:
            print(f"gc: left to the next time: {error}", flush=True)
            yield False
            return
        yield True
