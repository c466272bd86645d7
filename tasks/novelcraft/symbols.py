"""Tables `frames` and `inventory` in, one vector per frame out: the symbolic task's view of a game.

A vector holds how many of each item of a named list the agent carries, then the item in its hand
and the block in front of it as one-hot groups whose words come from the training frames, the first
entry of a group standing for every other word (docs/novelcraft.md, rule 10). The paper prints no
list, so lists are named and never change: a corrected list gets a new name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import polars as pl

from schemas.errors import ConfigError, SourceError
from tasks.learning.encoding import encoded
from tasks.learning.samples import Samples

UnknownItems = Literal["other", "ignore", "refuse"]

CATEGORIES = ("selected_item", "block_in_front")

# Name of the count -> item, with `_var_<variant>` where only that variant counts; a bare item takes
# the variants that have no entry of their own. These are the physical constants of the released
# agent's belief file without `air`: 22, as in the paper's appendix B.2 (inferred, not published).
_BELIEFS_22 = {
    "stick": "minecraft:stick",
    "tree_tap": "polycraft:tree_tap",
    "pogo_stick": "polycraft:wooden_pogo_stick",
    "crafting_table": "minecraft:crafting_table",
    "wall": "minecraft:bedrock",
    "rubber": "polycraft:sack_polyisoprene_pellets",
    "oak_plank": "minecraft:planks_var_oak",
    "oak_log": "minecraft:log_var_oak",
    "safe": "polycraft:safe",
    "key": "polycraft:key",
    "iron_pickaxe": "minecraft:iron_pickaxe",
    "block_of_diamond": "minecraft:diamond_block",
    "chest": "polycraft:plastic_chest",
    "diamond_ore": "minecraft:diamond_ore",
    "diamond": "minecraft:diamond",
    "door": "minecraft:wooden_door",
    "open_door": "minecraft:wooden_door_var_open",  # a belief about a block; never carried
    "block_of_platinum": "polycraft:block_of_platinum",
    "block_of_titanium": "polycraft:block_of_titanium",
    "sapling": "minecraft:sapling",
    "plank": "minecraft:planks",
    "log": "minecraft:log",
}
ITEM_LISTS = MappingProxyType(
    {
        "beliefs_22_v1": MappingProxyType(_BELIEFS_22),
        # Section 5.2 says 24: here with `air` and the fence of a normal class (inferred).
        "beliefs_24_v1": MappingProxyType(
            {**_BELIEFS_22, "air": "minecraft:air", "fence": "minecraft:fence"}
        ),
    }
)
DEFAULT_LIST = "beliefs_22_v1"

_ORDER = ("class", "subset", "episode", "position")


@dataclass(frozen=True, eq=False)
class Contexts:
    """Each row after the `order` rows before it in its episode; `missing` stands where there are
    fewer. Behaves like an array (N, order + 1, ...), but a part is gathered only when asked for."""

    rows: np.ndarray
    position: np.ndarray
    order: int
    missing: float | str

    @property
    def dtype(self) -> np.dtype:
        return self.rows.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), self.order + 1, *self.rows.shape[1:]

    @property
    def ndim(self) -> int:
        return self.rows.ndim + 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        back = np.arange(-self.order, 1)
        positions = np.arange(len(self.rows))[index][:, None] + back
        windows = self.rows[np.maximum(positions, 0)]
        windows[self.position[index][:, None] + back < 0] = self.missing
        return windows


@dataclass(frozen=True, eq=False)
class SymbolSequences:
    """Frames in (episode, position) order; rows offsets[e] to offsets[e + 1] are episode e."""

    ids: tuple[str, ...]
    episode_ids: tuple[str, ...]
    offsets: np.ndarray
    counts: np.ndarray
    count_names: tuple[str, ...]
    categories: Mapping[str, np.ndarray]

    @property
    def position(self) -> np.ndarray:
        lengths = np.diff(self.offsets)
        return np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], lengths)

    def matrix(self, vocabulary: Mapping[str, tuple[str, ...]]) -> np.ndarray:
        """float32 (N, D); `column_groups` says what its columns are."""
        return encoded(self.counts, self.categories, vocabulary)

    def samples(self, order: int, labels: np.ndarray | None = None) -> Samples:
        """What `symbolic_mlp` takes: each frame with the `order` frames before it."""
        if order < 1:
            raise ConfigError(f"context order is {order}, expected 1 or more")
        arrays = {
            name: Contexts(rows, self.position, order, np.nan if name == "counts" else "")
            for name, rows in {"counts": self.counts, **self.categories}.items()
        }
        return Samples(self.ids, labels, arrays)


def symbol_sequences(
    frames: pl.DataFrame,
    inventory: pl.DataFrame,
    *,
    items: str = DEFAULT_LIST,
    unknown: UnknownItems = "other",
) -> SymbolSequences:
    """Whole episodes from the tables; rows of `inventory` for other frames are not used.

    Items that the list lacks are summed in a last count `other`, left out (`ignore`), or an error
    (`refuse`).
    """
    if items not in ITEM_LISTS:
        raise ConfigError(f"no item list {items!r}; there are: {', '.join(ITEM_LISTS)}")
    if unknown not in ("other", "ignore", "refuse"):
        raise ConfigError(f"unknown items are {unknown!r}, expected other, ignore or refuse")
    ordered = frames.select("frame_id", "episode_id", *_ORDER, *CATEGORIES).sort(_ORDER)
    position = ordered["position"].to_numpy()
    starts = np.flatnonzero(ordered["episode_id"].rle_id().diff().fill_null(1).to_numpy())
    offsets = np.append(starts, ordered.height).astype(np.int64)
    expected = np.arange(ordered.height) - np.repeat(offsets[:-1], np.diff(offsets))
    if (position != expected).any():
        row = int(np.flatnonzero(position != expected)[0])
        raise ConfigError(
            f"frame {ordered['frame_id'][row]} has position {position[row]}, expected "
            f"{expected[row]}: the symbolic task needs whole episodes; do not filter their frames"
        )
    names = tuple(ITEM_LISTS[items]) + (("other",) if unknown == "other" else ())
    return SymbolSequences(
        ids=tuple(ordered["frame_id"]),
        episode_ids=tuple(ordered["episode_id"].gather(starts)),
        offsets=offsets,
        counts=_counts(ordered["frame_id"], inventory, items, unknown, len(names)),
        count_names=names,
        categories={name: words(ordered[name]) for name in CATEGORIES},
    )


def words(values: pl.Series) -> np.ndarray:
    """Texts as a numpy array of fixed width; null (nothing in hand) is the empty text."""
    return values.fill_null("").to_numpy().astype(np.str_)


def _counts(
    ids: pl.Series, inventory: pl.DataFrame, items: str, unknown: UnknownItems, width: int
) -> np.ndarray:
    column = {key: number for number, key in enumerate(ITEM_LISTS[items].values())}
    variant = pl.format("{}_var_{}", "item", "variant")
    number = pl.coalesce(
        key.replace_strict(column, default=None, return_dtype=pl.Int64)
        for key in (variant, pl.col("item"))
    )
    row = pl.DataFrame({"frame_id": ids}).with_row_index("row")
    held = (
        inventory.filter((pl.col("item") != "") & (pl.col("count") > 0))
        .join(row, on="frame_id")
        .select("frame_id", "row", "item", "count", number.alias("column"))
    )
    strange = held.filter(pl.col("column").is_null())
    if unknown == "refuse" and strange.height:
        first = strange.sort("row", "item").row(0, named=True)
        raise SourceError(
            f"frame {first['frame_id']} holds {first['item']}, which item list {items} lacks "
            f"({strange['item'].n_unique()} such items in all); use another list, or set unknown "
            "items to other or ignore"
        )
    if unknown == "other":
        held = held.with_columns(pl.col("column").fill_null(width - 1))
    held = held.drop_nulls("column").group_by("row", "column").agg(pl.col("count").sum())
    counts = np.zeros((len(ids), width), np.float32)
    counts[held["row"].to_numpy(), held["column"].to_numpy()] = held["count"].to_numpy()
    return counts
