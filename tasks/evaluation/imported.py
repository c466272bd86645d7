"""The stage that makes outputs of a file: every check against the protocol, then the rows.

Enters: a file of the user's (`output_files.py`), `splits` and `samples` of its protocol. Leaves:
`outputs`, `predictions` and, where one is given, the head of the model. A file that is not right is
refused as a whole, with the first sample that is wrong.
"""

import logging
import shutil
from pathlib import Path

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.errors import SourceError
from schemas.runs import RunFacts
from schemas.similar import did_you_mean
from schemas.tables import OUTPUTS, PLAIN, PREDICTIONS, SAMPLES, SPLITS
from tasks.engine.stage import Produced, Shard, stage
from tasks.evaluation.output_files import OutputFile, is_unknown, read_outputs
from tasks.evaluation.runs import run_id
from tasks.evaluation.stages import EVALUATED, HEAD, numbered_labels, prediction_rows

log = logging.getLogger(__name__)

IMPORT_VERSION = 1
KIND, PARTIAL = "kind", "partial"
"""Settings of an imported run: what its file is of, and whether it may lack test samples."""


def visible_rows(shard: Shard, protocol: str) -> pl.DataFrame:
    """Rows of the protocol that models get to see, with the sequence of each sample.

    These are the samples with content, or all where none has any.
    """
    rows = shard.read(SPLITS.name).filter(pl.col("protocol") == protocol)
    samples = shard.read(SAMPLES.name, ["sample_id", "digest", "sequence"])
    rows = rows.join(samples, on="sample_id", how="left", maintain_order="left")
    visible = rows.filter(pl.col("digest").is_not_null())
    return visible if visible.height else rows


@stage(writes=(OUTPUTS, PREDICTIONS), version=IMPORT_VERSION)
def import_outputs(shard: Shard, settings: Settings) -> Produced:
    """Check a file against its protocol and take its rows."""
    facts = RunFacts.model_validate(shard.about)
    protocol, kind = str(facts.protocol), facts.settings[KIND]
    output_file = read_outputs(Path(str(shard.files[0].path)), kind)
    split_rows = shard.read(SPLITS.name).filter(pl.col("protocol") == protocol)
    visible = visible_rows(shard, protocol)
    check_samples(output_file, split_rows, visible, protocol, partial=facts.settings[PARTIAL])
    classes = numbered_labels(visible)[1]
    names = list(classes.values())
    rows = output_file.rows.sort("view", "sample_id")
    if "logits" in rows.columns:
        rows = rows.with_columns(_ordered_logits(output_file, rows["logits"], names, protocol))
    if "predicted" in rows.columns:
        _check_classes(output_file, names)
    if kind == "predictions":
        rows = rows.with_columns(_novelty_of(output_file))
    outputs = _output_rows(run_id(facts), rows, names)
    joined = outputs.drop("run_id").join(split_rows, on="sample_id")
    predictions = PREDICTIONS.empty()
    if "logits" in rows.columns:
        predictions = prediction_rows(facts, joined.drop("predicted"), classes)
    elif "predicted" in rows.columns:
        predictions = _prediction_rows(run_id(facts), joined, rows)
    files = {}
    if len(shard.files) > 1:
        files[HEAD] = _checked_head(shard, output_file, visible)
    return Produced(
        {OUTPUTS.name: outputs, PREDICTIONS.name: predictions}, outputs.height, files=files
    )


def check_samples(
    output_file: OutputFile,
    split_rows: pl.DataFrame,
    visible: pl.DataFrame,
    protocol: str,
    *,
    partial: bool,
) -> None:
    """Refuse a file with a sample twice in a view, or without samples that it must have.

    It must have all of test, unless it is `partial`. Of train and valid it has all or none.
    """
    file, ids = output_file.name, output_file.rows["sample_id"]
    twice = output_file.rows.select("sample_id", "view").is_duplicated()
    if twice.any():
        first = output_file.rows.row(int(twice.arg_true()[0]), named=True)
        raise SourceError(
            f"{file}: sample {first['sample_id']!r} stands there more than once; give each sample "
            "one row (of a view)"
        )
    for known, why in (
        (split_rows, "not in protocol"),
        (visible, "without content in this lake, of"),
    ):
        wrong_ids = ids.filter(~ids.is_in(known["sample_id"].implode()))
        if len(wrong_ids):
            raise SourceError(
                f"{file}: {len(wrong_ids)} samples are {why} {protocol}, the first is "
                f"{wrong_ids[0]!r}; `select sample_id from splits` of the benchmark lists them"
            )
    views = output_file.rows["view"].unique().sort().to_list()
    if PLAIN not in views:
        raise SourceError(f"{file} has no rows of the view {PLAIN}, only {', '.join(views)}")
    for view in views:
        view_ids = output_file.rows.filter(view=view)["sample_id"].implode()
        for split in ("test", "valid", "train"):
            split_ids = visible.filter(split=split)["sample_id"].unique(maintain_order=True)
            missing = split_ids.filter(~split_ids.is_in(view_ids))
            if split == "test" and partial and len(missing) < len(split_ids):
                continue
            if len(missing) and (split == "test" or len(missing) < len(split_ids)):
                rule = "give all of them"
                rule += ", or say --partial" if split == "test" else " or none"
                of_view = "" if view == PLAIN else f" in view {view}"
                raise SourceError(
                    f"{file}: {len(missing)} of {len(split_ids)} {split} samples of {protocol} are "
                    f"missing{of_view}, the first is {missing[0]!r}; {rule}"
                )


