"""Frames with their novel fraction in; role, split and filter flag of every frame out.

Rules (NovelCraft section 3 as released): a frame is kept if its class is the standard game or its
novel fraction is at least 1 %. Novel classes are split by class lists. Episodes of normal classes
are split 80/10/10 by the best of 100 random permutations: one generator for all classes, classes in
list order, episodes in lexicographic order. Episodes of normal classes without a kept frame belong
to no split; those of a NovelCraft+ subset are all for training. `table_1` and `table_a1` count the
result as the paper's tables do.

Of these roles come four protocols of the shared `splits`: `visual` (kept frames), `symbolic` (all
frames of episodes of the standard game and of tree_easy; a frame is novel if its game is changed),
`symbolic_all` (the same of all classes) and `fused` (kept frames that no model was trained on).
Labels are places in the list of normal classes.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from schemas.errors import ConfigError
from schemas.novelcraft import FRAME_ROLES, SplitSettings
from schemas.tables import SPLITS
from tasks.engine.stage import Produced, Shard, stage
from tasks.novelcraft.classes import FIRST_NOVEL_EPISODE, ROLES, STANDARD, episode_id_of
from tasks.novelcraft.targets import NOVEL_FROM

RATIOS = MappingProxyType({"train": 0.8, "valid": 0.1, "test": 0.1})
SEED = 42
PERMUTATIONS = 100

PROTOCOLS = MappingProxyType(
    {
        "visual": "frames that pass the filter",
        "symbolic": "all frames of episodes of the standard game and of symbolic_classes",
        "symbolic_all": "all frames of whole episodes",
        "fused": "validation and test frames that pass the filter",
    }
)

Unlabelled = Literal["keep_unlabelled", "drop"]


def keep_rule(
    novel_from: float = NOVEL_FROM, unlabelled: Unlabelled = "keep_unlabelled"
) -> pl.Expr:
    """Over columns class and novel_fraction. The releases keep a frame that has no label."""
    if unlabelled not in ("keep_unlabelled", "drop"):
        raise ConfigError(
            f"policy for unlabelled frames is {unlabelled!r}, expected keep_unlabelled or drop"
        )
    shows = (pl.col("novel_fraction") >= novel_from).fill_null(unlabelled == "keep_unlabelled")
    return (pl.col("class") == STANDARD) | shows


def part_sizes(total: int, ratios: Sequence[float]) -> list[int]:
    """Sizes by the ceil rule: every part is rounded up, the first one bears the difference.

    Too small a total leaves the first part empty or negative (80/10/10: 0/1/1 for two, -1/1/1 for
    one). Then the largest later part, the last of equals, gives way until the first has one: 1/1/0
    and 1/0/0. Products are exact, as 70 * 0.1 in floats would round up to 8.
    """
    if total == 0:
        return [0] * len(ratios)
    rest = [ceil(Fraction(str(ratio)) * total) for ratio in ratios[1:]]
    least = 1 if ratios[0] > 0 else 0
    while sum(rest) > total - least:
        last_largest = len(rest) - 1 - int(np.argmax(rest[::-1]))
        rest[last_largest] -= 1
    return [total - sum(rest), *rest]


def split_episodes(
    counts: NDArray[np.int64],
    ratios: Sequence[float],
    rng: np.random.Generator,
    permutations: int = PERMUTATIONS,
) -> NDArray[np.int64]:
    """Part index of each episode (kept frames in `counts`): the first permutation of least error.

    Error = sum over the parts of |1 - frames / goal|, the goal being the ceil rule on all frames.
    """
    sizes = part_sizes(counts.size, ratios)
    goals = np.array(part_sizes(int(counts.sum()), ratios))
    orders = np.stack([rng.permutation(counts.size) for _ in range(permutations)])
    ends = np.cumsum(sizes)
    running = np.pad(counts[orders].cumsum(axis=1), ((0, 0), (1, 0)))
    frames = running[:, ends] - running[:, ends - sizes]
    # Mirrored permutations tie but for rounding: the form of this line decides between them.
    # A goal of no frames cannot be divided by; there every frame counts as one.
    errors = np.where(goals > 0, np.abs(1 - frames / np.maximum(goals, 1)), frames)
    best = orders[np.argmin(sum(errors.T))]
    part = np.empty(counts.size, dtype=np.int64)
    part[best] = np.repeat(np.arange(len(sizes)), sizes)
    return part


def assign_splits(
    frames: pl.DataFrame,
    *,
    roles: Mapping[str, Sequence[str]] = ROLES,
    ratios: Mapping[str, float] = RATIOS,
    seed: int = SEED,
    permutations: int = PERMUTATIONS,
    novel_from: float = NOVEL_FROM,
    unlabelled: Unlabelled = "keep_unlabelled",
) -> pl.DataFrame:
    """One row per frame of `frames` (class, episode, frame, novel_fraction), sorted by frame_id.

    `kept` is the filter alone; a frame is used if it is kept and its split is not null. `roles`
    lists the classes under normal, novel_valid, novel_test and dropped (role and split null). With
    a column subset, episodes where it is not empty go to train and do not touch the permutations.
    """
    role_by_class = _role_by_class(roles)
    _check_rule(ratios, permutations)
    unknown = frames.select(pl.col("class").unique().sort()).filter(
        ~pl.col("class").is_in(list(role_by_class))
    )["class"]
    if len(unknown):
        raise ConfigError(
            f"classes {', '.join(unknown)} have no role; add them to normal, novel_valid, "
            "novel_test or dropped"
        )
    identified = (
        frames.with_columns(
            episode_id_of(frames),
            pl.col("class")
            .replace_strict(role_by_class, return_dtype=pl.String)
            .replace("dropped", None)
            .alias("role"),
            (pl.col("subset") != "" if "subset" in frames.columns else pl.lit(False)).alias("plus"),
            keep_rule(novel_from, unlabelled).alias("kept"),
        )
        .with_columns(
            pl.concat_str("episode_id", pl.col("frame").cast(pl.String), separator="/").alias(
                "frame_id"
            )
        )
        .sort("frame_id")
    )
    twice = identified.filter(pl.col("frame_id").is_duplicated())["frame_id"]
    if len(twice):
        raise ConfigError(
            f"{len(twice)} rows share a frame id, the first is {twice[0]}; expected each once"
        )
    normal_splits = _split_normal(identified, roles["normal"], ratios, seed, permutations)
    return (
        identified.join(normal_splits, on="episode_id", how="left", maintain_order="left")
        .with_columns(
            pl.when(pl.col("role") == "novel_valid")
            .then(pl.lit("valid"))
            .when(pl.col("role") == "novel_test")
            .then(pl.lit("test"))
            .when((pl.col("role") == "normal") & pl.col("plus"))
            .then(pl.lit("train"))
            .otherwise(pl.col("split"))
            .alias("split")
        )
        .select(FRAME_ROLES.polars_schema.names())
    )


@stage(writes=(FRAME_ROLES, SPLITS), version=3)
def split_frames(shard: Shard, settings: SplitSettings) -> Produced:
    """Give every frame its role, split and filter flag, and its place in four protocols."""
    frames = shard.read("frames", ["frame_id", "class", "subset", "episode", "frame"])
    targets = shard.read("targets", ["frame_id", "novel_fraction"])
    roles = assign_splits(
        frames.join(targets, on="frame_id", how="left"),
        roles=with_roles(settings.roles),
        seed=settings.seed,
        permutations=settings.permutations,
        novel_from=settings.novel_from,
        unlabelled=settings.unlabelled,
    )
    normal = with_roles(settings.roles)["normal"]
    splits = protocol_splits(roles, normal, settings.symbolic_classes)
    return Produced({"frame_roles": roles, "splits": splits}, frames.height)


def protocol_definitions(settings: SplitSettings) -> dict[str, dict[str, Any]]:
    """What the four protocols of frames are made by."""
    rule = settings.model_dump(mode="json")
    return {name: {"samples": samples, **rule} for name, samples in PROTOCOLS.items()}


def protocol_splits(
    roles: pl.DataFrame, normal: Sequence[str], symbolic: Sequence[str]
) -> pl.DataFrame:
    """The shared `splits` of the rows of `assign_splits`; `normal` are the classes to be learnt,
    `symbolic` those that the symbolic task has beside the standard game."""
    used = roles.filter(pl.col("split").is_not_null())
    kept = used.filter("kept").with_columns((pl.col("role") != "normal").alias("novel"))
    whole = used.join(changed_games(roles), on="episode_id", maintain_order="left")
    frames = {
        "visual": kept,
        "symbolic": whole.filter(pl.col("class").is_in([STANDARD, *symbolic])),
        "symbolic_all": whole,
        "fused": kept.filter(pl.col("split") != "train"),
    }
    return pl.concat(
        shared_rows(name, rows.rename({"frame_id": "sample_id"}), normal)
        for name, rows in frames.items()
    )


def shared_rows(protocol: str, rows: pl.DataFrame, normal: Sequence[str]) -> pl.DataFrame:
    """Rows with sample_id, class, split and novel as rows of the shared `splits`."""
    index = {name: number for number, name in enumerate(normal)}
    label = pl.col("class").replace_strict(index, default=None, return_dtype=pl.Int32)
    return SPLITS.conform(
        rows.select(
            pl.lit(protocol).alias("protocol"),
            "sample_id",
            pl.lit(0, pl.Int32).alias("step"),
            "class",
            pl.when("novel").then(None).otherwise(label).alias("label"),
            "split",
            pl.when("novel").then(pl.lit("novel")).otherwise(pl.lit("known")).alias("role"),
            pl.lit(None, pl.String).alias("subset"),
        )
    )


def changed_games(roles: pl.DataFrame) -> pl.DataFrame:
    """(episode_id, novel): whether the episode is one of a changed game.

    In folders where the change came midway, earlier episodes never show it.
    """
    changed = pl.col("role").is_in(["novel_valid", "novel_test"])
    midway = pl.col("class").is_in(list(FIRST_NOVEL_EPISODE))
    novel = (changed & (~midway | pl.col("kept").any())).fill_null(False).any()
    return roles.group_by("episode_id", maintain_order=True).agg(novel.alias("novel"))


def with_roles(changes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The paper's roles, with those of the classes in `changes` changed or added."""
    kept = {role: tuple(n for n in names if n not in changes) for role, names in ROLES.items()}
    return {
        role: names + tuple(sorted(name for name, new_role in changes.items() if new_role == role))
        for role, names in kept.items()
    }


