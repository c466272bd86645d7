"""Semantic anomalies: image sets to pictures, hold-out-class trials, baseline and networks."""

import sys

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.semantic import Config
from storage.layout import lake_root
from storage.pieces import Piece
from tasks.engine.stage import Build, Shard, Stage
from tasks.evaluation.protocols import key_protocols, protocol_keys
from tasks.evaluation.stages import (
    HEAD,
    EvaluationSettings,
    PassedRun,
    chosen_scores,
    describe_scores,
    evaluate_scores,
    plan_evaluation,
    plan_failures,
    plan_score_settings,
    plan_scores,
    record_failure,
    score_outputs,
)
from tasks.ingest.raw_files import ARCHIVE_LIMITS
from tasks.semantic.detection import (
    CONVENTION,
    DeviceSettings,
    average_evaluations,
    fit_gaussian,
    pass_odin,
    pass_pictures,
    train_network,
)
from tasks.semantic.detection_plan import (
    Run,
    all_trials,
    check_choice,
    described_scores,
    plan_averages,
    plan_gaussians,
    plan_networks,
    plan_odin,
)
from tasks.semantic.ingest import plan_image_shards, read_images
from tasks.semantic.sources import list_images
from tasks.semantic.training import MODEL
from tasks.semantic.trials import (
    Subset,
    declared_subsets,
    imagenet_names,
    make_trial,
    plan_keys,
    plan_trials,
    resolve_subsets,
)

CONVENTIONS = (CONVENTION, "openood")


@benchmark_flow
def build(config: Config) -> None:
    """Images to pictures, classes to trials, trials to runs and their scores."""
    lake = lake_root(config.lake)
    declared = declared_subsets(config.subset_file)
    check_choice(config, declared)
    names = imagenet_names(declared)
    wanted = {*names, *names.values()} if config.imagenet_classes == "members" else None
    with Build("semantic", lake, config, config.max_reject_share) as build:
        listings = []
        for name, path in config.source.items():
            source = build.source(path, limits=ARCHIVE_LIMITS)
            found = list_images(name, source, wanted=wanted, class_names=names)
            for count, what in (
                (found.left_out, "images of classes in no subset"),
                (found.unlabelled, "test images without labels"),
            ):
                if count:
                    print(f"  {name}: {count:,} {what}", file=sys.stderr)
            listings.append(found)
        build.run(read_images, plan_image_shards(listings), config.pictures)

        subsets = resolve_subsets(declared, build.read("images"), config.subsets)
        build.run(make_trial, plan_trials(subsets, build.table("images")), config.trials)
        parts = build.table("splits"), build.table("samples")
        build.run(key_protocols, plan_keys(subsets, config.trials, *parts), Settings())
        build.publish()
        passed = make_runs(build, subsets, config)
        evaluate(build, passed, config)
    publish_report(lake, "semantic")


def make_runs(build: Build, subsets: list[Subset], config: Config) -> list[PassedRun]:
    """The baseline, networks trained without the held-out member, and ODIN of these."""
    splits = build.read("splits")
    trials = all_trials(build, subsets, protocol_keys(build))
    networks = plan_networks(config, trials, splits)
    gaussians = plan_gaussians(config, trials, splits)
    odins = plan_odin(config, networks)
    device = DeviceSettings(device=config.device)
    passed: list[PassedRun] = []
    if gaussians:
        shards = [run.pass_shard() for run in gaussians]
        fitted = run_each(build, fit_gaussian, gaussians, shards, Settings())
        passed += [run.passed(piece) for run, piece in fitted]
    if networks:
        shards = [run.shard() for run in networks]
        done = run_each(build, train_network, networks, shards, device)
        trained = {run.mark.run_id: piece for run, piece in done}
        networks = [run for run, _ in done]
        odins = [run for run in odins if run.facts.base_runs[0] in trained]
        for stage, runs in ((pass_pictures, networks), (pass_odin, odins)):
            bases = [trained[(*run.facts.base_runs, run.mark.run_id)[0]] for run in runs]
            shards = [
                run.pass_shard(base.file(MODEL)) for run, base in zip(runs, bases, strict=True)
            ]
            for run, piece in run_each(build, stage, runs, shards, device):
                fit = trained.get(run.mark.run_id)
                passed.append(run.passed(piece, fit.file(HEAD) if fit is not None else None))
        build.run(average_evaluations, plan_averages(networks, odins, trained), Settings())
    if build.failures:
        build.run(record_failure, plan_failures(build.failures), Settings())
    return passed


def run_each(
    build: Build, stage: Stage, runs: list[Run], shards: list[Shard], settings: Settings
) -> list[tuple[Run, Piece]]:
    """Runs whose shards were made; one that fails is noted and stops no other."""
    named = {run.mark.run_id: run for run in runs}
    return [(named[shard.name], piece) for shard, piece in build.run_each(stage, shards, settings)]


def evaluate(build: Build, passed: list[PassedRun], config: Config) -> None:
    """Scores of all runs, then their metrics by the paper's convention and the common one."""
    if not passed:
        return
    choices = chosen_scores(config.scores, config.preset)
    described = {choice.score_id: choice for choice in [*choices, *described_scores()]}
    build.run(describe_scores, plan_score_settings(list(described.values())), Settings())
    shards = plan_scores(passed, choices, config.scores)
    scored = build.run(score_outputs, shards, Settings())
    build.run(evaluate_scores, plan_evaluation(passed, scored, CONVENTIONS), EvaluationSettings())
