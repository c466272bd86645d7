"""NovelCraft's own sections on a small made-up lake, and the paper's numbers on the real labels."""

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from schemas.config import Settings
from schemas.novelcraft import (
    CALIBRATION,
    FRAME_ROLES,
    FRAMES,
    IMAGES,
    LABEL_DRIFT,
    MASKS,
    NOVEL_OBJECTS,
    TARGETS,
)
from schemas.runs import RunFacts
from schemas.table import Table
from schemas.tables import RUNS, SCORES, SPLITS
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.evaluation.runs import run_id, run_row
from tasks.novelcraft.classes import NORMAL
from tasks.novelcraft.frames_report import choose_frames
from tasks.novelcraft.masks import bounding_box, encode_runs
from tasks.novelcraft.report import PAPER_TABLE_1, is_official, sections
from tasks.novelcraft.splits import assign_splits, protocol_splits, table_1
from tasks.report import write_report
from tests.novelcraft.test_splits import released_frames
from tests.report.reading import read_of
from tests.test_report import parsed, timeless, titles

SIDE = 32
CLASSES = ("normal", "fence", "item_tnt", "tree_easy")
EPISODES, LENGTH = 2, 6
TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        FRAMES, IMAGES, TARGETS, MASKS, NOVEL_OBJECTS, FRAME_ROLES, LABEL_DRIFT, CALIBRATION,
        SPLITS, RUNS, SCORES,
    )
}  # fmt: skip
OWN_TITLES = [
    "Frames and their masks",
    "Novel fraction",
    "Novelty over the course of an episode",
    "The paper's tables",
    "Label drift",
    "Camera calibration",
    "Score against novel fraction",
]


def mask_of(label: str, frame: int) -> np.ndarray:
    """Novelty grows along the episode; the last frame of tree_easy shows nothing else."""
    mask = np.zeros((SIDE, SIDE), bool)
    if label != "normal":
        mask[4 : 4 + 3 * frame, 2:12] = True
    if label == "tree_easy" and frame == LENGTH - 1:
        mask[:] = True
    return mask


def made_up() -> dict[str, pl.DataFrame]:
    import cv2

    rows: dict[str, list] = {name: [] for name in ("frames", "images", "masks", "boxes", "targets")}
    for label in CLASSES:
        for episode in range(EPISODES):
            for frame in range(LENGTH):
                name = {"frame_id": f"{label}/{episode}/{frame}", "class": label, "subset": ""}
                name |= {"episode": episode, "frame": frame}
                mask = mask_of(label, frame)
                seed = [CLASSES.index(label), episode, frame]
                noise = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
                png = cv2.imencode(".png", noise)[1].tobytes()
                rows["frames"].append(
                    name
                    | {"episode_id": f"{label}/{episode}", "position": frame}
                    | {"suspect_last": label == "fence" and frame == LENGTH - 1}
                )
                rows["images"].append(name | {"png": png})
                rows["targets"].append(
                    name
                    | {"novel_fraction": mask.mean(), "novel_pixels": int(mask.sum())}
                    | {"renderer": "raycast", "rotation": "corrected"}
                )
                if mask.any():
                    runs = encode_runs(mask).astype(np.int32).tolist()
                    rows["masks"].append(name | {"height": SIDE, "width": SIDE, "runs": runs})
                    box = dict(zip(("x0", "y0", "x1", "y1"), bounding_box(mask), strict=True))
                    about = {"object": 0, "label": "<b>block", "pixels": int(mask.sum())}
                    rows["boxes"].append(name | about | box)
    targets = pl.DataFrame(rows["targets"])
    roles = assign_splits(
        targets.select("class", "episode", "frame", "novel_fraction"), permutations=3
    )
    samples = targets.select(
        pl.col("frame_id").alias("sample_id"), "class", (pl.col("class") != "normal").alias("novel")
    )
    fovs, offsets = (70.0, 71.2, 72.0), (1.0, 1.1)
    calibration = pl.DataFrame(
        [
            (grid, fov + step, offset, frame, 0.9 - abs(fov - 71.2) / 10 - abs(offset - 1.1) - step)
            for grid, step in (("coarse", 0.05), ("fine", 0.0))
            for fov in (fovs if grid == "coarse" else fovs[1:])
            for offset in offsets
            for frame in ("1", "7")
        ],
        schema=CALIBRATION.polars_schema.names(),
        orient="row",
    )
    drift = pl.DataFrame(
        [
            ("fence/0/1", "fence", 0.002, 0.05, "changed", True),
            ("fence/0/2", "fence", 0.2, 0.19, "changed", False),
            ("item_tnt/0/2", "item_tnt", None, 0.19, "added", False),
        ],
        schema=LABEL_DRIFT.polars_schema.names(),
        orient="row",
    )
    return {
        "frames": _complete(pl.DataFrame(rows["frames"])),
        "images": pl.DataFrame(rows["images"]),
        "targets": targets,
        "masks": pl.DataFrame(rows["masks"]),
        "novel_objects": pl.DataFrame(rows["boxes"]),
        "frame_roles": roles,
        "splits": protocol_splits(roles, NORMAL, ()),
        "label_drift": drift,
        "calibration": calibration,
        **made_up_runs(samples),
    }


