"""Toy: points to splits to runs."""

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.toy import Config
from storage.layout import lake_root
from tasks.engine.stage import Build, Shard
from tasks.evaluation.model_runs import Offer, make_runs, plan_facts, plan_models
from tasks.evaluation.protocols import key_protocols, plan_protocols, protocol_keys
from tasks.evaluation.stages import chosen_scores, measure_runs
from tasks.toy.points import read_points, split_points


@benchmark_flow
def build(config: Config) -> None:
    """Points, their protocol, models on it."""
    models = plan_models("toy", config, [Offer("plane", "features")])
    scores = chosen_scores(config.scores, config.preset)
    lake = lake_root(config.lake)
    with Build("toy", lake, config, config.max_reject_share) as build:
        source = build.source(config.source)
        shard = Shard("points", files=tuple(source.files()), source=source.root)
        build.run(read_points, [shard], Settings())
        split = Shard("plane", shard.files, build.table("points"), source.root)
        build.run(split_points, [split], Settings())
        keyed = plan_protocols(build.table("splits"), build.table("samples"))
        build.run(key_protocols, keyed, Settings())
        build.publish()
        planned = plan_facts("toy", config, models, protocol_keys(build))
        parts = build.table("splits") + build.table("points")
        runs = make_runs(build, planned, lambda run: parts, config)
        measure_runs(build, runs, scores, lambda protocol: ("openood",), selection=config.scores)
    publish_report(lake, "toy")
