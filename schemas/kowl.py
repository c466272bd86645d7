"""KOWL-718: its tables and the configuration of its flow.

A clip is named `{youtube_id}_{start:06}_{end:06}`, as in the release. Lists call the validation
split `validate`; every table from the increments on calls it `valid`.
"""

import hashlib
import json
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from schemas.clips import FrameSampling
from schemas.config import Choice, Settings
from schemas.increments import IncrementSettings
from schemas.runs import RunChoices
from schemas.table import Column, Table
from schemas.tables import PHASES, PLAIN, SPLIT_NAMES

Split = Literal["train", "validate", "test"]
LIST_SPLITS: tuple[Split, ...] = ("train", "validate", "test")
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
        Column("split", pa.string(), "Split in that release", allowed=LIST_SPLITS),
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
        Column("split", pa.string(), "Split by the split rule", allowed=LIST_SPLITS),
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

_PROTOCOL = Column("protocol", pa.string(), "Definition of the increments, see `protocols`")

INCREMENTS = Table(
    name="increments",
    description="The open-world protocol: the increment in which each clip is released.",
    columns=(
        _PROTOCOL,
        Column("sample_id", pa.string(), "Clip"),
        *_CLIP,
        Column("label", pa.string(), "Label"),
        Column("split", pa.string(), "Split", allowed=SPLIT_NAMES),
        Column("increment", pa.int32(), "Increment; 0 is the first release", minimum=0),
        Column(
            "role",
            pa.string(),
            "Label known before the increment or new",
            allowed=("known", "novel"),
        ),
    ),
    key=("protocol", "sample_id"),
    version=2,
)

CLASSES = Table(
    name="classes",
    description="The increment in which each label first appears in training.",
    columns=(
        _PROTOCOL,
        Column("label", pa.string(), "Label"),
        Column("increment_introduced", pa.int32(), "Its first increment", minimum=0),
        Column(
            "train_samples",
            pa.int64(),
            "Training clips of the release that introduces it",
            minimum=0,
        ),
    ),
    key=("protocol", "label"),
    version=2,
)

