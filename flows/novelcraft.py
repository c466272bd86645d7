"""NovelCraft: read episodes, render masks, label frames, split, cut windows, train and score."""

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.novelcraft import Config, DetectorChoice
from storage.layout import lake_root
from storage.pieces import Piece
from tasks.detection import (
    chosen_detectors,
    evaluate_scores,
    plan_evaluation,
    plan_scoring,
    plan_training,
    score_detector,
    train_detector,
    waves,
)
from tasks.novelcraft.calibrate import calibrate_camera, plan_camera_search
from tasks.novelcraft.discover import (
    discover_categories,
    discovery_settings,
    plan_discovery,
)
from tasks.novelcraft.ingest import (
    ARCHIVE_LIMITS,
    folder_of_classes,
    ingest_episodes,
    plan_episode_shards,
)
from tasks.novelcraft.label import (
    compare_targets,
    plan_drift,
    plan_label_shards,
    plan_official_targets,
    read_official_targets,
    render_targets,
)
from tasks.novelcraft.samples import (
    EVALUATION,
    LOADER,
    data_of,
    options_of,
    train_settings,
    weights_of,
)
from tasks.novelcraft.splits import split_frames
from tasks.novelcraft.windows import cut_all_windows, plan_window_scores, score_windows
from tasks.stage import Build, Shard


@benchmark_flow
def build(config: Config) -> None:
    """Episodes to masks to targets to splits to windows (NovelCraft sections 3 to 5)."""
    lake = lake_root(config.lake)
    detectors = chosen_detectors(config.detectors.names)
    with Build("novelcraft", lake, config, config.max_reject_share) as build:
        inside = folder_of_classes(config.source)
        source = build.source(config.source, inside=inside, limits=ARCHIVE_LIMITS)
        episodes = plan_episode_shards(source)
        ingested = build.run(ingest_episodes, episodes, config.ingest)

        if config.targets_csv:
            official = plan_official_targets(config.targets_csv, build.table("frames"))
            build.run(read_official_targets, official, Settings())
        else:
            build.run(render_targets, plan_label_shards(ingested), config.render)

        if config.compare_targets:
            compared = plan_drift(config.compare_targets, build.table("targets"))
            build.run(compare_targets, compared, config.splits)

        labelled = Shard("all", parts=build.table("frames") + build.table("targets"))
        build.run(split_frames, [labelled], config.splits)

        split = Shard("all", parts=build.table("frames") + build.table("splits"))
        build.run(cut_all_windows, [split], config.windows)

        if config.camera_states and config.camera_masks:
            frames = plan_camera_search(config.camera_states, config.camera_masks)
            build.run(calibrate_camera, frames, config.camera)

        if config.detectors.discovery:
            pictures = build.table("splits") + build.table("images")
            shards = plan_discovery(pictures, config.detectors.dino_weights)
            build.run(discover_categories, shards, discovery_settings(config.detectors))

        if detectors:
            detect(build, detectors, config.detectors)
    publish_report(lake, "novelcraft")


def detect(build: Build, names: list[str], choice: DetectorChoice) -> None:
    """Train, score and evaluate the chosen detectors (NovelCraft section 5)."""
    how = train_settings(choice)
    trained: list[Piece] = []
    scored: list[Piece] = []
    for wave in waves(names):
        data, options, weights = data_of(build), options_of(choice), weights_of(choice)
        shards = plan_training(wave, LOADER, data, trained, options, weights)
        fitted = build.run(train_detector, shards, how)
        trained += fitted
        scored += build.run(score_detector, plan_scoring(shards, fitted), how)
    windows = plan_window_scores(scored, build.table("frames") + build.table("windows"))
    scored += build.run(score_windows, windows, Settings())
    build.run(evaluate_scores, plan_evaluation(scored), EVALUATION)
