"""Frozen backbone and linear head on held-out classes: mean over members, interval over them.

    python -m benchmarks.backbone LAKE

LAKE has runs of `backbone` (and perhaps `classifier`) on all trials of a set with several seeds.
Prints AUROC and average precision of every score in percent: the mean over members and seeds, its
deviation from seed to seed, and half of its 95 % interval over members (Student's t).
"""

import argparse
from pathlib import Path

import polars as pl
from scipy import stats

from storage.tables import current_version

METRICS = {"auroc": "openood", "average_precision": "semantic", "acc": "openood"}


def table_of(lake: Path) -> pl.DataFrame:
    """model, score, metric, members, seeds, mean, deviation over seeds, half of the interval."""
    metrics = current_version(lake, "semantic", "metrics").read().filter(split="test")
    wanted = pl.col("metric").replace_strict(METRICS, default=None) == pl.col("convention")
    rows = metrics.filter(wanted).with_columns(pl.col("value") * 100)
    key = ["model", "score", "metric"]
    seeds = rows.group_by(*key, "seed").agg(pl.col("value").mean())
    members = rows.group_by(*key, "protocol").agg(pl.col("value").mean())
    over_seeds = seeds.group_by(key).agg(
        pl.len().alias("seeds"), pl.col("value").std().alias("deviation")
    )
    found = members.group_by(key).agg(
        pl.len().alias("members"), pl.col("value").mean().alias("mean"), pl.col("value").std()
    )
    quantile = pl.col("members").map_elements(
        lambda count: float(stats.t.ppf(0.975, count - 1)), pl.Float64
    )
    half = quantile * pl.col("value") / pl.col("members").sqrt()
    return found.select(*key, "members", "mean", half.alias("half")).join(over_seeds, on=key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lake", type=Path, nargs="?")
    lake = parser.parse_args().lake
    if lake is None:
        print("name a lake with runs of `backbone`; docs/semantic.md has the command")
        return
    rows = table_of(lake).sort("metric", "mean", descending=True)
    with pl.Config(tbl_rows=-1, tbl_cols=-1, float_precision=2, tbl_width_chars=140):
        print(rows)


if __name__ == "__main__":
    main()
