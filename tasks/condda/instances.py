"""What the ground truth says of each instance of a test, in the words of the shared tables.

Enters: a test file and, where there are, its training examples. Leaves: rows of `samples` and
`splits`. The truth is for those who measure; nothing of it is served to an agent.
"""

import hashlib
from pathlib import PurePosixPath

import numpy as np
import polars as pl

from schemas.tables import SAMPLES, SPLITS
from tasks.condda.agent import FeatureLookup, Training
from tasks.condda.lookup import known_classes, round_size
from tasks.condda.test_files import TRUTH, TestFile

FEATURES = "features"
EXAMPLE = "example"


def protocol_name(protocol: str, domain: str, test: str) -> str:
    """A test as a protocol of the shared tables."""
    return f"{protocol}/{domain}/{test}"


def name_of(test: TestFile) -> str:
    return protocol_name(test.protocol, test.domain.name, test.test_id)


def features_file(test: str) -> str:
    """Where the features of a test are, below the folder of tests."""
    return str(PurePosixPath(FEATURES) / f"{test}.npz")


def count_known(test: TestFile) -> int:
    """K, the number of known classes: what the metadata says, else the labels."""
    said = known_classes(test.metadata)
    if said is None:
        return max(1, int(test.labels.max(initial=0)) + 1 - test.domain.first_label)
    return max(1, said - test.domain.unknown_counted)


def class_text(test: TestFile, label: int) -> str:
    """The class of a label: its name where the metadata has names, else the label itself."""
    place = label - test.domain.first_label
    known = test.metadata.get("known_class_names")
    if isinstance(known, list) and 0 <= place < len(known):
        return str(known[place])
    novel = test.metadata.get("novel_class_names")
    if isinstance(novel, dict) and str(label) in novel:
        return str(novel[str(label)])
    return str(label)


def instance_rows(test: TestFile) -> pl.DataFrame:
    """sample_id, position, step, class, label and role of each instance, in the test's order.

    An instance is novel where the truth says so of the instance; a domain whose truth tells only
    whether the world has changed says so by the class, which is then not among the known ones.
    """
    place = test.labels - test.domain.first_label
    is_known = (place >= 0) & (place < count_known(test))
    novel = ~is_known
    if test.domain.novel != test.domain.changed:
        novel = test.truth[test.domain.novel].to_numpy() != 0
    position = np.arange(len(test.names), dtype=np.int32)
    texts = {label: class_text(test, label) for label in np.unique(test.labels).tolist()}
    return pl.DataFrame(
        {
            "sample_id": [f"{name_of(test)}/{name}" for name in test.names],
            "position": position,
            "step": position // round_size(test.metadata, test.test_id),
            "class": [texts[label] for label in test.labels.tolist()],
            "label": pl.Series(np.where(is_known & ~novel, place, -1), dtype=pl.Int32),
            "role": np.where(novel, "novel", "known").astype(np.str_).tolist(),
        },
        schema_overrides={"class": pl.String, "sample_id": pl.String, "role": pl.String},
    ).with_columns(pl.col("label").replace(-1, None))


def example_ids(test: TestFile, count: int) -> list[str]:
    """Sample ids of the training examples of a test."""
    return [f"{name_of(test)}/{EXAMPLE}/{number:08d}" for number in range(count)]


def sample_frames(
    test: TestFile, given: tuple[Training, FeatureLookup] | None
) -> dict[str, pl.DataFrame]:
    """`samples` and `splits` of the instances and, where there are features, of the examples."""
    digests = [None] * len(test.names) if given is None else row_digests(given[1].of(test.names))
    rows = instance_rows(test).with_columns(
        split=pl.lit("test"),
        sequence=pl.lit(name_of(test)),
        source=pl.lit(f"{name_of(test)}{TRUTH}"),
        digest=pl.Series(digests, dtype=pl.String),
    )
    if given is not None:
        training, shift = given[0], test.domain.first_label
        examples = pl.DataFrame(
            {
                "sample_id": example_ids(test, len(training.labels)),
                "class": [class_text(test, label + shift) for label in training.labels.tolist()],
                "label": pl.Series(training.labels, dtype=pl.Int32),
                "digest": row_digests(training.features),
            }
        ).with_columns(
            step=pl.lit(0, pl.Int32),
            role=pl.lit("known"),
            split=pl.lit("train"),
            source=pl.lit(features_file(test.test_id)),
        )
        rows = pl.concat([rows, examples], how="diagonal")
    rows = rows.with_columns(
        modality=pl.lit("features"),
        protocol=pl.lit(name_of(test)),
        subset=pl.lit(None, pl.String),
    )
    tables = (SAMPLES, SPLITS)
    return {table.name: table.conform(rows.select(*table.polars_schema)) for table in tables}


def row_digests(features: np.ndarray) -> list[str]:
    """A digest of each row as an agent gets it."""
    kind = features.dtype.str.encode()
    return [hashlib.sha256(kind + row.tobytes()).hexdigest()[:32] for row in features]
