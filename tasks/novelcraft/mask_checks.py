"""Our masks against Blender's: a seeded sample of frames with novelty in view, rendered twice.

Enters: frames, blocks and entities of some episodes and the masks that `raycast` made of them.
Leaves: `mask_checks`, pixels that differ and the agreement of each sampled frame. Where there is no
Blender, or it lacks libraries of the system, one sentence says so, and no frame is checked.
"""

import contextlib
import hashlib
import logging
import math
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import polars as pl

from schemas.errors import RecordError
from schemas.novelcraft import MASK_CHECKS, CheckSettings, RenderSettings
from storage.pieces import Piece
from tasks.engine.stage import Build, Produced, Reject, Shard, stage
from tasks.novelcraft.label import FRAME_COLUMNS, PLACE, novel_names, states_of
from tasks.novelcraft.masks import decode_runs, encode_runs, mask_iou
from tasks.novelcraft.render import blender_python, render_all
from tasks.operations.doctor import BLENDER, missing_libraries_of

log = logging.getLogger(__name__)

READS = ("episodes", "frames", "blocks", "entities", "targets", "masks")
NO_BLENDER = "none"
"""NOVELTY_BLENDER_PYTHON that says: there is no Blender here."""
FRAMES_PER_SHARD = 25
LOUD_PIXELS = 1.0
"""A larger mean difference is warned of."""
VERSION = "import importlib.metadata as packages; print(packages.version('bpy'))"


def blender_version() -> str | None:
    """The version of bpy that child processes use; None where there is none."""
    if os.environ.get("NOVELTY_BLENDER_PYTHON") == NO_BLENDER:
        return None
    if (python := blender_python()) == sys.executable:
        with contextlib.suppress(PackageNotFoundError):
            return version("bpy")
        return None
    answer = subprocess.run([python, "-c", VERSION], capture_output=True, text=True)
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def check_masks(
    build: Build,
    rendered: list[Piece],
    ingested: list[Piece],
    render: RenderSettings,
    checks: CheckSettings,
) -> None:
    """Check a sample of the frames that this build rendered by raycast."""
    if not checks.share or render.renderer != "raycast":
        return
    blender = blender_version()
    if blender is None:
        log.info(
            "novelcraft: masks are not checked against Blender, which is not here; "
            "`make setup EXTRAS=blender` brings it"
        )
        return
    if lacking := missing_libraries_of(BLENDER):
        log.warning(
            "WARNING: novelcraft: masks are not checked against Blender, which needs "
            f"{', '.join(lacking)} of the system; `make doctor` says how to get them"
        )
        return
    shards = plan_checks(rendered, ingested, checks, render, blender)
    build.run(check_frames, shards, checks)
    if shards and build.dry is None:
        warn_of_difference(build.read(MASK_CHECKS.name))


def plan_checks(
    rendered: list[Piece],
    ingested: list[Piece],
    settings: CheckSettings,
    render: RenderSettings,
    blender: str,
) -> list[Shard]:
    """Shards of some frames each, as Blender takes its time to start."""
    masked = {
        piece.shard: piece.part("masks").read(["frame_id"])["frame_id"].to_list()
        for piece in rendered
    }
    sample = sampled([name for names in masked.values() for name in names], settings)
    made_from = {piece.shard: piece for piece in ingested}
    shards: list[Shard] = []
    together: list[Piece] = []
    frames: list[str] = []
    for number, piece in enumerate(rendered, 1):
        if here := sorted(sample.intersection(masked[piece.shard])):
            frames += here
            together += [piece, made_from[piece.shard]]
        if len(frames) >= FRAMES_PER_SHARD or (frames and number == len(rendered)):
            parts = (p.part(table) for p in together for table in READS if p.has(table))
            about = {
                "frames": frames,
                "render": render.model_dump(mode="json"),
                "blender": blender,
            }
            shards.append(Shard(together[0].shard, parts=tuple(parts), about=about))
            together, frames = [], []
    return shards


def sampled(frames: list[str], settings: CheckSettings) -> set[str]:
    """The share of the frames, but at least so many, that a hash of seed and id puts first."""
    count = max(settings.least, math.ceil(settings.share * len(frames)))

    def place(frame: str) -> str:
        return hashlib.sha256(f"{settings.seed} {frame}".encode()).hexdigest()

    return set(sorted(frames, key=place)[:count])


@stage(writes=(MASK_CHECKS,), version=1)
def check_frames(shard: Shard, settings: CheckSettings) -> Produced:
    """Render some frames with Blender and compare the masks."""
    about = shard.about
    render = RenderSettings.model_validate({**about["render"], "renderer": "blender"})
    among = pl.col("frame_id").is_in(about["frames"])
    frames = shard.read("frames", FRAME_COLUMNS).filter(among)
    described = dict(shard.read("episodes", ["class", "novel_item"]).unique().iter_rows())
    here = shard.read("masks").filter(among)
    masks = {
        row["frame_id"]: decode_runs(np.array(row["runs"]), (row["height"], row["width"]))
        for row in here.iter_rows(named=True)
    }
    states = list(states_of(frames, shard.read("blocks"), shard.read("entities")))
    shown = [(s, novel_names(row["class"], described.get(row["class"]))) for row, s in states]
    rows, rejects = [], []
    for (row, _), outcome in zip(states, render_all(shown, render), strict=True):
        if isinstance(outcome, RecordError):
            rejects.append(Reject.of(row["frame_id"], outcome))
            continue
        ours = masks[row["frame_id"]]
        differing = ours ^ outcome.mask
        rows.append(
            {name: row[name] for name in PLACE}
            | {
                "pixels": int(ours.sum()),
                "blender_pixels": outcome.pixels,
                "differing_pixels": int(differing.sum()),
                "iou": float(mask_iou(ours, outcome.mask)),
                "blender": about["blender"],
                "height": ours.shape[0],
                "width": ours.shape[1],
                "differing_runs": encode_runs(differing).tolist(),
            }
        )
    table = pl.DataFrame(rows, schema=MASK_CHECKS.polars_schema)
    return Produced({MASK_CHECKS.name: table}, len(states), rejects)


def warn_of_difference(checks: pl.DataFrame) -> None:
    """Say loudly where our masks are not Blender's."""
    mean = checks["differing_pixels"].mean()
    if isinstance(mean, float) and mean > LOUD_PIXELS:
        worst = checks.sort("differing_pixels", "frame_id", descending=[True, False]).head(5)
        pairs = worst.select("frame_id", "differing_pixels").iter_rows()
        text = ", ".join(f"{name} ({pixels})" for name, pixels in pairs)
        log.warning(
            f"novelcraft: WARNING: masks differ from Blender's by {mean:.1f} pixels a frame on the "
            f"mean of {checks.height}; most in {text}. Look at the table mask_checks before you "
            "use the labels"
        )
