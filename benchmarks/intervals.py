"""Bootstrap intervals of all metrics of a convention, against a loop over `evaluate`.

Both sides get the same samples and run on one core; seconds are of the processor. The loop repeats
rows and evaluates them for a few draws, its time is scaled to all of them, and our values of these
draws must agree with it. With sequences ours draws sequences of ten samples; the loop never does.

`python -m benchmarks.intervals`
"""

import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from tasks.evaluation.conventions import find_convention
from tasks.evaluation.intervals import intervals, resampled
from tasks.evaluation.metrics import evaluate

DRAWS = 1_000
LOOPED = {140: 100, 10_000: 20}
SIDES = (
    # convention, weights, classes, sequences
    ("openood", False, False, False),
    ("openood", False, True, True),
    ("novelcraft-2022", False, False, False),
    ("openood", True, False, False),
)


def best(run: Callable[[], object], times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure(size: int, name: str, weighted: bool, classified: bool, sequenced: bool) -> None:
    generator = np.random.default_rng(0)
    convention = find_convention(name)
    novel = np.arange(size) >= size // 2
    scores = generator.normal(novel * 1.5)
    weights = generator.random(size) if weighted else None
    classes = (generator.integers(0, 5, size), generator.integers(0, 5, size))
    sequences = [f"s{row // 10}" for row in range(size)] if sequenced else None
    given = classes if classified else None

    counts = np.zeros((LOOPED[size], size), dtype=np.int64)
    for draw in counts:
        for side in (np.flatnonzero(novel), np.flatnonzero(~novel)):
            draw += np.bincount(generator.choice(side, side.size), minlength=size)

    def loop() -> list[list[float | None]]:
        found = []
        for draw in counts:
            rows = np.arange(size).repeat(draw)
            again = None if given is None else (given[0][rows], given[1][rows])
            weight = None if weights is None else weights[rows]
            frame = evaluate(scores[rows], novel[rows], convention, weight, again)
            found.append(frame["value"].to_list())
        return found

    def ours() -> object:
        return intervals(
            scores,
            novel,
            convention,
            weights=weights,
            classes=given,
            sequences=sequences,
            seed=0,
            draws=DRAWS,
        )

    expected = np.array(loop(), dtype=float)
    values = resampled(scores, novel, convention, counts, weights=weights, classes=given)
    if not np.allclose(values.to_numpy(), expected, rtol=0, atol=1e-9, equal_nan=True):
        sys.exit(f"the two sides disagree under {name}")
    ours()
    mine, naive = best(ours), best(loop) * DRAWS / LOOPED[size]
    tracemalloc.start()
    ours()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    flags = ((weighted, "weights"), (classified, "classes"), (sequenced, "sequences"))
    label = ", ".join([name, *(word for flag, word in flags if flag)])
    print(f"{size:>7,}  {label:<30} {mine:8.3f} {naive:8.1f} {naive / mine:7.0f} {peak:8.1f}")


def main() -> None:
    print(f"{DRAWS:,} draws")
    print(f"{'samples':>7}  {'':<30} {'ours s':>8} {'loop s':>8} {'ratio':>7} {'peak MB':>8}")
    for size in LOOPED:
        for side in SIDES:
            measure(size, *side)


if __name__ == "__main__":
    main()
