import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.novelcraft.classes import NORMAL
from tasks.sample import novelcraft
from tasks.sample.blockworld import (
    BAR_ROWS,
    FIELD_OF_VIEW,
    LOOKS,
    SIZE,
    Block,
    Room,
    View,
    _look,
    draw,
)
from tasks.sample.novelcraft import (
    BAD_RECORDS,
    DEFAULT_EPISODES,
    NOVEL_BLOCKS,
    PRE_NOVELTY,
    RECIPES,
    RUBBER,
    TREE_TAP,
    YIELDS,
    bad_novelcraft_records,
    facing_of,
    play,
    reply,
    write_novelcraft,
)
from tests.shared import shared_path

REPOSITORY = Path(__file__).parents[2]
TINY = {"normal": 1, "fence": 1, "item_tnt": 2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("novelcraft")
    write_novelcraft(root, 3, episodes=TINY, bad_records=False, workers=1)
    return root


@pytest.fixture
def quick_pictures(monkeypatch):
    grey = np.full((SIZE, SIZE, 3), 99, dtype=np.uint8)
    monkeypatch.setattr(novelcraft, "draw", lambda view: grey)


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def without(view: View, block: Block) -> View:
    return replace(view, cells={cell: b for cell, b in view.cells.items() if b != block})


def changed_pixels(view: View, block: Block) -> np.ndarray:
    return (draw(view) != draw(without(view, block))).any(axis=2)


def alone(cells: dict, yaw: float, pitch: float, at=(16, 16)) -> View:
    return View(Room(0, 4, 0, 32), cells, (), (), at, yaw, pitch)


# Layout


def test_layout_is_that_of_the_real_release(tiny):
    assert {p.name for p in tiny.iterdir()} == set(TINY)
    for class_name, number in TINY.items():
        folder = tiny / class_name
        assert (folder / "novelty_description.json").exists() == (class_name != "normal")
        assert {p.name for p in folder.iterdir() if p.is_dir()} == {str(n) for n in range(number)}
        for episode in range(number):
            pictures = sorted(int(p.stem) for p in (folder / str(episode)).glob("*.png"))
            states = sorted(int(p.stem) for p in (folder / str(episode)).glob("*.json"))
            first = 1 if episode == 0 else 0
            assert pictures == states == list(range(first, first + len(states)))
            assert 20 <= len(states) <= 40


def test_pictures_are_8_bit_rgb_of_256(tiny):
    data = (tiny / "normal" / "0" / "1.png").read_bytes()
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    depth, colour_type, interlaced = data[24], data[25], data[28]
    assert (width, height, depth, colour_type, interlaced) == (256, 256, 8, 2, 0)


def test_game_is_over_in_the_last_frame_only_and_its_picture_is_of_the_next_game(tiny):
    folder = tiny / "item_tnt" / "0"
    last = max(int(p.stem) for p in folder.glob("*.png"))
    for path in folder.glob("*.json"):
        state = json.loads(path.read_bytes())
        assert state["gameOver"] == state["goal"]["goalAchieved"] == (int(path.stem) == last)
    next_start = (tiny / "item_tnt" / "1" / "0.png").read_bytes()
    assert (folder / f"{last}.png").read_bytes() == next_start
    assert (folder / f"{last - 1}.png").read_bytes() != next_start


def test_first_reply_of_some_episodes_has_all_entities_on_the_player(tiny):
    def on_player(name):
        state = json.loads((tiny / name).read_bytes())
        return {tuple(e["pos"]) for e in state["entities"].values()} == {
            tuple(state["player"]["pos"])
        }

    assert on_player("item_tnt/0/1.json")
    assert not on_player("item_tnt/0/2.json")
    assert not on_player("item_tnt/1/0.json")


def test_novelty_description_names_a_place_of_the_novel_block(tiny):
    for class_name in ("item_tnt", "fence"):
        path = tiny / class_name / "novelty_description.json"
        [entry] = json.loads(path.read_bytes())["novelty"]
        first_novel = play(3, class_name, PRE_NOVELTY.get(class_name, 0))[0]
        x, _, z = entry["noveltyPosition"]
        assert first_novel.cells[x, z] == NOVEL_BLOCKS[class_name]


def test_classes_and_blocks_are_real_ones():
    lists = json.loads(shared_path("novelcraft/labels/class_lists.json").read_text())
    real = lists["normal"] + lists["novel_valid"] + lists["novel_test"]
    assert set(DEFAULT_EPISODES) <= set(real)
    assert set(lists["normal"] + lists["novel_valid"]) <= set(DEFAULT_EPISODES)
    lines = shared_path("novelcraft/labels/name_to_novel_block.csv").read_text().splitlines()
    names = dict(line.split(",") for line in lines)
    for class_name, block in NOVEL_BLOCKS.items():
        variant = dict(block.properties).get("variant", "default")
        suffix = "" if variant == "default" else f"_var_{variant}"
        assert names[class_name] == block.name + suffix


def test_unknown_class_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="item_cheese"):
        write_novelcraft(tmp_path, episodes={"item_cheese": 1})


