"""Agents on held-out features of a lake's benchmarks, beside 1-nearest-neighbour and Ward linkage.

    python -m benchmarks.condda_agents LAKE[:BENCHMARK] … [--agent clustering] [--seeds 0,1,2]

Tests are generated (`novelty condda make-tests`) of every benchmark of each lake, a quarter of
them without a change. Agent and yardstick get the same rows, one round after the other; neither is
told how many novel classes there are (`--told`: both are). Prints, over all tests of all seeds:
accuracy of discovery, accuracy of all rows, K + 1 accuracy, changes missed, early alarms, false
alarms in tests without a change, and the median delay, where a missed change is one of all rows
that are left.

The yardstick is 20 lines: far is beyond 95 % of the held-out examples, 4 far rows of 8 are a
change, far rows after it are clusters of Ward linkage, as many as the silhouette says.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from schemas.condda import TestSettings
from schemas.errors import NoveltyError
from storage.raw import open_raw
from tasks.condda.agent import Agent, AgentSettings, TestInfo, Training
from tasks.condda.build import read_features
from tasks.condda.characterization import characterize
from tasks.condda.from_lake import tests_of_lake
from tasks.condda.metrics import Columns
from tasks.condda.test_files import TestLibrary, features_file
from tasks.predictors import find_predictor

BENCHMARKS = ("kowl", "novelcraft", "semantic", "threedos")
SCENARIOS = ("sudden", "gradual", "staggered", "recurring")
MEASURES = ("discovery_accuracy", "full_accuracy", "k_plus_1_accuracy")


@dataclass(frozen=True)
class Stream:
    """Examples of known classes 0..K-1, and the rows of a test; labels below 0 are novel."""

    examples: np.ndarray
    labels: np.ndarray
    known: int
    rows: np.ndarray
    classes: np.ndarray
    """Known classes from 1, novel ones below 0."""
    round_size: int
    groups: np.ndarray | None = None
    """Of the examples."""

    @property
    def novel(self) -> np.ndarray:
        return self.classes < 0

    @property
    def number(self) -> int:
        return len(np.unique(self.classes[self.novel]))


Answer = tuple[np.ndarray, list[np.ndarray]]
"""P(world changed) of each row, and a block of characterization for each round."""


def yardstick(test: Stream, told: bool) -> Answer:
    """1-nearest-neighbour and Ward linkage, without any setting of ours."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    held = np.random.default_rng(0).random(len(test.labels)) < 0.3
    away = cdist(test.rows, test.examples[~held])
    far = away.min(1) > np.quantile(cdist(test.examples[held], test.examples[~held]).min(1), 0.95)
    changed = np.maximum.accumulate(np.convolve(far, np.ones(8))[: len(far)] >= 4)
    column: dict[int, int] = {}
    blocks = []
    for first in range(0, len(test.rows), test.round_size):
        rows = np.arange(first, min(first + test.round_size, len(test.rows)))
        near = 1 + test.labels[~held][away[rows].argmin(1)]
        chosen = np.where(far[rows], 0, near)
        pool = np.flatnonzero((far & changed)[: rows[-1] + 1])
        if len(pool) > 2:
            tree = linkage(test.rows[pool], "ward")
            count = test.number if told else best_count(test.rows[pool], tree)
            clusters = fcluster(tree, max(count, 1), "maxclust") - 1
            width = max([clusters.max(), *column.values()]) + 1
            shared = np.zeros((clusters.max() + 1, width))
            for row, cluster in zip(pool, clusters, strict=True):
                shared[cluster, column.get(row, 0)] += row in column
            matched = linear_sum_assignment(-shared)[1]
            column = dict(zip(pool.tolist(), matched[clusters].tolist(), strict=True))
            for place, row in enumerate(rows):
                if row in column:
                    chosen[place] = 1 + test.known + column[row]
        blocks.append(np.eye(1 + test.known + max([-1, *column.values()]) + 1)[chosen])
    return changed.astype(float), blocks


def best_count(rows: np.ndarray, tree: np.ndarray) -> int:
    """The number of clusters, 2 to 8, with the best silhouette; 1 if none is above 0.1."""
    from scipy.cluster.hierarchy import fcluster
    from sklearn.metrics import silhouette_score

    values = {1: 0.1}
    for count in range(2, min(8, len(rows) - 1) + 1):
        clusters = fcluster(tree, count, "maxclust")
        if 1 < len(np.unique(clusters)) < len(rows):
            values[count] = float(silhouette_score(rows, clusters))
    return max(values, key=lambda count: values[count])


