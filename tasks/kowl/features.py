"""Feature vectors of clips: sample frames, transform them if asked for, run a frozen network.

Enters: rows of `videos` and `unlisted_videos` that can be used, and their files. Leaves: `outputs`
of a frozen run, one row per clip and visual transform (the view). Frames, crops and normalisation
follow KOWL-718 section 5.1: X3D-M takes four temporal crops of 16 frames, TimeSformer 8 frames 32
apart; EfficientNet, whose ImageNet weights come with its package, the mean over single frames.

The run is that of the backbone alone: no protocol, no seed. It depends on its settings and weights;
each of its pieces on the clips in it. A clip whose file did not change is not read again where
that gives the same bits: with EfficientNet, and with a batch of one clip.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import RecordError
from schemas.kowl import UNLISTED_VIDEOS, USABLE, VIDEOS, FeatureSettings
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PLAIN
from storage.filehash import sha256_file
from storage.layout import content_key
from storage.pieces import Piece
from storage.raw import RawFile
from storage.unchanged import read_unchanged
from tasks.engine.progress import progress
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.evaluation.runs import run_id, run_mark
from tasks.kowl.videos import sample_videos
from tasks.learning.devices import use_threads
from tasks.learning.training import weights_file

Embed = Callable[[np.ndarray], np.ndarray]
"""Clips (N, crops, count, H, W, 3) uint8 to vectors (N, D) float32."""

VERSIONS = {"efficientnet": 1, "x3d": 1, "timesformer": 1}
TRANSFORMS_VERSION = 1
ALIKE_IN_ANY_BATCH = ("efficientnet",)
"""Networks whose vectors are the same to the bit whatever the other clips of a batch are."""
CONTENT = "clips.json"
"""File of a piece: the digest of each clip's video, to know which ones changed since."""


class ExtractSettings(Settings):
    """What the stage needs to know; all that decides its numbers is in the facts of the run."""

    features: FeatureSettings = Field(exclude=True)
    device: str = Field("auto", exclude=True)


def backbone_facts(settings: FeatureSettings) -> RunFacts:
    """The run of the frozen network that serves every protocol."""
    sampled = settings.sampling().model_dump(
        include={"step", "count", "crops", "short_side", "crop"}
    )
    rest = settings.model_dump(
        mode="json", include={"strength", "seed", "threads", "batch", "mixed_precision"}
    )
    return RunFacts(
        benchmark="kowl",
        protocol=None,
        model=settings.extractor,
        settings={"sampling": sampled, **rest},
        origin="frozen",
        versions={"model": VERSIONS[settings.extractor], "transforms": TRANSFORMS_VERSION},
        weights={settings.extractor: _weights_digest(settings)},
        fit_key="none",
    )


def _weights_digest(settings: FeatureSettings) -> str:
    if settings.checkpoint is not None:
        return weights_file(settings.checkpoint).digest
    from tasks.features import efficientnet_weights

    return sha256_file(efficientnet_weights.weights_file())


def plan_features(
    root: str,
    validated: Iterable[Piece],
    settings: FeatureSettings,
    facts: RunFacts,
    table: str = VIDEOS.name,
) -> Iterator[Shard]:
    """One shard for each shard of videos with something to use and each transform."""
    weights: tuple[RawFile, ...] = ()
    if settings.checkpoint is not None:
        weights = (weights_file(settings.checkpoint),)
    mark = run_mark(facts, "none")
    for piece in validated:
        part = piece.part(table)
        rows = _usable(part.read(), table)
        if rows.is_empty():
            continue
        clips = content_key(rows.select("sample_id", "sha256").sort("sample_id").rows())
        for transform in settings.transforms:
            yield Shard(
                f"{mark.run_id}/{piece.shard}/{transform}",
                files=weights,
                parts=(part,),
                source=root,
                about={"facts": facts.model_dump(mode="json"), "view": transform},
                depends={"run": mark.run_id, "clips": clips},
                run=mark,
            )


