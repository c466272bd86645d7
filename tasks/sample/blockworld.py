"""Draws what a player sees in a one-layer block room, for sample data the project makes itself.

In: a `View` (room, blocks of one layer, leaves, figures, pose, item bar). Out: 256x256 RGB pixels.
Camera: fov 70 degrees, eye 1.62 above the feet, yaw 0 = south (+z), 90 = west, pitch > 0 looks down
(NovelCraft spec 1.4 and 2.3, with the right order of rotations). Wall height, tree shape, sky and
item bar were measured on published frames. Rays are cast with Embree; the hit point on the face is
then computed in double precision, so that a texel does not depend on Embree's rounding.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

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
    """`cells` holds all that is neither air nor plain wall; positions are block centres."""

    room: Room
    cells: Mapping[Cell, Block]
    leaves: tuple[tuple[int, int, int], ...]
    figures: tuple[Figure, ...]
    position: Cell
    yaw: float
    pitch: float
    bar: tuple[tuple[str, int], ...] = ()
    selected: int = 0


# Texture -> (pattern, colours from dark to light, or in the order the pattern names).
LOOKS: dict[str, tuple[str, tuple[tuple[int, int, int], ...]]] = {
    "minecraft:grass": ("blades", ((45, 43, 20), (51, 49, 23), (51, 49, 23), (61, 58, 27), (61, 58, 27), (73, 69, 32), (73, 69, 32), (90, 86, 40))),
    "minecraft:bedrock": ("blotch", ((8, 8, 8), (34, 34, 34), (84, 84, 84), (120, 120, 120), (152, 152, 152))),
    "minecraft:leaves": ("blotch", ((29, 28, 7), (36, 34, 8), (62, 58, 15), (103, 97, 25), (118, 111, 29))),
    "minecraft:log": ("bark", ((58, 42, 32), (69, 51, 39), (96, 68, 50), (107, 79, 57))),
    "minecraft:log:jungle": ("bark", ((76, 60, 22), (92, 74, 30), (119, 98, 44), (136, 114, 58))),
    "minecraft:planks": ("boards", ((105, 84, 50), (140, 113, 69), (159, 128, 77), (180, 146, 92))),
    "minecraft:crafting_table": ("tools", ((70, 52, 32), (150, 121, 74), (168, 136, 84), (190, 190, 190))),
    "minecraft:crafting_table:top": ("grid", ((83, 38, 24), (150, 84, 50), (166, 98, 60))),
    "polycraft:plastic_chest": ("panel", ((62, 70, 84), (140, 152, 170), (152, 164, 182))),
    "polycraft:block_of_platinum": ("bark", ((226, 226, 230), (236, 236, 240), (244, 244, 247))),
    "polycraft:block_of_titanium": ("panel", ((96, 100, 106), (150, 156, 164), (162, 168, 176))),
    "minecraft:diamond_ore": ("ore", ((104, 104, 104), (120, 120, 120), (136, 136, 136), (93, 236, 227))),
    "minecraft:diamond_block": ("panel", ((64, 160, 156), (98, 219, 214), (150, 240, 236))),
    "minecraft:wooden_door": ("boards", ((78, 56, 28), (110, 84, 46), (126, 98, 56), (140, 110, 64))),
    "polycraft:tree_tap": ("panel", ((94, 42, 12), (130, 62, 20), (146, 74, 26))),
    "minecraft:fence": ("boards", ((92, 74, 44), (128, 104, 63), (150, 121, 73), (170, 138, 88))),
    "minecraft:anvil": ("noise", ((56, 56, 58), (68, 68, 70), (78, 78, 80), (92, 92, 94))),
    "minecraft:sand": ("noise", ((204, 190, 142), (214, 203, 157), (222, 211, 168), (231, 222, 182))),
    "minecraft:coal_block": ("blotch", ((9, 9, 9), (18, 18, 18), (27, 27, 28), (44, 44, 46))),
    "minecraft:quartz_block": ("blotch", ((222, 217, 208), (233, 229, 222), (238, 235, 229), (246, 243, 238))),
    "minecraft:obsidian": ("blotch", ((8, 6, 14), (17, 14, 26), (33, 26, 50), (63, 50, 92))),
    "minecraft:prismarine": ("blotch", ((76, 122, 112), (90, 152, 140), (106, 170, 158), (134, 192, 180))),
    "minecraft:tnt": ("band", ((160, 38, 20), (200, 58, 30), (220, 84, 50), (214, 214, 214))),
    "minecraft:tnt:top": ("grid", ((120, 40, 26), (196, 62, 36), (220, 150, 110))),
    "minecraft:sea_lantern": ("tiles", ((150, 184, 176), (178, 206, 198), (206, 226, 220), (232, 240, 236))),
    "minecraft:bookshelf": ("shelf", ((150, 121, 74), (110, 40, 30), (46, 62, 110), (58, 84, 42), (96, 80, 50))),
    "minecraft:cactus": ("bark", ((10, 66, 18), (12, 92, 26), (20, 108, 34), (104, 148, 92))),
    "minecraft:pumpkin": ("bark", ((150, 84, 14), (188, 108, 20), (206, 126, 28), (224, 146, 44))),
    "minecraft:netherrack": ("noise", ((82, 34, 34), (104, 48, 47), (122, 60, 58), (146, 80, 78))),
    "minecraft:glowstone": ("tiles", ((118, 86, 46), (172, 132, 78), (216, 178, 106), (250, 224, 160))),
    "item:flat": ("noise", ((90, 150, 150), (130, 210, 205))),
    "figure:skin": ("noise", ((196, 158, 122), (206, 168, 132))),
    "figure:head": ("face", ((52, 32, 18), (206, 168, 132), (0, 120, 150))),
    "figure:EntityTrader": ("noise", ((44, 70, 142), (52, 82, 160), (60, 92, 174))),
    "figure:EntityTrader:legs": ("noise", ((50, 74, 150), (92, 112, 170))),
    "figure:EntityPogoist": ("noise", ((96, 52, 130), (112, 62, 150), (130, 76, 168))),
    "figure:EntityPogoist:legs": ("noise", ((60, 40, 84), (72, 48, 98))),
}  # fmt: skip

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
CORNERS = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)])
TRIANGLES = np.array(
    [[0, 1, 3], [0, 3, 2], [4, 6, 7], [4, 7, 5], [0, 4, 5], [0, 5, 1],
     [2, 3, 7], [2, 7, 6], [0, 2, 6], [0, 6, 4], [1, 5, 7], [1, 7, 3]]
)  # fmt: skip
RODS = (110, 82, 44)
SKY_ABOVE = np.array([123.0, 183.0, 255.0])
SKY_AT_HORIZON = np.array([223.0, 233.0, 255.0])


def draw(view: View) -> np.ndarray:
    """The picture, uint8 of shape (256, 256, 3) in RGB order, item bar included."""
    import open3d as o3d

    low, high, per_unit, faces = _boxes(view)
    eye = np.array(
        [view.position[0], view.room.y - 0.5 + EYE_ABOVE_FEET, view.position[1]], dtype=np.float64
    )
    rays = ray_directions(view.yaw, view.pitch)

    corners = low[:, None] + CORNERS * (high - low)[:, None]
    triangles = np.arange(len(low))[:, None, None] * len(CORNERS) + TRIANGLES
    scene = o3d.t.geometry.RaycastingScene()
    scene.add_triangles(
        corners.reshape(-1, 3).astype(np.float32), triangles.reshape(-1, 3).astype(np.uint32)
    )
    cast = np.concatenate([np.broadcast_to(eye, rays.shape), rays], axis=1).astype(np.float32)
    hit = scene.cast_rays(o3d.core.Tensor(cast))["primitive_ids"].numpy()

    pixels = np.empty((SIZE * SIZE, 3), dtype=np.float32)
    met = hit != scene.INVALID_ID
    sky = rays[~met]
    elevation = np.abs(sky[:, 1] / np.hypot(sky[:, 0], sky[:, 2]).clip(1e-6))
    pixels[~met] = SKY_ABOVE + (SKY_AT_HORIZON - SKY_ABOVE) * np.exp(-8 * elevation)[:, None]

    box, face = np.divmod(hit[met].astype(np.int64), len(TRIANGLES))
    face //= 2
    axis, u_axis, v_axis = face // 2, U_AXIS[face], V_AXIS[face]
    ray = rays[met]
    row = np.arange(len(ray))
    plane = np.where(face % 2, high[box, axis], low[box, axis])
    distance = (plane - eye[axis]) / ray[row, axis]

    def texel(along: np.ndarray) -> np.ndarray:
        place = eye[along] + distance * ray[row, along] - low[box, along]
        return np.floor(place * per_unit[box, along]).astype(np.int64) % TEXELS

    colour = _atlas()[faces[box, face], face, -1 - texel(v_axis), texel(u_axis)]
    haze = (0.12 * np.clip((distance - 10) / 30, 0, 1)).astype(np.float32)[:, None]
    pixels[met] = colour + (SKY_AT_HORIZON.astype(np.float32) - colour) * haze
    image = np.rint(pixels).astype(np.uint8).reshape(SIZE, SIZE, 3)
    return _with_bar(image, view.bar, view.selected)


@lru_cache(maxsize=64)
def ray_directions(yaw: float, pitch: float) -> np.ndarray:
    """One direction per pixel centre, row by row, depth 1 along the line of sight."""
    turn, tilt = np.radians([yaw % 360, pitch])
    forward = np.array(
        [-np.sin(turn) * np.cos(tilt), -np.sin(tilt), np.cos(turn) * np.cos(tilt)]
    )
    right = np.array([-np.cos(turn), 0.0, -np.sin(turn)])
    up = np.array([-np.sin(turn) * np.sin(tilt), np.cos(tilt), np.cos(turn) * np.sin(tilt)])
    reach = np.tan(np.radians(FIELD_OF_VIEW / 2))
    across = (2 * (np.arange(SIZE) + 0.5) / SIZE - 1) * reach
    # A ray exactly along an axis would divide by zero on the face that it never meets.
    rays = forward + across[None, :, None] * right - across[:, None, None] * up + 1e-9
    rays = rays.reshape(-1, 3)
    rays.setflags(write=False)
    return rays


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
        x, z = figure.cell[0] - 0.5, figure.cell[1] - 0.5
        if figure.item:
            look = figure.item if figure.item in LOOKS else "item:flat"
            yield (x + 0.375, floor, z + 0.375), (x + 0.625, floor + 0.25, z + 0.625), look, True
            continue
        for look, (low, high) in FIGURE_PARTS:
            yield (
                (x + low[0], floor + low[1], z + low[2]),
                (x + high[0], floor + high[1], z + high[2]),
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


@lru_cache(maxsize=1)
def _atlas() -> np.ndarray:
    """Texels of every texture as lit on each of the six faces."""
    plain = np.stack([texture(name) for name in LOOKS])
    return (plain[:, None] * SHADE[:, None, None, None]).astype(np.float32)


def texture(name: str) -> np.ndarray:
    """16x16 texels of one face, a function of the name alone."""
    pattern, colours = LOOKS[name]
    palette = np.array(colours)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    grain = rng.random((TEXELS, TEXELS))
    line = rng.random(TEXELS)
    row, column = np.indices((TEXELS, TEXELS))
    edge = (row % 15 == 0) | (column % 15 == 0)
    if pattern == "noise":
        return _shades(grain, palette)
    if pattern == "blotch":
        soft = grain + 0.5 * sum(np.roll(grain, 1, axis) + np.roll(grain, -1, axis) for axis in (0, 1))
        return _shades(soft, palette)
    if pattern == "blades":
        return _shades(grain + 0.7 * np.roll(grain, (1, 1), (0, 1)), palette)
    if pattern == "bark":
        return _shades(line[column] + 0.35 * grain, palette)
    if pattern == "tiles":
        return _shades(line[(row // 4 * 4 + column // 4)] + 0.3 * grain, palette)
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
        return np.where(edge[..., None], palette[0], _shades(line[column] + 0.5 * grain, palette[1:]))
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
    if name.endswith("stick") or name.endswith("pickaxe"):
        head = (row < 6) & (column > 8) & (not name.endswith(":stick"))
        return np.where(rod[..., None], RODS, (190, 190, 190)).astype(np.uint8), rod | head
    colour = np.random.default_rng(zlib.crc32(name.encode())).integers(90, 230, 3)
    lump = (row - 8) ** 2 + (column - 8) ** 2 < 26
    return np.broadcast_to(colour, (TEXELS, TEXELS, 3)).astype(np.uint8), lump
