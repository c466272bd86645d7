"""Semantic anomalies: its tables and the settings of its stages.

An image is named `<data set>/<path without suffix>`, or `<data set>/<file>/<row>` where one file
holds many (CIFAR-10 batches, STL-10).
"""

from pathlib import Path
from typing import Annotated, Literal, Self

import pyarrow as pa
from pydantic import AfterValidator, Field, model_validator

from schemas.config import Settings
from schemas.runs import RunChoices
from schemas.table import Column, Reference, Table
from schemas.tables import SPLIT_NAMES

# One run each: a seed that is named twice counts once.
Seeds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    AfterValidator(lambda seeds: tuple(dict.fromkeys(seeds))),
]
ENCODINGS = ("png", "jpeg")

# What epochs of a network measure on test, as metrics: of its score msp, and of the run of ODIN on
# it. A metric's mean over all epochs that were scored, which is what the paper reports, has this
# behind its name.
TEST_MEASURES = {"ap_msp": "average_precision", "test_accuracy": "acc"}
ODIN_MEASURES = {"ap_odin": "average_precision"}
LAST_EPOCHS = "_last_epochs"

IMAGES = Table(
    name="images",
    description="One row per image that was read: what it is and what was found in its file.",
    columns=(
        Column("sample_id", pa.string(), "Stable id, such as `cifar10/train/airplane/0000`"),
        Column("dataset", pa.string(), "Data set, such as `cifar10`"),
        Column("source", pa.string(), "Source it was read from, such as `cifar10.train`"),
        Column("class", pa.string(), "Class; for ImageNet the wnid"),
        Column("class_name", pa.string(), "Name of a wnid, where known", nullable=True),
        Column(
            "split",
            pa.string(),
            "Official split, if the source says; ILSVRC's val is test",
            nullable=True,
            allowed=SPLIT_NAMES,
        ),
        Column("file", pa.string(), "Raw file, relative to the source folder or archive"),
        Column(
            "row", pa.int32(), "0-based row in a file of many; else null", nullable=True, minimum=0
        ),
        Column("width", pa.int32(), "Width of the raw image", unit="pixel", minimum=1),
        Column("height", pa.int32(), "Height of the raw image", unit="pixel", minimum=1),
        Column("format", pa.string(), "What the file really is, such as `jpeg` or `cifar10`"),
        Column("mode", pa.string(), "Channels of the raw image, such as RGB, L or CMYK"),
        Column(
            "converted",
            pa.string(),
            "What had to be converted to get 8-bit RGB; null if nothing had",
            nullable=True,
        ),
        Column("digest", pa.string(), "SHA-256 of the raw file, or of the row's pixels"),
    ),
    key=("sample_id",),
    version=2,
)

PICTURES = Table(
    name="pictures",
    description="Every image as 8-bit RGB of its final size, encoded: all that training reads.",
    columns=(
        Column("sample_id", pa.string(), "Image"),
        Column("width", pa.int32(), "Width", unit="pixel", minimum=1),
        Column("height", pa.int32(), "Height", unit="pixel", minimum=1),
        Column("encoding", pa.string(), "How `data` is encoded", allowed=ENCODINGS),
        Column("data", pa.binary(), "The encoded picture"),
    ),
    key=("sample_id",),
    references=(Reference(("sample_id",), "images", ("sample_id",)),),
    version=2,
    row_group_rows=1024,
)

THUMBNAILS = Table(
    name="thumbnails",
    description="Every picture once more, small, to look at: galleries need not read `pictures`.",
    columns=(
        Column("sample_id", pa.string(), "Image"),
        Column("width", pa.int32(), "Width", unit="pixel", minimum=1),
        Column("height", pa.int32(), "Height", unit="pixel", minimum=1),
        Column("data", pa.binary(), "The thumbnail, a JPEG"),
    ),
    key=("sample_id",),
    references=(Reference(("sample_id",), "images", ("sample_id",)),),
    version=2,
    row_group_rows=8192,
)

TABLES = (IMAGES, PICTURES, THUMBNAILS)


