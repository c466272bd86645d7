"""Sample Kinetics for KOWL-718: out of a seed, into annotation lists and short videos.

`lists/kinetics{400,600,700_2020}_{train,validate,test}.csv.gz` (gzip without a time, LF), header
`label,youtube_id,time_start,time_end,split`; the test list of 700-2020 has no label column.
The drift between releases is that of the real ones: classes renamed, vanished and new,
clips that change split, lose their place or get another label, one label that exists in the K600
test list only. Class names are real Kinetics names.

`videos/<label>/<youtube_id>_<start:06>_<end:06>.mp4` for part of the clips, the label being the one
of the first release that lists the clip: 64x64, 15 frames/s, a shape of class-specific form,
colour, path and speed on a background that is alike in the clips of a class. Colours and forms are
shared by some classes, so features tell classes apart, and what is novel, in part only.
"""

import gzip
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tasks.learning.draws import item_rng
from tasks.sample.files import put

RELEASES = ("kinetics400", "kinetics600", "kinetics700_2020")
HEADER = "label,youtube_id,time_start,time_end,split"
SIZE, FPS, FRAMES, SHORT_FRAMES = 64, 15, 22, 2
# How far the colours of a background are from those of its class, of 255.
SCENE_SPREAD = 12

# One class a row: its name in K400, K600 and K700-2020, "" where the release has none.
CLASSES = (
    ("abseiling", "abseiling", "abseiling"),
    ("applauding", "applauding", "applauding"),
    ("archery", "archery", "archery"),
    ("arm wrestling", "arm wrestling", "arm wrestling"),
    ("bobsledding", "bobsledding", "bobsledding"),
    ("bungee jumping", "bungee jumping", "bungee jumping"),
    ("cartwheeling", "cartwheeling", "cartwheeling"),
    ("clapping", "clapping", "clapping"),
    ("hula hooping", "hula hooping", "hula hooping"),
    ("juggling balls", "juggling balls", "juggling balls"),
    ("playing piano", "playing piano", "playing piano"),
    ("sweeping floor", "sweeping floor", "sweeping floor"),
    ("using segway", "using segway", "using segway"),
    ("windsurfing", "windsurfing", "windsurfing"),
    ("balloon blowing", "inflating balloons", "inflating balloons"),
    ("dying hair", "dyeing hair", "dyeing hair"),
    ("garbage collecting", "person collecting garbage", "person collecting garbage"),
    ("making bed", "making the bed", "making the bed"),
    ("strumming guitar", "playing guitar", "playing guitar"),
    ("tying tie", "tying necktie", "tying necktie"),
    (
        "passing American football (not in game)",
        "passing american football (not in game)",
        "passing American football (not in game)",
    ),
    ("hugging", "hugging (not baby)", "hugging (not baby)"),
    ("driving car", "driving car", "driving car"),
    ("drinking beer", "", ""),
    ("", "acting in play", "acting in play"),
    ("", "adjusting glasses", "adjusting glasses"),
    ("", "alligator wrestling", "alligator wrestling"),
    ("", "bull fighting", ""),
    ("", "hugging baby", "hugging baby"),
    ("", "laying stone", "laying stone"),
    ("", "luge", "luge"),
    ("", "opening wine bottle", "opening wine bottle"),
    ("", "sawing wood", "sawing wood"),
    ("", "using circular saw", "using circular saw"),
    ("", "", "brushing floor"),
    ("", "", "carving marble"),
    ("", "", "lighting candle"),
    ("", "", "pouring wine"),
    ("", "", "silent disco"),
    ("", "", "steering car"),
)
# In the K600 test list only, as in the real lists (where it is one clip too).
TEST_ONLY = "dealing cards"
# Single clips whose label differs in the newest release.
RELABELLED = {
    "applauding": "clapping",
    "driving car": "steering car",
    "sweeping floor": "brushing floor",
    "sawing wood": "using circular saw",
    "luge": "bobsledding",
}
ALPHABET = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"))

