"""Sample image sets for semantic anomaly detection: out of a seed, into the three raw layouts.

- `cifar10/cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin` and `batches.meta.txt`: records of
  1 label byte and 3,072 pixel bytes, channel after channel.
- `stl10/{train,test}_{X,y}.bin` and `class_names.txt`: 3 x 96 x 96 bytes an image, each channel
  column after column, labels 1..10.
- `imagenet/{train,val}/<wnid>/*.JPEG`: the six members of the fungus subset (Table 7 of the
  paper), RGB JPEG of many sizes, file names as in ILSVRC.

Each class is a drawing of random proportions, colours, pose and light before a scene that only
leans towards the class, so that held-out classes can be found, but not by one colour.
"""

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.learning.draws import item_rng
from tasks.sample.files import put

Colour = Sequence[float] | np.ndarray

CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
STL_CLASSES = (
    "airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck",
)  # fmt: skip
FUNGI = {
    "n13040303": "stinkhorn",
    "n13054560": "bolete",
    "n13052670": "hen-of-the-woods",
    "n13044778": "earthstar",
    "n13037406": "gyromitra",
    "n12985857": "coral fungus",
}
# (width, height), as often seen in ILSVRC.
IMAGE_SIZES = (
    (500, 375), (375, 500), (500, 333), (320, 240), (160, 170), (250, 342), (448, 395), (327, 327),
    (200, 300), (300, 225),
)  # fmt: skip
BAD_IMAGES = {
    "imagenet/train/n13040303/n13040303_90001.JPEG": "JPEG cut off in the middle",
    "imagenet/train/n13054560/n13054560_90002.JPEG": "CMYK JPEG: readable, four channels",
    "imagenet/train/n13052670/n13052670_90003.JPEG": "greyscale JPEG: readable, one channel",
    "imagenet/train/n13044778/n13044778_90004.JPEG": "16-bit PNG under the name .JPEG: readable",
    "imagenet/train/n13037406/n13037406_90005.JPEG": "PNG whose header declares 60000 x 60000",
    "imagenet/train/n12985857/n12985857_90006.JPEG": "text under the name .JPEG",
}


def bad_semantic_records() -> list[tuple[str, str]]:
    """(path below the root, what is wrong); three of them can be read and are only unusual."""
    return list(BAD_IMAGES.items())


def write_semantic(
    root: Path,
    seed: int = 0,
    *,
    cifar_train: int = 60,
    cifar_test: int = 20,
    stl_train: int = 10,
    stl_test: int = 8,
    imagenet_train: int = 20,
    imagenet_val: int = 10,
    bad_records: bool = True,
) -> None:
    """The sizes are images for each class or member; `cifar_train` is spread over five batches."""
    if cifar_train % 5:
        raise ValueError(f"cifar_train is {cifar_train}: five equal batches need a multiple of 5")
    _write_cifar(root / "cifar10" / "cifar-10-batches-bin", seed, cifar_train, cifar_test)
    _write_stl(root / "stl10", seed, {"train": stl_train, "test": stl_test})
    _write_imagenet(root, seed, imagenet_train, imagenet_val)
    for path in BAD_IMAGES if bad_records else ():
        put(root / path, _bad_image(seed, path))


# ---------------------------------------------------------------- layouts


