"""The choices of KOWL-718 that are data: the three releases and the label renames, by name.

Label and split rules are fields of `UnifySettings` (schemas/kowl.py), increment options those of
`IncrementSettings` (schemas/increments.py). docs/kowl.md, rules 1 to 3. The rename
tables are in `renames.csv`: `kinetics400_renames` is the authors'; `football_case` is not in their
code, it was fitted to their printed totals (718 labels, 409 known instead of 719 and 410).
"""

import csv
from pathlib import Path

from schemas.kowl import Release, Rename


def _read_renames() -> dict[str, tuple[Rename, ...]]:
    tables: dict[str, tuple[Rename, ...]] = {}
    with Path(__file__).with_name("renames.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rename = Rename(release=row["release"] or None, old=row["old"], new=row["new"])
            tables[row["table"]] = (*tables.get(row["table"], ()), rename)
    return tables


RENAMES = _read_renames()

KINETICS: tuple[Release, ...] = tuple(
    Release(
        name=name,
        order=order,
        files={split: (f"{name}_{split}.csv.gz",) for split in ("train", "validate", "test")},
    )
    for order, name in enumerate(("kinetics400", "kinetics600", "kinetics700_2020"))
)
