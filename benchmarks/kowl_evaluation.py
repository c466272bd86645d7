"""KOWL-718's evaluation of one split, and the density of GMM-FINCH: time and peak memory.

`python -m benchmarks.kowl_evaluation` runs each side in its own process:
- `sparse` (ours) and `dense` (a straightforward numpy program: sort every row, one C x C matrix per
  rank, labels merged by products with a membership matrix): top-5 ordered confusion matrices of
  68,849 predictions over 719 labels, three reductions, accuracy, MCC and NMI of each. Both must
  agree.
- `density`: log densities of 8,192 samples under 4,000 Gaussian components in 768 dimensions, with
  float64 and the paper's epsilon; peak memory above that of the imports is printed.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

SAMPLES, LABELS, KNOWN, RANKS = 68_849, 719, 409, 5
COMPONENTS, WIDTH, QUERIES, PER_COMPONENT = 4000, 768, 8192, 6
MEASURES = ("accuracy", "mcc", "nmi")
Numbers = dict[str, float]


def megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * 1024 / 1e6 if sys.platform != "darwin" else peak / 1e6


def predictions() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Labels, targets as column numbers, and probabilities that are right for most samples."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((SAMPLES, LABELS), np.float32)
    target = random.integers(0, LABELS, SAMPLES)
    logits[np.arange(SAMPLES), target] += random.normal(3.5, 1.5, SAMPLES)
    logits -= logits.max(1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(1, keepdims=True)
    return [f"label {number:03}" for number in range(LABELS)], target, logits


def timed(work: Callable[[], Numbers], repeats: int = 3) -> tuple[list[float], Numbers]:
    seconds, found = [], {}
    for _ in range(repeats):
        started = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - started)
    return seconds, found


def run_sparse() -> dict:
    import polars as pl

    from tasks.kowl.confusion import REDUCTIONS, count, measure, reduce, top_k

    labels, target, probabilities = predictions()
    targets = pl.Series(labels).gather(target)

    def work() -> Numbers:
        counts = count(targets, top_k(probabilities, RANKS), labels)
        found = {}
        for reduction in REDUCTIONS[1:]:
            measured = measure(reduce(counts, labels[:KNOWN], reduction))
            for metric, value in measured.select("metric", "value").iter_rows():
                if metric in MEASURES:
                    found[f"{reduction} {metric}"] = value
        return found

    before = megabytes()
    seconds, found = timed(work)
    return {"seconds": seconds, "found": found, "megabytes": megabytes() - before}


def run_dense() -> dict:
    _, target, probabilities = predictions()
    known = np.arange(LABELS) < KNOWN

    def merged(matrices: np.ndarray, groups: np.ndarray) -> np.ndarray:
        member = np.eye(groups.max() + 1)[groups]
        return member.T @ matrices @ member

    def measured(matrix: np.ndarray) -> Numbers:
        total, hits = matrix.sum(), np.trace(matrix)
        true, guess = matrix.sum(1), matrix.sum(0)
        bottom = np.sqrt(total**2 - (guess**2).sum()) * np.sqrt(total**2 - (true**2).sum())
        share = matrix / total
        outer = np.outer(true, guess) / total**2
        filled = share > 0
        information = (share[filled] * np.log(share[filled] / outer[filled])).sum()
        entropies = [-(p[p > 0] * np.log(p[p > 0])).sum() for p in (true / total, guess / total)]
        return {
            "accuracy": hits / total,
            "mcc": (hits * total - true @ guess) / bottom,
            "nmi": information / np.mean(entropies),
        }

    def work() -> Numbers:
        order = np.argsort(probabilities, axis=1)[:, ::-1][:, :RANKS]
        matrices = np.zeros((RANKS, LABELS, LABELS))
        for rank in range(RANKS):
            np.add.at(matrices[rank], (target, order[:, rank]), 1)
        everything = np.arange(LABELS)
        groups = {
            "classification": np.where(known, everything, KNOWN),
            "detection": np.where(known, 0, 1),
            "recognition": np.where(known, 0, everything - KNOWN + 1),
        }
        return {
            f"{name} {metric}": float(value)
            for name, places in groups.items()
            for metric, value in measured(merged(matrices, places)[0]).items()
        }

    before = megabytes()
    seconds, found = timed(work, repeats=1)
    return {"seconds": seconds, "found": found, "megabytes": megabytes() - before}


def run_density() -> dict:
    import torch

    from tasks.predictors.gmm_finch import Mixture

    random = np.random.default_rng(0)
    parts = [
        (number // 8, random.normal(size=(PER_COMPONENT, WIDTH)).astype(np.float32))
        for number in range(COMPONENTS)
    ]
    queries = random.normal(size=(QUERIES, WIDTH)).astype(np.float32)
    torch.linalg.svd(torch.eye(4))
    before = megabytes()
    started = time.perf_counter()
    mixture = Mixture.fit(parts, np.zeros(WIDTH), 1e-12, torch.float64, "cpu")
    fitted = time.perf_counter()
    density = mixture.log_density(queries, COMPONENTS // 8)
    done = time.perf_counter()
    assert density.shape == (QUERIES, COMPONENTS // 8) and bool(torch.isfinite(density).all())
    return {
        "fit": fitted - started,
        "density": done - fitted,
        "megabytes": megabytes() - before,
        "rows": len(mixture.basis),
    }


SIDES: dict[str, Callable[[], dict]] = {
    "sparse": run_sparse,
    "dense": run_dense,
    "density": run_density,
}


def measure_side(side: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.kowl_evaluation", "--side", side]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def compare() -> None:
    sparse, dense = measure_side("sparse"), measure_side("dense")
    for name, value in dense["found"].items():
        if abs(sparse["found"][name] - value) > 1e-9:
            sys.exit(f"the two sides disagree on {name}: {sparse['found'][name]} and {value}")
    print(f"{SAMPLES:,} x {LABELS}: top-{RANKS} matrices, 3 reductions, 9 measures; equal values")
    for name, side in (("sparse", sparse), ("dense", dense)):
        best = min(side["seconds"])
        print(f"{name:10}{best:8.2f} s (best of {len(side['seconds'])})", end="")
        print(f"{side['megabytes']:10.0f} MB above the predictions")
    print(f"{'ratio':10}{min(dense['seconds']) / min(sparse['seconds']):8.1f}")
    density = measure_side("density")
    print(f"densities of {QUERIES:,} samples, {COMPONENTS:,} components, {WIDTH} dimensions:")
    print(
        f"{'':10}{density['density']:8.1f} s, {density['megabytes']:.0f} MB above the data; ",
        end="",
    )
    print(f"fit {density['fit']:.1f} s, {density['rows']:,} basis rows")
    full = COMPONENTS * WIDTH**2 * 8 / 1e6
    print(f"{'':10}full covariances alone would take {full:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        compare()
    else:
        print(json.dumps(SIDES[options.side]()))


if __name__ == "__main__":
    main()
