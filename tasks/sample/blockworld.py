"""Draws what a player sees in a one-layer block room, for sample data the project makes itself.

In: a `View` (room, blocks of one layer, leaves, figures, pose, item bar). Out: 256x256 RGB pixels.
Camera: fov 70 degrees, eye 1.62 above the feet, yaw 0 = south (+z), 90 = west, pitch > 0 looks down
(docs/novelcraft.md, with the right order of rotations). Wall height, tree shape, sky and item bar
were measured on published frames; textures are our own. The renderer of the masks casts the rays
(`raycast.boxes_seen`), one through the centre of each pixel.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tasks.novelcraft.raycast import boxes_seen
from tasks.novelcraft.scene import Scene, camera_rotation, pixel_rays
from tasks.novelcraft.scene import View as Camera

SIZE = 256
FIELD_OF_VIEW = 70.0
EYE_ABOVE_FEET = 1.62
WALL_HEIGHT = 3
TRUNK_HEIGHT = 6
TEXELS = 16
BAR_ROWS = 22

Cell = tuple[int, int]
Point = tuple[float, float, float]
Part = tuple[Point, Point]
Colour = tuple[float, float, float]


class Block(NamedTuple):
    name: str
    properties: tuple[tuple[str, str], ...] = ()


class Room(NamedTuple):
    """Lowest x and z, the listed layer y, and the side in blocks, walls included."""

    x: int
    y: int
    z: int
    side: int


class Figure(NamedTuple):
    """An entity; a dropped item carries the name of its item."""

    kind: str
    cell: Cell
    item: str = ""


@dataclass(frozen=True)
class View:
    """`cells` holds all that is neither air nor plain wall; positions are block centres.

    `light` multiplies all colours but those of the bar; `dyes` those of some textures.
    """

    room: Room
    cells: Mapping[Cell, Block]
    leaves: tuple[tuple[int, int, int], ...]
    figures: tuple[Figure, ...]
    position: Cell
    yaw: float
    pitch: float
    bar: tuple[tuple[str, int], ...] = ()
    selected: int = 0
    light: Colour = (1.0, 1.0, 1.0)
    dyes: Mapping[str, Colour] = field(default_factory=dict)


# Texture -> (pattern of `texture`, its colours as hexadecimal RGB, by default dark to light).
# A novel block has colours of blocks that every class has, and a pattern of its own.
LOOKS: dict[str, tuple[str, str]] = {
    "minecraft:grass": ("blades", "2d2b14 333117 333117 3d3a1b 3d3a1b 494520 494520 5a5628"),
    "minecraft:bedrock": ("blotch", "080808 222222 545454 787878 989898"),
    "minecraft:leaves": ("blotch", "1d1c07 242208 3e3a0f 676119 766f1d"),
    "minecraft:log": ("bark", "3a2a20 453327 604432 6b4f39"),
    "minecraft:log:jungle": ("diagonal", "3a2a20 453327 604432 6b4f39"),
    "minecraft:planks": ("boards", "695432 8c7145 9f804d b4925c"),
    "minecraft:crafting_table": ("tools", "463420 96794a a88854 bebebe"),
    "minecraft:crafting_table:top": ("grid", "532618 965432 a6623c"),
    "polycraft:plastic_chest": ("panel", "3e4654 8c98aa 98a4b6"),
    "polycraft:block_of_platinum": ("bark", "e2e2e6 ececf0 f4f4f7"),
    "polycraft:block_of_titanium": ("panel", "60646a 969ca4 a2a8b0"),
    "minecraft:diamond_ore": ("ore", "686868 787878 888888 5dece3"),
    "minecraft:diamond_block": ("panel", "40a09c 62dbd6 96f0ec"),
    "minecraft:wooden_door": ("boards", "4e381c 6e542e 7e6238 8c6e40"),
    "polycraft:tree_tap": ("panel", "5e2a0c 823e14 924a1a"),
    "minecraft:fence": ("boards", "5c4a2c 80683f 967949 aa8a58"),
    "minecraft:anvil": ("noise", "38383a 444446 4e4e50 5c5c5e"),
    "minecraft:sand": ("noise", "ccbe8e d6cb9d ded3a8 e7deb6"),
    "minecraft:coal_block": ("blotch", "090909 121212 1b1b1c 2c2c2e"),
    "minecraft:quartz_block": ("scales", "98a4b6 e2e2e6 ececf0 f4f4f7"),
    "minecraft:obsidian": ("cracks", "545454 080808 121212 1b1b1c"),
    "minecraft:prismarine": ("scales", "3e4654 787878 8c98aa 98a4b6"),
    "minecraft:tnt": ("band", "823e14 924a1a 965432 ececf0"),
    "minecraft:tnt:top": ("checks", "532618 965432 a6623c"),
    "minecraft:sea_lantern": ("tiles", "787878 8c98aa 98a4b6 ececf0"),
    "minecraft:bookshelf": ("shelf", "967949 5e2a0c 2c468e 3e3a0f 4e381c"),
    "minecraft:cactus": ("spots", "5a5628 242208 3e3a0f 676119"),
    "minecraft:pumpkin": ("ribs", "532618 823e14 965432 a6623c"),
    "minecraft:netherrack": ("cracks", "a6623c 4e381c 5e2a0c 823e14"),
    "minecraft:glowstone": ("tiles", "80683f aa8a58 ccbe8e e7deb6"),
    "item:flat": ("noise", "5a9696 82d2cd"),
    "figure:skin": ("noise", "c49e7a cea884"),
    "figure:head": ("face", "342012 cea884 007896"),
    "figure:EntityTrader": ("noise", "2c468e 3452a0 3c5cae"),
    "figure:EntityTrader:legs": ("noise", "324a96 5c70aa"),
    "figure:EntityPogoist": ("noise", "603482 703e96 824ca8"),
    "figure:EntityPogoist:legs": ("noise", "3c2854 483062"),
}

CUBE: tuple[Part, ...] = (((0, 0, 0), (1, 1, 1)),)
SHAPES: dict[str, tuple[Part, ...]] = {
    "minecraft:log": (((0, 0, 0), (1, TRUNK_HEIGHT, 1)),),
    "polycraft:plastic_chest": (((1 / 16, 0, 1 / 16), (15 / 16, 7 / 8, 15 / 16)),),
    # Stands out of the wall that it interrupts.
    "minecraft:wooden_door": (((-1 / 32, 0, -1 / 32), (33 / 32, 2, 33 / 32)),),
    "polycraft:tree_tap": (
        ((0, 1 / 4, 0), (1, 3 / 8, 1)),
        ((0, 3 / 8, 0), (1 / 8, 7 / 8, 1)),
        ((7 / 8, 3 / 8, 0), (1, 7 / 8, 1)),
        ((1 / 8, 3 / 8, 0), (7 / 8, 7 / 8, 1 / 8)),
        ((1 / 8, 3 / 8, 7 / 8), (7 / 8, 7 / 8, 1)),
    ),
    "minecraft:anvil": (
        ((1 / 8, 0, 1 / 8), (7 / 8, 1 / 4, 7 / 8)),
        ((5 / 16, 1 / 4, 5 / 16), (11 / 16, 5 / 8, 11 / 16)),
        ((3 / 16, 5 / 8, 0), (13 / 16, 1, 1)),
    ),
    "minecraft:cactus": (((1 / 16, 0, 1 / 16), (15 / 16, 1, 15 / 16)),),
    "minecraft:fence": (((3 / 8, 0, 3 / 8), (5 / 8, 1, 5 / 8)),),
}
# Two rails towards a neighbour at +x or +z; the neighbour's own rails are the other half.
RAIL_HEIGHTS = ((3 / 8, 9 / 16), (3 / 4, 15 / 16))
FIGURE_PARTS: tuple[tuple[str, Part], ...] = (
    ("figure:{}:legs", ((0.25, 0, 0.375), (0.75, 0.7, 0.625))),
    ("figure:{}", ((0.25, 0.7, 0.375), (0.75, 1.3, 0.625))),
    ("figure:{}", ((0.0, 0.9, 0.375), (0.25, 1.3, 0.625))),
    ("figure:{}", ((0.75, 0.9, 0.375), (1.0, 1.3, 0.625))),
    ("figure:skin", ((0.02, 0.6, 0.39), (0.23, 0.9, 0.61))),
    ("figure:skin", ((0.77, 0.6, 0.39), (0.98, 0.9, 0.61))),
    ("figure:head", ((0.25, 1.3, 0.25), (0.75, 1.8, 0.75))),
)

# Faces in order -x, +x, -y, +y, -z, +z: brightness, and the two axes that the texture runs along.
SHADE = np.array([0.6, 0.6, 0.5, 1.0, 0.8, 0.8])
U_AXIS = np.array([2, 2, 0, 0, 0, 0])
V_AXIS = np.array([1, 1, 2, 2, 1, 1])
CAMERA = Camera(rotation="corrected", fov=FIELD_OF_VIEW, resolution=SIZE)
RODS = (110, 82, 44)
SKY_ABOVE = np.array([123.0, 183.0, 255.0])
SKY_AT_HORIZON = np.array([223.0, 233.0, 255.0])


def draw(view: View) -> np.ndarray:
    """The picture, uint8 of shape (256, 256, 3) in RGB order, item bar included."""
    low, high, per_unit, faces = _boxes(view)
    # The little more keeps rays off edges, where rounding alone would say what is seen.
    eye = np.array([view.position[0], view.room.y - 0.5 + EYE_ABOVE_FEET, view.position[1]]) + 1e-9
    turn = camera_rotation(view.yaw % 360, view.pitch, CAMERA.rotation)
    none = np.zeros(len(low), np.int32)
    scene = Scene(low, high, none, (), none.astype(bool), eye, turn, CAMERA)
    rays = pixel_rays(scene)
    seen = boxes_seen(scene)

    pixels = np.empty((SIZE, SIZE, 3), dtype=np.float32)
    met = seen >= 0
    sky = rays[~met]
    elevation = np.abs(sky[:, 1] / np.hypot(sky[:, 0], sky[:, 2]).clip(1e-6))
    pixels[~met] = SKY_ABOVE + (SKY_AT_HORIZON - SKY_ABOVE) * np.exp(-8 * elevation)[:, None]

    # One coordinate of all pixels at a time: each lies by itself in memory.
    box, ray = seen[met], [rays[..., i][met] for i in range(3)]
    near, far, scale = (
        [table[:, i].take(box) for i in range(3)] for table in (low, high, per_unit)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        planes = [(np.where(ray[i] > 0, near[i], far[i]) - eye[i]) / ray[i] for i in range(3)]
    # The farthest, the first of equal ones; not where the ray runs in the plane (not a number).
    planes = [np.where(np.isnan(plane), -np.inf, plane) for plane in planes]
    second = planes[1] > planes[0]
    third = planes[2] > np.where(second, planes[1], planes[0])

    def by_axis(values: list[np.ndarray]) -> np.ndarray:
        return np.where(third, values[2], np.where(second, values[1], values[0]))

    distance = by_axis(planes)
    face = by_axis([2 * i + (ray[i] < 0) for i in range(3)])
    place = [(eye[i] + distance * ray[i] - near[i]) * scale[i] for i in range(3)]

    def texel(axes: np.ndarray) -> np.ndarray:
        """Along the axis that each face has for it."""
        return np.floor(by_axis([place[i] for i in axes[::2]])).astype(np.int64) % TEXELS

    dyed = _atlas() * _dyed(view.dyes)[:, None, None, None]
    row = (faces[box, face] * 6 + face) * TEXELS + TEXELS - 1 - texel(V_AXIS)
    colour = dyed.reshape(-1, 3).take(row * TEXELS + texel(U_AXIS), axis=0)
    haze = (0.12 * np.clip((distance - 10) / 30, 0, 1)).astype(np.float32)[:, None]
    pixels[met] = colour + (SKY_AT_HORIZON.astype(np.float32) - colour) * haze
    lit = (pixels * np.array(view.light, np.float32)).clip(0, 255)
    return _with_bar(np.rint(lit).astype(np.uint8), view.bar, view.selected)


def _boxes(view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Low and high corners, texels per unit along each axis, and the texture of the six faces."""
    parts = list(_parts(view))
    low = np.array([part[0] for part in parts], dtype=np.float64)
    high = np.array([part[1] for part in parts], dtype=np.float64)
    fitted = np.array([part[3] for part in parts])
    per_unit = np.where(fitted[:, None], TEXELS / (high - low), float(TEXELS))
    faces = np.array([_face_textures(part[2]) for part in parts])
    return low, high, per_unit, faces


