"""Feature vectors of clips: sample frames, transform them if asked for, pass a frozen model.

Enters: rows of `videos` and `unlisted_videos` that can be used, and their files. Leaves: `outputs`
of a frozen run, one row per clip and visual transform (the view). Which frames a model is shown is
among its settings (tasks/models, KOWL-718 section 5.1).

The run is that of the model alone: no protocol, no seed. It depends on its settings and weights;
each of its pieces on the clips in it. A clip whose file did not change is not read again where
that gives the same bits: with a model that is alike in any batch, and with a batch of one clip.
"""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import numpy as np
import polars as pl

from schemas.clips import FrameSampling
from schemas.errors import RecordError
from schemas.kowl import (
    UNLISTED_VIDEOS,
    USABLE,
    VIDEOS,
    Config,
    FeatureSettings,
    SampleSettings,
)
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PLAIN
from storage.layout import content_key
from storage.pieces import Piece
from storage.raw import RawFile
from storage.unchanged import read_unchanged
from tasks.engine.progress import progress
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.evaluation.model_runs import ModelRun, Offer, plan_models
from tasks.evaluation.passing import LOADER, DeviceSettings, model_of, output_rows
from tasks.evaluation.runs import run_mark
from tasks.kowl.videos import sample_videos
from tasks.learning.devices import precision_on, use_threads
from tasks.learning.samples import Samples
from tasks.models.clips import Backbone
from tasks.scores.base import Outputs

LOADER_VERSION = 1
"""Raised when the same videos give models other pictures to see."""
CONTENT = "clips.json"
"""File of a piece: the digest of each clip's video, to know which ones changed since."""


def plan_backbones(config: Config) -> list[ModelRun]:
    """The frozen models asked for; a wrong name or setting is refused."""
    loader = config.features.model_dump(mode="json", exclude={"transforms"})
    # `train` is for what learns: the predictors.
    choices = config.model_copy(update={"train": {}})
    return plan_models("kowl", choices, [Offer("none", "clip", loader=loader)])


def backbone_facts(run: ModelRun, device: str = "cpu") -> RunFacts:
    """The run of the frozen model that serves every protocol."""
    mixed = bool(getattr(run.settings, "mixed_precision", False))
    return RunFacts(
        benchmark="kowl",
        protocol=None,
        model=run.kind.name,
        settings=run.values(),
        changed=dict(run.changed),
        origin="frozen",
        versions=run.versions(LOADER_VERSION),
        weights={file.name: file.digest for file in run.weights},
        precision=precision_on(device, mixed),
        fit_key="none",
    )


def plan_features(
    root: str,
    validated: Iterable[Piece],
    transforms: Iterable[str],
    run: ModelRun,
    facts: RunFacts,
    table: str = VIDEOS.name,
) -> Iterator[Shard]:
    """One shard for each shard of videos with something to use and each transform."""
    mark = run_mark(facts, "none")
    for piece in validated:
        part = piece.part(table)
        rows = _usable(part.read(), table)
        if rows.is_empty():
            continue
        clips = content_key(rows.select("sample_id", "sha256").sort("sample_id").rows())
        for transform in transforms:
            yield Shard(
                f"{mark.run_id}/{piece.shard}/{transform}",
                files=run.weights,
                parts=(part,),
                source=root,
                about={"facts": facts.model_dump(mode="json"), "view": transform},
                depends={"run": mark.run_id, "clips": clips},
                run=mark,
            )


@stage(writes=(OUTPUTS,), version=2, tags=("gpu",), alone=True, reuses=True)
def extract_features(shard: Shard, settings: DeviceSettings) -> Produced:
    """Pass the clips of one shard under one transform through the model."""
    (part,) = shard.parts
    videos = _usable(part.read(), part.table)
    files = [RawFile(*row) for row in videos.select("file", "bytes", "sha256").rows()]
    work = partial(_extracted, shard, settings, videos)
    return read_unchanged(shard.source, files, work, fault=Produced.unreadable)


def _extracted(shard: Shard, settings: DeviceSettings, videos: pl.DataFrame) -> Produced:
    view, facts = shard.about["view"], RunFacts.model_validate(shard.about["facts"])
    model = cast(Backbone, model_of(facts, {file.name: str(file.path) for file in shard.files}))
    model.prepare(device=settings.device)
    use_threads(model.settings.cpu_threads)
    digests = dict(videos.select("sample_id", "sha256").iter_rows())
    alone = model.alike_in_any_batch or model.settings.batch == 1
    before = _extracted_before(shard, digests, alone)
    left = videos.join(before, on="sample_id", how="anti", maintain_order="left")
    sampling = SampleSettings(**model.settings.model_dump(include=set(FrameSampling.model_fields)))
    loader = FeatureSettings.model_validate(facts.settings[LOADER])
    ids: list[str] = []
    vectors: list[Any] = []
    rejects: list[Reject] = []

    def good() -> Iterator[tuple[str, np.ndarray]]:
        for sample_id, frames in sample_videos(shard.source or "", left, sampling):
            if isinstance(frames, RecordError):
                rejects.append(Reject.of(f"{sample_id}, {view}", frames))
            else:
                yield sample_id, _transformed(frames, view, sample_id, loader)

    clips = good()
    with progress(f"{facts.model} {shard.name}", left.height) as advance:
        while batch := list(islice(clips, model.settings.batch)):
            names = [sample_id for sample_id, _ in batch]
            shown = np.stack([frames for _, frames in batch])
            vectors.append(model.outputs(Samples(names, None, {"clips": shown})).features)
            ids += names
            advance(len(batch))
    rows = [before.select(OUTPUTS.polars_schema.names())]
    if ids:
        made = output_rows(facts, ids, Outputs(features=np.concatenate(vectors)), {})
        rows.append(made.with_columns(pl.lit(view).alias("view")))
    table = pl.concat(rows)
    work = shard.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    (work / CONTENT).write_text(json.dumps(digests, sort_keys=True))
    files = {CONTENT: work / CONTENT}
    return Produced({OUTPUTS.name: table}, table.height + len(rejects), rejects, files)


def _extracted_before(shard: Shard, digests: dict[str, str], alone: bool) -> pl.DataFrame:
    """Rows of the last build whose clips have the same video now.

    Only where a vector does not depend on the clips beside it in a batch (`alone`).
    """
    if shard.earlier is None or not alone:
        return OUTPUTS.empty()
    then = json.loads(shard.earlier.file(CONTENT).path.read_text())
    same = [name for name, digest in digests.items() if then.get(name) == digest]
    rows = shard.earlier.part(OUTPUTS.name).read()
    return rows.filter(pl.col("sample_id").is_in(same))


def _usable(rows: pl.DataFrame, table: str) -> pl.DataFrame:
    rows = rows.filter(pl.col("status").is_in(USABLE))
    return rows.with_columns(sample_id="file") if table == UNLISTED_VIDEOS.name else rows


def _transformed(
    frames: np.ndarray, transform: str, sample_id: str, settings: FeatureSettings
) -> np.ndarray:
    """The release transforms whole pictures and crops them later; here the crops are changed."""
    if transform == PLAIN:
        return frames
    from tasks.kowl.transforms import transform_clip

    return transform_clip(frames, transform, settings.strength, settings.seed, sample_id)
