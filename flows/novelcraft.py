"""NovelCraft: read episodes, render masks, label frames, split, cut windows, train and score."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.novelcraft import Config
from storage.layout import lake_root
from storage.pieces import Piece
from tasks.engine.stage import Build, Shard
from tasks.evaluation.protocols import key_protocols, plan_protocols, protocol_keys
from tasks.evaluation.stages import (
    EvaluationSettings,
    PassedRun,
    ScoreChoice,
    describe_scores,
    evaluate_scores,
    plan_evaluation,
    plan_failures,
    plan_score_settings,
    plan_scores,
    record_failure,
    score_outputs,
)
from tasks.novelcraft.calibrate import calibrate_camera, plan_camera_search
from tasks.novelcraft.detection import (
    DeviceSettings,
    pass_samples,
    pass_windows,
    passed_run,
    plan_passes,
    plan_training,
    plan_window_passes,
    train_model,
    unmade_shard,
)
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
from tasks.novelcraft.runs import (
    CONVENTIONS,
    ModelChoice,
    PlannedRun,
    chosen_models,
    chosen_protocols,
    fitting_scores,
    plan_runs,
    plan_window_runs,
)
from tasks.novelcraft.splits import protocol_definitions, split_frames
from tasks.novelcraft.windows import PROTOCOL as WINDOWS_PROTOCOL
from tasks.novelcraft.windows import cut_all_windows, window_definition


@benchmark_flow
def build(config: Config) -> None:
    """Episodes to masks to targets to splits to windows to runs (NovelCraft sections 3 to 6)."""
    lake = lake_root(config.lake)
    models = chosen_models(config)
    scores = fitting_scores(config, models)
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
            build.run(render_targets, plan_label_shards(ingested), config.render)

        if config.compare_targets:
            compared = plan_drift(config.compare_targets, build.table("targets"))
            build.run(compare_targets, compared, config.splits)

        labelled = Shard("frames", parts=build.table("frames") + build.table("targets"))
        build.run(split_frames, [labelled], config.splits)

        tables = ("frames", "frame_roles", "samples")
        split = Shard("windows", parts=tuple(p for name in tables for p in build.table(name)))
        build.run(cut_all_windows, [split], config.windows)

        if config.camera_states and config.camera_masks:
            frames = plan_camera_search(config.camera_states, config.camera_masks)
            build.run(calibrate_camera, frames, config.camera)

        definitions = protocol_definitions(config.splits) | window_definition(config.windows)
        keyed = plan_protocols(build.table("splits"), build.table("samples"), definitions)
        build.run(key_protocols, keyed, Settings())
        build.publish()

        if config.discovery:
            pictures = build.table("splits") + build.table("images")
            shards = plan_discovery(config, protocol_keys(build), pictures)
            build.run(discover_categories, shards, DeviceSettings(device=config.device))
        if models:
            runs = make_runs(build, models, config)
            measure(build, runs, scores, config)
    publish_report(lake, "novelcraft")


def make_runs(build: Build, models: list[ModelChoice], config: Config) -> list[PassedRun]:
    """Train the models and pass their samples, what one builds on before it; all passed runs."""
    keys, how = protocol_keys(build), DeviceSettings(device=config.device)
    planned = plan_runs(models, config.seeds, keys)
    fitted: dict[str, Piece] = {}
    passed: dict[str, Piece] = {}
    for _, wave in groupby(planned, key=lambda run: run.choice.level):
        runs = [run for run in wave if stands_on(build, run, passed)]
        shards = plan_training(build, runs, fitted, passed)
        trained = build.run_each(train_model, shards, how)
        fitted |= pieces_by_run(trained)
        passed |= pieces_by_run(build.run_each(pass_samples, plan_passes(trained), how))
    windows: list[PlannedRun] = []
    if WINDOWS_PROTOCOL in chosen_protocols(config):
        windows = [run for run in plan_window_runs(planned, keys) if stands_on(build, run, passed)]
    shards = plan_window_passes(build, windows, passed)
    passed |= pieces_by_run(build.run_each(pass_windows, shards, Settings()))
    build.run(record_failure, plan_failures(build.failures), Settings())
    return [
        passed_run(build, run, passed[run.mark.run_id], fitted.get(run.mark.run_id))
        for run in (*planned, *windows)
        if run.mark.run_id in passed
    ]


def stands_on(build: Build, run: PlannedRun, passed: Mapping[str, Piece]) -> bool:
    """Whether all that a run builds on is there; if not, the run has failed with it."""
    lost = [base.name for base in run.bases if base.mark.run_id not in passed]
    if lost and build.dry is None:
        build.failures.append((unmade_shard(run), f"it builds on {', '.join(lost)}, which failed"))
    return not lost


def pieces_by_run(made: Sequence[tuple[Shard, Piece]]) -> dict[str, Piece]:
    return {shard.run.run_id: piece for shard, piece in made if shard.run is not None}


def measure(build: Build, runs: list[PassedRun], scores: list[ScoreChoice], config: Config) -> None:
    """Scores and metrics of the runs of the chosen protocols."""
    wanted = [run for run in runs if run.facts.protocol in chosen_protocols(config)]
    build.run(describe_scores, plan_score_settings(scores), Settings())
    scored = build.run(score_outputs, plan_scores(wanted, scores), Settings())
    shards = []
    for protocol, conventions in CONVENTIONS.items():
        those = [run for run in wanted if run.facts.protocol == protocol]
        ids = {run.mark.run_id for run in those}
        pieces = [p for p in scored if p.manifest.run and p.manifest.run.run_id in ids]
        shards += plan_evaluation(those, pieces, conventions)
    build.run(evaluate_scores, shards, EvaluationSettings())