def _ordered_logits(
    output_file: OutputFile, logits: pl.Series, names: list[str], protocol: str
) -> pl.Series:
    """Logits in the order of labels, by the names that the file gives."""
    width = logits.list.len()[0]
    known = ", ".join(names)
    if width != len(names) or (
        output_file.classes is not None and len(output_file.classes) != width
    ):
        raise SourceError(
            f"{output_file.name} has {width} logits a sample, protocol {protocol} has "
            f"{len(names)} known classes: {known}"
        )
    titles = output_file.classes
    numbers = tuple(str(place) for place in range(width))
    if titles is None or (titles == numbers and set(titles) != set(names)):
        log.info(
            f"  {output_file.name}: logits have no class names, so they are taken in the order of "
            f"the labels: {known}"
        )
        return logits
    for title in titles:
        if title not in names:
            raise SourceError(
                f"{output_file.name}: logits of class {title!r}, which is not known in {protocol}; "
                f"known are: {known}{did_you_mean(title, names)}"
            )
    if len(set(titles)) < width:
        raise SourceError(
            f"{output_file.name} names a class of its logits twice: {', '.join(titles)}"
        )
    places = [titles.index(name) for name in names]
    matrix = logits.list.to_array(width).to_numpy()[:, places]
    return pl.Series("logits", np.ascontiguousarray(matrix)).cast(pl.List(pl.Float32))


def _check_classes(output_file: OutputFile, names: list[str]) -> None:
    word = pl.col("predicted")
    wrong = output_file.rows.filter(~word.is_in(names) & ~is_unknown(word))
    if wrong.height:
        name = wrong["predicted"][0]
        raise SourceError(
            f"{output_file.name}: sample {wrong['sample_id'][0]!r} is called {name!r}, which is "
            f"no known class; known are: {', '.join(names)}, or `unknown`"
            f"{did_you_mean(name, names)}"
        )


def _novelty_of(output_file: OutputFile) -> pl.Expr:
    """How novel a prediction calls its sample."""
    rows = output_file.rows
    for name in ("probability", "p_unknown"):
        if name in rows.columns and not rows[name].is_between(0, 1).all():
            raise SourceError(f"{output_file.name}: {name} holds values outside of 0 to 1")
    if "p_unknown" in rows.columns:
        return pl.col("p_unknown").alias("novelty")
    if rows.select(is_unknown(pl.col("predicted")).any()).item():
        return is_unknown(pl.col("predicted")).cast(pl.Float64).alias("novelty")
    if "probability" in rows.columns:
        return (1 - pl.col("probability")).alias("novelty")
    raise SourceError(
        f"{output_file.name} says of no sample how novel it is: add p_unknown or probability, or "
        "call novel samples `unknown`"
    )


def _output_rows(run: str, rows: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    empty_columns = [
        pl.lit(None, kind).alias(name)
        for name, kind in OUTPUTS.polars_schema.items()
        if name not in rows.columns and name != "run_id"
    ]
    rows = rows.with_columns(pl.lit(run).alias("run_id"), *empty_columns)
    if rows["logits"].null_count() == 0:
        best = rows["logits"].list.arg_max()
        predicted = pl.Series("predicted", [names[place] for place in best], pl.String)
        rows = rows.with_columns(predicted)
    return OUTPUTS.conform(rows.select(OUTPUTS.polars_schema.names()))


def _prediction_rows(run: str, joined: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Predictions of valid and test samples as the file has them."""
    extra = [name for name in ("probability", "p_unknown") if name in rows.columns]
    empty_columns = [
        pl.lit(None, pl.Float64).alias(name)
        for name in ("probability", "p_unknown")
        if name not in extra
    ]
    evaluated_rows = joined.filter(pl.col("split").is_in(EVALUATED))
    predictions = evaluated_rows.join(
        rows.select("sample_id", "view", *extra), on=["sample_id", "view"]
    )
    predictions = predictions.with_columns(
        pl.lit(run).alias("run_id"),
        pl.lit("none").alias("phase"),
        pl.lit(1).alias("rank"),
        *empty_columns,
    )
    return PREDICTIONS.conform(predictions.select(PREDICTIONS.polars_schema.names()))


def _checked_head(shard: Shard, output_file: OutputFile, visible: pl.DataFrame) -> Path:
    from tasks.scores.base import Head

    path = Path(str(shard.files[1].path))
    train = visible.filter(split="train")["sample_id"].implode()
    if not output_file.rows["sample_id"].is_in(train).any():
        raise SourceError(
            f"{path.name}: a head is of use with train samples, {output_file.name} has none"
        )
    Head.load(path)
    assert shard.work is not None
    shard.work.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(path, shard.work / HEAD))
