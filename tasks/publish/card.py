"""`README.md` of a publication: a Hugging Face dataset card that people read too.

Enters a publication and its tables; leaves Markdown with YAML front matter: a `configs` entry per
table, so that `datasets.load_dataset(folder, table)` finds its files.
"""

import importlib
import importlib.util
import itertools
from collections.abc import Mapping
from typing import Any

import yaml

from schemas.table import Table
from tasks.operations.dictionary import describe_table
from tasks.publish.record import Publication

PAPERS = {
    "kowl": "Prijatelj et al.: Human Activity Recognition in an Open World. JAIR 81, 2024.",
    "novelcraft": "Feeney et al.: NovelCraft: A Dataset for Novelty Detection and Discovery in "
    "Open Worlds. TMLR, 2023.",
    "semantic": "Ahmed and Courville: Detecting Semantic Anomalies. AAAI 2020.",
    "threedos": "Alliegro, Cappio Borlino and Tommasi: 3DOS: Towards 3D Open Set Learning. "
    "NeurIPS Datasets and Benchmarks, 2022.",
}
# What the Hub knows by name; any other text is `other` with the text as its name.
HUB_LICENCES = {
    "apache-2.0",
    "bsd-3-clause",
    "cc-by-2.0",
    "cc-by-3.0",
    "cc-by-4.0",
    "cc-by-nc-4.0",
    "cc-by-nc-nd-4.0",
    "cc-by-nc-sa-4.0",
    "cc-by-nd-4.0",
    "cc-by-sa-3.0",
    "cc-by-sa-4.0",
    "cc0-1.0",
    "cdla-permissive-2.0",
    "cdla-sharing-1.0",
    "gpl-3.0",
    "mit",
    "odbl",
    "odc-by",
    "pddl",
}
_SIZES = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]


def what_it_is(benchmark: str) -> str:
    """One sentence: what the benchmark's configuration says of it."""
    if importlib.util.find_spec(f"schemas.{benchmark}") is not None:
        config = getattr(importlib.import_module(f"schemas.{benchmark}"), "Config", None)
        if config is not None and config.__doc__:
            return str(config.__doc__).strip().splitlines()[0]
    return f"{benchmark}: tables of the open-world novelty pipeline."


def pretty_name(benchmark: str) -> str:
    return what_it_is(benchmark).partition(":")[0]


def citation(publication: Publication) -> str:
    """How to name exactly these bytes, and the paper behind the benchmark where it is known."""
    version = f"version {publication.version}, " if publication.version else ""
    sentence = (
        f"{pretty_name(publication.benchmark)}, tables made by the open-world novelty pipeline, "
        f"{version}key {publication.key}."
    )
    return " ".join([sentence, PAPERS.get(publication.benchmark, "")]).strip()


def size_category(rows: int) -> str:
    """The Hub's name for a number of rows."""
    if rows < 1000:
        return "n<1K"
    for power, (low, high) in enumerate(itertools.pairwise(_SIZES), 4):
        if rows < 10**power:
            return f"{low}<n<{high}"
    return "n>1T"


def _licence_fields(licence: str | None) -> dict[str, str]:
    if licence is None:
        return {"license": "unknown"}
    if licence.lower() in HUB_LICENCES:
        return {"license": licence.lower()}
    if licence.startswith(("https://", "http://")):
        return {"license": "other", "license_name": "other", "license_link": licence}
    return {"license": "other", "license_name": licence}


def front_matter(publication: Publication) -> dict[str, Any]:
    return {
        "pretty_name": pretty_name(publication.benchmark),
        **_licence_fields(publication.licence),
        "tags": ["novelty-detection", "open-world", publication.benchmark],
        "size_categories": [size_category(sum(table.rows for table in publication.tables))],
        # `datasets` (5.2.0) raises an error for a split without rows, so an empty table has none.
        "configs": [
            {
                "config_name": table.name,
                "data_files": [{"split": "train", "path": f"data/{table.name}/*.parquet"}],
            }
            for table in publication.tables
            if table.rows
        ],
    }


