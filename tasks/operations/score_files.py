"""Metrics of any file of scores: a CSV or Parquet with a score column and a truth column.

Enters: the file, column names, a named convention. Leaves: one row per metric and score column, and
on request Parquet tables of metrics and curves with ROC and precision-recall plots.
"""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from schemas.errors import ConfigError, SourceError
from tasks.evaluation.conventions import Convention, find_convention
from tasks.evaluation.metrics import curves, evaluate

NOVEL_WORDS = {"novel", "true", "1", "yes", "anomaly", "unknown"}
KNOWN_WORDS = {"normal", "false", "0", "no", "known"}


def read_scores(path: Path) -> pl.DataFrame:
    """Rows of a CSV (also .gz) or Parquet file."""
    if not path.is_file():
        raise SourceError(f"score file {path} does not exist; name a CSV or Parquet file")
    try:
        if path.suffix == ".parquet":
            return pl.read_parquet(path)
        return pl.read_csv(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise SourceError(f"score file {path} cannot be read: {error}") from error


def truth_of(values: pl.Series) -> pl.Series:
    """Boolean, 0/1, or words such as novel and normal, as a boolean column."""
    words = values.cast(pl.String).str.to_lowercase().str.strip_chars().str.strip_suffix(".0")
    known, novel = words.is_in(list(KNOWN_WORDS)), words.is_in(list(NOVEL_WORDS))
    wrong = (~(known | novel)).fill_null(True)
    if wrong.any():
        row = wrong.arg_true()[0]
        raise ConfigError(
            f"truth column {values.name!r}: row {row + 1} is {values[row]!r}, expected 0/1, "
            "true/false or novel/normal"
        )
    return novel


def with_weight(convention: Convention, weight: str | None) -> Convention:
    """The convention with the share of weight of one class changed: `normal=0.75`."""
    if weight is None:
        return convention
    name, _, value = weight.partition("=")
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if name not in ("normal", "novel") or not 0 < share < 1:
        raise ConfigError(f"weight is {weight!r}, expected normal=SHARE or novel=SHARE in (0, 1)")
    share = share if name == "normal" else 1 - share
    return convention.model_copy(update={"normal_share": share})


def evaluate_file(
    path: Path,
    columns: Sequence[str],
    truth: str,
    convention: str,
    weight: str | None = None,
    out: Path | None = None,
) -> pl.DataFrame:
    """Metrics of every score column: (score, metric, convention, value, n, threshold)."""
    rows = read_scores(path)
    for name in (*columns, truth):
        if name not in rows.columns:
            names = ", ".join(rows.columns)
            raise ConfigError(f"{path} has no column {name!r}; there are: {names}")
    rule = with_weight(find_convention(convention), weight)
    novel = truth_of(rows[truth])
    frames, curve_frames = [], []
    for name in columns:
        score = pl.lit(name).alias("score")
        frames.append(evaluate(rows[name], novel, rule).select(score, pl.all()))
        if out is not None:
            curve_frames.append(curves(rows[name], novel, rule).select(score, pl.all()))
    metrics = pl.concat(frames)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        metrics.write_parquet(out / "metrics.parquet")
        points = pl.concat(curve_frames)
        points.write_parquet(out / "curves.parquet")
        _draw(points, out / "curves.png")
    return metrics


def _draw(points: pl.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    titles = {"roc": ("False positive rate", "True positive rate"), "pr": ("Recall", "Precision")}
    for axes, (curve, (across, up)) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        curve_points = points.filter(pl.col("curve") == curve)
        for (name,), part in curve_points.group_by("score", maintain_order=True):
            axes.plot(part["x"], part["y"], label=name)
        axes.set(xlabel=across, ylabel=up, xlim=(0, 1), ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})
