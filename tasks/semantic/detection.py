"""Train a network, pass every picture once, ODIN, the trivial baseline: runs of semantic anomalies.

Enters: splits, pictures, and the facts of a run. Leaves: `runs`, `training` with the network as a
safetensors file, `outputs`, `predictions`, and in `metrics` the paper's numbers, which are means
over the last epochs. Scores and all other metrics are made by tasks/evaluation/stages.py.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from schemas.config import Settings
from schemas.runs import RunFacts
from schemas.semantic import LAST_EPOCHS
from schemas.tables import METRICS, OUTPUTS, PLAIN, PREDICTIONS, RUNS, SPLIT_NAMES, TRAINING
from tasks.engine.stage import Produced, Shard, stage
from tasks.evaluation.runs import run_id, run_row
from tasks.evaluation.stages import EVALUATED, HEAD, prediction_rows
from tasks.learning.training import EpochLines
from tasks.semantic.cache import PictureCache

if TYPE_CHECKING:
    from tasks.semantic.training import Trained

CONVENTION = "semantic"
# Sets with more bytes of pixels are decoded batch by batch.
HOLD_BYTES = 4 << 30


class DeviceSettings(Settings):
    """Where networks run: recorded with each run, and in no key."""

    device: str = Field("auto", exclude=True)
    """`auto`, `cpu` or `cuda`."""


def _pictures(shard: Shard, rows: pl.DataFrame) -> PictureCache:
    """The pictures of these rows, in their order."""
    files = [part.path for part in shard.parts if part.table == "pictures"]
    return PictureCache.read(files, rows["sample_id"])


def _split(shard: Shard, name: str) -> tuple[pl.DataFrame, PictureCache, NDArray[np.int64]]:
    """Rows of one split in the order of their ids, their pictures, their labels (novel: -1)."""
    rows = shard.read("splits").filter(split=name).sort("sample_id")
    cache = _pictures(shard, rows)
    if len(cache) and 3 * len(cache) * int(np.prod(cache.size())) <= HOLD_BYTES:
        cache.hold()
    return rows, cache, rows["label"].fill_null(-1).to_numpy().astype(np.int64)


def _classes(shard: Shard) -> dict[int, str]:
    """The class of each label."""
    rows = shard.read("splits", ["label", "class"]).drop_nulls("label")
    return dict(rows.unique().iter_rows())


def _use_threads(facts: RunFacts) -> None:
    """Results of torch on a CPU depend on the number of threads, so it is a setting."""
    import torch

    torch.set_num_threads(facts.settings["threads"])


def _kind_of(device: str) -> str:
    return device.partition(":")[0]


# ---------------------------------------------------------------- networks


@stage(writes=(RUNS, TRAINING), version=2, tags=("gpu",), apart=True)
def train_network(shard: Shard, settings: DeviceSettings) -> Produced:
    """Train one network without one member of a subset; a killed run goes on."""
    from tasks.semantic.training import MODEL, Evaluation, network_model, train

    facts = RunFacts.model_validate(shard.about)
    _use_threads(facts)
    _, pictures, labels = _split(shard, "train")
    _, tested, truth = _split(shard, "test")
    work = shard.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    assert facts.seed is not None
    model = train(
        network_model(facts.model).configuration.model_validate(facts.settings),
        facts.model,
        pictures,
        labels,
        seed=facts.seed,
        work=work,
        device=settings.device,
        test=Evaluation(tested, truth),
        progress=EpochLines(f"{facts.protocol} {facts.model} {facts.seed}"),
    )
    model.head().save(work / HEAD)
    measured = model.history.select("epoch", pl.exclude("epoch").cast(pl.Float64))
    rows = measured.unpivot(index="epoch", variable_name="measure", value_name="value").select(
        pl.lit(run_id(facts)).alias("run_id"),
        "epoch",
        "measure",
        pl.when(pl.col("value").is_finite()).then(pl.col("value")).alias("value"),
    )
    tables = {
        "runs": run_row(facts, device=_kind_of(model.device)),
        "training": rows.drop_nulls("value"),
    }
    return Produced(tables, 1, files={MODEL: work / MODEL, HEAD: work / HEAD})


def _loaded(shard: Shard, facts: RunFacts, settings: DeviceSettings) -> "Trained":
    from tasks.semantic.training import MODEL, load

    _use_threads(facts)
    return load(shard.part(MODEL).path, device=settings.device)


def _outputs(facts: RunFacts, rows: pl.DataFrame, **columns: Any) -> pl.DataFrame:
    """Rows of `outputs`; a column that is not given is null."""
    empty = {
        name: pl.lit(None, OUTPUTS.polars_schema[name]).alias(name)
        for name in ("logits", "features", "novelty", "predicted")
    }
    given = {name: pl.Series(name, values) for name, values in columns.items()}
    return OUTPUTS.conform(
        rows.select(
            pl.lit(run_id(facts)).alias("run_id"), "sample_id", pl.lit(PLAIN).alias("view")
        ).with_columns(*(empty | given).values())
    )


@stage(writes=(OUTPUTS, PREDICTIONS), version=2, tags=("gpu",), apart=True)
def pass_pictures(shard: Shard, settings: DeviceSettings) -> Produced:
    """One forward pass over every split: logits and features for all scores at once."""
    from tasks.semantic.training import outputs

    facts = RunFacts.model_validate(shard.about)
    model = _loaded(shard, facts, settings)
    classes = _classes(shard)
    frames = [OUTPUTS.empty()]
    for name in SPLIT_NAMES:
        rows, pictures, _ = _split(shard, name)
        if rows.is_empty():
            continue
        arrays = outputs(model, pictures, with_odin=False)
        predicted = [classes[int(label)] for label in arrays["logits"].argmax(1)]
        lists = {key: list(value.astype(np.float32)) for key, value in arrays.items()}
        frames.append(_outputs(facts, rows, **lists, predicted=predicted))
    table = pl.concat(frames)
    joined = table.drop("run_id", "predicted").join(shard.read("splits"), on="sample_id")
    predictions = prediction_rows(facts, joined, classes)
    return Produced({"outputs": table, "predictions": predictions}, table.height)


@stage(writes=(RUNS, OUTPUTS), version=1, tags=("gpu",), apart=True)
def pass_odin(shard: Shard, settings: DeviceSettings) -> Produced:
    """ODIN of one network with its step on the input, for valid and test."""
    from tasks.semantic.odin import OdinSettings
    from tasks.semantic.training import outputs

    facts = RunFacts.model_validate(shard.about)
    model = _loaded(shard, facts, settings)
    own = OdinSettings.model_validate(
        {name: facts.settings[name] for name in OdinSettings.model_fields}
    )
    model = replace(model, setup=model.setup.model_copy(update={"odin": own}))
    classes = _classes(shard)
    frames = [OUTPUTS.empty()]
    for name in EVALUATED:
        rows, pictures, _ = _split(shard, name)
        if rows.is_empty():
            continue
        arrays = outputs(model, pictures)
        predicted = [classes[int(label)] for label in arrays["logits"].argmax(1)]
        frames.append(_outputs(facts, rows, novelty=arrays["odin"], predicted=predicted))
    row = run_row(facts, device=_kind_of(model.device))
    return Produced({"runs": row, "outputs": pl.concat(frames)}, 1)


@stage(writes=(METRICS,), version=2)
def average_evaluations(shard: Shard, settings: Settings) -> Produced:
    """The paper's numbers: means over the last epochs, as single evaluations waver."""
    about = shard.about
    test = shard.read("splits", ["split", "role"]).filter(split="test")
    known = test.filter(role="known").height
    named = pl.DataFrame(
        [
            (measure, metric + LAST_EPOCHS, known if metric == "acc" else test.height)
            for measure, metric in about["measures"].items()
        ],
        schema=["measure", "metric", "n"],
        orient="row",
    )
    means = (
        shard.read("training")
        .drop_nulls("value")
        .sort("epoch")
        .group_by("measure", maintain_order=True)
        .agg(pl.col("value").mean())
    )
    place = {name: about[name] for name in ("protocol", "run_id", "model", "seed")}
    place |= {name: about[name] for name in ("score_id", "score")}
    place |= {"split": "test", "view": PLAIN, "phase": "none", "step": 0, "subset": "all"}
    rows = METRICS.conform(
        named.join(means, on="measure", how="inner").select(
            *(pl.lit(value).alias(name) for name, value in place.items()),
            pl.lit(CONVENTION).alias("convention"),
            "metric",
            "value",
            pl.lit(None, pl.Float64).alias("low"),
            pl.lit(None, pl.Float64).alias("high"),
            "n",
        )
    )
    return Produced({"metrics": rows}, rows.height)


# ---------------------------------------------------------------- the trivial baseline


@stage(writes=(RUNS, OUTPUTS), version=1)
def fit_gaussian(shard: Shard, settings: Settings) -> Produced:
    """The trivial baseline of one trial; it is fitted in seconds, so no model is kept."""
    from tasks.semantic.models.pixel_gaussian import novelty_of

    facts = RunFacts.model_validate(shard.about)
    splits = shard.read("splits").sort("split", "sample_id")
    train = splits.filter(split="train")
    tested = splits.filter(pl.col("split").is_in(EVALUATED))
    assert facts.seed is not None
    novelty = novelty_of(
        _pictures(shard, train), _pictures(shard, tested), facts.settings["side"], facts.seed
    )
    outputs = _outputs(facts, tested, novelty=novelty)
    return Produced({"runs": run_row(facts), "outputs": outputs}, 1)
