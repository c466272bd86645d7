"""What a child process does with one video: decode it to the end, or take frames out of it.

Enters: an item with the path of a file, from `run_batch` of the native pool. Leaves: facts for
`tasks.kowl.videos`, or an array of frames. The functions with decord and those with OpenCV must not
run in one process: decord breaks OpenCV's PNG support there.

Frames are decoded one after another, never sought: where packets carry no time stamps (AVI of
HMDB51) decord's `get_batch` and `skip_frames` give wrong frames without a word, while one after
another both decoders give the same pixels. KOWL-718 sets the sampling: every 5th frame, 16 frames,
4 temporal crops, 224 pixels (KOWL-718 section 5.1; docs/kowl.md, rule 14).
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import RecordError
from schemas.extras import require_library

LOADER_VERSION = 1
"""Raised when the same videos give models other pictures to see."""
HEAD_BYTES = 256
TEXT = bytes({*range(32, 127), *range(128, 256), *b"\t\n\r\f"})
ISO_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
MAGIC = {
    b"\x1a\x45\xdf\xa3": "matroska",
    b"FLV\x01": "flv",
    b"OggS": "ogg",
    b"\x00\x00\x01\xba": "mpeg",
    b"\x00\x00\x01\xb3": "mpeg",
    b"\x30\x26\xb2\x75": "asf",
}
# Decoding to this size saves the conversion of full pictures that nobody looks at.
PROBE_SIZE = 32
STILL_LEVELS = 8
"""Pictures of that size whose levels differ by no more may be the same after another scaling."""
MAX_FRAMES = 1 << 30
FAIR_FPS = 30
"""Frames a second that FAIR's steps are meant at."""
PRINTED_BYTES, PRINTED_LINES = 64 << 10, 3
# What differs between two runs over one file: clock, source line of the library, address.
NOISE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: | @ 0x[0-9a-f]+")


def container_of(head: bytes) -> str | None:
    """Kind of file by its first bytes; `text` covers web pages and playlists, None is unknown.

    Text must not reach a decoder: FFmpeg takes a playlist for a video and opens the files it names.
    """
    if head and not head.translate(None, TEXT):
        return "text"
    if head[4:8] in ISO_BOXES:
        return "iso"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    if head[0:1] == head[188:189] == b"\x47":
        return "mpeg"
    return MAGIC.get(head[:4])