UNASSIGNED = Table(
    name="unassigned",
    description="Clips of the unified table that are in no increment, and why.",
    columns=(
        _PROTOCOL,
        Column("sample_id", pa.string(), "Clip"),
        Column("label", pa.string(), "Label", nullable=True),
        Column("split", pa.string(), "Split", allowed=SPLIT_NAMES),
        Column("reason", pa.string(), "Why it is in no increment"),
    ),
    key=("protocol", "sample_id"),
    version=2,
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

_DECODED = (
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
)

VIDEOS = Table(
    name="videos",
    description="One row per clip: its file, and what was found by decoding the file to its end.",
    columns=(
        Column("sample_id", pa.string(), "Clip `youtube_id_start_end`"),
        Column("file", pa.string(), "Raw file; null if there is none", nullable=True),
        *_DECODED,
    ),
    key=("sample_id",),
)

UNLISTED_VIDEOS = Table(
    name="unlisted_videos",
    description="Video files that belong to no clip of the lists, decoded all the same.",
    columns=(
        Column("file", pa.string(), "Raw file; its `sample_id` in `samples` and `outputs`"),
        Column(
            "label",
            pa.string(),
            "Label by `labels.csv` or `manifest.csv` beside the videos, else the folder's name",
            nullable=True,
        ),
        Column(
            "reason",
            pa.string(),
            "Why it belongs to no clip",
            allowed=("unrecognised_name", "unlisted_clip"),
        ),
        *_DECODED,
    ),
    key=("file",),
)

TRANSFORMS = (
    "color_invert",
    "color_jitter",
    "gaussian_blur",
    "gaussian_noise",
    "perspective",
    "rotation",
    "vertical_flip",
)

_RUN = Column("run_id", pa.string(), "Run of a predictor, see `runs`")
_STEP = Column("step", pa.int32(), "Increment", minimum=0)
_PHASE = Column(
    "phase",
    pa.string(),
    "Before or after the increment's labels were given",
    allowed=PHASES[1:],
)
_SPLIT = Column("split", pa.string(), "Split", allowed=SPLIT_NAMES)
_VIEW = Column(
    "view",
    pa.string(),
    "Visual transform of the clips; `plain` is the clip as it is",
    allowed=(PLAIN, *TRANSFORMS),
)
_SUBSET = (
    Column("grouping", pa.string(), "`all`, or what the AVA key frames of the clip show"),
    Column("subset", pa.string(), "Part of the clips by that grouping; empty for `all`"),
)

CLIP_GROUPS = Table(
    name="clip_groups",
    description="What the AVA key frames inside a clip show; `N/A` where none is annotated.",
    columns=(
        Column("sample_id", pa.string(), "Clip"),
        Column(
            "grouping",
            pa.string(),
            "action_type (PM person movement, OM object manipulation, PI person interaction), "
            "number of actions, number of people, or mean area of the people in thirds",
            allowed=("action_type", "actions", "area", "people"),
        ),
        Column("subset", pa.string(), "Part; a clip may be in several of one grouping"),
    ),
    key=("sample_id", "grouping", "subset"),
    version=2,
)

MEASURES = Table(
    name="measures",
    description="The open-world evaluation: one row per measure of each increment and phase.",
    columns=(
        _RUN,
        _STEP,
        _PHASE,
        Column(
            "scope",
            pa.string(),
            "This increment alone, or all counts after feedback so far",
            allowed=("increment", "cumulative"),
        ),
        _SPLIT,
        _VIEW,
        Column(
            "known_set",
            pa.string(),
            "Known are the labels really given to the predictor, or all released so far",
            allowed=("none", "novel_to_predictor", "novel_to_evaluator"),
        ),
        Column(
            "reduction",
            pa.string(),
            "How labels were merged before measuring",
            allowed=("raw", "classification", "detection", "recognition"),
        ),
        *_SUBSET,
        Column("metric", pa.string(), "accuracy, mcc, nmi, top_k or reaction time"),
        Column("value", pa.float64(), "Its value; null where it is not defined", nullable=True),
        Column("n", pa.int64(), "Samples it was measured on", minimum=0),
    ),
    key=(
        *("run_id", "step", "phase", "scope", "split", "view", "known_set", "reduction"),
        *("grouping", "subset", "metric"),
    ),
    version=2,
)

CONFUSION = Table(
    name="confusion",
    description="Ordered confusion counts, zero ones left out: how often a label came at a rank.",
    columns=(
        _RUN,
        _STEP,
        _PHASE,
        _SPLIT,
        _VIEW,
        *_SUBSET,
        Column("rank", pa.int32(), "1 is the most probable label", minimum=1),
        Column("target", pa.string(), "True label"),
        Column("predicted", pa.string(), "Predicted label; unknown_N was discovered"),
        Column("count", pa.int64(), "Clips", minimum=1),
    ),
    key=(
        *("run_id", "step", "phase", "split", "view", "grouping", "subset"),
        *("rank", "target", "predicted"),
    ),
    version=2,
)

FEEDBACK = Table(
    name="feedback",
    description="Train samples whose label the predictor was given, in the order it asked for.",
    columns=(
        _RUN,
        _STEP,
        Column("position", pa.int32(), "Place in the order", minimum=0),
        Column("sample_id", pa.string(), "Clip"),
    ),
    key=("run_id", "step", "position"),
    version=2,
)

TABLES = (
    LISTINGS,
    CLIPS,
    LABELS,
    LABEL_CHANGES,
    INCREMENTS,
    CLASSES,
    UNASSIGNED,
    VIDEOS,
    UNLISTED_VIDEOS,
    CLIP_GROUPS,
    MEASURES,
    CONFUSION,
    FEEDBACK,
)


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


class Rename(Settings):
    """One line of a rename table."""

    release: str | None = None
    """Only labels that were taken from this release (default: from any)."""
    old: str
    """The label as it is listed."""
    new: str
    """The label that the clip gets."""


class UnifySettings(Settings):
    """How releases become one table."""

    label_rule: Literal["recent_first", "oldest_first"] = "recent_first"
    """Which release's label a clip takes."""
    split_rule: Literal["first_come", "most_recent"] = "first_come"
    """Which release, and split of it, a clip belongs to."""
    renames: tuple[str, ...] = ("kinetics400_renames", "football_case")
    """Rename tables, applied in this order to the chosen label; `none` renames nothing."""
    rename_tables: dict[str, tuple[Rename, ...]] = Field({})
    """Own rename tables by name (in --config), to be named in `renames`."""

    @field_validator("renames", mode="before")
    @classmethod
    def _none_is_none(cls, value: object) -> object:
        return () if value in ("", "none", [""], ["none"], ("",), ("none",)) else value

    @model_validator(mode="after")
    def _tables_are_used(self) -> "UnifySettings":
        unused = sorted(set(self.rename_tables) - set(self.renames))
        if unused:
            raise ValueError(f"rename table {unused[0]} is declared but not named in renames")
        return self


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
    buffer: float = Field(16.0, ge=0, exclude=True)
    """GB of frames that validation keeps on the disk for the models, at most half of what is free;
    a clip that finds no place is decoded a second time. Changes no result."""


class SampleSettings(DecodeSettings, FrameSampling):
    """Which frames are taken out of a video, and what that may use."""


Transform = Literal[
    "plain",
    "color_invert",
    "color_jitter",
    "gaussian_blur",
    "gaussian_noise",
    "perspective",
    "rotation",
    "vertical_flip",
]


class TransformSettings(Settings):
    """Strength of the transforms; defaults as released, where the release tells."""

    brightness: float = Field(0.5, ge=0, le=1)
    """color_jitter: the factor is uniform in 1 - this ... 1 + this."""
    hue: float = Field(0.3, ge=0, le=0.5)
    """color_jitter: the shift is uniform in - this ... this, in turns of the colour wheel."""
    blur_sigma_low: float = Field(0.1, gt=0)
    """gaussian_blur: least standard deviation, in pixels."""
    blur_sigma_high: float = Field(0.2, gt=0)
    """gaussian_blur: largest one. Up to 0.25 no 8-bit value changes; commit 28dbcf6 had 5."""
    blur_width: int = Field(5, ge=1)
    """gaussian_blur: width of the kernel, odd; not published, 5 in commit 28dbcf6."""
    blur_height: int = Field(9, ge=1)
    """gaussian_blur: height of the kernel, odd; not published, 9 in commit 28dbcf6."""
    noise_mean: float = 0.0
    """gaussian_noise: mean, in units of 0 ... 255."""
    noise_std: float = Field(10.0, ge=0)
    """gaussian_noise: standard deviation, in units of 0 ... 255."""
    noise_channels: Literal["shared", "independent"] = "shared"
    """gaussian_noise: one value for a pixel, as released, or one for each of its colours."""
    rotation_low: float = Field(0.0, ge=-360, le=360)
    """rotation: least angle, in degrees counter-clockwise; not published."""
    rotation_high: float = Field(180.0, ge=-360, le=360)
    """rotation: largest angle; not published, 0 ... 180 in a trial script of the release."""
    distortion: float = Field(0.5, ge=0, le=1)
    """perspective: how far corners move in, as a share of half the width and height."""
    fill: Literal["black", "random"] = "black"
    """rotation, perspective: colour outside of the picture; a random one is drawn per clip."""

    @model_validator(mode="after")
    def _makes_sense(self) -> "TransformSettings":
        if self.blur_sigma_low > self.blur_sigma_high:
            raise ValueError("blur_sigma_low is larger than blur_sigma_high")
        if self.rotation_low > self.rotation_high:
            raise ValueError("rotation_low is larger than rotation_high")
        if self.blur_width % 2 == 0 or self.blur_height % 2 == 0:
            raise ValueError("blur_width and blur_height must be odd")
        return self


class FeatureSettings(Settings):
    """How the usable videos are shown to every model."""

    transforms: tuple[Transform, ...] = ("plain",)
    """Visual transforms, each a view of its own in `outputs`; `plain` is the clip as it is."""
    strength: TransformSettings = TransformSettings()
    seed: int = Field(0, ge=0)
    """Seed of the transforms' draws."""


class OpenWorldSettings(Settings):
    """How predictors are led through the increments."""

    feedback: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Shares of an increment's train labels that are given, one run each."""
    top_k: int = Field(5, ge=1)
    """Ranks of the ordered confusion counts."""
    experience_limit: int | None = Field(None, ge=1)
    """Most samples of a split that a predictor keeps, the oldest go first (default: all)."""
    experience_per_label: int | None = Field(None, ge=1)
    """Most labelled samples of a label and split that it keeps."""
    predicted_ranks: int = Field(1, ge=1)
    """Labels of each clip in `predictions`, from the most probable on; at most top_k."""
    threads: int = Field(2, ge=1)
    """CPU threads of torch; they order the sums, so that numbers depend on them."""
    ava: Path | None = Field(None, exclude=True)
    """Folder with AVA-Kinetics lists and their action list (pbtxt), for the ablation by them."""

    @model_validator(mode="after")
    def _ranks_are_counted(self) -> "OpenWorldSettings":
        if self.predicted_ranks > self.top_k:
            raise ValueError(f"predicted_ranks is above top_k, which is {self.top_k}")
        return self


class IncrementChoice(IncrementSettings):
    """The open-world protocol, and what counts as test."""

    validate_as_test: bool = False
    """Use `validate` as the test of a release without labelled test clips, as the paper does."""

    def name(self, sources: dict[str, Any]) -> str:
        """The protocol's name; `sources` says what else defines it and is not as usual."""
        parts = ["kowl", self.novel_class_order, self.group_size, str(self.increments)]
        parts += ["one_pool"] if self.pooling == "one_pool" else []
        parts += ["validate_as_test"] if self.validate_as_test else []
        parts.append(f"seed{self.seed}")
        if sources:
            text = json.dumps(sources, sort_keys=True)
            parts.append(hashlib.sha256(text.encode()).hexdigest()[:8])
        return "-".join(parts)


DEFAULT_MODEL = "frame_backbone"
"""The model whose weights come with a package."""


MODALITIES = ("clip",)
"""Kinds of samples that models can be fitted on."""


class Config(RunChoices):
    """KOWL-718: which actions are new as the years go by, and can they be learned on the way?"""

    unasked: ClassVar[dict[str, list[str]]] = {"models": [DEFAULT_MODEL]}
    """Plug-ins that are used, and can be set up, where none is named."""
    lists: Path
    """Folder with the release lists, such as kinetics600_train.csv.gz."""
    lake: Path | None = None
    """Lake: a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)."""
    videos: Path | None = None
    """Folder or archive of video files: decodes each once (table videos)."""
    models: Choice = Field({})
    """Frozen models of clips by name, or all with weights; `none` decodes videos and makes no
    features (default where videos are given: frame_backbone)."""
    releases: tuple[Release, ...] = ()
    """Declared releases (in --config); by default found by their file names."""
    snapshot_date: date | None = None
    """Day the lists were taken, such as 2021-03-31, for releases that declare none."""
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
    features: FeatureSettings = FeatureSettings()
    evaluation: OpenWorldSettings = OpenWorldSettings()
    max_reject_share: float = Field(0.25, ge=0, le=1)
    """Share of list lines that may go to quarantine before the build stops."""

    def increment_choice(self) -> "IncrementChoice":
        """The part that decides the increments."""
        return IncrementChoice(**{n: getattr(self, n) for n in IncrementChoice.model_fields})

    @classmethod
    def demo(cls, sample: Path) -> "Config":
        """The configuration of `make demo`."""
        return cls(
            lists=sample / "lists",
            videos=sample / "videos",
            models={"frame_backbone": {"crops": 2, "cpu_threads": 1}},
            predictors={"ann": {}, "gmm_finch": {}},
            evaluation=OpenWorldSettings(feedback=(0.0,), threads=1),
            scores={name: {} for name in ("cosine", "knn", "mahalanobis")},
            seeds=(0, 1, 2),
        )

    @model_validator(mode="after")
    def _releases_are_in_order(self) -> "Config":
        names = {release.name for release in self.releases}
        orders = {release.order for release in self.releases}
        if min(len(names), len(orders)) < len(self.releases):
            raise ValueError("two releases have one name or one order; give each its own")
        return self

    @model_validator(mode="before")
    @classmethod
    def _videos_have_features(cls, values: Any) -> Any:
        """Of videos features are made unless `models` says otherwise; `none` makes none."""
        if not isinstance(values, dict):
            return values
        default = [] if values.get("videos") is None else cls.unasked["models"]
        models = values.get("models", default)
        none = models in ("none", ["none"], ("none",)) or models == {"none": {}}
        return {**values, "models": {} if none else models}

    @model_validator(mode="after")
    def _needs_are_there(self) -> "Config":
        if self.models and self.videos is None:
            raise ValueError("models need videos: name their folder with --videos")
        if self.predictors and not self.models:
            raise ValueError(
                "predictors need features: name videos and a model, such as --models frame_backbone"
            )
        if self.networks:
            raise ValueError("networks: no model of clips takes one; leave it out")
        return self
