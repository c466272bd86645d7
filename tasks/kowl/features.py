"""Feature vectors of clips: sample frames, transform them if asked for, pass a frozen model.

Enters: rows of `videos` and `unlisted_videos` that can be used, and their files. Leaves: `outputs`
of a frozen run, one row per clip and visual transform (the view). Which frames a model is shown is
among its settings (tasks/models, KOWL-718 section 5.1).

The run is that of the model alone: no protocol, no seed. It depends on its settings and weights;
each of its pieces on the clips in it. A clip whose file did not change is not read again where
that gives the same bits: with a model that is alike in any batch, and with a batch of one clip.
Predictors learn from plain clips alone, so train clips are not transformed.
"""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast, get_args

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
    Transform,
)
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PLAIN
from storage.layout import content_key
from storage.pieces import Part, Piece
from storage.raw import RawFile
from storage.unchanged import read_unchanged
from tasks.engine.ahead import ahead
from tasks.engine.progress import progress
from tasks.engine.stage import Build, Produced, Reject, Shard, stage
from tasks.evaluation.model_runs import ModelRun, Offer, differing, plan_models, threads_of
from tasks.evaluation.passing import LOADER, DeviceSettings, model_of, output_rows
from tasks.evaluation.runs import run_mark
from tasks.kowl.buffer import FrameBuffer, read_frames
from tasks.kowl.decode import LOADER_VERSION
from tasks.kowl.kept import KeptRows
from tasks.kowl.videos import sample_videos
from tasks.learning.devices import use_threads
from tasks.learning.samples import Samples
from tasks.models import find
from tasks.models.clips import Backbone
from tasks.scores.base import Outputs

log = logging.getLogger(__name__)

TRAIN = "train"
CONTENT = "clips.json"
"""File of a piece: the digest of each clip's video, to know which ones changed since."""


def plan_backbones(config: Config) -> list[ModelRun]:
    """The frozen models asked for; a wrong name or setting is refused."""
    loader = config.features.model_dump(mode="json", exclude={"transforms"})
    # `train` is for what learns: the predictors.
    choices = config.model_copy(update={"train": {}})
    return plan_models("kowl", choices, [Offer("none", "clip", loader=loader)])


def backbone_facts(run: ModelRun) -> RunFacts:
    """The run of the frozen model that serves every protocol; no preset, as all settings tell."""
    return RunFacts(
        benchmark="kowl",
        protocol=None,
        model=run.kind.name,
        settings=run.values(),
        changed={**differing(run.settings, run.kind.resolve(None)), **run.weights_said()},
        origin="frozen",
        versions=run.versions(LOADER_VERSION),
        weights={file.name: file.digest for file in run.weights},
        precision=getattr(run.settings, "precision", "float32"),
        fit_key="none",
    )


def sampling_rules(runs: Iterable[ModelRun]) -> tuple[FrameSampling, ...]:
    """What the models are shown of a video; those that see the same have one rule."""
    return tuple({_rule(run.settings): None for run in runs})


def _rule(settings: Any) -> FrameSampling:
    return FrameSampling(**settings.model_dump(include=set(FrameSampling.model_fields)))


def features_name(facts: RunFacts) -> str:
    """What readers call the features of a frozen run: its model, and preprocessing by name where it
    is not the model's usual one."""
    usual = find(facts.model).configuration.model_fields["preprocessing"].default
    name = facts.settings["preprocessing"]
    return facts.model if name == usual else f"{facts.model} {name}"


