"""Tables that every benchmark shares, and the register of all tables.

The way from raw material to results is the same everywhere: samples, splits, runs, outputs, scores,
predictions, metrics and curves, each with one declaration here. A benchmark's own tables stand in
`schemas/<benchmark>.py` as `TABLES` and join these by `sample_id` and `run_id`.
"""

import importlib
import importlib.util
from pathlib import Path

import pyarrow as pa

from schemas.table import Column, Table

SPLIT_NAMES = ("train", "valid", "test")

MODALITIES = ("image", "cloud", "clip", "states", "features")
PHASES = ("none", "before", "after")
ALL_STEPS = -1
PLAIN = "plain"
NO_SCORE = "none"

_SAMPLE = Column("sample_id", pa.string(), "Sample")
_PROTOCOL = Column("protocol", pa.string(), "A track, a trial, a stream of increments, a test")
_RUN_ID = Column("run_id", pa.string(), "Run, see `runs`")
_SCORE_ID = Column("score_id", pa.string(), "Score with its settings; `none` where there is none")
_SCORE = Column("score", pa.string(), "Score, by the name of its file in tasks/scores")
_SPLIT = Column("split", pa.string(), "Split", allowed=SPLIT_NAMES)
_VIEW = Column("view", pa.string(), "How the sample was shown: `plain`, or a transform or density")
_PHASE = Column(
    "phase", pa.string(), "Before or after the step's labels were given, or neither", allowed=PHASES
)
_STEP = Column("step", pa.int32(), "Increment or round in which it comes, else 0", minimum=0)

PROTOCOLS = Table(
    name="protocols",
    description="One row per protocol: what defines it, and keys of the rows that belong to it.",
    columns=(
        _PROTOCOL,
        Column("definition", pa.string(), "What it is made by, as JSON"),
        Column("samples", pa.int64(), "Rows in `splits`", minimum=0),
        Column("fit_key", pa.string(), "Key of its train and valid rows and their content"),
        Column("data_key", pa.string(), "Key of all its rows and their content"),
    ),
    key=("protocol",),
)

SAMPLES = Table(
    name="samples",
    description="One row per sample that a benchmark knows: what it is and where it comes from.",
    columns=(
        _SAMPLE,
        Column("class", pa.string(), "Class label as text", nullable=True),
        Column("sequence", pa.string(), "Episode, video or session it is part of", nullable=True),
        Column("position", pa.int32(), "Place in its sequence, from 0", nullable=True, minimum=0),
        Column("source", pa.string(), "Raw file, relative to the source", nullable=True),
        Column("digest", pa.string(), "Digest of what models get to see of it", nullable=True),
        Column("modality", pa.string(), "Kind of material", allowed=MODALITIES),
    ),
    key=("sample_id",),
)

SPLITS = Table(
    name="splits",
    description="Which sample is in which split of which protocol, when, and in which role.",
    columns=(
        _PROTOCOL,
        _SAMPLE,
        _STEP,
        Column("class", pa.string(), "Class as the protocol calls it"),
        Column(
            "label", pa.int32(), "Index among the classes to be learnt", nullable=True, minimum=0
        ),
        _SPLIT,
        Column(
            "role",
            pa.string(),
            "Whether its class is known when the sample comes",
            allowed=("known", "novel"),
        ),
        Column(
            "subset",
            pa.string(),
            "Named set of its class, such as `SN2`; sets of novel ones are also measured apart",
            nullable=True,
        ),
    ),
    key=("protocol", "sample_id", "step"),
    version=2,
)

