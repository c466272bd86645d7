"""Semantic anomalies: image sets to pictures, hold-out-class trials, baseline and networks."""

import sys

from flows.runner import benchmark_flow, publish_report
from schemas.semantic import Config, DetectionChoice
from storage.layout import lake_root
from storage.pieces import Piece
from tasks.detection import evaluate_scores, plan_evaluation
from tasks.raw_files import ARCHIVE_LIMITS
from tasks.semantic.baseline import evaluation, plan_baseline, score_baseline
from tasks.semantic.detection import (
    AverageSettings,
    average_evaluations,
    pass_pictures,
    score_choice,
    score_outputs,
    train_network,
    training_choice,
)
from tasks.semantic.detection_plan import (
    check_choice,
    chosen_tasks,
    chosen_trials,
    plan_averages,
    plan_networks,
    plan_outputs,
    plan_scores,
    trainable,
)
from tasks.semantic.ingest import plan_image_shards, read_images
from tasks.semantic.sources import list_images
from tasks.semantic.trials import (
    Subset,
    declared_subsets,
    imagenet_names,
    make_trial,
    plan_trials,
    resolve_subsets,
)
from tasks.stage import Build


@benchmark_flow
def build(config: Config) -> None:
    """Images to pictures, classes to trials, trials to scores (spec semantic 2)."""
    lake = lake_root(config.lake)
    declared = declared_subsets(config.subset_file)
    check_choice(config.detection, config.subsets, declared, config.source)
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

        scored = baseline(build, subsets, config) if config.trivial_baseline else []
        if config.detection.auxiliary:
            scored += detect(build, subsets, config.detection)
        if scored:
            build.run(evaluate_scores, plan_evaluation(scored), evaluation(subsets))
    publish_report(lake, "semantic")


def baseline(build: Build, subsets: list[Subset], config: Config) -> list[Piece]:
    """Scores of the trivial baseline (Appendix D)."""
    parts = build.table("trials"), build.table("pictures")
    shards = plan_baseline(subsets, config.seeds, *parts) if config.seeds else []
    return build.run(score_baseline, shards, config.gaussian) if shards else []


def detect(build: Build, subsets: list[Subset], choice: DetectionChoice) -> list[Piece]:
    """Train without the held-out member, pass every picture once, score (section 4)."""
    trials = build.read("trials")
    pairs = trainable(chosen_trials(choice, subsets), trials)
    how, scores = training_choice(choice), score_choice(choice, trials)
    parts = build.table("trials"), build.table("pictures")
    shards = plan_networks(chosen_tasks(choice), choice, pairs, *parts)
    trained = build.run(train_network, shards, how)
    build.run(average_evaluations, plan_averages(shards, trained), AverageSettings())
    passes = plan_outputs(shards, trained)
    passed = build.run(pass_pictures, passes, how)
    return build.run(score_outputs, plan_scores(passes, passed), scores)
