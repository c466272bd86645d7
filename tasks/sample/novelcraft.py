"""Sample NovelCraft: out of a seed, into `<root>/<class>/<episode>/<frame>.png|.json` of v2 form.

Each episode is a small game that is really played: an agent teleports through a 32x32 room as the
v2 agent does, breaks logs and ores, crafts, trades, taps a tree and makes a pogo stick. The JSON is
the SENSE_ALL NONAV reply (docs/novelcraft.md, rule 3), the PNG what the agent sees (`blockworld`).
Kept from the real data (rules 1 and 2): episode 0 starts at frame 1; the first episodes of `fence`
and `tree_easy` are pre-novelty; the last PNG shows the start of the next game; the first reply of
some episodes lists every entity at the player's own position; yaw is not normalised.
The pogo recipe needs one of each block where the real one needs two, so that an episode has about
28 frames and not 50.

Neither a colour nor one number tells what is novel: a novel block has colours of known ones and a
pattern of its own, the light changes from episode to episode, chests and clothes have any colour,
and in some episodes of every class the agent takes logs out of the chest, jungle logs too.

An episode is a function of (seed, class, episode) alone, whatever else is written beside it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from schemas.errors import ConfigError
from tasks.engine.workers import Workers
from tasks.learning.draws import item_rng
from tasks.sample.blockworld import TRUNK_HEIGHT, Block, Cell, Colour, Figure, Room, View, draw

ROOM = Room(x=40, y=17, z=32, side=32)
MARGIN = 4
# Of an episode: how dark its light may be, and how far its colour is from white.
DARKEST, LIGHT_TINT = 0.6, 0.08
# What has another colour in every episode, and by what its colours are multiplied.
DYED = (
    "polycraft:plastic_chest",
    "figure:EntityTrader",
    "figure:EntityTrader:legs",
    "figure:EntityPogoist",
    "figure:EntityPogoist:legs",
)
DYES = (0.35, 1.6)
# Of all episodes: those in which the agent begins with logs out of the chest.
CHEST_SHARE = 0.3
TREES = 5
NOVEL_COPIES = 3
CANDIDATES = 150

DEFAULT_EPISODES: dict[str, int] = {
    "normal": 16,
    "fence": 7,
    "item_anvil": 4,
    "item_sand": 4,
    "item_coal_block": 4,
    "item_quartz_block": 2,
    "item_obsidian": 2,
    "item_prismarine": 2,
    "item_tnt": 2,
    "item_sea_lantern": 2,
    "tree_easy": 7,
    "item_bookshelf": 3,
    "item_netherrack": 3,
    "item_glowstone": 3,
    "item_cactus": 3,
    "item_pumpkin": 3,
}
PRE_NOVELTY = {"fence": 1, "tree_easy": 2}
SPAWN_BUG_EVERY = 4

NOVEL_BLOCKS: dict[str, Block] = {
    "fence": Block(
        "minecraft:fence",
        (("east", "false"), ("north", "false"), ("south", "false"), ("west", "false")),
    ),
    "item_anvil": Block("minecraft:anvil", (("damage", "0"), ("facing", "north"))),
    "item_sand": Block("minecraft:sand", (("variant", "sand"),)),
    "item_coal_block": Block("minecraft:coal_block"),
    "item_quartz_block": Block("minecraft:quartz_block", (("variant", "default"),)),
    "item_obsidian": Block("minecraft:obsidian"),
    "item_prismarine": Block("minecraft:prismarine", (("variant", "prismarine"),)),
    "item_tnt": Block("minecraft:tnt", (("explode", "false"),)),
    "item_sea_lantern": Block("minecraft:sea_lantern"),
    "tree_easy": Block("minecraft:log", (("axis", "y"), ("variant", "jungle"))),
    "item_bookshelf": Block("minecraft:bookshelf"),
    "item_netherrack": Block("minecraft:netherrack"),
    "item_glowstone": Block("minecraft:glowstone"),
    "item_cactus": Block("minecraft:cactus", (("age", "0"),)),
    "item_pumpkin": Block("minecraft:pumpkin", (("facing", "north"),)),
}

AIR = Block("minecraft:air")
WALL = Block("minecraft:bedrock")
OAK = Block("minecraft:log", (("axis", "y"), ("variant", "oak")))
TABLE = Block("minecraft:crafting_table")
CHEST = Block("polycraft:plastic_chest", (("facing", "east"),))
PLATINUM = Block("polycraft:block_of_platinum")
DIAMOND_ORE = Block("minecraft:diamond_ore")
TREE_TAP = Block("polycraft:tree_tap", (("enabled", "true"), ("facing", "down")))
DOOR = Block(
    "minecraft:wooden_door",
    (
        ("facing", "south"),
        ("half", "lower"),
        ("hinge", "right"),
        ("open", "false"),
        ("powered", "false"),
    ),
)

FACINGS = ("SOUTH", "WEST", "NORTH", "EAST")
DIRECTIONS: tuple[Cell, ...] = ((0, 1), (-1, 0), (0, -1), (1, 0))

# An item is a Block: name and string properties.
PICKAXE = Block("minecraft:iron_pickaxe")
PLANKS = Block("minecraft:planks", (("variant", "oak"),))
STICK = Block("minecraft:stick")
DIAMOND = Block("minecraft:diamond")
DIAMOND_BLOCK = Block("minecraft:diamond_block")
TITANIUM = Block("polycraft:block_of_titanium")
RUBBER = Block("polycraft:sack_polyisoprene_pellets")
SAPLING = Block("minecraft:sapling", (("stage", "0"), ("type", "oak")))
POGO_STICK = Block("polycraft:wooden_pogo_stick")
MAX_DAMAGE = {PICKAXE.name: 250, POGO_STICK.name: 64}
# Block broken -> item and number of them.
YIELDS = {
    OAK: (OAK, 1),
    NOVEL_BLOCKS["tree_easy"]: (NOVEL_BLOCKS["tree_easy"], 5),
    NOVEL_BLOCKS["fence"]: (Block("minecraft:fence"), 1),
    PLATINUM: (PLATINUM, 1),
    DIAMOND_ORE: (DIAMOND, 9),
}
# Item made -> number made, and what it takes (by name: planks come from any log).
RECIPES: dict[Block, tuple[int, dict[str, int]]] = {
    PLANKS: (4, {OAK.name: 1}),
    STICK: (4, {PLANKS.name: 2}),
    TREE_TAP: (1, {PLANKS.name: 5, STICK.name: 1}),
    DIAMOND_BLOCK: (1, {DIAMOND.name: 9}),
    TITANIUM: (1, {PLATINUM.name: 1}),
    POGO_STICK: (1, {STICK.name: 2, TITANIUM.name: 1, DIAMOND_BLOCK.name: 1, RUBBER.name: 1}),
}
EQUIPMENT = {
    "43": ("Sporty Nylon Stockings", "Sporty Nylon Windbreaker"),
    "42": ("Noble Pantoble", "Noble Leggings", "Noble Gorget", "Noble Armet"),
}
ITEM_ENTITY_NAMES = {
    DIAMOND.name: "item.item.diamond",
    PLATINUM.name: "item.tile.block_of_platinum",
    SAPLING.name: "item.tile.sapling.oak",
}

# Path below the root, and what is wrong. Every episode has a frame 12, and it is not the last.
BAD_RECORDS: tuple[tuple[str, str], ...] = (
    ("normal/1/3.png", "truncated PNG"),
    ("item_tnt/1/9.png", "truncated PNG"),
    ("normal/2/5.png", "PNG of 128x128"),
    ("item_sand/1/11.png", "PNG of 128x128"),
    ("normal/3/4.json", "truncated JSON"),
    ("fence/2/7.json", "truncated JSON"),
    ("normal/4/6.json", "player position NaN"),
    ("tree_easy/3/10.json", "player position NaN"),
    ("normal/5/8.json", "JSON without PNG"),
    ("item_obsidian/1/2.json", "JSON without PNG"),
    ("normal/6/12.png", "PNG without JSON"),
    ("item_anvil/1/5.png", "PNG without JSON"),
    ("normal/1/8_copy.png", "file name is not a number"),
    ("item_cactus/1/frame4.json", "file name is not a number"),
    ("normal/2/9.json", "empty JSON"),
    ("item_bookshelf/1/6.json", "empty JSON"),
)


class Entity(NamedTuple):
    """`item` and `count` only for EntityItem."""

    id: int
    type: str
    cell: Cell
    item: Block = AIR
    count: int = 0  # type: ignore[assignment]


@dataclass(frozen=True)
class Frame:
    """The game between two actions. `cells` holds what is neither air nor plain wall."""

    position: Cell
    yaw: float
    pitch: float
    slots: tuple[tuple[Block, int], ...]
    selected: int
    wear: int
    cells: dict[Cell, Block]
    leaves: tuple[tuple[int, int, int], ...]
    entities: tuple[Entity, ...]
    step: int
    over: bool = False
    light: Colour = (1.0, 1.0, 1.0)
    dyes: Mapping[str, Colour] = field(default_factory=dict)

    def view(self) -> View:
        return View(
            room=ROOM,
            cells=self.cells,
            leaves=self.leaves,
            figures=tuple(
                Figure(e.type, e.cell, e.item.name if e.type == "EntityItem" else "")
                for e in self.entities
            ),
            position=self.position,
            yaw=self.yaw,
            pitch=self.pitch,
            bar=tuple((item.name, count) for item, count in self.slots),
            selected=self.selected,
            light=self.light,
            dyes=self.dyes,
        )


def write_novelcraft(
    root: Path,
    seed: int = 0,
    *,
    episodes: Mapping[str, int] | None = None,
    bad_records: bool = True,
    workers: int = 2,
) -> None:
    """Write the classes of `episodes` (class -> number of episodes), by default the whole sample.

    The bytes do not depend on `workers`; 1 means no other process. Files that already hold the
    right bytes are left alone.
    """
    episodes = DEFAULT_EPISODES if episodes is None else episodes
    unknown = sorted(set(episodes) - {"normal", *NOVEL_BLOCKS})
    if unknown:
        raise ConfigError(
            f"NovelCraft sample: no class {', '.join(unknown)}; "
            f"expected some of normal, {', '.join(NOVEL_BLOCKS)}"
        )
    faults = dict(bad_novelcraft_records(episodes)) if bad_records else {}
    for class_name in episodes:
        if class_name != "normal":
            description = json.dumps({"novelty": [_novelty(seed, class_name)]})
            _put(root / class_name / "novelty_description.json", description.encode())
    jobs = [
        (root, seed, class_name, episode, faults)
        for class_name, number in episodes.items()
        for episode in range(number)
    ]
    if workers == 1:
        for job in jobs:
            _write_episode(*job)
        return
    for _ in Workers().run_each("NovelCraft sample", _write_episode, jobs, workers):
        pass


def bad_novelcraft_records(episodes: Mapping[str, int] | None = None) -> list[tuple[str, str]]:
    """(path below the root, what is wrong) of every bad record that `write_novelcraft` makes."""
    episodes = DEFAULT_EPISODES if episodes is None else episodes
    return [
        (path, fault)
        for path, fault in BAD_RECORDS
        if int(path.split("/")[1]) < episodes.get(path.split("/")[0], 0)
    ]


def play(seed: int, class_name: str, episode: int) -> list[Frame]:
    """The frames of one episode, the novel blocks of its class included."""
    game = _Game(seed, class_name, episode)
    game.make_pogo_stick()
    if game.novel is None or not class_name.startswith("item_"):
        return game.frames
    rng = item_rng(seed, "novelcraft", class_name, episode, "novel")
    cells = _cells_in_view(game.frames, game.trodden, rng)
    return [_with_block(frame, cells, game.novel) for frame in game.frames]


def reply(frame: Frame, *, entities_on_player: bool = False) -> dict:
    """The SENSE_ALL NONAV reply of a frame."""
    slots = {
        str(i): _stack(item, count, frame.wear)
        for i, (item, count) in enumerate(frame.slots)
        if count
    }
    empty = {"item": "", "count": 0, "damage": 0, "maxdamage": 0}
    slots["selectedItem"] = {"slot": frame.selected, **slots.get(str(frame.selected), empty)}
    x, z = frame.position
    facing = facing_of(frame.yaw)
    dx, dz = DIRECTIONS[facing]
    ahead = frame.cells.get((x + dx, z + dz), _empty_room()[x + dx, z + dz])
    listed = {cell: frame.cells.get(cell, block) for cell, block in _empty_room().items()}
    return {
        "blockInFront": {"name": ahead.name, **dict(ahead.properties)},
        "inventory": slots,
        "player": {
            "pos": [x, ROOM.y, z],
            "facing": FACINGS[facing],
            "yaw": frame.yaw,
            "pitch": frame.pitch,
        },
        "destinationPos": [0, 0, 0],
        "entities": {
            str(e.id): _entity(e, frame.position if entities_on_player else e.cell)
            for e in frame.entities
        },
        "map": {
            f"{cx},{ROOM.y},{cz}": {
                "name": block.name,
                "isAccessible": False,
                **dict(block.properties),
            }
            for (cx, cz), block in listed.items()
        },
        "goal": {"goalType": "ITEM", "goalAchieved": frame.over, "Distribution": "Uninformed"},
        "command_result": {
            "command": "SENSE_ALL",
            "argument": "NONAV",
            "result": "SUCCESS",
            "message": "",
            "stepCost": 114.0,
        },
        "step": frame.step,
        "gameOver": frame.over,
    }


def facing_of(yaw: float) -> int:
    """Index into FACINGS; diagonals round as the game does (135 is NORTH, 315 is SOUTH)."""
    return int(np.floor(yaw / 90 + 0.5)) % 4


@dataclass
class _Game:
    seed: int
    class_name: str
    episode: int
    cells: dict[Cell, Block] = field(default_factory=dict)
    leaves: list[tuple[int, int, int]] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    trodden: set[Cell] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = item_rng(self.seed, "novelcraft", self.class_name, self.episode, "play")
        pre_novelty = self.episode < PRE_NOVELTY.get(self.class_name, 0)
        self.novel = None if pre_novelty else NOVEL_BLOCKS.get(self.class_name)
        self.slots: list[tuple[Block, int]] = [(AIR, 0)] * 9
        self.slots[7] = (PICKAXE, 1)
        self.selected, self.wear, self.step, self.pitch = 0, 0, 1, 0.0
        self.negative_yaw = self.rng.random() < 0.3
        self.light, self.dyes = self.lighting()
        self.set_up_room()
        self.face(int(self.rng.integers(4)) * 90)
        self.record(0)

    def lighting(self) -> tuple[Colour, dict[str, Colour]]:
        """Light and dyes of the episode, drawn apart from the play."""
        rng = item_rng(self.seed, "novelcraft", self.class_name, self.episode, "light")
        level, tint = rng.uniform(DARKEST, 1), rng.uniform(1 - LIGHT_TINT, 1 + LIGHT_TINT, 3)
        dyes = {look: tuple(rng.uniform(*DYES, 3).tolist()) for look in DYED}
        return tuple((level * tint).tolist()), dyes

    # The room.

    def set_up_room(self) -> None:
        taken: list[Cell] = []
        self.trees = [self.free_spot(taken, 5) for _ in range(TREES)]
        self.table, chest, platinum, diamond, trader, other, pogoist, self.position = (
            self.free_spot(taken, 3) for _ in range(8)
        )
        for tree in self.trees:
            self.cells[tree] = OAK
            self.grow_leaves(tree)
        self.chest = chest
        self.cells[self.table], self.cells[chest] = TABLE, CHEST
        self.platinum = [platinum, (platinum[0] + 1, platinum[1])]
        self.diamonds = [diamond, (diamond[0] + 1, diamond[1]), (diamond[0], diamond[1] + 1)]
        self.cells.update(dict.fromkeys(self.platinum, PLATINUM))
        self.cells.update(dict.fromkeys(self.diamonds, DIAMOND_ORE))
        for offset in self.rng.choice(np.arange(3, 29), 2, replace=False):
            self.cells[ROOM.x + int(offset), ROOM.z + ROOM.side - 1] = DOOR
        self.trader = trader
        self.entities = [
            Entity(43, "EntityTrader", trader),
            Entity(44, "EntityTrader", other),
            Entity(42, "EntityPogoist", pogoist),
        ]
        if self.novel is not None and self.class_name == "tree_easy":
            for tree in self.trees[:2]:
                self.cells[tree] = self.novel
        if self.novel is not None and self.class_name == "fence":
            for x, z in self.trees:
                ring = [(x + i, z + j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
                self.cells.update(dict.fromkeys(ring, self.novel))

    def free_spot(self, taken: list[Cell], apart: int) -> Cell:
        """A cell at least `apart` from all that is taken. The room is always large enough:
        5 trees exclude at most 81 of 576 cells each, the other 8 things and the trees 25 each."""
        cells = _interior(MARGIN)
        far = np.ones(len(cells), dtype=bool)
        for other in taken:
            far &= np.abs(cells - other).max(axis=1) >= apart
        x, z = cells[self.rng.choice(np.flatnonzero(far))].tolist()
        taken.append((x, z))
        return x, z

    def grow_leaves(self, tree: Cell) -> None:
        for height in range(TRUNK_HEIGHT - 3, TRUNK_HEIGHT + 1):
            wide = 2 if height < TRUNK_HEIGHT - 1 else 1
            for i in range(-wide, wide + 1):
                for j in range(-wide, wide + 1):
                    corner = abs(i) == abs(j) == wide
                    trunk = i == j == 0 and height < TRUNK_HEIGHT
                    sparse = corner and (height == TRUNK_HEIGHT or self.rng.random() < 0.5)
                    if not (trunk or sparse):
                        self.leaves.append((tree[0] + i, height, tree[1] + j))

    # The agent.

    def make_pogo_stick(self) -> None:
        for _ in range(self.rng.integers(1, 4)):
            self.look_around()
        if self.rng.random() < CHEST_SHARE:
            self.take_from_chest()
        for errand in self.rng.permutation(["wood", "platinum", "diamond"]):
            if errand == "wood":
                self.fetch_wood()
            else:
                self.mine(self.platinum if errand == "platinum" else self.diamonds)
        self.approach(self.trader)
        self.craft(TITANIUM)
        self.approach(self.table)
        self.craft(TREE_TAP)
        self.craft(DIAMOND_BLOCK)
        self.tap_rubber()
        self.approach(self.table)
        self.craft(POGO_STICK, over=True)

    def take_from_chest(self) -> None:
        """Logs, some of them of the tree that is novel elsewhere; a fence needs its slot."""
        self.approach(self.chest)
        kinds = (OAK,) if self.class_name == "fence" else (OAK, NOVEL_BLOCKS["tree_easy"])
        self.give(kinds[self.rng.integers(len(kinds))], int(self.rng.integers(2, 7)))
        self.record(3)

    def fetch_wood(self) -> None:
        while self.count(OAK.name) < 2:
            tree = self.next_tree()
            self.approach(tree)
            self.clear_fence()
            self.break_ahead()
        for item in (PLANKS, PLANKS, STICK):
            self.craft(item)

    def next_tree(self) -> Cell:
        """The nearest that still stands, easy ones first."""
        x, z = self.position
        standing = [tree for tree in self.trees if tree in self.cells]
        return min(
            standing,
            key=lambda tree: (self.cells[tree] == OAK, abs(tree[0] - x) + abs(tree[1] - z), tree),
        )

    def mine(self, cluster: list[Cell]) -> None:
        """Take the first of the cluster: it has no neighbour to the west or north."""
        self.approach(cluster[0], sides=(0, 3))
        self.selected = next(i for i, (item, _) in enumerate(self.slots) if item == PICKAXE)
        self.break_ahead(drop=True)
        self.selected = 0
        self.walk_on()

    def tap_rubber(self) -> None:
        tree = self.next_tree()
        self.approach(tree, gap=2)
        if self.ahead() in self.cells:
            self.break_ahead()
        self.take({TREE_TAP.name: 1})
        self.cells[self.ahead()] = TREE_TAP
        self.pitch = 60.0
        self.record(3)
        self.give(RUBBER, 1)
        self.record(3)

    def clear_fence(self) -> None:
        if self.cells.get(self.ahead()) == NOVEL_BLOCKS["fence"]:
            self.break_ahead()
            self.walk_on()

    def approach(self, target: Cell, gap: int = 1, sides: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Teleport before the target and face it, at times by way of a cell further off.

        The agent looks along direction `side`, so it stands on the other side of the target.
        A fence round the target keeps it one cell further away.
        """
        self.pitch = 0.0
        fenced = self.cells.get(_along(target, sides[0], -gap)) == NOVEL_BLOCKS["fence"]
        distance = gap + fenced
        reachable = [side for side in sides if self.is_free(_along(target, side, -distance))]
        side = reachable[self.rng.integers(len(reachable))]
        self.face(side * 90)
        far = distance + int(self.rng.integers(2, 4))
        path = [_along(target, side, -i) for i in range(distance, far + 1)]
        if self.rng.random() < 0.35 and all(self.is_free(cell) for cell in path):
            self.trodden.update(path)
            self.position = path[-1]
            self.record(3)
        self.position = path[0]
        self.record(3)

    def is_free(self, cell: Cell) -> bool:
        inside = all(
            low < value < low + ROOM.side - 1
            for value, low in zip(cell, (ROOM.x, ROOM.z), strict=True)
        )
        standing = (e.cell for e in self.entities if e.type != "EntityItem")
        return inside and cell not in self.cells and cell not in standing

    def look_around(self) -> None:
        turn = int(self.rng.choice([90, -90, 15, 45, 60, 75, 135, 150]))
        self.face(int(self.yaw) % 360 + turn)
        self.record(3)

    def face(self, yaw: int) -> None:
        """0 to 345, or in some episodes 0 to -345 with 0 written -0.0, as the game does."""
        self.yaw = -float(-yaw % 360) if self.negative_yaw else float(yaw % 360)

    def ahead(self) -> Cell:
        return _along(self.position, facing_of(self.yaw), 1)

    def walk_on(self) -> None:
        self.position = self.ahead()
        self.record(3)

    def break_ahead(self, *, drop: bool = False) -> None:
        cell = self.ahead()
        item, count = YIELDS[self.cells.pop(cell)]
        if drop:
            self.wear += 1
            self.drop(cell, item, count)
        else:
            self.give(item, count)
            if item.name == OAK.name and self.rng.random() < 0.3:
                self.drop(_along(cell, facing_of(self.yaw), 1), SAPLING, 1)
        self.record(4)

    def drop(self, cell: Cell, item: Block, count: int) -> None:
        if cell not in self.cells:
            number = max(entity.id for entity in self.entities) + 1
            self.entities.append(Entity(number, "EntityItem", cell, item, count))

    def pick_up(self) -> None:
        for entity in list(self.entities):
            if entity.type == "EntityItem" and entity.cell == self.position:
                self.give(entity.item, entity.count)
                self.entities.remove(entity)

    def craft(self, item: Block, *, over: bool = False) -> None:
        made, needed = RECIPES[item]
        self.take(needed)
        self.give(item, made)
        self.record(3, over=over)

    def count(self, name: str) -> int:
        return sum(count for item, count in self.slots if item.name == name)

    def give(self, item: Block, number: int) -> None:
        held = [i for i, (other, _) in enumerate(self.slots) if other == item]
        slot = held[0] if held else next(i for i, (_, count) in enumerate(self.slots) if not count)
        self.slots[slot] = (item, self.slots[slot][1] + number)

    def take(self, needed: Mapping[str, int]) -> None:
        for name, number in needed.items():
            if self.count(name) < number:
                raise AssertionError(f"{self.class_name}/{self.episode}: too few {name}")
            for i, (item, count) in enumerate(self.slots):
                if item.name == name:
                    used = min(count, number)
                    number -= used
                    self.slots[i] = (item, count - used) if count > used else (AIR, 0)

    def record(self, steps: int, *, over: bool = False) -> None:
        self.step += steps
        self.trodden.add(self.position)
        self.pick_up()
        self.frames.append(
            Frame(
                position=self.position,
                yaw=self.yaw,
                pitch=self.pitch,
                slots=tuple(self.slots),
                selected=self.selected,
                wear=self.wear,
                cells=dict(self.cells),
                leaves=tuple(self.leaves),
                entities=tuple(self.entities),
                step=self.step,
                over=over,
                light=self.light,
                dyes=self.dyes,
            )
        )
        self.pogoist_wanders()

    def pogoist_wanders(self) -> None:
        i = next(i for i, entity in enumerate(self.entities) if entity.type == "EntityPogoist")
        goal = _along(self.entities[i].cell, int(self.rng.integers(4)), 1)
        distance = max(abs(goal[0] - self.position[0]), abs(goal[1] - self.position[1]))
        if self.rng.random() < 0.5 and distance > 1 and self.is_free(goal):
            self.entities[i] = self.entities[i]._replace(cell=goal)


