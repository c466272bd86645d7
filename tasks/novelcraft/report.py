"""What only NovelCraft's report shows: novel fractions, the paper's tables, labels, scores.

Enters: `read(table)` of tasks/report.py. Leaves: sections in reading order, each only where its
tables are there. Paper: tables 1 and A.1, figure 2c (score against novel fraction).
"""

from collections.abc import Mapping

import numpy as np
import polars as pl

from tasks.novelcraft import detection_report, frames_report
from tasks.novelcraft.frames_report import changed_targets, filled
from tasks.novelcraft.splits import table_1, table_a1
from tasks.novelcraft.targets import NOVEL_FROM, drift_by_class
from tasks.report import (
    Html,
    Read,
    Section,
    counted,
    figure,
    folded,
    heading,
    paragraph,
    plots,
    table,
)

# split, type: episodes, raw and filtered images as printed in the paper's table 1
PAPER_TABLE_1: Mapping[tuple[str, str], tuple[int, int, int]] = {
    ("train", "normal"): (165, 9707, 7037),
    ("train", "novel"): (0, 0, 0),
    ("valid", "normal"): (21, 1154, 873),
    ("valid", "novel"): (50, 2520, 332),
    ("test", "normal"): (21, 1194, 890),
    ("test", "novel"): (440, 20988, 3530),
}
OFFICIAL_COUNTS = (42138, 813, 55)  # frames, episodes, classes of the full release

EPISODE_STEPS = 20


def sections(read: Read) -> list[Section]:
    """The sections that this lake has the tables for."""
    candidates = (
        frames_report.section(read),
        frames_report.checks_section(read),
        _fractions(read),
        _episodes(read),
        _paper_tables(read),
        _label_drift(read),
        _calibration(read),
        _scores(read),
        detection_report.section(read),
    )
    return [section for section in candidates if section is not None]


# ---- novel fractions


def _fractions(read: Read) -> Section | None:
    targets = changed_targets(read)
    if targets is None:
        return None
    fraction = targets["novel_fraction"]
    some, shown = fraction.filter(fraction > 0), int((fraction >= NOVEL_FROM).sum())
    made = targets.select("renderer", "rotation").unique().sort("renderer", "rotation").rows()
    parts = [
        paragraph(
            f"Of {counted(targets.height, 'frame')} in changed games {some.len():,} "
            f"({some.len() / targets.height:.1%}) show at least one novel pixel and {shown:,} "
            f"({shown / targets.height:.1%}) reach the {NOVEL_FROM:.0%} from which a frame counts "
            "as novel. Labels: "
            + ", ".join(f"{renderer}, rotation {rotation}" for renderer, rotation in made)
            + "."
        )
    ]
    if some.len():
        lowest = np.floor(np.log10(some.to_numpy().min()))
        edges = np.logspace(lowest, 0, int(-lowest * 8) + 1 if lowest else 9)
        parts.append(
            figure(
                plots.histogram(
                    some.to_numpy(), edges, "Novel fraction of the frame", "Frames", NOVEL_FROM,
                    f"{NOVEL_FROM:.0%}: kept from here on",
                ),
                "Frames with at least one novel pixel, by novel fraction",
            )
        )  # fmt: skip
    return Section("Novel fraction", parts)


