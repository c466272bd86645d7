"""Frame vectors against plain loops, and against the one real episode."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, SourceError
from schemas.novelcraft import FRAMES, INVENTORY
from tasks.learning.encoding import column_groups, learn_vocabulary
from tasks.novelcraft.symbols import (
    CATEGORIES,
    ITEM_LISTS,
    Contexts,
    symbol_sequences,
)
from tasks.novelcraft.worldstate import parse_world_state
from tests.shared import shared_path

ITEMS = ["minecraft:stick", "minecraft:log", "minecraft:planks", "minecraft:cake", "minecraft:web"]
VARIANTS = [None, "oak", "jungle"]


def frame(episode: int, position: int, held: str | None = None, front: str = "minecraft:air"):
    place = {"class": "fence", "subset": "", "episode": episode, "position": position}
    ids = {"frame_id": f"fence/{episode}/{position}", "episode_id": f"fence/{episode}"}
    return place | ids | {"selected_item": held, "block_in_front": front}


def slot(episode: int, position: int, item: str, count: int, variant: str | None = None):
    name = f"fence/{episode}/{position}"
    return {"frame_id": name, "item": item, "count": count, "variant": variant}


def tables(frames: list[dict], slots: list[dict]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Only the columns that are read, in the types that the tables declare."""
    made = []
    for rows, table, example in (
        (frames, FRAMES, frame(0, 0)),
        (slots, INVENTORY, slot(0, 0, "", 0)),
    ):
        made.append(pl.DataFrame(rows, {name: table.polars_schema[name] for name in example}))
    return made[0], made[1]


def test_lists_have_the_sizes_of_the_paper():
    assert [len(items) for items in ITEM_LISTS.values()] == [22, 24]
    for items in ITEM_LISTS.values():
        assert len(set(items.values())) == len(items)
    assert list(ITEM_LISTS["beliefs_24_v1"])[:22] == list(ITEM_LISTS["beliefs_22_v1"])


def test_variants_count_for_their_own_entry_or_for_the_general_one():
    slots = [
        slot(0, 0, "minecraft:log", 2, "oak"),
        slot(0, 0, "minecraft:log", 3, "jungle"),
        slot(0, 0, "minecraft:planks", 4),
        slot(0, 0, "minecraft:cake", 5),
        slot(0, 0, "minecraft:stick", 6, "strange"),
        slot(0, 0, "", 0),
        slot(7, 0, "minecraft:stick", 100),
    ]
    found = symbol_sequences(*tables([frame(0, 0)], slots))
    held = {name: n for name, n in zip(found.count_names, found.counts[0], strict=True) if n}
    assert held == {"oak_log": 2, "log": 3, "plank": 4, "stick": 6, "other": 5}
    assert found.counts.dtype == np.float32


def test_unknown_items():
    given_tables = tables(
        [frame(0, 0), frame(0, 1)],
        [slot(0, 1, "minecraft:cake", 2), slot(0, 1, "minecraft:web", 3)],
    )
    other = symbol_sequences(*given_tables)
    assert (other.count_names[-1], other.counts[:, -1].tolist()) == ("other", [0, 5])
    ignored = symbol_sequences(*given_tables, unknown="ignore")
    assert ignored.counts.shape == (2, 22)
    assert not ignored.counts.any()
    with pytest.raises(SourceError, match=r"fence/0/1 holds minecraft:cake.*2 such items"):
        symbol_sequences(*given_tables, unknown="refuse")
    with pytest.raises(ConfigError, match="expected other, ignore or refuse"):
        symbol_sequences(*given_tables, unknown="drop")
    with pytest.raises(ConfigError, match="beliefs_22_v1"):
        symbol_sequences(*given_tables, items="beliefs_23")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_counts_follow_a_plain_loop(data):
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    places = [(e, p) for e, n in enumerate(lengths) for p in range(n)]
    slots = [
        slot(*data.draw(st.sampled_from(places)), *parts)
        for parts in data.draw(
            st.lists(
                st.tuples(st.sampled_from(ITEMS), st.integers(0, 64), st.sampled_from(VARIANTS)),
                max_size=20,
            )
        )
    ]
    frames = data.draw(st.permutations([frame(*place) for place in places]))
    found = symbol_sequences(*tables(frames, slots), items="beliefs_24_v1")
    column = {key: name for name, key in ITEM_LISTS["beliefs_24_v1"].items()}
    expected = np.zeros(found.counts.shape)
    for row in slots:
        key = f"{row['item']}_var_{row['variant']}"
        name = column.get(key) or column.get(row["item"]) or "other"
        expected[found.ids.index(row["frame_id"]), found.count_names.index(name)] += row["count"]
    np.testing.assert_array_equal(found.counts, expected)
    assert found.ids == tuple(f"fence/{e}/{p}" for e, p in places)
    assert found.offsets.tolist() == [0, *np.cumsum(lengths)]
    assert found.episode_ids == tuple(f"fence/{e}" for e in range(len(lengths)))
    assert found.position.tolist() == [p for _, p in places]


