"""World states: what is kept, how it is normalised, and that every fault has a name."""

import copy
import gzip
import json
import math
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import RecordError
from tasks.novelcraft import worldstate
from tasks.novelcraft.worldstate import (
    AIR,
    WorldState,
    block_key,
    normal_yaw,
    parse_world_state,
    world_state,
)
from tests.shared import shared_path


def document() -> dict[str, Any]:
    """A small state with every key of both Polycraft versions."""
    return {
        "blockInFront": {"name": "minecraft:log", "variant": "oak", "axis": "y"},
        "inventory": {
            "7": {"item": "minecraft:iron_pickaxe", "count": 1, "damage": 3, "maxdamage": 250},
            "0": {"item": "minecraft:planks", "count": 5, "damage": 0, "variant": "oak"},
            "1": {"item": "minecraft:planks", "count": 2, "damage": 0, "variant": "birch"},
            "selectedItem": {"slot": 0, "item": "minecraft:planks", "count": 5, "damage": 0},
        },
        "player": {"pos": [2, 4, -3], "facing": "WEST", "yaw": -270.0, "pitch": 64.74683},
        "destinationPos": [0, 0, 0],
        "entities": {
            "42": {"type": "EntityTrader", "name": "trader", "id": 42, "pos": [1, 4, 1]},
            "43": {"type": "EntityItem", "name": "gem", "pos": [2, 4, 1], "color": "red"},
        },
        "map": {
            "0,4,0": {"name": "minecraft:bedrock", "isAccessible": False},
            "0,4,1": {"name": AIR, "isAccessible": True},
            "-1,4,7": {"name": "minecraft:log", "axis": "y", "variant": "jungle"},
            "5,4,7": {"name": "minecraft:quartz_block", "variant": "default"},
        },
        "goal": {"goalType": "ITEM", "goalAchieved": False, "Distribution": "Uninformed"},
        "command_result": {"command": "SENSE_ALL", "argument": "NONAV", "result": "SUCCESS"},
        "step": 279,
        "gameOver": False,
    }


def parse(content: Any) -> WorldState:
    return parse_world_state(orjson.dumps(content))


def blocks_of(state: WorldState) -> dict[tuple[int, ...], str]:
    places = map(tuple, state.positions.tolist())
    return {place: state.keys[i] for place, i in zip(places, state.key_index, strict=True)}


def test_every_part_of_a_state() -> None:
    state = parse(document())
    assert state.positions.dtype == np.int32
    assert blocks_of(state) == {
        (0, 4, 0): "minecraft:bedrock",
        (-1, 4, 7): "minecraft:log_var_jungle",
        (5, 4, 7): "minecraft:quartz_block",
    }
    assert (state.player, state.yaw, state.pitch) == ((2, 4, -3), 90.0, 64.74683)
    assert state.facing == "WEST"
    assert [(e.id, e.type, e.position, e.color) for e in state.entities] == [
        ("42", "EntityTrader", (1, 4, 1), None),
        ("43", "EntityItem", (2, 4, 1), "red"),
    ]
    assert [slot.slot for slot in state.inventory] == [0, 1, 7]
    assert state.selected is not None
    assert (state.selected.slot, state.selected.item) == (0, "minecraft:planks")
    assert state.block_in_front == "minecraft:log_var_oak"
    assert (state.step, state.game_over, state.goal_achieved) == (279, False, False)
    assert (state.goal_type, state.command, state.command_argument, state.command_result) == (
        "ITEM",
        "SENSE_ALL",
        "NONAV",
        "SUCCESS",
    )


def test_the_held_item_is_not_counted_twice() -> None:
    counts = parse(document()).item_counts()
    assert counts == {"minecraft:planks": 7, "minecraft:iron_pickaxe": 1}


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"name": "minecraft:tnt"}, "minecraft:tnt"),
        ({"name": "minecraft:sand", "variant": "sand"}, "minecraft:sand_var_sand"),
        ({"name": "minecraft:quartz_block", "variant": "default"}, "minecraft:quartz_block"),
        ({"name": "minecraft:wool", "color": "white"}, "minecraft:wool"),
    ],
)
def test_block_key(block: dict[str, str], key: str) -> None:
    assert block_key(block, "here") == key


@given(st.floats(-1e6, 1e6))
def test_yaw_is_an_angle_from_0_to_360(yaw: float) -> None:
    normal = normal_yaw(yaw)
    assert 0.0 <= normal < 360.0
    assert math.copysign(1.0, normal) == 1.0
    turns = (yaw - normal) / 360.0
    assert abs(turns - round(turns)) < 1e-9


