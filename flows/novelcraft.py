"""NovelCraft: read episodes, render masks, label frames, split, cut windows, train and score."""

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.novelcraft import Config
from storage.layout import lake_root
from tasks.engine.stage import Build, Shard
from tasks.evaluation.model_runs import ModelRun, make_runs, plan_facts
from tasks.evaluation.passing import DeviceSettings
from tasks.evaluation.protocols import key_protocols, plan_protocols, protocol_keys
from tasks.evaluation.stages import PassedRun, check_scores, chosen_scores, measure_runs
from tasks.novelcraft.calibrate import calibrate_camera, plan_camera_search
from tasks.novelcraft.discover import discover_categories, discovery_settings, plan_discovery
from tasks.novelcraft.ingest import (
    ARCHIVE_LIMITS,
    folder_of_classes,
    ingest_episodes,
    plan_episode_shards,
    warn_of_classes,
)
from tasks.novelcraft.label import (
    compare_targets,
    plan_drift,
    plan_label_shards,
    plan_official_targets,
    read_official_targets,
    render_targets,
)
from tasks.novelcraft.mask_checks import check_masks
from tasks.novelcraft.runs import (
    CONVENTIONS,
    chosen_protocols,
    chosen_runs,
    make_window_runs,
    sample_parts,
)
from tasks.novelcraft.splits import protocol_definitions, split_frames
from tasks.novelcraft.windows import cut_all_windows, window_definitions


@benchmark_flow
def build(config: Config) -> None:
    """Episodes to masks to targets to splits to windows to runs (NovelCraft sections 3 to 6)."""
    lake = lake_root(config.lake)
    runs = chosen_runs(config)
    scores = chosen_scores(config.scores, config.preset)
    check_scores(config.scores, {run.kind.name: run.kind.gives for run in runs})
    if config.discovery:
        discovery_settings(config)
    with Build("novelcraft", lake, config, config.max_reject_share) as build:
        inside = folder_of_classes(config.source)
        source = build.source(config.source, inside=inside, limits=ARCHIVE_LIMITS)
        episodes = plan_episode_shards(source)
        warn_of_classes(source, config.splits, labelled=config.targets_csv is not None)
        ingested = build.run(ingest_episodes, episodes, config.ingest)

        if config.targets_csv:
            official = plan_official_targets(config.targets_csv, build.table("frames"))
            build.run(read_official_targets, official, Settings())
        else:
            rendered = build.run(render_targets, plan_label_shards(ingested), config.render)
            check_masks(build, rendered, ingested, config.render, config.checks)

        if config.compare_targets:
            compared = plan_drift(config.compare_targets, build.table("targets"))
            build.run(compare_targets, compared, config.splits)

        labelled = Shard("frames", parts=build.table("frames") + build.table("targets"))
        build.run(split_frames, [labelled], config.splits)

        tables = ("frames", "frame_roles", "samples", "splits")
        split = Shard("windows", parts=tuple(p for name in tables for p in build.table(name)))
        build.run(cut_all_windows, [split], config.windows)

        if config.camera_states and config.camera_masks:
            frames = plan_camera_search(config.camera_states, config.camera_masks)
            build.run(calibrate_camera, frames, config.camera)

        definitions = protocol_definitions(config.splits) | window_definitions(config.windows)
        keyed = plan_protocols(build.table("splits"), build.table("samples"), definitions)
        build.run(key_protocols, keyed, Settings())
        build.publish()

        if config.discovery:
            pictures = build.table("splits") + build.table("images")
            shards = plan_discovery(config, protocol_keys(build), pictures)
            build.run(discover_categories, shards, DeviceSettings.of(config))
        if runs:
            passed = passed_runs(build, runs, config)
            measure_runs(build, passed, scores, CONVENTIONS.__getitem__)
    publish_report(lake, "novelcraft")


def passed_runs(build: Build, runs: list[ModelRun], config: Config) -> list[PassedRun]:
    """The runs of the chosen protocols, made with what they build on."""
    keys, protocols = protocol_keys(build), chosen_protocols(config)
    planned = plan_facts("novelcraft", config, runs, keys)
    passed = make_runs(build, planned, lambda run: sample_parts(build, run), config)
    passed += make_window_runs(build, passed, keys, protocols)
    return [run for run in passed if run.facts.protocol in protocols]
