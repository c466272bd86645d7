"""KOWL-718: Kinetics lists to open-world increments, videos to features, predictors evaluated."""

from functools import partial

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from schemas.kowl import Config
from storage.layout import lake_root
from storage.pieces import Piece
from tasks.engine.plugins import Resolved
from tasks.engine.stage import Build, Shard
from tasks.evaluation.model_runs import ModelRun
from tasks.evaluation.passing import DeviceSettings
from tasks.evaluation.protocols import key_protocols, plan_protocols, protocol_keys
from tasks.evaluation.runs import run_mark
from tasks.evaluation.stages import (
    PassedRun,
    check_scores,
    chosen_scores,
    measure_runs,
    plan_records,
    record_run,
)
from tasks.kowl.buffer import Keeping, in_groups, remove_frames
from tasks.kowl.build import (
    cut_increments,
    define_protocol,
    find_releases,
    list_samples,
    plan_increments,
    plan_lists,
    plan_samples,
    plan_unify,
    read_lists,
    unify_releases,
)
from tasks.kowl.evaluation import (
    NO_CLIP,
    RunSettings,
    evaluate_predictor,
    frozen_run,
    group_clips,
    led_runs,
    plan_groups,
    plan_runs,
    predictor_facts,
    protocol_inputs,
)
from tasks.kowl.evaluator import OWN, P_UNKNOWN, PRE
from tasks.kowl.features import (
    backbone_facts,
    extract_features,
    plan_backbones,
    plan_features,
    sampling_rules,
    views_so_far,
)
from tasks.kowl.videos import (
    match_source,
    plan_unlisted_shards,
    plan_video_shards,
    validate_unlisted,
    validate_videos,
)
from tasks.models.base import NOVELTY_ONLY
from tasks.predictors import resolved_predictors

CONVENTIONS = ("openood",)
PHASE = PRE
"""Of scores and their metrics: a clip is scored before its increment's labels are given."""


@benchmark_flow
def build(config: Config) -> None:
    """Lists to one table to increments to features to predictors (KOWL-718 sections 3 to 5)."""
    lake = lake_root(config.lake)
    # Wrong names and settings are said before any work.
    backbones = plan_backbones(config)
    predictors = resolved_predictors(config.predictors, config.preset, config.train)
    chosen_scores(config.scores, config.preset)
    predictor_outputs = dict.fromkeys(predictors, NOVELTY_ONLY)
    model_outputs = {run.kind.name: run.kind.gives for run in backbones}
    check_scores(config.scores, model_outputs | predictor_outputs, foreign_logits=True)
    with Build("kowl", lake, config, config.max_reject_share) as build:
        source = build.source(config.lists)
        releases = find_releases(source, config.releases)
        choice = config.increment_choice()
        protocol, definition = define_protocol(choice, config.unify, releases)
        if config.protocols and config.protocols != (protocol,):
            raise ConfigError(
                f"these settings make the protocol {protocol}, not {', '.join(config.protocols)}"
            )
        lists = plan_lists(source, releases, config.snapshot_date)
        build.run(read_lists, lists, Settings())

        listings = plan_unify(build.table("listings"), releases)
        build.run(unify_releases, listings, config.unify)

        clips = plan_increments(build.table("clips"), releases, protocol)
        build.run(cut_increments, clips, choice)

        if config.videos:
            files = build.source(config.videos)
            matched = match_source(files, build.read("clips"), build.read("listings"))
            listed = plan_video_shards(files, matched)
            unlisted = plan_unlisted_shards(files, matched)
            how = decode_in_groups(build, config, backbones, listed, unlisted, files.root)
            validated = build.run(validate_videos, listed, how)
            others = build.run(validate_unlisted, unlisted, how)
        else:  # what an earlier build found in videos stays
            build.take_over("videos")
            build.take_over("unlisted_videos")
        videos = build.table("videos") + build.table("unlisted_videos")
        build.run(list_samples, plan_samples(build.table("clips"), videos), Settings())
        keyed = plan_protocols(
            build.table("splits"),
            build.table("samples"),
            {protocol: definition},
            with_content=True,
        )
        build.run(key_protocols, keyed, Settings())
        build.publish()

        if backbones:
            videos_of = {"videos": validated, "unlisted_videos": others}
            served = [pass_clips(build, config, run, files.root, videos_of) for run in backbones]
            remove_frames(lake)
            evaluate(build, config, served, predictors, protocol)
    publish_report(lake, "kowl")


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


def evaluate(
    build: Build,
    config: Config,
    served: list[PassedRun],
    predictors: dict[str, Resolved],
    protocol: str,
) -> None:
    """Scores of the features; every predictor at every amount of feedback (KOWL-718 section 5)."""
    keys = protocol_keys(build)[protocol]
    frozen = []
    for run in served:
        outputs, splits = protocol_inputs(run.outputs, build.table("splits"), protocol)
        if outputs:
            samples = build.table("samples")
            frozen.append(frozen_run(run.facts, protocol, keys, outputs, splits, samples, PHASE))
    build.run(record_run, plan_records([*served, *frozen]), Settings())
    if not frozen:
        if predictors:
            raise SourceError(NO_CLIP)
        return
    if config.evaluation.ava and predictors:
        shown = plan_groups(build.source(config.evaluation.ava), build.table("clips"))
        build.run(group_clips, shown, Settings())
    shards, runs = [], list(frozen)
    for run in frozen:
        facts = predictor_facts(config, predictors, run, keys["fit_key"])
        shards += plan_runs(facts, run, build.table("clip_groups"))
        runs += led_runs(facts, run)
    how = RunSettings(
        predicted_ranks=config.evaluation.predicted_ranks,
        device=config.device,
        memory=config.memory,
    )
    led = [piece for _, piece in build.run_each(evaluate_predictor, shards, how)]
    # A predictor gives its own novelty itself; features alone have none.
    scores = {name: changes for name, changes in config.scores.items() if name != OWN.name}
    choices = [one for one in chosen_scores(scores, config.preset) if one.name != OWN.name]
    described = [OWN, P_UNKNOWN] if predictors else []
    measure_runs(
        build,
        runs,
        choices,
        lambda protocol: CONVENTIONS,
        selection=scores,
        scored=led,
        described=described,
    )
