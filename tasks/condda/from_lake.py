"""Tests and their features out of a lake: KOWL's increments, NovelCraft's splits, semantic trials.

Enters: current tables of a lake. Leaves: a folder of test files (`make_tests`) with
`features/<test>.npz` for agents: vectors of the test's instances, and examples of the known classes
from the train split. KOWL has feature tables; frames and pictures go through EfficientNet here.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from schemas.condda import TestSettings
from schemas.errors import ConfigError, LakeError
from schemas.kowl import EXTRACTORS, PLAIN
from storage.atomic import write_bytes
from storage.tables import current_version, current_versions
from tasks.condda.agents.base import FeatureLookup, training_examples
from tasks.condda.make_tests import (
    anonymous_id,
    from_kowl,
    from_novelcraft,
    from_semantic,
    make_tests,
)
from tasks.condda.test_files import TestLibrary

# Frames of an episode are alike: so many, evenly spread, are examples enough of a class.
EXAMPLES_PER_CLASS = 200


def tests_of_lake(
    lake: Path, benchmark: str, out: Path, settings: TestSettings, held_out: Sequence[str] = ()
) -> pl.DataFrame:
    """Write tests and features below `out`; gives one row per test.

    `held_out` names trials of semantic anomalies.
    """
    if held_out and benchmark != "semantic":
        raise ConfigError(f"trials are of semantic anomalies; {benchmark} has none")
    if benchmark == "semantic":
        labelled, embed = _semantic(lake, held_out)
    else:
        labelled, embed = _SOURCES[benchmark](lake)
    made = make_tests(labelled, out, settings)
    library = TestLibrary(out)
    tests = [library.load(row, settings.protocol, "novelty") for row in made["test_id"]]
    real = {
        anonymous_id(name, settings.seed) if settings.anonymous else name: name
        for name in labelled["sample_id"]
    }
    examples = _examples(labelled)
    needed = sorted({real[name] for test in tests for name in test.names} | set(examples))
    features = embed(needed)
    training = training_examples(
        labelled.filter(
            (pl.col("split") != "train") | pl.col("sample_id").is_in(pl.Series(examples).implode())
        ),
        features,
    )
    for test in tests:
        buffer = io.BytesIO()
        np.savez(
            buffer,
            instance_id=np.array(test.names, np.str_),
            features=features.of([real[name] for name in test.names]).astype(np.float32),
            train_features=training.features.astype(np.float32),
            train_labels=training.labels + 1,
        )
        write_bytes(out / "features" / f"{test.test_id}.npz", buffer.getvalue())
    return made


def _examples(labelled: pl.DataFrame) -> list[str]:
    """Train samples of known classes, evenly thinned where a class has many."""
    rows = labelled.filter((pl.col("role") == "known") & (pl.col("split") == "train"))
    rows = rows.sort("class", "sample_id")
    place, size = pl.int_range(pl.len()).over("class"), pl.len().over("class")
    kept = (place * EXAMPLES_PER_CLASS // size) != ((place - 1) * EXAMPLES_PER_CLASS // size)
    return rows.filter((size <= EXAMPLES_PER_CLASS) | kept)["sample_id"].to_list()


Embed = Callable[[list[str]], FeatureLookup]


def _kowl(lake: Path) -> tuple[pl.DataFrame, Embed]:
    there = {version.manifest.table for version in current_versions(lake, "kowl")}
    tables = [f"features_{name}" for name in EXTRACTORS if f"features_{name}" in there]
    if not tables:
        raise LakeError(
            f"no features of KOWL in {lake}; novelty build kowl with --features.extractor first"
        )
    vectors = current_version(lake, "kowl", tables[0]).read().filter(transform=PLAIN)
    increments = current_version(lake, "kowl", "increments").read()
    labelled = from_kowl(increments.join(vectors, on="sample_id", how="semi"))
    return labelled, lambda ids: FeatureLookup.of_table(
        vectors.filter(pl.col("sample_id").is_in(pl.Series(ids).implode()))
    )


def _novelcraft(lake: Path) -> tuple[pl.DataFrame, Embed]:
    import cv2

    labelled = from_novelcraft(current_version(lake, "novelcraft", "splits").read())
    files = current_version(lake, "novelcraft", "images").files

    def embed(ids: list[str]) -> FeatureLookup:
        from tasks.features.efficientnet import embed as efficientnet

        wanted = pl.scan_parquet(files).filter(pl.col("frame_id").is_in(pl.Series(ids).implode()))
        rows = wanted.select("frame_id", "png").collect()
        pictures = [
            cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR_RGB) for png in rows["png"]
        ]
        return FeatureLookup(rows["frame_id"].to_list(), efficientnet(np.stack(pictures)))

    return labelled, embed


def _semantic(lake: Path, held_out: Sequence[str]) -> tuple[pl.DataFrame, Embed]:
    trials = current_version(lake, "semantic", "trials").read()
    files = current_version(lake, "semantic", "pictures").files

    def embed(ids: list[str]) -> FeatureLookup:
        from tasks.features.efficientnet import embed as efficientnet
        from tasks.semantic.cache import PictureCache

        return FeatureLookup(ids, efficientnet(PictureCache.read(files, ids).decode()))

    return from_semantic(trials, held_out), embed


_SOURCES: dict[str, Callable[[Path], tuple[pl.DataFrame, Embed]]] = {
    "kowl": _kowl,
    "novelcraft": _novelcraft,
}
