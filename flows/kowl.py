"""KOWL-718: Kinetics lists to open-world increments, videos to features, predictors evaluated."""

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.kowl import Config
from storage.layout import lake_root
from tasks.kowl.build import (
    IncrementChoice,
    cut_increments,
    find_releases,
    plan_increments,
    plan_lists,
    plan_unify,
    read_lists,
    unify_releases,
)
from tasks.kowl.evaluation import (
    evaluate_predictor,
    group_clips,
    plan_groups,
    plan_runs,
    run_settings,
)
from tasks.kowl.features import extract_features, of_clips, plan_features
from tasks.kowl.videos import (
    match_source,
    plan_unlisted_shards,
    plan_video_shards,
    validate_unlisted,
    validate_videos,
)
from tasks.predictors import find_predictor
from tasks.stage import Build


@benchmark_flow
def build(config: Config) -> None:
    """Lists to one table to increments to features to predictors (KOWL-718 sections 3 to 5)."""
    lake = lake_root(config.lake)
    for name in config.evaluation.predictors:
        find_predictor(name)  # a wrong name is said before any work
    with Build("kowl", lake, config, config.max_reject_share) as build:
        source = build.source(config.lists)
        releases = find_releases(source, config.releases)
        lists = plan_lists(source, releases, config.snapshot_date)
        build.run(read_lists, lists, Settings())

        listings = plan_unify(build.table("listings"), releases)
        build.run(unify_releases, listings, config.unify)

        clips = plan_increments(build.table("clips"), releases)
        protocol = IncrementChoice(
            **config.protocol().model_dump(), validate_as_test=config.validate_as_test
        )
        build.run(cut_increments, clips, protocol)

        if config.videos:
            files = build.source(config.videos)
            matched = match_source(files, build.read("clips"), build.read("listings"))
            listed = plan_video_shards(files, matched)
            validated = build.run(validate_videos, listed, config.validation)
            unlisted = plan_unlisted_shards(files, matched)
            others = build.run(validate_unlisted, unlisted, config.validation)
            if config.features.extractor != "none":
                clips = plan_features(files.root, validated, config.features)
                more = plan_features(files.root, others, config.features, "unlisted_videos")
                build.run(extract_features, [*clips, *more], config.features)

        if config.evaluation.predictors:
            evaluate(build, config)
    publish_report(lake, "kowl")


def evaluate(build: Build, config: Config) -> None:
    """Every predictor at every amount of feedback, with the ablations (KOWL-718 section 5)."""
    choice = config.evaluation
    if choice.ava:
        shown = plan_groups(build.source(choice.ava), build.table("increments"))
        build.run(group_clips, shown, Settings())
    runs = plan_runs(
        choice,
        of_clips(build.table(f"features_{config.features.extractor}")),
        build.table("increments"),
        build.table("clip_groups"),
    )
    build.run(evaluate_predictor, runs, run_settings(choice, config.features))
