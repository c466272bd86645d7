"""One decode for each clip: groups of shards are validated, and passed while frames are kept."""

from functools import partial

from schemas.kowl import Config
from storage.pieces import Piece
from tasks.engine.stage import Build, Shard
from tasks.evaluation.model_runs import ModelRun
from tasks.evaluation.passing import DeviceSettings
from tasks.evaluation.runs import run_mark
from tasks.evaluation.stages import PassedRun
from tasks.kowl.buffer import Keeping, in_groups, remove_frames
from tasks.kowl.features import (
    backbone_facts,
    extract_features,
    plan_features,
    sampling_rules,
    views_so_far,
)
from tasks.kowl.videos import validate_unlisted, validate_videos


def decode_in_groups(
    build: Build,
    config: Config,
    backbones: list[ModelRun],
    listed: list[Shard],
    unlisted: list[Shard],
    root: str,
) -> Keeping:
    """Validate groups of shards and make their features, so that each clip is decoded once.

    The frames of a group fit into the buffer. The last group is left to the caller, with how it is
    validated; most builds have no other.
    """
    rules = sampling_rules(backbones)
    limit = int(config.validation.buffer * 1e9) if rules else 0
    plain = Keeping(**dict(config.validation))
    if build.dry is not None or not limit:
        return plain
    missing = build.missing(validate_videos, listed, plain)
    groups = in_groups(missing, rules, limit, build.at_once())

    def keeping(shards: list[Shard]) -> Keeping:
        files = sum(len(shard.files) for shard in shards)
        return plain.model_copy(update={"rules": rules, "kept_bytes": limit // max(1, files)})

    for group in groups[:-1]:
        how = keeping(group)
        videos = {"videos": build.run(validate_videos, group, how), "unlisted_videos": []}
        for run in backbones:
            pass_clips(build, config, run, root, videos)
        remove_frames(build.lake)
    return keeping(groups[-1] + build.missing(validate_unlisted, unlisted, plain))


def pass_clips(
    build: Build, config: Config, run: ModelRun, root: str, videos: dict[str, list[Piece]]
) -> PassedRun:
    """Features of all usable videos, by the table that they stand in, by one frozen model."""
    facts, how = backbone_facts(run), DeviceSettings.of(config)
    views = views_so_far(build, config.features.transforms, how)
    planned = partial(plan_features, root, views=views, run=run, facts=facts)
    clips = build.table("clips")
    shards = [*planned(videos["videos"], clips=clips), *planned(videos["unlisted_videos"])]
    made = build.run(extract_features, shards, how)
    outputs = tuple(piece.part("outputs") for piece in made)
    return PassedRun(facts, run_mark(facts, "none"), outputs, ())
