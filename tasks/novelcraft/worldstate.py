"""One SENSE_ALL reply (JSON bytes) to one compact `WorldState`; air is dropped.

Enters: the bytes of a frame's `.json`, Polycraft 1.x or 2.0, `map` as "x,y,z" keys or in the flat
form {blocks, size, origin}. Leaves: integer positions, block keys, player pose with yaw in
[0, 360), entities, inventory (docs/novelcraft.md, rules 3 to 5). Every fault is a `RecordError`
that names the rule it broke.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson

from schemas.errors import RecordError

AIR = "minecraft:air"
MAX_BYTES = 16 << 20
MAX_DEPTH = 12
MAX_CELLS = 1 << 16
MAX_ENTITIES = 1 << 10
MAX_COORDINATE = 30_000_000  # the border of a Minecraft world
FACINGS = ("NORTH", "EAST", "SOUTH", "WEST")

_PLAIN_PLACES = re.compile(r"(?:-?[0-9]{1,9},-?[0-9]{1,9},-?[0-9]{1,9};)+")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Slot(NamedTuple):
    """One stack of the inventory. `slot` is a number; `item` is "" for an empty hand."""

    slot: int
    item: str
    count: int  # type: ignore[assignment]
    damage: int
    max_damage: int
    variant: str | None


class Entity(NamedTuple):
    id: str
    type: str
    name: str
    position: tuple[int, int, int]
    color: str | None


@dataclass(frozen=True, eq=False, slots=True)
class WorldState:
    """`positions` (N, 3) int32 as x, height, z; block i is called `keys[key_index[i]]`."""

    positions: np.ndarray
    keys: tuple[str, ...]
    key_index: np.ndarray
    player: tuple[int, int, int]
    yaw: float
    pitch: float
    facing: str | None
    entities: tuple[Entity, ...]
    inventory: tuple[Slot, ...]
    selected: Slot | None
    block_in_front: str
    step: int
    game_over: bool | None
    goal_type: str | None
    goal_achieved: bool | None
    command: str | None
    command_argument: str | None
    command_result: str | None

    def item_counts(self) -> dict[str, int]:
        """Items held, summed over slots; `selected` repeats a slot and is not added (rule 3)."""
        counts: dict[str, int] = {}
        for slot in self.inventory:
            counts[slot.item] = counts.get(slot.item, 0) + slot.count
        return counts


def parse_world_state(data: bytes) -> WorldState:
    """The world state of one frame; raises RecordError for anything that is not one."""
    return world_state(_load(data))


def world_state(document: Any) -> WorldState:
    """The same from an already parsed document."""
    document = _typed(document, dict, "the document")
    positions, keys = _map(_field(document, "map", dict))
    distinct = tuple(sorted(set(keys)))
    rank = {key: i for i, key in enumerate(distinct)}
    player = _field(document, "player", dict)
    yaw = normal_yaw(_number(player, "yaw", "player"))
    pitch = _number(player, "pitch", "player")
    if not -90.0 <= pitch <= 90.0:
        raise RecordError("pitch_range", f"player.pitch is {pitch}, expected -90 to 90")
    facing = player.get("facing")
    if facing is not None and facing not in FACINGS:
        raise RecordError("facing_allowed", f"player.facing is {facing!r:.60}, expected {FACINGS}")
    inventory, selected = _inventory(_field(document, "inventory", dict, {}))
    front = _field(document, "blockInFront", dict, {"name": AIR})
    goal = _field(document, "goal", dict, {})
    command = _field(document, "command_result", dict, {})
    return WorldState(
        positions=positions,
        keys=distinct,
        key_index=np.fromiter(map(rank.__getitem__, keys), np.int32, len(keys)),
        player=_position(player.get("pos"), "player.pos"),
        yaw=yaw,
        pitch=pitch,
        facing=facing,
        entities=_entities(_field(document, "entities", dict, {})),
        inventory=inventory,
        selected=selected,
        block_in_front=block_key(front, "blockInFront"),
        step=_integer(document, "step", "the document"),
        game_over=_optional(document, "gameOver", bool),
        goal_type=_optional(goal, "goalType", str),
        goal_achieved=_optional(goal, "goalAchieved", bool),
        command=_optional(command, "command", str),
        command_argument=_optional(command, "argument", str),
        command_result=_optional(command, "result", str),
    )


def normal_yaw(yaw: float) -> float:
    """Degrees in [0, 360); -0.0 and values that round up to 360 become 0.0."""
    yaw = yaw % 360.0
    return 0.0 if yaw in (0.0, 360.0) else yaw


def block_key(block: Any, where: str) -> str:
    """Name, with `_var_<variant>` appended unless the variant is absent or "default" (rule 5)."""
    try:
        name = block["name"]
        variant = block.get("variant", "default")
    except (TypeError, KeyError, AttributeError):
        raise RecordError(
            "block_name", f"{where} is {block!r:.80}, expected an object with a name"
        ) from None
    if type(name) is not str or type(variant) is not str or not name:
        raise RecordError("block_name", f"{where} is {block!r:.80}, expected name as text")
    return name if variant == "default" else f"{name}_var_{variant}"


def _load(data: bytes) -> Any:
    if len(data) > MAX_BYTES:
        raise RecordError(
            "json_size", f"the world state has {len(data)} bytes, expected at most {MAX_BYTES}"
        )
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RecordError("json_syntax", f"the world state is not JSON: {error}") from None
    # Each pass removes at least one level. Brackets inside strings can leave a remainder, so what
    # is left asks for the exact count.
    brackets = bytes(data).translate(None, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH // 2):
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    if brackets and isinstance(document, dict | list) and _deeper_than(document, MAX_DEPTH):
        raise RecordError("json_depth", f"the world state nests deeper than {MAX_DEPTH} levels")
    return document


def _deeper_than(document: Any, limit: int) -> bool:
    level = [document]
    for _ in range(limit):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    return bool(level)


def _map(cells: dict) -> tuple[np.ndarray, list[str]]:
    if "blocks" in cells and "size" in cells:
        return _flat_map(cells)
    if len(cells) > MAX_CELLS:
        raise RecordError(
            "map_size", f"the map has {len(cells)} cells, at most {MAX_CELLS} allowed"
        )
    try:
        solid = {place: block for place, block in cells.items() if block["name"] != AIR}
        keys = [
            block_key(block, f"map[{place}]") if "variant" in block else block["name"]
            for place, block in solid.items()
        ]
        plain = all(keys) and set(map(type, keys)) <= {str}
    except (TypeError, KeyError):
        plain = False
    if not plain:
        for place, block in cells.items():
            block_key(block, f"map[{place!r:.40}]")
    return _places(tuple(solid)), keys


def _places(places: tuple[str, ...]) -> np.ndarray:
    """ "x,y,z" texts to (N, 3) int32. From frame to frame they seldom change."""
    positions = _known_places(places)
    if positions is None:
        bad = next((place for place in places if not _is_place(place)), places[0])
        raise RecordError(
            "map_position", f"map key {bad!r:.60} is no position, expected three integers 'x,y,z'"
        )
    return positions


@lru_cache(maxsize=4)
def _known_places(places: tuple[str, ...]) -> np.ndarray | None:
    """All in one conversion, read-only; None if one is no position."""
    if not places:
        parsed = np.zeros((0, 3), np.int64)
    elif _PLAIN_PLACES.fullmatch(text := ";".join(places) + ";"):
        parsed = np.fromstring(text.replace(";", ","), np.int64, sep=",").reshape(-1, 3)
    else:
        try:
            parsed = np.array(",".join(places).split(","), np.int64).reshape(-1, 3)
        except (ValueError, OverflowError):
            return None
        if len(parsed) != len(places) or any(place.count(",") != 2 for place in places):
            return None
    if parsed.size and np.abs(parsed).max() > MAX_COORDINATE:
        return None
    positions = parsed.astype(np.int32)
    positions.flags.writeable = False
    return positions


def _is_place(place: str) -> bool:
    parts = place.split(",")
    try:
        return len(parts) == 3 and all(abs(int(part)) <= MAX_COORDINATE for part in parts)
    except ValueError:
        return False


def _flat_map(cells: dict) -> tuple[np.ndarray, list[str]]:
    """One layer at the origin's height, z running fastest, then x (the order PAL writes)."""
    blocks = _field(cells, "blocks", list)
    origin = np.array(_position(cells.get("origin"), "map.origin"), np.int32)
    size = _position(cells.get("size"), "map.size")
    if min(size) < 1 or len(blocks) != size[0] * size[2] or len(blocks) > MAX_CELLS:
        raise RecordError(
            "map_size",
            f"map.blocks has {len(blocks)} entries for size {list(size)}, expected "
            f"size[0] * size[2] of them, at most {MAX_CELLS}",
        )
    keys = [
        block if type(block) is str and block else block_key(block, f"map.blocks[{i}]")
        for i, block in enumerate(blocks)
    ]
    solid = [i for i, key in enumerate(keys) if key != AIR]
    index = np.array(solid, np.int32)
    positions = np.zeros((len(solid), 3), np.int32)
    positions[:, 0], positions[:, 2] = np.divmod(index, size[2])
    return positions + origin, [keys[i] for i in solid]


