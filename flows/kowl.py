"""KOWL-718: read the Kinetics lists, unify them, cut them into open-world increments."""

from prefect import flow

from flows.runner import publish_report
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
from tasks.kowl.videos import plan_video_shards, validate_videos
from tasks.stage import Build


@flow(name="kowl", flow_run_name="kowl", validate_parameters=False)
def build(config: Config) -> None:
    """Lists to one table to increments (KOWL-718 sections 3 and 4)."""
    lake = lake_root(config.lake)
    with Build("kowl", lake, config, config.max_reject_share) as build:
        source = build.source(config.lists)
        releases = find_releases(source, config.releases)
        build.run(read_lists, plan_lists(source, releases), Settings())

        listings = plan_unify(build.table("listings"), releases)
        build.run(unify_releases, listings, config.unify)

        clips = plan_increments(build.table("clips"), releases)
        protocol = IncrementChoice(
            **config.protocol().model_dump(), validate_as_test=config.validate_as_test
        )
        build.run(cut_increments, clips, protocol)

        if config.videos:
            files = build.source(config.videos)
            videos = plan_video_shards(files, build.read("clips"), build.read("listings"))
            build.run(validate_videos, videos, config.validation)
    publish_report(lake, "kowl")
