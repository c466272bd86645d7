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
    """
    require_library("decord")
    import decord

    decord.logging.set_level(decord.logging.ERROR)
    path = item["path"]
    errors: tuple[type[Exception], ...] = (*_errors(decord), StopIteration)
    before: Any = None
    last: Any = None
    with _printed(out_dir, path) as lines:
        try:
            reader = decord.VideoReader(
                path, width=PROBE_SIZE, height=PROBE_SIZE, num_threads=1, fault_tol=0
            )
            for _ in range(len(reader)):
                before, last = last, reader.next()
            frames, fps = len(reader), _finite(reader.get_avg_fps())
            del reader
        except errors as error:
            raise _refused("decord", error, path) from None
    repeated = before is not None and np.array_equal(before.asnumpy(), last.asnumpy())
    return {"frames": frames, "fps": fps, "repeated": repeated, "printed": lines}


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


def _sampled(stream: Iterator[Callable[[], np.ndarray]], item: dict[str, Any]) -> dict[str, Any]:
    how = item["preprocessing"]
    indices = frame_indices(
        item["frames"], item["step"], item["count"], item["crops"], how, item["fps"]
    )
    picks, place = np.unique(indices, return_inverse=True)
    taken: list[np.ndarray] = []
    for number, picture in enumerate(stream):
        if number == picks[len(taken)]:
            taken.append(SQUARES[how](picture(), item["short_side"], item["crop"]))
            if len(taken) == len(picks):
                break
    else:
        raise RecordError(
            "frames_missing",
            f"{len(taken)} of {len(picks)} chosen frames decode, the last is number {picks[-1]}; "
            "the file has changed since it was validated: validate it again",
        )
    frames = np.stack(taken)[place.reshape(indices.shape)].swapaxes(1, 2)
    return {"frames": frames.reshape(-1, *frames.shape[2:]), "indices": indices}


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
