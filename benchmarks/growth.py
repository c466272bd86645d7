"""How cost grows with size: fabricated inputs of many rows and small content, each in a process.

`python -m benchmarks.growth` runs every side at 1, 3, 10, 30 and 100 hundredths of `--share` of its
full size; `--share 1` is the real one (650,000 clips, 132,673 pictures, 51,127 shapes, 1.3 million
images; minutes of one core each). `--sides ann,evm` names some, `--plot FILE.png` draws the costs.
Printed are processor seconds, the peak of anonymous memory above that of the imports, bytes of the
inputs, and the exponent of the law seconds = a * size ** b, fitted to the larger half of the sizes.

- `clips`: clips of 718 labels in 16 increments with features of 32 numbers in parts of 1,270, from
  the parts through the plan of a run to an evaluated ANN (all tables).
- `pictures`: PNG pictures of 32 x 32 in parts of 2,000 through the loader of a training: one epoch
  of random batches of 64 in a budget of a hundredth of the pixels.
- `shapes`: shapes through the built-in track SN1 (`split_track`).
- `images`: rows of 1,000 classes through a trial (`make_trial`) with the check of the table.
- `ann`, `gmm_finch`, `evm`: features of 768 numbers of 400 labels are fitted, 1,000 predicted
  (6,000, 20,000 and 63,000 features at the full size).
- `neighbours`: the two nearest of 2,048 rows by cosine among 6,300, 63,000 and 630,000 x 768 in a
  file: one block of FINCH's first step.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.table import Table
from storage.parquet import write_parquet
from storage.pieces import Part

WIDTH = 768
STEPS = (0.01, 0.03, 0.1, 0.3, 1.0)


# ---------------------------------------------------------------- inputs


def part_of(folder: Path, table: Table, rows: pl.DataFrame, shard: str = "all") -> Part:
    frame = table.conform(rows).sort(table.key)
    number = len(list(folder.glob("*.parquet")))
    file = write_parquet(frame, table, folder / f"{number:05}.parquet")
    path = folder / file.file
    return Part(path, file.sha256, file.rows, file.bytes, table.name, shard, "benchmark")


def named(prefix: str, count: int) -> pl.Series:
    numbers = pl.int_range(count, eager=True).cast(pl.String).str.zfill(8)
    return (prefix + numbers).alias("sample_id")


def clustered(count: int, labels: int, width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    """Features around a centre for each label, and the labels."""
    draws = np.random.default_rng(0)
    centres = draws.standard_normal((labels, width), np.float32)
    codes = np.arange(count) % labels
    features = draws.standard_normal((count, width), np.float32)
    for start in range(0, count, 10_000):
        features[start : start + 10_000] += 2 * centres[codes[start : start + 10_000]]
    return features, codes


# ---------------------------------------------------------------- sides


def run_clips(size: int, folder: Path) -> None:
    from schemas.kowl import Config
    from schemas.runs import RunFacts
    from schemas.tables import OUTPUTS, SAMPLES, SPLITS
    from tasks.evaluation.runs import run_id, run_mark
    from tasks.evaluation.stages import PassedRun
    from tasks.kowl.evaluation import (
        RunSettings,
        evaluate_predictor,
        plan_runs,
        predictor_facts,
        protocol_inputs,
    )
    from tasks.predictors import resolved_predictors

    protocol = "kowl-growth"
    backbone = RunFacts(
        benchmark="kowl",
        protocol=None,
        model="frame_backbone",
        settings={"preprocessing": "spread"},
        origin="frozen",
        fit_key="none",
    )
    features, codes = clustered(size, 718, 32)
    ids = named("clip", size)
    increment = np.where(codes < 409, np.arange(size) // 718 % 16, 1 + codes % 15)
    novel = (codes >= 409) & (increment <= 1 + codes % 15)
    split = pl.Series(["train"] * 8 + ["valid", "test"]).gather(np.arange(size) // 718 % 10)
    rows = pl.DataFrame({"sample_id": ids}).with_columns(
        pl.lit(protocol).alias("protocol"),
        pl.Series("step", increment, pl.Int32),
        pl.Series("class", codes).cast(pl.String).str.zfill(3),
        pl.Series("label", codes, pl.Int32),
        split.alias("split"),
        pl.when(pl.Series(novel)).then(pl.lit("novel")).otherwise(pl.lit("known")).alias("role"),
        pl.lit(None, pl.String).alias("subset"),
    )
    splits = (part_of(folder, SPLITS, rows, protocol),)
    told = pl.DataFrame({"sample_id": ids, "class": rows["class"], "sequence": ids}).with_columns(
        position=0, source=None, digest=None, modality=pl.lit("clip")
    )
    samples = (part_of(folder, SAMPLES, told),)
    outputs = []
    for start in range(0, size, 1270):
        part = pl.DataFrame(
            {
                "sample_id": ids[start : start + 1270],
                "features": pl.Series(features[start : start + 1270]).arr.to_list(),
            }
        ).with_columns(
            run_id=pl.lit(run_id(backbone)),
            view=pl.lit("plain"),
            logits=None,
            novelty=None,
            predicted=None,
        )
        outputs.append(part_of(folder, OUTPUTS, part, f"{start:08}"))
    del features
    with measured(folder):
        kept, own = protocol_inputs(outputs, splits, protocol)
        facts = backbone.model_copy(update={"protocol": protocol, "base_runs": ("frozen",)})
        frozen = PassedRun(facts, run_mark(facts, "data"), kept, own, samples, phase="before")
        about = {
            "lists": ".",
            "videos": ".",
            "predictors": ["ann"],
            "evaluation": {"feedback": [1.0]},
        }
        config = Config.model_validate(about)
        chosen = resolved_predictors(config.predictors, "small", {"epochs": 2})
        (first, *_) = plan_runs(predictor_facts(config, chosen, frozen, "fit"), frozen)
        made = evaluate_predictor(first, RunSettings(device="cpu", draws=20))
        for table in evaluate_predictor.writes(Settings()):
            table.check(made.tables[table.name])


def run_pictures(size: int, folder: Path) -> None:
    import cv2

    from schemas.semantic import PICTURES
    from tasks.learning.memory import use_memory
    from tasks.learning.pictures import Pictures

    draws, ids = np.random.default_rng(0), named("picture", size)
    drawn = [
        cv2.imencode(".png", draws.integers(0, 256, (32, 32, 3), np.uint8))[1].tobytes()
        for _ in range(50)
    ]
    files = []
    for start in range(0, size, 2000):
        own = ids[start : start + 2000]
        rows = pl.DataFrame({"sample_id": own}).with_columns(
            pl.lit(32).alias("width"),
            pl.lit(32).alias("height"),
            pl.lit("png").alias("encoding"),
            pl.Series("data", [drawn[row % 50] for row in range(len(own))]),
        )
        files.append(part_of(folder, PICTURES, rows, f"{start:08}"))
    use_memory(size * 32 * 32 * 3 / 100 / 1e9, folder / "work")
    with measured(folder):
        pictures = Pictures([file.path for file in files], ids)
        order = draws.permutation(size)
        for start in range(0, size, 64):
            pictures[order[start : start + 64]]


def run_shapes(size: int, folder: Path) -> None:
    from schemas.threedos import MEMBERS, TrackSettings
    from tasks.threedos.splits import plan_splits, split_track
    from tasks.threedos.tracks import built_in_tracks

    (track,) = (track for track in built_in_tracks() if track.name == "SN1")
    groups = [*track.known, *track.unknown]
    classes = [name for group in groups for name in group.classes]
    rows = pl.DataFrame({"sample_id": named("shapenet/0/", size)}).with_columns(
        pl.lit("shapenet").alias("source"),
        pl.Series("class", classes).gather(np.arange(size) % len(classes)),
        pl.Series("split", ["train", "train", "valid", "test"]).gather(
            np.arange(size) // len(classes) % 4
        ),
        pl.lit(None, pl.String).alias("class_name"),
    )
    missing = {column.name: None for column in MEMBERS.columns if column.name not in rows.columns}
    part = part_of(folder, MEMBERS, rows.with_columns(**missing))
    with measured(folder):
        for shard in plan_splits((part,), [track]):
            (splits,) = split_track(shard, TrackSettings()).tables.values()
            split_track.writes(TrackSettings())[0].check(splits)


def run_images(size: int, folder: Path) -> None:
    from schemas.semantic import IMAGES, TrialSettings
    from tasks.semantic.trials import make_trial, plan_trials, resolve_subsets

    parts = []
    for start in range(0, size, 10_000):
        ids = named("imagenet/train/", size)[start : start + 10_000]
        rows = pl.DataFrame({"sample_id": ids}).with_columns(
            pl.lit("mine").alias("dataset"),
            pl.lit("mine").alias("source"),
            pl.concat_str(
                pl.lit("n"), pl.int_range(pl.len()).mod(1000).cast(pl.String).str.zfill(8)
            ).alias("class"),
            pl.lit(None, pl.String).alias("split"),
            pl.col("sample_id").alias("file"),
            *(pl.lit(64).alias(name) for name in ("width", "height")),
            pl.lit("jpeg").alias("format"),
            pl.lit("RGB").alias("mode"),
        )
        others = {
            column.name: pl.lit(None if column.nullable else "x")
            for column in IMAGES.columns
            if column.name not in rows.columns
        }
        parts.append(part_of(folder, IMAGES, rows.with_columns(**others), "mine"))
    with measured(folder):
        images = pl.concat([part.read(["dataset", "class", "class_name"]) for part in parts])
        (subset,) = resolve_subsets((), images)
        shard = plan_trials([subset], parts)[0]
        (splits,) = make_trial(shard, TrialSettings()).tables.values()
        make_trial.writes(TrialSettings())[0].check(splits)


def run_predictor(name: str, size: int, folder: Path) -> None:
    from tasks.learning.memory import new_scratch, use_memory
    from tasks.predictors import find_predictor
    from tasks.predictors.base import Examples

    labels = 400
    drawn, codes = clustered(size + 1000, labels)
    features = new_scratch().array(drawn.shape, drawn.dtype)
    features[:] = drawn
    del drawn
    names = pl.Series(codes[:size]).cast(pl.String)
    use_memory(0.1, folder / "work")
    predictor = find_predictor(name)("small", device="cpu")
    with measured(folder):
        predictor.fit(Examples(features[:size], names))
        predictor.predict(features[size:])


def run_neighbours(size: int, folder: Path) -> None:
    from tasks.learning.memory import new_scratch
    from tasks.learning.neighbours import nearest

    draws = np.random.default_rng(0)
    features = new_scratch().array((size, WIDTH), np.float32)
    for start in range(0, size, 10_000):
        block = features[start : start + 10_000]
        block[:] = draws.standard_normal(block.shape, np.float32)
    with measured(folder):
        nearest(features[:2048], features, k=2, metric="cosine")


SIDES: dict[str, tuple[int, Callable[[int, Path], None]]] = {
    "clips": (650_000, run_clips),
    "pictures": (132_673, run_pictures),
    "shapes": (51_127, run_shapes),
    "images": (1_300_000, run_images),
    "ann": (63_000, lambda size, folder: run_predictor("ann", size, folder)),
    "gmm_finch": (63_000, lambda size, folder: run_predictor("gmm_finch", size, folder)),
    "evm": (63_000, lambda size, folder: run_predictor("evm", size, folder)),
    "neighbours": (630_000, run_neighbours),
}
OWN_STEPS = {
    **dict.fromkeys(("ann", "gmm_finch", "evm"), (6 / 63, 20 / 63, 1.0)),
    "neighbours": (0.01, 0.1, 1.0),
}


# ---------------------------------------------------------------- measuring


def anonymous() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@contextmanager
def measured(folder: Path) -> Iterator[None]:
    """Prints what the work inside took, as JSON."""
    import torch

    torch.set_num_threads(1)
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    start = resource.getrusage(resource.RUSAGE_SELF)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    end = resource.getrusage(resource.RUSAGE_SELF)
    seconds = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    size = sum(file.stat().st_size for file in folder.glob("*.parquet"))
    found = {"seconds": seconds, "peak": max(0, peak - before), "bytes": size}
    print(json.dumps({**found, "resident": end.ru_maxrss * 1024}))


def measure(side: str, size: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.growth", "--side", side, "--size", str(size)]
    threads = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | threads)
    if done.returncode:
        sys.exit(f"{side} at {size:,} failed")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {"size": size, **found}


def exponent(rows: list[dict[str, float]]) -> float:
    """Of the larger half of the sizes: seconds = a * size ** b."""
    later = rows[len(rows) // 2 :] if len(rows) > 3 else rows
    logs = np.log([[row["size"], max(row["seconds"], 1e-3)] for row in later])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def draw(path: Path, found: dict[str, list[dict[str, float]]]) -> None:
    """Both costs against rows; each line has its name at its end, faint ones show the slopes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    panels = (("seconds", 1, "processor seconds"), ("peak", 1e-6, "peak anonymous memory, MB"))
    for axis, (what, unit, title) in zip(axes, panels, strict=True):
        ends: list[tuple[float, float, str, Any]] = []
        for side, rows in found.items():
            costs = [row[what] * unit for row in rows]
            (line,) = axis.plot([row["size"] for row in rows], costs, "o-", ms=4, lw=1.8)
            ends.append((math.log10(costs[-1]), rows[-1]["size"], side, line.get_color()))
        axis.set(xscale="log", yscale="log", xlabel="rows", title=title)
        bottom, top = axis.get_ylim()
        axis.set(xlim=(500, 1e7), ylim=(bottom, top))
        lift, placed = math.log10(top / bottom) / 24, list[tuple[float, float]]()
        for height, size, side, color in sorted(ends):
            beside = (other + lift for other, where in placed if abs(math.log(size / where)) < 2)
            placed.append((max([height, *beside]), size))
            text = axis.text(1.2 * size, 10 ** placed[-1][0], side, color=color, va="center")
            text.set_bbox({"color": "white", "alpha": 0.7, "pad": 1})
        for slope, style, powers in ((1, "-", range(-6, 6)), (2, "--", range(-9, 6, 3))):
            for power in powers:
                ends_at = (1e3, 10.0**power), (1e4, 10.0 ** (power + slope))
                guide = axis.axline(*ends_at, color="0.8", lw=0.8, ls=style, zorder=0)
            guide.set_label("rows" if slope == 1 else "rows ** 2")
        axis.legend(loc="upper left", title="as fast as", fontsize=8, title_fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.02, help="of the full sizes")
    parser.add_argument("--sides", default=",".join(SIDES), help="names, by commas")
    parser.add_argument("--plot", type=Path, help="where to draw the costs")
    parser.add_argument("--json", type=Path, help="keeps what was measured, for --plot later")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        with tempfile.TemporaryDirectory() as folder:
            SIDES[options.side][1](options.size, Path(folder))
        return
    found: dict[str, list[dict[str, float]]] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    for side in filter(None, options.sides.split(",")):
        full = SIDES[side][0] * options.share
        sizes = [max(1000, math.ceil(full * step)) for step in OWN_STEPS.get(side, STEPS)]
        found[side] = []
        for size in sorted(set(sizes)):
            row = measure(side, size)
            found[side].append(row)
            print(
                f"{side:12}{size:>10,}{row['seconds']:9.2f} s{row['peak'] / 1e6:9.0f} MB"
                f"{row['bytes'] / 1e6:9.1f} MB on disk{row['resident'] / 1e9:8.2f} GB resident",
                flush=True,
            )
        if len(found[side]) > 1:
            print(f"{side:12}seconds grow with size ** {exponent(found[side]):.2f}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found))
    if options.plot:
        draw(options.plot, found)


if __name__ == "__main__":
    main()
