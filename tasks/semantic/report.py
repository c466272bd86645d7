"""What only semantic anomalies show: what was read, contact sheets, trials, baseline, networks.

Enters: images, thumbnails and the shared tables. Leaves: report sections.
"""

import io

import numpy as np
import polars as pl

from tasks.models.pixel_gaussian import PixelGaussian
from tasks.report import (
    Html,
    Picture,
    Read,
    Section,
    folded,
    gallery,
    heading,
    paragraph,
    plots,
    table,
)
from tasks.report import figure as shown_figure
from tasks.semantic import detection_report
from tasks.semantic.trials import trials_of

SHOWN = 6
TILE = 64
MOST_CLASSES = 60
# Members, training and test images of the complete data (Table 1 of the paper, section 4.1).
OFFICIAL = {
    "cifar10": (10, 50_000, 10_000),
    "stl10": (10, 5_000, 8_000),
    "dog": (12, 14_864, 600),
    "car": (10, 13_000, 500),
    "snake": (9, 11_700, 450),
    "spider": (6, 7_800, 300),
    "fungus": (6, 7_800, 300),
}
# Mean average precision of the trivial baseline over the held-out classes (Appendix D).
PAPER_BASELINE = {"cifar10": 11.17}
COLOURS = {"train": plots.COLOURS[0], "valid": plots.COLOURS[2], "test": plots.COLOURS[1]}
NO_SPLIT = "no split"


def sections(read: Read) -> list[Section]:
    """What was read, its classes, the trials and the baseline, where the lake has them."""
    images = read("images")
    if images is None or images.is_empty():
        return []
    parts = [_read(images), _classes(read, images), _trials(read), _baseline(read)]
    return [part for part in parts if part is not None] + detection_report.sections(read)


def _read(images: pl.DataFrame) -> Section:
    split = pl.col("split").fill_null(NO_SPLIT)
    by_source = (
        images.group_by("dataset", "source", split)
        .agg(
            pl.len().alias("images"),
            pl.col("class").n_unique().alias("classes"),
            pl.min_horizontal("width", "height").min().alias("shortest_side"),
            pl.max_horizontal("width", "height").max().alias("longest_side"),
            pl.col("format").unique().sort().str.join(", ").alias("formats"),
            pl.col("converted").is_not_null().sum().alias("converted"),
        )
        .sort("dataset", "source", "split")
    )
    parts: list[Html] = [table(by_source)]
    converted = (
        images.drop_nulls("converted")
        .group_by("dataset", "converted")
        .len("images")
        .sort(["images", "dataset", "converted"], descending=[True, False, False])
        .head(20)
    )
    if converted.height:
        parts.append(folded("What was converted to 8-bit RGB", table(converted)))
    copies = (
        images.group_by("dataset", "digest")
        .agg(pl.len(), pl.col("split").n_unique().alias("splits"))
        .filter(pl.col("len") > 1)
    )
    across = copies.filter(pl.col("splits") > 1).height
    parts.append(
        paragraph(
            f"{copies.height:,} raw images come more than once in a data set, byte for byte; "
            f"{across:,} of them in two splits."
        )
    )
    return Section("Images", parts)


# ---------------------------------------------------------------- classes


def _classes(read: Read, images: pl.DataFrame) -> Section:
    parts: list[Html] = []
    for (dataset,), rows in images.sort("sample_id").group_by("dataset", maintain_order=True):
        parts.append(heading(str(dataset)))
        if rows["class"].n_unique() > MOST_CLASSES:
            parts.append(paragraph(f"The {MOST_CLASSES} largest of its classes."))
            largest = (
                rows["class"].value_counts().sort(["count", "class"], descending=[True, False])
            )
            rows = rows.filter(pl.col("class").is_in(largest.head(MOST_CLASSES)["class"].implode()))
        rows = rows.with_columns(pl.coalesce("class_name", "class").alias("name"))
        parts.append(shown_figure(_counts(rows), f"Images of {dataset} by class and split"))
        parts.append(_contact_sheet(read, rows))
    return Section("Classes", parts)


def _counts(images: pl.DataFrame) -> bytes:
    split = pl.col("split").fill_null(NO_SPLIT)
    counts = images.group_by("name", split).len().pivot("split", index="name", values="len")
    order = [name for name in (*COLOURS, NO_SPLIT) if name in counts.columns]
    counts = counts.select("name", *order).fill_null(0).sort("name")
    return plots.stacked_bars(counts, "Images", COLOURS | {NO_SPLIT: plots.GREY})


def _contact_sheet(read: Read, images: pl.DataFrame) -> Html:
    """A strip for each class: some pictures evenly along its ids."""
    ids = {
        str(name): rows["sample_id"].gather(
            np.unique(np.linspace(0, rows.height - 1, SHOWN).round().astype(np.int64))
        )
        for (name,), rows in images.sort("name", "sample_id").group_by("name", maintain_order=True)
    }
    sample_ids = pl.concat(list(ids.values()))
    thumbnails = read(
        "thumbnails", ["sample_id", "data"], pl.col("sample_id").is_in(sample_ids.implode())
    )
    data = dict(thumbnails.iter_rows()) if thumbnails is not None else {}
    return gallery(
        [
            Picture(_strip([data[i] for i in class_ids if i in data]), name, (SHOWN * TILE, TILE))
            for name, class_ids in ids.items()
        ],
        wide=True,
    )


