"""Train, one forward pass, score: the networks of semantic anomalies (spec semantic 2).

Enters: trials and pictures. Leaves: `training` with each fitted network as a safetensors file,
`outputs` (one pass over every split), `scores`: every post-hoc score of the cached outputs and the
paper's ODIN, and in `metrics` the paper's numbers, which are means over the last epochs. The shared
stage `evaluate_scores` makes metrics and curves of the scores of the final network.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import polars as pl
from numpy.typing import NDArray

from schemas.config import Settings
from schemas.older_tables import METRICS, SCORES, TRAINING
from schemas.semantic import LAST_EPOCHS, OUTPUTS, TEST_MEASURES, DetectionChoice
from schemas.tables import SPLIT_NAMES
from tasks import scores
from tasks.detection import MODEL, print_epoch, use_threads
from tasks.scores.base import Outputs, Reference
from tasks.semantic.cache import PictureCache
from tasks.stage import Produced, Shard, stage

CONVENTION = "semantic"
# The paper's ODIN, with a step on the input; the post-hoc one of that name has temperature only.
ODIN = "odin"
# Sets with more bytes of pixels are decoded batch by batch.
HOLD_BYTES = 4 << 30


class TrainingChoice(Settings):
    """Where networks are trained; how, the shard of each says."""

    device: str
    threads: int


class ScoreChoice(Settings):
    """Which scores are made of the outputs."""

    scores: tuple[str, ...]
    threads: int


class AverageSettings(Settings):
    """The mean over the last epochs has no settings: all that were scored are in it."""


def training_choice(choice: DetectionChoice) -> TrainingChoice:
    return TrainingChoice(device=choice.device, threads=choice.threads)


def score_choice(choice: DetectionChoice, trials: pl.DataFrame) -> ScoreChoice:
    """The scores asked for; those that need validation pictures may have to do without."""
    wanted = sorted(set(scores.names() if "all" in choice.scores else choice.scores) - {"own"})
    if "valid" not in set(trials["split"]):
        lacking = [name for name in wanted if "valid" in scores.find(name).needs]
        if lacking:
            print(
                f"  {', '.join(lacking)}: no validation pictures, so training pictures take their "
                "place (--trials.validation paper sets some aside)",
                file=sys.stderr,
            )
    return ScoreChoice(scores=tuple(wanted), threads=choice.threads)


# ---------------------------------------------------------------- stages


def _split(shard: Shard, name: str) -> tuple[pl.DataFrame, PictureCache, NDArray[np.int64]]:
    """Rows of one split in the order of their ids, their pictures, their labels (anomaly: -1)."""
    rows = shard.read("trials").filter(split=name).sort("image_id")
    files = [part.path for part in shard.parts if part.table == "pictures"]
    cache = PictureCache.read(files, rows["image_id"])
    if len(cache) and 3 * len(cache) * int(np.prod(cache.size())) <= HOLD_BYTES:
        cache.hold()
    return rows, cache, rows["label"].fill_null(-1).to_numpy().astype(np.int64)


@stage(writes=(TRAINING,), version=1, tags=("gpu",), apart=True)
def train_network(shard: Shard, settings: TrainingChoice) -> Produced:
    """Train one network without one member of a subset; a killed run goes on."""
    from tasks.semantic.training import Evaluation, Setup, train

    use_threads(settings.threads)
    about = shard.about
    _, pictures, labels = _split(shard, "train")
    _, tested, truth = _split(shard, "test")
    work = shard.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    model = train(
        Setup.model_validate(about["setup"]),
        about["auxiliary"],
        pictures,
        labels,
        seed=about["seed"],
        work=work,
        device=settings.device,
        test=Evaluation(tested, truth),
        progress=print_epoch(shard.name),
    )
    measured = model.history.select("epoch", pl.exclude("epoch").cast(pl.Float64))
    rows = measured.unpivot(index="epoch", variable_name="measure", value_name="value").select(
        pl.lit(about["auxiliary"]).alias("detector"),
        pl.lit(variant(about)).alias("variant"),
        pl.lit(about["seed"]).alias("seed"),
        "epoch",
        "measure",
        pl.when(pl.col("value").is_finite()).then(pl.col("value")).alias("value"),
    )
    return Produced({"training": rows}, rows.height, files={MODEL: work / MODEL})


def variant(about: Mapping) -> str:
    """How a network is called in `training`: `dog/basset hound imagenet small`."""
    return f"{about['subset']}/{about['trial']} {about['network']} {about['preset']}"


def backbone(about: Mapping) -> str:
    """How a network is called in `scores` and `metrics`: `cifar rotation`."""
    return f"{about['network']} {about['auxiliary']}"


@stage(writes=(METRICS,), version=1)
def average_evaluations(shard: Shard, settings: AverageSettings) -> Produced:
    """The paper's numbers: means over the last epochs, as single evaluations waver."""
    about = shard.about
    test = shard.read("trials", ["split", "role"]).filter(split="test")
    normal = test.filter(role="normal").height
    named = pl.DataFrame(
        [
            (measure, detector, metric + LAST_EPOCHS, normal if metric == "acc" else test.height)
            for measure, (detector, metric) in TEST_MEASURES.items()
        ],
        schema=["measure", "detector", "metric", "n"],
        orient="row",
    )
    means = (
        shard.read("training")
        .drop_nulls("value")
        .sort("epoch")
        .group_by("measure", maintain_order=True)
        .agg(pl.col("value").mean())
    )
    rows = METRICS.conform(
        named.join(means, on="measure", how="inner").select(
            pl.lit("semantic").alias("benchmark"),
            pl.lit(f"{about['subset']}/{about['trial']}").alias("protocol"),
            "detector",
            pl.lit(backbone(about)).alias("backbone"),
            pl.lit(about["seed"]).alias("seed"),
            pl.lit("test").alias("split"),
            pl.lit(CONVENTION).alias("convention"),
            "metric",
            "value",
            "n",
            pl.lit(shard.part("training").sha256[:32]).alias("data_key"),
        )
    )
    return Produced({"metrics": rows}, rows.height)