def table_1(splits: pl.DataFrame) -> pl.DataFrame:
    """Episodes, raw and filtered images of each split, normal and novel (paper table 1).

    Raw counts every frame of the episodes in the split. The paper's 440 episodes and 20988 raw
    images of test/novel come from an adding error; the rule gives 530 and 26285.
    """
    cells = pl.DataFrame({"split": list(RATIOS)}).join(
        pl.DataFrame({"type": ["normal", "novel"]}), how="cross", maintain_order="left_right"
    )
    counts = (
        splits.filter(pl.col("split").is_not_null())
        .group_by(
            "split",
            pl.when(pl.col("role") == "normal")
            .then(pl.lit("normal"))
            .otherwise(pl.lit("novel"))
            .alias("type"),
        )
        .agg(
            pl.col("episode_id").n_unique().alias("episodes"),
            pl.len().alias("raw_images"),
            pl.col("kept").sum().alias("filtered_images"),
        )
    )
    return cells.join(counts, on=["split", "type"], how="left", maintain_order="left").with_columns(
        pl.col("episodes", "raw_images", "filtered_images").fill_null(0).cast(pl.Int64)
    )


def table_a1(splits: pl.DataFrame) -> pl.DataFrame:
    """Per changed class: episodes that show the novelty, kept frames, and all (paper table A.1)."""
    kept = pl.col("kept")
    return (
        splits.filter(pl.col("class") != STANDARD)
        .group_by("class")
        .agg(
            pl.col("episode_id").filter(kept).n_unique().alias("episodes"),
            kept.sum().alias("filtered_frames"),
            pl.col("episode_id").n_unique().alias("raw_episodes"),
            pl.len().alias("raw_frames"),
        )
        .with_columns(pl.exclude("class").cast(pl.Int64))
        .sort("class")
    )