def plan_features(
    root: str,
    validated: Iterable[Piece],
    views: Mapping[str, Sequence[str]],
    run: ModelRun,
    facts: RunFacts,
    clips: tuple[Part, ...] = (),
) -> Iterator[Shard]:
    """One shard for each shard of videos with something to use.

    `views` are the visual transforms by the name of the shard. `clips` tell which videos are
    trained with: those are shown as they are, and so are videos of no clip.
    """
    mark, evaluated = run_mark(facts, "none"), _evaluated(clips)
    for piece in validated:
        videos, name = _videos_of(piece), f"{mark.run_id}/{piece.shard}"
        shown = _views_of_clips(_usable(videos.read(), videos.table), evaluated, views[name])
        if shown.height:
            yield Shard(
                name,
                files=run.weights,
                parts=(videos, *clips),
                source=root,
                about={"facts": facts.model_dump(mode="json"), "views": list(views[name])},
                depends={"run": mark.run_id, "shown": content_key(shown.sort(pl.all()).rows())},
                run=mark,
                threads=threads_of(run.settings),
            )


def views_so_far(
    build: Build, asked: Sequence[str], settings: DeviceSettings
) -> Mapping[str, Sequence[str]]:
    """The transforms of each shard: those asked for, and those that earlier commands made."""

    def in_order(views: set[str]) -> list[str]:
        return [view for view in get_args(Transform) if view in views]

    views: dict[str, list[str]] = defaultdict(lambda: in_order({*asked}))
    for name, piece in build.earlier(extract_features, settings).items():
        before = piece.part(OUTPUTS.name).read(["view"])["view"]
        views[name] = in_order({*asked, *before})
    return views


def _videos_of(piece: Piece) -> Part:
    (part,) = (
        piece.part(table.name) for table in (VIDEOS, UNLISTED_VIDEOS) if piece.has(table.name)
    )
    return part


def _evaluated(clips: Sequence[Part]) -> frozenset[str]:
    """Ids of the clips that are not trained with."""
    rows = [part.read(["sample_id", "split"]) for part in clips]
    return frozenset(
        name for part in rows for name in part.filter(pl.col("split") != TRAIN)["sample_id"]
    )


def _views_of_clips(
    videos: pl.DataFrame, evaluated: frozenset[str], views: Sequence[str]
) -> pl.DataFrame:
    """sample_id, sha256 and view of all that a model is shown, in the order of the videos."""
    tested = pl.Series([name in evaluated for name in videos["sample_id"]], dtype=pl.Boolean)
    every = videos.select("sample_id", "sha256", tested.alias("tested")).join(
        pl.DataFrame({"view": views}, schema={"view": pl.String}), how="cross"
    )
    return every.filter((pl.col("view") == PLAIN) | pl.col("tested")).drop("tested")


@stage(writes=(OUTPUTS,), version=3, tags=("gpu",), apart=True, reuses=True)
def extract_features(shard: Shard, settings: DeviceSettings) -> Produced:
    """Pass the clips of one shard through the model, under every transform; decode them once."""
    videos = _usable(shard.parts[0].read(), shard.parts[0].table)
    files = [RawFile(*row) for row in videos.select("file", "bytes", "sha256").rows()]
    work = partial(_extracted, shard, settings, videos)
    return read_unchanged(shard.source, files, work, fault=Produced.unreadable)


