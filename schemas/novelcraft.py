"""NovelCraft: its tables and the configuration of its flow.

A frame is named `class/episode/frame` (NovelCraft+: `normal/normal_3/12/40`), as in the release. It
is a sample: `frame_id` here is `sample_id` in the shared tables.
"""

from pathlib import Path
from typing import Literal

import polars as pl
import pyarrow as pa
from pydantic import Field

from schemas.config import Settings
from schemas.runs import RunChoices
from schemas.table import Column, Reference, Table
from schemas.tables import SPLIT_NAMES

ROLES = ("normal", "novel_valid", "novel_test")

_EPISODE = (
    Column("class", pa.string(), "Class folder, such as `normal` or `item_tnt`"),
    Column("subset", pa.string(), "NovelCraft+ folder, such as `normal_3`; else empty"),
    Column("episode", pa.int32(), "Number of the episode in its folder", minimum=0),
)
_FRAME = (
    Column("frame_id", pa.string(), "Stable id `class/episode/frame`"),
    *_EPISODE,
    Column("frame", pa.int32(), "Number of the frame as in the file name", minimum=0),
)
_FRAME_KEY = ("class", "subset", "episode", "frame")
_IN_FRAMES = (Reference(("frame_id",), "frames", ("frame_id",)),)

EPISODES = Table(
    name="episodes",
    description="One row per game episode.",
    columns=(
        Column("episode_id", pa.string(), "Stable id `class/episode`"),
        *_EPISODE,
        Column("frames", pa.int32(), "Frames that were read", unit="frame", minimum=0),
        Column("first_frame", pa.int32(), "Number of the first frame", minimum=0),
        Column("last_frame", pa.int32(), "Number of the last frame", minimum=0),
        Column("goal_achieved", pa.bool_(), "Whether the goal was reached", nullable=True),
        Column("novel_item", pa.string(), "Item named by novelty_description.json", nullable=True),
    ),
    key=("class", "subset", "episode"),
)

FRAMES = Table(
    name="frames",
    description="One row per frame: its picture and the agent's pose and situation.",
    columns=(
        *_FRAME,
        Column("episode_id", pa.string(), "Episode"),
        Column("position", pa.int32(), "0-based place of the frame in its episode", minimum=0),
        Column("suspect_last", pa.bool_(), "Game over: the picture may show the next game already"),
        Column("width", pa.int32(), "Picture width", unit="pixel", minimum=1),
        Column("height", pa.int32(), "Picture height", unit="pixel", minimum=1),
        Column("image_sha256", pa.string(), "SHA-256 of the PNG file"),
        Column("state_sha256", pa.string(), "SHA-256 of the JSON file"),
        Column("x", pa.int32(), "Agent, x", unit="block"),
        Column("y", pa.int32(), "Agent, height", unit="block"),
        Column("z", pa.int32(), "Agent, z", unit="block"),
        Column("yaw", pa.float64(), "0 = south, 90 = west", unit="degree", minimum=0, maximum=360),
        Column(
            "pitch", pa.float64(), "Positive looks down", unit="degree", minimum=-90, maximum=90
        ),
        Column("facing", pa.string(), "Compass direction as the game rounds it", nullable=True),
        Column("block_in_front", pa.string(), "Block in front of the agent"),
        Column("selected_item", pa.string(), "Item in hand; empty for none", nullable=True),
        Column("goal_type", pa.string(), "Kind of goal", nullable=True),
        Column("goal_achieved", pa.bool_(), "Whether the goal is reached", nullable=True),
        Column("command", pa.string(), "Last command", nullable=True),
        Column("command_argument", pa.string(), "Its argument", nullable=True),
        Column("command_result", pa.string(), "Its result", nullable=True),
        Column("step", pa.int64(), "Game step"),
        Column("game_over", pa.bool_(), "Whether the game has ended", nullable=True),
    ),
    key=_FRAME_KEY,
    row_group_by="episode_id",
)