def _episodes(read: Read) -> Section | None:
    targets = changed_targets(read)
    frames = read("frames", ["frame_id", "episode_id", "position"])
    if targets is None or frames is None:
        return None
    course = pl.col("position") / pl.col("position").max().over("episode_id").clip(lower_bound=1)
    step = (course * EPISODE_STEPS).cast(pl.Int64).clip(0, EPISODE_STEPS - 1)
    steps = targets.join(frames, on="frame_id", maintain_order="left").with_columns(
        step.alias("step")
    )
    if steps.is_empty():
        return None
    fraction = pl.col("novel_fraction")
    bands = (
        steps.group_by("step", maintain_order=True)
        .agg(
            fraction.mean().alias("mean"),
            *(fraction.quantile(q / 100).alias(f"q{q}") for q in (50, 75, 90)),
        )
        .sort("step")
    )
    means = steps.group_by("class", "step", maintain_order=True).agg(fraction.mean())
    classes = sorted(set(means["class"]))
    grid = np.full((len(classes), EPISODE_STEPS), np.nan)
    rows = means["class"].replace_strict({name: n for n, name in enumerate(classes)})
    grid[rows.to_numpy(), means["step"].to_numpy()] = means["novel_fraction"].to_numpy()
    grid[grid == 0] = np.nan
    centres = (np.arange(EPISODE_STEPS) + 0.5) / EPISODE_STEPS
    across = "Course of the episode (0 = first frame, 1 = last)"
    return Section(
        "Novelty over the course of an episode",
        [
            paragraph(
                f"{counted(steps['episode_id'].n_unique(), 'episode')} of changed games, each "
                f"stretched to the same length and cut into {EPISODE_STEPS} steps."
            ),
            figure(
                plots.quantile_bands(
                    centres[bands["step"].to_numpy()], bands, across, "Novel fraction"
                ),
                "Novel fraction along the episodes of all changed classes",
            ),
            figure(
                plots.heat_maps(
                    [plots.HeatMap(grid, classes, (0.0, 1.0))], across, "", "Mean novel fraction",
                    height=1 + 0.21 * len(classes), gamma=0.5,
                ),
                "Mean novel fraction by class; empty where no novelty is in view",
            ),
        ],
    )  # fmt: skip


# ---- the paper's tables


def is_official(splits: pl.DataFrame) -> bool:
    """Whether the frames are those of the full release, judged by their numbers."""
    counts = (splits.height, splits["episode_id"].n_unique(), splits["class"].n_unique())
    return counts == OFFICIAL_COUNTS


def _paper_tables(read: Read) -> Section | None:
    splits = filled(read, "frame_roles")
    if splits is None:
        return None
    first = table_1(splits)
    numbers = first.columns[2:]
    groups: list[tuple[str, int]] = []
    notes: list[Html] = []
    names = {}
    if is_official(splits):
        paper = pl.DataFrame(
            [(*key, *values) for key, values in PAPER_TABLE_1.items()],
            schema=["split", "type", *(f"paper_{name}" for name in numbers)],
            orient="row",
        )
        first = first.join(paper, on=["split", "type"], how="left", maintain_order="left")
        groups = [("", 2), ("Here", 3), ("Paper", 3)]
        names = {f"paper_{name}": name.replace("_", " ") for name in numbers}
        notes = [
            paragraph(
                "The paper's 440 episodes and 20,988 raw images of test, novel come from an adding "
                "error (one class counted 44 times); the released files give 530 and 26,285."
            )
        ]
    return Section(
        "The paper's tables",
        [
            heading("Table 1: images in each split"),
            paragraph(
                "Raw counts every frame of the split's episodes, filtered those with a novel "
                f"fraction of at least {NOVEL_FROM:.0%} (all of the standard game)."
            ),
            table(first, groups=groups, names=names),
            *notes,
            heading("Table A.1: changed classes"),
            paragraph("Episodes and frames that show the novelty, and all there are."),
            table(table_a1(splits)),
        ],
    )


# ---- labels and camera


def _label_drift(read: Read) -> Section | None:
    drift = filled(read, "label_drift")
    if drift is None:
        return None
    drift = drift.filter(pl.col("change") != "same")
    changed = drift.filter(pl.col("change") == "changed").sort("frame_id")
    parts = [
        paragraph(
            f"Between two versions of the labels {counted(changed.height, 'frame')} got another "
            f"novel fraction, and {int(drift['crossed'].sum()):,} crossed the {NOVEL_FROM:.0%} "
            f"from which a frame is kept; {drift.height - changed.height:,} stand in one version "
            "only."
        )
    ]
    if changed.height:
        parts.append(
            figure(
                plots.old_and_new(
                    changed["old_fraction"].to_numpy(),
                    changed["new_fraction"].to_numpy(),
                    changed["crossed"].to_numpy(),
                    NOVEL_FROM,
                ),
                "Frames whose novel fraction changed",
            )
        )
    parts.append(table(drift_by_class(drift).drop("frames"), "Frames that differ, by class"))
    return Section("Label drift", parts)


