"""Run tables in their older form, for benchmarks that do not write the shared ones yet.

A benchmark that lists these in its `TABLES` still names runs by detector and backbone. Each one
that moves to the shared tables drops them; the file goes with the last.
"""

import pyarrow as pa

from schemas.table import Column, Table

_RUN = (
    Column("protocol", pa.string(), "Evaluation protocol or track, such as `visual` or `SN1`"),
    Column("detector", pa.string(), "Detector, by the name of its file in tasks/detectors"),
    Column("backbone", pa.string(), "Network or features below it, or its variant; else `none`"),
    Column("seed", pa.int32(), "Seed of the run"),
    Column("split", pa.string(), "Split that was scored"),
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

OLDER = (SCORES, TRAINING, CURVES, METRICS)