def _split_normal(
    frames: pl.DataFrame,
    classes: Sequence[str],
    ratios: Mapping[str, float],
    seed: int,
    permutations: int,
) -> pl.DataFrame:
    """(episode_id, split) of the episodes of normal classes that have a kept frame."""
    counted = (
        frames.filter(pl.col("kept") & ~pl.col("plus") & (pl.col("role") == "normal"))
        .group_by("class", "episode_id")
        .agg(pl.len().alias("frames"))
        .sort("episode_id")
        .partition_by("class", as_dict=True)
    )
    rng = np.random.default_rng(seed)
    names = np.array(list(RATIOS))
    shares = [ratios[name] for name in RATIOS]
    parts = [pl.DataFrame(schema={"episode_id": pl.String, "split": pl.String})]
    for name in classes:
        episodes = counted.get((name,))
        if episodes is None:
            continue
        counts = episodes["frames"].to_numpy().astype(np.int64)
        part = split_episodes(counts, shares, rng, permutations)
        parts.append(episodes.select("episode_id", pl.Series("split", names[part], pl.String)))
    return pl.concat(parts)


def _role_by_class(roles: Mapping[str, Sequence[str]]) -> dict[str, str]:
    if set(roles) - set(ROLES) or "normal" not in roles:
        raise ConfigError(f"roles are {sorted(roles)}, expected normal and any of {sorted(ROLES)}")
    pairs = [(name, role) for role, names in roles.items() for name in names]
    twice = sorted({name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1})
    if twice:
        raise ConfigError(f"classes {', '.join(twice)} are listed twice; expected one role each")
    return dict(pairs)


def _check_rule(ratios: Mapping[str, float], permutations: int) -> None:
    if set(ratios) != set(RATIOS) or any(not 0 <= ratio <= 1 for ratio in ratios.values()):
        raise ConfigError(f"split ratios are {dict(ratios)}, expected train, valid, test in 0..1")
    if sum(Fraction(str(ratio)) for ratio in ratios.values()) != 1:
        raise ConfigError(f"split ratios are {dict(ratios)}, expected a sum of 1")
    if permutations < 1:
        raise ConfigError(f"permutations is {permutations}, expected 1 or more")
