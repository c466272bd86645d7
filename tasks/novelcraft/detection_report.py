"""NovelCraft's models laid out like the paper's Tables 2 and 3, the paper's numbers beside ours.

Enters: the tables metrics (test split, each model's own score) and runs. Leaves: a section. Numbers
are percent, mean over seeds.
"""

from collections.abc import Mapping
from typing import NamedTuple

import polars as pl

from tasks.report import Html, Read, Section, paragraph, table

# AUROC, AUPRC, TNR and PPV at TPR 95 %, TNR and TPR at the wanted PPV; None: infeasible there.
Numbers = tuple[float | None, ...]
PAPER_TABLE_2: Mapping[str, Numbers] = {
    "ndcc": (80.58, 49.82, 47.30, 37.56, 99.66, 4.70),
    "odin": (65.54, 30.35, 40.56, 34.77, 100.00, 0.14),
    "deep_ensemble": (58.89, 41.36, None, None, 99.55, 5.92),
    "one_class_svm": (57.67, 27.81, None, None, None, None),
    "autoencoder_patch": (57.53, 38.90, 9.66, 25.97, 99.21, 10.03),
    "autoencoder_full": (54.95, 32.61, 10.90, 26.24, 99.89, 2.69),
}
PAPER_TABLE_3: Mapping[str, Numbers] = {
    "symbolic_mlp, order 2": (47.93, 22.02, 22.83, 29.26, None, None),
    "symbolic_mlp, order 5": (70.60, 32.68, 60.00, 44.36, 51.11, 100.00),
    "symbolic_mlp, order 10": (70.66, 33.08, 56.00, 41.97, 56.00, 95.45),
}


class Layout(NamedTuple):
    """A table of the paper: where our numbers are, and which stand in its columns."""

    title: str
    protocol: str
    convention: str
    columns: Mapping[str, str]
    paper: Mapping[str, Numbers]


VISUAL = Layout(
    "Table 2: single frames",
    "visual",
    "novelcraft-2022",
    {
        "auroc": "AUROC",
        "aupr": "AUPRC",
        "tnr_at_tpr95": "TNR at TPR 95",
        "ppv_at_tpr95": "PPV at TPR 95",
        "tnr_at_ppv80": "TNR at PPV 80",
        "tpr_at_ppv80": "TPR at PPV 80",
    },
    PAPER_TABLE_2,
)
SYMBOLIC = Layout(
    "Table 3: windows of symbolic states",
    "symbolic_windows",
    "novelcraft-symbolic",
    {
        "auroc": "AUROC",
        "average_precision": "AUPRC",
        "tnr_at_tpr95": "TNR at TPR 95",
        "ppv_at_tpr95": "PPV at TPR 95",
        "tnr_at_ppv40": "TNR at PPV 40",
        "tpr_at_ppv40": "TPR at PPV 40",
    },
    PAPER_TABLE_3,
)
RELEASED = SYMBOLIC._replace(
    title="Table 3: windows that do not overlap, as the paper's numbers have them",
    protocol="symbolic_windows_non_overlapping",
)

OWN = "own"


def section(read: Read) -> Section | None:
    """The tables, each where the lake has a run for it."""
    metrics = read("metrics", None, (pl.col("split") == "test") & (pl.col("score") == OWN))
    runs = read("runs", ["run_id", "settings", "preset", "changed", "config_id"])
    if metrics is None or runs is None:
        return None
    parts: list[Html] = []
    for layout in (VISUAL, SYMBOLIC, RELEASED):
        wide = beside(metrics, runs, layout)
        if wide is not None:
            groups = [("", 3), *((name, 2) for name in layout.columns.values())]
            names = {name: name.rpartition(" ")[2] for name in wide.columns[3:]}
            numbers = wide.columns[3:]
            parts.append(table(wide, layout.title, groups, names=names, right=numbers))
    if not parts:
        return None
    note = paragraph(
        "Percent; mean over seeds, with the deviation where there are several. The paper's numbers "
        "are for the full release and its own networks; on other frames, or with preset `small`, "
        "they stand here for orientation only. A dash: infeasible, or not run."
    )
    return Section("Models beside the paper", [note, *parts])


def settings_text() -> pl.Expr:
    """Over columns preset and changed: the preset and what differs from it."""
    changed = pl.col("changed").str.strip_chars("{}").str.replace_all('"', "")
    return pl.when(changed == "").then("preset").otherwise(pl.format("{}, {}", "preset", changed))


def beside(metrics: pl.DataFrame, runs: pl.DataFrame, layout: Layout) -> pl.DataFrame | None:
    """One row a model and its settings with ours and the paper's, best first, then the paper's."""
    rows = metrics.filter(
        (pl.col("protocol") == layout.protocol)
        & (pl.col("convention") == layout.convention)
        & pl.col("metric").is_in(list(layout.columns))
    ).join(runs, on="run_id", maintain_order="left")
    if rows.is_empty():
        return None
    if layout.paper is PAPER_TABLE_3:
        # Runs of an older version call it order.
        names = ("$.context", "$.order")
        order = pl.coalesce(pl.col("settings").str.json_path_match(name) for name in names)
        rows = rows.with_columns(pl.format("{}, order {}", "model", order).alias("model"))
    rows = rows.with_columns(settings_text().alias("settings"))
    value = 100 * pl.col("value")
    kinds = ["model", "settings", "config_id"]
    cells = rows.group_by(*kinds, "metric", maintain_order=True).agg(
        value.mean().alias("mean"), value.std().alias("deviation"), pl.col("seed").n_unique()
    )
    text = pl.format("{} ± {}", _digits("mean"), _digits("deviation"))
    cells = cells.with_columns(
        pl.when(pl.col("deviation").is_null()).then(_digits("mean")).otherwise(text).alias("said")
    )
    ours = cells.group_by(kinds, maintain_order=True).agg(
        pl.col("seed").max().cast(pl.Int64).alias("seeds"),
        pl.col("mean").filter(pl.col("metric") == "auroc").first().alias("rank"),
        *(
            pl.col("said").filter(pl.col("metric") == metric).first().alias(f"{name} here")
            for metric, name in layout.columns.items()
        ),
    )
    theirs = [f"{name} paper" for name in layout.columns.values()]
    paper = pl.DataFrame(
        [(name, *numbers) for name, numbers in layout.paper.items()],
        schema={"model": pl.String} | dict.fromkeys(theirs, pl.Float64),
        orient="row",
    ).with_columns(_digits(name) for name in theirs)
    both = ours.join(paper, on="model", how="full", coalesce=True)
    pairs = [f"{name} {kind}" for name in layout.columns.values() for kind in ("here", "paper")]
    down = [True, False, False]
    return both.sort("rank", "model", "settings", descending=down, nulls_last=True)[
        ["model", "settings", "seeds", *pairs]
    ]


def _digits(name: str) -> pl.Expr:
    return pl.col(name).map_elements(lambda value: f"{value:.2f}", return_dtype=pl.String)