@stage(writes=(OUTPUTS,), version=1, tags=("gpu",), alone=True, reuses=True)
def extract_features(shard: Shard, settings: ExtractSettings) -> Produced:
    """Run the network over the clips of one shard under one transform."""
    use_threads(settings.features.threads)
    (part,) = shard.parts
    videos = _usable(part.read(), part.table)
    files = [RawFile(*row) for row in videos.select("file", "bytes", "sha256").rows()]
    work = partial(_extracted, shard, settings, videos)
    return read_unchanged(shard.source, files, work, fault=Produced.unreadable)


def _extracted(shard: Shard, settings: ExtractSettings, videos: pl.DataFrame) -> Produced:
    features, view = settings.features, shard.about["view"]
    facts = RunFacts.model_validate(shard.about["facts"])
    digests = dict(videos.select("sample_id", "sha256").iter_rows())
    alone = features.extractor in ALIKE_IN_ANY_BATCH or features.batch == 1
    before = _extracted_before(shard, digests, alone)
    left = videos.join(before, on="sample_id", how="anti", maintain_order="left")
    ids: list[str] = []
    vectors: list[np.ndarray] = []
    rejects: list[Reject] = []

    def good() -> Iterator[tuple[str, np.ndarray]]:
        for sample_id, frames in sample_videos(shard.source or "", left, features.sampling()):
            if isinstance(frames, RecordError):
                rejects.append(Reject.of(f"{sample_id}, {view}", frames))
            else:
                yield sample_id, _transformed(frames, view, sample_id, features)

    if left.height:
        embed = _EXTRACTORS[features.extractor](features, settings.device)
        clips = good()
        with progress(f"{features.extractor} {shard.name}", left.height) as advance:
            while batch := list(islice(clips, features.batch)):
                ids += [sample_id for sample_id, _ in batch]
                vectors.append(embed(np.stack([frames for _, frames in batch])))
                advance(len(batch))
    rows = [before.select(OUTPUTS.polars_schema.names())]
    if ids:
        made = pl.DataFrame({"sample_id": ids, "features": np.concatenate(vectors)})
        rows.append(
            OUTPUTS.conform(
                made.select(
                    pl.lit(run_id(facts)).alias("run_id"),
                    "sample_id",
                    pl.lit(view).alias("view"),
                    pl.lit(None, pl.List(pl.Float32)).alias("logits"),
                    pl.col("features").arr.to_list(),
                    pl.lit(None, pl.Float64).alias("novelty"),
                    pl.lit(None, pl.String).alias("predicted"),
                )
            )
        )
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


# ---------------------------------------------------------------- the networks


def _efficientnet(settings: FeatureSettings, device: str) -> Embed:
    from tasks.features.efficientnet import embed, load_efficientnet

    network = load_efficientnet(device)

    def mean_of_frames(clips: np.ndarray) -> np.ndarray:
        frames = clips.reshape(-1, *clips.shape[-3:])
        vectors = embed(frames, network=network, device=device)
        return vectors.reshape(len(clips), -1, vectors.shape[1]).mean(1)

    return mean_of_frames


def _x3d(settings: FeatureSettings, device: str) -> Embed:
    from tasks.features.clips import embed
    from tasks.features.x3d import load_x3d

    network = load_x3d(settings.checkpoint)

    def crops_side_by_side(clips: np.ndarray) -> np.ndarray:
        crops = clips.reshape(-1, *clips.shape[2:])
        vectors = embed(network, crops, device, settings.batch, settings.mixed_precision)
        return vectors.reshape(len(clips), -1)

    return crops_side_by_side


def _timesformer(settings: FeatureSettings, device: str) -> Embed:
    from tasks.features.clips import embed
    from tasks.features.timesformer import load_timesformer

    sampling = settings.sampling()
    network = load_timesformer(settings.checkpoint, sampling.count)

    def class_token(clips: np.ndarray) -> np.ndarray:
        return embed(network, clips[:, 0], device, settings.batch, settings.mixed_precision)

    return class_token


_EXTRACTORS: dict[str, Callable[[FeatureSettings, str], Embed]] = {
    "efficientnet": _efficientnet,
    "x3d": _x3d,
    "timesformer": _timesformer,
}
