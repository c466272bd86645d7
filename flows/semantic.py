"""Semantic anomalies: image sets to pictures, hold-out-class trials, baseline and networks."""

import logging

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.semantic import Config
from storage.layout import lake_root
from tasks.engine.stage import Build
from tasks.evaluation.model_runs import make_runs, plan_facts, plan_models
from tasks.evaluation.passing import DeviceSettings
from tasks.evaluation.protocols import key_protocols, protocol_keys
from tasks.evaluation.stages import chosen_scores, measure_runs
from tasks.ingest.raw_files import ARCHIVE_LIMITS
from tasks.semantic.ingest import plan_image_shards, read_images
from tasks.semantic.last_epochs import CONVENTION, described_scores, measure_epochs, plan_epochs
from tasks.semantic.offers import (
    BENCHMARK,
    all_trials,
    check_choice,
    offers_of,
    with_own_models,
)
from tasks.semantic.sources import list_images
from tasks.semantic.trials import (
    Subset,
    declared_subsets,
    imagenet_names,
    make_trial,
    plan_keys,
    plan_trials,
    resolve_subsets,
)

log = logging.getLogger(__name__)

CONVENTIONS = (CONVENTION, "openood")


@benchmark_flow
def build(config: Config) -> None:
    """Images to pictures, classes to trials, trials to runs and their scores."""
    lake = lake_root(config.lake)
    declared = declared_subsets(config.subset_file)
    check_choice(config, declared)
    names = imagenet_names(declared)
    classes = {*names, *names.values()} if config.imagenet_classes == "members" else None
    if "imagenet" in config.novel:
        classes = None
    with Build(BENCHMARK, lake, config, config.max_reject_share) as build:
        listings = []
        for name, path in config.source.items():
            source = build.source(path, limits=ARCHIVE_LIMITS)
            listing = list_images(name, source, classes=classes, class_names=names)
            for count, what in (
                (listing.left_out, "images of classes in no subset"),
                (listing.unlabelled, "test images without labels"),
            ):
                if count:
                    log.info(f"  {name}: {count:,} {what}")
            listings.append(listing)
        build.run(read_images, plan_image_shards(listings, config.novel), config.pictures)

        subsets = resolve_subsets(
            declared, build.read("images"), config.subsets, config.known, config.novel
        )
        build.run(make_trial, plan_trials(subsets, build.table("images")), config.trials)
        parts = build.table("splits"), build.table("samples")
        build.run(key_protocols, plan_keys(subsets, config.trials, *parts), Settings())
        build.publish()
        run_models(build, subsets, with_own_models(config))
    publish_report(lake, BENCHMARK)


def run_models(build: Build, subsets: list[Subset], config: Config) -> None:
    """The baseline, networks trained without the held-out member, models over these; scores."""
    if not config.models:
        return
    trials = all_trials(build, subsets, config.known_side)
    parts = {trial.protocol: trial.parts for trial in trials}
    models = plan_models(BENCHMARK, config, offers_of(config, trials, build.read("splits")))
    planned = plan_facts(BENCHMARK, config, models, protocol_keys(build))
    passed = make_runs(build, planned, lambda run: parts[run.run.offer.protocol], config)
    if not passed:
        return
    shards = plan_epochs(build, planned, parts)
    build.run_each(measure_epochs, shards, DeviceSettings.of(config))
    scores = chosen_scores(config.scores, config.preset)
    measure_runs(
        build,
        passed,
        scores,
        lambda _: CONVENTIONS,
        selection=config.scores,
        described=described_scores(),
    )