# Same bytes


@pytest.mark.parametrize("hash_seed", ["1", "77"])
def test_bytes_depend_on_seed_class_and_episode_alone(tiny, tmp_path, hash_seed):
    """Another process, hash seed, set of classes and number of workers, and the same episodes."""
    episodes = {"item_sand": 1, "item_tnt": 1} if hash_seed == "1" else {"item_tnt": 1}
    code = (
        "import sys; from pathlib import Path; from tasks.sample.novelcraft import *\n"
        f"write_novelcraft(Path(sys.argv[1]), 3, episodes={episodes}, bad_records=False, "
        f"workers={len(episodes)})\n"
        "assert not {'open3d', 'bpy'} & set(sys.modules), 'these need X and GL'"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, env=environment, cwd=tmp_path
    )
    made = contents(tmp_path / "item_tnt")
    assert len(made) > 40
    here = contents(tiny / "item_tnt")
    assert made == {name: here[name] for name in made}


def test_another_seed_gives_another_episode():
    assert reply(play(3, "normal", 1)[0]) != reply(play(4, "normal", 1)[0])


def test_second_writing_touches_nothing(tmp_path, quick_pictures):
    arguments = {"episodes": {"normal": 2}, "workers": 1}
    write_novelcraft(tmp_path, 5, **arguments)
    assert (tmp_path / "normal" / "1" / "8_copy.png").exists()
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    spoilt = tmp_path / "normal" / "0" / "4.json"
    before = spoilt.read_bytes()
    spoilt.write_bytes(b"{}")
    # What a kill between writing and renaming leaves.
    (spoilt.parent / ".4.json.tmp").write_bytes(b"half")
    write_novelcraft(tmp_path, 5, **arguments)
    assert spoilt.read_bytes() == before
    files = {p for p in times if p.is_file() and p != spoilt}
    assert all(p.stat().st_mtime_ns == times[p] for p in files)
    assert set(tmp_path.rglob("*")) == set(times)


# Bad records


def test_bad_records_are_where_they_are_said_to_be(tmp_path, quick_pictures):
    good, bad = tmp_path / "good", tmp_path / "bad"
    listed = dict(BAD_RECORDS)
    for class_name, episode in sorted({tuple(path.split("/")[:2]) for path in listed}):
        novelcraft._write_episode(good, 1, class_name, int(episode), {})
        novelcraft._write_episode(bad, 1, class_name, int(episode), listed)
    assert min(Counter(listed.values()).values()) == 2
    right, spoilt = contents(good), contents(bad)
    expected_missing, expected_changed, expected_extra = set(), set(), set()
    for path, fault in listed.items():
        data, stem = spoilt[path], path.rsplit(".", 1)[0]
        if fault == "truncated PNG":
            assert cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) is None or (
                not data.endswith(b"IEND\xaeB`\x82")
            )
        elif fault == "PNG of 128x128":
            assert cv2.imdecode(np.frombuffer(data, np.uint8), 1).shape == (128, 128, 3)
        elif fault == "truncated JSON":
            with pytest.raises(json.JSONDecodeError):
                json.loads(data)
        elif fault == "player position NaN":
            assert np.isnan(json.loads(data)["player"]["pos"][0])
        elif fault == "empty JSON":
            assert data == b""
        if fault == "JSON without PNG":
            expected_missing.add(f"{stem}.png")
        elif fault == "PNG without JSON":
            expected_missing.add(f"{stem}.json")
        elif fault == "file name is not a number":
            assert not Path(stem).name.isdecimal()
            expected_extra.add(path)
        else:
            expected_changed.add(path)
    assert set(right) - set(spoilt) == expected_missing
    assert set(spoilt) - set(right) == expected_extra
    both = set(right) & set(spoilt)
    assert {path for path in both if right[path] != spoilt[path]} == expected_changed


