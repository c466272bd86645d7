"""Runs side by side: every metric of every convention, best first; curves and the index ask it too.

Enters: `metrics`, with the names of tasks/report/runs.py. Leaves: a section, and the ranking.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import polars as pl

from schemas.tables import ALL_STEPS, PLAIN
from tasks.evaluation.conventions import CONVENTIONS
from tasks.report import plots
from tasks.report.blocks import Html, counted, figure, folded, number_text, paragraph, table
from tasks.report.page import Section
from tasks.report.reading import Tables
from tasks.report.runs import with_names

METRIC_ORDER = (
    *("auroc", "aupr", "aupr_in", "aupr_out", "average_precision", "acc", "oscr"),
    *("classification accuracy", "detected % (M2)"),
)
LOWER_IS_BETTER = re.compile(r"^(fpr|fnr|fp|fn|false|detection_delay|delay|error|loss)", re.I)
NOT_RANKED = frozenset({"skew"})
# Elsewhere the first in METRIC_ORDER decides.
FIRST_METRIC = {"semantic": "average_precision"}
GENERAL_CONVENTIONS = frozenset({"openood"})  # after those of the benchmark's own paper
MOST_NAMED = 4
MOST_ROWS = 500
MOST_LINES = 6
MOST_PANELS = 12
WHERE = ("protocol", "split")
OLDER = (
    "The table `metrics` is of an older version, which this report does not read. "
    "Build again to see the results."
)
CHOSEN = (
    "The best of several runs is chosen after looking, so its number is too good. Beside it stands "
    "the same model with the score that is best on the validation split; a dash: it has one score "
    "only, or validation gives no number."
)


def results(read: Tables) -> pl.DataFrame | None:
    """Metrics of all runs with their names, or None where there are none."""
    metrics = read("metrics") if "run_id" in read.columns("metrics") else None
    return None if metrics is None or metrics.is_empty() else with_names(read, metrics)


def whole(rows: pl.DataFrame) -> pl.DataFrame:
    """All samples of a protocol as they are, before labels were given; all steps together."""
    plain = (pl.col("view") == PLAIN) & (pl.col("subset") == "all")
    rows = rows.filter(plain, pl.col("phase") != "after", pl.col("step") <= 0)
    return rows.filter(pl.col("step") == pl.col("step").min().over("protocol"))


def cells(metrics: pl.DataFrame, where: Sequence[str] = WHERE) -> pl.DataFrame:
    """Each metric of each run over its seeds; the interval where there is one seed."""
    value = pl.col("value")
    # In table order, as the last digit of a mean depends on the order of its terms.
    return metrics.group_by(*where, "run", "convention", "metric", maintain_order=True).agg(
        value.mean().alias("mean"),
        value.std().alias("deviation"),
        *(pl.when(pl.len() == 1).then(pl.first(bound)).alias(bound) for bound in ("low", "high")),
        value.count().alias("found"),
        pl.len().cast(pl.Int64).alias("seeds"),
        pl.col("n").max().alias("samples"),
        pl.first("config_id", "score_name"),
    )


def ranked(metrics: pl.DataFrame) -> pl.DataFrame:
    """`cells` of the first metric of each protocol and split, best first; `place` from 0."""
    rated = metrics.filter(~pl.col("metric").is_in(list(NOT_RANKED)))
    kinds = rated.select(*WHERE, "convention", "metric").unique().rows()
    first = pl.DataFrame(
        list({kind[:2]: kind for kind in sorted(kinds, key=_priority, reverse=True)}.values()),
        schema=dict.fromkeys([*WHERE, "convention", "metric"], pl.String),
        orient="row",
    )
    ranking = rated.join(first, on=first.columns, maintain_order="left")
    return (
        cells(ranking)
        .sort(*WHERE, _better(), "run", nulls_last=True)
        .with_columns(pl.int_range(pl.len()).over(WHERE).alias("place"))
    )


def _better() -> pl.Expr:
    """Lower is better of this one."""
    lower = pl.col("metric").str.contains(f"(?i){LOWER_IS_BETTER.pattern}")
    return pl.when(lower).then("mean").otherwise(-pl.col("mean"))


def _priority(kind: tuple[str, ...]) -> tuple[Any, ...]:
    """Order of (..., convention, metric) in tables; the first one ranks."""
    *_, convention, metric = kind
    place = METRIC_ORDER.index(metric) if metric in METRIC_ORDER else len(METRIC_ORDER)
    first = FIRST_METRIC.get(convention) == metric
    general = convention in GENERAL_CONVENTIONS
    return (general, convention, metric in NOT_RANKED, not first, place, metric)


def in_order(splits: Collection[str]) -> list[str]:
    """The test split first."""
    order = ("test", "valid", "train")
    return sorted(splits, key=lambda s: (order.index(s) if s in order else len(order), s))


def best(metrics: pl.DataFrame, caption: str, most: int) -> Html:
    """The best run of each protocol, on the test split where there is one, as a table."""
    rows = families(whole(metrics))
    tested = pl.col("split") == "test"
    first = (
        ranked(rows)
        .with_columns(
            pl.len().over(WHERE).cast(pl.Int64).alias("of_runs"),
            (pl.len().over(*WHERE, "mean") - 1).alias("tied"),
            pl.col("run").n_unique().over(*WHERE, "config_id").alias("scores"),
        )
        .filter(tested | ~tested.any().over("protocol"))
        .filter(pl.col("mean").is_not_null(), place=0)
    )
    kind = ["protocol", "config_id", "convention", "metric"]
    every = cells(rows)
    picked = (
        every.filter(pl.col("split") == "valid", pl.col("mean").is_not_null())
        .sort(_better(), "run")
        .group_by(kind, maintain_order=True)
        .agg(pl.first("run").alias("chosen"), pl.first("score_name").alias("chosen_on_valid"))
        .join(first.filter(pl.col("scores") > 1, tested).select(*kind, "split"), on=kind)
        .join(
            every.select(*kind, "split", pl.col("run").alias("chosen"), _shown().alias("its")),
            on=[*kind, "split", "chosen"],
        )
    )
    tied = pl.format("{} (and {} as good)", "run", "tied")
    shown = (
        first.join(picked, on=[*kind, "split"], how="left", maintain_order="left")
        .head(most)
        .select(
            pl.when(tested).then("protocol").otherwise(pl.format("{}, {}", *WHERE)),
            pl.format("{} ({})", pl.col("metric").str.replace_all("_", " "), "convention").alias(
                "metric"
            ),
            pl.when(pl.col("tied") > 0).then(tied).otherwise("run").alias("best_run"),
            _shown().alias("value"),
            "of_runs",
            "seeds",
            "samples",
            "chosen_on_valid",
            pl.col("its").alias("its_value"),
        )
    )
    if first.height > most:
        caption += f"; the first {most} of {first.height} protocols"
    return table(shown, caption, right=("value", "chosen_on_valid", "its_value"))


def families(metrics: pl.DataFrame) -> pl.DataFrame:
    """Protocols `family/member` become one: for each seed the mean over all members.

    A run that lacks some of the members is left out, as its mean would be over easier ones.
    """
    parts = pl.col("protocol").str.splitn("/", 2).struct
    single = parts.field("field_1").is_null()
    many = metrics.filter(~single).with_columns(parts.field("field_0").alias("family"))
    run = ["run", "seed", "split", "convention", "metric"]
    means = (
        many.with_columns(pl.col("protocol").n_unique().over("family").alias("members"))
        .group_by("family", *run, "members", maintain_order=True)
        .agg(
            pl.col("value").mean(),
            pl.lit(None, pl.Float64).alias("low"),
            pl.lit(None, pl.Float64).alias("high"),
            pl.col("n").sum(),
            pl.first("config_id", "score_name"),
            pl.len().alias("there"),
        )
        .filter(pl.col("there") == pl.col("members"))
        .with_columns(pl.format("{} (mean of {})", "family", "members").alias("protocol"))
    )
    kept = ["protocol", *run, "value", "low", "high", "n", "config_id", "score_name"]
    return pl.concat([metrics.filter(single).select(kept), means.select(kept)])


def leaderboard(read: Tables) -> list[Section]:
    metrics = results(read)
    if metrics is None:
        unnamed = read.rows("metrics") and "run_id" not in read.columns("metrics")
        older = unnamed or "metrics" in read.older
        parts = [paragraph(OLDER)] if older else _failed(read)
        return [Section("Leaderboard", parts)] if parts else []
    parts = [
        paragraph(
            "Mean ± standard deviation over seeds; of one seed the value and its 95 % interval "
            "(bootstrap over samples). Of each protocol the best is marked, where runs differ. A "
            "dash: the convention calls the number infeasible, or there is no such metric."
        ),
        paragraph(CHOSEN),
        best(metrics, "The best run of each protocol", MOST_PANELS),
    ]
    parts += _boards(whole(metrics), ["protocol"])
    others = _others(metrics)
    if others.height:
        boards = _boards(others, ["protocol", "part"])
        parts.append(folded("Subsets, views and phases by themselves", *boards))
    parts += _steps(metrics) + _failed(read)
    used = [CONVENTIONS[name] for name in sorted(set(metrics["convention"])) if name in CONVENTIONS]
    if used:
        dumped = [convention.model_dump(mode="json") for convention in used]
        frame = pl.DataFrame({"rule": list(dumped[0])[1:]}).with_columns(
            pl.Series(one["name"], [_rule(v) for v in list(one.values())[1:]]) for one in dumped
        )
        parts.append(folded("What the conventions mean", table(frame)))
    return [Section("Leaderboard", parts)]


def _failed(read: Tables) -> list[Html]:
    """Runs that came to no end, and why."""
    columns = ["run_id", "protocol", "seed", "reason"]
    rows = read("runs", columns, pl.col("state") == "failed")
    if rows is None or rows.is_empty():
        return []
    shown = with_names(read, rows).select("run", "protocol", "seed", "reason")
    caption = f"{counted(shown.height, 'run')} failed"
    return [folded(caption, table(shown.sort("protocol", "run", "seed")))]


def _others(metrics: pl.DataFrame) -> pl.DataFrame:
    """What `whole` leaves out, of all steps together; `part` says which."""
    part = pl.concat_str(
        pl.when(pl.col("subset") != "all").then("subset"),
        pl.when(pl.col("view") != PLAIN).then("view"),
        pl.when(pl.col("phase") == "after").then(pl.lit("after labels")),
        separator=", ",
        ignore_nulls=True,
    ).alias("part")
    together = (pl.col("step") <= 0) & (pl.col("step") == pl.col("step").min().over("protocol"))
    return metrics.filter(together).with_columns(part).filter(pl.col("part") != "")


def _steps(metrics: pl.DataFrame) -> list[Html]:
    """The first metric of the best runs over the steps, where protocols have steps."""
    kind = ["protocol", "split", "run", "convention", "metric"]
    lines = ranked(whole(metrics)).filter(pl.col("place") < MOST_LINES, split="test").select(kind)
    plain = (pl.col("view") == PLAIN) & (pl.col("subset") == "all")
    after = pl.col("phase") == "after"
    points = (
        metrics.filter(plain & (pl.col("step") == ALL_STEPS).any().over("protocol"))
        .filter(pl.col("step") >= 0, pl.col("value").is_not_null())
        .join(lines, on=kind)
        .sort("protocol", after, "run", "run_id", "step")
        .select(
            pl.concat_str(
                "protocol",
                pl.when(after).then(pl.lit(", after labels")).otherwise(pl.lit("")),
                pl.format(", {}", pl.col("metric").str.replace_all("_", " ")),
            ).alias("panel"),
            pl.col("run").alias("line"),
            pl.col("step").alias("x"),
            pl.col("value").alias("y"),
            pl.lit(False).alias("hollow"),
            pl.col("run_id").alias("seed"),
        )
    )
    if points.is_empty():
        return []
    panels = points["panel"].unique(maintain_order=True)
    drawn = points.filter(pl.col("panel").is_in(panels.head(MOST_PANELS).implode()))
    picture = plots.line_panels(drawn, styles(drawn["line"]), "Step", min(3, len(panels)))
    caption = f"The {MOST_LINES} best runs of each protocol, step by step, split test"
    if len(panels) > MOST_PANELS:
        caption += f"; the first {MOST_PANELS} of {len(panels)} protocols"
    return [folded("Step by step", figure(picture, caption))]


def styles(runs: pl.Series) -> dict[str, tuple[str, str]]:
    """Colour and dash of each run."""
    colours, dashes = plots.COLOURS, plots.DASHES
    return {
        run: (colours[number % len(colours)], dashes[number // len(colours) % len(dashes)])
        for number, run in enumerate(sorted(set(runs)))
    }


def _boards(metrics: pl.DataFrame, where: list[str]) -> list[Html]:
    """A table of each split, and of each set of conventions: other columns, another table.

    Splits after the first are folded.
    """
    parts: list[Html] = []
    conventions = pl.col("convention").unique().sort().implode().over(*where, "split", "run")
    every = cells(metrics, [*where, "split"]).with_columns(conventions.alias("conventions"))
    for split in in_order(set(every["split"])):
        here = every.filter(split=split)
        boards = []
        for names in sorted({tuple(names) for names in here["conventions"].to_list()}):
            rows = here.filter(pl.col("conventions") == pl.lit(list(names)))
            boards.append(_board(rows, where, f"Split {split}, {_protocols(rows)}"))
        parts += [folded(f"Split {split}", *boards)] if parts else boards
    return parts


def _protocols(rows: pl.DataFrame) -> str:
    names = sorted(set(rows["protocol"]))
    if len(names) > MOST_NAMED:
        return f"{len(names)} protocols"
    return f"protocol{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _rule(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)


def _board(every: pl.DataFrame, where: list[str], caption: str) -> Html:
    """One row per run, best first, and the best marked, within each `where`."""
    columns = sorted(every.select("convention", "metric").unique().rows(), key=_priority)
    names = {f"{convention}/{metric}": metric for convention, metric in columns}
    at = pl.concat_str("convention", "metric", separator="/")
    first = next(iter(names))
    lower = {name: LOWER_IS_BETTER.match(metric) is not None for name, metric in names.items()}
    rows = (
        every.group_by(*where, "run")
        .agg(
            pl.col("seeds", "samples").max(),
            *(pl.col("mean").filter(at == name).first().alias(name) for name in names),
            *(_shown().filter(at == name).first().alias(f"shown {name}") for name in names),
        )
        .sort(*where, pl.col(first) * (1 if lower[first] else -1), "run", nulls_last=True)
    )
    if rows.height > MOST_ROWS:
        caption += f"; the first {MOST_ROWS} of {rows.height:,} rows, all are in `metrics`"
        rows = rows.head(MOST_ROWS)
    marked = set()
    for name in (name for name, metric in names.items() if metric not in NOT_RANKED):
        seen = pl.col(name).round(3)  # what looks the same is marked the same
        top = seen.min() if lower[name] else seen.max()
        several = seen.drop_nulls().n_unique() > 1
        hits = rows.select(((seen == top) & several).over(where)).to_series()
        marked |= {(row, name) for row in hits.fill_null(False).arg_true().to_list()}
    left = ["run", *where, "seeds", "samples"]
    groups = [("", len(left)), *Counter(convention for convention, _ in columns).items()]
    shown = rows.select(*left, *(pl.col(f"shown {name}").alias(name) for name in names))
    titles = {name: metric.replace("_", " ") for name, metric in names.items()}
    return table(shown, caption, groups, marked, titles, names)


def _shown() -> pl.Expr:
    cell = pl.struct("mean", "deviation", "low", "high", "found", "seeds")
    return cell.map_elements(cell_text, return_dtype=pl.String)


def cell_text(cell: Mapping[str, Any]) -> str | None:
    """`mean ± deviation`, or the value above its interval; of how many seeds, if not of all."""
    mean, deviation = cell["mean"], cell["deviation"]
    if mean is None:
        return None
    shown = number_text(mean)
    if deviation is not None:
        odd = mean and not 0.001 <= abs(mean) < 1000
        # With as many digits as the mean, so that columns stay readable.
        shown += f" ± {number_text(deviation) if odd else f'{deviation:.3f}'}"
    elif cell["low"] is not None and cell["high"] is not None:
        shown += f"\n[{number_text(cell['low'])}, {number_text(cell['high'])}]"
    return shown if cell["found"] == cell["seeds"] else f"{shown} ({cell['found']}/{cell['seeds']})"
