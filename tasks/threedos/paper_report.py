"""3DOS's results laid out like the paper's Tables 1, 3 and 4, the paper's numbers beside ours.

Enters: the tables metrics and runs. Leaves: report sections. Numbers are percent, AUROC and FPR95
as the released code has them (convention `threedos`), mean over seeds.
"""

import json
from pathlib import Path

import polars as pl

from schemas.tables import PLAIN
from tasks.report import Html, Read, Section, paragraph, table

PAPER = Path(__file__).with_name("paper_results.csv")
CONVENTION = "threedos"
TABLES = {
    "Synthetic, ShapeNet (Table 1)": ("SN1", "SN2", "SN3"),
    "Synthetic to real (Table 3)": ("SR1", "SR2"),
    "Real to real, ScanObjectNN (Table 4)": ("SR12", "SR13", "SR23"),
    "ModelNet40 alone (not in the paper)": ("MN1", "MN2"),
}
METRICS = {"auroc": "AUROC", "fpr95": "FPR95"}
AVERAGE = "average"
# What tells our rows apart, the ids behind what is shown; the paper's have the first three.
KEY = ["network", "model", "score", "preset", "changed", "view"]
PAPER_KEY = KEY[:3]
IDS = ["config_id", "score_id"]
# What else decides a configuration beside its settings.
DECIDING = ["versions", "precision"]
RUN_COLUMNS = ["network", "preset", "changed", "config_id", *DECIDING]
# Changes that the paper's tables have no number of.
DENSITY = ("points", "scan_points")
OTHERWISE = ("smoothing", *DENSITY)


def sections(read: Read) -> list[Section]:
    """One table a track family, and the ablation of the number of points."""
    metrics, runs = read("metrics"), read("runs")
    if metrics is None or runs is None or metrics.is_empty():
        return []
    ours = _ours(metrics, runs)
    parts: list[Html] = [
        paragraph(
            "Percent; mean over seeds, with the deviation where there are several. `nearest` on "
            "cross_entropy is the paper's CE (L2), `cosine` on subcenter_arcface and on supcon "
            "its SubArcFace and SupCon. Unknown are the classes of all other sets of the family. "
            "Ours with preset `small` are networks of a size for a CPU, trained on what shapes "
            "there are: the paper's numbers stand beside them for orientation only."
        )
    ]
    for title, tracks in TABLES.items():
        wide = _beside(ours, tracks)
        if wide is not None:
            numbers = [name for name in wide.columns if name not in KEY]
            parts.append(table(wide, title, right=numbers))
    section = [Section("Beside the paper", parts)] if len(parts) > 1 else []
    density = _density(ours)
    return [*section, *([density] if density else [])]


