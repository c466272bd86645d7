"""What people see on the terminal: tables built, their state, their lineage."""

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from storage.catalog import CATALOG_SQL
from storage.disk_use import DiskUse
from storage.layout import catalog_path, current_path, lake_address, lake_root
from storage.tables import TableVersion, current_versions
from storage.upkeep import Lineage, Status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


def _console() -> "Console":
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)


def _table(*columns: str) -> "RichTable":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    return table


NUMBERS = {"rows", "bytes", "quarantined", "age"}


def show_tables(lake: str | Path | None, benchmark: str | None = None) -> None:
    """One line per current table, and where to look."""
    root = lake_root(lake)
    shown = _table("table", "rows", "bytes", "quarantined", "read it at")
    for version in current_versions(root, benchmark):
        manifest = version.manifest
        shown.add_row(
            version.name,
            f"{manifest.rows:,}",
            f"{manifest.bytes:,}",
            f"{manifest.quarantined:,}",
            f"{_where(root, version)}/*.parquet",
        )
    console = _console()
    console.print(shown)
    console.print(f"catalogue: {lake_address(root)}/{_catalogue(root)}")


def _where(lake: Path, version: TableVersion) -> str:
    """A bucket has no links, so there the version itself is named."""
    manifest = version.manifest
    if lake_address(lake) == str(lake):
        return str(current_path(lake, manifest.benchmark, manifest.table))
    return f"{lake_address(lake)}/{version.name}/versions/{manifest.key}"


def _catalogue(lake: Path) -> str:
    return catalog_path(lake).name if lake_address(lake) == str(lake) else CATALOG_SQL


def show_frame(frame: pl.DataFrame) -> None:
    """Rows of a frame, as they are; null as a dash."""
    shown = _table(*frame.columns)
    for row in frame.iter_rows():
        shown.add_row(*("-" if value is None else _text(value) for value in row))
    _console().print(shown)


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def show_statuses(lake: Path, statuses: list[Status]) -> None:
    shown = _table("table", "rows", "bytes", "quarantined", "age", "state")
    for status in statuses:
        state = "stale: " + "; ".join(status.stale) if status.stale else "fresh"
        shown.add_row(
            status.name,
            f"{status.rows:,}",
            f"{status.bytes:,}",
            f"{status.quarantined:,}",
            _age(status.age_seconds),
            state,
        )
    console = _console()
    console.print(shown)
    console.print(
        f"{len(statuses)} tables in {lake_address(lake)}, "
        f"{sum(bool(status.stale) for status in statuses)} stale"
    )


def show_disk_use(lake: Path, use: DiskUse, in_bucket: int, grace_hours: float) -> None:
    """What the lake takes, and what `novelty gc` would give back."""
    where = "in the cache of this machine" if lake_address(lake) != str(lake) else "on disk"
    print(f"{_size(use.used)} {where}, {_size(use.free)} free")
    back = _size(use.reclaimable) + (f", and {_size(in_bucket)} in the bucket" if in_bucket else "")
    print(
        f"`novelty gc` would give back {back}; it keeps current versions with all that they were "
        f"made from, and dropped ones for {grace_hours:g} hours"
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def show_lineage(chain: dict[str, Lineage]) -> None:
    from rich.tree import Tree

    def grow(tree: Tree, nodes: dict[str, Lineage]) -> None:
        for table, node in nodes.items():
            branch = tree.add(
                f"{table}  ← {node.stage} v{node.stage_version} ({len(node.shards)} shards)"
            )
            for root, names in sorted(node.raw.items()):
                branch.add(f"{len(names)} raw files under {root}, such as {min(names)}")
            grow(branch, node.tables)

    tree = Tree("lineage")
    grow(tree, chain)
    _console().print(tree)
