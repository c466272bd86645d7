"""KOWL-718: its tables and the configuration of its flow.

A clip is named `{youtube_id}_{start:06}_{end:06}`, as in the release.
"""

from datetime import date
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pydantic import Field, model_validator

from schemas.config import Settings
from schemas.increments import IncrementSettings
from schemas.table import Column, Table

Split = Literal["train", "validate", "test"]
SPLITS: tuple[Split, ...] = ("train", "validate", "test")
_CLIP = (
    Column("youtube_id", pa.string(), "Video"),
    Column("time_start", pa.int32(), "First second of the clip", unit="second", minimum=0),
    Column("time_end", pa.int32(), "Last second of the clip", unit="second", minimum=0),
)

LISTINGS = Table(
    name="listings",
    description="Every line of every release's lists, with the snapshot it was read from.",
    columns=(
        Column("release", pa.string(), "Release, such as `kinetics600`"),
        Column("split", pa.string(), "Split in that release", allowed=SPLITS),
        *_CLIP,
        Column(
            "label", pa.string(), "Label in that release; null in unlabelled lists", nullable=True
        ),
        Column("snapshot", pa.string(), "SHA-256 of the list file"),
        Column("snapshot_date", pa.date32(), "Day the list was taken, if known", nullable=True),
    ),
    key=("release", "split", "youtube_id", "time_start", "time_end"),
)

CLIPS = Table(
    name="clips",
    description="The unified table: one row per clip over all releases.",
    columns=(
        Column("sample_id", pa.string(), "Stable id `youtubeid_start_end`"),
        *_CLIP,
        Column(
            "label",
            pa.string(),
            "Label by the label rule; null if no list labels it",
            nullable=True,
        ),
        Column("label_release", pa.string(), "Release that the label is from", nullable=True),
        Column("split", pa.string(), "Split by the split rule", allowed=SPLITS),
        Column("release", pa.string(), "Release that the clip belongs to by the split rule"),
    ),
    key=("sample_id",),
)

LABELS = Table(
    name="labels",
    description="Labels of each release and how many clips have them.",
    columns=(
        Column("release", pa.string(), "Release"),
        Column("label", pa.string(), "Label"),
        Column("clips", pa.int64(), "Clips with it", minimum=1),
    ),
    key=("release", "label"),
)

LABEL_CHANGES = Table(
    name="label_changes",
    description="Labels under which the same clips stand in two releases.",
    columns=(
        Column("older", pa.string(), "Earlier release"),
        Column("newer", pa.string(), "Later release"),
        Column("label_older", pa.string(), "Label in the earlier one"),
        Column("label_newer", pa.string(), "Label in the later one"),
        Column("clips", pa.int64(), "Clips with both", minimum=1),
    ),
    key=("older", "newer", "label_older", "label_newer"),
)

INCREMENTS = Table(
    name="increments",
    description="The open-world protocol: the increment in which each clip is released.",
    columns=(
        Column("sample_id", pa.string(), "Clip"),
        *_CLIP,
        Column("label", pa.string(), "Label"),
        Column("split", pa.string(), "Split", allowed=SPLITS),
        Column("increment", pa.int32(), "Increment; 0 is the first release", minimum=0),
        Column(
            "role",
            pa.string(),
            "Label known before the increment or new",
            allowed=("known", "novel"),
        ),
    ),
    key=("sample_id",),
)

CLASSES = Table(
    name="classes",
    description="The increment in which each label first appears in training.",
    columns=(
        Column("label", pa.string(), "Label"),
        Column("increment_introduced", pa.int32(), "Its first increment", minimum=0),
        Column(
            "train_samples",
            pa.int64(),
            "Training clips of the release that introduces it",
            minimum=0,
        ),
    ),
    key=("label",),
)

UNASSIGNED = Table(
    name="unassigned",
    description="Clips of the unified table that are in no increment, and why.",
    columns=(
        Column("sample_id", pa.string(), "Clip"),
        Column("label", pa.string(), "Label", nullable=True),
        Column("split", pa.string(), "Split", allowed=SPLITS),
        Column("reason", pa.string(), "Why it is in no increment"),
    ),
    key=("sample_id",),
)

STATUSES = (
    "ok",
    "missing",
    "zero_byte",
    "not_video",
    "truncated",
    "audio_only",
    "short",
    "frame_count_lie",
    "timeout",
    "crash",
)
USABLE = ("ok", "frame_count_lie")
"""Statuses of videos that features may be taken from."""

VIDEOS = Table(
    name="videos",
    description="One row per clip: its file, and what was found by decoding the file to its end.",
    columns=(
        Column("sample_id", pa.string(), "Clip `youtube_id_start_end`"),
        Column("file", pa.string(), "Raw file; null if there is none", nullable=True),
        Column(
            "status",
            pa.string(),
            "What the file is worth: `truncated` ends long before its header says, or before its "
            "first frame; `frame_count_lie` decodes whole, but its header counts otherwise",
            allowed=STATUSES,
        ),
        Column(
            "decoder",
            pa.string(),
            "First decoder that gives exactly `frames` frames; null if none gives any",
            allowed=("decord", "opencv"),
            nullable=True,
        ),
        Column("frames", pa.int32(), "Frames that decode", unit="frame", minimum=0),
        Column(
            "header_frames",
            pa.int32(),
            "Frames that the header announces; 0 if it has no such field, null if not opened",
            unit="frame",
            minimum=0,
            nullable=True,
        ),
        Column(
            "seconds",
            pa.float64(),
            "Duration of what decodes: frames / fps",
            unit="second",
            minimum=0,
            nullable=True,
        ),
        Column(
            "fps", pa.float64(), "Average frame rate", unit="frame/second", minimum=0, nullable=True
        ),
        Column(
            "width",
            pa.int32(),
            "Width of the coded picture, before rotation",
            unit="pixel",
            minimum=1,
            nullable=True,
        ),
        Column(
            "height",
            pa.int32(),
            "Height of the coded picture, before rotation",
            unit="pixel",
            minimum=1,
            nullable=True,
        ),
        Column("codec", pa.string(), "FourCC of the codec, such as `h264`", nullable=True),
        Column(
            "rotation",
            pa.int32(),
            "Clockwise turn that the header asks for",
            unit="degree",
            minimum=0,
            maximum=359,
            nullable=True,
        ),
        Column("bytes", pa.int64(), "Size of the file", unit="byte", minimum=0, nullable=True),
        Column("sha256", pa.string(), "SHA-256 of the file", nullable=True),
        Column(
            "message",
            pa.string(),
            "What the decoders complained about; an `ok` video with one has damaged pictures",
            nullable=True,
        ),
    ),
    key=("sample_id",),
)