# (list, line number in the file, the line): fixed places, so that their number is known beforehand.
BAD_LINES = {
    ("kinetics400_train", 4): ("archery,Kq3_missing", "2 fields, expected 5"),
    ("kinetics400_validate", 7): ("clapping,,31,41,validate", "no youtube_id"),
    ("kinetics600_train", 12): ("luge,aB3-dE6_hI9,soon,10,train", "time_start is not a number"),
    ("kinetics600_test", 9): ("luge,aB3-dE6_hJ0,52,42,test", "time_end before time_start"),
    ("kinetics600_validate", 5): ("yoga,short,0,10,validate", "youtube_id is not 11 characters"),
    ("kinetics700_2020_train", 6): ("<html>404 Not Found</html>", "not a row of the list"),
    ("kinetics700_2020_validate", 8): (None, "the line before, a second time"),
}
# Class of K400 -> what is wrong with the video of its extra clip.
BAD_VIDEOS = {
    "abseiling": "zero bytes",
    "archery": "cut off: no moov box",
    "clapping": "a web page saved as mp4",
    "bungee jumping": "listed, no file",
    "juggling balls": f"{SHORT_FRAMES} frames: too short",
    "windsurfing": f"header says {FRAMES} frames, fewer decode",
}
ORIGINAL_SPLITS = ("train", "train", "validate", "test", "train")
# Which new clips of a known class have a video: one of each split.
LATER_VIDEOS = (1, 2, 3)
WEB_PAGE = (
    b"<!DOCTYPE html><html><head><title>Video unavailable</title></head><body></body></html>\n"
)


@dataclass(frozen=True)
class Clip:
    """`labels` and `splits` have one entry a release, "" where the clip is not listed."""

    youtube_id: str
    start: int
    class_number: int
    labels: tuple[str, ...]
    splits: tuple[str, ...]

    @property
    def uid(self) -> str:
        return f"{self.youtube_id}_{self.start:06d}_{self.start + 10:06d}"

    @property
    def path(self) -> str:
        label = next(filter(None, self.labels))
        return f"videos/{label}/{self.uid}.mp4"


def bad_kowl_records(seed: int = 0) -> list[tuple[str, str]]:
    """(path below the root, what is wrong); a line of a list is named by `file:line number`."""
    lines = [(f"lists/{name}.csv.gz:{line}", BAD_LINES[name, line][1]) for name, line in BAD_LINES]
    names = [label for label, _, _ in CLASSES]
    videos = [
        (_clip(seed, names.index(label), 0, "extra").path, wrong)
        for label, wrong in BAD_VIDEOS.items()
    ]
    return lines + videos


def write_kowl(
    root: Path,
    seed: int = 0,
    *,
    clips_per_class: int = 24,
    videos_per_class: int = 4,
    bad_records: bool = True,
) -> None:
    """About `clips_per_class` new clips for each class and release, the first few with a video.

    A class has videos for the first `videos_per_class` clips of the release that introduces it and
    for one fewer of each later release, of all splits. The six extra clips of `BAD_VIDEOS` are
    always listed, and good when `bad_records` is off.
    """
    clips = [
        _clip(seed, number, release, str(k))
        for number, names in enumerate(CLASSES)
        for release in range(3)
        if names[release]
        for k in range(_count(seed, number, release, clips_per_class))
    ]
    names = [label for label, _, _ in CLASSES]
    extra = {label: _clip(seed, names.index(label), 0, "extra") for label in BAD_VIDEOS}
    clips += extra.values()
    test_only = item_rng(seed, TEST_ONLY)
    clips.append(Clip(_youtube_id(test_only), 7, -1, ("", TEST_ONLY, ""), ("", "test", "")))
    _write_lists(root, clips, bad_records)
    for number, (release, k) in _videos(videos_per_class):
        clip = _clip(seed, number, release, str(k))
        put(root / clip.path, _video(seed, clip, FRAMES))
    for label, clip in extra.items():
        make = partial(_video, seed, clip)
        if not bad_records:
            put(root / clip.path, make(FRAMES))
        elif BAD_VIDEOS[label] != "listed, no file":
            put(root / clip.path, _bad_video(BAD_VIDEOS[label], make))