def _ours(metrics: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """One row per protocol, configuration, score, view and metric: mean and deviation by seed."""
    points, scans = (pl.col("settings").str.json_path_match(f"$.{name}") for name in DENSITY)
    apart = pl.concat_str(points, pl.lit(" (scans "), scans, pl.lit(")"))
    seen = pl.when(scans.is_null() | (scans == points)).then(points).otherwise(apart)
    return (
        metrics.filter(
            (pl.col("convention") == CONVENTION)
            & pl.col("metric").is_in([*METRICS, "acc"])
            & (pl.col("split") == "test")
            & (pl.col("subset") == "all")
        )
        .join(runs.select("run_id", *RUN_COLUMNS, seen.alias("points")), on="run_id")
        .group_by("protocol", *KEY, *IDS, *DECIDING, "points", "metric")
        .agg(
            (100 * pl.col("value").mean()).alias("mean"),
            (100 * pl.col("value").std()).alias("deviation"),
        )
    )


def _beside(ours: pl.DataFrame, tracks: tuple[str, ...]) -> pl.DataFrame | None:
    of_tracks = ours.filter(pl.col("protocol").is_in(tracks))
    if of_tracks.is_empty():
        return None
    text = (
        pl.when(pl.col("deviation").is_null())
        .then(_digits("mean"))
        .otherwise(pl.concat_str(_digits("mean"), pl.lit(" ± "), _digits("deviation")))
    )
    column = pl.concat_str("protocol", pl.lit(" "), pl.col("metric").replace(METRICS))
    wide = (
        of_tracks.filter(pl.col("metric").is_in(list(METRICS)))
        .with_columns(text.alias("text"), column.alias("column"))
        .pivot("column", index=[*KEY, *IDS], values="text", sort_columns=True)
        .sort(*KEY, *IDS)
    )
    paper = pl.read_csv(PAPER).rename({"method": "model"})
    for track in tracks:
        for metric, name in (("auroc", "AUROC"), ("fpr95", "FPR95")):
            if f"{track}_{metric}" in paper.columns and f"{track} {name}" in wide.columns:
                theirs = paper.select(
                    *PAPER_KEY, pl.col(f"{track}_{metric}").alias(f"{track} {name} paper")
                )
                wide = wide.join(theirs, on=PAPER_KEY, how="left", maintain_order="left")
    wide = _averaged(wide, of_tracks, paper, tracks)
    compared = pl.col("changed").str.contains(rf'"({"|".join(OTHERWISE)})":').not_()
    wide = wide.with_columns(pl.when(compared).then(pl.col("^.* paper$")))
    order = [
        name
        for track in (*tracks, AVERAGE)
        for metric in ("AUROC", "FPR95")
        for name in (f"{track} {metric}", f"{track} {metric} paper")
        if name in wide.columns
    ]
    plain = {"changed": "{}", "view": PLAIN}
    shown = [name for name in KEY if name not in plain or (wide[name] != plain[name]).any()]
    return wide.select(*shown, *order)


def _averaged(
    wide: pl.DataFrame, of_tracks: pl.DataFrame, paper: pl.DataFrame, tracks: tuple[str, ...]
) -> pl.DataFrame:
    """The paper's last columns: means over the tracks, where all of them are there."""
    for metric, name in METRICS.items():
        ours = (
            of_tracks.filter(metric=metric)
            .group_by(*KEY, *IDS)
            .agg(pl.col("mean").mean(), pl.len().alias("tracks"))
            .filter(tracks=len(tracks))
            .select(*KEY, *IDS, _digits("mean").alias(f"{AVERAGE} {name}"))
        )
        if ours.is_empty():
            continue
        wide = wide.join(ours, on=[*KEY, *IDS], how="left", maintain_order="left")
        columns = [f"{track}_{metric}" for track in tracks]
        if set(columns) <= set(paper.columns):
            mean = pl.mean_horizontal(columns, ignore_nulls=False).round(1)
            theirs = paper.select(*PAPER_KEY, mean.alias(f"{AVERAGE} {name} paper"))
            wide = wide.join(theirs, on=PAPER_KEY, how="left", maintain_order="left")
    return wide


def _digits(name: str) -> pl.Expr:
    return pl.col(name).round(1).cast(pl.String)


def _density(ours: pl.DataFrame) -> Section | None:
    """Of the same networks at densities of the test, and of networks trained at each density."""
    by_view = ours.filter(metric="auroc")
    by_run = by_view.filter(pl.col("points").is_not_null(), view=PLAIN).with_columns(
        pl.col("changed").map_elements(_without_density, pl.String)
    )
    parts: list[Html] = []
    index = ["protocol", *(name for name in (*KEY, *IDS) if name != "view")]
    if by_view["view"].n_unique() > 1:
        wide = (
            by_view.sort(pl.col("view") != PLAIN, pl.col("view").str.len_chars(), "view")
            .pivot("view", index=index, values="mean", maintain_order=True)
            .sort(index)
            .drop(IDS)
        )
        parts.append(
            paragraph("AUROC in percent of the same networks that see fewer or more points.")
        )
        parts.append(table(wide))
    index = [*(name for name in index if name != "config_id"), *DECIDING]
    if (by_run.group_by(index).agg(pl.col("points").n_unique())["points"] > 1).any():
        wide = (
            by_run.sort(pl.col("points").str.extract(r"(\d+)").cast(pl.Int64), "points")
            .pivot("points", index=index, values="mean", maintain_order=True)
            .sort(index)
            .drop("score_id", *DECIDING)
        )
        parts.append(
            paragraph("AUROC in percent of networks trained and tested with so many points.")
        )
        parts.append(table(wide))
    return Section("Density of points", parts) if parts else None


def _without_density(changed: str) -> str:
    values = json.loads(changed)
    return json.dumps({name: value for name, value in values.items() if name not in DENSITY})