def _mixed(seed: int, items: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """(label, item name) in an order that is random but does not depend on the other items."""
    return sorted(items, key=lambda item: item_rng(seed, item[1], "order").bytes(8))


def _write_cifar(folder: Path, seed: int, train: int, test: int) -> None:
    batches: dict[str, list[tuple[int, str]]] = {}
    for label, name in enumerate(CIFAR_CLASSES):
        for k in range(train):
            batches.setdefault(f"data_batch_{k % 5 + 1}", []).append(
                (label, f"cifar/{name}/train/{k}")
            )
        for k in range(test):
            batches.setdefault("test_batch", []).append((label, f"cifar/{name}/test/{k}"))
    for batch, items in batches.items():
        records = [
            bytes([label])
            + _draw(seed, item, CIFAR_CLASSES[label], 32, 32).transpose(2, 0, 1).tobytes()
            for label, item in _mixed(seed, items)
        ]
        put(folder / f"{batch}.bin", b"".join(records))
    put(folder / "batches.meta.txt", "".join(f"{name}\n" for name in CIFAR_CLASSES).encode())


def _write_stl(folder: Path, seed: int, counts: dict[str, int]) -> None:
    for part, count in counts.items():
        items = [
            (label, f"stl/{name}/{part}/{k}")
            for label, name in enumerate(STL_CLASSES, start=1)
            for k in range(count)
        ]
        items = _mixed(seed, items)
        images = [_draw(seed, item, STL_CLASSES[label - 1], 96, 96) for label, item in items]
        put(
            folder / f"{part}_X.bin",
            b"".join(image.transpose(2, 1, 0).tobytes() for image in images),
        )
        put(folder / f"{part}_y.bin", bytes(label for label, _ in items))
    put(folder / "class_names.txt", "".join(f"{name}\n" for name in STL_CLASSES).encode())


def _write_imagenet(root: Path, seed: int, train: int, val: int) -> None:
    for member, (wnid, name) in enumerate(FUNGI.items()):
        for k in range(train):
            path = f"imagenet/train/{wnid}/{wnid}_{k * 37 + 3}.JPEG"
            put(root / path, _jpeg(_photo(seed, path, name)))
        for k in range(val):
            path = f"imagenet/val/{wnid}/ILSVRC2012_val_{k * len(FUNGI) + member + 1:08d}.JPEG"
            put(root / path, _jpeg(_photo(seed, path, name)))


def _photo(seed: int, path: str, name: str) -> np.ndarray:
    width, height = item_rng(seed, path, "size").choice(IMAGE_SIZES)
    return _draw(seed, path, name, int(height), int(width))


def _jpeg(image: np.ndarray) -> bytes:
    import cv2

    ok, data = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 85])
    if not ok:
        raise RuntimeError("OpenCV could not encode a JPEG")
    return data.tobytes()


def _bad_image(seed: int, path: str) -> bytes:
    from PIL import Image

    wrong = BAD_IMAGES[path]
    image = _photo(seed, path, FUNGI[path.split("/")[2]])
    if wrong.startswith("JPEG cut off"):
        data = _jpeg(image)
        return data[: len(data) // 2]
    if wrong.startswith("text"):
        return b"This file was moved. Ask the owner of the collection for access.\n"
    if wrong.startswith("PNG whose header"):
        header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        )
    buffer = io.BytesIO()
    if wrong.startswith("CMYK"):
        Image.fromarray(image).convert("CMYK").save(buffer, "JPEG", quality=85)
    elif wrong.startswith("greyscale"):
        Image.fromarray(image).convert("L").save(buffer, "JPEG", quality=85)
    else:
        Image.fromarray(image.mean(axis=2).astype(np.uint16) * 257).save(buffer, "PNG")
    return buffer.getvalue()


# ---------------------------------------------------------------- drawing


def _hsv(hue: float, saturation: float, value: float) -> np.ndarray:
    """Hue in turns; RGB 0..255."""
    k = (np.array([5.0, 3.0, 1.0]) + hue * 6) % 6
    return 255 * value * (1 - saturation * np.clip(np.minimum(k, 4 - k), 0, 1))


class _Pen:
    """Fills shapes given in units of half the shorter side, turned, scaled and shifted as one."""

    def __init__(self, rng: np.random.Generator, image: np.ndarray, tilt: float):
        self.rng = rng
        self.image = image
        height, width = image.shape[:2]
        turn, scale = rng.normal(0, tilt), min(height, width) / 2 * rng.uniform(0.75, 1.05)
        flip = rng.choice([-1, 1])
        cos, sin = np.cos(turn), np.sin(turn)
        self.matrix = scale * np.array([[cos * flip, sin * flip], [-sin, cos]])
        self.shift = np.array([width, height]) / 2 + rng.normal(0, 0.08 * min(height, width), 2)
        self.scale = scale

    def fill(self, points: Sequence[Sequence[float]] | np.ndarray, colour: Colour) -> None:
        import cv2

        place = np.asarray(points, float) @ self.matrix + self.shift
        cv2.fillPoly(
            self.image, [np.round(place * 16).astype(np.int32)], tuple(colour), cv2.LINE_AA, 4
        )

    def oval(
        self, x: float, y: float, rx: float, ry: float, colour: Colour, turn: float = 0
    ) -> None:
        angle = np.linspace(0, 2 * np.pi, 28, endpoint=False)
        points = np.column_stack([rx * np.cos(angle), ry * np.sin(angle)])
        spin = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        self.fill(points @ spin + (x, y), colour)

    def stroke(self, points: Sequence[Sequence[float]], width: float, colour: Colour) -> None:
        import cv2

        place = np.round((np.asarray(points, float) @ self.matrix + self.shift) * 16).astype(
            np.int32
        )
        thick = max(1, round(width * self.scale))
        cv2.polylines(self.image, [place], False, tuple(colour), thick, cv2.LINE_AA, 4)