def _along(cell: Cell, direction: int, blocks: int) -> Cell:
    dx, dz = DIRECTIONS[direction]
    return cell[0] + dx * blocks, cell[1] + dz * blocks


def _interior(margin: int) -> np.ndarray:
    """All cells at least `margin` from the outside of the room, as rows of (x, z)."""
    offsets = np.indices((ROOM.side - 2 * margin,) * 2).reshape(2, -1).T + margin
    return offsets + np.array([ROOM.x, ROOM.z])


@lru_cache(maxsize=1)
def _empty_room() -> dict[Cell, Block]:
    """Every cell in the order of the map: x first, then z."""
    ends = (0, ROOM.side - 1)
    return {
        (ROOM.x + i, ROOM.z + j): WALL if i in ends or j in ends else AIR
        for i in range(ROOM.side)
        for j in range(ROOM.side)
    }


def _cells_in_view(frames: list[Frame], trodden: set[Cell], rng: np.random.Generator) -> list[Cell]:
    """Free cells for the novel block: the first is seen from nearby in at least three frames.

    Together they stand in the line of sight of at most 35 % of the frames.
    """
    cells = rng.permutation(_interior(2))
    busy = set(trodden)
    for frame in frames:
        busy.update(frame.cells)
        busy.update(entity.cell for entity in frame.entities)
    cells = np.array([cell for cell in cells.tolist() if tuple(cell) not in busy][:CANDIDATES])
    positions = np.array([frame.position for frame in frames])
    away = cells - positions[:, None]
    distance = np.hypot(away[..., 0], away[..., 1])
    turn = np.radians([frame.yaw for frame in frames])[:, None]
    depth = -np.sin(turn) * away[..., 0] + np.cos(turn) * away[..., 1]
    level = np.array([frame.pitch == 0 for frame in frames])[:, None]
    seen = (depth > 0.79 * distance) & level
    # A trunk on the line, tested at least every 1.4 blocks, hides a cell; other blocks are low.
    solid = np.zeros((len(frames), ROOM.side, ROOM.side), dtype=bool)
    for i, frame in enumerate(frames):
        for (x, z), block in frame.cells.items():
            solid[i, x - ROOM.x, z - ROOM.z] = block == OAK
    for share in np.linspace(0, 1, ROOM.side, endpoint=False):
        at = np.rint(positions[:, None] + share * away).astype(int) - (ROOM.x, ROOM.z)
        seen &= ~solid[np.arange(len(frames))[:, None], at[..., 0], at[..., 1]]
    near = (seen & (depth > 0.85 * distance) & (distance < 6.5)).sum(axis=0)
    picks: list[int] = []
    union = np.zeros(len(frames), dtype=bool)
    for _ in range(NOVEL_COPIES):
        allowed = (seen | union[:, None]).sum(axis=0) <= 0.35 * len(frames)
        allowed &= near >= 3 if not picks else seen.any(axis=0)
        allowed[picks] = False
        options = np.flatnonzero(allowed)
        if not len(options) and not picks:
            options = np.array([near.argmax()])
        if len(options):
            pick = int(rng.choice(options))
            picks.append(pick)
            union |= seen[:, pick]
    return [(x, z) for x, z in cells[picks].tolist()]