def _parts(view: View) -> Iterator[tuple[Point, Point, str, bool]]:
    """(low, high, look, whether the texture is stretched over the box) of all that is drawn."""
    room = view.room
    floor = room.y - 0.5
    x0, z0 = room.x - 0.5, room.z - 0.5
    x1, z1 = x0 + room.side, z0 + room.side
    top = floor + WALL_HEIGHT
    yield (x0, floor - 1, z0), (x1, floor, z1), "minecraft:grass", False
    for low, high in (
        ((x0, floor, z0), (x1, top, z0 + 1)),
        ((x0, floor, z1 - 1), (x1, top, z1)),
        ((x0, floor, z0), (x0 + 1, top, z1)),
        ((x1 - 1, floor, z0), (x1, top, z1)),
    ):
        yield low, high, "minecraft:bedrock", False
    for x, height, z in view.leaves:
        corner = (x - 0.5, floor + height, z - 0.5)
        yield corner, (corner[0] + 1, corner[1] + 1, corner[2] + 1), "minecraft:leaves", False
    for (x, z), block in view.cells.items():
        shape = SHAPES.get(block.name, CUBE)
        if block.name == "minecraft:fence":
            shape += _rails(view.cells, (x, z))
        for low, high in shape:
            yield (
                (x - 0.5 + low[0], floor + low[1], z - 0.5 + low[2]),
                (x - 0.5 + high[0], floor + high[1], z - 0.5 + high[2]),
                _look(block),
                False,
            )
    for figure in view.figures:
        west, north = figure.cell[0] - 0.5, figure.cell[1] - 0.5
        if figure.item:
            look = figure.item if figure.item in LOOKS else "item:flat"
            yield (
                (west + 0.375, floor, north + 0.375),
                (
                    west + 0.625,
                    floor + 0.25,
                    north + 0.625,
                ),
                look,
                True,
            )
            continue
        for look, (low, high) in FIGURE_PARTS:
            yield (
                (west + low[0], floor + low[1], north + low[2]),
                (west + high[0], floor + high[1], north + high[2]),
                look.format(figure.kind),
                True,
            )


