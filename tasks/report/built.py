"""What was built, from what and when, and which records were refused."""

import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from schemas.tables import find_table
from storage.tables import TableVersion
from tasks.report.blocks import Html, bytes_text, counted, folded, paragraph, table
from tasks.report.page import Section, Tile
from tasks.report.reading import Tables
from tasks.report.time_spent import time_spent

EXAMPLES = 3


def tiles(read: Tables) -> list[Tile]:
    """The numbers at the head of the page."""
    manifests = [version.manifest for version in read.versions]
    numbers = [
        (f"{len(manifests):,}", "tables"),
        (f"{sum(manifest.rows for manifest in manifests):,}", "rows"),
        (bytes_text(sum(manifest.bytes for manifest in manifests)), "of Parquet"),
    ]
    if (refused := read.rows("quarantine")) is not None:
        noun = "record" if refused == 1 else "records"
        numbers.append((f"{refused:,}", f"{noun} in quarantine"))
    return numbers


def what_was_built(read: Tables) -> Section:
    quarantine = read.scan("quarantine")
    refused: dict[str, int] = {}
    if quarantine is not None:
        by_table = quarantine.group_by("table_name").agg(pl.len().cast(pl.Int64))
        refused = dict(read.collect("quarantine", by_table).iter_rows())
    built, kept = [], []
    for version in read.versions:
        manifest = version.manifest
        stages = {part.piece.split("/")[1] for part in manifest.parts if part.piece}
        built.append(
            {
                "table": manifest.table,
                "rows": manifest.rows,
                "size": bytes_text(manifest.bytes),
                "quarantined": refused.get(manifest.table, 0),
                "made_(UTC)": _made(version),
                "description": _description(version),
            }
        )
        kept.append(
            {
                "table": manifest.table,
                "made_by": ", ".join(sorted(stages)) or "–",
                "shards": len(manifest.parts),
                "version": f"`{manifest.key}`",
                "path": f"`{version.name}/current`",
            }
        )
    parts = [
        paragraph(
            "A table is the Parquet files in its path below the lake folder. A refused record is "
            "counted at the table that it was meant for."
        ),
        table(pl.DataFrame(built), right=("size",)),
        folded("Paths, versions and stages", table(pl.DataFrame(kept))),
    ]
    if read.older:
        names = ", ".join(f"`{name}`" for name in read.older)
        parts.insert(
            1, paragraph(f"Of an older version, so not shown below: {names}. Build again.")
        )
    return Section("What was built", parts + _sources_and_settings(read) + time_spent(read))


def _description(version: TableVersion) -> str:
    """As declared, so that no part has to be fetched from a bucket for it; else from the file."""
    declared = find_table(version.manifest.benchmark, version.manifest.table)
    if declared is not None:
        return declared.description
    metadata = pq.read_schema(version.files[0]).metadata or {}
    return metadata.get(b"description", b"").decode()


def _made(version: TableVersion) -> str:
    """When this content was first committed, or came here from a bucket."""
    return time.strftime("%Y-%m-%d\N{NO-BREAK SPACE}%H:%M", time.gmtime(version.made))


def _sources_and_settings(read: Tables) -> list[Html]:
    """From the last finished build. Of a path only its name: the report may leave the machine."""
    record = read.record
    if record is None:
        return []
    parts = []
    if record.sources:
        rows = [(PurePath(s.root).name, s.files, f"`{s.digest}`") for s in record.sources]
        parts.append(
            table(
                pl.DataFrame(rows, schema=["source", "files", "digest"], orient="row"),
                "Raw sources; the digest covers every file name and content",
            )
        )
    settings = [(name, value) for name, value in flat(record.settings) if name != "lake"]
    if settings:
        frame = pl.DataFrame(settings, schema=["setting", "value"], orient="row")
        parts.append(folded("Settings of the build", table(frame)))
    return parts


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names with dots and values as text; of a path only its name."""
    rows = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{prefix}{name}.")
        elif isinstance(value, str) and PurePath(value).is_absolute():
            rows.append((prefix + name, PurePath(value).name))
        else:
            rows.append((prefix + name, "–" if value in (None, "", [], {}) else str(value)))
    return rows


def data_quality(read: Tables) -> Section:
    if "quarantine" in read.older:
        return Section(
            "Data quality", [paragraph("The table `quarantine` is of an older version.")]
        )
    if not read.rows("quarantine"):
        return Section("Data quality", [paragraph("No record was refused.")])
    columns = ["stage", "table_name", "rule", "shard", "record", "number", "message"]
    quarantine = read("quarantine", columns)
    assert quarantine is not None
    by = ["stage", "table_name", "rule"]
    counts = quarantine.group_by(by).agg(pl.len().cast(pl.Int64).alias("records"))
    examples = (
        quarantine.sort(*by, "shard", "record", "number")
        .group_by(by, maintain_order=True)
        .head(EXAMPLES)
        .select("stage", "rule", "record", "message")
    )
    return Section(
        "Data quality",
        [
            paragraph(
                f"{counted(quarantine.height, 'record')} went to quarantine instead of a table: "
                "rows in = rows out + these. All of them, with their messages, are in the table "
                "`quarantine`."
            ),
            table(counts.sort(by), "Refused records by stage and rule"),
            table(examples, f"Examples, at most {EXAMPLES} of each rule"),
        ],
    )
