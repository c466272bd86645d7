"""`novelty leaderboard`: detectors of a lake ranked, as tables for people or rows for programs."""

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from schemas.errors import ConfigError, LakeError
from schemas.similar import did_you_mean
from schemas.tables import SHARED
from storage.leaderboard import ALL_PROTOCOLS, CONVENTION, RANKED, SOURCES
from tasks.evaluation.leaderboard import OPTIMISTIC, Board, boards, note, ranking, unranked
from tasks.operations.runs import read_shared
from tasks.operations.summary import show_frame

FORMATS = ("table", "csv", "json", "markdown")


def find_boards(
    lake: Path,
    *,
    benchmark: str | None = None,
    protocols: Sequence[str] = (),
    metric: str = RANKED[0],
    convention: str = CONVENTION,
    split: str = "test",
    by_protocol: bool = False,
) -> tuple[list[Board], list[str]]:
    """The boards of a lake, and a sentence for each benchmark that is on none.

    Whatever is not in the lake is refused with what there is.
    """
    tables = {name: read_shared(lake, name, SHARED[name].version) for name in SOURCES}
    tables = {name: rows for name, rows in tables.items() if not rows.is_empty()}
    if "metrics" not in tables or "runs" not in tables:
        raise LakeError(f"there are no numbers in {lake}; name models in a build, then look")
    if benchmark is not None:
        _check("benchmark", [benchmark], tables["runs"]["benchmark"])
        tables = {name: rows.filter(benchmark=benchmark) for name, rows in tables.items()}
    _check("protocol", protocols, tables["metrics"]["protocol"])
    _check("metric", [metric], pl.Series(RANKED))
    _check("convention", [convention], tables["metrics"]["convention"])
    leaderboards = boards(
        ranking(tables, protocols), metric, convention, split, by_protocol=by_protocol
    )
    absent = unranked(tables, leaderboards, metric, split, protocols)
    if not leaderboards:
        raise LakeError(
            f"no detector has {metric} by {convention} on the split {split} in {lake} "
            f"({'; '.join(absent)})"
        )
    return leaderboards, absent


def _check(what: str, values: Sequence[str], column: pl.Series) -> None:
    names = column.unique().sort().to_list()
    for name in values:
        if name not in names:
            listed = ", ".join(names)
            raise ConfigError(f"no {what} {name!r}; there are: {listed}{did_you_mean(name, names)}")


def show_boards(leaderboards: Sequence[Board], absent: Sequence[str], form: str) -> None:
    """Print them: for people with what the means are over, else one row per detector and board.

    People read below them which benchmarks are on no board.
    """
    if form in ("csv", "json"):
        rows = pl.concat(board.rows for board in leaderboards)
        if form == "json":
            print(json.dumps(rows.to_dicts(), indent=1, ensure_ascii=False))
        else:
            print(rows.with_columns(pl.col("config_ids").list.join(" ")).write_csv(), end="")
        return
    for board in leaderboards:
        first = board.rows.row(0, named=True)
        title = f"{first['metric']} by {first['convention']} on {first['split']}"
        print(f"\n{board.benchmark}: {title}; {board.scope}")
        shown = board.rows.select(
            *("rank", "detector", "preset", "mean", "deviation", "low", "high"),
            *("protocols", "seeds", "samples"),
            note(),
        ).with_columns(pl.selectors.float().round(4))
        show_frame(shown) if form == "table" else print(_markdown(shown))
    apart = {
        board.benchmark for board in leaderboards if board.rows["protocol"][0] != ALL_PROTOCOLS
    }
    if apart:
        names = ", ".join(sorted(apart))
        print(f"\n{names}: each protocol is ranked by itself; --protocol takes means over some")
    for sentence in absent:
        print(f"\n{sentence}")
    print(f"\n{OPTIMISTIC}")


def show_best(lake: Path) -> None:
    """For each board the detector that finds novelty best, how sure that is, and who fails."""
    print("\nWhat finds novelty best (AUROC on test: 1 finds all of it, 0.5 is chance):")
    leaderboards, absent = find_boards(lake)
    for board in leaderboards:
        best = board.rows.row(0, named=True)
        place = ", ".join(board.protocols[:2]) + (", …" if len(board.protocols) > 2 else "")
        value = f"{best['mean']:.3f}"
        if best["deviation"] is not None:
            value += f" ± {best['deviation']:.3f} over {best['seeds']} seeds"
        sure = "no interval" if best["low"] is None else f"{best['low']:.2f} to {best['high']:.2f}"
        print(f"\n  {board.benchmark} ({place}): {best['detector']}")
        print(f"    {value} ({sure} by {best['samples']} samples), best of {board.rows.height}")
        if board.doubtful:
            print(f"    {board.doubtful}")
    for sentence in absent:
        print(f"\n  {sentence}")
    print(f"\n  {OPTIMISTIC}")


def _markdown(rows: pl.DataFrame) -> str:
    lines = [rows.columns, ["---"] * rows.width, *rows.rows()]
    cells = (["–" if cell is None else str(cell) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