IMAGES = Table(
    name="images",
    description="The PNG file of each frame, byte for byte, so that training needs no loose files.",
    columns=(*_FRAME, Column("png", pa.binary(), "PNG file")),
    key=_FRAME_KEY,
    references=_IN_FRAMES,
    row_group_by="episode",
)

BLOCKS = Table(
    name="blocks",
    description="Blocks that are not air, as spans: one row while a block stands unchanged.",
    columns=(
        *_EPISODE,
        Column("x", pa.int32(), "Block centre, x", unit="block"),
        Column("y", pa.int32(), "Block centre, height", unit="block"),
        Column("z", pa.int32(), "Block centre, z", unit="block"),
        Column(
            "from_position",
            pa.int32(),
            "Place in the episode of the first frame with it",
            minimum=0,
        ),
        Column(
            "to_position", pa.int32(), "Place in the episode of the last frame with it", minimum=0
        ),
        Column("block", pa.string(), "Block name, with `_var_<variant>` unless default"),
    ),
    key=("class", "subset", "episode", "x", "y", "z", "from_position"),
)

ENTITIES = Table(
    name="entities",
    description="Entities other than the agent, frame by frame.",
    columns=(
        *_FRAME,
        Column("entity_id", pa.string(), "Id of the entity in the game"),
        Column("type", pa.string(), "EntityTrader, EntityPogoist, EntityItem, …"),
        Column("name", pa.string(), "Name"),
        Column("x", pa.int32(), "x", unit="block"),
        Column("y", pa.int32(), "Height", unit="block"),
        Column("z", pa.int32(), "z", unit="block"),
        Column("color", pa.string(), "Colour, in newer builds of the game", nullable=True),
    ),
    key=(*_FRAME_KEY, "entity_id"),
    references=_IN_FRAMES,
)

INVENTORY = Table(
    name="inventory",
    description="What the agent carries, one row per slot in use and frame.",
    columns=(
        *_FRAME,
        Column("slot", pa.int32(), "Slot number", minimum=0),
        Column("item", pa.string(), "Item name"),
        Column("count", pa.int32(), "How many", minimum=0),
        Column("variant", pa.string(), "Variant, such as `oak`", nullable=True),
        Column("selected", pa.bool_(), "Whether this slot is in the hand"),
    ),
    key=(*_FRAME_KEY, "slot"),
    references=_IN_FRAMES,
)

TARGETS = Table(
    name="targets",
    description="Novel fraction of every frame: the label that the benchmark is about.",
    columns=(
        *_FRAME,
        Column(
            "novel_fraction",
            pa.float64(),
            "Share of pixels that show novelty",
            minimum=0,
            maximum=1,
        ),
        Column("novel_pixels", pa.int32(), "Number of such pixels", unit="pixel", minimum=0),
        Column(
            "renderer",
            pa.string(),
            "Where it comes from",
            allowed=("raycast", "blender", "official"),
        ),
        Column(
            "rotation",
            pa.string(),
            "Camera rotation rule",
            allowed=("published", "corrected"),
        ),
    ),
    key=_FRAME_KEY,
)

MASKS = Table(
    name="masks",
    description="Novel pixels of each frame that has any, in COCO's uncompressed run lengths.",
    columns=(
        *_FRAME,
        Column("height", pa.int32(), "Rows of the mask", unit="pixel"),
        Column("width", pa.int32(), "Columns of the mask", unit="pixel"),
        Column(
            "runs",
            pa.list_(pa.int32()),
            "Lengths of alternating runs down the columns, the first of pixels that are not novel",
            unit="pixel",
        ),
    ),
    key=_FRAME_KEY,
    references=(Reference(("frame_id",), "targets", ("frame_id",)),),
)

TARGET_LABELS = Table(
    name="target_labels",
    description="Novel pixels of each frame by kind of object. A pixel may count for several.",
    columns=(
        *_FRAME,
        Column("label", pa.string(), "Block or entity name"),
        Column("pixels", pa.int32(), "Visible pixels", unit="pixel", minimum=1),
    ),
    key=(*_FRAME_KEY, "label"),
    references=(Reference(("frame_id",), "targets", ("frame_id",)),),
)