def led(test: Stream, name: str, seed: int, told: bool, settings: dict | None = None) -> Answer:
    """An agent of the project through the test."""
    kind = find_predictor(name)
    settings = dict(settings or {})
    own = AgentSettings(**settings.pop("agent", {}))
    agent = Agent(kind(kind.resolve(None, settings), device="cpu"), own, seed)
    ids = [f"{row:06d}" for row in range(len(test.labels))]
    known = tuple(f"{label:03d}" for label in range(test.known))
    agent.fit(Training(ids, test.examples, test.labels, known, test.groups))
    agent.start(TestInfo("test", "CONDDA", test.known, test.number if told else None))
    chances, blocks = [], []
    for first in range(0, len(test.rows), test.round_size):
        part = test.rows[first : first + test.round_size]
        names = [f"row {first + row}" for row in range(len(part))]
        chances.append(agent.detect(part, names))
        blocks.append(agent.characterize(part, names))
    return np.concatenate(chances), blocks


def measured(test: Stream, answer: Answer) -> dict[str, float | None]:
    """Measures after novelty, delay, and what went wrong with the alarm."""
    chances, blocks = answer
    alarm = int((chances > 0.5).argmax()) if (chances > 0.5).any() else None
    if not test.novel.any():
        return {"false_alarm": float(alarm is not None)}
    frame = characterize(blocks, test.classes, test.novel, Columns(test.known, "first"))
    values = dict(frame.filter(part="post").select("metric", "value").rows())
    first = int(test.novel.argmax())
    found: dict[str, float | None] = {name: values[name] for name in MEASURES}
    found["missed"] = float(alarm is None)
    found["early"] = float(alarm is not None and alarm < first)
    late = len(test.rows) if alarm is None else alarm
    found["delay"] = None if late < first else late - first
    return found


def streams(
    lake: Path, benchmark: str, seed: int, tests: int, unchanged: float = 0.25
) -> list[Stream]:
    """Generated tests of a benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        settings = TestSettings(scenario=SCENARIOS, tests=tests, seed=seed, unchanged=unchanged)
        try:
            made = tests_of_lake(lake, benchmark, out, settings)
        except NoveltyError as error:
            print(f"{benchmark}: {error}; only scenario sudden", file=sys.stderr)
            settings = settings.model_copy(update={"scenario": ("sudden",)})
            made = tests_of_lake(lake, benchmark, out, settings)
        files = {file.name: file for file in open_raw(out).files()}
        found = []
        for name in made["test_id"]:
            test = TestLibrary(out).load(name, "CONDDA", "novelty")
            training, features = read_features(out, files[features_file(name)], "first")
            found.append(
                Stream(
                    training.features,
                    training.labels,
                    test.metadata["known_classes"],
                    features.of(test.names),
                    test.labels,
                    test.metadata["round_size"],
                    training.groups,
                )
            )
        return found


def compared(
    tests: Sequence[tuple[int, Stream]], agent: str, told: bool, settings: dict | None = None
) -> pl.DataFrame:
    """One row for the agent, one for the yardstick."""
    rows = []
    ways = {
        agent: lambda seed, test: led(test, agent, seed, told, settings),
        "1-NN + Ward": lambda seed, test: yardstick(test, told),
    }
    for way, run in ways.items():
        found = [measured(test, run(seed, test)) for seed, test in tests]
        frame = pl.DataFrame(found, infer_schema_length=None)
        means = [pl.col(name).mean() for name in frame.columns if name != "delay"]
        row = frame.select(*means, *([pl.col("delay").median()] if "delay" in frame else []))
        rows.append(row.select(pl.lit(way).alias("agent"), pl.all()))
    return pl.concat(rows, how="diagonal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lakes", nargs="*", help="LAKE or LAKE:BENCHMARK")
    parser.add_argument("--agent", default="clustering")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tests", type=int, default=8, help="tests of each seed")
    parser.add_argument("--unchanged", type=float, default=0.25, help="share without a change")
    parser.add_argument("--told", action="store_true", help="tell the number of novel classes")
    parsed = parser.parse_args()
    if not parsed.lakes:
        print("name a lake with runs that give features; docs/condda.md has numbers")
    for text in parsed.lakes:
        lake, _, name = text.partition(":")
        for benchmark in [name] if name else BENCHMARKS:
            if not (Path(lake) / benchmark).exists():
                continue
            seeds = [int(seed) for seed in parsed.seeds.split(",")]
            tests = [
                (seed, test)
                for seed in seeds
                for test in streams(Path(lake), benchmark, seed, parsed.tests, parsed.unchanged)
            ]
            one = tests[0][1]
            print(
                f"{text} {benchmark}: {len(tests)} tests of {len(one.rows)} rows, {one.known} "
                f"known classes, {len(one.labels)} examples of {one.examples.shape[1]} features"
            )
            with pl.Config(tbl_cols=-1, tbl_width_chars=160, float_precision=3):
                print(compared(tests, parsed.agent, parsed.told))


if __name__ == "__main__":
    main()