def validate_with_decord(item: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Decode `item["path"]` to the end.

    `frames` is decord's count, which may be too high: at an early end it repeats the last frame, so
    `repeated` tells whether the last two are the same. `printed`: what FFmpeg called an error.

    By each of `item["rules"]` (FrameSampling) frames are taken on the way, `frames_0` with
    `indices_0` and so on, as `sample_with_decord` takes them where the header tells the truth.
    Pictures come in full size then. `doubtful` is whether in small ones all might be otherwise:
    let those decide.
    """
    require_library("decord")
    import decord

    decord.logging.set_level(decord.logging.ERROR)
    path, rules = item["path"], item.get("rules", [])
    errors: tuple[type[Exception], ...] = (*_errors(decord), StopIteration)
    size = {} if rules else {"width": PROBE_SIZE, "height": PROBE_SIZE}
    before: Any = None
    last: Any = None
    with _printed(out_dir, path) as lines:
        try:
            reader = decord.VideoReader(path, num_threads=1, fault_tol=0, **size)
            frames, fps = len(reader), _finite(reader.get_avg_fps())
            samplers = [
                FrameSampler({**rule, "frames": frames, "fps": fps}) for rule in rules if frames
            ]
            for number in range(frames):
                before, last = last, reader.next()
                for sampler in samplers:
                    sampler.see(number, last.asnumpy)
            del reader
        except errors as error:
            raise _refused("decord", error, path) from None
    ends = [] if before is None else [before.asnumpy(), last.asnumpy()]
    repeated = bool(ends) and np.array_equal(*ends)
    facts: dict[str, Any] = {"frames": frames, "fps": fps, "repeated": repeated, "printed": lines}
    for number, sampler in enumerate(samplers):
        facts[f"frames_{number}"] = sampler.frames()
        facts[f"indices_{number}"] = sampler.indices
    if rules:
        facts["doubtful"] = not ends or bool(lines) or _are_alike(*ends)
    return facts


def _are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two pictures may be the same in the size of the probe."""
    small = [
        _scaled(each, [(0, 0)], max(each.shape), PROBE_SIZE).astype(int) for each in (one, other)
    ]
    return int(np.abs(small[0] - small[1]).max()) <= STILL_LEVELS


def validate_with_opencv(item: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Read the header, and count frames by decoding unless the header agrees with `item["frames"]`.

    `item["frames"]` is what decord counted, None if that cannot be trusted. `announced` is the
    header's number of frames, or that expected from its duration where it has none; 0 is unknown.
    Width and height are those of the coded picture, before `rotation`.
    """
    import cv2

    capture = _opened(item["path"])
    announced = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    announced = int(announced) if 0 < announced < MAX_FRAMES else 0
    fourcc = int(capture.get(cv2.CAP_PROP_FOURCC)) & 0xFFFFFFFF
    codec = fourcc.to_bytes(4, "little").decode("latin-1").strip("\0 ")
    counted = None
    if announced != item["frames"]:
        counted = 0
        while capture.grab():
            counted += 1
    return {
        "announced": announced,
        "counted": counted,
        "fps": _finite(capture.get(cv2.CAP_PROP_FPS)),
        "width": int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)) or None,
        "height": int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT)) or None,
        "codec": codec if codec.isascii() and codec.isprintable() and codec else None,
        "rotation": int(capture.get(cv2.CAP_PROP_ORIENTATION_META)) % 360,
    }


def frame_indices(
    frames: int,
    step: int,
    count: int,
    crops: int,
    preprocessing: str = "spread",
    fps: float | None = None,
) -> np.ndarray:
    """(crops, count) indices: windows of `count` frames, placed as `preprocessing` says.

    `spread`: `step` apart, from first to last frame, one crop in the middle. `release`: of every
    `step`-th frame, window i begins at i times the quotient of what is left over and `crops`.
    `fair`: as much time as `count` frames `step` apart take at 30 a second, first and last frame
    included, window i begins at i / `crops` of what is left over. Where the video is shorter than a
    window its last frame repeats.
    """
    if min(frames, step, count, crops) < 1:
        raise ValueError(f"{frames=}, {step=}, {count=}, {crops=}: expected 1 or more")
    if preprocessing == "fair":
        length = step * count / FAIR_FPS * (fps or FAIR_FPS)
        begins = max(frames - length, 0) * np.arange(crops) / crops
        places = begins[:, None] + np.linspace(0, length - 1, count)
        return np.clip(places, 0, frames - 1).astype(np.int64)
    if preprocessing == "release":
        gap = max(0, math.ceil(frames / step) - count) // crops
        starts = np.arange(crops) * gap * step
    else:
        spare = max(0, frames - ((count - 1) * step + 1))
        starts = np.array([spare // 2]) if crops == 1 else np.arange(crops) * spare // (crops - 1)
    return np.minimum(starts[:, None] + np.arange(count) * step, frames - 1)


def sample_with_decord(item: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """`frames`: (views, count, crop, crop, 3) uint8 RGB, upright; `indices`: (crops, count).

    The item: path, frames (the number that really decode), fps, and the fields of FrameSampling.
    A view is a temporal crop of one square of the pictures; those of a crop stand together.
    """
    require_library("decord")
    import decord

    decord.logging.set_level(decord.logging.QUIET)

    def stream() -> Iterator[Callable[[], np.ndarray]]:
        reader = decord.VideoReader(item["path"], num_threads=1, fault_tol=0)
        for _ in range(len(reader)):
            yield reader.next().asnumpy

    try:
        return _sampled(stream(), item)
    except _errors(decord) as error:
        raise _refused("decord", error, item["path"]) from None


def sample_with_opencv(item: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """As `sample_with_decord`, for videos that only OpenCV decodes."""
    import cv2

    capture = _opened(item["path"])
    capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 1)

    def stream() -> Iterator[Callable[[], np.ndarray]]:
        while capture.grab():
            yield lambda: capture.retrieve()[1][..., ::-1]

    return _sampled(stream(), item)


class FrameSampler:
    """Frames that a rule takes out of a video as its pictures come by.

    `rule` has the fields of FrameSampling, `frames` and `fps`.
    """

    def __init__(self, rule: dict[str, Any]) -> None:
        self.rule = rule
        names = ("frames", "step", "count", "crops", "preprocessing", "fps")
        self.indices = frame_indices(**{name: rule[name] for name in names})
        self.picks, self._place = np.unique(self.indices, return_inverse=True)
        self.squares: list[np.ndarray] = []

    @property
    def is_whole(self) -> bool:
        return len(self.squares) == len(self.picks)

    def see(self, number: int, picture: Callable[[], np.ndarray]) -> None:
        """Pictures come in order; those that no rule takes are never converted."""
        if not self.is_whole and number == self.picks[len(self.squares)]:
            cut = SQUARES[self.rule["preprocessing"]]
            self.squares.append(cut(picture(), self.rule["short_side"], self.rule["crop"]))

    def frames(self) -> np.ndarray:
        """(views, count, crop, crop, 3)"""
        frames = np.stack(self.squares)[self._place.reshape(self.indices.shape)].swapaxes(1, 2)
        return frames.reshape(-1, *frames.shape[2:])


def _sampled(stream: Iterator[Callable[[], np.ndarray]], item: dict[str, Any]) -> dict[str, Any]:
    sampler = FrameSampler(item)
    for number, picture in enumerate(stream):
        sampler.see(number, picture)
        if sampler.is_whole:
            return {"frames": sampler.frames(), "indices": sampler.indices}
    raise RecordError(
        "frames_missing",
        f"{len(sampler.squares)} of {len(sampler.picks)} chosen frames decode, the last is number "
        f"{sampler.picks[-1]}; the file has changed since it was validated: validate it again",
    )


def _centre(picture: np.ndarray, short_side: int, crop: int) -> np.ndarray:
    """(1, crop, crop, 3): the centre after the shorter side is scaled to `short_side`."""
    height, width = picture.shape[:2]
    side = crop * min(height, width) / short_side
    return _scaled(picture, [((width - side) / 2, (height - side) / 2)], side, crop)


def _released_centre(picture: np.ndarray, short_side: int, crop: int) -> np.ndarray:
    """As `_centre`, but whole pixels are cut out first: none outside of the square has a share."""
    height, width = picture.shape[:2]
    side = round(crop * min(height, width) / short_side)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return _scaled(picture[top : top + side, left : left + side], [(0, 0)], side, crop)


def _thirds(picture: np.ndarray, short_side: int, crop: int) -> np.ndarray:
    """(3, crop, crop, 3): one end of the longer side, the middle, the other end."""
    height, width = picture.shape[:2]
    side = crop * min(height, width) / short_side
    shares = [(0.0, 0.5), (0.5, 0.5), (1.0, 0.5)]
    if height > width:
        shares = [(down, across) for across, down in shares]
    corners = [((width - side) * across, (height - side) * down) for across, down in shares]
    return _scaled(picture, corners, side, crop)


SQUARES = {"spread": _centre, "release": _released_centre, "fair": _thirds}


def _scaled(
    picture: np.ndarray, corners: list[tuple[float, float]], side: float, crop: int
) -> np.ndarray:
    """Squares of this side with these left upper corners, each (crop, crop, 3)."""
    from PIL import Image

    height, width = picture.shape[:2]
    image = Image.fromarray(np.ascontiguousarray(picture))
    squares = []
    for left, top in corners:
        left, top = max(0.0, left), max(0.0, top)
        box = (left, top, min(width, left + side), min(height, top + side))
        scaled = image.resize((crop, crop), Image.Resampling.BILINEAR, box=box)
        squares.append(np.asarray(scaled))
    return np.stack(squares)


def _errors(decord: Any) -> tuple[type[Exception], ...]:
    return decord.DECORDError, decord.DECORDLimitReachedError, RuntimeError


def _opened(path: str) -> Any:
    import cv2

    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    if not capture.isOpened():
        raise RecordError("open_error", "OpenCV finds no video that it can open")
    return capture


def _refused(decoder: str, error: Exception, path: str) -> RecordError:
    text = _clean(str(error), path)
    rule = "no_video_stream" if "cannot find video stream" in text else "decode_error"
    return RecordError(rule, f"{decoder}: {text or type(error).__name__}")


@contextmanager
def _printed(out_dir: Path, path: str) -> Iterator[list[str]]:
    """A list that holds, afterwards, the first few distinct lines that native code printed."""
    lines: list[str] = []
    log = out_dir / "printed"
    saved = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield lines
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        with log.open("rb") as file:
            text = file.read(PRINTED_BYTES).decode(errors="replace")
        # Sorted, since the threads of the decoder print in any order.
        messages = {_clean(line, path) for line in text.splitlines()} - {""}
        lines += sorted(messages)[:PRINTED_LINES]


def _clean(text: str, path: str) -> str:
    """The first line, free of what differs from run to run and of the machine's folders."""
    text = NOISE.sub("", text.replace(path, "the file"))
    return text.strip().partition("\n")[0][:200]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) and value > 0 else None
