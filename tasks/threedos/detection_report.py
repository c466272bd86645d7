"""3DOS's results laid out like the paper's Tables 1, 3 and 4, the paper's numbers beside ours.

Enters: the table metrics. Leaves: report sections. Numbers are percent, AUROC and FPR95 as the
released code has them (convention `threedos`), mean over seeds.
"""

from pathlib import Path

import polars as pl

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


def sections(read: Read) -> list[Section]:
    """One table a track family, and the ablation of the number of points."""
    metrics = read("metrics")
    if metrics is None or metrics.is_empty():
        return []
    ours = _ours(metrics)
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
            parts.append(table(wide, title, right=wide.columns[3:]))
    found = [Section("Beside the paper", parts)] if len(parts) > 1 else []
    density = _density(ours)
    return [*found, *([density] if density else [])]


def _ours(metrics: pl.DataFrame) -> pl.DataFrame:
    """track, network, method, score, points, metric, mean, deviation."""
    names = pl.col("backbone").str.splitn(" ", 3)
    return (
        metrics.filter(
            (pl.col("convention") == CONVENTION) & pl.col("metric").is_in([*METRICS, "acc"])
        )
        .with_columns(
            names.struct.field("field_0").alias("network"),
            names.struct.field("field_1").alias("method"),
            names.struct.field("field_2").str.extract(r"(\d+)").cast(pl.Int32).alias("points"),
        )
        .group_by("protocol", "network", "method", "detector", "points", "metric")
        .agg(
            (100 * pl.col("value").mean()).alias("mean"),
            (100 * pl.col("value").std()).alias("deviation"),
        )
        .rename({"protocol": "track", "detector": "score"})
    )


def _beside(ours: pl.DataFrame, tracks: tuple[str, ...]) -> pl.DataFrame | None:
    chosen = ours.filter(pl.col("track").is_in(tracks))
    if chosen.is_empty():
        return None
    said = (
        pl.when(pl.col("deviation").is_null())
        .then(_digits("mean"))
        .otherwise(pl.concat_str(_digits("mean"), pl.lit(" ± "), _digits("deviation")))
    )
    key = ["network", "method", "score", "points"]
    wide = (
        chosen.filter(pl.col("metric").is_in(list(METRICS)))
        .with_columns(
            said.alias("said"),
            pl.concat_str("track", pl.lit(" "), pl.col("metric").replace(METRICS)).alias("column"),
        )
        .pivot("column", index=key, values="said", sort_columns=True)
        .sort(key)
    )
    paper = pl.read_csv(PAPER)
    for track in tracks:
        for metric, name in (("auroc", "AUROC"), ("fpr95", "FPR95")):
            if f"{track}_{metric}" in paper.columns and f"{track} {name}" in wide.columns:
                theirs = paper.select(
                    *key[:3], pl.col(f"{track}_{metric}").alias(f"{track} {name} paper")
                )
                wide = wide.join(theirs, on=key[:3], how="left", maintain_order="left")
    wide = _averaged(wide, chosen, paper, tracks, key)
    order = [
        name
        for track in (*tracks, AVERAGE)
        for metric in ("AUROC", "FPR95")
        for name in (f"{track} {metric}", f"{track} {metric} paper")
        if name in wide.columns
    ]
    if wide["points"].null_count() == wide.height:
        key.remove("points")
    return wide.select(*key, *order)


def _averaged(
    wide: pl.DataFrame,
    chosen: pl.DataFrame,
    paper: pl.DataFrame,
    tracks: tuple[str, ...],
    key: list[str],
) -> pl.DataFrame:
    """The paper's last columns: means over the tracks, where all of them are there."""
    for metric, name in METRICS.items():
        ours = (
            chosen.filter(metric=metric)
            .group_by(key)
            .agg(pl.col("mean").mean(), pl.len().alias("tracks"))
            .filter(tracks=len(tracks))
            .select(*key, _digits("mean").alias(f"{AVERAGE} {name}"))
        )
        if ours.is_empty():
            continue
        wide = wide.join(ours, on=key, how="left", maintain_order="left", nulls_equal=True)
        columns = [f"{track}_{metric}" for track in tracks]
        if set(columns) <= set(paper.columns):
            mean = pl.mean_horizontal(columns, ignore_nulls=False).round(1)
            theirs = paper.select(*key[:3], mean.alias(f"{AVERAGE} {name} paper"))
            wide = wide.join(theirs, on=key[:3], how="left", maintain_order="left")
    return wide


def _digits(name: str) -> pl.Expr:
    return pl.col(name).round(1).cast(pl.String)


def _density(ours: pl.DataFrame) -> Section | None:
    chosen = ours.filter(pl.col("points").is_not_null() & (pl.col("metric") == "auroc"))
    if chosen["points"].n_unique() < 2:
        return None
    wide = (
        chosen.filter(~pl.col("track").str.contains(" against "))
        .with_columns(pl.concat_str("points", pl.lit(" points")).alias("column"))
        .sort("points")
        .pivot("column", index=["track", "network", "method", "score"], values="mean")
        .sort("track", "network", "method", "score")
    )
    said = paragraph("AUROC in percent of the same networks that see fewer or more points.")
    return Section("Density of points", [said, table(wide)])