def test_bad_records_of_a_small_sample_are_those_of_its_episodes():
    assert bad_novelcraft_records({"normal": 2}) == [
        ("normal/1/3.png", "truncated PNG"),
        ("normal/1/8_copy.png", "file name is not a number"),
    ]
    assert bad_novelcraft_records() == list(BAD_RECORDS)


# The game


games = st.tuples(
    st.integers(0, 2**32), st.sampled_from(sorted(DEFAULT_EPISODES)), st.integers(0, 40)
)


def counts(frame) -> Counter:
    return Counter({item: count for item, count in frame.slots if count})


def ahead(frame) -> Block:
    (x, z), (dx, dz) = frame.position, novelcraft.DIRECTIONS[facing_of(frame.yaw)]
    return frame.cells[x + dx, z + dz]


@settings(max_examples=60, deadline=None)
@given(games)
def test_inventory_follows_map_and_recipes(game):
    """Each step breaks a block, picks up, takes logs from the chest, crafts, or changes nothing."""
    frames = play(*game)
    assert counts(frames[-1])[novelcraft.POGO_STICK] == 1
    rubber_frames = 0
    for before, after in pairwise(frames):
        gone = [b for cell, b in before.cells.items() if cell not in after.cells]
        new = [b for cell, b in after.cells.items() if cell not in before.cells]
        gained = counts(after) - counts(before)
        lost = counts(before) - counts(after)
        old_items = {e for e in before.entities if e.type == "EntityItem"}
        new_items = {e for e in after.entities if e.type == "EntityItem"}
        picked = Counter()
        for entity in old_items - new_items:
            assert entity.cell == after.position
            picked[entity.item] += entity.count
        assert len(gone) + len(new) <= 1
        assert after.step > before.step
        if gone:
            item, number = YIELDS[gone[0]]
            dropped = {(e.item, e.count) for e in new_items - old_items}
            assert (item, number) in dropped or gained == Counter({item: number}) + picked
            assert not lost
        elif new:
            assert new == [TREE_TAP]
            assert lost == Counter({TREE_TAP: 1})
            assert not gained
        elif gained == Counter({RUBBER: 1}):
            assert TREE_TAP in after.cells.values()
            rubber_frames += 1
        elif gained and not lost and picked != gained:
            [(item, number)] = (gained - picked).items()
            assert item.name == "minecraft:log" and 2 <= number <= 6
            assert ahead(after) == novelcraft.CHEST
        elif lost:
            [(item, number)] = gained.items()
            made, needed = RECIPES[item]
            used = Counter()
            for lost_item, lost_number in lost.items():
                used[lost_item.name] += lost_number
            assert (number, used) == (made, Counter(needed))
        else:
            assert gained == picked
    assert rubber_frames == 1


