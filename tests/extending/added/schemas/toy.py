"""Toy: points in the plane with a class."""

from pathlib import Path

import pyarrow as pa
from pydantic import Field

from schemas.runs import RunChoices
from schemas.table import Column, Table

POINTS = Table(
    name="points",
    description="One row per point.",
    columns=(
        Column("sample_id", pa.string(), "Point"),
        Column("x", pa.float64(), "First coordinate"),
        Column("y", pa.float64(), "Second coordinate"),
    ),
    key=("sample_id",),
)
TABLES = (POINTS,)


class Config(RunChoices):
    """What `novelty build toy` takes."""

    source: Path
    """Folder with points.csv."""
    lake: Path | None = None
    """Where tables go."""
    max_reject_share: float = Field(0.25, ge=0, le=1)
    """Share of records that may be refused."""

    @classmethod
    def demo(cls, sample: Path) -> "Config":
        return cls(source=sample, models={"line": {}})