def _entities(entities: dict) -> tuple[Entity, ...]:
    if len(entities) > MAX_ENTITIES:
        raise RecordError(
            "entity_count",
            f"the state has {len(entities)} entities, at most {MAX_ENTITIES} allowed",
        )
    parsed = []
    for identity, entity in entities.items():
        where = f"entities[{identity!r:.40}]"
        entity = _typed(entity, dict, where)
        parsed.append(
            Entity(
                identity,
                _field(entity, "type", str),
                _field(entity, "name", str),
                _position(entity.get("pos"), f"{where}.pos"),
                _optional(entity, "color", str),
            )
        )
    return tuple(parsed)


def _inventory(inventory: dict) -> tuple[tuple[Slot, ...], Slot | None]:
    slots, selected = [], None
    for name, stack in inventory.items():
        where = f"inventory[{name!r:.40}]"
        stack = _typed(stack, dict, where)
        if name == "selectedItem":
            number = _integer(stack, "slot", where)
        elif name.isascii() and name.isdigit() and len(name) < 6:
            number = int(name)
        else:
            raise RecordError("inventory_slot", f"{where}: expected a slot number or selectedItem")
        slot = Slot(
            number,
            _field(stack, "item", str),
            _integer(stack, "count", where),
            _integer(stack, "damage", where, 0),
            _integer(stack, "maxdamage", where, 0),
            _optional(stack, "variant", str),
        )
        if slot.count < 0:
            raise RecordError("inventory_count", f"{where}.count is {slot.count}, expected >= 0")
        if name == "selectedItem":
            selected = slot
        else:
            slots.append(slot)
    return tuple(sorted(slots)), selected