@pytest.mark.parametrize(
    ("yaw", "normal"), [(-0.0, 0.0), (-270, 90), (-180, 180), (315, 315), (-1e-20, 0), (720, 0)]
)
def test_yaw_values_of_real_frames(yaw: float, normal: float) -> None:
    assert normal_yaw(yaw) == normal
    assert math.copysign(1.0, normal_yaw(yaw)) == 1.0


def test_flat_map_is_the_keyed_map() -> None:
    content = document()
    origin, size = (40, 17, 32), (3, 1, 4)
    names = [AIR, "minecraft:bedrock", "minecraft:tnt", AIR, "minecraft:log", "minecraft:stone"]
    flat = [names[i % len(names)] for i in range(size[0] * size[2])]
    keyed = {
        f"{origin[0] + x},{origin[1]},{origin[2] + z}": {"name": flat[x * size[2] + z]}
        for x in range(size[0])
        for z in range(size[2])
    }
    one, other = (
        parse(content | {"map": keyed}),
        parse(content | {"map": {"blocks": flat, "size": list(size), "origin": list(origin)}}),
    )
    assert blocks_of(one) == blocks_of(other)
    assert len(other.positions) == 8


def test_a_flat_map_may_hold_objects() -> None:
    blocks = [{"name": AIR}, {"name": "minecraft:log", "variant": "oak"}]
    state = parse(document() | {"map": {"blocks": blocks, "size": [1, 1, 2], "origin": [3, 4, 5]}})
    assert blocks_of(state) == {(3, 4, 6): "minecraft:log_var_oak"}


def test_an_empty_map_and_missing_optional_parts() -> None:
    state = parse({"map": {}, "player": {"pos": [0, 4, 0], "yaw": 0, "pitch": 0}, "step": 1})
    assert state.positions.shape == (0, 3)
    assert (state.block_in_front, state.entities, state.inventory) == (AIR, (), ())
    assert (state.game_over, state.selected, state.goal_achieved, state.facing) == (None,) * 4


def changed(path: str, value: Any) -> dict[str, Any]:
    content = copy.deepcopy(document())
    *parents, last = path.split("/")
    target = content
    for name in parents:
        target = target[name]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("map", ..., "missing"),
        ("map", [], "type"),
        ("map/0,4,0", {"isAccessible": True}, "block_name"),
        ("map/0,4,0", "minecraft:tnt", "block_name"),
        ("map/0,4,0", {"name": 5}, "block_name"),
        ("map/0,4,0", {"name": ""}, "block_name"),
        ("map/0,4,0", {"name": "minecraft:log", "variant": 3}, "block_name"),
        ("map/1,2", {"name": "minecraft:tnt"}, "map_position"),
        ("map/1,2,3,4", {"name": "minecraft:tnt"}, "map_position"),
        ("map/1,2.5,3", {"name": "minecraft:tnt"}, "map_position"),
        ("map/here", {"name": "minecraft:tnt"}, "map_position"),
        ("map/1,2,99999999999", {"name": "minecraft:tnt"}, "map_position"),
        ("map/1,2," + "9" * 5000, {"name": "minecraft:tnt"}, "map_position"),
        ("map", {"blocks": [AIR], "size": [1, 1, 2], "origin": [0, 0, 0]}, "map_size"),
        ("map", {"blocks": [AIR], "size": [1, 0, 1], "origin": [0, 0, 0]}, "map_size"),
        ("map", {"blocks": [AIR], "size": [1, 1, 1]}, "position"),
        ("map", {"blocks": [None], "size": [1, 1, 1], "origin": [0, 0, 0]}, "block_name"),
        ("player", ..., "missing"),
        ("player/pos", [1, 2], "position"),
        ("player/pos", [1, 2, 3.5], "position"),
        ("player/pos", [1, 2, True], "position"),
        ("player/yaw", "90", "number"),
        ("player/yaw", ..., "number"),
        ("player/pitch", 91, "pitch_range"),
        ("player/facing", "UP", "facing_allowed"),
        ("entities/42/pos", None, "position"),
        ("entities/42/type", ..., "missing"),
        ("entities/42", 7, "type"),
        ("inventory/0/count", -1, "inventory_count"),
        ("inventory/0/count", 1.5, "integer"),
        ("inventory/left", {"item": "", "count": 0}, "inventory_slot"),
        ("inventory/0/item", None, "type"),
        ("step", ..., "integer"),
        ("step", 1 << 63, "integer"),
        ("gameOver", "yes", "type"),
        ("goal/goalAchieved", 1, "type"),
    ],
)
def test_faults_have_names(path: str, value: Any, rule: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse(changed(path, value))
    assert caught.value.rule == rule
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"[1,]", b'{"step": NaN}', b'{"step": Infinity}', b"[" * 100_000],
)
def test_what_is_not_json(text: bytes) -> None:
    with pytest.raises(RecordError) as caught:
        parse_world_state(text)
    assert caught.value.rule == "json_syntax"