def _rails(cells: Mapping[Cell, Block], cell: Cell) -> tuple[Part, ...]:
    rails = []
    for low, high in RAIL_HEIGHTS:
        if cells.get((cell[0] + 1, cell[1]), Block("")).name == "minecraft:fence":
            rails.append(((5 / 8, low, 7 / 16), (11 / 8, high, 9 / 16)))
        if cells.get((cell[0], cell[1] + 1), Block("")).name == "minecraft:fence":
            rails.append(((7 / 16, low, 5 / 8), (9 / 16, high, 11 / 8)))
    return tuple(rails)


def _look(block: Block) -> str:
    variant = dict(block.properties).get("variant", "")
    specific = f"{block.name}:{variant}"
    return specific if specific in LOOKS else block.name


@lru_cache(maxsize=256)
def _face_textures(look: str) -> tuple[int, ...]:
    names = list(LOOKS)
    side = names.index(look)
    top = names.index(f"{look}:top") if f"{look}:top" in LOOKS else side
    return (side, side, top, top, side, side)


def _dyed(dyes: Mapping[str, Colour]) -> np.ndarray:
    """What the colours of each texture are multiplied by."""
    factors = np.ones((len(LOOKS), 3), dtype=np.float32)
    for name, factor in dyes.items():
        factors[list(LOOKS).index(name)] = factor
    return factors