@settings(max_examples=40, deadline=None)
@given(games)
def test_reply_agrees_with_itself(game):
    _, class_name, episode = game
    for frame in play(*game)[::5]:
        state = reply(frame)
        assert len(state["map"]) == 1024
        x, y, z = state["player"]["pos"]
        assert y == 17
        assert state["map"][f"{x},17,{z}"]["name"] == "minecraft:air"
        dx, dz = {"SOUTH": (0, 1), "WEST": (-1, 0), "NORTH": (0, -1), "EAST": (1, 0)}[
            state["player"]["facing"]
        ]
        ahead = dict(state["map"][f"{x + dx},17,{z + dz}"])
        del ahead["isAccessible"]
        assert state["blockInFront"] == ahead
        held = dict(state["inventory"]["selectedItem"])
        slot = held.pop("slot")
        assert state["inventory"].get(str(slot), {"item": ""})["item"] == held["item"]
        novel = NOVEL_BLOCKS.get(class_name)
        present = novel in frame.cells.values()
        if novel is None or episode < PRE_NOVELTY.get(class_name, 0):
            assert not present
        elif class_name != "tree_easy":
            assert present


def test_the_novel_games_take_other_courses():
    def lengths(class_name):
        first = PRE_NOVELTY.get(class_name, 0)
        return np.mean([len(play(0, class_name, n)) for n in range(first, first + 12)])

    assert lengths("tree_easy") < lengths("normal") < lengths("fence")


def test_odd_yaws_pitches_and_dropped_items_occur_in_the_default_sample():
    frames = [f for name, n in DEFAULT_EPISODES.items() for e in range(n) for f in play(0, name, e)]
    yaws = {str(frame.yaw) for frame in frames}
    assert {"-270.0", "-180.0", "-0.0", "0.0", "315.0", "135.0"} <= yaws
    assert all(frame.yaw % 15 == 0 for frame in frames)
    assert {frame.pitch for frame in frames} == {0.0, 60.0}
    kinds = {entity.type for frame in frames for entity in frame.entities}
    assert kinds == {"EntityTrader", "EntityPogoist", "EntityItem"}


@pytest.mark.parametrize(
    ("yaw", "facing"),
    [(0, "SOUTH"), (-0.0, "SOUTH"), (90, "WEST"), (-270, "WEST"), (-180, "NORTH"), (-90, "EAST"),
     (135, "NORTH"), (315, "SOUTH"), (240, "EAST"), (75, "WEST"), (345, "SOUTH")],
)  # fmt: skip
def test_facing_rounds_as_the_game_does(yaw, facing):
    assert novelcraft.FACINGS[facing_of(yaw)] == facing


def test_reply_has_the_form_of_a_real_one():
    real = json.loads(shared_path("novelcraft/world_states_v2/episode_a_0.json").read_text())
    first = shared_path("novelcraft/episodes/polycraft_v1/1.json").read_text()
    frames = play(0, "normal", 1)
    ours = json.loads(json.dumps(reply(frames[0])))
    assert list(ours) == list(json.loads(first))
    assert list(ours["map"]) == list(real["map"])
    assert list(ours["player"]) == list(real["player"])
    assert ours["inventory"] == real["inventory"]
    for number, entity in real["entities"].items():
        assert {**ours["entities"][number], "pos": entity["pos"]} == entity
    blocks = {b["name"]: b for b in real["map"].values()}
    own_blocks = {b["name"]: b for b in ours["map"].values()}
    assert own_blocks == blocks


# The picture


def test_novel_blocks_have_known_colours_and_a_pattern_of_their_own():
    novel = {_look(block) for name, block in NOVEL_BLOCKS.items() if name not in NORMAL}
    novel |= {f"{look}:top" for look in novel} & LOOKS.keys()
    known = [LOOKS[look] for look in LOOKS.keys() - novel]
    colours = {colour for _, palette in known for colour in palette.split()}
    for pattern, palette in (LOOKS[look] for look in novel):
        assert set(palette.split()) <= colours
        assert pattern not in {other for other, _ in known}


def test_light_and_dyes_are_of_the_episode_and_change_nothing_else():
    first, second = play(0, "normal", 1), play(0, "normal", 2)
    assert {frame.light for frame in first} == {first[0].light} != {second[0].light}
    assert first[0].dyes == first[-1].dyes != second[0].dyes
    view = first[0].view()
    plain = draw(replace(view, light=(1.0, 1.0, 1.0), dyes={}))
    grey = draw(replace(view, light=(0.5, 0.5, 0.5), dyes={}))
    world = slice(0, SIZE - BAR_ROWS)
    assert np.abs(plain[world] / 2 - grey[world]).max() <= 1


