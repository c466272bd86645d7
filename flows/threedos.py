"""3DOS: meshes and scans to point clouds, lists to open-set tracks, networks to scores."""

from flows.runner import benchmark_flow, publish_report
from schemas.errors import SourceError
from schemas.threedos import Config, DetectionChoice
from storage.layout import lake_root
from storage.raw import RawSource
from tasks.detection import evaluate_scores, plan_evaluation
from tasks.raw_files import ARCHIVE_LIMITS
from tasks.stage import Build
from tasks.threedos.detection import (
    check_names,
    chosen_methods,
    evaluation,
    pass_clouds,
    plan_networks,
    plan_outputs,
    plan_scores,
    score_choice,
    score_outputs,
    train_network,
    trainable,
    training_choice,
    waves,
)
from tasks.threedos.ingest import plan_shape_shards, sample_shapes
from tasks.threedos.sources import KINDS, list_shapes
from tasks.threedos.splits import plan_members, plan_splits, read_members, split_track
from tasks.threedos.tracks import Track, built_in_tracks, choose_tracks, read_tracks


@benchmark_flow
def build(config: Config) -> None:
    """Shapes to clouds, lists to tracks, networks to scores (3DOS sections 3 and 4)."""
    lake = lake_root(config.lake)
    methods = chosen_methods(config.detection.methods)
    check_names(config.detection)
    with Build("threedos", lake, config, config.max_reject_share) as build:
        sources = {
            name: build.source(path, limits=ARCHIVE_LIMITS) for name, path in config.source.items()
        }
        lists = build.source(config.lists) if config.lists else None
        listed = plan_members(lists, sources, config.listing)
        if listed:
            build.run(read_members, listed, config.listing)

        listings = [shapes_of(build, config, name, source) for name, source in sources.items()]
        if listings:
            build.run(sample_shapes, plan_shape_shards(listings), config.shapes)

        declared = built_in_tracks() + (read_tracks(config.track_file) if config.track_file else ())
        tracks = choose_tracks(config.tracks, declared)
        members = build.table("members") + build.table("shapes")
        build.run(split_track, plan_splits(members, tracks), config.splits)

        if methods:
            detect(build, tracks, methods, config.detection)
    publish_report(lake, "threedos")


def shapes_of(build: Build, config: Config, name: str, source: RawSource):
    """What one source holds; a name that is no kind is a folder of one's own."""
    kind = name if name in KINDS else "folder"
    members = build.read("members") if build.table("members") else None
    return list_shapes(kind, source, config.shapes, name=name, members=members)


def detect(
    build: Build, tracks: tuple[Track, ...], methods: list[str], choice: DetectionChoice
) -> None:
    """Train on known classes, pass every cloud once, score and evaluate (3DOS section 4)."""
    data = {name: build.table(name) for name in ("splits", "shapes", "point_clouds")}
    if not data["point_clouds"]:
        raise SourceError("networks need clouds: name sources of shapes with --source")
    wanted = choose_tracks(choice.tracks, tracks)
    clouds = build.read("shapes")["shape_id"]
    ready = trainable(wanted, build.read("splits"), clouds, choice.tracks)
    how, scores = training_choice(choice), score_choice(choice)
    trained, scored = [], []
    for wave in waves(methods):
        shards = list(plan_networks(wave, choice, ready, data, trained))
        fitted = build.run(train_network, shards, how)
        trained += fitted
        passes = list(plan_outputs(shards, fitted, choice.points))
        passed = build.run(pass_clouds, passes, how)
        scored += build.run(score_outputs, plan_scores(passes, passed), scores)
    build.run(evaluate_scores, plan_evaluation(scored), evaluation(ready))
