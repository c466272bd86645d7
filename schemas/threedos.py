"""3DOS: its tables and the settings of its stages.

A shape is named as `tasks.threedos.lists` says: `shapenet/<synset>/<model>`,
`modelnet40/<class>_<NNNN>`, `scanobjectnn/<...>`, `<source>/<path without suffix>`.
"""

from pathlib import Path
from typing import Literal

import polars as pl
import pyarrow as pa
from pydantic import Field, model_validator

from schemas.config import Choice, Settings
from schemas.runs import RunChoices
from schemas.table import Column, Reference, Rule, Table
from schemas.tables import SPLIT_NAMES

Farthest = Literal["plain", "bucket"]
Normalisation = Literal["unit_sphere", "unit_cube"]
NORMALISATIONS: tuple[Normalisation, ...] = ("unit_sphere", "unit_cube")
SHAPE_KINDS = ("mesh", "voxels", "scan")
POINTS = 4096

_BOX = tuple(
    Column(
        f"{end}_{axis}",
        pa.float64(),
        f"Bounding box of the vertices in use, {word} {axis}",
        unit="raw length",
    )
    for end, word in (("min", "least"), ("max", "largest"))
    for axis in "xyz"
)

SHAPES = Table(
    name="shapes",
    description="One row per shape that was read: what it is and what its surface is like.",
    columns=(
        Column("sample_id", pa.string(), "Shape, such as `modelnet40/chair_0001`"),
        Column("source", pa.string(), "Source it was read from, such as `modelnet40_resampled`"),
        Column("class", pa.string(), "Class; for ShapeNet the synset id"),
        Column(
            "split",
            pa.string(),
            "Official split, if the source or its lists say",
            nullable=True,
            allowed=SPLIT_NAMES,
        ),
        Column("file", pa.string(), "Raw file, relative to the source folder or archive"),
        Column(
            "row",
            pa.int32(),
            "0-based row in a file of many shapes (h5, npz); else null",
            nullable=True,
            minimum=0,
        ),
        Column("kind", pa.string(), "What the raw record is", allowed=SHAPE_KINDS),
        Column("vertices", pa.int32(), "Vertices of the mesh, or points of the scan", minimum=1),
        Column("faces", pa.int32(), "Triangles after repair; null for a scan", nullable=True),
        Column(
            "area",
            pa.float64(),
            "Area of the surface; null for a scan",
            unit="raw length squared",
            nullable=True,
            minimum=0,
        ),
        *_BOX,
        Column(
            "watertight",
            pa.bool_(),
            "Whether every edge has exactly two faces once equal vertices are merged; null for a "
            "scan",
            nullable=True,
        ),
        Column(
            "background",
            pa.float64(),
            "Share of the scan's points that its mask calls background; null without a mask",
            nullable=True,
            minimum=0,
            maximum=1,
        ),
        Column("repaired", pa.string(), "What was repaired; null if nothing was", nullable=True),
        Column("digest", pa.string(), "SHA-256 of the raw file, or of the row's numbers"),
    ),
    key=("sample_id",),
    rules=(
        Rule(
            "box_order",
            pl.all_horizontal(pl.col(f"min_{a}") <= pl.col(f"max_{a}") for a in "xyz"),
            "the bounding box is inside out",
        ),
    ),
    version=2,
)


def point_clouds_table(points: int) -> Table:
    """The table of clouds of that many points; its columns differ in the length of `points`."""
    return Table(
        name="point_clouds",
        description=(
            "One normalised point cloud per shape, in the order of farthest-point sampling: the "
            "first k points are the k farthest ones, so one cloud serves every density."
        ),
        columns=(
            Column("sample_id", pa.string(), "Shape"),
            Column(
                "normalisation",
                pa.string(),
                "unit_sphere: largest norm 1; unit_cube: largest coordinate 1; both around the "
                "mean of the points",
                allowed=NORMALISATIONS,
            ),
            *(
                Column(f"center_{axis}", pa.float64(), f"Subtracted from {axis}", unit="raw length")
                for axis in "xyz"
            ),
            Column("scale", pa.float64(), "Divided by", unit="raw length"),
            Column(
                "count",
                pa.int32(),
                "Points of its own; a scan with fewer than there is room for starts again after "
                "them",
                unit="point",
                minimum=1,
                maximum=points,
            ),
            Column(
                "points",
                pa.list_(pa.float32(), 3 * points),
                "x, y, z of the first point, then of the second, and so on",
            ),
        ),
        key=("sample_id",),
        rules=(Rule("scale_positive", pl.col("scale") > 0, "the cloud has no extent"),),
        references=(Reference(("sample_id",), "shapes", ("sample_id",)),),
        version=2,
        row_group_rows=256,
    )


POINT_CLOUDS = point_clouds_table(POINTS)

MEMBERS = Table(
    name="members",
    description="One row per shape that an official list names, whether its file is there or not.",
    columns=(
        Column("sample_id", pa.string(), "Shape"),
        Column("source", pa.string(), "Data set, such as `shapenet`"),
        Column("class", pa.string(), "Class; for ShapeNet the synset id"),
        Column("class_name", pa.string(), "Name of a synset", nullable=True),
        Column("split", pa.string(), "Official split", allowed=SPLIT_NAMES),
    ),
    key=("sample_id",),
    version=2,
)