TABLES = (LISTINGS, CLIPS, LABELS, LABEL_CHANGES, INCREMENTS, CLASSES, UNASSIGNED, VIDEOS)


class Release(Settings):
    """A dataset release: where its lists are and where it stands among the others."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    """Name used in every table."""
    order: int
    """Position in time; the lowest is increment 0."""
    files: dict[Split, tuple[str, ...]]
    """List files per split, shards in order."""
    snapshot_date: date | None = None
    """Day the lists were taken, if known."""


class UnifySettings(Settings):
    """How releases become one table."""

    label_rule: Literal["recent_first", "oldest_first"] = "recent_first"
    """Which release's label a clip takes."""
    split_rule: Literal["first_come", "most_recent"] = "first_come"
    """Which release, and split of it, a clip belongs to."""
    renames: tuple[str, ...] = ("kinetics400_renames", "football_case")
    """Rename tables, applied in this order to the chosen label."""


class DecodeSettings(Settings):
    """What a decoding process may use."""

    seconds_per_video: float = Field(120, gt=0)
    """Wall-clock limit of each decoder for one video; then the decoder is killed."""
    memory_bytes: int = Field(4 << 30, gt=0)
    """Memory limit of a decoding process."""
    max_archived_bytes: int = Field(1 << 30, gt=0)
    """A larger video inside an archive is quarantined; in a folder there is no limit."""
    workers: int = Field(1, ge=1, exclude=True)
    """Decoding processes of one shard; shards run side by side anyway. Changes no result."""


class VideoSettings(DecodeSettings):
    """When a video counts as good."""

    min_seconds: float = Field(1.0, ge=0)
    """A video that decodes for less is `short`."""
    min_frames: int = Field(8, ge=1)
    """A video with fewer frames is `short`, whatever its frame rate."""
    lie_frames: int = Field(2, ge=0)
    """So many frames less than announced are a wrong header; more are a truncated file ..."""
    lie_share: float = Field(0.05, ge=0, le=1)
    """... unless they are at most this share of the announced ones."""


class SampleSettings(DecodeSettings):
    """Which frames are taken out of a video; the defaults are those of X3D-M in KOWL-718."""

    step: int = Field(5, ge=1)
    """Every so many frames one is taken."""
    count: int = Field(16, ge=1)
    """Frames in a temporal crop."""
    crops: int = Field(4, ge=1)
    """Temporal crops, spread evenly from the first to the last frame; one is the middle."""
    short_side: int = Field(256, ge=1)
    """Length in pixels to which the shorter side is scaled."""
    crop: int = Field(224, ge=1)
    """Side of the square cut out of the centre, in pixels."""

    @model_validator(mode="after")
    def _fits(self) -> "SampleSettings":
        if self.crop > self.short_side:
            raise ValueError(f"crop {self.crop} is larger than short_side {self.short_side}")
        return self


class Config(Settings):
    """KOWL-718: Kinetics lists to one table to open-world increments."""

    lists: Path
    """Folder with the release lists, such as kinetics600_train.csv.gz."""
    lake: Path | None = None
    """Lake folder (default: NOVELTY_LAKE, else ./lake)."""
    videos: Path | None = None
    """Folder or archive of video files: decodes each once (table videos)."""
    releases: tuple[Release, ...] = ()
    """Declared releases (in --config); by default found by their file names."""
    unify: UnifySettings = UnifySettings()
    novel_class_order: Literal["least_frequent_first", "most_frequent_first"] = (
        "least_frequent_first"
    )
    """Order of novel classes: as released (least), or as the paper's text says (most)."""
    group_size: Literal["ceil", "floor"] = "ceil"
    """Novel classes per increment: quotient rounded up (Table 1) or down (the text)."""
    increments: int = Field(5, ge=1, le=10_000)
    """Increments per pool."""
    pooling: Literal["per_release", "one_pool"] = "per_release"
    """Cut each later release alone, or all of them together."""
    seed: int = Field(0, ge=0)
    """Decides which sample goes to which fold."""
    validate_as_test: bool = False
    """Use `validate` as the test of a release without labelled test clips, as the paper does."""
    validation: VideoSettings = VideoSettings()
    max_reject_share: float = Field(0.25, ge=0, le=1)
    """Share of list lines that may go to quarantine before the build stops."""

    def protocol(self) -> IncrementSettings:
        """The part that decides the increments."""
        return IncrementSettings(**{n: getattr(self, n) for n in IncrementSettings.model_fields})

    @classmethod
    def demo(cls, sample: Path) -> "Config":
        """The configuration of `make demo`."""
        return cls(lists=sample / "lists", videos=sample / "videos")