@pytest.mark.parametrize(
    ("yaw", "step"), [(0, (0, 1)), (90, (-1, 0)), (180, (0, -1)), (270, (1, 0))]
)
def test_a_cube_four_blocks_ahead_covers_the_right_pixels(yaw, step):
    cell = (16 + 4 * step[0], 16 + 4 * step[1])
    block = NOVEL_BLOCKS["item_tnt"]
    rows, columns = np.nonzero(changed_pixels(alone({cell: block}, yaw, 0.0), block))
    scale = SIZE / 2 / np.tan(np.radians(FIELD_OF_VIEW / 2))
    near, far = 3.5, 4.5
    assert columns.min() == pytest.approx(128 - 0.5 * scale / near, abs=1)
    assert columns.max() + 1 == pytest.approx(128 + 0.5 * scale / near, abs=1)
    assert rows.min() == pytest.approx(128 + 0.62 * scale / far, abs=1)
    assert rows.max() + 1 == pytest.approx(128 + 1.62 * scale / near, abs=1)


def test_right_hand_is_west_when_facing_south():
    block = NOVEL_BLOCKS["item_tnt"]
    mask = changed_pixels(alone({(14, 20): block}, 0.0, 0.0), block)
    assert mask[:, 128:].any()
    assert not mask[:, :128].any()


def test_looking_down_is_the_same_in_all_four_directions():
    block = NOVEL_BLOCKS["item_tnt"]
    masks = [
        changed_pixels(alone({(16 + dx, 16 + dz): block}, yaw, 60.0), block)
        for yaw, dx, dz in ((0, 0, 1), (90, -1, 0), (180, 0, -1), (-90, 1, 0))
    ]
    assert masks[0].mean() > 0.3
    for mask in masks[1:]:
        assert (mask & masks[0]).sum() > 0.97 * (mask | masks[0]).sum()


@pytest.mark.parametrize("class_name", sorted(NOVEL_BLOCKS))
def test_novel_block_is_seen_in_some_frames_and_not_in_all(class_name):
    block = NOVEL_BLOCKS[class_name]
    frames = play(0, class_name, PRE_NOVELTY.get(class_name, 0) + 1)[:-1]
    large, none = False, False
    for frame in frames:
        share = changed_pixels(frame.view(), block).mean()
        large |= share >= 0.01
        none |= share == 0
        if large and none:
            return
    pytest.fail(f"{class_name}: a frame with 1 % of novel pixels {large}, one with none {none}")


def test_broken_tree_leaves_its_crown():
    frames = play(0, "normal", 2)
    logs = [sum(b.name == "minecraft:log" for b in f.cells.values()) for f in frames]
    assert logs[0] - logs[-1] == 2
    assert frames[0].leaves == frames[-1].leaves


@pytest.mark.parametrize("number", [1, 7, 50, 52, 90])
def test_real_states_are_drawn_where_the_real_picture_has_them(number):
    """The crafting table of the public v1 episode against its hand-made mask."""
    state = json.loads(shared_path(f"novelcraft/episodes/polycraft_v1/{number}.json").read_text())
    drawn_by_hand = shared_path(f"novelcraft/camera/manual_segments/{number}.png")
    cells = {}
    for key, entry in state["map"].items():
        x, _, z = map(int, key.split(","))
        if entry["name"] not in ("minecraft:air", "minecraft:bedrock"):
            cells[x, z] = Block(entry["name"])
    player = state["player"]
    at = (player["pos"][0], player["pos"][2])
    view = alone(cells, player["yaw"], player["pitch"], at)
    ours = changed_pixels(view, Block("minecraft:crafting_table"))
    theirs = cv2.imread(str(drawn_by_hand), cv2.IMREAD_GRAYSCALE) > 127
    assert (ours & theirs).sum() / (ours | theirs).sum() > 0.85