def _count(seed: int, number: int, release: int, clips_per_class: int) -> int:
    """Classes differ in size; a release adds fewer clips to a class that it did not introduce."""
    share = item_rng(seed, "count", CLASSES[number], release).uniform(0.4, 1.2)
    introduced = release == 0 or not CLASSES[number][release - 1]
    return max(len(ORIGINAL_SPLITS), round(share * clips_per_class * (1 if introduced else 0.45)))


def _videos(videos_per_class: int) -> Iterator[tuple[int, tuple[int, int]]]:
    for number, names in enumerate(CLASSES):
        present = [release for release in range(3) if names[release]]
        for k in range(videos_per_class):
            yield number, (present[0], k)
        for release in present[1:]:
            for k in LATER_VIDEOS[: max(0, videos_per_class - 1)]:
                yield number, (release, k)


# ---------------------------------------------------------------- lists


def _youtube_id(rng: np.random.Generator) -> str:
    return "".join(rng.choice(ALPHABET, 11))


def _clip(seed: int, number: int, release: int, name: str) -> Clip:
    """A clip first listed in `release`; its later fate follows the shares of the real lists."""
    names = CLASSES[number]
    rng = item_rng(seed, "clip", names, release, name)
    youtube_id, start = _youtube_id(rng), int(rng.integers(0, 400) * rng.integers(0, 2))
    split = "train"
    if name != "extra":
        # The first clips of a class cover the three splits, so that each has videos.
        place = int(name)
        split = (
            ORIGINAL_SPLITS[place]
            if place < len(ORIGINAL_SPLITS)
            else str(rng.choice(["train", "validate", "test"], p=[0.64, 0.12, 0.24]))
        )
        # One source video gives several clips in later releases only.
        if release == 2 and place >= len(ORIGINAL_SPLITS) and rng.random() < 0.1:
            youtube_id = _clip(seed, number, release, "0").youtube_id
            start = 400 + 10 * place
    labels, splits = [""] * 3, [""] * 3
    labels[release], splits[release] = names[release], split
    for later in range(release + 1, 3):
        stays, moves, new_label = rng.random(), rng.random(), rng.random()
        if not names[later] or stays > (0.8 if later == 1 else 0.72):
            continue
        labels[later], splits[later] = names[later], split
        if later == 1 and moves < 0.05:
            splits[later] = "validate" if split == "train" else "train"
        elif later == 2 and split != "train":
            splits[later] = "train" if moves < 0.7 else "validate" if moves < 0.9 else "test"
        if later == 2 and names[later] in RELABELLED and new_label < 0.12:
            labels[later] = RELABELLED[names[later]]
    return Clip(youtube_id, start, number, tuple(labels), tuple(splits))


def _write_lists(root: Path, clips: list[Clip], bad_records: bool) -> None:
    for release, name in enumerate(RELEASES):
        for split in ("train", "validate", "test"):
            listing = [clip for clip in clips if clip.splits[release] == split]
            by_label = name == "kinetics600" and split == "train"
            listing.sort(
                key=lambda c: (c.labels[release] if by_label else "", c.youtube_id, c.start)
            )
            labelled = not (name == "kinetics700_2020" and split == "test")
            lines = [HEADER if labelled else HEADER.removeprefix("label,")]
            for clip in listing:
                row = f"{clip.youtube_id},{clip.start},{clip.start + 10},{split}"
                lines.append(f"{clip.labels[release]},{row}" if labelled else row)
            for (of, line), (text, _) in BAD_LINES.items() if bad_records else ():
                if of == f"{name}_{split}":
                    lines.insert(line - 1, lines[line - 2] if text is None else text)
            data = gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0)
            put(root / "lists" / f"{name}_{split}.csv.gz", data)


# ---------------------------------------------------------------- videos