RUNS = Table(
    name="runs",
    description="One row per run: a model, trained, frozen or imported, and all that decided it.",
    columns=(
        Column("run_id", pa.string(), "Content key of all that decides the run's numbers"),
        Column(
            "protocol",
            pa.string(),
            "Protocol; null for a frozen backbone that serves all",
            nullable=True,
        ),
        Column("model", pa.string(), "Model or predictor, by the name of its file"),
        Column("network", pa.string(), "Network below it; `none` where it has its own"),
        Column("preset", pa.string(), "Named settings it started from; `none` where it has none"),
        Column("settings", pa.string(), "All settings, resolved, as JSON"),
        Column("changed", pa.string(), "Settings that differ from the preset, as JSON"),
        Column("seed", pa.int32(), "Seed; null where nothing is drawn", nullable=True),
        Column("config_id", pa.string(), "Same for runs that differ in their seed alone"),
        Column(
            "origin",
            pa.string(),
            "Where its numbers come from",
            allowed=("trained", "frozen", "imported"),
        ),
        Column("base_runs", pa.list_(pa.string()), "Runs that it builds on"),
        Column("versions", pa.string(), "Versions of its plug-ins and of the trainer, as JSON"),
        Column("precision", pa.string(), "Arithmetic, such as float32"),
        Column("device", pa.string(), "Kind of device it ran on; not part of the key"),
        Column("fit_key", pa.string(), "Key of the train and valid rows of its protocol"),
        Column("state", pa.string(), "How it ended", allowed=("done", "failed")),
        Column("reason", pa.string(), "Why it failed", nullable=True),
    ),
    key=("run_id",),
    version=2,
)

TRAINING = Table(
    name="training",
    description="What each epoch of training measured.",
    columns=(
        _RUN_ID,
        Column("epoch", pa.int32(), "Epoch, or number of the candidate tried", minimum=0),
        Column("measure", pa.string(), "What was measured, such as `loss` or `valid_loss`"),
        Column("value", pa.float64(), "Its value", nullable=True),
    ),
    key=("run_id", "epoch", "measure"),
    version=2,
)

OUTPUTS = Table(
    name="outputs",
    description="What one pass of a model left of each sample.",
    columns=(
        _RUN_ID,
        _SAMPLE,
        _VIEW,
        Column("logits", pa.list_(pa.float32()), "One per known label", nullable=True),
        Column("features", pa.list_(pa.float32()), "Penultimate features", nullable=True),
        Column("novelty", pa.float64(), "The model's own, higher = more novel", nullable=True),
        Column("predicted", pa.string(), "Known class that the model says", nullable=True),
    ),
    key=("run_id", "sample_id", "view"),
    version=2,
    row_group_rows=10_000,
)

SCORES = Table(
    name="scores",
    description="One row per score of a sample. Higher value = more novel.",
    columns=(
        _RUN_ID,
        _SCORE_ID,
        _SCORE,
        _SAMPLE,
        _VIEW,
        _PHASE,
        _STEP,
        _SPLIT,
        Column("class", pa.string(), "True class as the protocol calls it"),
        Column("novel", pa.bool_(), "Whether the sample is novel when it comes"),
        Column("value", pa.float64(), "Novelty; higher = more novel"),
        Column("predicted", pa.string(), "Known class that goes with the score", nullable=True),
    ),
    key=("run_id", "score_id", "sample_id", "view", "phase", "step"),
    version=2,
)

SCORE_SETTINGS = Table(
    name="score_settings",
    description="What each score_id stands for.",
    columns=(
        Column("score_id", pa.string(), "Key of name, version and settings"),
        _SCORE,
        Column("version", pa.int32(), "Version of its formula", minimum=1),
        Column("settings", pa.string(), "All settings, as JSON"),
    ),
    key=("score_id",),
)

PREDICTIONS = Table(
    name="predictions",
    description="What a run calls each valid and test sample, by rank.",
    columns=(
        _RUN_ID,
        _PHASE,
        _STEP,
        _SAMPLE,
        _VIEW,
        Column("rank", pa.int32(), "1 is the most probable", minimum=1),
        _SPLIT,
        Column("class", pa.string(), "True class as the protocol calls it"),
        Column("predicted", pa.string(), "Class; `unknown`, or `unknown_N` for a discovered one"),
        Column("probability", pa.float64(), "Of this class", nullable=True, minimum=0),
        Column(
            "p_unknown",
            pa.float64(),
            "Of being of no known class",
            nullable=True,
            minimum=0,
        ),
    ),
    key=("run_id", "phase", "step", "sample_id", "view", "rank"),
)