def made_up_runs(samples: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Two models, two seeds each, whose own score is higher for novel frames."""
    runs, scores = [], []
    for number, model in enumerate(("odin", "ndcc")):
        for seed in range(2):
            facts = RunFacts(
                benchmark="novelcraft", protocol="visual", model=model, preset="small", seed=seed,
                fit_key="k",
            )  # fmt: skip
            noise = np.random.default_rng([number, seed]).normal(size=samples.height)
            value = (1 + number) * samples["novel"].to_numpy() + noise
            about = {"run_id": run_id(facts), "score_id": "s", "score": "own", "view": "plain"}
            about |= {"phase": "none", "step": 0, "split": "test", "predicted": None}
            runs.append(run_row(facts))
            scores.append(
                SCORES.conform(
                    samples.with_columns(
                        pl.Series("value", value), *(pl.lit(v).alias(n) for n, v in about.items())
                    )
                )
            )
    return {"runs": pl.concat(runs), "scores": pl.concat(scores)}


def _complete(frames: pl.DataFrame) -> pl.DataFrame:
    """The columns that no section looks at, all the same."""
    empty = {pl.String: "", pl.Boolean: False, pl.Float64: 0.0}
    return frames.with_columns(
        pl.lit(empty.get(kind, 1)).cast(kind).alias(name)
        for name, kind in FRAMES.polars_schema.items()
        if name not in frames.columns
    )


READY: dict[str, pl.DataFrame] = {}


@stage(writes=lambda settings: [TABLES[name] for name in READY])
def pretend_novelcraft(shard: Shard, settings: Settings) -> Produced:
    """Write what a test prepared."""
    return Produced(READY, next(iter(READY.values())).height)


def report_of(lake: Path, tables: dict[str, pl.DataFrame]) -> Path:
    READY.clear()
    READY.update(tables)
    with Build("novelcraft", lake) as build:
        build.run(pretend_novelcraft, [Shard("all", about=sorted(tables))], Settings())
    return write_report(lake, "novelcraft")


@pytest.fixture(scope="module")
def tables() -> dict[str, pl.DataFrame]:
    return made_up()


@pytest.fixture(scope="module")
def page(tmp_path_factory, tables) -> Path:
    return report_of(tmp_path_factory.mktemp("lake"), tables)


def test_every_section_is_there_and_well_formed(page):
    found = parsed(page)
    assert [title.replace("&#x27;", "'") for title in titles(page)] == [
        *OWN_TITLES,
        "Classes and splits",
        "What was built",
        "Data quality",
    ]
    assert found.prose.startswith("NovelCraft")
    assert "<b>block: " in found.prose


def test_page_is_small_and_repeats(page, tmp_path, tables):
    assert page.stat().st_size < 1_000_000
    assert timeless(report_of(tmp_path / "again", tables)) == timeless(page)


@pytest.mark.parametrize(
    ("absent", "gone"),
    [
        ({"images", "label_drift", "scores"}, {0, 4, 6}),
        ({"masks", "frame_roles", "calibration"}, {0, 3, 5}),
        ({"targets"}, {0, 1, 2, 6}),
        ({"frames", "novel_objects"}, {0, 2}),
    ],
)
def test_tables_may_be_absent(tables, absent, gone):
    kept = {name: rows for name, rows in tables.items() if name not in absent}
    shown = [section.title for section in sections(read_of(kept))]
    assert shown == [title for number, title in enumerate(OWN_TITLES) if number not in gone]


def test_boxes_may_be_absent(tables):
    kept = {name: tables[name] for name in ("targets", "frames", "images", "masks")}
    pictures = sections(read_of(kept))[0]
    assert "<image" in pictures.parts[1] and "<rect" not in pictures.parts[1]


def test_empty_tables_give_no_sections(tables):
    assert sections(read_of({name: rows.clear() for name, rows in tables.items()})) == []


def test_frames_with_most_novelty_but_more_than_novelty_in_view(tables):
    chosen = choose_frames(tables["targets"].filter(pl.col("class") != "normal"), tables["frames"])
    # The last frame of fence may show another game, that of tree_easy nothing but novelty.
    assert chosen["frame_id"].to_list() == ["fence/0/4", "item_tnt/0/5", "tree_easy/0/4"]


def test_overlays_are_the_masks(page):
    import base64

    import cv2

    source = page.read_text()
    shown = re.search(r'<g class="over"><image href="data:image/png;base64,([^"]+)"', source)
    layer = cv2.imdecode(np.frombuffer(base64.b64decode(shown[1]), np.uint8), cv2.IMREAD_UNCHANGED)
    assert np.array_equal(layer[:, :, 3] > 0, mask_of("fence", 4))
    assert '<rect x="2" y="4" width="10" height="12">' in source


def test_damaged_picture_is_named(tables, tmp_path):
    images = tables["images"].with_columns(
        pl.when(frame_id="item_tnt/0/5").then(pl.lit(b"no png")).otherwise("png").alias("png")
    )
    found = parsed(report_of(tmp_path, tables | {"images": images}))
    assert "Pictures that could not be decoded: item_tnt/0/5" in found.prose


def test_best_camera_and_drift_are_said(page):
    prose = parsed(page).prose
    assert "field of view 71.200°, eye 1.1000 blocks up, mean IoU 0.9000" in prose
    assert "2 frames got another novel fraction, and 1 crossed the 1%" in prose
    assert "1 stand in one version only" in prose


def test_papers_numbers_only_beside_the_full_release(page):
    assert "20,988" not in page.read_text()
    splits = assign_splits(released_frames("labels/splits.csv"))
    assert is_official(splits)
    assert not is_official(splits.head(-1))
    (section,) = sections(read_of({"frame_roles": splits}))
    rows = [
        re.findall(r"<td.*?>(.*?)</td>", row)
        for row in re.findall(r"<tr>(<td.*?)</tr>", "".join(section.parts))
    ]
    assert ["test", "novel", "530", "26,285", "3,530", "440", "20,988", "3,530"] in rows
    same = [row[2:5] == row[5:] for row in rows[:6]]
    assert same == [True, True, True, True, True, False]
    assert [tuple(key) for key in PAPER_TABLE_1] == table_1(splits).select("split", "type").rows()