def _calibration(read: Read) -> Section | None:
    rows = filled(read, "calibration")
    if rows is None:
        return None
    width = (pl.col("fov").max() - pl.col("fov").min()).over("grid").alias("width")
    means = (
        rows.group_by("grid", "fov", "eye_height", maintain_order=True)
        .agg(pl.col("iou").mean())
        .with_columns(width)
        .sort("width", "grid", "fov", "eye_height", descending=[True, False, False, False])
    )
    best = means.row(means["iou"].arg_max(), named=True)
    panels = []
    for (name,), part in means.group_by("grid", maintain_order=True):
        fovs, across = np.unique(part["fov"].to_numpy(), return_inverse=True)
        lowered, down = np.unique(-part["eye_height"].to_numpy(), return_inverse=True)
        grid = np.full((lowered.size, fovs.size), np.nan)
        grid[down, across] = part["iou"].to_numpy()
        ring = None
        if name == best["grid"]:
            at = np.searchsorted(lowered, -best["eye_height"]), np.searchsorted(fovs, best["fov"])
            ring = int(at[0]), int(at[1])
        labels = [f"{-value:.3f}" for value in lowered], [f"{value:.1f}" for value in fovs]
        panels.append(plots.HeatMap(grid, *labels, title=name, ring=ring))
    at_best = rows.filter(
        pl.all_horizontal(pl.col(k) == best[k] for k in ("grid", "fov", "eye_height"))
    )
    return Section(
        "Camera calibration",
        [
            paragraph(
                f"Agreement of rendered masks with hand-drawn ones. Best of {means.height:,} "
                f"cameras: field of view {best['fov']:.3f}°, eye {best['eye_height']:.4f} blocks "
                f"up, mean IoU {best['iou']:.4f} (ringed)."
            ),
            figure(
                plots.heat_maps(
                    panels, "Field of view, degrees", "Eye height, blocks", "Mean IoU", height=3.2
                ),
                "Mean IoU over the frames, for each search grid",
            ),
            table(at_best.select("frame", "iou").sort("frame"), "IoU at the best camera"),
        ],
    )


# ---- scores


def _scores(read: Read) -> Section | None:
    columns = ["run_id", "score", "split", "sample_id", "novel", "value"]
    scores = filled(read, "scores", columns)
    runs = read("runs", ["run_id", "protocol", "model", "preset", "changed"])
    targets = read("targets", ["frame_id", "novel_fraction"])
    if scores is None or targets is None or runs is None:
        return None
    run_name = pl.format("{}, {}", "model", detection_report.settings_text()).alias("run")
    joined = (
        scores.filter(pl.col("score") == detection_report.OWN)
        .join(targets, left_on="sample_id", right_on="frame_id", maintain_order="left")
        .join(runs.select("run_id", "protocol", run_name), on="run_id", maintain_order="left")
    )
    seen = joined.filter(pl.col("novel") & (pl.col("novel_fraction") > 0))
    if seen.is_empty():
        return None
    parts = [
        paragraph(
            "The more of the view is novel, the higher a good model scores it. All seeds; "
            "ρ is Spearman's rank correlation of score and novel fraction among novel frames."
        )
    ]
    others: list[Html] = []
    keys = ["protocol", "split", "run"]
    known = joined.filter(~pl.col("novel")).partition_by(keys, as_dict=True)
    for (protocol, split), part in seen.group_by("protocol", "split", maintain_order=True):
        panels = []
        for (run,), points in part.group_by("run", maintain_order=True):
            rho = points.select(pl.corr("novel_fraction", "value", method="spearman")).item()
            shown = f"{run} (ρ = {rho:.2f})" if rho is not None and np.isfinite(rho) else run
            normal = known.get((protocol, split, run))
            panels.append(
                plots.ScorePanel(
                    shown,
                    points["novel_fraction"].to_numpy(),
                    points["value"].to_numpy(),
                    np.empty(0) if normal is None else normal["value"].to_numpy(),
                )
            )
        caption = f"Score against novel fraction (paper figure 2c): {protocol}, split {split}"
        drawn = figure(plots.score_panels(panels, "Novel fraction of the frame"), caption)
        (parts if split == "test" else others).append(drawn)
    if others:
        parts.append(folded("Other splits", *others))
    return Section("Score against novel fraction", parts)