def _strip(encoded: list[bytes]) -> bytes:
    from PIL import Image

    strip = Image.new("RGB", (SHOWN * TILE, TILE), (128, 128, 128))
    for place, data in enumerate(encoded):
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            tile = picture.resize((TILE, TILE), Image.Resampling.BICUBIC)
        strip.paste(tile, (place * TILE, 0))
    buffer = io.BytesIO()
    strip.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


# ---------------------------------------------------------------- trials


def trial_counts(splits: pl.DataFrame) -> pl.DataFrame:
    """For each trial: known training images, known and novel test images, skew."""
    train, test = pl.col("split") == "train", pl.col("split") == "test"
    novel = pl.col("role") == "novel"
    return (
        splits.group_by("protocol")
        .agg(
            (train & ~novel).sum().cast(pl.Int64).alias("train_known"),
            (test & ~novel).sum().cast(pl.Int64).alias("test_known"),
            (test & novel).sum().cast(pl.Int64).alias("test_novel"),
        )
        .with_columns(
            (pl.col("test_novel") / (pl.col("test_novel") + pl.col("test_known")))
            .mul(100)
            .alias("skew_percent")
        )
        .sort("protocol")
    )


def _trials(read: Read) -> Section | None:
    splits, protocols = read("splits"), read("protocols")
    if splits is None or protocols is None or splits.is_empty():
        return None
    trials = splits.drop("subset").join(trials_of(protocols), on="protocol")
    totals = trials.group_by("subset").agg(
        pl.col("member").n_unique().cast(pl.Int64).alias("members"),
        pl.col("sample_id").filter(pl.col("split") == "train").n_unique().alias("train"),
        pl.col("sample_id").filter(pl.col("split") == "valid").n_unique().alias("valid"),
        pl.col("sample_id").filter(pl.col("split") == "test").n_unique().alias("test"),
    )
    official = pl.DataFrame(
        [(name, *row) for name, row in OFFICIAL.items()],
        schema=["subset", "official_members", "official_train", "official_test"],
        orient="row",
    )
    counts = totals.join(official, on="subset", how="left").sort("subset")
    parts = [
        paragraph(
            "Each member of a subset is held out in turn: a detector learns from the training "
            "images of the others and must rank the held-out ones first among all test images. "
            "Beside our counts those of the complete data sets. The skew, the share of anomalies "
            "in test, is the average precision of a detector that guesses."
        ),
        table(counts),
        folded("Every trial", table(trial_counts(splits))),
    ]
    return Section("Trials", parts)


def _baseline(read: Read) -> Section | None:
    ours = pl.col("model") == PixelGaussian.name
    metrics = read("metrics", None, ours & (pl.col("convention") == detection_report.CONVENTION))
    runs, protocols = read("runs", None, ours), read("protocols")
    if metrics is None or metrics.is_empty() or runs is None or protocols is None:
        return None
    side = pl.col("settings").str.json_path_match("$.side")
    value = 100 * pl.col("value")
    cells = (
        metrics.join(trials_of(protocols), on="protocol")
        .join(runs.select("run_id", pl.format("{}x{}", side, side).alias("pictures")), on="run_id")
        .filter(split="test")
        .sort("subset_right", "member", "seed", "metric")
        .group_by(
            pl.col("subset_right").alias("subset"),
            pl.col("member").alias("trial"),
            "pictures",
            maintain_order=True,
        )
        .agg(
            value.filter(pl.col("metric") == "average_precision").mean().alias("AP"),
            value.filter(pl.col("metric") == "average_precision").std().alias("deviation"),
            value.filter(pl.col("metric") == "skew").mean().alias("skew"),
            value.filter(pl.col("metric") == "auroc").mean().alias("AUROC"),
        )
    )
    means = (
        cells.group_by("subset", "pictures", maintain_order=True)
        .agg(pl.len().cast(pl.Int64).alias("trials"), pl.col("AP", "skew", "AUROC").mean())
        .with_columns(
            pl.col("subset")
            .replace_strict(PAPER_BASELINE, default=None, return_dtype=pl.Float64)
            .alias("AP_in_the_paper")
        )
    )
    parts = [
        paragraph(
            "One Gaussian with full covariance over the pixels of each channel, no learning of "
            "content (Appendix D). In per cent, mean and deviation over seeds. The paper's number "
            "is for all of lossless CIFAR-10 at 32 x 32; pictures of other data sets are shrunk "
            "until there are twice as many training images as pixels."
        ),
        table(means, "Mean over the held-out members"),
        folded("Every trial", table(cells)),
    ]
    return Section("Trivial baseline", parts)
