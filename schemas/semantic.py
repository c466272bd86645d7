"""Semantic anomalies: its tables and the settings of its stages.

An image is named `<data set>/<path without suffix>`, or `<data set>/<file>/<row>` where one file
holds many (CIFAR-10 batches, STL-10).
"""

from pathlib import Path
from typing import Annotated, Literal, Self

import polars as pl
import pyarrow as pa
from pydantic import AfterValidator, Field, model_validator

from schemas.config import Settings
from schemas.older_tables import OLDER
from schemas.table import Column, Reference, Rule, Table
from schemas.tables import SPLIT_NAMES

# One run each: a seed that is named twice counts once.
Seeds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    AfterValidator(lambda seeds: tuple(dict.fromkeys(seeds))),
]
ROLES = ("normal", "anomaly")
ENCODINGS = ("png", "jpeg")

# What epochs measure on test: the detector and metric that it is. A metric's mean over all epochs
# that were scored, which is what the paper reports, has this behind its name.
TEST_MEASURES = {
    "ap_msp": ("msp", "average_precision"),
    "ap_odin": ("odin", "average_precision"),
    "test_accuracy": ("msp", "acc"),
}
LAST_EPOCHS = "_last_epochs"

IMAGES = Table(
    name="images",
    description="One row per image that was read: what it is and what was found in its file.",
    columns=(
        Column("image_id", pa.string(), "Stable id, such as `cifar10/train/airplane/0000`"),
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
    key=("image_id",),
)

PICTURES = Table(
    name="pictures",
    description="Every image as 8-bit RGB of its final size, encoded: all that training reads.",
    columns=(
        Column("image_id", pa.string(), "Image"),
        Column("width", pa.int32(), "Width", unit="pixel", minimum=1),
        Column("height", pa.int32(), "Height", unit="pixel", minimum=1),
        Column("encoding", pa.string(), "How `data` is encoded", allowed=ENCODINGS),
        Column("data", pa.binary(), "The encoded picture"),
    ),
    key=("image_id",),
    references=(Reference(("image_id",), "images", ("image_id",)),),
    row_group_rows=1024,
)

THUMBNAILS = Table(
    name="thumbnails",
    description="Every picture once more, small, to look at: galleries need not read `pictures`.",
    columns=(
        Column("image_id", pa.string(), "Image"),
        Column("width", pa.int32(), "Width", unit="pixel", minimum=1),
        Column("height", pa.int32(), "Height", unit="pixel", minimum=1),
        Column("data", pa.binary(), "The thumbnail, a JPEG"),
    ),
    key=("image_id",),
    references=(Reference(("image_id",), "images", ("image_id",)),),
    row_group_rows=8192,
)

TRIALS = Table(
    name="trials",
    description="Which image serves how when one member of a subset is held out as the anomaly.",
    columns=(
        Column("subset", pa.string(), "Set of classes, such as `cifar10` or `dog`"),
        Column("trial", pa.string(), "Name of the member that is held out"),
        Column("split", pa.string(), "Split in this trial", allowed=SPLIT_NAMES),
        Column("image_id", pa.string(), "Image"),
        Column("class", pa.string(), "Its class"),
        Column(
            "label",
            pa.int32(),
            "Place of its class among those not held out; null if held out",
            nullable=True,
            minimum=0,
        ),
        Column("role", pa.string(), "Anomaly: of the held-out member", allowed=ROLES),
    ),
    key=("subset", "trial", "split", "image_id"),
    rules=(
        Rule(
            "label_of_normal",
            (pl.col("role") == "normal") == pl.col("label").is_not_null(),
            "normal images have a label, anomalies have none",
        ),
        Rule(
            "train_is_normal",
            (pl.col("split") != "train") | (pl.col("role") == "normal"),
            "the held-out member must not be trained on",
        ),
    ),
)

OUTPUTS = Table(
    name="outputs",
    description="What one forward pass left of each picture: logits, features and ODIN's score.",
    columns=(
        Column("subset", pa.string(), "Set of classes"),
        Column("trial", pa.string(), "Name of the member that was held out"),
        Column("network", pa.string(), "Network, such as `cifar`"),
        Column("auxiliary", pa.string(), "Auxiliary task, a file of tasks/semantic/auxiliary"),
        Column("seed", pa.int32(), "Seed of training"),
        Column("split", pa.string(), "Split in this trial", allowed=SPLIT_NAMES),
        Column("image_id", pa.string(), "Image"),
        Column("class", pa.string(), "Its class"),
        Column(
            "label", pa.int32(), "Place among the trained classes; null if held out", nullable=True
        ),
        Column("logits", pa.list_(pa.float32()), "One per trained class"),
        Column("features", pa.list_(pa.float32()), "Penultimate features"),
        Column(
            "odin",
            pa.float64(),
            "ODIN after its step on the input, higher = more novel; null in train",
            nullable=True,
        ),
    ),
    key=("subset", "trial", "network", "auxiliary", "seed", "split", "image_id"),
)

TABLES = (IMAGES, PICTURES, THUMBNAILS, TRIALS, OUTPUTS, *OLDER)


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


class GaussianSettings(Settings):
    """The trivial baseline: one Gaussian over the pixels of each channel."""

    side: int = Field(32, ge=2)
    """Larger pictures are shrunk to it, and halved further until there are images enough."""


class OdinChoice(Settings):
    """ODIN's step on the input, where it is not the preset's."""

    temperature: float | None = Field(None, gt=0)
    """Divisor of the logits (paper: 1000)."""
    epsilon: float | None = Field(None, ge=0)
    """Length of the step (paper: 5e-5)."""
    space: Literal["pixel255", "pixel1", "normalised"] | None = None
    """What the step is measured in: pixels of 0-255, pixels of 0-1, or normalised values."""
    whole_picture: bool = False
    """Score the picture before its middle is cut out, as the released code of CPC does."""


class DetectionChoice(Settings):
    """Classifiers trained on the classes that are not held out, with and without a second task."""

    auxiliary: tuple[str, ...] = ()
    """Tasks learnt beside the classes: none, rotation, rotation_released, cpc, ... or all."""
    subsets: tuple[str, ...] = ()
    """Subsets to train on (default: every one that has trials)."""
    trials: tuple[str, ...] = ()
    """Members to hold out, as `cat` or `cifar10/cat` (default: each of a subset in turn)."""
    network: Literal["auto", "cifar", "stl", "imagenet"] = "auto"
    """auto: by the side of the pictures, cifar up to 48, stl up to 128, imagenet beyond."""
    preset: Literal["paper", "small"] = "small"
    """Named settings of network and training."""
    epochs: int | None = Field(None, ge=1)
    """Epochs, where they are not the preset's."""
    auxiliary_weight: float | None = Field(None, gt=0)
    """Weight of the second task (the paper's lambda), where it is not the preset's."""
    evaluations: int | None = Field(None, ge=1)
    """Last epochs after which test is scored; the paper reports the mean over them."""
    odin: OdinChoice = OdinChoice()
    scores: tuple[str, ...] = ("all",)
    """Post-hoc scores by the names of their files in tasks/scores, or all that apply."""
    seeds: Seeds = (0, 1, 2)
    """Seeds of training, one network each; the paper has three."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    threads: int = Field(1, ge=1)
    """CPU threads of each network; as many networks as there are cores are trained at once."""


class Config(Settings):
    """Semantic anomalies: image sets to hold-out-class trials, baseline and networks on them."""

    source: dict[str, Path] = Field(min_length=1)
    """NAME=folder or archive, repeatable: cifar10, stl10, imagenet, NAME.PART, or a new NAME."""
    lake: Path | None = None
    """Lake: a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)."""
    subset_file: Path | None = None
    """YAML of subsets of your own: names, data sets and members."""
    subsets: tuple[str, ...] = ()
    """Subsets by name (default: all that have images of two members or more)."""
    imagenet_classes: Literal["members", "all"] = "members"
    """members: of ImageNet only the classes that a subset names are read."""
    pictures: PictureSettings = PictureSettings()
    trials: TrialSettings = TrialSettings()
    seeds: Seeds = (0, 1, 2)
    """Seeds of the baseline, one run of each trial with each."""
    trivial_baseline: bool = True
    """Score every trial with the trivial baseline."""
    gaussian: GaussianSettings = GaussianSettings()
    detection: DetectionChoice = DetectionChoice()
    max_reject_share: float = Field(0.25, ge=0, le=1)
    """Share of images that may go to quarantine before the build stops."""

    @model_validator(mode="after")
    def _names_of_sources(self) -> Self:
        for name in self.source:
            if not name.partition(".")[0] or "/" in name:
                raise ValueError(f"source {name!r}: expected a NAME or NAME.PART without /")
        return self

    @classmethod
    def demo(cls, sample: Path) -> "Config":
        """The configuration of `make demo`."""
        kinds = ("cifar10", "stl10", "imagenet")
        detection = DetectionChoice(
            auxiliary=("none", "rotation"),
            subsets=("cifar10",),
            trials=("cat",),
            epochs=2,
            evaluations=2,
            seeds=(0, 1),
        )
        return cls(source={kind: sample / kind for kind in kinds}, detection=detection)