@lru_cache(maxsize=1)
def _atlas() -> np.ndarray:
    """Texels of every texture as lit on each of the six faces."""
    plain = np.stack([texture(name) for name in LOOKS])
    return (plain[:, None] * SHADE[:, None, None, None]).astype(np.float32)


def texture(name: str) -> np.ndarray:
    """16x16 texels of one face, a function of the name alone."""
    pattern, colours = LOOKS[name]
    palette = np.frombuffer(bytes.fromhex(colours), dtype=np.uint8).reshape(-1, 3)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    grain = rng.random((TEXELS, TEXELS))
    line = rng.random(TEXELS)
    row, column = np.indices((TEXELS, TEXELS))
    edge = (row % 15 == 0) | (column % 15 == 0)
    if pattern == "noise":
        return _shades(grain, palette)
    if pattern == "blotch":
        steps = ((0, 1), (1, 0), (0, -1), (-1, 0))
        return _shades(grain + 0.5 * sum(np.roll(grain, by, (0, 1)) for by in steps), palette)
    if pattern == "blades":
        return _shades(grain + 0.7 * np.roll(grain, (1, 1), (0, 1)), palette)
    if pattern == "bark":
        return _shades(line[column] + 0.35 * grain, palette)
    if pattern == "tiles":
        return _shades(line[(row // 4 * 4 + column // 4)] + 0.3 * grain, palette)
    if pattern == "diagonal":
        return _shades(line[(row + column) // 2 % TEXELS] + 0.2 * grain, palette)
    if pattern == "checks":
        dark = (row // 4 + column // 4) % 2 == 0
        return np.where(dark[..., None], palette[0], _shades(grain, palette[1:]))
    if pattern == "scales":
        joint = (row % 4 == 0) | ((column + row // 4 % 2 * 4) % 8 == 0)
        return np.where(joint[..., None], palette[0], _shades(grain, palette[1:]))
    if pattern == "spots":
        spots = (row % 5 % 4 < 2) & ((column + row // 5 * 2) % 5 % 4 < 2)
        return np.where(spots[..., None], palette[0], _shades(grain, palette[1:]))
    if pattern == "ribs":
        return np.where((column % 4 == 0)[..., None], palette[0], _shades(grain, palette[1:]))
    if pattern == "cracks":
        cracks = (row + (16 * line[column // 4]).astype(int)) % 7 == 0
        return np.where(cracks[..., None], palette[0], _shades(grain, palette[1:]))
    if pattern == "boards":
        board = _shades(line[row // 4] + 0.5 * grain[row, column // 6], palette[1:])
        return np.where((row % 4 == 3)[..., None], palette[0], board)
    if pattern == "band":
        sticks = _shades(line[column // 2] + 0.3 * grain, palette[:-1])
        letters = (row > 6) & (row < 9) & (column % 5 < 3)
        band = np.where(letters[..., None], palette[-1] // 5, palette[-1])
        return np.where(((row > 4) & (row < 11))[..., None], band, sticks)
    if pattern == "shelf":
        books = palette[1:][(line[(column // 2) + 8 * (row > 7)] * (len(palette) - 1)).astype(int)]
        return np.where((row % 8 % 7 == 0)[..., None], palette[0], books)
    if pattern == "panel":
        inside = _shades(line[column] + 0.5 * grain, palette[1:])
        return np.where(edge[..., None], palette[0], inside)
    if pattern == "grid":
        bars = (row % 5 == 2) | (column % 5 == 2)
        return np.where((bars & ~edge)[..., None], palette[0], _shades(grain, palette[1:]))
    if pattern == "ore":
        spots = (grain + np.roll(grain, 1, 0) + np.roll(grain, 1, 1)) > 1.9
        return np.where(spots[..., None], palette[-1], _shades(grain, palette[:-1]))
    if pattern == "tools":
        wood = np.where((edge | (row == 5))[..., None], palette[0], _shades(grain, palette[1:3]))
        tool = (row > 6) & (row < 13) & (abs(column - 11) < 2) | (row == 8) & (abs(column - 4) < 2)
        return np.where(tool[..., None], palette[-1], wood)
    if pattern == "face":
        eyes = (row > 5) & (row < 9) & (abs(abs(column - 7.5) - 3.5) < 2)
        skin = np.where((row < 4)[..., None], palette[0], palette[1])
        return np.where(eyes[..., None], palette[2], skin)
    raise AssertionError(f"texture {name}: no pattern {pattern}")


def _shades(field: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Equal shares of the colours, darkest where the field is lowest."""
    rank = field.ravel().argsort(kind="stable").argsort(kind="stable")
    return palette[rank * len(palette) // field.size].reshape(*field.shape, 3)


def _with_bar(image: np.ndarray, slots: tuple[tuple[str, int], ...], selected: int) -> np.ndarray:
    """Nine slots over the bottom 22 rows, columns 37 to 218, as in the game."""
    import cv2

    top = SIZE - BAR_ROWS
    bar = image[top:, 37:219]
    bar[:] = bar * 0.55
    bar[[0, -1]] = bar[[0, -1]] // 2
    bar[:, [0, -1]] = bar[:, [0, -1]] // 2
    for slot in range(9):
        left = 38 + 20 * slot
        image[top + 1 : -1, left + 19] = image[top + 1 : -1, left + 19] // 2
        if slot == selected:
            cv2.rectangle(image, (left - 1, top), (left + 20, SIZE - 1), (150, 150, 150), 1)
        if slot >= len(slots) or not slots[slot][1]:
            continue
        name, count = slots[slot]
        icon, opaque = _icon(name)
        place = image[top + 3 : top + 3 + TEXELS, left + 2 : left + 2 + TEXELS]
        place[opaque] = icon[opaque]
        if count > 1:
            at = (left + (11 if count < 10 else 3), SIZE - 2)
            cv2.putText(image, str(count), at, cv2.FONT_HERSHEY_PLAIN, 0.75, (250, 250, 250), 1)
    return image


@lru_cache(maxsize=64)
def _icon(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Texels and mask: a small block for what has a texture, else a rod, a tool or a lump."""
    row, column = np.indices((TEXELS, TEXELS))
    if name in LOOKS:
        return texture(name).astype(np.uint8), (row > 1) & (row < 14) & (column > 1) & (column < 14)
    rod = abs(row + column - 15) < 2
    if name.endswith(("stick", "pickaxe")):
        head = (row < 6) & (column > 8) & (not name.endswith(":stick"))
        return np.where(rod[..., None], RODS, (190, 190, 190)).astype(np.uint8), rod | head
    colour = np.random.default_rng(zlib.crc32(name.encode())).integers(90, 230, 3)
    lump = (row - 8) ** 2 + (column - 8) ** 2 < 26
    return np.broadcast_to(colour, (TEXELS, TEXELS, 3)).astype(np.uint8), lump