_MEASURED = (
    _PROTOCOL,
    _RUN_ID,
    Column("model", pa.string(), "Model or predictor of the run"),
    _SCORE_ID,
    Column("score", pa.string(), "Score; `none` where the number is of predictions"),
    Column("seed", pa.int32(), "Seed of the run", nullable=True),
    Column("split", pa.string(), "Split that was measured", allowed=SPLIT_NAMES),
    _VIEW,
    _PHASE,
    Column("step", pa.int32(), "Increment or round; -1: all of them together", minimum=ALL_STEPS),
    Column("subset", pa.string(), "`all`, or the part of the samples that was measured"),
    Column("convention", pa.string(), "Named metric convention (positive class, rules, weights)"),
)
_MEASURED_KEY = (*("run_id", "score_id", "split", "view", "phase", "step", "subset", "convention"),)

METRICS = Table(
    name="metrics",
    description="Every number with its interval and the convention that it follows, in long form.",
    columns=(
        *_MEASURED,
        Column("metric", pa.string(), "Metric name"),
        Column("value", pa.float64(), "Value; null where it is not defined", nullable=True),
        Column("low", pa.float64(), "2.5 % of 1,000 bootstrap draws", nullable=True),
        Column("high", pa.float64(), "97.5 % of 1,000 bootstrap draws", nullable=True),
        Column("n", pa.int64(), "Samples behind the number", minimum=0),
    ),
    key=(*_MEASURED_KEY, "metric"),
    version=2,
)

CURVES = Table(
    name="curves",
    description="ROC and precision-recall curves behind the metrics, point by point.",
    columns=(
        *_MEASURED,
        Column("curve", pa.string(), "Which curve", allowed=("roc", "pr")),
        Column("point", pa.int32(), "Number of the point along the curve", minimum=0),
        Column("x", pa.float64(), "False positive rate (roc) or recall (pr)", minimum=0, maximum=1),
        Column(
            "y", pa.float64(), "True positive rate (roc) or precision (pr)", minimum=0, maximum=1
        ),
        Column("threshold", pa.float64(), "Score at this point; null at an end", nullable=True),
    ),
    key=(*_MEASURED_KEY, "curve", "point"),
    version=2,
)

QUARANTINE = Table(
    name="quarantine",
    description="Every record that a stage refused, and why. rows in = rows out + these.",
    columns=(
        Column("stage", pa.string(), "Stage that refused it"),
        Column("shard", pa.string(), "Shard of that stage"),
        Column("table_name", pa.string(), "Table the record was meant for"),
        Column("record", pa.string(), "Id of the record, or raw file it came from"),
        Column("number", pa.int32(), "Counts refusals of the same record", minimum=0),
        Column("rule", pa.string(), "Rule that it broke"),
        Column("message", pa.string(), "What was found and what was expected"),
    ),
    key=("stage", "shard", "table_name", "record", "number"),
    version=2,
    upgrades={1: lambda rows: rows.rename({"table": "table_name"})},
)

SHARED = {
    table.name: table
    for table in (
        PROTOCOLS,
        SAMPLES,
        SPLITS,
        RUNS,
        TRAINING,
        OUTPUTS,
        SCORES,
        SCORE_SETTINGS,
        PREDICTIONS,
        METRICS,
        CURVES,
        QUARANTINE,
    )
}


def benchmark_names() -> list[str]:
    """Benchmarks that declare tables: every `schemas/<name>.py` with a flow of the same name."""
    flows = Path(__file__).parents[1] / "flows"
    here = Path(__file__).parent
    return sorted(
        p.stem for p in here.glob("*.py") if (flows / p.name).exists() and p.stem[0] != "_"
    )


def tables_of(benchmark: str) -> dict[str, Table]:
    """The benchmark's own tables over the shared ones."""
    tables: dict[str, Table] = {}
    if importlib.util.find_spec(f"schemas.{benchmark}") is not None:
        module = importlib.import_module(f"schemas.{benchmark}")
        tables = {table.name: table for table in getattr(module, "TABLES", ())}
    return SHARED | tables


def find_table(benchmark: str, name: str) -> Table | None:
    return tables_of(benchmark).get(name)
