"""Snapshots of a lake: list, pin and restore them, and where one is read by path.

Enter: `benchmark`, `benchmark@s12`, `benchmark/table` or `benchmark/table@s12`. Leaves: rows for
people, or a folder that stays as it is until `gc` may take the snapshot.
"""

from pathlib import Path

import polars as pl

from schemas.errors import ConfigError
from schemas.manifest import Snapshot
from storage.catalog import refresh_catalog
from storage.damage import restore_snapshot
from storage.layout import snapshot_path
from storage.snapshots import (
    benchmarks_in,
    current_snapshot,
    find_snapshot,
    history,
    pin,
    pinned_names,
)
from storage.tables import versions_of


def history_rows(lake: Path, benchmark: str | None = None) -> pl.DataFrame:
    """One row per snapshot, the newest of each benchmark first."""
    rows = []
    for name in [benchmark] if benchmark else benchmarks_in(lake):
        current = find_snapshot(lake, name) if benchmark else current_snapshot(lake, name)
        pinned = pinned_names(lake, name)
        before: dict[str, str] = {}
        for snapshot in history(lake, name):
            changed = dict(snapshot.tables.items() ^ before.items())
            state = [
                word
                for word, holds in (
                    ("current", current is not None and snapshot.name == current.name),
                    ("partial", snapshot.partial),
                    ("pinned", snapshot.name in pinned),
                    (f"restored {snapshot.restored}", snapshot.restored is not None),
                )
                if holds
            ]
            made = snapshot.made.strftime("%Y-%m-%d %H:%M:%S")
            counts = (len(snapshot.tables), len(changed), len(snapshot.runs))
            rows.append((name, snapshot.name, snapshot.number, made, *counts, ", ".join(state)))
            before = snapshot.tables
    columns = (
        "benchmark",
        "snapshot",
        "number",
        "made (UTC)",
        "tables",
        "changed",
        "runs",
        "state",
    )
    frame = pl.DataFrame(rows, schema=columns, orient="row")
    return frame.sort("benchmark", "number", descending=[False, True]).drop("number")


def set_pin(lake: Path, text: str, pinned: bool) -> Snapshot:
    """Keep a snapshot for ever, or no longer."""
    snapshot = find_snapshot(lake, text)
    if not snapshot.number and not snapshot_path(lake, snapshot.benchmark, snapshot.name).exists():
        raise ConfigError(
            f"{snapshot.benchmark} was published before there were snapshots; build it once more"
        )
    pin(lake, snapshot, pinned)
    return snapshot


def restore(lake: Path, text: str) -> Snapshot:
    """Make the tables of an older snapshot current again."""
    restored = restore_snapshot(lake, find_snapshot(lake, text))
    refresh_catalog(lake)
    return restored


def folder_of(lake: Path, text: str) -> Path:
    """The folder of a snapshot, or of one table in it; of a bucket its files are fetched."""
    name, _, label = text.partition("@")
    benchmark, _, table = name.partition("/")
    snapshot = find_snapshot(lake, f"{benchmark}@{label}" if label else benchmark)
    if table and table not in snapshot.tables:
        raise ConfigError(
            f"{snapshot.name} of {benchmark} has no table {table!r}; it has: "
            f"{', '.join(snapshot.tables)}"
        )
    for version in versions_of(lake, snapshot, [table] if table else None):
        _ = version.files
    folder = snapshot_path(lake, benchmark, snapshot.name)
    if not folder.exists():
        raise ConfigError(f"{benchmark} was published before there were snapshots; build it again")
    return folder / table if table else folder
