"""NovelCraft's classes as data: role, label, novel block and first novel episode of each.

Nothing enters. Order is that of the released label indices 0..53 (normal, novel validation, novel
test); `item_bedrock` has labels but no role in any split, since the walls are bedrock too.
Block keys are `namespace:name`, plus `_var_<variant>` where the world state gives a variant.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import polars as pl

from schemas.errors import ConfigError
from schemas.similar import did_you_mean

STANDARD = "normal"  # the unmodified game; the only class whose frames have no novel fraction


def _items(names: str) -> tuple[str, ...]:
    return tuple(f"item_{name}" for name in names.split())


NORMAL = (STANDARD, "fence", *_items("anvil sand coal_block"))
NOVEL_VALID = _items("quartz_block obsidian prismarine tnt sea_lantern")
NOVEL_TEST = (
    "tree_easy",
    *_items(
        "bookshelf deadbush cauldron netherrack enchanting_table jukebox snow lapis_block "
        "stonebrick cake noteblock wheat mycelium waterlily dropper reeds bed glowstone lever "
        "torch cobblestone planks slime beacon iron_block clay ice sponge sandstone dispenser "
        "tallgrass cactus gravel piston web hopper stone soul_sand brewing_stand pumpkin wool "
        "vine emerald_block"
    ),
)
DROPPED = _items("bedrock")

ROLES = MappingProxyType(
    {"normal": NORMAL, "novel_valid": NOVEL_VALID, "novel_test": NOVEL_TEST, "dropped": DROPPED}
)
LABELS = MappingProxyType(
    {name: label for label, name in enumerate(NORMAL + NOVEL_VALID + NOVEL_TEST)}
)

# Earlier episodes of these folders were played before the change was made.
FIRST_NOVEL_EPISODE = MappingProxyType(
    {"fence": 14, "tree_easy": 15, "ArenaBlockHard": 15, "supplier": 12, "thief": 16, "rotten": 0}
)

_VARIANTS = {
    "item_planks": "minecraft:planks_var_oak",
    "item_prismarine": "minecraft:prismarine_var_prismarine",
    "item_sand": "minecraft:sand_var_sand",
    "item_stone": "minecraft:stone_var_stone",
    "item_stonebrick": "minecraft:stonebrick_var_stonebrick",
    "tree_easy": "minecraft:log_var_jungle",
}
# item_daylight_detector has a block but no data and no role.
NOVEL_BLOCKS = MappingProxyType(
    {STANDARD: ()}
    | {
        name: (_VARIANTS.get(name, f"minecraft:{name.removeprefix('item_')}"),)
        for name in (*LABELS, *DROPPED, *_items("daylight_detector"))
        if name != STANDARD
    }
)


def role_of(name: str) -> str:
    """normal, novel_valid, novel_test or dropped."""
    for role, names in ROLES.items():
        if name in names:
            return role
    raise ConfigError(
        f"NovelCraft class {name!r} is unknown; expected one of {', '.join((*LABELS, *DROPPED))}"
    )


def class_warnings(
    classes: Iterable[str], described: Collection[str], roles: Mapping[str, str]
) -> list[str]:
    """What is wrong with the classes of a source: no role, no known novel block, a role for none.

    `described` are the classes with a novelty_description.json, `roles` the roles of the settings.
    """
    names = sorted(set(classes))
    warnings = []
    for name in names:
        if name in NOVEL_BLOCKS:
            continue
        if name not in roles:
            warnings.append(
                f"class {name} has no role, so the build will stop at the splits; give it one with "
                f"--splits.roles {name}=ROLE ({', '.join(ROLES)}){did_you_mean(name, NOVEL_BLOCKS)}"
            )
        elif name not in described and roles[name] != "normal":
            warnings.append(
                f"class {name}: no novel block is known, so all of its frames get novel fraction "
                f"0; name the block in {name}/novelty_description.json, or labels with "
                "--targets-csv"
            )
    warnings += [
        f"--splits.roles names {name}, but the source has no such class{did_you_mean(name, names)}"
        for name in sorted(roles.keys() - set(names))
    ]
    return warnings


def episode_id_of(frames: pl.DataFrame) -> pl.Expr:
    """`class/episode`; `class/subset/episode` where a column subset (NovelCraft+) is not empty."""
    subset = [pl.col("subset").replace("", None)] if "subset" in frames.columns else []
    parts = ["class", *subset, pl.col("episode").cast(pl.String)]
    return pl.concat_str(parts, separator="/", ignore_nulls=True).alias("episode_id")


def episode_is_novel(normal: Sequence[str] = NORMAL) -> pl.Expr:
    """Over columns class and episode: the episode is played in a game that counts as changed.

    With the default this is the truth of the symbolic windows. The episode task knows one normal
    class only, `normal=(STANDARD,)`: there fence is novel from its episode 14 on.
    """
    first = pl.col("class").replace_strict(
        dict(FIRST_NOVEL_EPISODE), default=0, return_dtype=pl.Int64
    )
    changed = ~pl.col("class").is_in(list(normal))
    return changed & (pl.col("episode").cast(pl.Int64) >= first)