NOVEL_OBJECTS = Table(
    name="novel_objects",
    description="Every visible novel object with its bounding box. Pixels may count for several.",
    columns=(
        *_FRAME,
        Column("object", pa.int32(), "Number of the object in the frame", minimum=0),
        Column("label", pa.string(), "Block or entity name"),
        Column("x0", pa.int32(), "Left edge, inclusive", unit="pixel", minimum=0),
        Column("y0", pa.int32(), "Top edge, inclusive", unit="pixel", minimum=0),
        Column("x1", pa.int32(), "Right edge, exclusive", unit="pixel", minimum=0),
        Column("y1", pa.int32(), "Bottom edge, exclusive", unit="pixel", minimum=0),
        Column("pixels", pa.int32(), "Visible pixels", unit="pixel", minimum=0),
    ),
    key=(*_FRAME_KEY, "object"),
    references=(Reference(("frame_id",), "targets", ("frame_id",)),),
)

MASK_CHECKS = Table(
    name="mask_checks",
    description="A sample of frames with novelty in view: our mask against Blender's.",
    columns=(
        *_FRAME,
        Column("pixels", pa.int32(), "Novel pixels of our mask", unit="pixel", minimum=0),
        Column("blender_pixels", pa.int32(), "Those of Blender's", unit="pixel", minimum=0),
        Column("differing_pixels", pa.int32(), "Pixels of one mask only", unit="pixel", minimum=0),
        Column("iou", pa.float64(), "Intersection over union", minimum=0, maximum=1),
        Column("blender", pa.string(), "Version of Blender"),
        Column("height", pa.int32(), "Rows of the masks", unit="pixel"),
        Column("width", pa.int32(), "Columns of the masks", unit="pixel"),
        Column(
            "differing_runs",
            pa.list_(pa.int32()),
            "The differing pixels as run lengths, as in `masks`",
            unit="pixel",
        ),
    ),
    key=_FRAME_KEY,
)

SCENE_MAPS = Table(
    name="scene_maps",
    description="Semantic segmentation and depth of each frame, one ray a pixel (on request).",
    columns=(
        *_FRAME,
        Column("height", pa.int32(), "Rows", unit="pixel"),
        Column("width", pa.int32(), "Columns", unit="pixel"),
        Column("labels", pa.list_(pa.string()), "Names that the segmentation's numbers index"),
        Column(
            "segmentation",
            pa.list_(pa.int16()),
            "Index into `labels` for each pixel, row by row; -1 for nothing",
        ),
        Column(
            "depth",
            pa.list_(pa.float32()),
            "Depth of each pixel; infinite for nothing",
            unit="block",
        ),
    ),
    key=_FRAME_KEY,
    references=(Reference(("frame_id",), "targets", ("frame_id",)),),
    row_group_rows=64,
)

FRAME_ROLES = Table(
    name="frame_roles",
    description="Role, split and filter flag of every frame (the 1 % rule and the 100-split rule).",
    columns=(
        Column("frame_id", pa.string(), "Frame"),
        Column("episode_id", pa.string(), "Episode"),
        Column("class", pa.string(), "Class folder"),
        Column("role", pa.string(), "What the class is for", allowed=ROLES, nullable=True),
        Column("split", pa.string(), "Split; null if in none", allowed=SPLIT_NAMES, nullable=True),
        Column("kept", pa.bool_(), "Whether the frame passes the novel-fraction filter"),
    ),
    key=("frame_id",),
)