def _extracted(shard: Shard, settings: DeviceSettings, videos: pl.DataFrame) -> Produced:
    facts = RunFacts.model_validate(shard.about["facts"])
    model = cast(Backbone, model_of(facts, {file.name: str(file.path) for file in shard.files}))
    model.prepare(device=settings.device)
    use_threads(model.settings.cpu_threads)
    shown = _views_of_clips(videos, _evaluated(shard.parts[1:]), shard.about["views"])
    work = shard.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    # What is shown comes in one order, so the batches that are left are the same to the bit.
    kept = KeptRows(work, OUTPUTS)
    before = pl.concat([_extracted_before(shard, shown, model), kept.before()])
    left = shown.join(before, on=["sample_id", "view"], how="anti", maintain_order="left")
    views = {str(name): part["view"].to_list() for (name,), part in left.group_by("sample_id")}
    loader = FeatureSettings.model_validate(facts.settings[LOADER])
    rejects: list[Reject] = []

    def showings() -> Iterator[tuple[str, str, np.ndarray]]:
        left_videos = videos.filter(pl.col("sample_id").is_in(list(views)))
        for sample_id, frames in _frames(shard, left_videos, _sampling(model), facts.model):
            for view in views[sample_id]:
                if isinstance(frames, RecordError):
                    rejects.append(Reject.of(f"{sample_id}, {view}", frames))
                else:
                    yield sample_id, view, _transformed(frames, view, sample_id, loader)

    size = model.settings.batch
    with (
        progress(f"{facts.model} {shard.name}", left.height) as advance,
        ahead(showings(), size) as coming,
    ):
        while batch := list(islice(coming, size)):
            clips = np.stack([frames for *_, frames in batch])
            made = model.outputs(Samples([name for name, *_ in batch], None, {"clips": clips}))
            names, views_shown = [name for name, *_ in batch], [view for _, view, _ in batch]
            kept.add(_rows(facts, names, views_shown, made))
            advance(len(batch))
    table = pl.concat([before, kept.added()])
    (work / CONTENT).write_text(
        json.dumps(dict(videos.select("sample_id", "sha256").iter_rows()), sort_keys=True)
    )
    files = {CONTENT: work / CONTENT}
    return Produced({OUTPUTS.name: table}, table.height + len(rejects), rejects, files)


def _frames(
    shard: Shard, videos: pl.DataFrame, how: SampleSettings, model: str
) -> Iterator[tuple[str, np.ndarray | RecordError]]:
    """As `sample_videos`; those that validation kept are not decoded again."""
    buffer = FrameBuffer(shard.work, shard.name.partition("/")[2])
    rows = list(videos.iter_rows(named=True))
    kept = {row["sample_id"]: path for row in rows if (path := buffer.find(row, how))}
    again = videos.filter(~pl.col("sample_id").is_in(list(kept)))
    lied = again.filter((pl.col("status") != "ok") | (pl.col("decoder") != "decord")).height
    if kept or buffer.is_there:
        log.info(
            f"  {model} {shard.name}: {len(kept)} clips from the frames that validation kept, "
            f"{again.height} decoded a second time ({lied} for their header or decoder)"
        )
    with closing(cast(Any, sample_videos(shard.source or "", again, how))) as decoded:
        for row in rows:
            path = kept.get(row["sample_id"])
            yield (row["sample_id"], read_frames(path, how)) if path else next(decoded)


def _sampling(model: Backbone) -> SampleSettings:
    on_gpu = model.device.startswith("cuda")
    return SampleSettings(
        **dict(_rule(model.settings)), workers=os.cpu_count() or 1 if on_gpu else 1
    )


def _rows(facts: RunFacts, names: list[str], views: list[str], outputs: Outputs) -> pl.DataFrame:
    # Nothing tells the names of the classes that the weights were trained on.
    classes = 0 if outputs.logits is None else outputs.logits.shape[1]
    rows = output_rows(facts, names, outputs, dict.fromkeys(range(classes)))
    return rows.with_columns(pl.Series("view", views))


def _extracted_before(shard: Shard, shown: pl.DataFrame, model: Backbone) -> pl.DataFrame:
    """Rows of the last build whose clips have the same video now.

    Only where a vector does not depend on the clips beside it in a batch.
    """
    if shard.earlier is None or not (model.alike_in_any_batch or model.settings.batch == 1):
        return OUTPUTS.empty()
    then = json.loads(shard.earlier.file(CONTENT).path.read_text())
    digests = pl.DataFrame(
        list(then.items()), {"sample_id": pl.String, "sha256": pl.String}, orient="row"
    )
    same = shown.join(digests, on=["sample_id", "sha256"], how="semi")
    rows = shard.earlier.part(OUTPUTS.name).read()
    return rows.join(same, on=["sample_id", "view"], how="semi", maintain_order="left")


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