def _frames(seed: int, clip: Clip, count: int) -> Iterator[np.ndarray]:
    """Form, hue, path, speed and scene follow from the class; everything else from the clip."""
    import cv2

    rng = item_rng(seed, "video", clip.uid)
    number = clip.class_number
    path, form = number % 8, number * 3 % 5
    hue = (number * 67 + rng.normal(0, 6)) % 180
    pace = (0.6, 1.0, 1.5)[number % 3] * rng.uniform(0.85, 1.15)
    colour = cv2.cvtColor(
        np.array([[[hue, rng.uniform(150, 255), rng.uniform(170, 255)]]]).astype(np.uint8),
        cv2.COLOR_HSV2BGR,
    )[0, 0].tolist()
    scene = item_rng(seed, "scene", number).uniform(30, 150, (2, 2, 3))
    corners = (scene + rng.normal(0, SCENE_SPREAD, (2, 2, 3))).clip(0, 255).astype(np.float32)
    background = cv2.resize(corners, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
    radius, phase = rng.uniform(8, 12), rng.uniform(0, 2 * np.pi)
    center = rng.uniform(-4, 4, 2) + SIZE / 2
    for k in range(count):
        t = phase + 2 * np.pi * pace * k / FPS
        wave = np.array([np.cos(t), np.sin(t)])
        offset, turn, scale = [
            ((20 * wave[0], 0), 0.0, 1.0),
            ((0, 20 * wave[0]), 0.0, 1.0),
            (18 * wave, 0.0, 1.0),
            ((0, 0), t, 1.3),
            ((0, 0), 0.0, 1.2 + 0.7 * wave[0]),
            ((18 * wave[0], -abs(20 * wave[1]) + 10), 0.0, 0.9),
            ((18 * wave[0], 9 * np.sin(2 * t)), t / 2, 1.0),
            (((t * 9) % SIZE - SIZE / 2, 14 * wave[1]), t, 0.8),
        ][path]
        frame = background + rng.normal(0, 7, (SIZE, SIZE, 1))
        points = _form(form, turn) * radius * scale + center + offset
        cv2.fillPoly(frame, [np.round(points * 16).astype(np.int32)], colour, cv2.LINE_AA, 4)
        yield frame.clip(0, 255).astype(np.uint8)


def _form(form: int, turn: float) -> np.ndarray:
    """Outline of a disc, square, triangle, star or bar."""
    sides = (24, 4, 3, 10, 4)[form]
    angle = np.linspace(0, 2 * np.pi, sides, endpoint=False) + np.pi / 4 * (form in (1, 4))
    outline = np.column_stack([np.cos(angle), np.sin(angle)])
    if form == 3:
        outline[1::2] *= 0.45
    if form == 4:
        outline *= (1.5, 0.5)
    spin = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    return outline @ spin


def _video(seed: int, clip: Clip, count: int) -> bytes:
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (SIZE, SIZE))
        if not writer.isOpened():
            raise RuntimeError(
                "this OpenCV build cannot write mp4v; install opencv-python-headless"
            )
        for frame in _frames(seed, clip, count):
            writer.write(frame)
        writer.release()
        return file.read_bytes()


def _bad_video(wrong: str, make: partial) -> bytes:
    if wrong == "zero bytes":
        return b""
    if wrong.startswith("a web page"):
        return WEB_PAGE
    if wrong.endswith("too short"):
        return make(SHORT_FRAMES)
    data = make(FRAMES)
    if wrong.startswith("cut off"):
        return data[: len(data) * 6 // 10]
    data = _index_first(data)
    return data[: len(data) * 6 // 10]


def _index_first(data: bytes) -> bytes:
    """The same video with the moov box (the index) before the frames, so that a cut keeps it."""
    boxes, at = {}, 0
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        boxes[kind] = data[at : at + size]
        at += size
    moov = bytearray(boxes.pop(b"moov"))
    table = moov.index(b"stco") + 8
    (entries,) = struct.unpack_from(">I", moov, table)
    for place in range(table + 4, table + 4 + 4 * entries, 4):
        struct.pack_into(">I", moov, place, struct.unpack_from(">I", moov, place)[0] + len(moov))
    ftyp = boxes.pop(b"ftyp")
    return ftyp + bytes(moov) + b"".join(boxes.values())