WINDOWS = Table(
    name="windows",
    description="Windows of frames for the symbolic task.",
    columns=(
        Column("sample_id", pa.string(), "Sample `mode/context/window_id`"),
        Column(
            "mode",
            pa.string(),
            "How windows follow each other",
            allowed=("non_overlapping", "stride_1"),
        ),
        Column(
            "context", pa.int32(), "Order K of the autoregressive model", unit="frame", minimum=1
        ),
        Column("window_id", pa.string(), "Stable id `class/episode_index`"),
        Column("episode_id", pa.string(), "Episode"),
        Column("class", pa.string(), "Class folder"),
        Column("start", pa.int32(), "First place in the episode, inclusive", minimum=0),
        Column("stop", pa.int32(), "Last place in the episode, exclusive", minimum=0),
        Column("first_frame_id", pa.string(), "First frame"),
        Column("last_frame_id", pa.string(), "Last frame"),
        Column("novel", pa.bool_(), "Whether the episode is one of a novel game"),
    ),
    key=("mode", "context", "window_id"),
    version=2,
    upgrades={
        1: lambda rows: rows.with_columns(
            pl.format("{}/{}/{}", "mode", "context", "window_id").alias("sample_id")
        )
    },
)

DISCOVERY = Table(
    name="discovery",
    description="Clusters that category discovery put the validation frames in.",
    columns=(
        Column("run_id", pa.string(), "Run, see `runs`"),
        Column("sample_id", pa.string(), "Frame"),
        Column("class", pa.string(), "Its true class"),
        Column("cluster", pa.int32(), "Its cluster", minimum=0),
        Column("matched", pa.string(), "Class that the cluster is matched with", nullable=True),
    ),
    key=("run_id", "sample_id"),
    version=2,
)

CALIBRATION = Table(
    name="calibration",
    description="Camera search: agreement of rendered and hand-made masks for every camera tried.",
    columns=(
        Column("grid", pa.string(), "Grid, from coarse to fine"),
        Column("fov", pa.float64(), "Field of view", unit="degree"),
        Column(
            "eye_height", pa.float64(), "Eye above the block that the agent stands in", unit="block"
        ),
        Column("frame", pa.string(), "Frame with a hand-made mask"),
        Column("iou", pa.float64(), "Intersection over union of the masks", minimum=0, maximum=1),
    ),
    key=("grid", "fov", "eye_height", "frame"),
    version=2,
)

LABEL_DRIFT = Table(
    name="label_drift",
    description="Frames whose novel fraction differs between two versions of the labels.",
    columns=(
        Column("frame_id", pa.string(), "Frame"),
        Column("class", pa.string(), "Class folder"),
        Column("old_fraction", pa.float64(), "Novel fraction before", nullable=True),
        Column("new_fraction", pa.float64(), "Novel fraction now", nullable=True),
        Column("change", pa.string(), "Kind of change", allowed=("changed", "added", "removed")),
        Column(
            "crossed", pa.bool_(), "Whether it crossed the line at which a frame counts as novel"
        ),
    ),
    key=("frame_id",),
)

TABLES = (
    EPISODES,
    FRAMES,
    IMAGES,
    BLOCKS,
    ENTITIES,
    INVENTORY,
    TARGETS,
    TARGET_LABELS,
    MASKS,
    NOVEL_OBJECTS,
    MASK_CHECKS,
    SCENE_MAPS,
    FRAME_ROLES,
    WINDOWS,
    DISCOVERY,
    CALIBRATION,
    LABEL_DRIFT,
)


class IngestSettings(Settings):
    """How raw episodes are read."""

    image_size: int = Field(256, ge=1, le=4096)
    """Expected width and height of a picture; others are quarantined."""
    last_frame: Literal["flag", "drop"] = "flag"
    """What to do with the frame of a finished game, whose picture may be wrong."""
    max_image_bytes: int = Field(8 << 20, gt=0)
    """Larger PNG files are quarantined."""
    max_state_bytes: int = Field(16 << 20, gt=0)
    """Larger JSON files are quarantined."""


class RenderSettings(Settings):
    """How the novel fraction of a frame is made."""

    renderer: Literal["raycast", "blender"] = "raycast"
    """`blender` is the reference, `raycast` gives the same masks much faster."""
    blender: Literal["exact", "published"] = "exact"
    """How Blender renders: the same rays as `raycast`, or the release's 128-sample settings."""
    rotation: Literal["published", "corrected"] = "corrected"
    """`published` reproduces the released labels with their rotation fault."""
    coverage: Literal["published", "half"] = "published"
    """Share of a pixel that must be novel: 0.1 as in the released labels, or 0.5."""
    samples: int = Field(15, ge=1, le=15)
    """Rays a pixel and side: 15 agrees most with published labels and Blender; 5 is faster."""
    resolution: int = Field(256, ge=16, le=4096)
    """Width and height of the mask."""
    scene_maps: bool = False
    """Also store segmentation and depth of every frame (large)."""