TABLES = (MEMBERS, SHAPES, POINT_CLOUDS)


class ShapeSettings(Settings):
    """Raw shapes to point clouds of one size."""

    points: int = Field(POINTS, ge=1)
    """Points of a stored cloud; lower densities are its beginnings."""
    candidates: int = Field(16_384, ge=1)
    """Points drawn uniformly by area, of which the farthest ones are kept."""
    # Left out of keys at its default: clouds that were made before it was there stay as they are.
    farthest: Farthest = Field("plain", exclude_if=lambda value: value == "plain")
    """How the farthest are found: plain, or bucket (by fpsample, from another first point)."""
    normalisation: Normalisation = "unit_sphere"
    """unit_sphere as in the released code, or unit_cube as the paper says."""
    background: Literal["keep", "drop"] = "keep"
    """Points that a scan's mask calls background: keep them (OBJ_BG) or drop them (OBJ_ONLY)."""
    seed: int = Field(0, ge=0)
    """Seed of the sampling; each shape draws by it and by its own id."""
    max_file_bytes: int = Field(256 << 20, ge=1)
    """A mesh, or an h5 or npz file inside an archive, that is larger is refused."""
    seconds_per_shape: float = Field(60, gt=0)
    """A reader that needs longer is killed."""
    memory_bytes: int = Field(4 << 30, ge=1 << 28)
    """Memory of the process that reads shapes."""

    @model_validator(mode="after")
    def _candidates_suffice(self) -> "ShapeSettings":
        if self.candidates < self.points:
            raise ValueError(
                f"candidates is {self.candidates}, expected at least points, which is {self.points}"
            )
        return self


class ListSettings(Settings):
    """Which of the official lists are read, and how."""

    shapenet_list: Literal["auto", "all.csv", "sncore"] = "auto"
    """ShapeNet's list: all.csv, or the json beside the released h5; auto takes the one there is."""
    missing_models: str = ""
    """CSV in the lists folder (synsetId, modelId) of models without a file; empty: none."""
    scan_split: Literal["main_split", "split1", "split2", "split3", "split4"] = "main_split"
    """Which of the five divisions of ScanObjectNN."""


class TrackSettings(Settings):
    """How the tracks are cut."""

    cellphones: Literal["merged", "dropped"] = "merged"
    """Cellphones are telephones (the paper), or in no set (what the released loader does)."""


MODALITIES = ("cloud",)
"""Kinds of samples that models can be fitted on."""


class Config(RunChoices):
    """3DOS: is this shape of a kind that was never trained?"""

    source: dict[str, Path] = Field({})
    """KIND=folder or archive, repeatable: shapenet, modelnet40, scanobjectnn, ... or a new NAME."""
    lists: Path | None = None
    """Folder of official lists; alone enough to build the splits."""
    lake: Path | None = None
    """Lake: a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)."""
    tracks: tuple[str, ...] = ()
    """Tracks by name (default: all, your own too); one whose shapes are not there is left out."""
    track_file: Path | None = None
    """YAML of tracks of your own."""
    networks: Choice = Field({"dgcnn": {}})
    """Point networks below the models: dgcnn, pointnet2, pointnext or all."""
    densities: tuple[int, ...] = ()
    """Points to train and test with, runs of their own each (default: the preset's)."""
    points: tuple[int, ...] = ()
    """Densities met in testing only, a view `points_<N>` each, beside that of training."""
    listing: ListSettings = ListSettings()
    shapes: ShapeSettings = ShapeSettings()
    splits: TrackSettings = TrackSettings()
    max_reject_share: float = Field(0.25, ge=0, le=1)
    """Share of shapes that may go to quarantine before the build stops."""

    @model_validator(mode="after")
    def _something_is_named(self) -> "Config":
        if not self.source and self.lists is None:
            raise ValueError("name a source (--source modelnet40=DIR) or lists (--lists DIR)")
        return self

    @model_validator(mode="after")
    def _points_are_there(self) -> "Config":
        for name in ("points", "densities"):
            counts = getattr(self, name)
            wrong = [count for count in counts if not 2 <= count <= self.shapes.points]
            if wrong:
                raise ValueError(
                    f"{name} is {wrong[0]}, expected 2 to {self.shapes.points}; a stored cloud has "
                    "shapes.points of them"
                )
            if len(set(counts)) < len(counts):
                raise ValueError(f"a number stands twice in {name} {', '.join(map(str, counts))}")
        return self

    @classmethod
    def demo(cls, sample: Path) -> "Config":
        """The configuration of `make demo`."""
        kinds = ("modelnet40", "scanobjectnn", "shapenet")
        return cls(
            source={kind: sample / kind for kind in kinds},
            shapes=ShapeSettings(points=1024, candidates=4096),
            models={"cross_entropy": {}},
            protocols=("SR1",),
            scores={name: {} for name in ("msp", "mls", "knn", "mahalanobis", "vim")},
            train={"epochs": 20},
            seeds=(0, 1, 2),
            trainings=3,  # on two cores no third one that keeps a single core busy
        )
