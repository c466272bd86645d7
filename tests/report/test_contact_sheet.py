"""The contact sheet of KOWL-718: real frames of real videos, or a line that says why not."""

import base64
import re
import shutil
from pathlib import Path

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.kowl import CLIPS, LISTINGS, VIDEOS
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.kowl.videos_report import FRAME_SIDE, SHEET_FRAMES
from tasks.report import write_report
from tests.kowl.test_decode import counting_frames, numbers_of, write_video
from tests.test_report import parsed

FRAMES = 21
READY: dict[str, pl.DataFrame] = {}


class Given(Settings):
    """The one setting that the sheet looks at."""

    videos: Path


@stage(writes=(LISTINGS, CLIPS, VIDEOS))
def pretend_videos(shard: Shard, settings: Settings) -> Produced:
    """Write what a test prepared."""
    return Produced(READY, READY["clips"].height)


def rows(files: dict[str, str]) -> dict[str, pl.DataFrame]:
    """Tables of clips: sample_id -> label."""
    clips = pl.DataFrame(
        [(name, name[:11], 0, 10, label, "k", "train", "k") for name, label in files.items()],
        schema=CLIPS.polars_schema,
        orient="row",
    )
    listings = clips.with_columns(snapshot=pl.lit("s"), snapshot_date=pl.lit(None, pl.Date)).select(
        LISTINGS.polars_schema.names()
    )
    videos = pl.DataFrame(
        [
            {
                "sample_id": name,
                "file": f"{name}.mp4",
                "status": "ok",
                "decoder": "decord",
                "frames": FRAMES,
                "seconds": FRAMES / 15,
                "fps": 15.0,
            }
            for name in files
        ],
        schema=VIDEOS.polars_schema,
    )
    return {"clips": clips, "listings": listings, "videos": videos}


def report(tmp_path: Path) -> Path:
    good, gone = "abcdefghij0_000000_000010", "abcdefghij1_000000_000010"
    raw = tmp_path / "raw"
    raw.mkdir()
    write_video(raw / f"{good}.mp4", counting_frames(FRAMES))
    READY.clear()
    READY.update(rows({good: "juggling", gone: "yodelling"}))
    with Build("kowl", tmp_path / "lake", Given(videos=raw)) as build:
        build.source(raw)
        build.run(pretend_videos, [Shard("all")], Settings())
    return write_report(tmp_path / "lake", "kowl")


def test_frames_from_first_to_last_and_clips_that_fail_are_named(tmp_path):
    from PIL import Image

    page = report(tmp_path)
    found = parsed(page)
    assert "juggling ( abcdefghij0_000000_000010 )" in found.prose
    assert "Clips that did not decode again: abcdefghij1_000000_000010 (" in found.prose
    (strip,) = re.findall(r'data:image/jpeg;base64,([^"]+)', page.read_text())
    (tmp_path / "strip.jpg").write_bytes(base64.b64decode(strip))
    picture = np.asarray(Image.open(tmp_path / "strip.jpg"))
    assert picture.shape == (FRAME_SIDE, SHEET_FRAMES * FRAME_SIDE, 3)
    shown = numbers_of(picture.reshape(FRAME_SIDE, SHEET_FRAMES, FRAME_SIDE, 3).swapaxes(0, 1))
    # The codec and the JPEG may shift the grey by a step.
    assert np.abs(shown - np.linspace(0, FRAMES - 1, SHEET_FRAMES)).max() <= 1
    assert (np.diff(shown) == (FRAMES - 1) // (SHEET_FRAMES - 1)).all()


def test_no_sheet_where_the_videos_are_gone(tmp_path):
    page = report(tmp_path)
    assert "image/jpeg" in page.read_text()
    shutil.rmtree(tmp_path / "raw")
    prose = parsed(write_report(tmp_path / "lake", "kowl")).prose
    assert "no longer where the build read them" in prose
    assert "image/jpeg" not in page.read_text()