class PictureSettings(Settings):
    """Raw images to pictures of one size."""

    side: int = Field(256, ge=8)
    """Side of a picture: the shorter side is scaled to it, the middle is kept."""
    keep: tuple[str, ...] = ("cifar10", "stl10")
    """Data sets whose images keep the size that they have."""
    encoding: Literal["auto", "png", "jpeg"] = "auto"
    """png loses nothing, jpeg is smaller; auto: png where the size is kept, else jpeg."""
    quality: int = Field(95, ge=1, le=100)
    """Quality of jpeg."""
    thumbnail: int = Field(64, ge=8)
    """Longer side of a thumbnail; smaller pictures keep their size."""
    max_pixels: int = Field(1 << 26, ge=1)
    """An image whose header declares more is refused."""
    max_file_bytes: int = Field(1 << 29, ge=1)
    """A raw file that is larger is refused."""
    seconds_per_image: float = Field(30, gt=0)
    """A decoder that needs longer is killed."""
    memory_bytes: int = Field(2 << 30, ge=1 << 28)
    """Memory of the process that decodes."""


class TrialSettings(Settings):
    """How images are put into the splits of trials."""

    validation: Literal["none", "paper"] = "none"
    """paper: take data_batch_5 of CIFAR-10, else `validation_share`, out of train (for lambda)."""
    validation_share: float = Field(0.2, gt=0, lt=1)
    """Share of the training images of each class."""
    test_share: float = Field(0.2, gt=0, lt=1)
    """Share of each class that is test where a data set has no splits of its own."""
    seed: int = Field(0, ge=0)
    """Seed of these draws."""


MODALITIES = ("image",)
"""Kinds of samples that models can be fitted on."""


class Config(RunChoices):
    """Semantic anomalies: is this picture of the class that was left out?"""

    source: dict[str, Path] = Field(min_length=1)
    """NAME=folder or archive, repeatable: cifar10, stl10, imagenet, NAME.PART, or a new NAME."""
    lake: Path | None = None
    """Lake: a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)."""
    subset_file: Path | None = None
    """YAML of subsets of your own: names, data sets and members."""
    subsets: tuple[str, ...] = ()
    """Subsets by name (default: all that have images of two members or more)."""
    known: str | None = None
    """Data set or subset whose classes are all known, while data sets of `novel` are novel."""
    novel: tuple[str, ...] = ()
    """Data sets that are novel as a whole against `known`, a trial each."""
    known_side: int | None = Field(None, ge=8)
    """Side of the pictures of these trials, by Pillow's bicubic (default: that of `known`)."""
    imagenet_classes: Literal["members", "all"] = "members"
    """members: of ImageNet only the classes that a subset names are read, unless it is novel."""
    pictures: PictureSettings = PictureSettings()
    trials: TrialSettings = TrialSettings()
    seeds: Seeds = Field((0,), min_length=1)
    """One run for each; the paper has three."""
    trivial_baseline: bool = True
    """Make the model pixel_gaussian for every trial, whatever models and protocols are named."""
    max_reject_share: float = Field(0.25, ge=0, le=1)
    """Share of images that may go to quarantine before the build stops."""

    @model_validator(mode="after")
    def _names_of_sources(self) -> Self:
        for name in self.source:
            if not name.partition(".")[0] or "/" in name:
                raise ValueError(f"source {name!r}: expected a NAME or NAME.PART without /")
        return self

    @model_validator(mode="after")
    def _known_and_novel(self) -> Self:
        if (self.known is None) != (not self.novel):
            raise ValueError("known and novel go together: name a known set and novel ones")
        if self.known_side is not None and self.known is None:
            raise ValueError("known_side is that of the trials of known and novel; name these")
        datasets = {name.partition(".")[0] for name in self.source}
        for name in self.novel:
            if name not in datasets:
                names = ", ".join(sorted(datasets))
                raise ValueError(f"novel set {name!r} is no source; there are {names}")
        if self.known in self.novel:
            raise ValueError(f"{self.known!r} cannot be both known and novel")
        return self

    @classmethod
    def demo(cls, sample: Path) -> "Config":
        """The configuration of `make demo`."""
        kinds = ("cifar10", "stl10", "imagenet")
        return cls(
            source={kind: sample / kind for kind in kinds},
            models={
                "backbone": {"side": 96},
                "classifier": {"epochs": 2, "evaluations": 2},
                "pixel_gaussian": {},
            },
            scores={name: {} for name in ("own", "msp", "energy", "knn", "mahalanobis")},
            protocols=("cifar10/cat", "cifar10/ship"),
            trivial_baseline=False,
            seeds=(0, 1, 2),
        )