def test_words_of_training_make_the_groups_and_others_are_unknown():
    train = symbol_sequences(
        *tables([frame(0, 0), frame(0, 1, "minecraft:stick", "minecraft:log")], [])
    )
    vocabulary = learn_vocabulary(train.categories)
    assert vocabulary == {
        "selected_item": ("", "minecraft:stick"),
        "block_in_front": ("minecraft:air", "minecraft:log"),
    }
    groups = column_groups(23, vocabulary)
    assert (groups.numeric, groups.width) == (slice(0, 23), 29)
    assert groups.categorical == (slice(23, 26), slice(26, 29))
    matrix = train.matrix(vocabulary)
    assert matrix.dtype == np.float32
    assert matrix[:, 23:].tolist() == [[0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 1]]
    other = symbol_sequences(*tables([frame(1, 0, "minecraft:zzz", "minecraft:anvil")], []))
    assert other.matrix(vocabulary)[0, 23:].tolist() == [1, 0, 0, 1, 0, 0]


def test_a_filtered_episode_is_refused():
    with pytest.raises(ConfigError, match="frame fence/0/2 has position 2, expected 1"):
        symbol_sequences(*tables([frame(0, 0), frame(0, 2)], []))
    with pytest.raises(ConfigError, match="frame fence/1/1 has position 1, expected 0"):
        symbol_sequences(*tables([frame(0, 0), frame(1, 1)], []))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 99))
def test_contexts_are_the_frames_before(lengths, order, seed):
    position = np.concatenate([np.arange(n) for n in lengths])
    rows = np.random.default_rng(seed).random((len(position), 3)).astype(np.float32)
    stacks = Contexts(rows, position, order, np.nan)
    expected = np.full((len(rows), order + 1, 3), np.nan, np.float32)
    for row, place in enumerate(position):
        available = min(place, order)
        expected[row, order - available :] = rows[row - available : row + 1]
    assert stacks.shape == expected.shape
    np.testing.assert_array_equal(stacks[:], expected)
    chosen = np.random.default_rng(seed).permutation(len(rows))
    np.testing.assert_array_equal(stacks[chosen], expected[chosen])
    assert not np.isnan(rows).any()


def test_samples_are_frames_with_their_context():
    sequences = symbol_sequences(
        *tables(
            [frame(0, p, "minecraft:stick") for p in range(4)], [slot(0, 3, "minecraft:stick", 9)]
        )
    )
    samples = sequences.samples(2, np.zeros(4, np.int64))
    assert samples.ids == sequences.ids
    assert samples.array("counts").shape == (4, 3, 23)
    assert samples.array("selected_item")[:2].tolist() == [
        ["", "", "minecraft:stick"],
        ["", "minecraft:stick", "minecraft:stick"],
    ]
    assert np.isnan(samples.array("counts")[:][:, :, 0]).sum(1).tolist() == [2, 1, 0, 0]
    assert set(samples.arrays) == {"counts", *CATEGORIES}
    with pytest.raises(ConfigError, match="order is 0"):
        sequences.samples(0)


def test_the_real_episode():
    folder = shared_path("novelcraft/episodes/polycraft_v1")
    numbers = sorted(int(path.stem) for path in folder.glob("*.json"))
    frames, slots, totals = [], [], []
    for position, number in enumerate(numbers):
        state = parse_world_state((folder / f"{number}.json").read_bytes())
        held = state.selected.item if state.selected else None
        frames.append(frame(0, position, held, state.block_in_front))
        slots += [slot(0, position, s.item, s.count, s.variant) for s in state.inventory]
        totals.append(sum(state.item_counts().values()))
    found = symbol_sequences(*tables(frames, slots), unknown="refuse")
    assert found.counts.sum(1).tolist() == totals
    carried = {name for name, n in zip(found.count_names, found.counts.max(0), strict=True) if n}
    assert {"oak_log", "oak_plank", "stick", "rubber", "tree_tap"} <= carried
    assert "minecraft:crafting_table" in learn_vocabulary(found.categories)["block_in_front"]
