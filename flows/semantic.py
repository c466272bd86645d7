"""Semantic anomalies: image sets to pictures, hold-out-class trials, baseline and networks."""

import sys

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.semantic import Config
from storage.layout import lake_root
from tasks.evaluation.protocols import key_protocols, protocol_keys
from tasks.evaluation.stages import (
    HEAD,
    EvaluationSettings,
    PassedRun,
    chosen_scores,
    describe_scores,
    evaluate_scores,
    plan_evaluation,
    plan_score_settings,
    plan_scores,
    score_outputs,
)
from tasks.raw_files import ARCHIVE_LIMITS
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
from tasks.stage import Build

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
        fitted = build.run(fit_gaussian, [run.pass_shard() for run in gaussians], Settings())
        passed += [run.passed(piece) for run, piece in zip(gaussians, fitted, strict=True)]
    if networks:
        trained = build.run(train_network, [run.shard() for run in networks], device)
        files = {
            run.mark.run_id: piece.file(MODEL) for run, piece in zip(networks, trained, strict=True)
        }
        shards = [run.pass_shard(files[run.mark.run_id]) for run in networks]
        pieces = build.run(pass_pictures, shards, device)
        passed += [
            run.passed(piece, fit.file(HEAD))
            for run, piece, fit in zip(networks, pieces, trained, strict=True)
        ]
        if odins:
            passed += pass_over(build, odins, files, device)
        build.run(average_evaluations, plan_averages(networks, odins, trained), Settings())
    return passed


def pass_over(build: Build, odins: list[Run], files: dict, device: DeviceSettings) -> list:
    """ODIN of networks whose files are given by their runs."""
    shards = [run.pass_shard(files[run.facts.base_runs[0]]) for run in odins]
    pieces = build.run(pass_odin, shards, device)
    return [run.passed(piece) for run, piece in zip(odins, pieces, strict=True)]


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
