"""Tables that every benchmark shares, and the register of all tables.

A benchmark's own tables stand in `schemas/<benchmark>.py` as `TABLES`; one of the same name takes
the place of the shared one for that benchmark.
"""

import importlib
import importlib.util
from pathlib import Path

import pyarrow as pa

from schemas.table import Column, Table

SPLIT_NAMES = ("train", "valid", "test")

_RUN = (
    Column("protocol", pa.string(), "Evaluation protocol or track, such as `visual` or `SN1`"),
    Column("detector", pa.string(), "Detector, by the name of its file in tasks/detectors"),
    Column("backbone", pa.string(), "Network or features below it, or its variant; else `none`"),
    Column("seed", pa.int32(), "Seed of the run"),
    Column("split", pa.string(), "Split that was scored"),
)

SAMPLES = Table(
    name="samples",
    description="One row per raw sample that a benchmark knows: where it is and what it is.",
    columns=(
        Column("sample_id", pa.string(), "Stable id of the sample"),
        Column("class", pa.string(), "Class label as text", nullable=True),
        Column("source", pa.string(), "Raw file, relative to the source folder or archive"),
        Column("digest", pa.string(), "Content identity of the raw file"),
        Column("bytes", pa.int64(), "Size of the raw file", unit="byte", minimum=0),
    ),
    key=("sample_id",),
)

SPLITS = Table(
    name="splits",
    description="Which sample is in which split of which protocol, and in which role.",
    columns=(
        Column("protocol", pa.string(), "Evaluation protocol or track"),
        Column("sample_id", pa.string(), "Sample"),
        Column("class", pa.string(), "Class label as text"),
        Column(
            "label", pa.int32(), "Index among the known classes; null if unknown", nullable=True
        ),
        Column("split", pa.string(), "Split", allowed=SPLIT_NAMES),
        Column("role", pa.string(), "Known or novel in this protocol", allowed=("known", "novel")),
    ),
    key=("protocol", "sample_id"),
)

SCORES = Table(
    name="scores",
    description="One row per scored sample and run. Higher score = more novel.",
    columns=(
        *_RUN,
        Column("sample_id", pa.string(), "Sample"),
        Column("class", pa.string(), "True class as text"),
        Column("novel", pa.bool_(), "Whether the sample is novel in this protocol"),
        Column("score", pa.float64(), "Novelty score; higher = more novel"),
        Column("predicted", pa.string(), "Predicted known class, if any", nullable=True),
    ),
    key=("protocol", "detector", "backbone", "seed", "split", "sample_id"),
)

TRAINING = Table(
    name="training",
    description="What each epoch of training measured.",
    columns=(
        Column("detector", pa.string(), "Detector, by the name of its file in tasks/detectors"),
        Column("variant", pa.string(), "Preset, and what differs from it"),
        Column("seed", pa.int32(), "Seed of the run"),
        Column("epoch", pa.int32(), "Epoch, or number of the candidate tried", minimum=0),
        Column("measure", pa.string(), "What was measured, such as `loss` or `valid_loss`"),
        Column("value", pa.float64(), "Its value", nullable=True),
    ),
    key=("detector", "variant", "seed", "epoch", "measure"),
)

CURVES = Table(
    name="curves",
    description="ROC and precision-recall curves behind the metrics, point by point.",
    columns=(
        *_RUN,
        Column("convention", pa.string(), "Named metric convention"),
        Column("curve", pa.string(), "Which curve", allowed=("roc", "pr")),
        Column("point", pa.int32(), "Number of the point along the curve", minimum=0),
        Column("x", pa.float64(), "False positive rate (roc) or recall (pr)", minimum=0, maximum=1),
        Column(
            "y", pa.float64(), "True positive rate (roc) or precision (pr)", minimum=0, maximum=1
        ),
        Column("threshold", pa.float64(), "Score at this point; null at an end", nullable=True),
    ),
    key=("protocol", "detector", "backbone", "seed", "split", "convention", "curve", "point"),
)

METRICS = Table(
    name="metrics",
    description="Every number with the convention that it follows, in long form.",
    columns=(
        Column("benchmark", pa.string(), "Benchmark"),
        *_RUN,
        Column(
            "convention", pa.string(), "Named metric convention (positive class, rules, weights)"
        ),
        Column("metric", pa.string(), "Metric name"),
        Column(
            "value",
            pa.float64(),
            "Value; null where the convention calls it infeasible",
            nullable=True,
        ),
        Column("n", pa.int64(), "Samples behind the number", minimum=0),
        Column("data_key", pa.string(), "Content key of the scores behind the number"),
    ),
    key=("protocol", "detector", "backbone", "seed", "split", "convention", "metric"),
)

QUARANTINE = Table(
    name="quarantine",
    description="Every record that a stage refused, and why. rows in = rows out + these.",
    columns=(
        Column("stage", pa.string(), "Stage that refused it"),
        Column("shard", pa.string(), "Shard of that stage"),
        Column("table", pa.string(), "Table the record was meant for"),
        Column("record", pa.string(), "Id of the record, or raw file it came from"),
        Column("number", pa.int32(), "Counts refusals of the same record", minimum=0),
        Column("rule", pa.string(), "Rule that it broke"),
        Column("message", pa.string(), "What was found and what was expected"),
    ),
    key=("stage", "shard", "table", "record", "number"),
)

SHARED = {t.name: t for t in (SAMPLES, SPLITS, TRAINING, SCORES, CURVES, METRICS, QUARANTINE)}


def features_table(extractor: str, dimension: int) -> Table:
    """A table of embeddings, one per extractor as their lengths differ."""
    return Table(
        name=f"features_{extractor}",
        description=f"Embeddings of {extractor}, {dimension} numbers a sample.",
        columns=(
            Column("sample_id", pa.string(), "Sample"),
            Column("embedding", pa.list_(pa.float32(), dimension), "Feature vector"),
        ),
        key=("sample_id",),
    )


def benchmark_names() -> list[str]:
    """Benchmarks that declare tables: every `schemas/<name>.py` with a flow of the same name."""
    flows = Path(__file__).parents[1] / "flows"
    here = Path(__file__).parent
    return sorted(
        p.stem for p in here.glob("*.py") if (flows / p.name).exists() and p.stem[0] != "_"
    )


def tables_of(benchmark: str) -> dict[str, Table]:
    """The benchmark's own tables over the shared ones."""
    own: dict[str, Table] = {}
    if importlib.util.find_spec(f"schemas.{benchmark}") is not None:
        module = importlib.import_module(f"schemas.{benchmark}")
        own = {table.name: table for table in getattr(module, "TABLES", ())}
    return SHARED | own


def find_table(benchmark: str, name: str) -> Table | None:
    return tables_of(benchmark).get(name)