def _with_block(frame: Frame, cells: list[Cell], block: Block) -> Frame:
    return replace(frame, cells=frame.cells | dict.fromkeys(cells, block))


def _novelty(seed: int, class_name: str) -> dict:
    """The entry of novelty_description.json; the position is that of the first novel episode."""
    block = NOVEL_BLOCKS[class_name]
    frames = play(seed, class_name, PRE_NOVELTY.get(class_name, 0))
    x, z = next(cell for cell, other in frames[0].cells.items() if other == block)
    return {"noveltyType": "NewItem", "noveltyItem": block.name, "noveltyPosition": [x, ROOM.y, z]}


def _stack(item: Block, count: int, wear: int) -> dict:
    return {
        "item": item.name,
        "count": count,
        "damage": wear if item == PICKAXE else 0,
        "maxdamage": MAX_DAMAGE.get(item.name, 0),
        **dict(item.properties),
    }


def _entity(entity: Entity, cell: Cell) -> dict:
    kind = entity.type.removeprefix("Entity")
    name = ITEM_ENTITY_NAMES.get(entity.item.name, f"entity.polycraft.{kind}.name")
    shown = {"type": entity.type, "name": name, "id": entity.id, "pos": [cell[0], ROOM.y, cell[1]]}
    if entity.type == "EntityItem":
        stack = _stack(entity.item, entity.count, 0)
        return shown | {key: stack[key] for key in ("item", "count", "damage", "maxdamage")}
    worn = EQUIPMENT.get(str(entity.id), ())
    return shown | {"equipment": [{"itemName": w, "itemMeta": 0, "count": 1} for w in worn]}


