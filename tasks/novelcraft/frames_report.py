"""The gallery of NovelCraft's report: a frame of each changed class with its mask and boxes.

Enters: the tables targets, frames, images, masks, novel_objects. Leaves: a section.
"""

import numpy as np
import polars as pl

from tasks.novelcraft.classes import STANDARD
from tasks.novelcraft.masks import decode_runs
from tasks.report import Picture, Read, Section, counted, gallery, paragraph

PICTURE_SIDE = 288
JPEG_QUALITY = 85
MOST_PICTURES = 60
MOST_BOXES = 16
WHOLE_VIEW = 0.95  # from here on the camera sees nothing but novelty
MASK_COLOUR = (138, 48, 229, 110)  # blue, green, red, alpha


def filled(read: Read, name: str, *arguments: object) -> pl.DataFrame | None:
    """The table, or None if it is absent or has no rows."""
    rows = read(name, *arguments)  # type: ignore[arg-type]
    return None if rows is None or rows.is_empty() else rows


def changed_targets(read: Read) -> pl.DataFrame | None:
    """Targets of every class but the standard game."""
    return filled(
        read,
        "targets",
        ["frame_id", "class", "novel_fraction", "renderer", "rotation"],
        pl.col("class") != STANDARD,
    )


def choose_frames(targets: pl.DataFrame, frames: pl.DataFrame) -> pl.DataFrame:
    """Of each class the frame with the most novelty in view, the first id among equals.

    Frames that may show the next game, and those that see nothing but novelty, come last.
    """
    return (
        targets.join(frames.select("frame_id", "suspect_last"), on="frame_id")
        .filter(pl.col("novel_fraction") > 0)
        .sort(
            pl.col("suspect_last"),
            pl.col("novel_fraction") > WHOLE_VIEW,
            -pl.col("novel_fraction"),
            "frame_id",
        )
        .group_by("class", maintain_order=True)
        .first()
        .sort("class")
        .head(MOST_PICTURES)
    )


def section(read: Read) -> Section | None:
    targets = changed_targets(read)
    frames = read("frames", ["frame_id", "suspect_last"])
    if targets is None or frames is None:
        return None
    picks = choose_frames(targets, frames)
    among = pl.col("frame_id").is_in(picks["frame_id"].to_list())
    pictures = filled(read, "images", ["frame_id", "png"], among)
    masks = filled(read, "masks", ["frame_id", "height", "width", "runs"], among)
    if pictures is None or masks is None:
        return None
    boxes = read("novel_objects", None, among)
    drawn, damaged = [], []
    rows = picks.join(pictures, on="frame_id").join(masks, on="frame_id").sort("class")
    for row in rows.iter_rows(named=True):
        small = _shrunk(row["png"])
        if small is None:
            damaged.append(row["frame_id"])
            continue
        shape = (row["height"], row["width"])
        drawn.append(
            Picture(
                small,
                f"{row['class']}: {row['novel_fraction']:.1%} of the view (`{row['frame_id']}`)",
                (row["width"], row["height"]),
                _overlay(decode_runs(np.array(row["runs"]), shape)),
                _boxes(boxes, row["frame_id"]),
            )
        )
    parts = [
        paragraph(
            "Of each class the frame with the most novelty in view: novel pixels coloured, and the "
            f"boxes of at most {MOST_BOXES} largest novel objects. Point at a picture to see it "
            "bare. As in the release an entity, even a dropped item, hides what is behind it like "
            "a box of 1 x 1.8 x 1 blocks, and leaves hide nothing."
        ),
        gallery(drawn),
    ]
    if damaged:
        parts.append(paragraph(f"Pictures that could not be decoded: {', '.join(damaged)}"))
    return Section("Frames and their masks", parts)


def checks_section(read: Read) -> Section | None:
    """Our masks against Blender's, with a picture of the frame that differs most."""
    checks = filled(read, "mask_checks")
    if checks is None:
        return None
    checks = checks.sort("differing_pixels", "frame_id", descending=[True, False])
    worst = checks.row(0, named=True)
    differing = checks["differing_pixels"].to_numpy()
    parts = [
        paragraph(
            f"{counted(checks.height, 'frame')} with novelty in view, drawn by a seed, rendered "
            f"again by Blender {worst['blender']}: {(differing == 0).sum()} masks are the same, "
            f"the mean difference is {differing.mean():.2f} pixels, the least agreement (IoU) "
            f"{checks['iou'].to_numpy().min():.4f}."
        )
    ]
    pictures = filled(read, "images", ["frame_id", "png"], pl.col("frame_id") == worst["frame_id"])
    small = None if pictures is None else _shrunk(pictures["png"][0])
    if small is not None:
        size = (worst["width"], worst["height"])
        where = decode_runs(np.array(worst["differing_runs"]), size[::-1])
        caption = (
            f"The frame that differs most, `{worst['frame_id']}`: "
            f"{counted(worst['differing_pixels'], 'pixel')} coloured, of {worst['pixels']} novel"
        )
        parts.append(gallery([Picture(small, caption, size, _overlay(where), [])]))
    return Section("Masks checked with Blender", parts)


def _shrunk(png: bytes) -> bytes | None:
    """A JPEG of at most PICTURE_SIDE pixels a side; None if the picture cannot be decoded."""
    import cv2

    image = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        return None
    scale = PICTURE_SIDE / max(image.shape[:2])
    if scale < 1:
        image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()


def _overlay(mask: np.ndarray) -> bytes:
    """A PNG that colours the mask and leaves the rest transparent."""
    import cv2

    layer = np.zeros((*mask.shape, 4), np.uint8)
    layer[mask] = MASK_COLOUR
    return cv2.imencode(".png", layer)[1].tobytes()


def _boxes(objects: pl.DataFrame | None, frame: str) -> list[tuple[int, int, int, int, str]]:
    if objects is None:
        return []
    largest = (
        objects.filter(pl.col("frame_id") == frame)
        .sort("pixels", "object", descending=[True, False])
        .head(MOST_BOXES)
    )
    return [
        (x0, y0, x1, y1, f"{label}: {counted(pixels, 'pixel')}")
        for x0, y0, x1, y1, label, pixels in largest.select(
            "x0", "y0", "x1", "y1", "label", "pixels"
        ).iter_rows()
    ]
