"""Detectors ranked: the query of storage/leaderboard.py on chosen rows, and tables to be shown.

Enters: rows of `metrics`, `runs` and `score_settings` with the column `benchmark`. Leaves: the
ranking, and for each benchmark one board over the protocols that all its detectors have, or where
they have none in common a board for each protocol.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb
import polars as pl

from schemas.tables import SHARED
from storage.leaderboard import ALL_PROTOCOLS, CONVENTION, RANKED, SOURCES, leaderboard_sql

OPTIMISTIC = (
    "The best of several detectors is chosen after looking at the same samples, so its number is "
    "too good: choose on validation, or on another protocol, before you quote it."
)
NOT_ABOVE, NOT_BELOW = "not above chance", "not below chance"
WIDE, NO_INTERVAL = "wide interval", "no interval"
MOST_NAMED = 4
NOVELTY = tuple(name for name in RANKED if name != "acc")
"""Metrics that exist only where there are novel samples."""


def ranking(tables: Mapping[str, pl.DataFrame], protocols: Sequence[str] = ()) -> pl.DataFrame:
    """All rows of the leaderboard, of these protocols alone if some are named.

    A table that is not given is empty.
    """
    with duckdb.connect() as connection:
        for name in SOURCES:
            empty = SHARED[name].empty().select(pl.lit("").alias("benchmark"), pl.all())
            connection.register(name, tables.get(name, empty).to_arrow())
        return connection.sql(leaderboard_sql(protocols=protocols)).pl()


@dataclass(frozen=True)
class Board:
    """Detectors of one benchmark that were ranked together, best first."""

    benchmark: str
    protocols: tuple[str, ...]
    """Those that the means are over."""
    of_protocols: int
    """All that detectors of the benchmark have numbers of."""
    rows: pl.DataFrame

    @property
    def scope(self) -> str:
        """What the means are over, as words."""
        count = f"{self.rows.height} detector{'' if self.rows.height == 1 else 's'}"
        names = ", ".join(self.protocols[:4]) + (", …" if len(self.protocols) > 4 else "")
        if self.rows["protocol"][0] != ALL_PROTOCOLS or self.of_protocols == 1:
            words = f"protocol {names}, {count}"
        else:
            words = (
                f"mean over {len(self.protocols)} of {self.of_protocols} protocols ({names}), "
                f"those that all {count} have"
            )
        if self.rows["samples"].n_unique() > 1:
            counts = self.rows["samples"].sort()
            words += f", not all on the same samples ({counts[0]} to {counts[-1]})"
        return f"{words}; {self.rows['above_chance'].sum()} clearly better than chance"

    @property
    def doubtful(self) -> str:
        """Detectors that are not clearly better than chance, and why; empty where all are."""
        weak = self.rows.filter(~pl.col("above_chance"), metric="auroc")
        close = pl.col("mean") > 0.5
        reasons = {
            "better than chance, but too few samples to be sure": close,
            "known samples look as novel as novel ones": ~close & (pl.col("high") >= 0.5),
            "known samples look more novel than novel ones": ~close & (pl.col("high") < 0.5),
        }
        parts = []
        for reason, rule in reasons.items():
            rows = weak.filter(rule)
            names = [f"{row['detector']} {row['mean']:.2f}" for row in rows.to_dicts()]
            if names:
                more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
                parts.append(f"{', '.join(names[:MOST_NAMED])}{more} ({reason})")
        return f"not clearly better than chance: {'; '.join(parts)}" if parts else ""


def boards(
    ranked: pl.DataFrame,
    metric: str = "auroc",
    convention: str = CONVENTION,
    split: str = "test",
    *,
    by_protocol: bool = False,
) -> list[Board]:
    """What is shown of a ranking: one board for each benchmark, or one for each protocol."""
    results = []
    board_rows = ranked.filter(metric=metric, convention=convention, split=split)
    for (benchmark,), rows in board_rows.group_by("benchmark", maintain_order=True):
        single = rows.filter(pl.col("protocol") != ALL_PROTOCOLS)
        overall = rows.filter(protocol=ALL_PROTOCOLS)
        names = single["protocol"].unique(maintain_order=True).to_list()
        shared = single.filter(detectors=overall.height)["protocol"].unique(maintain_order=True)
        if by_protocol or overall.is_empty():
            parts = [((name,), single.filter(protocol=name)) for name in names]
        else:
            parts = [(tuple(shared), overall)]
        results += [Board(str(benchmark), protocols, len(names), part) for protocols, part in parts]
    return results


def unranked(
    tables: Mapping[str, pl.DataFrame],
    leaderboards: Sequence[Board],
    metric: str = "auroc",
    split: str = "test",
    protocols: Sequence[str] = (),
) -> list[str]:
    """A sentence for each benchmark with runs (of these protocols) that is on no board, and why."""
    runs = tables["runs"].drop_nulls("protocol")
    if protocols:
        runs = runs.filter(pl.col("protocol").is_in(list(protocols)))
    names = set(runs["benchmark"]) - {board.benchmark for board in leaderboards}
    ranked = pl.col("metric").is_in(NOVELTY) & pl.col("value").is_not_null()
    numbers = tables["metrics"].filter(ranked)
    sentences = []
    for name in sorted(names):
        splits = set(numbers.filter(benchmark=name)["split"])
        others = " and ".join(sorted(splits))
        if split in splits:
            sentences.append(f"{name}: no {metric} by this convention on {split}")
        elif others:
            sentences.append(
                f"{name}: no metric on novel {split} samples, only on those of {others}"
            )
        else:
            sentences.append(f"{name}: no metric on novel {split} samples, nor on any other split")
    return sentences


def note() -> pl.Expr:
    """What a reader must know of a number: that it may be chance, or that nobody can tell."""
    lower = pl.col("metric") == "fpr95"
    chance = pl.when(lower).then(pl.lit(NOT_BELOW)).otherwise(pl.lit(NOT_ABOVE))
    better = pl.when(lower).then(pl.col("mean") < 0.95).otherwise(pl.col("mean") > 0.5)
    return (
        pl.when(~pl.col("above_chance"))
        .then(pl.when(better).then(pl.format("{}: {}", chance, pl.lit(WIDE))).otherwise(chance))
        .when(pl.col("above_chance").is_null() & pl.col("metric").is_in(["auroc", "fpr95"]))
        .then(pl.lit(NO_INTERVAL))
        .otherwise(pl.lit(""))
        .alias("note")
    )