@stage(writes=(OUTPUTS,), version=1, tags=("gpu",), apart=True)
def pass_pictures(shard: Shard, settings: TrainingChoice) -> Produced:
    """One forward pass over every split: logits and features for all scores at once, and ODIN."""
    from tasks.semantic.training import load, outputs

    use_threads(settings.threads)
    about = shard.about
    model = load(shard.part(MODEL).path, device=settings.device)
    frames = [OUTPUTS.empty()]
    for name in SPLIT_NAMES:
        rows, pictures, _ = _split(shard, name)
        if rows.is_empty():
            continue
        found = outputs(model, pictures, with_odin=name != "train")
        own = [pl.lit(about[key]).alias(key) for key in ("network", "auxiliary", "seed")]
        arrays = [
            pl.Series(key, found[key].astype(np.float32)).cast(pl.List(pl.Float32))
            for key in ("logits", "features")
        ]
        kept = rows.select("subset", "trial", *own, "split", "image_id", "class", "label")
        odin = pl.Series("odin", found["odin"]) if "odin" in found else pl.lit(None).alias("odin")
        frames.append(OUTPUTS.conform(kept.with_columns(*arrays, odin)))
    table = pl.concat(frames)
    return Produced({"outputs": table}, table.height)


@stage(writes=(SCORES,), version=2)
def score_outputs(shard: Shard, settings: ScoreChoice) -> Produced:
    """Every score of one network from its cached outputs."""
    from tasks.semantic.training import load

    use_threads(settings.threads)
    rows = {
        split: part.sort("image_id")
        for (split,), part in shard.read("outputs").group_by("split", maintain_order=True)
    }
    test, train = rows["test"], rows["train"]
    head = load(shard.part(MODEL).path, device="cpu").head()
    labels = train["label"].to_numpy().astype(np.int64)
    # Anomalies are in valid too, for choosing by; scores are fitted to normal pictures only.
    valid = rows["valid"].drop_nulls("label") if "valid" in rows else train
    reference = Reference(_arrays(train), labels, _arrays(valid), head)
    cached = _arrays(test)
    classes = dict(train.select("label", "class").unique().iter_rows())
    scored = []
    for name in settings.scores:
        if name == ODIN:
            told, novelty = cached.logits.argmax(1), test["odin"].to_numpy()
        else:
            score = scores.find(name)()
            score.fit(reference)
            told, novelty = score.predicted(cached), score.score(cached)
        scored.append(_scores(test, shard.about, name, novelty, told, classes))
    table = pl.concat([SCORES.empty(), *scored])
    return Produced({"scores": table}, table.height)


def _arrays(rows: pl.DataFrame) -> Outputs:
    def array(name: str) -> np.ndarray:
        return rows[name].list.to_array(rows[name].list.len()[0]).to_numpy()

    return Outputs(array("logits"), array("features"))


def _scores(
    test: pl.DataFrame,
    about: Mapping,
    name: str,
    score: np.ndarray,
    predicted: np.ndarray,
    classes: Mapping[int, str],
) -> pl.DataFrame:
    told = pl.Series("predicted", predicted).cast(pl.Int32)
    return SCORES.conform(
        test.select(
            pl.lit(f"{about['subset']}/{about['trial']}").alias("protocol"),
            pl.lit(name).alias("detector"),
            pl.lit(backbone(about)).alias("backbone"),
            pl.lit(about["seed"]).alias("seed"),
            "split",
            pl.col("image_id").alias("sample_id"),
            "class",
            pl.col("label").is_null().alias("novel"),
        ).with_columns(
            pl.Series("score", score), told.replace_strict(classes, return_dtype=pl.String)
        )
    )
