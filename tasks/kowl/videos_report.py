"""What the videos are worth: their states, link rot, and a contact sheet of some that decode.

Enters: the tables videos, unlisted_videos, listings and clips, and the raw videos where they still
are. Leaves: a section. Frames are decoded in child processes, since decord and OpenCV must not
share one.
"""

import io
from pathlib import Path, PurePath

import numpy as np
import polars as pl

from schemas.errors import RecordError
from schemas.kowl import USABLE, SampleSettings
from tasks.kowl.videos import link_rot, sample_videos
from tasks.report import Html, Picture, Read, Section, Tables, gallery, heading, paragraph, table

SHEET_CLIPS = 12
SHEET_FRAMES = 6
FRAME_SIDE = 80
LONGEST_SECONDS = 20.0  # a clip is decoded up to its last frame
SHEET = SampleSettings(
    step=1,
    count=1,
    crops=SHEET_FRAMES,
    short_side=FRAME_SIDE,
    crop=FRAME_SIDE,
    seconds_per_video=20,
    max_archived_bytes=64 << 20,
)


def section(read: Read) -> Section | None:
    """States, link rot, examples and the contact sheet."""
    columns = ["sample_id", "status", "frames", "header_frames", "message"]
    videos, listings = read("videos", columns), read("listings")
    if videos is None or listings is None:
        return None
    states = (
        videos.group_by("status").len("clips").sort("clips", "status", descending=[True, False])
    )
    rot = link_rot(listings, videos, by=("release", "split"))
    examples = videos.filter(~pl.col("status").is_in(["ok", "missing"]))
    parts = [
        paragraph("Every file was decoded to its end; a header is never believed."),
        table(states, "Clips by state"),
        table(rot, "Link rot by release and split"),
    ]
    if examples.height:
        some = examples.sort("status", "sample_id").head(20)
        parts.append(table(some, "Some that are not plainly ok"))
    return Section("Videos", [*parts, *_unlisted(read), *_contact_sheet(read)])


def _unlisted(read: Read) -> list[Html]:
    """Videos that belong to no clip: how many of each state, and those that are not plainly ok."""
    columns = ["file", "label", "reason", "status", "frames", "header_frames", "message"]
    videos = read("unlisted_videos", columns)
    if videos is None or videos.is_empty():
        return []
    states = videos.group_by("status", "reason").len("files")
    parts = [
        heading("Videos that no list has"),
        table(states.sort("files", "status", "reason", descending=[True, False, False])),
    ]
    odd = videos.filter(pl.col("status") != "ok").sort("status", "file").head(20)
    if odd.height:
        parts.append(table(odd, "Some of them that are not plainly ok"))
    return parts


def _contact_sheet(read: Read) -> list[Html]:
    rows = _sheet_videos(read)
    root = _raw_videos(read)
    if rows is None or rows.is_empty() or root is None:
        return []
    parts = [heading("Contact sheet")]
    if not Path(root).exists():
        gone = "The raw videos are no longer where the build read them, so none are shown."
        return [*parts, paragraph(gone)]
    label_of = dict(rows.select("sample_id", "label").iter_rows())
    pictures, failed = [], []
    for sample_id, frames in sample_videos(root, rows, SHEET):
        if isinstance(frames, RecordError):
            failed.append(f"{sample_id} ({frames.rule})")
            continue
        size = (SHEET_FRAMES * FRAME_SIDE, FRAME_SIDE)
        caption = f"{label_of[sample_id] or 'no label'} (`{sample_id}`)"
        pictures.append(Picture(_strip(frames[:, 0]), caption, size))
    if pictures:
        note = f"{SHEET_FRAMES} frames of one clip of some labels, from its first to its last."
        parts += [paragraph(note), gallery(pictures, wide=True)]
    if failed:
        parts.append(paragraph(f"Clips that did not decode again: {', '.join(failed)}."))
    return parts


def _raw_videos(read: Read) -> str | None:
    """Folder or archive of the last build's videos; None for tables without a lake around them."""
    record = read.record if isinstance(read, Tables) else None
    folder = record.settings.get("videos") if record is not None else None
    if record is None or folder is None:
        return None
    # The setting may be relative to a folder that nobody knows any more; sources are absolute.
    roots = [source.root for source in record.sources]
    return next((root for root in roots if root.endswith(PurePath(folder).as_posix())), folder)


def _sheet_videos(read: Read) -> pl.DataFrame | None:
    """A short usable video of each of some labels, evenly along the labels."""
    usable = pl.col("status").is_in(USABLE) & pl.col("decoder").is_not_null()
    short = usable & (pl.col("seconds") <= LONGEST_SECONDS)
    videos = read("videos", ["sample_id", "file", "frames", "fps", "decoder"], short)
    if videos is None:
        return None
    clips = read("clips", ["sample_id", "label"])
    if clips is None:
        return None
    first = (
        videos.join(clips, on="sample_id")
        .sort("label", "sample_id", nulls_last=True)
        .unique("label", keep="first", maintain_order=True)
    )
    places = np.linspace(0, first.height - 1, min(SHEET_CLIPS, first.height)).round().astype(int)
    return first[places]


def _strip(frames: np.ndarray) -> bytes:
    """Frames (N, side, side, 3) side by side as a JPEG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(list(frames), axis=1)).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