def _position(value: Any, where: str) -> tuple[int, int, int]:
    if (
        type(value) is not list
        or len(value) != 3
        or not all(type(part) is int and abs(part) <= MAX_COORDINATE for part in value)
    ):
        raise RecordError(
            "position", f"{where} is {value!r:.80}, expected three integers [x, y, z]"
        )
    return (value[0], value[1], value[2])


def _number(record: dict, name: str, where: str) -> float:
    value: Any = record.get(name)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise RecordError("number", f"{where}.{name} is {value!r:.40}, expected a finite number")
    return float(value)


def _integer(record: dict, name: str, where: str, default: int | None = None) -> int:
    value = record.get(name, default)
    if type(value) is not int or abs(value) >= 1 << 62:
        raise RecordError("integer", f"{where}: {name} is {value!r:.40}, expected an integer")
    return value


def _typed(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise RecordError("type", f"{where} is {value!r:.60}, expected {kind.__name__}")
    return value


def _field(record: dict, name: str, kind: type, default: Any = None) -> Any:
    if name not in record and default is None:
        raise RecordError("missing", f"{name} is missing, found {sorted(record)[:20]}")
    return _typed(record.get(name, default), kind, name)


def _optional(record: dict, name: str, kind: type) -> Any:
    value = record.get(name)
    return None if value is None else _typed(value, kind, name)