SCENES = ("sky", "water", "grass", "road", "indoors", "forest")


def _scene(rng: np.random.Generator, favourite: str, height: int, width: int) -> np.ndarray:
    """Two bands with a soft border and large blotches."""
    import cv2

    kind = favourite if rng.random() < 0.6 else str(rng.choice(SCENES))
    u = rng.uniform
    sky = _hsv(u(0.52, 0.64), u(0.1, 0.55), u(0.7, 1))
    above, below = {
        "sky": (sky, sky * u(0.85, 1.1)),
        "water": (sky, _hsv(u(0.48, 0.62), u(0.3, 0.7), u(0.3, 0.7))),
        "grass": (sky, _hsv(u(0.2, 0.35), u(0.3, 0.7), u(0.35, 0.7))),
        "road": (_hsv(u(0, 1), u(0, 0.3), u(0.5, 0.9)), _hsv(u(0, 1), 0.05, u(0.3, 0.6))),
        "indoors": (
            _hsv(u(0, 1), u(0.05, 0.4), u(0.5, 0.95)),
            _hsv(u(0.04, 0.12), u(0.2, 0.6), u(0.3, 0.7)),
        ),
        "forest": (
            _hsv(u(0.2, 0.4), u(0.3, 0.6), u(0.15, 0.5)),
            _hsv(u(0.05, 0.15), u(0.3, 0.6), u(0.2, 0.5)),
        ),
    }[kind]
    row = np.arange(height)[:, None, None] / height
    share = 1 / (1 + np.exp(-(row - u(0.4, 0.75)) * 25))
    image = (above * (1 - share) + below * share).astype(np.float32)
    blotches = rng.normal(0, u(4, 14), (6, 6, 1)) + rng.normal(0, 6, (6, 6, 3))
    return image + cv2.resize(
        blotches.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC
    )