def _tables(
    publication: Publication, tables: list[Table], pictures: Mapping[str, set[str]]
) -> list[str]:
    lines = ["## Tables", "", "| table | rows | bytes | files | what |", "|---|---|---|---|---|"]
    for table in publication.tables:
        lines.append(
            f"| `{table.name}` | {table.rows} | {table.bytes} | {len(table.files)} "
            f"| {table.description} |"
        )
    lines.append("")
    for declared in tables:
        lines += describe_table(declared.name, declared)
        if pictures[declared.name]:
            names = ", ".join(f"`{name}`" for name in sorted(pictures[declared.name]))
            lines += [f"Encoded pictures: {names}.", ""]
    return lines


def _reading(publication: Publication, pictures: Mapping[str, set[str]]) -> list[str]:
    empty = [table.name for table in publication.tables if not table.rows]
    name = next((t.name for t in publication.tables if t.rows), publication.tables[0].name)
    lines = [
        "## Reading",
        "",
        "Run these in this folder.",
        "",
        "```python",
        "import os",
        "from datasets import load_dataset",
        f'load_dataset(os.getcwd(), "{name}", split="train")  # one configuration per table',
        "",
        "import polars as pl",
        f'pl.read_parquet("data/{name}/*.parquet")',
        "",
        "import pandas as pd",
        f'pd.read_parquet("data/{name}")',
        "",
        "import duckdb",
        f"duckdb.sql(\"select * from 'data/{name}/*.parquet' limit 5\")",
        "",
        "import mlcroissant as mlc",
        f'mlc.Dataset("croissant.json").records("{name}")',
        "```",
        "",
        "`train` is only the name that `datasets` needs for a table; where a table has a column "
        "`split`, that column says which rows are for training.",
        "",
    ]
    if empty:
        names = ", ".join(f"`{one}`" for one in empty)
        lines += [f"Without rows, and so not for `datasets`: {names}.", ""]
    for table, columns in pictures.items():
        for column in sorted(columns):
            lines.append(
                f"Pictures of `{table}`: `load_dataset(…).cast_column("
                f'"{column}", datasets.Image())`.'
            )
    return [*lines, ""]


def _origin(publication: Publication) -> list[str]:
    lines = ["## Where it came from", ""]
    if publication.sources:
        lines += [
            "Raw sources. The digest covers names and contents of all files.",
            "",
            "| source | files | digest | terms |",
            "|---|---|---|---|",
        ]
        for source in publication.sources:
            lines.append(
                f"| `{source.name}` | {source.files} | `{source.digest}` | {source.terms} |"
            )
        lines.append("")
    if publication.stages:
        lines += [
            "Stages, in the order of their names. `manifest.json` has their settings.",
            "",
            "| stage | version | pieces | code |",
            "|---|---|---|---|",
        ]
        for stage in publication.stages:
            lines.append(f"| {stage.stage} | {stage.version} | {stage.pieces} | `{stage.code}` |")
        lines.append("")
    refused = sum(table.rows for table in publication.tables if table.name == "quarantine")
    if refused:
        lines += [f"{refused} records were refused; the table `quarantine` says why.", ""]
    return lines


def _licence(publication: Publication) -> list[str]:
    terms = f"Licence: {publication.licence}." if publication.licence else "No licence was given."
    return [
        "## Licence",
        "",
        f"{terms} The tables hold or derive from the sources above. This project does not know "
        "the terms of those sources: check them before you use or pass on the tables.",
        "",
    ]


def card(publication: Publication, tables: list[Table], pictures: Mapping[str, set[str]]) -> str:
    """The whole README.md; `pictures` names the picture columns of a table."""
    matter = yaml.safe_dump(
        front_matter(publication), sort_keys=False, allow_unicode=True, width=1000
    )
    version = f"Version {publication.version}. " if publication.version else ""
    lines = [
        f"# {pretty_name(publication.benchmark)}",
        "",
        what_it_is(publication.benchmark),
        "",
        f"{version}Content key `{publication.key}`. Published {publication.date}.",
        "",
        f"Cite as: {citation(publication)}",
        "",
        *_tables(publication, tables, pictures),
        *_reading(publication, pictures),
        *_origin(publication),
        *_licence(publication),
        "## Verifying",
        "",
        "```",
        "sha256sum --check SHA256SUMS",
        "python verify.py          # also names files that do not belong here",
        "grep ' data/' SHA256SUMS | sha256sum | cut -c 1-32      # gives the content key",
        "```",
    ]
    return f"---\n{matter}---\n\n" + "\n".join(lines) + "\n"