def test_a_number_too_large_for_a_float_is_not_a_yaw() -> None:
    text = orjson.dumps(document()).replace(b"-270.0", b"1e999")
    with pytest.raises(RecordError) as caught:
        parse_world_state(text)
    assert caught.value.rule in ("json_syntax", "number")


def test_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worldstate, "MAX_BYTES", 1000)
    with pytest.raises(RecordError) as caught:
        parse_world_state(b" " * 1001)
    assert caught.value.rule == "json_size"


def test_limits_on_what_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worldstate, "MAX_CELLS", 4)
    monkeypatch.setattr(worldstate, "MAX_ENTITIES", 2)
    parse(document())
    for path, value, rule in (
        ("map/9,4,9", {"name": AIR}, "map_size"),
        ("entities/44", {"type": "EntityItem", "name": "gem", "pos": [0, 4, 0]}, "entity_count"),
    ):
        with pytest.raises(RecordError) as caught:
            parse(changed(path, value))
        assert caught.value.rule == rule


def nested(levels: int) -> list:
    inner: list = []
    for _ in range(levels - 1):
        inner = [inner]
    return inner


def test_depth_limit() -> None:
    deepest = worldstate.MAX_DEPTH - 1
    assert parse(document() | {"extra": nested(deepest)})
    with pytest.raises(RecordError) as caught:
        parse(document() | {"extra": nested(deepest + 1)})
    assert caught.value.rule == "json_depth"


def test_brackets_in_texts_are_no_depth() -> None:
    assert parse(document() | {"extra": "[{" * 500 + "]"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    ),
    st.sampled_from(sorted(document())),
)
def test_any_value_anywhere_is_a_state_or_a_record_error(value: Any, name: str) -> None:
    try:
        state = world_state(document() | {name: value})
    except RecordError as error:
        assert error.rule
    else:
        assert isinstance(state, WorldState)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_state_or_a_record_error(data: bytes) -> None:
    with pytest.raises(RecordError):
        parse_world_state(data)


def plain_blocks(content: dict[str, Any]) -> dict[tuple[int, ...], str]:
    found = {}
    for place, block in content["map"].items():
        if block["name"] != AIR:
            variant = block.get("variant", "default")
            key = block["name"] + ("" if variant == "default" else f"_var_{variant}")
            found[tuple(int(part) for part in place.split(","))] = key
    return found


def test_the_whole_real_episode_as_a_plain_loop_reads_it() -> None:
    files = sorted(shared_path("novelcraft/episodes/polycraft_v1").glob("*.json"))
    assert len(files) == 92
    for file in files:
        content = json.loads(file.read_bytes())
        state = parse_world_state(file.read_bytes())
        assert blocks_of(state) == plain_blocks(content)
        assert list(state.player) == content["player"]["pos"]
        assert 0 <= state.yaw < 360
        assert state.step == content["step"]
        assert state.game_over is False


def test_the_bugged_last_frame_is_a_finished_game() -> None:
    path = shared_path("novelcraft/episodes/polycraft_v1_bugged_last_frame/93.json")
    assert parse_world_state(path.read_bytes()).game_over is True


def test_real_states_of_the_second_version() -> None:
    path = shared_path("novelcraft/world_states_v2/episode_a.jsonl.gz")
    states = []
    with gzip.open(path) as file:
        for line in file:
            states.append(parse_world_state(line))
            assert blocks_of(states[-1]) == plain_blocks(json.loads(line))
    assert len(states) == 50
    assert {e.type for s in states for e in s.entities} == {
        "EntityTrader",
        "EntityPogoist",
        "EntityItem",
    }
    assert {s.game_over for s in states} == {None}
    at_player = [all(e.position == s.player for e in s.entities) for s in states if s.entities]
    assert any(at_player), "the spawn bug of the first frames"
