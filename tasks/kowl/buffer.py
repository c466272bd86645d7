"""Frames that validation takes out of videos on its way, until models have been shown them.

Enters: the frames of one video by one rule of sampling. Leaves: the same frames, to the stage of
features. One file for each video and rule, in the lake's work folder; its name has the digest of
the video and all that decides its pixels, so that no other frames are taken for it. Of a video
without a file (its header lied, the buffer was full) the stage of features decodes it again: the
buffer decides about costs and about no number.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from schemas.clips import FrameSampling
from schemas.kowl import VideoSettings
from storage.checkpoints import read_checkpoint, write_checkpoint
from storage.layout import content_key, file_slug, work_path
from tasks.engine.stage import Shard
from tasks.kowl.decode import LOADER_VERSION, frame_indices

FRAMES = "frames"
DISK_SHARE = 0.5
"""Of what is free on the disk a shard's frames take no more than this."""


class Keeping(VideoSettings):
    """How videos are validated, and what is kept on the way; that changes no row and no key."""

    rules: tuple[FrameSampling, ...] = Field((), exclude=True)
    kept_bytes: int = Field(0, exclude=True)
    """Of a shard for each of its files."""


class FrameBuffer:
    """The frames of one shard's videos. Without a folder there are none."""

    def __init__(self, work: Path | None, shard: str, limit: int = 0) -> None:
        # Beside the folders of the benchmark's stages: two stages use it.
        self.folder = None if work is None else work.parents[1] / FRAMES / file_slug(shard)
        self.left = 0
        if self.folder is not None and limit:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = int(shutil.disk_usage(self.folder).free * DISK_SHARE)
            self.left = min(free, limit - sum(file.stat().st_size for file in self._files()))

    @property
    def is_there(self) -> bool:
        return self.folder is not None and self.folder.is_dir()

    def _files(self) -> Iterator[Path]:
        return self.folder.glob("*.frames") if self.folder is not None else iter(())

    def add(
        self, digest: str, rule: FrameSampling, indices: np.ndarray, frames: np.ndarray
    ) -> None:
        """Keep them while the limit lasts."""
        if self.folder is not None and frames.nbytes <= self.left:
            self.left -= frames.nbytes
            write_checkpoint(self.folder / _name(digest, rule, indices), frames.tobytes())

    def find(self, video: Mapping[str, Any], rule: FrameSampling) -> Path | None:
        """The file with the frames of a usable row of VIDEOS by this rule."""
        if self.folder is None or video["decoder"] != "decord":
            return None
        path = self.folder / _name(video["sha256"], rule, rule_indices(video, rule))
        return path if path.is_file() else None


def read_frames(path: Path, rule: FrameSampling) -> np.ndarray:
    """What `add` was given."""
    shape = (rule.views, rule.count, rule.crop, rule.crop, 3)
    return np.frombuffer(read_checkpoint(path), np.uint8).reshape(shape)


def rule_indices(video: Mapping[str, Any], rule: FrameSampling) -> np.ndarray:
    """Which frames of a video the rule takes; `video` has `frames` and `fps`."""
    how = rule.preprocessing
    return frame_indices(video["frames"], rule.step, rule.count, rule.crops, how, video["fps"])


def remove_frames(lake: Path) -> None:
    """All that is kept; what a killed build left is used by the next one first."""
    shutil.rmtree(work_path(lake, "kowl", FRAMES, "all").parent, ignore_errors=True)


def in_groups(
    shards: Sequence[Shard], rules: Sequence[FrameSampling], limit: int, at_once: int
) -> list[list[Shard]]:
    """Shards whose frames fit into the buffer together, but as many as are made at once."""
    each = sum(rule.views * rule.count * rule.crop**2 * 3 for rule in rules)
    groups: list[list[Shard]] = [[]]
    taken = 0
    for shard in shards:
        size = each * len(shard.files)
        if len(groups[-1]) >= at_once and taken + size > limit:
            groups.append([])
            taken = 0
        groups[-1].append(shard)
        taken += size
    return groups


def _name(digest: str, rule: FrameSampling, indices: np.ndarray) -> str:
    pixels = [LOADER_VERSION, rule.preprocessing, rule.short_side, rule.crop, indices.tolist()]
    return f"{digest}-{content_key(pixels)}.frames"
