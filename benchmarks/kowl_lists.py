"""Nine Kinetics lists to one Parquet row per sample with its increment: time and peak memory.

`python -m benchmarks.kowl_lists` runs, each in its own process, our polars functions and a plain
pandas program (outer merges, then one mask over the table per label, as the released KOWL-718 code
selects its datasets; our own code, with one column compared where theirs compares the whole frame).
Both must give the same counts per increment. The lists are found through NOVELTY_SHARED.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SPLITS = ("train", "validate", "test")
RELEASES = ("kinetics400", "kinetics600", "kinetics700_2020")
SHARED = Path(os.environ.get("NOVELTY_SHARED", Path(__file__).parents[2] / "shared"))
LISTS = SHARED / "data" / "kinetics"


def list_file(release: str, split: str) -> Path:
    partial = "_partial" if (release, split) == ("kinetics400", "train") else ""
    return LISTS / f"{release}_{split}{partial}.csv.gz"


def run_ours(target: Path) -> None:
    import polars as pl

    from tasks.kowl.increments import assign_increments
    from tasks.kowl.lists import Release, read_release
    from tasks.kowl.unify import unify

    releases = [
        Release(
            name=name, order=i, files={split: (str(list_file(name, split)),) for split in SPLITS}
        )
        for i, name in enumerate(RELEASES)
    ]
    rows = pl.concat(read_release(r, lambda file: Path(file).read_bytes()).rows for r in releases)
    clips = unify(rows, RELEASES).clips
    assign_increments(clips, releases=RELEASES).increments.write_parquet(target)


def run_pandas(target: Path) -> None:
    """The same result the slow way: merge, then one label mask after another."""
    import numpy as np
    import pandas as pd

    from tasks.kowl.policies import RENAMES

    key = ["youtube_id", "time_start", "time_end"]
    table = None
    for release in RELEASES:
        lists = [pd.read_csv(list_file(release, split)) for split in SPLITS]
        frame = pd.concat(lists).reindex(columns=["label", *key, "split"])
        frame = frame.rename(columns={c: f"{c}_{release}" for c in ("label", "split")})
        table = frame if table is None else table.merge(frame, how="outer", on=key)
    table["sample_id"] = (
        table["youtube_id"]
        + "_"
        + table["time_start"].astype(str).str.zfill(6)
        + "_"
        + table["time_end"].astype(str).str.zfill(6)
    )
    oldest = table["label_kinetics400"].replace(
        {rename.old: rename.new for rename in RENAMES["kinetics400_renames"]}
    )
    table["label"] = table["label_kinetics700_2020"].fillna(table["label_kinetics600"])
    table["label"] = table["label"].fillna(oldest)
    table["label"] = table["label"].replace(
        {rename.old: rename.new for rename in RENAMES["football_case"]}
    )
    labels = sorted(table["label"].dropna().unique())

    taken = pd.Series(False, index=table.index)
    parts = {}
    for release in RELEASES:
        listed = table[f"split_{release}"]
        for split in SPLITS:
            if table.loc[listed == split, f"label_{release}"].isna().all():
                continue
            mask = pd.Series(False, index=table.index)
            for label in labels:
                mask |= table["label"] == label
            parts[release, split] = table[mask & (listed == split) & ~taken]
        taken |= listed.notna()

    steps, random = 5, np.random.default_rng(0)
    known = set(parts["kinetics400", "train"]["label"])
    results = [
        part.assign(
            split=split, increment=0, role=np.where(part["label"].isin(known), "known", "novel")
        )
        for (release, split), part in parts.items()
        if release == "kinetics400"
    ]
    for number, release in enumerate(RELEASES[1:]):
        train = parts[release, "train"]
        counts = {
            label: count
            for label in labels
            if label not in known and (count := int((train["label"] == label).sum()))
        }
        novel = sorted(counts, key=lambda label: (counts[label], label))
        size = -(-len(novel) // steps)
        step_of = {label: i // size for i, label in enumerate(novel)}
        for split in SPLITS:
            if (release, split) not in parts:
                continue
            part = parts[release, split]
            dealt: dict[int, int] = {}
            for label in labels:
                rows = part[part["label"] == label]
                first = step_of.get(label, 0)
                left = steps - first
                is_known = label in known
                if rows.empty or not (is_known or label in step_of):
                    continue
                folds = np.zeros(len(rows), int)
                if len(rows) > steps if is_known else len(rows) >= left:
                    batch = -1 if is_known else first
                    start = dealt.get(batch, 0)
                    dealt[batch] = start + len(rows)
                    folds = random.permutation((start + np.arange(len(rows))) % left)
                role = np.where(is_known | (folds > 0), "known", "novel")
                increment = 1 + number * steps + first + folds
                results.append(rows.assign(split=split, increment=increment, role=role))
        known |= set(novel)
    columns = ["sample_id", *key, "label", "split", "increment", "role"]
    pd.concat(results)[columns].sort_values("sample_id").to_parquet(target, index=False)


SIDES: dict[str, Callable[[Path], None]] = {"ours": run_ours, "pandas": run_pandas}


def measure(side: str, target: Path) -> dict[str, float]:
    """Seconds from process start, imports included, and peak resident gigabytes."""
    command = [sys.executable, "-m", "benchmarks.kowl_lists", "--side", side, "--to", str(target)]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {"seconds": time.perf_counter() - started, **json.loads(done.stdout)}


def compare() -> None:
    import polars as pl

    if not LISTS.is_dir():
        sys.exit(f"lists not found: {LISTS}; set NOVELTY_SHARED")
    with tempfile.TemporaryDirectory() as folder:
        found, counts = {}, {}
        for side in SIDES:
            target = Path(folder) / f"{side}.parquet"
            found[side] = measure(side, target)
            counts[side] = (
                pl.read_parquet(target, columns=["increment", "split", "role"])
                .group_by(pl.col("increment").cast(pl.Int64), "split", "role")
                .agg(pl.len().alias("samples"))
                .sort("increment", "split", "role")
            )
    if not counts["ours"].equals(counts["pandas"]):
        sys.exit("the two sides disagree on the counts per increment")
    print(f"{counts['ours']['samples'].sum():,} samples in increments, counts equal")
    print(f"{'':10}{'wall s':>10}{'CPU s':>10}{'peak GB':>10}")
    for side, row in found.items():
        print(f"{side:10}{row['seconds']:10.1f}{row['cpu']:10.1f}{row['gigabytes']:10.2f}")
    ratios = [
        found["pandas"][name] / found["ours"][name] for name in ("seconds", "cpu", "gigabytes")
    ]
    print(f"{'ratio':10}" + "".join(f"{ratio:10.1f}" for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        compare()
        return
    SIDES[options.side](options.to)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    kilobytes = usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss / 1024
    cpu = usage.ru_utime + usage.ru_stime
    print(json.dumps({"cpu": cpu, "gigabytes": kilobytes * 1024 / 1e9}))


if __name__ == "__main__":
    main()
