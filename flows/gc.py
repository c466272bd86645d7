"""The lake looked after by a schedule: `gc` as a flow, deployed beside the benchmarks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from prefect import flow
from pydantic import Field

from flows.hooks import note_success, write_failure
from schemas.config import Settings
from schemas.errors import LockedError
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
    """Hours that dropped things stay, and objects in a bucket for builds elsewhere."""


@flow(
    name="gc",
    flow_run_name="gc",
    on_failure=[write_failure],
    on_crashed=[write_failure],
    on_completion=[note_success],
)
def collect(config: Cleanup) -> None:
    """Remove what nothing current refers to; while a build is under way, leave it to the next."""
    lake = lake_root(config.lake)
    require_lake(lake)
    with _free(lake) as free:
        if not free:
            return
        garbage = find_garbage(lake, config.grace)
        objects = find_remote_garbage(lake, config.grace)
        freed = freed_by(garbage) + sum(entry.bytes for entry in objects)
        remove_remote_garbage(lake, objects)
        discard(lake, garbage)
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
