"""Feature vectors of clips: sample frames, transform them if asked for, run a network.

Enters: rows of `videos` and `unlisted_videos` that can be used, and their files. Leaves:
`features_<extractor>`, one row per clip and visual transform. Frames, crops and normalisation
follow KOWL-718 (spec kowl, "Predictors"): X3D-M takes four temporal crops of 16 frames, TimeSformer
8 frames 32 apart; EfficientNet, whose ImageNet weights come with its package, the mean over single
frames.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import polars as pl

from schemas.errors import RecordError
from schemas.kowl import (
    PLAIN,
    UNLISTED_VIDEOS,
    USABLE,
    VIDEOS,
    FeatureSettings,
    features_table,
)
from storage.pieces import Part, Piece
from storage.raw import RawFile
from storage.unchanged import read_unchanged
from tasks.detection import use_threads, weights_file
from tasks.kowl.videos import UNLISTED, sample_videos
from tasks.progress import progress
from tasks.stage import Produced, Reject, Shard, stage

Embed = Callable[[np.ndarray], np.ndarray]
"""Clips (N, crops, count, H, W, 3) uint8 to vectors (N, D) float32."""


def plan_features(
    root: str, validated: Iterable[Piece], settings: FeatureSettings, table: str = VIDEOS.name
) -> Iterator[Shard]:
    """One shard for each shard of videos with something to use and each transform.

    The videos' own digests are in the table; those of a checkpoint file are added here.
    """
    weights = (weights_file(settings.checkpoint),) if settings.checkpoint else ()
    for piece in validated:
        part = piece.part(table)
        if part.read(["status"])["status"].is_in(USABLE).any():
            for transform in settings.transforms:
                yield Shard(
                    f"{piece.shard}/{transform}",
                    files=weights,
                    parts=(part,),
                    source=root,
                    about={"transform": transform},
                )


@stage(
    writes=lambda settings: (features_table(settings.extractor),),
    version=1,
    tags=("gpu",),
    alone=True,
)
def extract_features(shard: Shard, settings: FeatureSettings) -> Produced:
    """Run the network over the clips of one shard under one transform."""
    use_threads(settings.threads)
    videos = _usable(shard)
    files = [RawFile(*row) for row in videos.select("file", "bytes", "sha256").rows()]
    work = partial(_extracted, shard, settings, videos)
    return read_unchanged(shard.source, files, work, fault=Produced.unreadable)


def _extracted(shard: Shard, settings: FeatureSettings, videos: pl.DataFrame) -> Produced:
    transform = shard.about["transform"]
    embed = _EXTRACTORS[settings.extractor](settings)
    ids: list[str] = []
    vectors: list[np.ndarray] = []
    rejects: list[Reject] = []

    def good() -> Iterator[tuple[str, np.ndarray]]:
        for sample_id, frames in sample_videos(shard.source or "", videos, settings.sampling()):
            if isinstance(frames, RecordError):
                rejects.append(Reject.of(f"{sample_id}, {transform}", frames))
            else:
                yield sample_id, _transformed(frames, transform, sample_id, settings)

    clips = good()
    with progress(f"{settings.extractor} {shard.name}", videos.height) as advance:
        while batch := list(islice(clips, settings.batch)):
            ids += [sample_id for sample_id, _ in batch]
            vectors.append(embed(np.stack([frames for _, frames in batch])))
            advance(len(batch))
    table = features_table(settings.extractor)
    rows = table.empty()
    if ids:
        rows = pl.DataFrame(
            {"sample_id": ids, "transform": transform, "embedding": np.concatenate(vectors)},
            schema=table.polars_schema,
        )
    return Produced({table.name: rows}, len(ids) + len(rejects), rejects)


def _usable(shard: Shard) -> pl.DataFrame:
    table = shard.parts[0].table
    rows = shard.read(table).filter(pl.col("status").is_in(USABLE))
    return rows.with_columns(sample_id="file") if table == UNLISTED_VIDEOS.name else rows


def of_clips(features: Iterable[Part]) -> tuple[Part, ...]:
    """Without the features of unlisted videos, on which nothing is evaluated."""
    return tuple(part for part in features if not part.shard.startswith(UNLISTED))


def _transformed(
    frames: np.ndarray, transform: str, sample_id: str, settings: FeatureSettings
) -> np.ndarray:
    """The release transforms whole pictures and crops them later; here the crops are changed."""
    if transform == PLAIN:
        return frames
    from tasks.kowl.transforms import transform_clip

    return transform_clip(frames, transform, settings.strength, settings.seed, sample_id)


# ---------------------------------------------------------------- the networks


def _efficientnet(settings: FeatureSettings) -> Embed:
    from tasks.features.efficientnet import embed, load_efficientnet

    network = load_efficientnet(settings.device)

    def mean_of_frames(clips: np.ndarray) -> np.ndarray:
        frames = clips.reshape(-1, *clips.shape[-3:])
        vectors = embed(frames, network=network, device=settings.device)
        return vectors.reshape(len(clips), -1, vectors.shape[1]).mean(1)

    return mean_of_frames


def _x3d(settings: FeatureSettings) -> Embed:
    from tasks.features.clips import embed
    from tasks.features.x3d import load_x3d

    network = load_x3d(settings.checkpoint)

    def crops_side_by_side(clips: np.ndarray) -> np.ndarray:
        crops = clips.reshape(-1, *clips.shape[2:])
        vectors = embed(network, crops, settings.device, settings.batch, settings.mixed_precision)
        return vectors.reshape(len(clips), -1)

    return crops_side_by_side


def _timesformer(settings: FeatureSettings) -> Embed:
    from tasks.features.clips import embed
    from tasks.features.timesformer import load_timesformer

    sampling = settings.sampling()
    network = load_timesformer(settings.checkpoint, sampling.count)

    def class_token(clips: np.ndarray) -> np.ndarray:
        return embed(
            network, clips[:, 0], settings.device, settings.batch, settings.mixed_precision
        )

    return class_token


_EXTRACTORS: dict[str, Callable[[FeatureSettings], Embed]] = {
    "efficientnet": _efficientnet,
    "x3d": _x3d,
    "timesformer": _timesformer,
}
