"""What only 3DOS shows: the tracks with their counts, pictures of the clouds, what was repaired.

Enters: the tables splits, shapes, point_clouds. Leaves: report sections.
"""

from pathlib import Path

import numpy as np
import polars as pl

from tasks.report import Html, Read, Section, figure, folded, paragraph, table
from tasks.report.plots import cloud_gallery
from tasks.threedos import paper_report
from tasks.threedos.sampling import upright
from tasks.threedos.tracks import count_splits

CLASS_NAMES = dict(
    pl.read_csv(
        Path(__file__).with_name("synset_names.csv"), schema_overrides={"synset": pl.String}
    ).iter_rows()
)
SHOWN_CLOUDS = 24
SHOWN_POINTS = 512
# Shapes of the official lists (train, valid, known test, unknown test) with every file there;
# ShapeNet without the 63 models that v2 lacks, cellphones merged into telephone.
OFFICIAL = {
    "SN1": (7746, 1130, 2241, 8020),
    "SN2": (16381, 2365, 4696, 5565),
    "SN3": (11581, 1663, 3324, 6937),
    "SR1": (2378, 340, 1255, 1647),
    "SR2": (1916, 486, 789, 2113),
    "SR12": (1480, 164, 400, 858),
    "SR13": (1522, 169, 422, 789),
    "SR23": (1166, 129, 352, 1255),
}
COLUMNS = ("train", "valid", "known_test", "novel_test")


def sections(read: Read) -> list[Section]:
    """Tracks and shapes, where the lake has them."""
    candidates = [_tracks(read), _shapes(read)]
    present = [section for section in candidates if section is not None]
    return present + paper_report.sections(read)


def _tracks(read: Read) -> Section | None:
    splits = read("splits")
    if splits is None or splits.is_empty():
        return None
    kind = (
        pl.when(pl.col("split") != "test")
        .then("split")
        .otherwise(pl.concat_str("role", pl.lit("_test")))
    )
    counts = (
        splits.group_by(pl.col("protocol").alias("track"), kind.alias("kind"))
        .len()
        .pivot("kind", index="track", values="len")
        .sort("track")
    )
    counts = counts.with_columns(
        pl.lit(None, pl.UInt32).alias(name) for name in COLUMNS if name not in counts.columns
    ).select("track", *COLUMNS)
    official = pl.DataFrame(
        [(track, *row) for track, row in OFFICIAL.items()],
        schema=["track", *(f"lists_{name}" for name in COLUMNS)],
        orient="row",
    )
    both = counts.join(official, on="track", how="left", maintain_order="left")
    parts: list[Html] = [
        paragraph(
            "Each track trains on known classes and must refuse the unknown ones at test time. "
            "Beside our counts those of the complete official lists (ShapeNet's 51,127 models of "
            "version 2, cellphones merged into telephones, ScanObjectNN by objects); MN1 and MN2 "
            "are ours: ModelNet40's SR1 classes against its SR2 classes and the reverse."
        ),
        table(
            both,
            groups=[("", 1), ("Here", len(COLUMNS)), ("Complete lists", len(COLUMNS))],
            names={f"lists_{name}": name.replace("_", " ") for name in COLUMNS},
        ),
        folded("By set of classes", table(count_splits(splits))),
    ]
    return Section("Open-set tracks", parts)


def _shapes(read: Read) -> Section | None:
    shapes = read("shapes")
    if shapes is None or shapes.is_empty():
        return None
    picks = (
        shapes.sort("sample_id")
        .group_by("source", "class", maintain_order=True)
        .first()
        .sort("class", "source")
    )
    picks = picks[np.linspace(0, picks.height - 1, SHOWN_CLOUDS).round().astype(int)].unique(
        "sample_id", maintain_order=True
    )
    among = pl.col("sample_id").is_in(picks["sample_id"].implode())
    clouds = read("point_clouds", ["sample_id", "points", "count"], among)
    if clouds is None:
        return None
    shown = picks.select("sample_id", "class", "source").join(
        clouds, on="sample_id", maintain_order="left"
    )
    pictures = [
        upright(
            np.array(row["points"], np.float64).reshape(-1, 3)[: min(row["count"], SHOWN_POINTS)],
            row["source"],
        )
        for row in shown.iter_rows(named=True)
    ]
    titles = [
        f"{CLASS_NAMES.get(name, name)} ({source})"
        for name, source in shown.select("class", "source").iter_rows()
    ]
    by_source = shapes.group_by("source", "kind").agg(
        pl.len().alias("shapes"),
        pl.col("class").n_unique().alias("classes"),
        pl.col("faces").median().round(0).cast(pl.Int64).alias("median_faces"),
        pl.col("watertight").mean().alias("watertight_share"),
        pl.col("repaired").is_not_null().sum().alias("repaired"),
    )
    repairs = (
        shapes.drop_nulls("repaired")
        .with_columns(pl.col("repaired").str.replace_all(r"\d+", "N"))
        .group_by("source", "repaired")
        .len("shapes")
        .sort("shapes", descending=True)
        .head(20)
    )
    parts: list[Html] = [
        table(by_source.sort("source", "kind")),
        figure(
            cloud_gallery(pictures, titles),
            f"The first {SHOWN_POINTS} farthest points of one shape of some classes",
        ),
    ]
    if repairs.height:
        parts.append(folded("What was repaired", table(repairs)))
    return Section("Shapes", parts)