def _draw(seed: int, item: str, name: str, height: int, width: int) -> np.ndarray:
    """RGB uint8; small pictures are drawn larger and shrunk, so that edges are smooth."""
    import cv2

    rng = item_rng(seed, item)
    times = max(1, 96 // min(height, width))
    favourite, tilt, draw = DRAWINGS[name]
    image = _scene(rng, favourite, height * times, width * times)
    draw(_Pen(rng, image, tilt), rng)
    grain = rng.normal(1, 0.09, (12, 12, 1)).astype(np.float32)
    image *= cv2.resize(grain, image.shape[1::-1], interpolation=cv2.INTER_CUBIC)[..., None]
    light = np.linspace(-1, 1, image.shape[1]) * rng.normal(0, 0.12) + rng.uniform(0.8, 1.1)
    image *= light[None, :, None].astype(np.float32)
    small: Any = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    small += 4 * rng.standard_normal((height, width, 1), dtype=np.float32)
    return small.clip(0, 255).astype(np.uint8)


def _wheels(pen: _Pen, places: Sequence[float], y: float, radius: float) -> None:
    for x in places:
        pen.oval(x, y, radius, radius, (25, 25, 28))
        pen.oval(x, y, radius * 0.5, radius * 0.5, (150, 150, 155))


def _airplane(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    body = _hsv(u(0, 1), u(0, 0.2), u(0.6, 1))
    r, span = u(0.09, 0.15), u(0.4, 0.8)
    pen.fill([(-0.1, 0), (u(0.15, 0.45), -span), (u(0.3, 0.55), -span), (0.3, 0)], body * 0.75)
    pen.oval(0, 0, 0.9, r, body)
    pen.fill([(0.5, 0), (0.85, -u(0.3, 0.45)), (0.95, -0.3), (0.85, 0)], _hsv(u(0, 1), 0.7, 0.8))
    pen.fill([(-0.15, 0.03), (u(0.2, 0.5), span), (u(0.35, 0.6), span), (0.25, 0.03)], body * 0.85)
    pen.fill([(-0.82, -0.04), (-0.7, -0.07), (-0.65, 0)], (40, 50, 70))
    for x in np.linspace(-0.5, 0.4, 7):
        pen.oval(x, -r * 0.25, 0.025, 0.025, (60, 70, 90))


def _automobile(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    body = _hsv(u(0, 1), u(0.5, 1), u(0.4, 1))
    roof, front, back = u(0.3, 0.5), u(0.25, 0.5), u(0.2, 0.55)
    pen.fill(
        [(-front, 0.02), (-front * 0.5, -roof), (back * 0.8, -roof), (back + 0.15, 0.02)],
        body * 0.9,
    )
    pen.fill(
        [
            (-front + 0.08, 0),
            (-front * 0.45, -roof + 0.07),
            (back * 0.7, -roof + 0.07),
            (back + 0.05, 0),
        ],
        (120, 150, 170),
    )
    pen.fill(
        [(-0.95, 0.05), (-0.8, -0.02), (0.9, -0.02), (0.95, 0.1), (0.93, 0.35), (-0.95, 0.35)], body
    )
    pen.oval(-0.9, 0.12, 0.06, 0.05, (250, 245, 200))
    pen.oval(0.92, 0.12, 0.04, 0.05, (200, 30, 30))
    _wheels(pen, (-0.55, 0.55), 0.36, u(0.16, 0.22))


def _truck(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    cab, load = _hsv(u(0, 1), u(0.5, 1), u(0.4, 1)), _hsv(u(0, 1), u(0, 0.5), u(0.5, 1))
    top, join = u(0.5, 0.75), u(-0.45, -0.25)
    pen.fill([(join, -top), (0.97, -top), (0.97, 0.35), (join, 0.35)], load)
    for x in np.linspace(join, 0.97, int(rng.integers(3, 7)))[1:-1]:
        pen.stroke([(x, -top), (x, 0.35)], 0.02, load * 0.8)
    pen.fill(
        [(-0.97, 0.0), (-0.85, -0.4), (join - 0.03, -0.4), (join - 0.03, 0.4), (-0.97, 0.4)], cab
    )
    pen.fill(
        [(-0.9, -0.02), (-0.8, -0.32), (join - 0.15, -0.32), (join - 0.15, -0.02)], (130, 160, 180)
    )
    _wheels(pen, (-0.7, 0.35, 0.72) if rng.random() < 0.6 else (-0.65, 0.6), 0.45, u(0.15, 0.2))


def _ship(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    hull = _hsv(u(0, 1), u(0.2, 0.9), u(0.2, 0.7))
    if rng.random() < 0.4:
        sail = _hsv(u(0, 1), u(0, 0.3), u(0.85, 1))
        pen.stroke([(0, 0.3), (0, -0.9)], 0.03, (80, 60, 40))
        pen.fill([(0.04, -0.85), (u(0.5, 0.7), 0.15), (0.04, 0.15)], sail)
        pen.fill([(-0.04, -0.7), (-u(0.4, 0.6), 0.15), (-0.04, 0.15)], sail * 0.9)
    else:
        deck = _hsv(u(0, 1), u(0, 0.15), u(0.8, 1))
        for k in range(int(rng.integers(1, 4))):
            pen.fill(
                [
                    (-0.35 + k * 0.1, 0.25 - k * 0.18),
                    (-0.35 + k * 0.1, 0.05 - k * 0.18),
                    (0.5, 0.05 - k * 0.18),
                    (0.5, 0.25 - k * 0.18),
                ],
                deck * (1 - 0.1 * k),
            )
        pen.fill([(0.1, -0.2), (0.12, -0.55), (0.3, -0.55), (0.3, -0.2)], _hsv(u(0, 1), 0.8, 0.7))
    pen.fill([(-0.98, 0.2), (0.95, 0.2), (0.75, u(0.45, 0.6)), (-0.7, 0.5)], hull)
    pen.fill(
        [(-1.4, 0.52), (1.4, 0.48), (1.4, 0.62), (-1.4, 0.62)], _hsv(0.55, u(0.2, 0.5), u(0.5, 0.9))
    )


def _bird(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    body, wing = _hsv(u(0, 1), u(0.2, 0.9), u(0.3, 0.95)), _hsv(u(0, 1), u(0.2, 0.8), u(0.2, 0.8))
    pen.stroke([(-0.05, 0.2), (-0.05, 0.75)], 0.04, (120, 90, 50))
    pen.stroke([(0.1, 0.2), (0.12, 0.75)], 0.04, (120, 90, 50))
    pen.fill([(0.3, -0.05), (u(0.8, 1), u(-0.2, 0.3)), (0.85, 0.25), (0.3, 0.2)], wing)
    pen.oval(0, 0.05, 0.48, u(0.26, 0.36), body, 0.2)
    pen.oval(-0.42, -0.3, 0.2, 0.19, body * u(0.8, 1.1))
    pen.fill([(-0.58, -0.34), (-0.58 - u(0.15, 0.35), -0.26), (-0.58, -0.22)], (235, 160, 40))
    pen.oval(-0.48, -0.35, 0.035, 0.035, (10, 10, 10))
    pen.fill([(-0.2, -0.05), (u(0.3, 0.6), u(-0.6, 0.05)), (0.35, 0.22)], wing * 0.85)


def _frog(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    skin = _hsv(u(0.15, 0.4), u(0.4, 0.9), u(0.35, 0.8))
    for side in (-1, 1):
        pen.oval(side * 0.6, 0.35, 0.35, 0.2, skin * 0.8, side * 0.5)
        pen.stroke([(side * 0.3, 0.3), (side * 0.45, 0.7), (side * 0.65, 0.72)], 0.09, skin * 0.75)
    pen.oval(0, 0.15, u(0.55, 0.7), u(0.4, 0.5), skin)
    pen.oval(0, 0.35, 0.4, 0.22, _hsv(0.17, 0.25, 0.9))
    for side in (-1, 1):
        pen.oval(side * 0.3, -0.3, 0.15, 0.15, skin * 1.1)
        pen.oval(side * 0.3, -0.32, 0.08, 0.09, (245, 220, 80))
        pen.oval(side * 0.3, -0.32, 0.04, 0.07, (10, 10, 10))
    pen.stroke([(-0.35, 0.0), (0, 0.08), (0.35, 0.0)], 0.03, skin * 0.4)
    for _ in range(int(rng.integers(0, 9))):
        pen.oval(u(-0.45, 0.45), u(-0.15, 0.15), u(0.03, 0.08), u(0.03, 0.07), skin * 0.6)


def _beast(
    pen: _Pen, rng: np.random.Generator, coat: np.ndarray, *, leg: float, long: float, deep: float,
    neck: tuple[float, float], head: float, muzzle: float,
) -> tuple[float, float]:  # fmt: skip
    """Legs, body, neck and head of an animal seen from the side; returns where its head is."""
    foot = deep + leg
    for x in (-long * 0.85, -long * 0.6, long * 0.6, long * 0.85):
        pen.stroke([(x, 0), (x + rng.normal(0, 0.06), foot)], 0.1, coat * rng.uniform(0.7, 0.85))
    pen.oval(0, 0, long, deep, coat)
    x, y = -long * 0.85 - neck[0], -neck[1]
    pen.stroke([(-long * 0.75, -0.02), (x, y)], deep * 0.9, coat)
    pen.oval(x, y, head, head * 0.85, coat)
    pen.oval(x - head * 0.7 - muzzle / 2, y + head * 0.2, muzzle, head * 0.5, coat * 0.9)
    pen.oval(x - head * 0.2, y - head * 0.2, 0.03, 0.03, (15, 10, 10))
    return x, y


def _cat(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    coat = _hsv(u(0.03, 0.12), u(0, 0.6), u(0.2, 0.95))
    pen.stroke([(0.45, 0), (0.75, -0.2), (0.7, -u(0.5, 0.8))], 0.09, coat * 0.9)
    x, y = _beast(
        pen,
        rng,
        coat,
        leg=u(0.25, 0.35),
        long=0.5,
        deep=u(0.22, 0.28),
        neck=(0.02, 0.28),
        head=0.25,
        muzzle=0.03,
    )
    for side in (-0.15, 0.12):
        pen.fill(
            [(x + side - 0.09, y - 0.13), (x + side, y - 0.42), (x + side + 0.1, y - 0.13)],
            coat * 0.85,
        )
    if rng.random() < 0.5:
        for stripe in np.linspace(-0.3, 0.35, 6):
            pen.stroke([(stripe, -0.22), (stripe + 0.05, 0.1)], 0.04, coat * 0.55)
    for whisker in (0.02, 0.08):
        pen.stroke([(x - 0.2, y + whisker), (x - 0.45, y + whisker * 2)], 0.012, (240, 240, 240))


def _dog(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    coat = _hsv(u(0.04, 0.12), u(0.1, 0.7), u(0.15, 0.9))
    pen.stroke([(0.5, -0.1), (0.8, -u(0.2, 0.5))], 0.07, coat)
    x, y = _beast(
        pen,
        rng,
        coat,
        leg=u(0.35, 0.5),
        long=0.55,
        deep=u(0.2, 0.27),
        neck=(0.05, u(0.3, 0.4)),
        head=0.2,
        muzzle=u(0.14, 0.22),
    )
    pen.oval(x + 0.08, y + 0.08, 0.08, u(0.18, 0.26), coat * 0.6, -0.2)
    pen.oval(x - 0.38, y + 0.02, 0.05, 0.04, (15, 12, 12))
    if rng.random() < 0.4:
        for _ in range(3):
            pen.oval(u(-0.35, 0.35), u(-0.1, 0.1), u(0.06, 0.16), u(0.05, 0.12), coat * 0.5 + 20)
    pen.stroke([(x + 0.12, y + 0.2), (x + 0.28, y + 0.12)], 0.05, _hsv(u(0, 1), 0.9, 0.9))


def _deer(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    coat = _hsv(u(0.05, 0.09), u(0.45, 0.7), u(0.4, 0.7))
    pen.oval(0.5, -0.1, 0.08, 0.07, (235, 230, 220))
    x, y = _beast(
        pen,
        rng,
        coat,
        leg=u(0.6, 0.75),
        long=0.48,
        deep=0.2,
        neck=(0.1, u(0.42, 0.52)),
        head=0.13,
        muzzle=0.1,
    )
    pen.oval(x + 0.12, y - 0.08, 0.1, 0.045, coat * 0.8, 0.5)
    if rng.random() < 0.75:
        for side in (-0.08, 0.12):
            tip = (x + side * 3, y - u(0.4, 0.55))
            pen.stroke([(x, y - 0.1), (x + side * 1.6, y - 0.28), tip], 0.035, (150, 120, 80))
            pen.stroke(
                [(x + side * 1.6, y - 0.28), (x + side * 0.4, y - 0.42)], 0.03, (150, 120, 80)
            )
    for _ in range(int(rng.integers(0, 10))):
        pen.oval(u(-0.35, 0.35), u(-0.14, 0.05), 0.025, 0.025, (240, 225, 200))


def _horse(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    coat = _hsv(u(0.02, 0.08), u(0.1, 0.8), u(0.15, 0.85))
    mane = coat * u(0.2, 0.5)
    pen.stroke([(0.55, -0.12), (0.78, 0.1), (0.75, u(0.35, 0.55))], 0.13, mane)
    x, y = _beast(
        pen,
        rng,
        coat,
        leg=u(0.5, 0.62),
        long=0.58,
        deep=u(0.27, 0.32),
        neck=(0.12, u(0.5, 0.62)),
        head=0.15,
        muzzle=u(0.18, 0.24),
    )
    pen.stroke([(x + 0.1, y - 0.1), (x + 0.24, y + 0.25), (-0.38, -0.15)], 0.11, mane)
    pen.fill([(x, y - 0.1), (x + 0.04, y - 0.28), (x + 0.1, y - 0.08)], coat * 0.8)
    if rng.random() < 0.3:
        pen.fill([(-0.2, -0.3), (0.2, -0.3), (0.15, 0), (-0.15, 0)], _hsv(u(0, 1), 0.7, 0.6))


def _monkey(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    coat = _hsv(u(0.03, 0.1), u(0.2, 0.6), u(0.15, 0.55))
    skin = _hsv(u(0.03, 0.08), u(0.3, 0.5), u(0.6, 0.9))
    curl = [(0.3 + 0.3 * np.sin(a), 0.6 - 0.25 * a) for a in np.linspace(0, 4, 9)]
    pen.stroke([(0.2, 0.6), *curl], 0.06, coat)
    pen.oval(0, 0.35, u(0.28, 0.36), 0.42, coat)
    pen.oval(0, 0.4, 0.17, 0.27, skin * 0.9)
    for side in (-1, 1):
        pen.stroke(
            [(side * 0.25, 0.15), (side * u(0.5, 0.7), u(0.1, 0.5)), (side * 0.45, u(0.5, 0.8))],
            0.1,
            coat,
        )
        pen.stroke([(side * 0.15, 0.7), (side * 0.4, 0.9)], 0.11, coat * 0.8)
        pen.oval(side * 0.32, -0.3, 0.12, 0.13, skin)
    pen.oval(0, -0.3, 0.31, 0.3, coat)
    pen.oval(0, -0.22, 0.22, 0.2, skin)
    for side in (-1, 1):
        pen.oval(side * 0.09, -0.3, 0.04, 0.05, (15, 10, 10))
    pen.stroke([(-0.08, -0.12), (0.08, -0.12)], 0.025, skin * 0.4)


def _stinkhorn(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    stalk, width, top = _hsv(u(0, 0.12), u(0.05, 0.4), u(0.8, 1)), u(0.1, 0.16), -u(0.45, 0.75)
    pen.oval(0, 0.75, 0.28, 0.2, _hsv(u(0.05, 0.12), 0.2, u(0.6, 0.9)))
    pen.fill([(-width, 0.8), (-width * 0.8, top), (width * 0.8, top), (width, 0.8)], stalk)
    for _ in range(30):
        pen.oval(u(-width, width) * 0.8, u(top, 0.65), 0.02, 0.03, stalk * u(0.75, 0.9))
    cap = _hsv(u(0.1, 0.25), u(0.4, 0.7), u(0.15, 0.35))
    pen.fill(
        [
            (-width * 1.6, top + 0.25),
            (-width, top - 0.15),
            (width, top - 0.15),
            (width * 1.6, top + 0.25),
        ],
        cap,
    )
    pen.oval(0, top - 0.15, width, 0.06, stalk * 0.9)


def _bolete(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    for x, size in [(0.0, 1.0)] + [
        (u(-0.8, 0.8), u(0.35, 0.5)) for _ in range(int(rng.integers(0, 3)))
    ]:
        stalk, cap = (
            _hsv(u(0.08, 0.14), u(0.2, 0.5), u(0.7, 0.95)),
            _hsv(u(0.02, 0.09), u(0.5, 0.9), u(0.3, 0.65)),
        )
        base, wide = 0.8, u(0.6, 0.8) * size
        head = base - 0.9 * size
        pen.fill(
            [
                (x - 0.26 * size, base),
                (x - 0.15 * size, head),
                (x + 0.15 * size, head),
                (x + 0.26 * size, base),
            ],
            stalk,
        )
        pen.oval(
            x, head + 0.06 * size, wide * 0.95, 0.16 * size, _hsv(0.14, u(0.3, 0.6), u(0.7, 0.9))
        )
        angle = np.linspace(np.pi, 2 * np.pi, 20)
        tall = u(0.4, 0.6) * size
        pen.fill(
            np.column_stack([x + wide * np.cos(angle), head + 0.05 + tall * np.sin(angle)]), cap
        )
        pen.oval(x - wide * 0.3, head - tall * 0.5, wide * 0.2, tall * 0.15, cap * 1.3, 0.3)


def _hen_of_the_woods(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    tone = _hsv(u(0.07, 0.13), u(0.15, 0.45), u(0.5, 0.85))
    for row in range(6):
        y = -0.55 + row * 0.24
        half = 0.9 - abs(row - 3) * 0.13
        for x in np.linspace(-half, half, 7) + rng.normal(0, 0.05, 7):
            shade = u(0.6, 1.1)
            size = u(0.14, 0.22)
            pen.oval(x, y, size * 1.25, size * 0.7, tone * shade, rng.normal(0, 0.3))
            pen.oval(x, y + size * 0.35, size * 1.2, size * 0.25, tone * shade * 0.55 + 40)
            pen.oval(x, y + size * 0.1, size * 0.8, size * 0.3, tone * shade * 0.85)


def _earthstar(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    skin, count = _hsv(u(0.06, 0.12), u(0.2, 0.5), u(0.4, 0.75)), int(rng.integers(5, 10))
    start, squash = u(0, 1), u(0.55, 1)
    for k in range(count):
        middle = start + 2 * np.pi * k / count
        reach = u(0.75, 0.95)
        points = [
            (0.4 * np.cos(middle + s), 0.4 * np.sin(middle + s) * squash) for s in (-0.45, 0.45)
        ]
        points.insert(1, (reach * np.cos(middle), reach * np.sin(middle) * squash))
        pen.fill(points, skin * u(0.8, 1.1))
    pen.oval(0, 0, 0.46, 0.46 * squash, skin * 0.9)
    ball = _hsv(u(0.06, 0.1), u(0.1, 0.35), u(0.5, 0.8))
    pen.oval(0, -0.08, 0.33, 0.31, ball)
    pen.oval(-0.08, -0.18, 0.14, 0.1, ball * 1.2)
    pen.oval(0, -0.12, 0.05, 0.05, ball * 0.3)


def _gyromitra(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    stalk, cap = (
        _hsv(u(0.05, 0.12), u(0.05, 0.3), u(0.75, 0.95)),
        _hsv(u(0, 0.05), u(0.6, 0.9), u(0.3, 0.6)),
    )
    pen.fill([(-0.25, 0.85), (-0.2, 0), (0.2, 0), (0.25, 0.85)], stalk)
    wide, tall = u(0.55, 0.7), u(0.4, 0.55)
    pen.oval(0, -0.2, wide, tall, cap * 0.7)
    for _ in range(34):
        angle, share = u(0, 2 * np.pi), np.sqrt(u(0, 1)) * 0.95
        x, y = wide * share * np.cos(angle), -0.2 + tall * share * np.sin(angle)
        bend = [(x + 0.14 * t, y + 0.07 * np.sin(6 * t + angle)) for t in np.linspace(-1, 1, 6)]
        pen.stroke(bend, 0.07, cap * u(0.8, 1.35))


def _coral_fungus(pen: _Pen, rng: np.random.Generator) -> None:
    u = rng.uniform
    tone = _hsv(u(0.02, 0.17), u(0.2, 0.8), u(0.75, 1))

    def grow(x: float, y: float, angle: float, length: float, width: float, depth: int) -> None:
        tip = (x + length * np.sin(angle), y - length * np.cos(angle))
        pen.stroke([(x, y), tip], width, tone * (0.6 + 0.13 * (4 - depth)))
        for side in (-1, 1) if depth else ():
            turn = angle + side * u(0.15, 0.5)
            grow(*tip, turn, length * u(0.65, 0.85), width * 0.72, depth - 1)

    for angle in np.linspace(-0.8, 0.8, int(rng.integers(3, 6))):
        grow(angle * 0.3, 0.75, angle, u(0.35, 0.5), 0.13, 3)


DRAWINGS: dict[str, tuple[str, float, Callable[[_Pen, np.random.Generator], None]]] = {
    "airplane": ("sky", 0.25, _airplane),
    "automobile": ("road", 0.06, _automobile),
    "car": ("road", 0.06, _automobile),
    "bird": ("forest", 0.2, _bird),
    "cat": ("indoors", 0.1, _cat),
    "deer": ("forest", 0.06, _deer),
    "dog": ("grass", 0.1, _dog),
    "frog": ("forest", 0.2, _frog),
    "horse": ("grass", 0.06, _horse),
    "monkey": ("forest", 0.15, _monkey),
    "ship": ("water", 0.05, _ship),
    "truck": ("road", 0.05, _truck),
    "stinkhorn": ("forest", 0.12, _stinkhorn),
    "bolete": ("forest", 0.1, _bolete),
    "hen-of-the-woods": ("forest", 0.15, _hen_of_the_woods),
    "earthstar": ("forest", 0.3, _earthstar),
    "gyromitra": ("forest", 0.12, _gyromitra),
    "coral fungus": ("forest", 0.1, _coral_fungus),
}