class CheckSettings(Settings):
    """Which masks are compared with Blender's, where it is installed."""

    share: float = Field(0.01, ge=0, le=1)
    """Share of the frames with novelty in view; 0 checks none."""
    least: int = Field(8, ge=1)
    """At least so many of them."""
    seed: int = Field(0, ge=0)
    """Seed of the choice."""


class SplitSettings(Settings):
    """How frames are filtered and split."""

    seed: int = 42
    """Seed of the permutations; the release used 42."""
    permutations: int = Field(100, ge=1)
    """How many permutations are tried."""
    novel_from: float = Field(0.01, ge=0, le=1)
    """Smallest novel fraction of a frame that is kept."""
    unlabelled: Literal["keep_unlabelled", "drop"] = "keep_unlabelled"
    """What happens to a frame without a target."""
    roles: dict[str, Literal["normal", "novel_valid", "novel_test", "dropped"]] = Field({})
    """Roles of classes that the paper does not have, or other roles for those it has."""
    symbolic_classes: tuple[str, ...] = ("tree_easy",)
    """Classes beside the standard game that the symbolic task is tested on."""


class WindowSettings(Settings):
    """How windows of the symbolic task are cut."""

    contexts: tuple[int, ...] = (2, 5, 10)
    """Orders K of the autoregressive model."""
    length: int = Field(10, ge=1)
    """Frames in a window."""


class CameraSettings(Settings):
    """What the camera search looks for."""

    novel: str = "minecraft:crafting_table"
    """Block that the hand-made masks show."""


MODALITIES = ("image", "states", "runs")
"""Kinds of samples that models can be fitted on."""


class Config(RunChoices):
    """NovelCraft: is there something new in this frame of a game, and how much of it?"""

    source: Path
    """Folder or zip with class/episode/frame.png and .json."""
    lake: Path | None = None
    """Lake: a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)."""
    targets_csv: Path | None = None
    """Official targets.csv to use instead of rendering."""
    compare_targets: Path | None = None
    """Another targets.csv: frames whose label differs become the table label_drift."""
    camera_states: Path | None = None
    """Folder of world states with hand-made masks: searches the camera (table calibration)."""
    camera_masks: Path | None = None
    """Folder of those masks, PNG files named like the states."""
    camera: CameraSettings = CameraSettings()
    max_reject_share: float = Field(0.25, ge=0, le=1)
    """Share of frames that may go to quarantine before the build stops."""
    ingest: IngestSettings = IngestSettings()
    render: RenderSettings = RenderSettings()
    checks: CheckSettings = CheckSettings()
    splits: SplitSettings = SplitSettings()
    windows: WindowSettings = WindowSettings()
    vgg_weights: Path | None = None
    """Pretrained torchvision VGG-16 checkpoint; random weights without it."""
    discovery: bool = False
    """Also run category discovery."""
    dino_weights: Path | None = None
    """Pretrained DINO ViT-B/16 checkpoint for discovery (preset paper); random without it."""

    @classmethod
    def demo(cls, sample: Path) -> "Config":
        """The configuration of `make demo`."""
        return cls(
            source=sample,
            models={
                "patch_memory": {"candidates": 20_000, "cpu_threads": 1},
                "backbone": {"side": 96},
                "colour_rarity": {"bits": 3},
                "symbolic_mlp": {"contexts": [5], "cpu_threads": 1},
                "multimodal": {},
            },
            scores={name: {} for name in ("own", "msp", "knn", "mahalanobis")},
            windows=WindowSettings(contexts=(5,)),
            seeds=(0, 1, 2),
        )
