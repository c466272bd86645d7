"""NovelCraft: read episodes, render masks, label frames, split, cut windows, train and score."""

from prefect import flow

from schemas.config import Settings
from schemas.novelcraft import Config
from storage.layout import lake_root
from tasks.novelcraft.ingest import ARCHIVE_LIMITS, ingest_episodes, plan_episode_shards
from tasks.novelcraft.label import (
    plan_label_shards,
    plan_official_targets,
    read_official_targets,
    render_targets,
)
from tasks.novelcraft.splits import split_frames
from tasks.novelcraft.windows import cut_all_windows
from tasks.stage import Build, Shard


@flow(name="novelcraft", flow_run_name="novelcraft", validate_parameters=False)
def build(config: Config) -> None:
    """Episodes to masks to targets to splits to windows (NovelCraft sections 3 to 5)."""
    with Build("novelcraft", lake_root(config.lake), config, config.max_reject_share) as build:
        source = build.source(config.source, limits=ARCHIVE_LIMITS)
        episodes = plan_episode_shards(source)
        ingested = build.run(ingest_episodes, episodes, config.ingest)

        if config.targets_csv:
            official = plan_official_targets(config.targets_csv, build.table("frames"))
            build.run(read_official_targets, official, Settings())
        else:
            build.run(render_targets, plan_label_shards(ingested), config.render)

        labelled = Shard("all", parts=build.table("frames") + build.table("targets"))
        build.run(split_frames, [labelled], config.splits)

        split = Shard("all", parts=build.table("frames") + build.table("splits"))
        build.run(cut_all_windows, [split], config.windows)