def _write_episode(
    root: Path, seed: int, class_name: str, episode: int, faults: Mapping[str, str]
) -> None:
    frames = play(seed, class_name, episode)
    next_start = play(seed, class_name, episode + 1)[0]
    first = 1 if episode == 0 else 0
    for i, frame in enumerate(frames):
        picture = draw((next_start if frame.over else frame).view())
        bug = i == 0 and episode % SPAWN_BUG_EVERY == 0
        state = reply(frame, entities_on_player=bug)
        stem = f"{class_name}/{episode}/{first + i}"
        for name, data in _files(stem, picture, state, faults).items():
            _put(root / name, data)


def _files(
    stem: str, picture: np.ndarray, state: dict, faults: Mapping[str, str]
) -> dict[str, bytes]:
    """Name -> bytes of one frame, spoilt where `faults` says so."""
    png, text = f"{stem}.png", f"{stem}.json"
    files = {png: encode_png(picture), text: json.dumps(state).encode()}
    if faults.get(png) == "truncated PNG":
        files[png] = files[png][: len(files[png]) // 3]
    if faults.get(png) == "PNG of 128x128":
        files[png] = encode_png(picture[::2, ::2])
    if faults.get(png) == "PNG without JSON":
        del files[text]
    if faults.get(text) == "truncated JSON":
        files[text] = files[text][: len(files[text]) // 2]
    if faults.get(text) == "player position NaN":
        state["player"]["pos"][0] = float("nan")
        files[text] = json.dumps(state).encode()
    if faults.get(text) == "JSON without PNG":
        del files[png]
    if faults.get(text) == "empty JSON":
        files[text] = b""
    folder, number = stem.rsplit("/", 1)
    for odd, source in ((f"{stem}_copy.png", png), (f"{folder}/frame{number}.json", text)):
        if odd in faults:
            files[odd] = files[source]
    return files


def _put(path: Path, data: bytes) -> None:
    """Rename into place. No fsync, as the data can always be made again; the temporary name is
    always the same, so that a run after a kill clears what the kill left."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def encode_png(picture: np.ndarray) -> bytes:
    import cv2

    done, data = cv2.imencode(".png", picture[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 4])
    if not done:
        raise AssertionError(f"PNG of shape {picture.shape} could not be encoded")
    return data.tobytes()
